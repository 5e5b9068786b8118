package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

var errNotMounted = errors.New("not mounted")

// unmount unmounts the topmost mount at path. It is never lazy: a lazy unmount reports success
// while the filesystem is still in use. It returns errNotMounted if there is no mount.
func unmount(path string) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	// A process that reads the filesystem's usage or opens its device holds it for a moment.
	backoff := async.Backoff{Pause: 5 * time.Millisecond, Max: 80 * time.Millisecond,
		End: time.Now().Add(155 * time.Millisecond)}
	for errors.Is(err, unix.EBUSY) {
		if again, _ := backoff.Wait(context.Background()); !again {
			break
		}
		err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
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

// UnmountAll unmounts at most the given number of mounts at path, and fails if one is left.
func UnmountAll(path string, layers int) error {
	var err error
	for range layers {
		if err = unmount(path); err != nil {
			break
		}
	}
	if err != nil && !errors.Is(err, errNotMounted) {
		return err
	}
	table, failed := ReadTable()
	switch {
	case failed != nil:
		return failed
	case table.Top(path) == nil:
		return nil
	case err != nil:
		return csierr.New(csierr.StillMounted, "the mount at %q is hidden by one at a directory above "+
			"it; unmount that first", path)
	}
	return csierr.New(csierr.StillMounted, "%q is mounted again after it was unmounted; find the "+
		"process that mounts it", path)
}

// OnlyAt returns an error if the filesystem of layer is mounted anywhere but at path.
func (t Table) OnlyAt(path string, layer *mountinfo.Info) error {
	others := slices.DeleteFunc(slices.Clone(t), func(m *mountinfo.Info) bool {
		return m.Mountpoint == path || !SameFilesystem(m, layer)
	})
	if len(others) > 0 {
		return csierr.New(csierr.StillMounted, "the volume is still mounted at %s; unpublish it there "+
			"first", others.Paths())
	}
	return nil
}

// Sync writes a mounted filesystem's cached data to its device.
func Sync(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}

// A frozen filesystem (fsfreeze, a backup that was killed) that is unmounted stays in the kernel
// without a mount and keeps its device open forever. So NodeUnstageVolume thaws a volume that is
// published nowhere any more, and NodeStageVolume thaws a filesystem that is not mounted. No other
// call does, because whoever froze the filesystem may rely on the freeze.

// ioctlThaw is FITHAW of linux/fs.h, which x/sys lacks.
const ioctlThaw = 0xC0045878

// Thaw thaws the filesystem that root is the root directory of, if it is frozen.
func Thaw(root *os.File) error {
	err := unix.IoctlSetInt(int(root.Fd()), ioctlThaw, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil // it is not frozen
	}
	return err
}

// ThawAt thaws the filesystem of a mount that no process uses. A process that has something open in
// the mount may rely on the freeze, and the mount cannot be unmounted then in any case.
func ThawAt(m *mountinfo.Info) error {
	// The first call with MNT_EXPIRE only reports whether the mount is in use. A second call would
	// unmount it; then a frozen filesystem without a mount is found by the exclusive open at the end.
	err := unix.Unmount(m.Mountpoint, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
	if !errors.Is(err, unix.EAGAIN) {
		return nil
	}
	root, err := openMount(m)
	if err != nil {
		return err
	}
	return errors.Join(Thaw(root), root.Close())
}

// openMount opens the root directory of a mount. It fails for a mount that another one hides or
// that is in another namespace.
func openMount(m *mountinfo.Info) (*os.File, error) {
	root, err := os.OpenFile(m.Mountpoint, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|
		unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return checkMount(root, m)
}

// checkMount returns the open directory, or closes it if it is not the mount's.
func checkMount(root *os.File, m *mountinfo.Info) (*os.File, error) {
	var st unix.Statx_t
	err := unix.Statx(int(root.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC,
		unix.STATX_MNT_ID, &st)
	if err == nil && (st.Mask&unix.STATX_MNT_ID == 0 || st.Mnt_id != uint64(m.ID)) {
		err = fmt.Errorf("%q leads to another mount", m.Mountpoint)
	}
	if err != nil {
		_ = root.Close()
		return nil, err
	}
	return root, nil
}
