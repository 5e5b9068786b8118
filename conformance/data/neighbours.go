package data

import (
	"cmp"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// checkNeighbours writes two volumes at the same time, and deletes a third while both are
// detached.
func checkNeighbours(s *checkRun) {
	pair := []*volume{s.create(1, nil), s.create(1, nil)}
	third := s.create(1, nil)
	uses := s.allInUse(pair)
	var together errgroup.Group
	for _, u := range uses {
		together.Go(func() error { return u.tryWrite(false, u.patterns(1)...) })
	}
	s.must(together.Wait())
	for _, u := range uses {
		u.leave()
	}
	s.must(s.delete(s.ctx, third))
	uses = s.allInUse(pair)
	s.during("after two volumes were written at once, and a third deleted", func() {
		for _, u := range uses {
			u.verifyAll(1)
		}
	})
}

// allInUse attaches the volumes to this instance before it mounts the first.
func (s *checkRun) allInUse(volumes []*volume) (uses []*use) {
	for _, v := range volumes {
		uses = append(uses, s.attach(v, s.A))
	}
	for _, u := range uses {
		u.mount()
	}
	return uses
}

// writtenAndDeleted creates a raw volume, writes it and deletes it.
func (s *checkRun) writtenAndDeleted() *volume {
	u := s.newInUse(s.A)
	u.writeAll(1, true)
	u.leave()
	s.must(s.delete(s.ctx, u.volume))
	return u.volume
}

// checkBlank reads new volumes after another volume was written and deleted.
func checkBlank(s *checkRun) {
	old := s.writtenAndDeleted()
	for times := range int64(2) {
		u := s.inUse(s.create(times+1, nil), s.A)
		s.during(fmt.Sprintf("a volume with seed %d was deleted before", old.seed), u.isBlank)
		u.leave()
	}
}

// sampleBoundary is the distance between the places at which a rack divides a disk.
const sampleBoundary = 64 * harness.MiB

// isBlank demands that a raw volume that is attached for the first time is zero: all of it up to
// 1 GiB, and what a sample reads of a larger one.
func (u *use) isBlank() {
	var scan guest.Scan
	read := []guest.Range{{To: u.volume.GetCapacityBytes()}}
	if u.volume.GetCapacityBytes() <= harness.GiB {
		scan = u.scan()
	} else {
		sample := got[guest.Sample](u.checkRun)(u.guest.Sample(u.ctx, guest.Sampling{Place: u.place(),
			Bytes: u.volume.GetCapacityBytes(), Boundary: sampleBoundary, Seed: u.Seed,
			Within: cmp.Or(u.SampleTime, 10*time.Second)}))
		scan, read = sample.Scan, sample.Ranges
	}
	if scan.Bytes != u.volume.GetCapacityBytes() {
		u.fail("volume %s has %d bytes, its device %d", u.volume.name, u.volume.GetCapacityBytes(),
			scan.Bytes)
	}
	if scan.NonZero > 0 {
		u.fail("the new volume %s is not zero: %d of its blocks hold something, the first at %s",
			u.volume.name, scan.NonZero, scan.First)
	}
	for _, r := range read {
		u.volume.disk.read(r)
	}
}

// isLike demands that a whole raw volume has the checksum of an earlier one, or of itself before.
func (u *use) isLike(before guest.Scan) {
	if after := u.scan(); before.SHA256 != after.SHA256 || before.NonZero != after.NonZero {
		u.fail("volume %s is another: expected the SHA-256 %s, and %d blocks that are not zero; found "+
			"%s and %d", u.volume.name, before.SHA256, before.NonZero, after.SHA256, after.NonZero)
	}
	u.volume.disk.read(guest.Range{To: u.volume.GetCapacityBytes()})
}

// checkWhole compares the checksums of a whole device. Its two halves and its last block are
// written.
func checkWhole(s *checkRun) {
	u := s.newInUse(s.A)
	u.writeAll(1, true)
	before := u.scan()
	u.volume.disk.unjudged(guest.Range{To: before.Bytes})
	u.leave()
	u = s.inUse(u.volume, s.A)
	s.during("after detaching and attaching", func() { u.isLike(before) })
	u.verifyAll(1)
}

// scan reads a whole device, and demands that it has the volume's size.
func (u *use) scan() guest.Scan {
	scan, err := u.guest.Scan(u.ctx, u.place())
	if err == nil && scan.Bytes != u.volume.GetCapacityBytes() {
		err = fmt.Errorf("volume %s has %d bytes, %d could be read", u.volume.name,
			u.volume.GetCapacityBytes(), scan.Bytes)
	}
	u.must(err)
	return scan
}
