package dataplane

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

const (
	// tamperBlock is the unit in which tampers spoil bytes.
	tamperBlock = 4096
	// lateDevice is longer than anybody waits for a device.
	lateDevice = 10 * time.Minute
	// tornWrites is the number of writes between the two halves of a torn snapshot. tornWait limits
	// the wait for the next of them: the rack may also take a snapshot of an idle disk.
	tornWrites = 32
	tornWait   = 5 * time.Second
)

// Tampers returns all tampers: those of this file, and the product of spoils.
func Tampers() []Tamper {
	return append([]Tamper{
		{Name: "swapped-disks", Says: "a disk and another exchange their bytes when it is attached",
			plug: swapDisks},
		{Name: "stale-read", Says: "an attached disk has the bytes that it had at the detach before " +
			"the last", plug: putBack, unplugged: keepLastTwo},
		{Name: "torn-snapshot", Says: "half of the blocks of a snapshot are from later than the rest",
			copied: tear},
		{Name: "serial-missing", Says: "devices have no serial",
			shown: func(d Device, _ []*plugged) Device { d.DiskName = ""; return d }},
		{Name: "serial-doubled", Says: "the second device of a guest has the serial of the first",
			shown: doubleSerial},
		{Name: "device-smaller", Says: "devices have half the size of their disks",
			plug: func(_ *Plane, d Device, f *Fault) error { f.SizeBytes = d.SizeBytes / 2; return nil }},
		{Name: "device-larger", Says: "devices have twice the size of their disks",
			plug: func(_ *Plane, d Device, f *Fault) error { f.SizeBytes = d.SizeBytes * 2; return nil }},
		{Name: "device-late", Says: "devices appear when nobody waits any more",
			plug: func(_ *Plane, _ Device, f *Fault) error { f.Delay = lateDevice; return nil }},
		{Name: "device-never", Says: "an attach succeeds, and no device appears",
			plug: func(_ *Plane, _ Device, f *Fault) error { f.Never = true; return nil }},
		{Name: "device-left", Says: "a detached disk stays in its guest", keeps: true},
		{Name: "delete-another", Says: "with a disk, the bytes of another are deleted",
			removed: func(p *Plane, _ string) error { return p.another("", 0, true, blank) }},
		{Name: "other-snapshot", Says: "a disk is restored from another snapshot", source: otherSource},
		{Name: "device-elsewhere", Says: "an attached disk is a device of every other guest, too",
			elsewhere: true},
	}, spoils()...)
}

// another calls do for the first other disk's file that is not plugged and has the given size, if
// there is one. With written, the file must not be all zero.
func (p *Plane) another(diskID string, size int64, written bool, do func(path string) error) error {
	paths, err := filepath.Glob(p.DiskPath("*"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		id := filepath.Base(path[:len(path)-len(".img")])
		st, err := os.Stat(path)
		if err != nil || id == diskID || p.guests.disk(id) != nil || size != 0 && st.Size() != size {
			continue
		}
		if written && !holdsSomething(path) {
			continue
		}
		return do(path)
	}
	return nil
}

// holdsSomething reports whether a file has a byte that is not zero.
func holdsSomething(path string) bool {
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	piece, zero := make([]byte, 1<<20), make([]byte, 1<<20)
	for {
		n, err := file.Read(piece)
		if !bytes.Equal(piece[:n], zero[:n]) {
			return true
		}
		if err != nil {
			return false
		}
	}
}

func blank(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	return errors.Join(os.Truncate(path, 0), os.Truncate(path, st.Size()))
}

// replace copies the bytes of another file into a file.
func (p files) replace(path, source string) error {
	st, err := os.Stat(source)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	fresh := path + ".fresh"
	err = p.makeBacking(fresh, func(f *os.File) error {
		return fill(context.Background(), f, source, st.Size())
	})
	if err != nil {
		return err
	}
	return os.Rename(fresh, path)
}

// eachBlock calls do for every block of a file that is not a hole.
func eachBlock(path string, do func(f *os.File, at int64, block []byte) error) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	block := make([]byte, tamperBlock)
	for offset := int64(0); ; {
		start, end, err := nextData(f, offset)
		if errors.Is(err, errNoData) {
			return nil
		}
		if err != nil {
			return err
		}
		for at := start / tamperBlock * tamperBlock; at < end; at += tamperBlock {
			n, err := f.ReadAt(block, at)
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if err := do(f, at, block[:n]); err != nil {
				return err
			}
		}
		offset = end
	}
}

func swapDisks(p *Plane, spec Device, _ *Fault) error {
	own := p.DiskPath(spec.DiskID)
	return p.another(spec.DiskID, spec.SizeBytes, false, func(other string) error {
		aside := own + ".swap"
		return errors.Join(os.Rename(own, aside), os.Rename(other, own), os.Rename(aside, other))
	})
}

func keepLastTwo(p *Plane, spec Device) error {
	last, older := p.tamperPath(spec.DiskID), p.tamperPath(spec.DiskID+".older")
	if err := os.Rename(last, older); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return p.replace(last, p.DiskPath(spec.DiskID))
}

func putBack(p *Plane, spec Device, _ *Fault) error {
	err := p.replace(p.DiskPath(spec.DiskID), p.tamperPath(spec.DiskID+".older"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// tear waits for writes, and then copies every second block again, including the superblocks.
func tear(ctx context.Context, p *Plane, snapshot *os.File, d *plugged) error {
	before, err := countWrites(*d.loop)
	last, came := before, time.Now()
	for err == nil && last.requests < before.requests+tornWrites && time.Since(came) < tornWait {
		now, failed := countWrites(*d.loop)
		if now.requests > last.requests {
			last, came = now, time.Now()
		}
		err = errors.Join(failed, pause(ctx, 10*time.Millisecond))
	}
	if err = errors.Join(err, d.loop.Sync()); err != nil {
		return err
	}
	return eachBlock(p.DiskPath(d.spec.DiskID), func(_ *os.File, at int64, block []byte) error {
		if at/tamperBlock%2 == 1 {
			return nil
		}
		_, err := snapshot.WriteAt(block, at)
		return err
	})
}

func doubleSerial(d Device, others []*plugged) Device {
	for _, other := range others {
		if other.spec.DiskID != d.DiskID && other.node != "" {
			d.DiskName = other.spec.DiskName
			break
		}
	}
	return d
}

// dirt returns a block that no workload of the rack has written.
func dirt() []byte { return bytes.Repeat([]byte("somebody else's "), tamperBlock/16) }

// otherSource returns another snapshot that is not larger, if there is one.
func otherSource(p *Plane, path string) (string, error) {
	own, err := os.Stat(path)
	if err != nil || filepath.Dir(path) != filepath.Dir(p.SnapshotPath("")) {
		return path, err
	}
	paths, err := filepath.Glob(p.SnapshotPath("*"))
	for _, other := range paths {
		st, err := os.Stat(other)
		if err == nil && other != path && st.Size() <= own.Size() {
			return other, nil
		}
	}
	return path, err
}
