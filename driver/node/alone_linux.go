package node

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// lockName is the file that a process of the driver locks in its state directory while it lives.
const lockName = "lock"

// alone takes the lock, and warns if it is taken.
func (s *recordStore) alone() {
	if s.dir == "" {
		return
	}
	f, err := os.OpenFile(filepath.Join(s.dir, lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|
		unix.O_NONBLOCK, 0o600)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		_ = f.Close()
		s.log.Warn("another process of the driver uses this state directory; if it is not about to " +
			"end, stop one of them, or give each a directory of its own (OXIDE_STATE_DIR)")
	case err != nil:
		s.log.Warn("the state directory cannot be locked", "error", err)
	default:
		s.lock = f
	}
}
