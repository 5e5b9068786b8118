package loopdev

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrBusy says that somebody still holds the device: a mount, an open file, another block device.
// The kernel was told to let go, and will when the last holder does.
var ErrBusy = errors.New("the loop device is still held")

// ErrGone says that the attachment a [Device] describes is no more; its number may be free or may
// serve another file by now.
var ErrGone = errors.New("the loop device was released meanwhile")

// ErrNotLoop says that a path in /dev with a loop device's name is something else.
var ErrNotLoop = errors.New("not a loop device")

// ErrNoDriver says that the kernel has no loop driver.
var ErrNoDriver = errors.New("the kernel has no loop driver; load it: modprobe loop")

// explain adds to an errno what a person can do about it. The errno stays inside.
func explain(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (loop devices need root with CAP_SYS_ADMIN, "+
			"and a container must be allowed to use block devices of major number 7)", err)
	}
	return err
}
