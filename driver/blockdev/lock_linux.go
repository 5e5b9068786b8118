package blockdev

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// lockWait is how long a call waits for the lock of a device. udev has a shared one while it looks
// at a device, and a program between fork and exec has a copy of every descriptor, so for a moment
// also the lock of a call that has just ended.
const lockWait = 2 * time.Second

// OpenLocked opens the device to act on it.
func (ds Host) OpenLocked(ctx context.Context, d Device) (*OpenDevice, error) {
	h, err := ds.Open(d)
	if err != nil {
		return nil, err
	}
	if err = h.lock(ctx); err == nil {
		err = h.Verify() // it may have waited
	}
	if err != nil {
		_ = h.Close()
		return nil, err
	}
	return h, nil
}

// lock takes the device until its descriptor is closed here and in every program that has inherited
// it. So what a mkfs or an e2fsck does that outlived its driver is waited for by the next driver.
//
// The lock is on the inode of the device's node. It keeps out the other processes of the driver on
// the node, which use the same directory of devices, and udev. It does not keep out who ignores it,
// or opens another node of the same device, as a container's own /dev has: for those there are the
// exclusive open (claim) and the look for writers (awaitNoWriters).
func (h *OpenDevice) lock(ctx context.Context) error {
	for deadline := time.Now().Add(lockWait); ; {
		err := unix.Flock(h.descriptor(), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", h.Path, err)
		case time.Now().After(deadline):
			return csierr.New(csierr.DeviceLocked, "%s is worked on by %s, which has it locked; the call "+
				"can be repeated when that has ended", h.Path, h.locker())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the lock of %s: %w", h.Path, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// locker names who has the device locked, as far as that can be seen.
func (h *OpenDevice) locker() string {
	locking := slices.DeleteFunc(openers(h.Device), func(o opener) bool { return !o.Locking })
	if len(locking) == 0 {
		return "another call of this process, or a process that cannot be seen from here"
	}
	return nameOpeners(locking)
}
