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

// freeze stops writing to the filesystem on the device, if one is mounted anywhere we can see, and
// returns how to resume it. The filesystem must never stay frozen, as whoever writes to it waits in
// the kernel, beyond the reach of signals. So three take care of the thaw: the caller; a guard
// process, should this one be killed; and reconcile, which finds the note of a freeze.
func (p *Plane) freeze(loop loopdev.Device, diskID string) (thaw func() error, err error) {
	mount, err := p.findMount(loop)
	if err != nil {
		return nil, fmt.Errorf("find the mounts of %s: %w", loop.Path, err)
	}
	if mount == nil {
		return func() error { return nil }, nil
	}
	note := p.freezeNote(diskID)
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
	// Somebody else has frozen it, or it cannot be frozen. Whether anything is written meanwhile
	// shows in the device's counters.
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
			// The note stays, for reconcile.
			return fmt.Errorf("thaw the filesystem on %s: %w", loop.Path,
				errors.Join(err, guardErr, mount.Close()))
		}
		return errors.Join(os.Remove(note), mount.Close())
	}, nil
}

func (p *Plane) freezeNote(diskID string) string { return filepath.Join(p.dir, "frozen", diskID) }

// thawMount resumes writing. A filesystem that is not frozen is a success.
func thawMount(mount *os.File) error {
	err := unix.IoctlSetInt(int(mount.Fd()), ioctlThaw, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// guardThaw starts a process that thaws the filesystem when this one is killed: its standard input
// then ends without a line. The same happens with end(false).
func guardThaw(mount *os.File) (end func(thawed bool) error, err error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start a guard of the freeze: %w", err)
	}
	guard := exec.Command("sh", "-c",
		"read -r word && exit 0; exec fsfreeze --unfreeze /proc/self/fd/3")
	guard.Stdin, guard.ExtraFiles = in, []*os.File{mount}
	// Whatever ends our process group shall not end the guard before us.
	guard.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = guard.Start()
	in.Close()
	if err != nil {
		out.Close()
		return nil, fmt.Errorf("start a guard of the freeze: %w", err)
	}
	return func(thawed bool) error {
		var err error
		if thawed {
			_, err = io.WriteString(out, "thawed\n")
		}
		return errors.Join(err, out.Close(), guard.Wait())
	}, nil
}

// thawLeftovers thaws what a killed process left frozen, when its guard was killed as well.
func (p *Plane) thawLeftovers(devices []loopdev.Device) error {
	notes, err := os.ReadDir(filepath.Join(p.dir, "frozen"))
	if err != nil {
		return err
	}
	for _, note := range notes {
		diskID := note.Name()
		for _, d := range devices {
			if !backs(d, p.DiskPath(diskID)) {
				continue
			}
			if err := p.thawLeftover(d); err != nil {
				return fmt.Errorf("thaw the filesystem on %s: %w", d.Path, err)
			}
		}
		if err := os.Remove(p.freezeNote(diskID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (p *Plane) thawLeftover(d loopdev.Device) error {
	mount, err := p.findMount(d)
	if err != nil {
		return err
	}
	if mount == nil {
		return p.thawUnmounted(d)
	}
	p.log.Warn("thawing what a killed simulator may have left frozen",
		slog.String("device", d.Path), slog.String("mount", mount.Name()))
	return errors.Join(thawMount(mount), mount.Close())
}

// thawUnmounted thaws a filesystem that was unmounted while it was frozen. It lives on without a
// mount, and keeps its device for ever; to mount it again is the only way to reach it.
func (p *Plane) thawUnmounted(d loopdev.Device) error {
	f, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	if !errors.Is(err, unix.EBUSY) {
		if err == nil {
			err = f.Close()
		}
		return err // Nobody keeps it.
	}
	dir, err := os.MkdirTemp("", "oxide-simulator-thaw-")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	if out, err := exec.Command("mount", d.Path, dir).CombinedOutput(); err != nil {
		// Then something else keeps it.
		p.log.Warn("could not look for a frozen filesystem on a device that is held",
			slog.String("device", d.Path), slog.String("mount", string(out)))
		return nil
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	mount, err := os.Open(dir)
	if err != nil {
		return err
	}
	p.log.Warn("thawing a filesystem that was unmounted while frozen",
		slog.String("device", d.Path))
	return errors.Join(thawMount(mount), mount.Close())
}
