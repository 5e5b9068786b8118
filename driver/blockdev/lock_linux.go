package blockdev

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// lockWait is how long a call waits for a lock. Two kinds of holder release it soon: a call that
// has just ended, and a program between fork and exec that has inherited the call's descriptor.
const lockWait = 2 * time.Second

// Lock locks what the key names, such as a volume, against the other processes of the driver on the
// node. The lock ends when the descriptor is closed here and in every program that has inherited
// it. Without a file for the locks, or if it cannot be opened, the result is nil and locks nothing.
//
// Each key is a byte of one file, which workloads cannot reach, and which never has to be cleaned
// up. Two keys that share a byte exclude each other needlessly, which is harmless.
func (h Host) Lock(ctx context.Context, key string) (*os.File, error) {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(key))
	at := int64(hash.Sum64() >> 2)
	const maxOpens = 5
	for range maxOpens {
		f := h.openLocks()
		if f == nil {
			return nil, nil
		}
		var st unix.Stat_t
		err := unix.Fstat(int(f.Fd()), &st)
		if err == nil {
			err = awaitLock(ctx, key, func() error {
				return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK,
					Start: at, Len: 1})
			}, func() string {
				return locker(func(other *unix.Statx_t) bool {
					return other.Ino == st.Ino && unix.Mkdev(other.Dev_major, other.Dev_minor) == st.Dev
				}, fmt.Sprintf(" %d %d\n", at, at))
			})
		}
		if err == nil {
			err = unix.Fstat(int(f.Fd()), &st)
		}
		if err == nil && st.Nlink > 0 {
			return f, nil
		}
		_ = f.Close()
		if err != nil {
			return nil, err
		} // otherwise the file was removed meanwhile
	}
	return nil, csierr.New(csierr.DeviceLocked, "the file of the locks, %s, was removed %d times "+
		"while %s was locked; find the process that removes it", h.Locks, maxOpens, csierr.Plain(key))
}

// openLocks opens the file of the locks, and makes it if somebody has removed it.
func (h Host) openLocks() *os.File {
	if h.Locks == "" {
		return nil
	}
	for range 2 {
		f, err := os.OpenFile(h.Locks, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err == nil {
			return f
		}
		_ = os.MkdirAll(filepath.Dir(h.Locks), 0o700)
	}
	return nil
}

// OpenLocked opens and verifies the device and locks it against other processes of the driver. The
// programs that get Inherited keep the lock, so the next driver waits for a mkfs or an e2fsck that
// outlived this one.
//
// unshared means that no workload ever gets the raw device. Then nobody else locks the device's
// node, so its lock also excludes a driver with another lock file.
//
// It does not exclude other programs: the exclusive open (TryExclusive) and the search for writers
// (AwaitNoWriters) find those.
func (h Host) OpenLocked(ctx context.Context, device Device, unshared bool) (*OpenDevice, error) {
	d, err := h.Open(device)
	if err != nil {
		return nil, err
	}
	if d.lock, err = h.Lock(ctx, "the disk with serial "+device.Serial); err == nil {
		err = d.flock(ctx, unshared || d.lock == nil)
	}
	if err == nil {
		err = d.verify() // the lock may have waited
	}
	d.Shared = !unshared
	if err != nil {
		_ = d.Close()
		return nil, err
	}
	d.Keep(d.lock)
	return d, nil
}

// Keep lets the programs that work on the device keep a lock that may be nil.
func (d *OpenDevice) Keep(lock *os.File) {
	if lock != nil {
		d.Inherited = append(d.Inherited, lock)
	}
}

// flock takes the flock(2) of the device's node, by which udev is asked not to probe it. A workload
// that has the raw device may hold that lock for ever. So the call waits for it only if no workload
// has the device, or if there is no other lock.
func (d *OpenDevice) flock(ctx context.Context, wait bool) error {
	take := func() error { return unix.Flock(d.descriptor(), unix.LOCK_EX|unix.LOCK_NB) }
	if !wait {
		_ = take()
		return nil
	}
	return awaitLock(ctx, d.Path, take, func() string { return locker(d.isNode, "FLOCK") })
}

// awaitLock calls take until it gets the lock, or until lockWait has passed.
func awaitLock(ctx context.Context, what string, take func() error, locker func() string) error {
	backoff := async.Backoff{Pause: 10 * time.Millisecond, Max: 10 * time.Millisecond,
		End: time.Now().Add(lockWait)}
	for {
		err := take()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("lock %s: %w", what, err)
		}
		switch again, ended := backoff.Wait(ctx); {
		case ended != nil:
			return fmt.Errorf("wait for the lock of %s: %w", what, ended)
		case !again:
			return csierr.New(csierr.DeviceLocked, "%s is locked by %s; repeat the call when that has "+
				"ended", csierr.Plain(what), locker())
		}
	}
}

// locker names the visible processes that hold the lock of a file. mark identifies the file in
// their lists of locks.
func locker(isFile func(*unix.Statx_t) bool, mark string) string {
	locking := slices.DeleteFunc(openers(isFile, mark), func(o opener) bool { return !o.Locking })
	if len(locking) == 0 {
		return "another call of this process, or a process that is not visible from here"
	}
	return nameOpeners(locking)
}
