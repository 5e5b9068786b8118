package blockdev

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// descriptorPath returns a path that leads this process to the open device, wherever the device's
// own path leads to by now.
func (d *OpenDevice) descriptorPath() string {
	return filepath.Join("/proc/self/fd", strconv.Itoa(d.descriptor()))
}

// Root opens a directory in which there is nothing but the device's path, which leads to the
// device, wherever the path leads to outside by now.
//
// It is for the kernel's mounts, which take a path and no descriptor, and show it afterwards: other
// programs find out by it that the device is mounted. The directory is a detached tmpfs, of which
// nothing is left when it is closed.
func (d Device) Root() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, err
	}
	top, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	root := os.NewFile(uintptr(top), "/")
	if err := d.makeNode(top); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return root, nil
}

func (d Device) makeNode(top int) error {
	path := strings.TrimPrefix(d.Path, "/")
	for i, c := range path {
		if c != filepath.Separator {
			continue
		}
		if err := unix.Mkdirat(top, path[:i], 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return unix.Mknodat(top, path, unix.S_IFBLK|0o600, int(unix.Mkdev(d.Major, d.Minor)))
}
