package dataplane

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Tamper makes a data plane damage bytes or devices on purpose. The conformance checks of data must
// notice it. A nil hook does nothing.
type Tamper struct {
	// Name identifies the tamper, and Says describes what it damages.
	Name, Says string

	// source is called for the file from which a disk will be created.
	source func(p *Plane, path string) (string, error)
	// shown returns the device as the guest sees it. others are all devices of the guest.
	shown func(d Device, others []*plugged) Device
	// copied is called when a disk was copied to a snapshot.
	copied func(ctx context.Context, p *Plane, snapshot *os.File, d *plugged) error
	// keeps leaves the device in its guest when the disk is detached. elsewhere shows the device in
	// every other guest, too.
	keeps, elsewhere bool
	// life is called for every event of a disk or a snapshot.
	life func(p *Plane, e event) error
}

type tampering struct {
	plane *Plane

	mu sync.Mutex
	// mu guards the fields below.
	now Tamper
	// left are the devices that stay in their guests after their disks were detached.
	left []*plugged
	// elsewhere are devices in the views of other guests, by the IDs of their disks.
	elsewhere map[string][]shownElsewhere
}

// shownElsewhere is a device in the view of a guest that does not have its disk.
type shownElsewhere struct {
	view view
	name string
}

// Tamper activates a tamper; the zero value ends it. It removes what an earlier tamper left in
// the guests.
func (p *Plane) Tamper(t Tamper) error {
	p.tampering.mu.Lock()
	left, elsewhere := p.tampering.left, p.tampering.elsewhere
	p.tampering.now, p.tampering.left, p.tampering.elsewhere = t, nil, nil
	p.tampering.mu.Unlock()
	var errs []error
	for _, all := range elsewhere {
		errs = append(errs, removeElsewhere(all))
	}
	for _, d := range left {
		errs = append(errs, p.hide(d), p.forceDetach(*d.loop, ""))
	}
	return errors.Join(append(errs, RemoveTree(p.tampering.path("")))...)
}

func (a *tampering) tamper() Tamper {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now
}

func (a *tampering) path(name string) string { return filepath.Join(a.plane.Dir, "tamper", name) }

// life reports an event to the tamper, unless the operation failed, whose error it returns.
func (a *tampering) life(e event, failed error) error {
	if t := a.tamper(); failed == nil && t.life != nil {
		return t.life(a.plane, e)
	}
	return failed
}

// appearance returns a device as its guest sees it.
func (a *tampering) appearance(d *plugged) Device {
	if t := a.tamper(); t.shown != nil {
		return t.shown(d.spec, a.plane.guests.devices(d.guest))
	}
	return d.spec
}

func (a *tampering) copied(ctx context.Context, snapshot *os.File, d *plugged) error {
	if t := a.tamper(); t.copied != nil {
		return t.copied(ctx, a.plane, snapshot, d)
	}
	return nil
}

// showElsewhere shows a device that has appeared in its guest to every other guest, if the tamper
// demands it.
func (a *tampering) showElsewhere(d *plugged) error {
	if !a.tamper().elsewhere {
		return nil
	}
	var errs []error
	for id := range a.plane.guests.all() {
		if id == d.spec.InstanceID {
			continue
		}
		other := a.plane.view(id)
		name, err := other.freeName(d.guest.random)
		if err == nil {
			err = other.show(d.spec, *d.loop, name)
		}
		if errs = append(errs, err); err != nil {
			continue
		}
		a.mu.Lock()
		if a.elsewhere == nil {
			a.elsewhere = map[string][]shownElsewhere{}
		}
		a.elsewhere[d.spec.DiskID] = append(a.elsewhere[d.spec.DiskID],
			shownElsewhere{other, name})
		a.mu.Unlock()
	}
	return errors.Join(errs...)
}

// hidden removes a device from the guests to which a tamper has shown it.
func (a *tampering) hidden(diskID string) error {
	a.mu.Lock()
	all := a.elsewhere[diskID]
	delete(a.elsewhere, diskID)
	a.mu.Unlock()
	return removeElsewhere(all)
}

func removeElsewhere(all []shownElsewhere) error {
	var errs []error
	for _, d := range all {
		errs = append(errs, d.view.remove(d.name))
	}
	return errors.Join(errs...)
}

// keeps reports whether the tamper leaves the device in its guest. If so, it records the device.
func (a *tampering) keeps(d *plugged) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.now.keeps || d.loop == nil {
		return false
	}
	a.left = append(a.left, d)
	return true
}

const (
	// tamperBlock is the unit in which tampers damage bytes.
	tamperBlock = 4096
	// lateDevice is longer than anybody waits for a device.
	lateDevice = 10 * time.Minute
	// tornWrites is the number of writes between the two halves of a torn snapshot. tornWait limits
	// the wait for the next write, because the disk may be idle.
	tornWrites = 32
	tornWait   = 5 * time.Second
)

