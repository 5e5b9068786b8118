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
)

// btrfsDir is where the kernel lists the mounted btrfs filesystems.
const btrfsDir = "/sys/fs/btrfs"

// The ioctls of include/uapi/linux/btrfs.h.
const (
	btrfsDevInfo = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsFSInfo  = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
)

// errNoBtrfsDevice reports that a mounted btrfs has lost its device.
var errNoBtrfsDevice = errors.New("the filesystem's device is gone")

// BtrfsMember is the one device of a mounted btrfs.
type BtrfsMember struct {
	ID        uint64 // the number that the filesystem gives to the device
	SizeBytes int64
	path      string // of the device when it was mounted
}

// BtrfsDevice returns the device of the btrfs that the open directory is in.
func BtrfsDevice(root *os.File) (BtrfsMember, error) {
	id, _, err := btrfsInfo(root)
	if err != nil {
		return BtrfsMember{}, err
	}
	var info [4096]byte // devid, uuid[16], bytes_used, total_bytes, …, path at 3072
	binary.NativeEndian.PutUint64(info[:], id)
	if err := blockdev.Ioctl(int(root.Fd()), btrfsDevInfo, unsafe.Pointer(&info)); err != nil {
		return BtrfsMember{}, err
	}
	return BtrfsMember{
		ID:        id,
		SizeBytes: int64(binary.NativeEndian.Uint64(info[32:])),
		path:      unix.ByteSliceToString(info[3072:]),
	}, nil
}

// btrfsInfo returns the UUID of a btrfs and the id of its device. A filesystem with several devices
// is an error, because a volume has one device.
func btrfsInfo(root *os.File) (id uint64, fsid uuid.UUID, err error) {
	var info [1024]byte // max_id, num_devices, fsid[16], …
	if err := blockdev.Ioctl(int(root.Fd()), btrfsFSInfo, unsafe.Pointer(&info)); err != nil {
		return 0, uuid.Nil, err
	}
	if n := binary.NativeEndian.Uint64(info[8:]); n != 1 {
		return 0, uuid.Nil, fmt.Errorf("the filesystem has %d devices, a volume has one", n)
	}
	return binary.NativeEndian.Uint64(info[0:]), uuid.UUID(info[16:32]), nil
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

// btrfsNumber returns the number of the one device of the btrfs that an open directory is in.
func btrfsNumber(root *os.File) (major, minor uint32, err error) {
	_, fsid, err := btrfsInfo(root)
	if err != nil {
		return 0, 0, err
	}
	dir := filepath.Join(btrfsDir, fsid.String(), "devices")
	names, err := blockdev.ReadNames(dir)
	if errors.Is(err, fs.ErrNotExist) { // sysfs does not list the filesystem
		member, err := BtrfsDevice(root)
		if err != nil {
			return 0, 0, err
		}
		return blockdev.NumberAt(member.path)
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
	return blockdev.ParseNumber(b)
}
