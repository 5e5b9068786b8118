package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// markFile is a file in every directory that this program makes on a machine. It says what the
// directory is for.
const markFile = ".oxide-conformance"

// ErrNotOwn is the error for a directory that nothing proves to be this program's.
var ErrNotOwn = errors.New("nothing proves that this program made it, so it was left")

// MarkOwn marks a directory that this process has made.
func MarkOwn(dir, purpose string) error {
	file, err := os.OpenFile(filepath.Join(dir, markFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("mark a directory: %w", err)
	}
	_, err = fmt.Fprintln(file, purpose)
	return errors.Join(err, file.Close())
}

// RemoveOwn removes a directory with its content, or does nothing if it does not exist. The
// directory must be this user's and no link, nobody else may write into it, it must have the mark
// for this purpose, and nothing may be mounted below it.
func RemoveOwn(path, purpose string) error {
	parent, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	name := filepath.Base(path)
	named, err := parent.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !named.IsDir() || !IsOwn(named) {
		return errors.Join(fmt.Errorf("%s: %w", path, ErrNotOwn), err)
	}
	dir, err := parent.OpenRoot(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	opened, errOpened := dir.Stat(".")
	mark, errMark := dir.Lstat(markFile)
	if err := errors.Join(errOpened, errMark); err != nil || !os.SameFile(named, opened) ||
		!mark.Mode().IsRegular() || !IsOwn(mark) {
		return fmt.Errorf("%s: %w: %w", path, ErrNotOwn, errors.Join(err, errors.New("no mark")))
	}
	if text, err := dir.ReadFile(markFile); err != nil || strings.TrimSpace(string(text)) != purpose {
		return errors.Join(fmt.Errorf("%s: %w: its mark is %.40q", path, ErrNotOwn, text), err)
	}
	mounts, err := harness.MountsBelow(path)
	if err != nil || len(mounts) > 0 {
		return errors.Join(fmt.Errorf("%s was left: mounted below it are %q", path, mounts), err)
	}
	entries, err := fs.ReadDir(dir.FS(), ".")
	for _, entry := range entries {
		if entry.Name() != markFile { // the mark is removed last, so that a second try is possible
			err = errors.Join(err, dir.RemoveAll(entry.Name()))
		}
	}
	if err != nil {
		return err
	}
	return errors.Join(dir.Remove(markFile), parent.Remove(name))
}

// IsOwn reports whether a file belongs to this user and nobody else may write to it.
func IsOwn(info fs.FileInfo) bool {
	st, is := info.Sys().(*syscall.Stat_t)
	return is && int(st.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0
}

// maxFile limits what ReadFile reads.
const maxFile = 16 << 20

// ReadFile reads a regular file. It does not wait for the other end of a FIFO or a device.
func ReadFile(path string) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: expected a regular file; found %s", path, info.Mode())
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(file, maxFile))
}
