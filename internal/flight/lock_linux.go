package flight

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
)

// noFollow: what is no file of the recorder must neither be followed nor block.
const noFollow = unix.O_NOFOLLOW | unix.O_NONBLOCK

// lockTimeout is how long another process may have the lock, which takes it for one write: one that
// is stopped must not stop a call.
const lockTimeout = time.Second

func lock(f *os.File) error {
	backoff := async.Backoff{Pause: time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockTimeout)}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		// A call that ends meanwhile still says what it did.
		if again, _ := backoff.Wait(context.Background()); !again {
			return err
		}
	}
}
