package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// lockName is the file in the state directory by which the processes of a node exclude each other
// from a volume and from a disk (blockdev.Host.Lock). A process also locks the whole file while it
// lives, with flock(2), which those locks do not see.
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
		s.log.Warn("another process of the driver uses this state directory; that is safe, and meant " +
			"for an update: if it is not about to end, stop one of them")
	case err != nil:
		s.log.Warn("the state directory cannot be locked", "error", err)
	default:
		s.lock = f
	}
}

// lock keeps the other processes of the driver from the volume until the file is closed. Every call
// that changes a volume on this node holds it from its begin to its end, so that none of them says
// OK while another process is in the middle of one.
func (n *Service) lock(ctx context.Context, volumeID string) (*os.File, error) {
	return n.host().Lock(ctx, "the volume "+recordKey(volumeID))
}
