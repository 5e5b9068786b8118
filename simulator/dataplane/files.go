package dataplane

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// files are the bytes of disks, snapshots and images, one file for each, below dir.
type files struct {
	dir string
	log *slog.Logger
}

// IdentityFile is the name of the file with the rack's identity.
const IdentityFile = "identity"

// identify returns the identity of the rack in a directory. The first simulator there creates it,
// unless the caller that starts the rack has done so.
func identify(dir string) (string, error) {
	path := filepath.Join(dir, IdentityFile)
	err := makeBacking(path, func(f *os.File) error {
		_, err := f.WriteString(rand.Text())
		return err
	})
	if err != nil {
		return "", err
	}
	id, err := os.ReadFile(path)
	if err == nil && len(id) == 0 {
		err = fmt.Errorf("%s is empty; remove it, with no simulator running there", path)
	}
	return string(id), err
}

// DiskPath returns the path of a disk's file.
func (p files) DiskPath(id string) string { return filepath.Join(p.dir, "disks", id+".img") }

// SnapshotPath returns the path of a snapshot's file.
func (p files) SnapshotPath(id string) string {
	return filepath.Join(p.dir, "snapshots", id+".img")
}

// ImagePath returns the path of an image's file.
func (p files) ImagePath(id string) string { return filepath.Join(p.dir, "images", id+".img") }

// CreateDisk creates a blank disk, which uses no space. It does not change an existing one.
func (p files) CreateDisk(id string, size int64) error {
	err := makeBacking(p.DiskPath(id), func(f *os.File) error { return f.Truncate(size) })
	if err != nil {
		return fmt.Errorf("create disk %s: %w", id, err)
	}
	return nil
}

// CloneDisk creates a disk with the bytes of source, the file of a snapshot or an image, and
// blank space after them. It does not change an existing disk.
func (p files) CloneDisk(ctx context.Context, id, source string, size int64) error {
	err := makeBacking(p.DiskPath(id), func(f *os.File) error { return fill(ctx, f, source, size) })
	if err != nil {
		return fmt.Errorf("create disk %s: %w", id, err)
	}
	return nil
}

// ImportImage creates an image from a file, or a blank one. It replaces existing bytes, because
// an earlier import may have ended without a record and may have been of another file.
func (p files) ImportImage(ctx context.Context, id, file string, size int64) error {
	if err := removeBacking(p.ImagePath(id)); err != nil {
		return fmt.Errorf("import image %s: %w", id, err)
	}
	err := makeBacking(p.ImagePath(id), func(f *os.File) error {
		if file == "" {
			return f.Truncate(size)
		}
		return fill(ctx, f, file, size)
	})
	if err != nil {
		return fmt.Errorf("import image %s: %w", id, err)
	}
	return nil
}

// RemoveSnapshot removes a snapshot's bytes, if they exist.
func (p files) RemoveSnapshot(id string) error {
	if err := removeBacking(p.SnapshotPath(id)); err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	return nil
}

// unfinished is the suffix of files that are being written.
const unfinished = ".tmp"

// makeBacking creates a file that is complete and durable, or does not exist.
func makeBacking(path string, write func(*os.File) error) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	temp := path + unfinished
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		// Free the space: the filesystem may be full.
		return errors.Join(err, os.Remove(temp))
	}
	return FlushDir(filepath.Dir(path))
}

func removeBacking(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return FlushDir(filepath.Dir(path))
}

// fill copies into f the bytes of the file at source, which nobody writes, and sets f's size.
func fill(ctx context.Context, f *os.File, source string, size int64) error {
	src, err := os.Open(source)
	if err != nil {
		return err
	}
	defer src.Close()
	st, err := src.Stat()
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file", source)
	case st.Size() > size:
		return fmt.Errorf("%s has %d bytes, which is more than %d", source, st.Size(), size)
	}
	if !shareBlocks(f, src) {
		if err := copyKeepingHoles(ctx, f, src); err != nil {
			return err
		}
	}
	return f.Truncate(size)
}

// errNoData means that the rest of the file is a hole.
var errNoData = errors.New("no data")

// copyKeepingHoles copies the parts of src that are not holes. The copy shows one point in time
// only if nobody writes to src.
func copyKeepingHoles(ctx context.Context, dst, src *os.File) error {
	st, err := src.Stat()
	if err != nil {
		return err
	}
	for offset := int64(0); offset < st.Size(); {
		start, end, err := nextData(src, offset)
		if errors.Is(err, errNoData) {
			break
		}
		if err != nil {
			return err
		}
		if err := copyStretch(ctx, dst, src, start, end); err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
		offset = end
	}
	return dst.Truncate(st.Size())
}

// copyStretch copies the bytes from one offset to another, until ctx ends.
func copyStretch(ctx context.Context, dst, src *os.File, from, to int64) error {
	if _, err := src.Seek(from, io.SeekStart); err != nil {
		return err
	}
	if _, err := dst.Seek(from, io.SeekStart); err != nil {
		return err
	}
	const piece = 16 << 20
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		// The kernel copies between two files if it can.
		n, err := io.CopyN(dst, src, min(piece, to-from))
		if err != nil {
			return err
		}
		from += n
	}
	return nil
}

// FlushDir makes the names in a directory durable.
func FlushDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("make %s durable: %w", dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("make %s durable: %w", dir, err)
	}
	return nil
}

// resize changes the size of a disk's file.
func (p files) resize(diskID string, size int64) error {
	st, err := os.Stat(p.DiskPath(diskID))
	if err != nil || st.Size() == size {
		return err
	}
	return os.Truncate(p.DiskPath(diskID), size)
}

// trim cuts a disk's file to the size, if the file exists and is larger.
func (p files) trim(diskID string, size int64) error {
	st, err := os.Stat(p.DiskPath(diskID))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil || st.Size() <= size:
		return err
	}
	return os.Truncate(p.DiskPath(diskID), size)
}

// diskInodes returns the inodes of the disks' files, by file name. A loop device is compared by
// its inode. Its path is no use, because the kernel reports the path in the mount namespace in
// which the file was attached.
func (p files) diskInodes() (map[string]uint64, error) {
	entries, err := os.ReadDir(filepath.Join(p.dir, "disks"))
	if err != nil {
		return nil, err
	}
	inodes := map[string]uint64{}
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			inodes[e.Name()] = st.Ino
		}
	}
	return inodes, nil
}

// removeOrphans removes the files of a kind that belong to no object.
func (p files) removeOrphans(kind string, ids []string) error {
	belongs := map[string]bool{}
	for _, id := range ids {
		belongs[id+".img"] = true
	}
	return p.removeFiles(kind, func(name string) bool { return !belongs[name] })
}

// removeUnfinished removes the files of a kind that were not written completely.
func (p files) removeUnfinished(kind string) error {
	return p.removeFiles(kind, func(name string) bool {
		return strings.HasSuffix(name, unfinished)
	})
}

func (p files) removeFiles(kind string, remove func(name string) bool) error {
	dir := filepath.Join(p.dir, kind)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if remove(e.Name()) {
			p.log.Info("removing a file without a record", slog.String("file", e.Name()))
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(append(errs, FlushDir(dir))...)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
