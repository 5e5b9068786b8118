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

func checkSystem() error { return nil }

// programAttr puts a program into its own process group, so that Ctrl-C at the terminal reaches
// only this process, which then stops the program. If this process ends, the kernel sends SIGTERM
// to the program.
func programAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// maxSocketPath is the longest path, without its NUL, that fits into the kernel's sockaddr_un.
const maxSocketPath = 107

func fitForRun(dir string) error {
	// The longest path of a socket is DIR/oxide-sanity-NNNNNNNNNN/rack-N/plugin-N/metrics.sock.
	if len(dir) > maxSocketPath-60 {
		return fmt.Errorf("%s: the path is too long for sockets below it", dir)
	}
	var fs unix.Statfs_t
	err := unix.Statfs(dir, &fs)
	if err == nil && fs.Flags&unix.ST_NODEV != 0 {
		err = errors.New("mounted nodev")
	}
	return Wrap(err, "%s", dir)
}

const shm = "/dev/shm"

// LockDir locks a directory until the caller closes the returned file. It fails at once if another
// process has the lock, or if the directory was removed before the lock was taken.
func LockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		_, err = os.Lstat(dir)
	}
	return Opened(f, Wrap(err, "lock %s", dir))
}

// removeKilled removes the directories that no run uses from /dev/shm, except those of failed runs.
func removeKilled() {
	dirs, _ := filepath.Glob(filepath.Join(shm, "oxide-sanity-*"))
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err != nil || time.Since(info.ModTime()) < time.Minute { // a new run has no lock yet
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

// DeviceNumber returns the "major:minor" of an open block device.
func DeviceNumber(device *os.File) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &st); err != nil {
		return "", fmt.Errorf("stat %s: %w", device.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", fmt.Errorf("%s is no block device", device.Name())
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), nil
}

// Owns returns an error if an open device is not a disk of this rack. A spec calls it before it
// writes to a raw volume: a disk of another rack may have got the device node's number by now.
// While the device is open, the kernel gives its number to no other disk.
func (r *Rack) Owns(device *os.File) (err error) {
	defer Catch(&err)
	number := Got(DeviceNumber(device))
	text, err := os.ReadFile("/sys/dev/block/" + number + "/loop/backing_file")
	Must(Wrap(err, "the device at %s has no disk", device.Name()))
	file := strings.TrimSuffix(string(text), "\n")
	if disks := filepath.Join(r.Dir, "sim") + "/"; !strings.HasPrefix(file, disks) {
		return fmt.Errorf("the device at %s is on %s, which is no disk of the rack in %s",
			device.Name(), file, r.Dir)
	}
	return nil
}

// StopLazyInit ends the kernel's background initialization of the inode tables of an ext4, because
// the kernel ignores errors of these writes and flushes.
func StopLazyInit(path string) error {
	return Wrap(unix.Mount("", path, "", unix.MS_REMOUNT, "noinit_itable"),
		"stop the initialization of inode tables at %s", path)
}

// LockVolumes takes the node service's locks of all volumes and disks, like a second driver
// process. Node calls are refused until the caller closes the returned file.
func (p *Plugin) LockVolumes() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(p.Dir, "volumes", "lock"), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return Opened(f, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
}

// MountedNumber returns the "major:minor" of a mounted device node, or of a filesystem's device.
func MountedNumber(m *mountinfo.Info) string {
	var st unix.Stat_t
	if err := unix.Stat(m.Mountpoint, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	if m.FSType == "btrfs" { // a mount of btrfs has a number of its own
		return btrfsNumber(m.Mountpoint)
	}
	return fmt.Sprintf("%d:%d", m.Major, m.Minor)
}

// btrfsNumber returns the "major:minor" of a btrfs with one device, or "".
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
