package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

func (p *Plane) DiskPath(id string) string { return filepath.Join(p.dir, "disks", id+".img") }

func (p *Plane) SnapshotPath(id string) string {
	return filepath.Join(p.dir, "snapshots", id+".img")
}

func (p *Plane) ImagePath(id string) string { return filepath.Join(p.dir, "images", id+".img") }

// createDisk makes a blank disk, which takes no space. One that is there already is left alone.
func (p *Plane) CreateDisk(id string, size int64) error {
	err := makeBacking(p.DiskPath(id), func(f *os.File) error { return f.Truncate(size) })
	if err != nil {
		return fmt.Errorf("create disk %s: %w", id, err)
	}
	return nil
}

// cloneDisk makes a disk with the bytes of source, a snapshot's or an image's file, and blank space
// behind them. One that is there already is left alone.
func (p *Plane) CloneDisk(ctx context.Context, id, source string, size int64) error {
	err := makeBacking(p.DiskPath(id), func(f *os.File) error { return fill(ctx, f, source, size) })
	if err != nil {
		return fmt.Errorf("create disk %s: %w", id, err)
	}
	return nil
}

// importImage makes an image of a file, or a blank one. Bytes that are there already have no record
// yet, and may be those of another file: they are replaced.
func (p *Plane) ImportImage(ctx context.Context, id, file string, size int64) error {
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

// removeDisk removes a disk's bytes. One that is gone already is a success; one that a guest has is
// refused.
func (p *Plane) RemoveDisk(id string) error {
	defer p.disks.Lock(id)()
	if d := p.pluggedDisk(id); d != nil {
		return fmt.Errorf("remove disk %s: instance %s still has it", id, d.spec.InstanceID)
	}
	if err := removeBacking(p.DiskPath(id)); err != nil {
		return fmt.Errorf("remove disk %s: %w", id, err)
	}
	return nil
}

// removeSnapshot removes a snapshot's bytes. One that is gone already is a success.
func (p *Plane) RemoveSnapshot(id string) error {
	if err := removeBacking(p.SnapshotPath(id)); err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	return nil
}

// unfinished ends the names of files that are being made.
const unfinished = ".tmp"

// makeBacking makes a file that is either whole and durable under its name or not there at all.
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
		// The space first: the disk may be full.
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

// fill gives f the bytes of the file at source, which nobody writes to, and the size.
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
		return fmt.Errorf("%s is no regular file", source)
	case st.Size() > size:
		return fmt.Errorf("%s has %d bytes, which do not fit into %d", source, st.Size(), size)
	}
	if !shareBlocks(f, src) {
		if err := copyKeepingHoles(ctx, f, src); err != nil {
			return err
		}
	}
	return f.Truncate(size)
}

// shareBlocks makes dst a copy of src at one point in time, without copying, where the filesystem
// can do so (FICLONE on xfs and btrfs; also bcachefs, ZFS and NFS 4.2). It keeps writers to src out
// meanwhile.
func shareBlocks(dst, src *os.File) bool {
	// Whatever is wrong, a copy either works or tells it better.
	return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil
}

// copyKeepingHoles copies the parts of src that have bytes, and leaves the rest unwritten. It is a
// point in time only if nobody writes to src.
func copyKeepingHoles(ctx context.Context, dst, src *os.File) error {
	st, err := src.Stat()
	if err != nil {
		return err
	}
	for hole := int64(0); hole < st.Size(); {
		data, err := src.Seek(hole, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // There is nothing but a hole behind.
		}
		if err != nil {
			return fmt.Errorf("look for data in %s: %w", src.Name(), err)
		}
		if hole, err = src.Seek(data, unix.SEEK_HOLE); err != nil {
			return fmt.Errorf("look for a hole in %s: %w", src.Name(), err)
		}
		if err := copyStretch(ctx, dst, src, data, hole); err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
	}
	return dst.Truncate(st.Size())
}

// copyStretch copies the bytes from one offset to another, and looks at ctx now and then.
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
		// Between two files the kernel copies, where it can.
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
