package guest

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openDirect opens a file for reads that bypass the page cache. On a filesystem without direct
// reads it drops the cached pages of the file.
func openDirect(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if !errors.Is(err, unix.EINVAL) {
		return file, err
	}
	if file, err = os.Open(path); err != nil {
		return nil, err
	}
	if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return nil, errors.Join(fmt.Errorf("drop the cache of %s: %w", path, err), file.Close())
	}
	return file, nil
}

// newBuffer allocates memory for direct reads. The memory begins at a page.
func newBuffer(size int) ([]byte, func(), error) {
	buffer, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, fmt.Errorf("allocate a buffer: %w", err)
	}
	return buffer, func() { _ = unix.Munmap(buffer) }, nil
}

// deviceNumber returns the number of an open block device.
func deviceNumber(file *os.File) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return "", fmt.Errorf("stat %s: %w", file.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", fmt.Errorf("%s is no block device", file.Name())
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), nil
}

// filesystemBytes returns the size of the filesystem at a path, as statfs reports it to a
// workload.
func filesystemBytes(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", path, err)
	}
	return int64(st.Blocks) * st.Bsize, nil
}

// KernelRelease returns the output of uname -r.
func KernelRelease() (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	return unix.ByteSliceToString(name.Release[:]), nil
}
