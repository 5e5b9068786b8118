package driver

import (
	"errors"
	"os"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

var errNotMounted = errors.New("not mounted")

// unmountTop takes down the topmost mount at path. It never does so lazily: a lazy unmount reports
// success while the filesystem is still in use. errNotMounted means there was none.
func unmountTop(path string) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	// Who asks a filesystem for its usage or its device has it for a moment.
	for pause := 5 * time.Millisecond; errors.Is(err, unix.EBUSY) && pause < 100*time.Millisecond; {
		<-time.After(pause)
		err, pause = unix.Unmount(path, unix.UMOUNT_NOFOLLOW), 2*pause
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return errNotMounted
	}
	if errors.Is(err, unix.EBUSY) {
		return csierr.New(csierr.StillMounted, "unmount %q: files are open below it: %w", path, err)
	}
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "unmount %q: %w", path, err)
	}
	return nil
}

// onlyAt refuses when the layer's filesystem or its device is mounted anywhere but at path.
func (t mountTable) onlyAt(path string, layer *mountinfo.Info, d blockdev.Device) error {
	var others mountTable
	mounts := t.sameFilesystem(layer)
	if d.Path != "" {
		mounts = append(mounts, t.of(d)...)
	}
	listed := map[int]bool{}
	for _, m := range mounts {
		if m.Mountpoint != path && !listed[m.ID] {
			listed[m.ID] = true
			others = append(others, m)
		}
	}
	if len(others) > 0 {
		return csierr.New(csierr.StillMounted, "the volume is still mounted at %s; unpublish it there "+
			"first",
			others.paths())
	}
	return nil
}

// unmountAll takes down every layer at path and looks again. layers bounds the work.
func unmountAll(path string, layers int) error {
	for range layers {
		if err := unmountTop(path); errors.Is(err, errNotMounted) {
			break
		} else if err != nil {
			return err
		}
	}
	table, err := readMountTable()
	if err != nil {
		return err
	}
	if left := table.at(path); len(left) > 0 {
		return csierr.New(csierr.StillMounted, "%q is mounted again after it was unmounted; who does "+
			"that?",
			path)
	}
	return nil
}

// syncMount writes out what a mounted filesystem holds.
func syncMount(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}
