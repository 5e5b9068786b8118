package blockdev

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// lockWait is how long a call waits for the lock of a device. Three holders are brief: udev has a
// shared lock while it probes a device, a call that has just ended, and a program between fork and
// exec that has inherited that call's descriptor.
const lockWait = 2 * time.Second

// OpenLocked opens and verifies the device and locks it against other processes of the driver.
func (h Host) OpenLocked(ctx context.Context, device Device) (*OpenDevice, error) {
	d, err := h.Open(device)
	if err != nil {
		return nil, err
	}
	if err = d.lock(ctx); err == nil {
		err = d.verify() // the lock may have waited
	}
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	return d, nil
}

// lock takes the device's flock(2). The lock ends when the descriptor is closed here and in every
// program that has inherited it, so the next driver waits for a mkfs or an e2fsck that outlived
// this one.
//
// The lock is on the inode of the device node. It excludes udev and the other processes of the
// driver on the node, which use the same device directory. It does not exclude a process that does
// not lock, or that opens another node of the device, such as one in a container's own /dev: the
// exclusive open (TryExclusive) and the search for writers (AwaitNoWriters) find those.
func (d *OpenDevice) lock(ctx context.Context) error {
	backoff := async.Backoff{Pause: 10 * time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockWait)}
	for {
		err := unix.Flock(d.descriptor(), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", d.Path, err)
		}
		switch again, ended := backoff.Wait(ctx); {
		case ended != nil:
			return fmt.Errorf("wait for the lock of %s: %w", d.Path, ended)
		case !again:
			return csierr.New(csierr.DeviceLocked, "%s is locked by %s; repeat the call when that has "+
				"ended", d.Path, d.locker())
		}
	}
}

// locker names the visible processes that have the device locked.
func (d *OpenDevice) locker() string {
	locking := slices.DeleteFunc(openers(d.Device), func(o opener) bool { return !o.Locking })
	if len(locking) == 0 {
		return "another call of this process, or a process that is not visible from here"
	}
	return nameOpeners(locking)
}
