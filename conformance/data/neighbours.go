package data

import (
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
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

// checkBlank reads a whole new volume after another volume was written and deleted.
func checkBlank(s *checkRun) {
	old := s.writtenAndDeleted()
	u := s.newInUse(s.A)
	if scan := u.scan(); scan.NonZero > 0 {
		s.fail("the new volume %s is not zero: %d of its blocks hold something, the first at "+
			"%s (a volume with seed %d was deleted before)", u.volume.name, scan.NonZero, scan.First,
			old.seed)
	}
}

// checkWhole compares the checksums of a whole device. Its two halves and its last block are
// written.
func checkWhole(s *checkRun) {
	u := s.newInUse(s.A)
	u.writeAll(1, true)
	before := u.scan()
	u.leave()
	u = s.inUse(u.volume, s.A)
	if after := u.scan(); before != after {
		s.fail("volume %s is another after detaching and attaching: it had the SHA-256 %s, "+
			"%d blocks were not zero; it has %s and %d", u.volume.name, before.SHA256, before.NonZero,
			after.SHA256, after.NonZero)
	}
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
