package harness

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// The functions of this file need Linux.

// checkSystem returns an error on a system without loop devices and mount namespaces.
func checkSystem() error { return nil }

// programAttr puts a program into a process group of its own, so an interrupt at the terminal
// reaches only this process, which then stops its programs in order. If this process ends, the
// kernel ends its programs.
func programAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// mountedNodev reports whether device nodes in a directory cannot be opened.
func mountedNodev(dir string) (bool, error) {
	var fs unix.Statfs_t
	err := unix.Statfs(dir, &fs)
	return fs.Flags&unix.ST_NODEV != 0, err
}

// shm is a directory whose files are in memory.
const shm = "/dev/shm"

// LockDir locks a directory that nobody else has locked, without waiting, until the file is closed.
// It fails if the directory was removed in the meantime.
func LockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		_, err = os.Lstat(dir)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// removeKilled removes from memory the directories of killed runs that have not failed.
func removeKilled() {
	dirs, _ := filepath.Glob(filepath.Join(shm, "oxide-sanity-*"))
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err != nil || time.Since(info.ModTime()) < time.Minute { // its run may not have locked it yet
			continue
		}
		lock, err := LockDir(dir)
		if err != nil {
			continue // its run still has the lock
		}
		if _, err := os.Stat(filepath.Join(dir, failedMark)); errors.Is(err, os.ErrNotExist) {
			_ = os.RemoveAll(dir)
		}
		_ = lock.Close()
	}
}

// inMemory returns the directory whose files are in memory. It returns no directory if that one has
// too little space, or if the environment names another one.
func inMemory() []string {
	const enough = 4 * GiB
	var fs unix.Statfs_t
	if os.Getenv("OXIDE_SANITY_DIR") != "" || os.Getenv("TMPDIR") != "" ||
		unix.Statfs(shm, &fs) != nil || fs.Type != unix.TMPFS_MAGIC ||
		int64(fs.Bavail)*fs.Bsize < enough {
		return nil
	}
	return []string{shm}
}

// Owns returns an error unless an open device is a disk of this rack. A spec calls Owns before it
// writes to a raw volume. Its path has only a device number, which may meanwhile be the number of
// another rack's disk. While the device is open, the kernel does not reuse the number.
func (r *Rack) Owns(device *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &st); err != nil {
		return fmt.Errorf("stat %s: %w", device.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fmt.Errorf("%s is no block device", device.Name())
	}
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file",
		unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	if err != nil {
		return fmt.Errorf("the device at %s has no disk: %w", device.Name(), err)
	}
	file := strings.TrimSuffix(string(text), "\n")
	if disks := filepath.Join(r.Dir, "sim") + "/"; !strings.HasPrefix(file, disks) {
		return fmt.Errorf("the device at %s is on %s, which is no disk of the rack in %s",
			device.Name(), file, r.Dir)
	}
	return nil
}

// StopLazyInit ends the kernel's background work on an ext4 that is mounted at the path. The
// kernel zeroes inode tables there, and ignores the errors of these writes and flushes.
func StopLazyInit(path string) error {
	if err := unix.Mount("", path, "", unix.MS_REMOUNT, "noinit_itable"); err != nil {
		return fmt.Errorf("stop the initialization of inode tables at %s: %w", path, err)
	}
	return nil
}

// LockVolumes blocks the calls of the node service for every volume and disk until the returned
// file is closed. It takes all of the locks, as a second driver process could.
func (p *Plugin) LockVolumes() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(p.Dir, "volumes", "lock"), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// MountedNumber returns the number of a filesystem's device, or of a mounted device node.
func MountedNumber(m *mountinfo.Info) string {
	var st unix.Stat_t
	if err := unix.Stat(m.Mountpoint, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	if m.FSType == "btrfs" { // the mount's number is not the device's
		return btrfsNumber(m.Mountpoint)
	}
	return fmt.Sprintf("%d:%d", m.Major, m.Minor)
}

// btrfsNumber returns the number of the device of a btrfs, or "" if the kernel does not report it.
func btrfsNumber(path string) string {
	root, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = root.Close() }()
	const fsInfo = 0x8400941f // BTRFS_IOC_FS_INFO of include/uapi/linux/btrfs.h
	var info [1024]byte       // max_id, num_devices, fsid[16]
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), fsInfo, uintptr(unsafe.Pointer(&info)))
	if errno != 0 {
		return ""
	}
	id := hex.EncodeToString(info[16:32])
	uuid := strings.Join([]string{id[:8], id[8:12], id[12:16], id[16:20], id[20:]}, "-")
	devices, _ := filepath.Glob(filepath.Join("/sys/fs/btrfs", uuid, "devices/*/dev"))
	if len(devices) != 1 {
		return ""
	}
	number, _ := os.ReadFile(devices[0])
	return strings.TrimSpace(string(number))
}
