package mount

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

// Unmount takes down the topmost mount at path. It never does so lazily: a lazy unmount reports
// success while the filesystem is still in use. errNotMounted means there was none.
func Unmount(path string) error {
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

// OnlyAt refuses when the layer's filesystem or its device is mounted anywhere but at path.
func (t Table) OnlyAt(path string, layer *mountinfo.Info, d blockdev.Device) error {
	var others Table
	mounts := t.sameFilesystem(layer)
	if d.Path != "" {
		mounts = append(mounts, t.Of(d)...)
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
			others.Paths())
	}
	return nil
}

// UnmountAll takes down every layer at path and looks again. layers bounds the work.
func UnmountAll(path string, layers int) error {
	for range layers {
		if err := Unmount(path); errors.Is(err, errNotMounted) {
			break
		} else if err != nil {
			return err
		}
	}
	table, err := ReadTable()
	if err != nil {
		return err
	}
	if left := table.At(path); len(left) > 0 {
		return csierr.New(csierr.StillMounted, "%q is mounted again after it was unmounted; who does "+
			"that?",
			path)
	}
	return nil
}

// Sync writes out what a mounted filesystem holds.
func Sync(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}
