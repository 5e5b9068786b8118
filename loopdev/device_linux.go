package loopdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// detachTimeout is how long Detach waits for users: a prober such as udev opens every new device
// for some milliseconds, while a mount stays.
const detachTimeout = 2 * time.Second

// Detach releases the device and returns when the kernel has released the file. It succeeds for a
// device that was released before. It returns [ErrBusy] when the device is still in use after two
// seconds or at the end of ctx; the kernel then releases it with its last user, and Detach may be
// called again to wait for that.
func (d Device) Detach(ctx context.Context) error {
	err := d.with(func(f *os.File) error {
		return unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	})
	// It is gone or about to be; the loop below waits for that.
	if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", d.Path, explain(err))
	}
	// The ioctl only marks a device that is open, and our own descriptor counts: the kernel releases
	// the device at the last close.
	ctx, cancel := context.WithTimeout(ctx, detachTimeout)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		held, err := d.attached()
		if err != nil {
			return fmt.Errorf("detach %s: %w", d.Path, err)
		}
		if !held {
			return nil
		}
		if wait(ctx, pause) != nil {
			return fmt.Errorf("detach %s (%s): %w", d.Path, d.BackingFile, ErrBusy)
		}
	}
}

// Grow makes the device as large as its file has become.
func (d Device) Grow() error {
	err := d.with(func(f *os.File) error {
		return unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0)
	})
	if err != nil {
		return fmt.Errorf("grow %s: %w", d.Path, explain(err))
	}
	return nil
}

// Sync flushes the device's cache to the file's storage.
func (d Device) Sync() error {
	err := d.with(func(f *os.File) error { return unix.Fsync(int(f.Fd())) })
	if err != nil {
		return fmt.Errorf("sync %s: %w", d.Path, explain(err))
	}
	return nil
}

// Cut disconnects the device from its file while it is in use, as pulling a drive does. The device
// has no size from then on: every read and write fails, and none reaches the file. Requests in
// flight are finished first, and nothing that was acknowledged is undone. The device stays until
// its last user closes it; Detach asks for that, before or after.
//
// Cut sets an offset beyond the end of any file. Changing the backing file would be the obvious
// way, but the kernel allows it only for read-only devices.
func (d Device) Cut() error {
	err := d.with(func(f *os.File) error {
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if err != nil {
			return err
		}
		info.Offset, info.Sizelimit = cutOffset, 0
		return unix.IoctlLoopSetStatus64(int(f.Fd()), info)
	})
	if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("cut %s: %w", d.Path, explain(err))
	}
	return nil
}

// cutOffset is beyond the size of any file, and leaves room for the sectors of any device.
const cutOffset = 1 << 62

// with opens the device and calls do if it is still this attachment. It stays so while the
// descriptor is open, because the kernel defers every release to the last close. The device is
// opened for reading, which is enough for root's ioctls: a kernel may refuse to open a mounted
// device for writing.
func (d Device) with(do func(*os.File) error) error {
	f, err := openNode(d.Path, d.Major, d.Minor, os.O_RDONLY)
	switch {
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, fs.ErrNotExist):
		return ErrGone
	case err != nil:
		return err
	}
	defer f.Close()
	held, err := d.attached()
	if err != nil {
		return err
	}
	if !held {
		return ErrGone
	}
	return do(f)
}

// attached reports whether the kernel still has this attachment.
func (d Device) attached() (bool, error) {
	sys := sysDir(d.Number)
	// The directory goes when the device does; the sequence number moves when the next one comes.
	if _, err := os.Stat(sys + "/loop/backing_file"); err != nil {
		return false, ignoreAbsent(err)
	}
	seq, err := readUint(sys + "/diskseq")
	if err != nil {
		return false, ignoreAbsent(err)
	}
	return seq == d.Sequence, nil
}

// wait waits, or returns ctx's error when it ends first.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
