package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/google/uuid"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// findMount opens a mount of the filesystem on the device in the mount namespace of any process.
// It returns nil if there is none. One mount is enough, because a freeze applies to the whole
// filesystem.
func (z freezer) findMount(loop loopdev.Device) (*os.File, error) {
	processes, err := os.ReadDir(z.proc)
	if err != nil {
		return nil, err
	}
	btrfs, err := btrfsOn(loop)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, process := range processes {
		if _, err := strconv.Atoi(process.Name()); err != nil {
			continue
		}
		dir := filepath.Join(z.proc, process.Name())
		// Processes that share namespace and root see the same mounts.
		namespace, err := os.Readlink(filepath.Join(dir, "ns", "mnt"))
		if err != nil {
			continue // The process has ended.
		}
		root, err := os.Readlink(filepath.Join(dir, "root"))
		if err != nil || seen[namespace+root] {
			continue
		}
		mount, complete := findMountSeenBy(dir, loop, btrfs)
		if mount != nil {
			return mount, nil
		}
		// If the process ended in the meantime, look at the next one with the same view.
		seen[namespace+root] = complete
	}
	return nil, nil
}

// findMountSeenBy opens a mount that a process sees. It reports whether it checked every mount of
// the process.
func findMountSeenBy(proc string, loop loopdev.Device, btrfs uuid.UUID) (*os.File, bool) {
	table, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return nil, false
	}
	candidates, err := mountinfo.GetMountsFromReader(bytes.NewReader(table),
		func(m *mountinfo.Info) (skip, stop bool) {
			device := m.Major == int(loop.Major) && m.Minor == int(loop.Minor)
			// A btrfs has a device number of its own.
			return !device && (btrfs == uuid.Nil || m.FSType != "btrfs"), false
		})
	if err != nil {
		return nil, false
	}
	complete := true
	for _, m := range candidates {
		mount, err := openMount(filepath.Join(proc, "root", m.Mountpoint))
		if err != nil {
			// Another mount may cover this one; the check is incomplete only if the process ended.
			complete = complete && !errors.Is(err, unix.ESRCH) && exists(proc)
			continue
		}
		if isMountOf(mount, loop, btrfs) {
			return mount, true
		}
		mount.Close()
	}
	return nil, complete
}

// openMount opens a mount's root, which may be a file (a bind mount). It opens nothing else, such
// as a FIFO.
func openMount(path string) (*os.File, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() && !st.Mode().IsRegular() {
		return nil, fs.ErrInvalid
	}
	return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
}

// isMountOf reports whether the opened file is on the filesystem on the device, and not on a
// later mount at the same path.
func isMountOf(mount *os.File, loop loopdev.Device, btrfs uuid.UUID) bool {
	if btrfs != uuid.Nil {
		id, err := btrfsOf(mount)
		return err == nil && id == btrfs
	}
	var st unix.Stat_t
	err := unix.Fstat(int(mount.Fd()), &st)
	return err == nil && st.Dev == unix.Mkdev(loop.Major, loop.Minor)
}

// btrfsOn returns the ID of the mounted btrfs that uses the device, or uuid.Nil.
func btrfsOn(loop loopdev.Device) (uuid.UUID, error) {
	found, err := filepath.Glob(fmt.Sprintf("/sys/fs/btrfs/*/devices/loop%d", loop.Number))
	if err != nil || len(found) == 0 {
		return uuid.Nil, err
	}
	id := strings.TrimPrefix(found[0], "/sys/fs/btrfs/")
	return uuid.Parse(id[:strings.IndexByte(id, '/')])
}

// btrfsInfo has the needed part of struct btrfs_ioctl_fs_info_args (linux/btrfs.h).
type btrfsInfo struct {
	_  [2]uint64
	id uuid.UUID
	_  [1024 - 16 - 16]byte
}

const ioctlBtrfsInfo = 0x8400941F // BTRFS_IOC_FS_INFO

// btrfsOf returns the ID of the btrfs that contains a file.
func btrfsOf(mount *os.File) (uuid.UUID, error) {
	var info btrfsInfo
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, mount.Fd(), ioctlBtrfsInfo,
		uintptr(unsafe.Pointer(&info)))
	if errno != 0 {
		return uuid.Nil, errno
	}
	return info.id, nil
}
