package driver

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
)

// btrfsDir is where the kernel shows the btrfs filesystems that are mounted.
const btrfsDir = "/sys/fs/btrfs"

// errNoBtrfsDevice says that a mounted btrfs has lost its device.
var errNoBtrfsDevice = errors.New("the filesystem's device is gone")

// btrfsMountNumber is the number of the device of a btrfs mount. btrfs numbers its mounts by itself
// and tells its device's name only, which is another disk's once the device is gone: so the kernel
// is asked for the device itself. Only for a mount that cannot be asked, hidden by another one or
// in another namespace, the name has to do.
func btrfsMountNumber(m *mountinfo.Info) (major, minor uint32, err error) {
	root, err := openMount(m)
	if err != nil {
		return blockNumber(m.Source)
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root, m.Source)
}

// btrfsNumber is the number of the one device of the btrfs that an open directory is in; source is
// what its name was when it was mounted.
func btrfsNumber(root *os.File, source string) (major, minor uint32, err error) {
	var info [1024]byte // max_id, num_devices, fsid[16], …
	if err := ioctl(int(root.Fd()), btrfsFSInfo, unsafe.Pointer(&info)); err != nil {
		return 0, 0, err
	}
	if n := binary.NativeEndian.Uint64(info[8:]); n != 1 {
		return 0, 0, fmt.Errorf("the filesystem has %d devices, a volume has one", n)
	}
	id, err := uuid.FromBytes(info[16:32])
	if err != nil {
		return 0, 0, err
	}
	dir := filepath.Join(btrfsDir, id.String(), "devices")
	names, err := readNames(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return blockNumber(source) // a sysfs that does not show it
	}
	if err != nil {
		return 0, 0, err
	}
	if len(names) != 1 {
		return 0, 0, errNoBtrfsDevice
	}
	b, err := os.ReadFile(filepath.Join(dir, names[0], "dev"))
	if errors.Is(err, fs.ErrNotExist) || vanished(err) {
		return 0, 0, errNoBtrfsDevice
	}
	if err != nil {
		return 0, 0, err
	}
	return parseDeviceNumber(b)
}
