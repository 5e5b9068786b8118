package flight

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

// noFollow makes an open of a symbolic link fail, and an open of a FIFO return at once.
const noFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK

// lockTimeout limits the wait for the lock, which a process holds while it writes an entry. Without
// the limit, a stopped process could block calls.
const lockTimeout = time.Second

func lock(f *os.File) error {
	backoff := async.Backoff{Pause: time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockTimeout)}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		// Wait even if the call's context has ended: the entry has to be written.
		if again, _ := backoff.Wait(context.Background()); !again {
			return err
		}
	}
}
