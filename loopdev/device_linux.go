package loopdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// detachTimeout limits how long Detach waits for users of the device. A prober such as udev opens
// every new device for some milliseconds. A mount stays longer.
const detachTimeout = 2 * time.Second

// Detach releases the device and returns when the kernel has released the file. It succeeds if the
// device was released before. It returns [ErrBusy] if the device is still in use after two seconds
// or at the end of ctx. The kernel then releases the device when its last user closes it. The
// caller can wait for that with another call of Detach.
func (d Device) Detach(ctx context.Context) error {
	err := d.with(func(f *os.File) error {
		// Linux keeps the read-only flag with the number, so clear it for the next user.
		return errors.Join(unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0),
			unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0))
	})
	// The device is gone or will be soon. The loop below waits for that.
	if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", d.Path, explain(err))
	}
	// The ioctl only marks a device that is open, and our own descriptor counts too. The kernel
	// releases the device at the last close.
	ctx, cancel := context.WithTimeout(ctx, detachTimeout)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		held, err := d.attached()
		if err != nil {
			return fmt.Errorf("detach %s: %w", d.Path, err)
		}
		if !held {
			return d.leaveDiscards()
		}
		if wait(ctx, pause) != nil {
			return fmt.Errorf("detach %s (%s): %w", d.Path, d.BackingFile, ErrBusy)
		}
	}
}

// leaveDiscards removes the device if it refuses discards. Linux keeps that property for the number
// and cannot change it back, so the next user of the number needs a new device. The kernel does not
// remove a device that is in use again.
func (d Device) leaveDiscards() error {
	if now, err := os.ReadFile(d.discardLimit()); err != nil || string(now) != "0\n" {
		return nil
	}
	control, err := openControl()
	if err != nil {
		return err
	}
	defer control.Close()
	_ = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, d.Number)
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

// Cut disconnects the device from its file while the device is in use, like pulling out a drive.
// The device has size 0 from then on: every read and write fails, and none reaches the file.
// Requests in flight are finished first, and nothing that was acknowledged is undone. The device
// exists until it was released with Detach, before or after Cut, and its last user has closed it.
//
// Cut sets an offset beyond the end of any file. Changing the backing file would be the
// obvious way, but the kernel allows that only for read-only devices.
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

// cutOffset is larger than any file, and small enough that adding the size of any device does
// not overflow.
const cutOffset = 1 << 62

// with opens the device, and calls do if the device still has this attachment. The attachment
// cannot change while the descriptor is open, because the kernel defers every release to the
// last close. The device is opened for reading, which is enough for root's ioctls: a kernel
// may refuse to open a mounted device for writing.
func (d Device) with(do func(*os.File) error) error {
	// If the device was removed, opening its node would create both again.
	if held, err := d.attached(); err != nil || !held {
		return cmp.Or(err, ErrGone)
	}
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
	// The directory disappears with the attachment. The sequence number changes with the next
	// attachment.
	if _, err := os.Stat(sys + "/loop/backing_file"); err != nil {
		return false, ignoreAbsent(err)
	}
	seq, err := readUint(sys + "/diskseq")
	if err != nil {
		return false, ignoreAbsent(err)
	}
	return seq == d.Sequence, nil
}

// wait waits for the duration. It returns ctx's error if ctx ends first.
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
