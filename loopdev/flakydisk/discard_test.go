//go:build linux

package flakydisk_test

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlDiscard discards a range, which is an offset and a length.
func ioctlDiscard(device *os.File, span *[2]uint64) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKDISCARD,
		uintptr(unsafe.Pointer(span)))
	if errno != 0 {
		return errno
	}
	return nil
}
