package flight

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

// noFollow makes open fail on a symbolic link, and not wait on a FIFO.
const noFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK

// lockTimeout limits the wait for the lock. A process holds the lock while it writes an entry. If
// that process is stopped, calls must not wait for it.
const lockTimeout = time.Second

func lock(f *os.File) error {
	backoff := async.Backoff{Pause: time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockTimeout)}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		// Wait even if the call's context has ended, so that the entry is written.
		if again, _ := backoff.Wait(context.Background()); !again {
			return err
		}
	}
}
