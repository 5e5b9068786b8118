package dataplane

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// The kernel's ioctls to stop and resume writing to a filesystem (linux/fs.h). x/sys lacks them.
const (
	ioctlFreeze = 0xC0045877 // FIFREEZE
	ioctlThaw   = 0xC0045878 // FITHAW
)

// freezer freezes the filesystems of guests while their disks are copied.
type freezer struct {
	// dir has a file for each freeze in progress, named by the disk.
	dir string
	// proc is a procfs that shows the processes of all guests.
	proc string
	log  *slog.Logger
}

func newFreezer(dir, proc string, log *slog.Logger) freezer { return freezer{dir, proc, log} }

// freeze stops writes to the filesystem on the device if it finds a mount of it. It returns a
// function that resumes them. The filesystem must never stay frozen, because its writers wait in
// the kernel and ignore signals. So three parties can thaw it: the caller; a guard process, if
// this process is killed; and the next start, which finds the record of the freeze.
func (z freezer) freeze(loop loopdev.Device, diskID string) (thaw func() error, err error) {
	mount, err := z.findMount(loop)
	if err != nil {
		return nil, fmt.Errorf("find the mounts of %s: %w", loop.Path, err)
	}
	if mount == nil {
		return func() error { return nil }, nil
	}
	note := z.note(diskID)
	if err := os.WriteFile(note, nil, 0o600); err != nil {
		return nil, errors.Join(err, mount.Close())
	}
	end, err := guardThaw(mount)
	if err != nil {
		return nil, errors.Join(err, os.Remove(note), mount.Close())
	}
	err = unix.IoctlSetInt(int(mount.Fd()), ioctlFreeze, 0)
	frozen := err == nil
	switch {
	// The filesystem is already frozen, or cannot be frozen. The device's counters show whether
	// anything is written in the meantime.
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY):
	case err != nil:
		err = fmt.Errorf("freeze the filesystem on %s: %w", loop.Path, err)
		return nil, errors.Join(err, end(true), os.Remove(note), mount.Close())
	}
	return func() error {
		var err error
		if frozen {
			err = thawMount(mount)
		}
		if guardErr := end(err == nil); err != nil && guardErr != nil {
			// Keep the record for the next start.
			return fmt.Errorf("thaw the filesystem on %s: %w", loop.Path,
				errors.Join(err, guardErr, mount.Close()))
		}
		return errors.Join(os.Remove(note), mount.Close())
	}, nil
}

func (z freezer) note(diskID string) string { return filepath.Join(z.dir, diskID) }

// thawMount resumes writes. It succeeds for a filesystem that is not frozen.
func thawMount(mount *os.File) error {
	err := unix.IoctlSetInt(int(mount.Fd()), ioctlThaw, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// guardThaw starts a process that thaws the filesystem when this one is killed, because the
// guard's standard input then ends without a line. end(false) has the same effect.
func guardThaw(mount *os.File) (end func(thawed bool) error, err error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the guard of a freeze: %w", err)
	}
	guard := exec.Command("sh", "-c",
		"read -r word && exit 0; exec fsfreeze --unfreeze /proc/self/fd/3")
	guard.Stdin, guard.ExtraFiles = in, []*os.File{mount}
	// A signal to our process group must not end the guard before this process.
	guard.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = guard.Start()
	in.Close()
	if err != nil {
		out.Close()
		return nil, fmt.Errorf("start the guard of a freeze: %w", err)
	}
	return func(thawed bool) error {
		var err error
		if thawed {
			_, err = io.WriteString(out, "thawed\n")
		}
		return errors.Join(err, out.Close(), guard.Wait())
	}, nil
}

// thawLeftovers thaws the filesystems that a killed process left frozen, if its guard was killed
// as well.
func (z freezer) thawLeftovers(devices []loopdev.Device, diskPath func(id string) string) error {
	notes, err := os.ReadDir(z.dir)
	if err != nil {
		return err
	}
	for _, note := range notes {
		diskID := note.Name()
		for _, d := range devices {
			if !backs(d, diskPath(diskID)) {
				continue
			}
			if err := z.thawLeftover(d); err != nil {
				return fmt.Errorf("thaw the filesystem on %s: %w", d.Path, err)
			}
		}
		if err := os.Remove(z.note(diskID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (z freezer) thawLeftover(d loopdev.Device) error {
	mount, err := z.findMount(d)
	if err != nil {
		return err
	}
	if mount == nil {
		return z.thawUnmounted(d)
	}
	z.log.Warn("thawing a filesystem that a killed simulator may have left frozen",
		slog.String("device", d.Path), slog.String("mount", mount.Name()))
	return errors.Join(thawMount(mount), mount.Close())
}

// thawUnmounted thaws a filesystem that was unmounted while it was frozen. Such a filesystem
// keeps its device busy for ever, and can be reached only by another mount.
func (z freezer) thawUnmounted(d loopdev.Device) error {
	f, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	if !errors.Is(err, unix.EBUSY) {
		if err == nil {
			err = f.Close()
		}
		return err // The device is not in use.
	}
	dir, err := os.MkdirTemp("", "oxide-simulator-thaw-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	if out, err := exec.Command("mount", d.Path, dir).CombinedOutput(); err != nil {
		// Another program uses the device.
		z.log.Warn("cannot check a device in use for a frozen filesystem",
			slog.String("device", d.Path), slog.String("mount", string(out)))
		return nil
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	mount, err := os.Open(dir)
	if err != nil {
		return err
	}
	z.log.Warn("thawing a filesystem that was unmounted while frozen",
		slog.String("device", d.Path))
	return errors.Join(thawMount(mount), mount.Close())
}
