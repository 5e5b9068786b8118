package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// This file has what the harness needs of Linux.

// checkSystem demands a system with loop devices and mount namespaces.
func checkSystem() error { return nil }

// programAttr puts a program in a group of its own: an interrupt at the terminal reaches this
// process only, which then stops the others in order. No program outlives it.
func programAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// mountedNodev reports whether device nodes in a directory cannot be opened.
func mountedNodev(dir string) (bool, error) {
	var fs unix.Statfs_t
	err := unix.Statfs(dir, &fs)
	return fs.Flags&unix.ST_NODEV != 0, err
}

// Owns demands that an open device is a disk of this rack. A path that shows a raw volume shows a
// device number, and all racks of a machine share the numbers of one kernel: a spec asks before it
// writes, so that a volume's stale path is a failure here and not bytes on another rack's disk.
// While the descriptor is open the number stays what it is.
func (r *Rack) Owns(device *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &st); err != nil {
		return fmt.Errorf("stat %s: %w", device.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fmt.Errorf("%s is no block device", device.Name())
	}
	file, err := BackingFile(st.Rdev)
	if err != nil {
		return fmt.Errorf("%s shows a device without a disk: %w", device.Name(), err)
	}
	if disks := filepath.Join(r.Dir, "sim") + "/"; !strings.HasPrefix(file, disks) {
		return fmt.Errorf("%s shows a device on %s, which is no disk of the rack in %s",
			device.Name(), file, r.Dir)
	}
	return nil
}

// StopLazyInit ends what the kernel does by itself with an ext4 that is mounted at the path: it
// zeroes inode tables in the background, and ignores the errors of its writes and flushes.
func StopLazyInit(path string) error {
	if err := unix.Mount("", path, "", unix.MS_REMOUNT, "noinit_itable"); err != nil {
		return fmt.Errorf("stop the initialization of inode tables at %s: %w", path, err)
	}
	return nil
}

// BackingFile is the file behind a loop device, whatever a guest calls the device.
func BackingFile(number uint64) (string, error) {
	name, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file",
		unix.Major(number), unix.Minor(number)))
	return strings.TrimSuffix(string(name), "\n"), err
}

// LockVolumes keeps the node service from every volume and disk until the file is closed, as
// another process of the driver does that works on them: it locks the file of the locks whole.
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
