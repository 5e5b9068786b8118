package mount

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"github.com/google/uuid"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// btrfsDir is where the kernel lists the mounted btrfs filesystems.
const btrfsDir = "/sys/fs/btrfs"

// The ioctls of include/uapi/linux/btrfs.h.
const (
	btrfsDevInfo = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsFSInfo  = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	btrfsForget  = 0x50009405 // _IOW(0x94, 5, struct btrfs_ioctl_vol_args)
)

// btrfsControl is the number of the kernel's device for what no mounted btrfs is needed for, which
// is BTRFS_MINOR of include/linux/miscdevice.h.
var btrfsControl = int(unix.Mkdev(10, 234))

// errNoBtrfsDevice reports that a mounted btrfs has lost its device.
var errNoBtrfsDevice = errors.New("the filesystem's device is gone")

// ErrBtrfsTwins reports that the kernel names two devices of one mounted btrfs. After a device scan
// it may give to a copy, such as a restored snapshot, the UUID of its origin that is mounted, too.
var ErrBtrfsTwins = errors.New("the kernel names two devices of this btrfs: another filesystem " +
	"with its UUID is mounted; unmount that first")

// ErrBtrfsDevices reports a btrfs of several devices, which is no volume's.
var ErrBtrfsDevices = errors.New("a volume's btrfs has one device, this one has another number")

// BtrfsMember is the one device of a mounted btrfs.
type BtrfsMember struct {
	ID   uint64    // the number that the filesystem gives to the device
	fsid uuid.UUID // the filesystem's UUID, as the kernel says it
	path string    // of the device when it was mounted or scanned last
}

// BtrfsDevice returns the device of the btrfs that the open directory is in. A filesystem with
// several devices is an error, because a volume has one device.
func BtrfsDevice(root *os.File) (BtrfsMember, error) {
	var info [1024]byte // max_id, num_devices, fsid[16], …
	if err := blockdev.Ioctl(int(root.Fd()), btrfsFSInfo, unsafe.Pointer(&info)); err != nil {
		return BtrfsMember{}, err
	}
	if n := binary.NativeEndian.Uint64(info[8:]); n != 1 {
		return BtrfsMember{}, fmt.Errorf("%w: %d", ErrBtrfsDevices, n)
	}
	var device [4096]byte // devid, uuid[16], bytes_used, total_bytes, …, path at 3072
	copy(device[:8], info[:8])
	if err := blockdev.Ioctl(int(root.Fd()), btrfsDevInfo, unsafe.Pointer(&device)); err != nil {
		return BtrfsMember{}, err
	}
	return BtrfsMember{
		ID:   binary.NativeEndian.Uint64(info[:]),
		fsid: uuid.UUID(info[16:32]),
		path: unix.ByteSliceToString(device[3072:]),
	}, nil
}

// btrfsMountNumber returns the number of the device of a btrfs mount. btrfs mounts have device
// numbers of their own, and the mount source is only a name, which another disk may have once the
// device is gone. So the filesystem itself is asked. The name is used only for a mount that cannot
// be opened because another mount hides it or it is in another namespace.
func btrfsMountNumber(m *mountinfo.Info) (major, minor uint32, err error) {
	root, err := openMount(m)
	if err != nil {
		return blockdev.NumberAt(m.Source)
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root)
}

// btrfsNumber returns the number of the one device of the btrfs that an open directory is in. The
// kernel tells it by the filesystem's UUID and by the device's path, of which each may be wrong.
func btrfsNumber(root *os.File) (major, minor uint32, err error) {
	member, err := BtrfsDevice(root)
	if err != nil {
		return 0, 0, err
	}
	pathMajor, pathMinor, pathErr := blockdev.NumberAt(member.path)
	dir := filepath.Join(btrfsDir, member.fsid.String(), "devices")
	names, err := blockdev.ReadNames(dir)
	if errors.Is(err, fs.ErrNotExist) { // sysfs does not list the filesystem
		return pathMajor, pathMinor, pathErr
	}
	if err != nil {
		return 0, 0, err
	}
	if len(names) != 1 {
		return 0, 0, errNoBtrfsDevice
	}
	b, err := os.ReadFile(filepath.Join(dir, names[0], "dev"))
	if errors.Is(err, fs.ErrNotExist) || blockdev.Vanished(err) {
		return 0, 0, errNoBtrfsDevice
	}
	if err != nil {
		return 0, 0, err
	}
	major, minor, err = blockdev.ParseNumber(b)
	if err == nil && pathErr == nil && (major != pathMajor || minor != pathMinor) {
		err = ErrBtrfsTwins
	}
	return major, minor, err
}

// forgetMount lets the kernel forget what a mount that failed, or mkfs, has left: it lists the
// btrfs that it found at a device's number. Once that number is another disk's, Linux 6.18 takes
// the one on it for the listed one, and refuses to mount it. The root directory is a private one,
// in which the control device may be made.
func forgetMount(path, fsType string) error {
	const control = "/btrfs-control"
	if fsType != volume.Btrfs {
		return nil
	}
	err := unix.Mknod(control, unix.S_IFCHR|0o600, btrfsControl)
	ForgetBtrfs(control, path)
	return err
}

// ForgetBtrfs makes the kernel drop what it remembers of a btrfs device, unless it is mounted.
// Otherwise a copy of the volume (a restored snapshot has the same filesystem id) could not be
// mounted while the remembered device is newer. Errors are ignored: without btrfs in the kernel, or
// without a remembered device, there is nothing to drop.
func ForgetBtrfs(control, path string) {
	f, err := os.OpenFile(control, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	var args [4096]byte // fd, name
	copy(args[8:len(args)-1], path)
	_ = blockdev.Ioctl(int(f.Fd()), btrfsForget, unsafe.Pointer(&args))
}
