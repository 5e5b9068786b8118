package dataplane

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
)

// files are the bytes of disks, snapshots and images, one file for each, below dir.
type files struct {
	dir string
	log *slog.Logger
	// volatile files need not survive a power cut of the machine.
	volatile bool
	// removed gets the ID of each object whose files are gone.
	removed func(id string)
}

// Kinds are the directories of the files, by the kind of object.
var Kinds = []string{"disks", "snapshots", "images"}

// IdentityFile is the name of the file with the rack's identity.
const IdentityFile = "identity"

// identify returns the identity of the rack in the directory. The first simulator there creates it,
// unless the caller that starts the rack has done so.
func (p files) identify() (string, error) {
	path := filepath.Join(p.dir, IdentityFile)
	err := p.makeBacking(path, func(f *os.File) error {
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

// Allocated returns the bytes that a disk's file uses, not counting its holes.
func (p files) Allocated(id string) (int64, error) {
	info, err := os.Stat(p.DiskPath(id))
	if err != nil {
		return 0, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512, nil
	}
	return info.Size(), nil
}

// CreateDisk creates a blank disk, which uses no space. It does not change an existing one.
func (p files) CreateDisk(id string, size int64) error {
	err := p.makeBacking(p.DiskPath(id), func(f *os.File) error { return f.Truncate(size) })
	if err != nil {
		return fmt.Errorf("create disk %s: %w", id, err)
	}
	return nil
}

// CloneDisk creates a disk with the bytes of source, the file of a snapshot or an image, and
// blank space after them. It does not change an existing disk.
func (p files) CloneDisk(ctx context.Context, id, source string, size int64) error {
	err := p.makeBacking(p.DiskPath(id), func(f *os.File) error { return fill(ctx, f, source, size) })
	if err != nil {
		return fmt.Errorf("create disk %s: %w", id, err)
	}
	return nil
}

// ImportImage creates an image from a file, or a blank one. It replaces existing bytes, because
// an earlier import may have ended without a record and may have been of another file.
func (p files) ImportImage(ctx context.Context, id, file string, size int64) error {
	if err := p.removeBacking(p.ImagePath(id)); err != nil {
		return fmt.Errorf("import image %s: %w", id, err)
	}
	err := p.makeBacking(p.ImagePath(id), func(f *os.File) error {
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

// WriteDisk writes to a disk that no guest has. FlushDisk makes the bytes durable.
func (p files) WriteDisk(id string, offset int64, data []byte) error {
	return p.changeDisk(id, func(f *os.File) error {
		_, err := f.WriteAt(data, offset)
		return err
	})
}

// FlushDisk makes the bytes of a disk durable.
func (p files) FlushDisk(id string) error { return p.changeDisk(id, (*os.File).Sync) }

func (p files) changeDisk(id string, change func(*os.File) error) error {
	f, err := os.OpenFile(p.DiskPath(id), os.O_WRONLY, 0)
	if err == nil {
		err = errors.Join(change(f), f.Close())
	}
	if err != nil {
		return fmt.Errorf("write disk %s: %w", id, err)
	}
	return nil
}

// RemoveImage removes an image's bytes, if they exist.
func (p files) RemoveImage(id string) error {
	if err := p.removeBacking(p.ImagePath(id)); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	p.removed(id)
	return nil
}

// unfinished is the suffix of files that are being written.
const unfinished = ".tmp"

// makeBacking creates a file that is complete and durable, or does not exist.
func (p files) makeBacking(path string, write func(*os.File) error) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	temp := path + unfinished
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil && !p.volatile {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		// Free the space: the filesystem may be full.
		return errors.Join(err, os.Remove(temp))
	}
	return p.flushDir(filepath.Dir(path))
}

// RemoveTree removes a directory of the rack, unless something is mounted in it, which is not the
// rack's.
func RemoveTree(dir string) error {
	if mounted, err := mountsIn(dir); err != nil || len(mounted) > 0 {
		return errors.Join(err, fmt.Errorf("%s stays: unmount %q first", dir, mounted))
	}
	return os.RemoveAll(dir)
}

func (p files) removeBacking(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return p.flushDir(filepath.Dir(path))
}

// flushDir makes the names in a directory durable, unless the files are volatile.
func (p files) flushDir(dir string) error {
	if p.volatile {
		return nil
	}
	return FlushDir(dir)
}

// fill copies the bytes of the file source, which must not be written meanwhile, and sets f's size.
func fill(ctx context.Context, f *os.File, source string, size int64) error {
	src, err := os.OpenFile(source, os.O_RDONLY|syscall.O_NONBLOCK, 0) // it may be a pipe
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

// nextNonZero is nextData for systems that do not report the holes of a file: it takes blocks of
// zeroes for holes.
func nextNonZero(f *os.File, offset int64) (start, end int64, err error) {
	var zeroes, block [64 << 10]byte
	found := false
	for at := offset; ; {
		n, err := f.ReadAt(block[:], at)
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return 0, 0, fmt.Errorf("find data in %s: %w", f.Name(), err)
		}
		switch hole := bytes.Equal(block[:n], zeroes[:n]); {
		case hole && found:
			return start, at, nil
		case !hole && !found:
			start, found = at, true
		}
		at += int64(n)
		if last && !found {
			return 0, 0, errNoData
		}
		if last {
			return start, at, nil
		}
	}
}

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

// diskInodes returns the inodes of the disks' files, by file name. They identify the file of a loop
// device; its path does not, because it is a path in the mount namespace that attached the file.
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
		if st, ok := info.Sys().(*syscall.Stat_t); ok && backing.MatchString(e.Name()) {
			inodes[e.Name()] = st.Ino
		}
	}
	return inodes, nil
}

// backing matches the names of finished and unfinished files.
var backing = regexp.MustCompile(`^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.img(\.tmp)?$`)

// removeOrphans removes the files of a kind of the objects in left, which have no record any more,
// and unfinished files. It keeps every other file, which is not the rack's.
func (p files) removeOrphans(kind string, ids, left []string) error {
	dir := filepath.Join(p.dir, kind)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		name := append(backing.FindStringSubmatch(e.Name()), "", "", "")
		recorded := slices.Contains(ids, name[1])
		ours := name[0] != "" && e.Type().IsRegular() && (recorded || slices.Contains(left, name[1]))
		switch {
		case recorded && name[2] == "":
		case ours:
			p.log.Info("removing a file without a record", slog.String("file", e.Name()))
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		default:
			p.log.Warn("keeping a file that no record ever had", slog.String("file", e.Name()))
		}
	}
	return errors.Join(append(errs, p.flushDir(dir))...)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
