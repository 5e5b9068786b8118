package data

import (
	"fmt"
	"slices"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Log records where a check looked on raw volumes, at the place of each read. Its zero value is
// ready to use.
type Log struct {
	mu sync.Mutex
	// mu guards the fields below.
	looks []*Look
	more  report.Extent
}

// Look is what a check looked at on the disks of one kind and size.
type Look struct {
	// Kind is how the disk came to be, and Bytes its size.
	Kind  string
	Bytes int64
	// New has the blocks that were compared as they were when the disk was new, and Kept those that
	// were compared as they were when the disk had been detached and attached again. Written has those
	// that held something then.
	New, Kept, Written []bool
}

// These are the kinds of disks.
const (
	Blank    = "a blank disk"
	Restored = "a disk restored from a snapshot"
	Larger   = "a disk restored from a smaller snapshot"
	Again    = "a disk with the name of a deleted one"
)

// touched is what has happened to a block of a disk.
type touched byte

const (
	// ever means that the block was read or written, now that it was written since the disk was last
	// attached, and holds that it was written at any time.
	ever touched = 1 << iota
	now
	holds
)

// disk is one disk in the log.
type disk struct {
	log  *Log
	look *Look
	// blocks and visits are guarded by log.mu. visits counts the detaches.
	blocks []touched
	visits int
}

// disk adds a disk to the log.
func (l *Log) disk(kind string, bytes int64) *disk {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := bytes / guest.BlockBytes
	i := slices.IndexFunc(l.looks, func(k *Look) bool { return k.Kind == kind && k.Bytes == bytes })
	if i < 0 {
		i = len(l.looks)
		l.looks = append(l.looks, &Look{Kind: kind, Bytes: bytes, New: make([]bool, n),
			Kept: make([]bool, n), Written: make([]bool, n)})
	}
	return &disk{log: l, look: l.looks[i], blocks: make([]touched, n)}
}

// read records that bytes were compared with what they must be.
func (d *disk) read(r guest.Range) {
	d.each(r, func(block int64) {
		was := d.blocks[block]
		d.look.New[block] = d.look.New[block] || was&ever == 0
		if d.visits > 0 && was&now == 0 {
			d.look.Kept[block] = true
			d.look.Written[block] = d.look.Written[block] || was&holds != 0
		}
		d.blocks[block] |= ever
	})
}

// unjudged records that bytes were read and not compared.
func (d *disk) unjudged(r guest.Range) {
	d.each(r, func(block int64) { d.blocks[block] |= ever })
}

func (d *disk) write(r guest.Range) {
	d.each(r, func(block int64) { d.blocks[block] |= ever | now | holds })
}

func (d *disk) each(r guest.Range, do func(block int64)) {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	last := min((r.To+guest.BlockBytes-1)/guest.BlockBytes, int64(len(d.blocks)))
	for block := r.From / guest.BlockBytes; block < last; block++ {
		do(block)
	}
}

// detached records that the disk was detached.
func (d *disk) detached() {
	d.each(guest.Range{To: d.look.Bytes}, func(block int64) { d.blocks[block] &^= now })
	d.visits++
}

// note adds a measure that is not about raw volumes.
func (l *Log) note(what string, looked int64, unit string) {
	l.add(report.Measure{What: what, Looked: looked, Unit: unit})
}

// Skip adds something that was not looked at, with the reason.
func (l *Log) Skip(what, why string) {
	l.add(report.Measure{What: what, Of: 1, Unit: "times", Words: why})
}

func (l *Log) add(m report.Measure) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.more.Look(m)
}

// Looks returns what was looked at on raw volumes.
func (l *Log) Looks() []Look {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []Look
	for _, look := range l.looks {
		all = append(all, *look)
	}
	return all
}

// Extent states how far the check looked.
func (l *Log) Extent() (all report.Extent) {
	for _, look := range l.Looks() {
		for _, moment := range []string{"new", "kept"} {
			// Other checks look at blank disks of 1 GiB.
			usual := look.Kind == Blank && look.Bytes <= harness.GiB
			if looked := look.Looked(moment); looked > 0 || !usual {
				all.Look(report.Measure{What: look.What(moment), Looked: looked, Of: look.Bytes, Unit: "bytes"})
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return append(all, l.more...)
}

// What names a moment, new or kept, in the life of the disks.
func (l Look) What(moment string) string {
	after := "new"
	if moment == "kept" {
		after = "detached and attached again"
	}
	return fmt.Sprintf("%s of %d GiB, %s", l.Kind, l.Bytes/harness.GiB, after)
}

// At returns the blocks that were compared at a moment.
func (l Look) At(moment string) []bool {
	if moment == "kept" {
		return l.Kept
	}
	return l.New
}

// Looked returns the number of bytes that were compared at a moment.
func (l Look) Looked(moment string) (bytes int64) {
	for _, seen := range l.At(moment) {
		if seen {
			bytes += guest.BlockBytes
		}
	}
	return bytes
}
