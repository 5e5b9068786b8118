package blockdev

import (
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Descriptors is the directory in which a process finds what it has open.
const Descriptors = "/proc/self/fd"

// descriptorPath returns a path that leads this process to the open device, wherever the device's
// own path leads to by now.
func (d *OpenDevice) descriptorPath() string {
	return filepath.Join(Descriptors, strconv.Itoa(d.descriptor()))
}

// Link makes a path, the name of the returned file, that leads to the open device until the file is
// closed. It is for a mount, whose source can be no descriptor, and shows as the mount's source
// afterwards. So it ends with the disk's serial number: it tells people which disk it is, and
// programs that count each source once, such as cAdvisor, that two disks are two.
//
// The path is a symbolic link in a detached tmpfs, of which nothing is left when the process dies.
func (d *OpenDevice) Link() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, err
	}
	dir, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(dir), filepath.Join(Descriptors, strconv.Itoa(dir), d.Serial))
	if err := unix.Symlinkat(d.descriptorPath(), dir, d.Serial); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
