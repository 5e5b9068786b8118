package loopdev

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const sysBlock = "/sys/block"

// List returns every attached loop device of this machine in the order of their numbers, including
// the devices of other programs. It may omit a device that is attached or detached during the call.
func List() ([]Device, error) {
	entries, err := os.ReadDir(sysBlock)
	if err != nil {
		return nil, fmt.Errorf("list loop devices: %w", err)
	}
	var devices []Device
	for _, e := range entries {
		number, ok := loopNumber(e.Name())
		if !ok {
			continue
		}
		d, attached, err := describe(number)
		if err != nil {
			return nil, fmt.Errorf("list loop devices: read %s: %w", e.Name(), explain(err))
		}
		if attached {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b Device) int { return cmp.Compare(a.Number, b.Number) })
	return devices, nil
}

// describe reads one loop device. It returns false for a device without a file.
func describe(number int) (Device, bool, error) {
	// Most devices are free, so do not open them.
	if _, err := os.Stat(sysDir(number) + "/loop/backing_file"); err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	d, err := identify(number)
	if err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	f, err := openNode(d.Path, d.Major, d.Minor, os.O_RDONLY)
	if err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	defer f.Close()
	// The attachment cannot change while f is open, so the code below reads a single attachment.
	d, err = d.fill(f)
	if err != nil {
		return Device{}, false, ignoreAbsent(err)
	}
	return d, true, nil
}

// identify reads the properties that do not depend on an attachment.
func identify(number int) (Device, error) {
	d := Device{Number: number, Path: fmt.Sprintf("/dev/loop%d", number)}
	b, err := os.ReadFile(sysDir(number) + "/dev")
	if err != nil {
		return d, err
	}
	if _, err := fmt.Sscanf(string(b), "%d:%d", &d.Major, &d.Minor); err != nil {
		return d, fmt.Errorf("parse device number %q of %s: %w", b, d.Path, err)
	}
	return d, nil
}

// fill reads the attachment behind f, which must stay open during the call.
func (d Device) fill(f *os.File) (Device, error) {
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	switch {
	// The kernel asks the file's filesystem. FUSE returns one of the first two errors if no process
	// serves it, and XFS returns the third one if it was shut down.
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EIO):
		d.Orphaned = true
	case err != nil:
		return d, fmt.Errorf("get status: %w", err)
	default:
		d.Serial = unix.ByteSliceToString(info.File_name[:])
		d.Owner = unix.ByteSliceToString(info.File_name[min(len(d.Serial)+1, serialMax):])
		d.BackingDevice, d.BackingInode = info.Device, info.Inode
		if info.Rdevice != info.Device { // they are equal if the file is regular
			d.BackingNumber = info.Rdevice
		}
		d.ReadOnly = info.Flags&unix.LO_FLAGS_READ_ONLY != 0
		d.Releasing = info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0
	}

	sys := sysDir(d.Number)
	file, err := os.ReadFile(sys + "/loop/backing_file")
	if err != nil {
		return d, err
	}
	d.BackingFile = string(bytes.TrimSuffix(file, []byte("\n")))
	sectors, err := readUint(sys + "/size")
	if err != nil {
		return d, err
	}
	d.SizeBytes = int64(sectors) * 512
	block, err := readUint(sys + "/queue/logical_block_size")
	if err != nil {
		return d, err
	}
	d.BlockSize = int(block)
	d.Sequence, err = readUint(sys + "/diskseq")
	return d, err
}

func loopNumber(name string) (int, bool) {
	digits, ok := strings.CutPrefix(name, "loop")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 20)
	return int(n), err == nil
}

func sysDir(number int) string { return fmt.Sprintf("%s/loop%d", sysBlock, number) }

func readUint(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 64)
}

// ignoreAbsent returns nil for the errors of a device that has no file or is being released.
func ignoreAbsent(err error) error {
	for _, absent := range []error{fs.ErrNotExist, unix.ENXIO, unix.ENODEV} {
		if errors.Is(err, absent) {
			return nil
		}
	}
	return err
}

// The numbers of the control device are fixed in the kernel (misc major, LOOP_CTRL_MINOR).
const (
	controlPath  = "/dev/loop-control"
	controlMajor = 10
	controlMinor = 237
)

// Available returns nil if loop devices can be used, or an error that describes what to do.
func Available() error {
	f, err := openControl()
	if err != nil {
		return fmt.Errorf("open the loop driver's control device: %w", explain(err))
	}
	return f.Close()
}

func openControl() (*os.File, error) {
	f, err := openOrMake(controlPath, unix.S_IFCHR, controlMajor, controlMinor, os.O_RDWR)
	switch {
	// The node exists, because openOrMake has made it. So these errors mean that the node has no
	// driver.
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("the kernel has no loop driver; load it: modprobe loop (%w)", err)
	case err != nil:
		return nil, err
	}
	return f, nil
}

// openNode opens a loop device's node and verifies that it is the node of that device.
func openNode(path string, major, minor uint32, flag int) (*os.File, error) {
	f, err := openOrMake(path, unix.S_IFBLK, major, minor, flag)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != unix.Mkdev(major, minor) {
		f.Close()
		return nil, fmt.Errorf("%s is not the loop device %d:%d", path, major, minor)
	}
	return f, nil
}

// openOrMake opens a device node, and creates the node if it is missing. In a container, /dev often
// lacks the devices that the kernel has added since the container was started.
func openOrMake(path string, kind, major, minor uint32, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	err = unix.Mknod(path, kind|0o600, int(unix.Mkdev(major, minor)))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("make node %s (%d:%d): %w", path, major, minor, err)
	}
	return os.OpenFile(path, flag, 0)
}

// explain adds advice to a permission error.
func explain(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (loop devices need root with CAP_SYS_ADMIN, "+
			"and a container must be allowed to use block devices of major number 7)", err)
	}
	return err
}