// Tampers returns all tampers: those of this file, and corruptions.
func Tampers() []Tamper {
	return append([]Tamper{
		{Name: "swapped-disks", Says: "a disk and another exchange their bytes when it is attached",
			life: at(diskPlugging, swapDisks)},
		{Name: "stale-read", Says: "an attached disk has the bytes that it had at the detach before " +
			"the last", life: staleRead},
		{Name: "torn-snapshot", Says: "half of the blocks of a snapshot are from later than the rest",
			copied: tear},
		{Name: "serial-missing", Says: "devices have no serial",
			shown: func(d Device, _ []*plugged) Device { d.DiskName = ""; return d }},
		{Name: "serial-doubled", Says: "the second device of a guest has the serial of the first",
			shown: doubleSerial},
		{Name: "device-smaller", Says: "devices have half the size of their disks",
			life: faulty(func(e event) { e.fault.SizeBytes = e.bytes / 2 })},
		{Name: "device-larger", Says: "devices have twice the size of their disks",
			life: faulty(func(e event) { e.fault.SizeBytes = e.bytes * 2 })},
		{Name: "device-late", Says: "devices appear when nobody waits any more",
			life: faulty(func(e event) { e.fault.Delay = lateDevice })},
		{Name: "device-never", Says: "an attach succeeds, and no device appears",
			life: faulty(func(e event) { e.fault.Never = true })},
		{Name: "device-left", Says: "a detached disk stays in its guest", keeps: true},
		{Name: "delete-another", Says: "with a disk, the bytes of another are deleted",
			life: at(diskRemoved, deleteAnother)},
		{Name: "other-snapshot", Says: "a disk is restored from another snapshot", source: otherSource},
		{Name: "device-elsewhere", Says: "an attached disk is a device of every other guest, too",
			elsewhere: true},
	}, corruptions()...)
}

func at(what happening, do func(*Plane, event) error) func(*Plane, event) error {
	return func(p *Plane, e event) error {
		if e.what != what {
			return nil
		}
		return do(p, e)
	}
}

func faulty(change func(event)) func(*Plane, event) error {
	return at(diskPlugging, func(_ *Plane, e event) error { change(e); return nil })
}

// otherDisk returns the ID of the first other disk that fits, or "".
func (p *Plane) otherDisk(diskID string, fits func(id string, sizeBytes int64) bool) string {
	paths, _ := filepath.Glob(p.DiskPath("*")) // fails only for an invalid pattern
	for _, path := range paths {
		id := strings.TrimSuffix(filepath.Base(path), ".img")
		if size, err := fileSize(path); err == nil && id != diskID && fits(id, size) {
			return id
		}
	}
	return ""
}

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

func deleteAnother(p *Plane, _ event) error {
	id := p.otherDisk("", func(id string, _ int64) bool {
		return p.guests.disk(id) == nil && holdsSomething(p.DiskPath(id))
	})
	if id == "" {
		return nil
	}
	size, err := fileSize(p.DiskPath(id))
	return errors.Join(err, os.Truncate(p.DiskPath(id), 0), os.Truncate(p.DiskPath(id), size))
}

func (p *Plane) replace(path, source string) error {
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

func swapDisks(p *Plane, e event) error {
	own, aside := p.DiskPath(e.disk), p.DiskPath(e.disk)+".swap"
	id := p.otherDisk(e.disk, func(id string, size int64) bool {
		return p.guests.disk(id) == nil && size == e.bytes
	})
	if id == "" {
		return nil
	}
	return errors.Join(os.Rename(own, aside), os.Rename(p.DiskPath(id), own),
		os.Rename(aside, p.DiskPath(id)))
}

// staleRead saves the content of a disk at each detach, and restores the last but one at the next
// attach.
func staleRead(p *Plane, e event) error {
	last, older := p.tampering.path(e.disk), p.tampering.path(e.disk+".older")
	var err error
	switch e.what {
	case diskPlugging:
		err = p.replace(p.DiskPath(e.disk), older)
	case diskUnplugged:
		if err = os.Rename(last, older); err == nil || errors.Is(err, fs.ErrNotExist) {
			err = p.replace(last, p.DiskPath(e.disk))
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// tear waits for writes, and then copies every second block again, beginning with the first one.
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
	disk, err := os.Open(p.DiskPath(d.spec.DiskID))
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	block := make([]byte, tamperBlock)
	for end := int64(0); ; {
		var start int64
		if start, end, err = nextData(disk, end); errors.Is(err, errNoData) {
			return nil
		}
		const two = 2 * tamperBlock
		for at := start / two * two; err == nil && at < end; at += two {
			var n int
			if n, err = disk.ReadAt(block, at); err == nil || errors.Is(err, io.EOF) {
				_, err = snapshot.WriteAt(block[:n], at)
			}
		}
		if err != nil {
			return err
		}
	}
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
