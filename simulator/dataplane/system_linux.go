package dataplane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// checkNodes verifies that device nodes can be made and opened in dir. device is dir's st_dev.
func checkNodes(dir string) (device uint64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("read the filesystem of %s: %w", dir, err)
	}
	if st.Flags&unix.ST_NODEV != 0 {
		return 0, fmt.Errorf("%s is on a filesystem that is mounted nodev, where the guests' device "+
			"nodes cannot be opened; give a directory on another filesystem", dir)
	}
	probe := filepath.Join(dir, "guests", ".probe")
	if err := os.Remove(probe); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("remove a node: %w", err)
	}
	// Try the null device, which needs the same permission as any other device node.
	if err := unix.Mknod(probe, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		return 0, fmt.Errorf("make a device node in %s: %w; run the simulator as root, on a "+
			"filesystem that can hold device nodes", dir, err)
	}
	var node unix.Stat_t
	if err := unix.Lstat(probe, &node); err != nil {
		return 0, fmt.Errorf("stat %s: %w", probe, err)
	}
	return node.Dev, os.Remove(probe)
}

// removeMount removes dir and the FUSE mounts of killed simulators on it. It refuses other mounts.
func removeMount(dir string) error {
	for {
		mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
			return m.Mountpoint != dir, false
		})
		// Only the last mount on a directory can be unmounted.
		if err == nil && len(mounts) > 0 && mounts[len(mounts)-1].FSType == "fuse.flakydisk" {
			err = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if err == nil {
				continue
			}
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
		return os.Remove(dir)
	}
}

// mountsIn returns the mount points in a directory, and the directory itself if it is one.
func mountsIn(dir string) (paths []string, err error) {
	if dir, err = filepath.EvalSymlinks(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	mounts, listed := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	for _, m := range mounts {
		paths = append(paths, m.Mountpoint)
	}
	return paths, errors.Join(err, listed)
}

func deviceOf(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", dir, err)
	}
	return st.Dev, nil
}

func makeNode(path string, loop loopdev.Device) error {
	dev := int(unix.Mkdev(loop.Major, loop.Minor))
	if err := unix.Mknod(path, unix.S_IFBLK|0o660, dev); err != nil {
		return fmt.Errorf("make node %s: %w", path, err)
	}
	return os.Chmod(path, 0o660) // Mknod has applied the umask
}

func isNodeOf(path string, loop loopdev.Device) bool {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK &&
		st.Rdev == unix.Mkdev(loop.Major, loop.Minor)
}

func backs(d loopdev.Device, path string) bool {
	var st unix.Stat_t
	return unix.Stat(path, &st) == nil && st.Dev == d.BackingDevice && st.Ino == d.BackingInode
}

// shareBlocks makes dst a reflink copy of src at one point in time. Writers of src wait meanwhile.
// Filesystems with FICLONE support this: xfs, btrfs, bcachefs, ZFS and NFS 4.2. On any failure it
// returns false. The caller then copies the bytes, and reports errors such as a full disk.
func shareBlocks(dst, src *os.File) bool {
	return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil
}

// hurry raises the thread's priority, if the kernel permits it, until the caller calls end().
func hurry() (end func()) {
	runtime.LockOSThread()
	was, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err == nil {
		err = unix.Setpriority(unix.PRIO_PROCESS, 0, -20)
	}
	return func() {
		if err == nil {
			err = unix.Setpriority(unix.PRIO_PROCESS, 0, 20-was) // Getpriority returned 20-nice
		}
		runtime.UnlockOSThread()
	}
}

// nextData finds the first range of f, from offset on, that is not a hole, or returns errNoData.
func nextData(f *os.File, offset int64) (start, end int64, err error) {
	start, err = f.Seek(offset, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return 0, 0, errNoData
	}
	if err != nil {
		return 0, 0, fmt.Errorf("find data in %s: %w", f.Name(), err)
	}
	if end, err = f.Seek(start, unix.SEEK_HOLE); err != nil {
		return 0, 0, fmt.Errorf("find a hole in %s: %w", f.Name(), err)
	}
	return start, end, nil
}
