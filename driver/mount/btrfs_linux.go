package mount

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/google/uuid"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const btrfsDir = "/sys/fs/btrfs"

// Ioctls of include/uapi/linux/btrfs.h.
const (
	btrfsDevInfo = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsFSInfo  = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	btrfsScan    = 0x50009404 // _IOW(0x94, 4, struct btrfs_ioctl_vol_args)
	btrfsForget  = 0x50009405 // _IOW(0x94, 5, struct btrfs_ioctl_vol_args)
)

// btrfsControl is the number of the kernel's control device for btrfs: BTRFS_MINOR of
// include/linux/miscdevice.h.
var btrfsControl = int(unix.Mkdev(10, 234))

var errNoBtrfsDevice = errors.New("the filesystem's device is gone")

// TwinsError reports that the kernel lists several devices for the UUID of a mounted btrfs. If a
// volume and a copy of it, such as a restored snapshot, are both mounted, a device scan may give
// the copy the UUID of its origin.
type TwinsError struct{ devices []string }

// Error names the devices by their numbers.
func (e *TwinsError) Error() string {
	return "the kernel gives the UUID of this btrfs to those of the devices " +
		strings.Join(e.devices, " and ") + ", and does not tell which it is on; unmount one of them"
}

// ErrBtrfsDevices reports a btrfs of several devices, which cannot be a volume.
var ErrBtrfsDevices = errors.New("a volume's btrfs has one device, this one has another number")

// BtrfsMember describes the only device of a mounted btrfs.
type BtrfsMember struct {
	ID   uint64    // the number that the filesystem gives to the device
	fsid uuid.UUID // the filesystem's UUID according to the kernel
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

// btrfsMountNumber returns the number of the disk that a mounted btrfs is on. The mount table does
// not contain it: a btrfs mount has a device number of its own, and its source is only a name,
// which another disk may have by now. So the function asks the filesystem. It uses the name only if
// it cannot open the mount, because another mount hides it or it is in another namespace.
func btrfsMountNumber(m *mountinfo.Info, likely blockdev.Device) (major, minor uint32, err error) {
	root, err := openMount(m)
	if err != nil {
		return blockdev.NumberAt(m.Source)
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root, likely)
}

// btrfsNumber returns the number of the disk that an open directory's btrfs is on. If the kernel
// lists several devices, it tests whether the btrfs is on the device likely, unless that is the
// zero device. If nothing is proven, it returns a TwinsError, and the number of the device at the
// path that the kernel has recorded.
func btrfsNumber(root *os.File, likely blockdev.Device) (major, minor uint32, err error) {
	member, err := BtrfsDevice(root)
	if err != nil {
		return 0, 0, err
	}
	pathMajor, pathMinor, pathErr := blockdev.NumberAt(member.path)
	dirs, err := member.dirs()
	if err != nil {
		return 0, 0, err
	}
	if len(dirs) == 0 { // sysfs does not list the filesystem
		return pathMajor, pathMinor, pathErr
	}
	var twins TwinsError
	for _, dir := range dirs {
		major, minor, err = numberIn(filepath.Join(dir, "devices"))
		onPath := err == nil && pathErr == nil && major == pathMajor && minor == pathMinor
		if len(dirs) == 1 || onPath && filepath.Base(dir) == member.fsid.String() {
			return major, minor, err
		}
		twins.devices = append(twins.devices, fmt.Sprintf("%d:%d", major, minor))
	}
	if slices.Contains(twins.devices, likely.Number()) && isOn(root, likely) {
		return likely.Major, likely.Minor, nil
	}
	return pathMajor, pathMinor, &twins
}

// dirs returns the sysfs directories of the mounted filesystems that have this UUID now. The name
// of a directory is the UUID that its filesystem had when it was mounted.
func (m BtrfsMember) dirs() ([]string, error) {
	names, err := blockdev.ReadNames(btrfsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var dirs []string
	for _, name := range names {
		dir := filepath.Join(btrfsDir, name)
		b, err := os.ReadFile(filepath.Join(dir, "devinfo", fmt.Sprint(m.ID), "fsid"))
		fsid := string(bytes.TrimSpace(b))
		if err != nil { // before Linux 5.17, which mounts no twins
			fsid = name
		}
		if fsid == m.fsid.String() {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

func numberIn(dir string) (major, minor uint32, err error) {
	names, err := blockdev.ReadNames(dir)
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

// isOn reports whether the btrfs of an open directory is proven to be on the device. It has the
// kernel scan the device at a unique path: only a btrfs on this device then reports that path as
// its device's. A second scan restores the source of the mount (madeOf).
func isOn(root *os.File, d blockdev.Device) (shown bool) {
	private, err := d.Root()
	if err != nil {
		return false
	}
	defer func() { _ = private.Close() }()
	err = inRoot(private, func() error {
		path := "/" + uuid.NewString()
		if err := errors.Join(makeControl(), unix.Link(d.Path, path)); err != nil {
			return err
		}
		if err := callControl(privateControl, btrfsScan, path); err != nil {
			return err
		}
		member, err := BtrfsDevice(root)
		shown = err == nil && member.path == path
		return callControl(privateControl, btrfsScan, madeOf(d.Path))
	})
	return shown && err == nil
}

const privateControl = "/btrfs-control"

func makeControl() error { return unix.Mknod(privateControl, unix.S_IFCHR|0o600, btrfsControl) }

// forgetMount makes the kernel forget a btrfs that a failed mount, or mkfs, has registered with a
// device's number. If another disk gets the number, Linux 6.18 takes its btrfs for the registered
// one and refuses to mount it. forgetMount has to run in inRoot, where path leads to the device.
func forgetMount(path, fsType string) error {
	if fsType != volume.Btrfs {
		return nil
	}
	err := makeControl()
	ForgetBtrfs(privateControl, path)
	return err
}

// ForgetBtrfs makes the kernel forget the btrfs on a device, unless it is mounted. While the kernel
// remembers a newer btrfs with the same UUID, it refuses to mount a copy of the volume, such as a
// restored snapshot. Errors are ignored: a kernel without btrfs, or without a remembered device,
// has nothing to forget.
func ForgetBtrfs(control, path string) { _ = callControl(control, btrfsForget, path) }

func callControl(control string, request uintptr, path string) error {
	f, err := os.OpenFile(control, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var args [4096]byte // fd, name
	copy(args[8:len(args)-1], path)
	return blockdev.Ioctl(int(f.Fd()), request, unsafe.Pointer(&args))
}
