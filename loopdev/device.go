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

// Device is one attachment of a file to a loop device. It is what [Attach], [List] and [Find]
// return; the methods act on exactly that attachment, whatever its number serves later.
type Device struct {
	// Number is the N of loopN.
	Number int
	// Path is the device's node, "/dev/loopN".
	Path string
	// Major and Minor are the device's number as the kernel knows it.
	Major, Minor uint32
	// Serial is what Attach was given. A device that losetup made has the file's path there.
	Serial string
	// BackingFile is the file's path as the kernel tells it: " (deleted)" follows when it was
	// unlinked.
	BackingFile string
	// BackingDevice is the st_dev of the file. Its path alone does not identify it: what a mount
	// covers, or another mount namespace has, may have the same.
	BackingDevice uint64
	// BackingInode is the st_ino of the file: with BackingDevice it says which file it is, in
	// whichever mount namespace it was opened.
	BackingInode uint64
	// BlockSize is the logical block size in bytes.
	BlockSize int
	// ReadOnly says that the device refuses writes.
	ReadOnly bool
	// SizeBytes is the size when the device was looked at; Grow does not change it here.
	SizeBytes int64
	// Releasing says that the kernel was told to let go and waits for the last holder.
	Releasing bool
	// Sequence is the kernel's number of this attachment (diskseq). No two have the same between
	// two boots.
	Sequence uint64
}

// patience is how long Detach waits for holders to go: a udev-like prober opens every new device
// for some milliseconds, a mount stays.
const patience = 2 * time.Second

// Detach releases the device and returns when the kernel has let go of the file. A device that was
// released before is a success. With [ErrBusy] somebody still held it when the wait ended, after
// two seconds or with ctx; the kernel then lets go with the last holder, and Detach may be called
// again to wait for that.
func (d Device) Detach(ctx context.Context) error {
	err := d.with(func(f *os.File) error {
		return unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	})
	// Gone, or about to be: both are what was asked for, and the look below says which.
	if err != nil && !errors.Is(err, ErrGone) && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", d.Path, explain(err))
	}
	// The ioctl only marks the device when somebody has it open, and our own descriptor counts: the
	// release happens at the last close.
	ctx, cancel := context.WithTimeout(ctx, patience)
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

// Sync writes what the kernel holds of the device through to the file's storage.
func (d Device) Sync() error {
	err := d.with(func(f *os.File) error { return unix.Fsync(int(f.Fd())) })
	if err != nil {
		return fmt.Errorf("sync %s: %w", d.Path, explain(err))
	}
	return nil
}

// Cut takes the file's bytes away from whoever holds the device, as pulling a drive does. The
// device has no size from then on: every read and write fails, and none reaches the file. What was
// in flight is finished first, and nothing that was acknowledged is undone. The device stays until
// its last holder leaves it; Detach asks for that, before or after.
//
// The kernel is told that the device begins where no file ends. A change of the backing file would
// be the obvious way, but it is only allowed for read-only devices.
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

// with opens the device and does something with it if it is still this attachment. While the
// descriptor is open it stays so: the kernel defers every release to the last close. It is opened
// for reading, which the ioctls accept from root: a kernel may refuse to write to mounted devices.
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

// attached says whether the kernel still has this attachment.
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
