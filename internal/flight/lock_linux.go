package flight

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

// noFollow makes open fail for a link, and return at once for a FIFO.
const noFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK

// lockTimeout limits the wait for the lock. A process holds the lock for one write; if the process
// is stopped, calls must not wait for it.
const lockTimeout = time.Second

func lock(f *os.File) error {
	backoff := async.Backoff{Pause: time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockTimeout)}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		// Ignore the end of the call's context, so that the entry is written.
		if again, _ := backoff.Wait(context.Background()); !again {
			return err
		}
	}
}
