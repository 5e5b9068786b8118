package mount

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Mount is a descriptor of a mount. A detached mount is in no mount namespace.
type Mount struct {
	fd     int
	FSType string
}

// New makes a detached mount of the filesystem on an open device.
func New(d *blockdev.OpenDevice, fsType string, o volume.MountOptions) (*Mount, error) {
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "the kernel does not support filesystem %s: %w",
			fsType, err)
	}
	defer func() { _ = unix.Close(fs) }()
	root, err := d.Root()
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "make a node of %s: %w", d.Path, err)
	}
	defer func() { _ = root.Close() }()
	if err = configure(fs, madeOf(d.Path), o); err == nil {
		err = inRoot(root, func() error {
			if err := forgetMount(d.Path, fsType); err != nil {
				return err
			}
			return unix.FsconfigCreate(fs)
		})
	}
	if err != nil {
		reason := csierr.NodeToolFailed
		switch { // the kernel's filesystems return these errors
		case fsType == volume.Btrfs && errors.Is(err, unix.EEXIST):
			reason = csierr.BtrfsTwin
		case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
			reason = csierr.FilesystemDamaged
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS),
			errors.Is(err, unix.ENOENT): // a disk of a btrfs is missing
			reason = csierr.FilesystemFeature
			if slices.ContainsFunc(o.Data, func(d volume.MountOption) bool { return d.Flag > 0 }) {
				reason = csierr.MountFlags // a flag, or two that exclude each other, may be the cause
			}
		}
		return nil, csierr.Convert(fmt.Errorf("mount %s as %s: %w%s", d.Path, fsType, err,
			kernelMessages(fs, o)), reason)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(o.Attr))
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "mount %s as %s: %w%s", d.Path, fsType, err,
			kernelMessages(fs, o))
	}
	m := &Mount{fd: fd, FSType: fsType}
	if err := m.Verify(d.Device); err != nil {
		_ = m.Close()
		return nil, cmp.Or(d.Reverify(), err)
	}
	return m, nil
}

// madeOf returns the source that marks the driver's mounts of the device at path: the path with
// "./" before its last element. This path leads to the same device, and nobody else mounts by it.
func madeOf(path string) string {
	dir, name := filepath.Split(path)
	return dir + "./" + name
}

// NodeMark is the mount attribute by which the driver recognizes its bind mounts of device nodes.
// Nobody else sets it on a device node, because it affects only directories.
const NodeMark = unix.MOUNT_ATTR_NODIRATIME

// Made reports whether a mount has the driver's mark: NodeMark for a device node, or madeOf's
// source for a filesystem. Without a mark the mount may still be the driver's: a device scan
// replaces the source of a btrfs, and earlier versions used another source and no NodeMark.
func Made(m *mountinfo.Info) bool {
	if node, _ := NodeRoot(m); node {
		return slices.Contains(strings.Split(m.Options, ","), "nodiratime")
	}
	return m.Source == madeOf(filepath.Clean(m.Source))
}

