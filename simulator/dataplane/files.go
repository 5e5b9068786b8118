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
	"strconv"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Kinds are the kinds of objects with files. Each is also the name of the directory of its files.
var Kinds = []string{"disks", "snapshots", "images"}

// IdentityFile is the name of the file with the rack's identity.
const IdentityFile = "identity"

// Files has the files with the bytes of disks, snapshots and images, and the rack's identity file.
type Files struct {
	dir      string
	volatile bool
	log      *slog.Logger
}

func (f Files) identify() (string, error) {
	path := filepath.Join(f.dir, IdentityFile)
	err := f.create(path, func(f *os.File) error {
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

func (f Files) path(kind, id string) string { return filepath.Join(f.dir, kind, id+".img") }

// DiskPath returns the path of a disk's file.
func (f Files) DiskPath(id string) string { return f.path("disks", id) }

// SnapshotPath returns the path of a snapshot's file.
func (f Files) SnapshotPath(id string) string { return f.path("snapshots", id) }

// ImagePath returns the path of an image's file.
func (f Files) ImagePath(id string) string { return f.path("images", id) }

// Allocated returns how many bytes of the filesystem a disk's file uses; its holes use none.
func (f Files) Allocated(id string) (int64, error) {
	info, err := os.Stat(f.DiskPath(id))
	if err != nil {
		return 0, err
	}
	return info.Sys().(*syscall.Stat_t).Blocks * 512, nil
}

// CreateDisk creates a blank disk, which uses no space. It does not change a disk that exists.
func (p *Plane) CreateDisk(id string, size int64) (err error) {
	defer wrap(&err, "create disk %s", id)
	err = p.Files.create(p.Files.DiskPath(id), func(f *os.File) error { return f.Truncate(size) })
	return p.tampering.life(event{what: diskMade, disk: id, bytes: size}, err)
}

// CloneDisk creates a disk with the bytes of a snapshot's or an image's file, and zeroes behind
// them. It does not change a disk that exists.
func (p *Plane) CloneDisk(ctx context.Context, id, source string, size int64) (err error) {
	defer wrap(&err, "create disk %s", id)
	if t := p.tampering.tamper(); t.source != nil {
		if source, err = t.source(p.Files, source); err != nil {
			return err
		}
	}
	err = p.Files.create(p.Files.DiskPath(id),
		func(f *os.File) error { return fill(ctx, f, source, size) })
	return p.tampering.life(event{what: diskCloned, disk: id, snapshot: source, bytes: size}, err)
}

// ImportImage creates an image from a file, or a blank image if file is "". It replaces the bytes
// of an interrupted import, because that import may have copied another file.
func (p *Plane) ImportImage(ctx context.Context, id, file string, size int64) (err error) {
	defer wrap(&err, "import image %s", id)
	if err := p.Files.remove(p.Files.ImagePath(id)); err != nil {
		return err
	}
	return p.Files.create(p.Files.ImagePath(id), func(f *os.File) error {
		if file == "" {
			return f.Truncate(size)
		}
		return fill(ctx, f, file, size)
	})
}

// WriteDisk writes to a disk that no guest has. FlushDisk makes these writes durable.
func (f Files) WriteDisk(id string, offset int64, data []byte) error {
	return f.changeDisk(id, func(f *os.File) error {
		_, err := f.WriteAt(data, offset)
		return err
	})
}

// FlushDisk makes the bytes of a disk durable.
func (f Files) FlushDisk(id string) error { return f.changeDisk(id, (*os.File).Sync) }

func (f Files) changeDisk(id string, change func(*os.File) error) (err error) {
	defer wrap(&err, "write disk %s", id)
	disk, err := os.OpenFile(f.DiskPath(id), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(change(disk), disk.Close())
}

// RemoveSnapshot removes a snapshot's bytes, if they exist.
func (p *Plane) RemoveSnapshot(id string) (err error) {
	defer wrap(&err, "remove snapshot %s", id)
	path := p.Files.SnapshotPath(id)
	if err := p.tampering.life(event{what: snapshotRemoving, snapshot: path}, nil); err != nil {
		return err
	}
	if err := p.Files.remove(path); err != nil {
		return err
	}
	p.Removed(id)
	return p.tampering.life(event{what: snapshotRemoved, snapshot: path}, nil)
}

// RemoveImage removes an image's bytes, if they exist.
func (p *Plane) RemoveImage(id string) (err error) {
	defer wrap(&err, "remove image %s", id)
	if err = p.Files.remove(p.Files.ImagePath(id)); err == nil {
		p.Removed(id)
	}
	return err
}

const unfinished = ".tmp"

// create creates a complete and durable file, or no file. It keeps a file that exists.
func (f Files) create(path string, write func(*os.File) error) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	temp := path + unfinished
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err = write(file); err == nil && !f.volatile {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		// Free the space: the filesystem may be full.
		return errors.Join(err, os.Remove(temp))
	}
	return f.flushDir(filepath.Dir(path))
}

// RemoveTree removes a directory of the rack. It refuses if anything is mounted there.
func RemoveTree(dir string) error {
	if mounted, err := mountsIn(dir); err != nil || len(mounted) > 0 {
		return errors.Join(err, fmt.Errorf("%s stays: unmount %q first", dir, mounted))
	}
	return os.RemoveAll(dir)
}

func (f Files) remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return f.flushDir(filepath.Dir(path))
}

func (f Files) flushDir(dir string) error {
	if f.volatile {
		return nil
	}
	return FlushDir(dir)
}

// fill copies the file source to f and sets the size of f. Nobody may write to source meanwhile.
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

var errNoData = errors.New("no data")

// nextNonZero finds the next block that is not zero. It is for systems that do not report holes.
func nextNonZero(f *os.File, offset int64) (start, end int64, err error) {
	var zeroes, block [64 << 10]byte
	for at := offset; ; at += int64(len(block)) {
		n, err := f.ReadAt(block[:], at)
		switch {
		case err != nil && !errors.Is(err, io.EOF):
			return 0, 0, fmt.Errorf("find data in %s: %w", f.Name(), err)
		case !bytes.Equal(block[:n], zeroes[:n]):
			return at, at + int64(n), nil
		case err != nil:
			return 0, 0, errNoData
		}
	}
}

// copyKeepingHoles copies those parts of src that are not holes, and fails when ctx ends. The copy
// shows one point in time only if nobody writes to src.
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
		const piece = 16 << 20
		offset = min(end, start+piece)
		_, inSrc := src.Seek(start, io.SeekStart)
		_, inDst := dst.Seek(start, io.SeekStart)
		if err := errors.Join(inSrc, inDst, ctx.Err()); err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
		// CopyN lets the kernel copy the bytes, if it can.
		if _, err := io.CopyN(dst, src, offset-start); err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
	}
	return dst.Truncate(st.Size())
}

