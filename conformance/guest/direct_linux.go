package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// openDirect opens a place so that reads bypass cached pages, even if O_DIRECT is not supported.
func openDirect(place Place) (*os.File, error) {
	file, err := os.OpenFile(place.Path, os.O_RDONLY|unix.O_DIRECT, 0)
	if !errors.Is(err, unix.EINVAL) {
		return file, err
	}
	if file, err = os.Open(place.Path); err != nil {
		return nil, err
	}
	err = unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
	return harness.Opened(file, harness.Wrap(err, "drop the cache of %s", place.Path))
}

// newBuffer allocates whole pages, because O_DIRECT needs aligned memory. It panics on an error, as
// harness.Must does.
func newBuffer(size int) ([]byte, func()) {
	buffer, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	harness.Must(harness.Wrap(err, "allocate a buffer"))
	return buffer, func() { _ = unix.Munmap(buffer) }
}

// FilesystemBytes returns the size of the filesystem at a path, as statfs reports it.
func (*Agent) FilesystemBytes(_ context.Context, path string) (int64, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	return int64(st.Blocks) * st.Bsize, harness.Wrap(err, "statfs %s", path)
}

// HasMountSetattr reports whether the kernel has mount_setattr (Linux 5.12).
func HasMountSetattr() bool { return unix.MountSetattr(-1, "", 0, nil) != unix.ENOSYS }

// KernelRelease returns the output of uname -r.
func KernelRelease() (string, error) {
	var name unix.Utsname
	err := unix.Uname(&name)
	return unix.ByteSliceToString(name.Release[:]), harness.Wrap(err, "uname")
}

// directory is a tmpfs in an agent's mount namespace. Other processes see an empty directory. The
// agent, its driver and the driver's programs hold a lock on the directory, and other agents remove
// it only when the last of these processes has ended. An earlier removal would detach the tmpfs,
// and a driver that is still in a call would write to the machine's disk.
type directory struct {
	path string
	lock *os.File
}

func newDirectory() (_ *directory, err error) {
	defer harness.Catch(&err)
	Sweep()
	path, err := os.MkdirTemp("", dirPrefix)
	harness.Must(harness.Wrap(err, "make the agent's directory"))
	lock, err := harness.LockDir(path)
	harness.Must(harness.Wrap(err, "lock the agent's directory"))
	// The lock precedes the mark, because another agent removes a directory with a mark and no lock.
	if err := MarkOwn(path, agentMark); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if err := unix.Mount("oxide-guest", path, "tmpfs", unix.MS_NOSUID, "mode=0700"); err != nil {
		return nil, errors.Join(fmt.Errorf("mount a tmpfs at %s: %w; run as root", path, err),
			RemoveOwn(path, agentMark), lock.Close())
	}
	return &directory{path, lock}, nil
}

const agentMark = "agent"

// Sweep removes the directory of each killed agent, unless a program of that agent still runs.
func Sweep() {
	paths, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	for _, path := range paths {
		if lock, err := harness.LockDir(path); err == nil {
			_ = RemoveOwn(path, agentMark) // a directory without the mark stays
			_ = lock.Close()
		}
	}
}

// remove unmounts the tmpfs and removes the directory. If volumes are mounted there, its error
// names them.
func (d *directory) remove() error {
	mounts, err := harness.MountsBelow(d.path)
	if err == nil && len(mounts) > 1 {
		err = fmt.Errorf("the instance still had volumes mounted, which are unmounted now:\n  %s",
			strings.Join(mounts[1:], "\n  "))
	}
	if failed := unix.Unmount(d.path, unix.MNT_DETACH); failed != nil {
		return errors.Join(err, fmt.Errorf("unmount %s: %w", d.path, failed), d.lock.Close())
	}
	err = errors.Join(err, RemoveOwn(d.path, agentMark), d.lock.Close())
	Sweep()
	return err
}