func configure(fs int, source string, o volume.MountOptions) error {
	if err := unix.FsconfigSetString(fs, "source", source); err != nil {
		return csierr.New(csierr.NodeToolFailed, "name the source %q, which may have 255 bytes: %w",
			source, err)
	}
	for _, f := range o.Super {
		if err := unix.FsconfigSetFlag(fs, f); err != nil {
			return err
		}
	}
	for _, d := range o.Data {
		var err error
		if d.HasValue {
			err = unix.FsconfigSetString(fs, d.Key, d.Value)
		} else {
			err = unix.FsconfigSetFlag(fs, d.Key)
		}
		if errors.Is(err, unix.EINVAL) && d.Flag > 0 {
			return csierr.New(csierr.MountFlags, "the filesystem refuses mount flag %d of the volume (%w); "+
				"correct it in mountOptions, which a volume keeps from the class that it was made with",
				d.Flag, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func inRoot(root *os.File, do func() error) error {
	_, err := async.Start(func() (struct{}, error) {
		runtime.LockOSThread() // never unlocked: the thread and its root end with the goroutine
		if unix.Gettid() == unix.Getpid() {
			// Go never ends the first thread, and /proc shows that thread's root as the process's. So keep
			// the first thread locked, and do the work in another thread.
			defer runtime.UnlockOSThread()
			return struct{}{}, inRoot(root, do)
		}
		for _, step := range []func() error{
			func() error { return unix.Unshare(unix.CLONE_FS) },
			func() error { return unix.Fchdir(int(root.Fd())) },
			func() error { return unix.Chroot(".") },
			do,
		} {
			if err := step(); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})()
	return err
}

// kernelMessages returns the kernel's messages about a failed mount. They may quote mount flags, so
// it returns none of them if the request has flags.
func kernelMessages(fs int, o volume.MountOptions) string {
	if o.Given {
		return " (see the kernel's log for details)"
	}
	var messages []string
	buf := make([]byte, 1024)
	for len(messages) < 8 {
		n, err := unix.Read(fs, buf)
		if err != nil || n <= 0 {
			break
		}
		// Each read returns one message. It begins with "e " for an error, "w " for a warning or "i ".
		messages = append(messages, strings.TrimSpace(strings.TrimPrefix(string(buf[:n]), "e ")))
	}
	if len(messages) == 0 {
		return ""
	}
	return ": " + csierr.OutputTail(strings.Join(messages, "; "))
}

// Clone makes a detached bind mount of the directory or device node at path. It does not follow a
// symbolic link in the last element of path.
func Clone(path, fsType string) (*Mount, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path,
		unix.OPEN_TREE_CLONE|unix.O_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, csierr.New(csierr.NodeToolFailed, "copy the mount of %q: %w", path, err)
	}
	return &Mount{fd: fd, FSType: fsType}, nil
}

// Open opens the mount that a path leads to.
func Open(path, fsType string) (*Mount, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return &Mount{fd: fd, FSType: fsType}, nil
}

// Statfs returns the statistics of the filesystem.
func (m *Mount) Statfs() (st unix.Statfs_t, err error) {
	err = unix.Fstatfs(m.fd, &st)
	return st, err
}

// Verify fails if the mount's device is not d. The path of d may lead to another device by now.
func (m *Mount) Verify(d blockdev.Device) error {
	major, minor, err := m.number(d)
	if err != nil {
		return fmt.Errorf("find the device of the mount: %w", err)
	}
	if major != d.Major || minor != d.Minor {
		return csierr.New(csierr.DeviceChanged, "the mount is of device %d:%d, not of %s (%s) with "+
			"serial %q", major, minor, d.Path, d.Number(), d.Serial)
	}
	return nil
}

// number returns the device number of the mounted filesystem's disk, or of a mounted device node.
// If several disks have the UUID of a btrfs, number tests whether the btrfs is on the disk likely.
func (m *Mount) number(likely blockdev.Device) (major, minor uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(m.fd, &st); err != nil {
		return 0, 0, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return unix.Major(st.Rdev), unix.Minor(st.Rdev), nil
	}
	if m.FSType != volume.Btrfs {
		return unix.Major(st.Dev), unix.Minor(st.Dev), nil
	}
	root, err := m.Root()
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = root.Close() }()
	return btrfsNumber(root, likely)
}

// SetAttributes sets and clears attributes of the mount.
func (m *Mount) SetAttributes(set, unset uint64) error {
	attr := unix.MountAttr{Attr_set: set, Attr_clr: unset}
	if err := unix.MountSetattr(m.fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return csierr.New(csierr.NodeToolFailed, "set the attributes of the mount: %w", err)
	}
	return nil
}

// Attach moves a detached mount to path.
func (m *Mount) Attach(path string) error {
	err := unix.MoveMount(m.fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "mount at %q: %w", path, err)
	}
	return nil
}

// Close closes the descriptor. The kernel then drops a mount that is still detached; an attached
// mount stays.
func (m *Mount) Close() error { return unix.Close(m.fd) }

// Root opens the mount's root directory for ioctls, which a mount descriptor does not accept.
func (m *Mount) Root() (*os.File, error) {
	fd, err := unix.Openat(m.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "."), nil
}

var errNotMounted = errors.New("not mounted")

// unmount unmounts the topmost mount at path, or returns errNotMounted. It is never lazy.
func unmount(path string) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	// Retry: the mount is busy while a process reads the filesystem's usage or opens its device.
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

// UnmountAll unmounts the given number of mounts at path, and fails if path still has one.
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

// OnlyAt fails if the filesystem of the mount layer is also mounted at another path.
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

// If a frozen filesystem is unmounted, it stays in the kernel and keeps its device open forever. A
// killed backup program may leave a filesystem frozen. So NodeUnstageVolume thaws a volume that is
// no longer published, and NodeStageVolume thaws a filesystem without a mount. No other call thaws,
// because the process that froze the filesystem may rely on the freeze.

// ioctlThaw is FITHAW of linux/fs.h, which x/sys lacks.
const ioctlThaw = 0xC0045878

// Thaw thaws the filesystem whose root directory is open as root, if it is frozen.
func Thaw(root *os.File) error {
	err := unix.IoctlSetInt(int(root.Fd()), ioctlThaw, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil // it is not frozen
	}
	return err
}

// ThawAt thaws the filesystem of a mount unless a process has a file or directory open in the
// mount. Such a process may rely on the freeze, and prevents the unmount in any case.
func ThawAt(m *mountinfo.Info) error {
	// The first call with MNT_EXPIRE returns EAGAIN if the mount is not in use. A second one unmounts,
	// as this one does if another process made the first. Then the filesystem stays frozen and keeps
	// the device in use, so the exclusive open at the end of the CSI call fails.
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

// openMount opens the root directory of a mount. It fails for a mount that another mount hides or
// that is in another namespace.
func openMount(m *mountinfo.Info) (*os.File, error) {
	root, err := os.OpenFile(m.Mountpoint, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|
		unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return checkMount(root, m)
}

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