// FlushDir makes the entries of a directory durable.
func FlushDir(dir string) (err error) {
	defer wrap(&err, "make %s durable", dir)
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (f Files) resize(diskID string, size int64) error {
	now, err := fileSize(f.DiskPath(diskID))
	if err != nil || now == size {
		return err
	}
	return os.Truncate(f.DiskPath(diskID), size)
}

func (f Files) trim(diskID string, size int64) error {
	now, err := fileSize(f.DiskPath(diskID))
	if errors.Is(err, fs.ErrNotExist) || err == nil && now <= size {
		return nil
	}
	return f.resize(diskID, size)
}

// diskInodes maps the names of the disks' files to their inodes. Only the inode identifies the file
// of a loop device: the file's path depends on the mount namespace in which it was attached.
func (f Files) diskInodes() (map[string]uint64, error) {
	entries, err := os.ReadDir(filepath.Join(f.dir, "disks"))
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

var backing = regexp.MustCompile(`^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.img(\.tmp)?$`)

// removeOrphans removes all files of deleted objects (the parameter left), and unfinished files of
// existing objects (ids). It keeps other files, because the rack may not have created them.
func (f Files) removeOrphans(kind string, ids, left []string) error {
	dir := filepath.Join(f.dir, kind)
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
			f.log.Info("removing a file without a record", slog.String("file", e.Name()))
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		default:
			f.log.Warn("keeping a file that no record ever had", slog.String("file", e.Name()))
		}
	}
	return errors.Join(append(errs, f.flushDir(dir))...)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// ErrWrittenMeanwhile means that no consistent copy of a disk could be made. The host's filesystem
// has no reflinks, and either a guest wrote during each copy, or the kernel counts no writes.
var ErrWrittenMeanwhile = errors.New("the disk was written while it was copied")

const snapshotAttempts = 20

// SnapshotDisk copies a disk's bytes as they are at one moment during the call. It does not change
// a snapshot that exists. If it returns ErrWrittenMeanwhile, there is no snapshot.
//
// As on a rack, the guest does not flush its caches first, so a filesystem in the snapshot is in
// the state after a power cut.
func (p *Plane) SnapshotDisk(ctx context.Context, snapshotID, diskID string) (err error) {
	defer p.disks.Lock(diskID)()
	defer wrap(&err, "snapshot %s of disk %s", snapshotID, diskID)
	err = p.Files.create(p.Files.SnapshotPath(snapshotID), func(f *os.File) error {
		src, err := os.Open(p.Files.DiskPath(diskID))
		if err != nil {
			return err
		}
		defer src.Close()
		d := p.guests.disk(diskID)
		plugged := d != nil && d.loop != nil
		if d != nil { // a virtual machine is paused during the copy
			resume, err := p.VMs.still(d.guest)
			if err != nil {
				return err
			}
			defer resume()
		}
		switch {
		case shareBlocks(f, src):
		case plugged && p.tampering.tamper().copied == nil:
			err = p.copyStill(ctx, f, src, d)
		default: // either no guest can write, or a mutation damages the copy
			err = copyKeepingHoles(ctx, f, src)
		}
		if err != nil || !plugged {
			return err
		}
		if err := p.tampering.copied(ctx, f, d); err != nil {
			return err
		}
		return f.Truncate(d.spec.SizeBytes)
	})
	return p.tampering.life(
		event{what: snapshotTaken, disk: diskID, snapshot: p.Files.SnapshotPath(snapshotID)}, err)
}

func (p *Plane) copyStill(ctx context.Context, dst, src *os.File, d *plugged) error {
	// Raise the priority: otherwise a copy on a busy host lasts longer than a pause in the writes.
	defer hurry()()
	for attempt := range snapshotAttempts {
		if err := pause(ctx, time.Duration(attempt)*10*time.Millisecond); err != nil {
			return err
		}
		if err := dst.Truncate(0); err != nil {
			return err
		}
		still, err := copyOnce(ctx, dst, src, d)
		if err != nil || still {
			return err
		}
		p.Log.Info("copying a disk again that was written to meanwhile",
			slog.String("disk", d.spec.DiskID), slog.Int("attempt", attempt+1))
	}
	return ErrWrittenMeanwhile
}

// copyOnce copies a disk, and reports whether no write happened meanwhile. Before the copy it
// counts the completed writes and then those in flight; after the copy, in the reverse order. So it
// notices every write that began or ended during the copy.
func copyOnce(ctx context.Context, dst, src *os.File, d *plugged) (still bool, err error) {
	before, err := countWrites(*d.loop)
	if err != nil {
		return false, err
	}
	if idle, err := noWriteInFlight(*d.loop); err != nil || !idle {
		return false, err
	}
	if err := copyKeepingHoles(ctx, dst, src); err != nil {
		return false, err
	}
	if idle, err := noWriteInFlight(*d.loop); err != nil || !idle {
		return false, err
	}
	after, err := countWrites(*d.loop)
	return after == before, err
}

// writes has the counters of a block device's write requests. The kernel counts completed requests.
type writes struct{ requests, sectors, discards, discardedSectors uint64 }

// countWrites reads the counters (Documentation/block/stat.rst). It fails if the kernel keeps none.
func countWrites(loop loopdev.Device) (writes, error) {
	accounted, err := loopNumbers(loop, "queue/iostats", 1)
	if err == nil && accounted[0] == 0 {
		err = fmt.Errorf("%w: %s counts no requests (queue/iostats is 0)", ErrWrittenMeanwhile, loop.Path)
	}
	if err != nil {
		return writes{}, err
	}
	n, err := loopNumbers(loop, "stat", 15)
	if err != nil {
		return writes{}, err
	}
	return writes{requests: n[4], sectors: n[6], discards: n[11], discardedSectors: n[13]}, nil
}

func noWriteInFlight(loop loopdev.Device) (bool, error) {
	n, err := loopNumbers(loop, "inflight", 2)
	return err == nil && n[1] == 0, err
}

func loopNumbers(loop loopdev.Device, attribute string, least int) ([]uint64, error) {
	path := fmt.Sprintf("/sys/block/loop%d/%s", loop.Number, attribute)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var numbers []uint64
	for _, field := range bytes.Fields(text) {
		n, err := strconv.ParseUint(string(field), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		numbers = append(numbers, n)
	}
	if len(numbers) < least {
		return nil, fmt.Errorf("read %s: %d numbers, want at least %d", path, len(numbers), least)
	}
	return numbers, nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	return ctx.Err()
}
