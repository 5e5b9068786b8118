package loopdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

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

// openControl opens the loop driver's control device.
func openControl() (*os.File, error) {
	f, err := openOrMake(controlPath, unix.S_IFCHR, controlMajor, controlMinor, os.O_RDWR)
	switch {
	// ENOENT does not mean the path, because openOrMake has made it. ENODEV and ENXIO mean that
	// the node has no driver.
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

// openOrMake opens a device node, and creates the node if it is missing. In a container, /dev
// is often a copy from the time of its start, without the devices that the kernel has added
// since.
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
