package flight

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// noFollow: what is no file of the recorder must neither be followed nor block.
const noFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK

// lockTimeout is how long another process may have the lock, which takes it for one write: one that
// is stopped must not stop a call.
const lockTimeout = time.Second

func lock(f *os.File) error {
	for end := time.Now().Add(lockTimeout); ; time.Sleep(time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
	}
}
