package data

import (
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// lineage is a raw volume with two snapshots and the volumes that were restored from them. Each
// volume writes its own generation, so the generation of a block shows which volume wrote it last.
type lineage struct {
	*checkRun
	// blocks are the origin's blocks. behind are those after the origin's end in a volume of twice
	// its size. Blocks that a restored volume writes have the origin's seed, too.
	blocks, behind []guest.Pattern
	// whole has the checksum of the origin in each of its generations.
	whole map[uint64]guest.Scan
}

// at returns the patterns of a generation.
func at(generation uint64, patterns []guest.Pattern) (all []guest.Pattern) {
	for _, p := range patterns {
		all = append(all, p.At(generation))
	}
	return all
}

// visit attaches a volume, demands blocks in it, writes others, and detaches it. Errors name the
// volume.
func (l *lineage) visit(which string, v *volume, want, write []guest.Pattern) {
	first := v.disk.visits == 0
	l.during(which, func() {
		u := l.inUse(v, l.A)
		whole, known := l.whole[want[0].Generation]
		switch {
		case first && known && v.kind != Blank:
			u.isLike(whole)
		case first && want[0].Generation == 0:
			u.isBlank()
		}
		u.verify(want...)
		u.write(true, write...)
		u.leave()
	})
}

// restored restores a snapshot and visits the new volume.
func (l *lineage) restored(
	which string, from *snapshot, times int64, want, write []guest.Pattern,
) *volume {
	v := l.create(times, from)
	l.visit(which, v, want, write)
	return v
}

// restoredOnce restores a snapshot, demands its blocks, and deletes the new volume.
func (l *lineage) restoredOnce(which string, from *snapshot, generation uint64) {
	v := l.restored(which, from, 1, at(generation, l.blocks), nil)
	l.must(l.delete(l.ctx, v))
}

// checkLineage writes a volume and the volumes that were restored from its snapshots, and deletes
// the volume and a snapshot. No step may change another volume or snapshot.
func checkLineage(s *checkRun) {
	l := &lineage{checkRun: s, whole: map[uint64]guest.Scan{}}
	u := s.newInUse(s.A)
	origin := u.volume
	l.blocks = u.patterns(1)
	p := next(next(u.pattern(1)))
	end := u.lastBlock(1)
	end.First += volumeBytes / guest.BlockBytes
	l.behind = []guest.Pattern{p, next(p), end}
	var snaps [2]*snapshot
	for i := range snaps {
		u.writeAll(uint64(i+1), true)
		l.whole[uint64(i+1)] = u.scan(nil)
		snaps[i] = s.snap(origin)
	}
	u.leave()
	first, second := snaps[0], snaps[1]
	l.restoredOnce("restored from the second of two snapshots", second, 2)
	one := l.restored("restored from the first of two snapshots", first, 1, at(1, l.blocks),
		at(3, l.blocks))
	l.checkLarger(second)
	l.visit("the origin, after writes to what was restored from its snapshots", origin,
		at(2, l.blocks), nil)
	l.visit("restored from the first of two snapshots and written", one, at(3, l.blocks), nil)
	two := l.restored("restored again, after a write to what was restored before", first, 1,
		at(1, l.blocks), nil)
	s.must(l.delete(s.ctx, origin))
	l.visit("restored, after the origin was deleted", one, at(3, l.blocks), at(4, l.blocks))
	for i, snap := range snaps {
		l.restoredOnce(fmt.Sprintf("restored from snapshot %d of 2 after the origin was deleted", i+1),
			snap, uint64(i+1))
	}
	s.must(l.deleteSnapshot(s.ctx, first))
	first.deleted = true
	l.visit("restored, after the snapshot was deleted", one, at(4, l.blocks), at(5, l.blocks))
	l.visit("restored, after the snapshot was deleted and another one written", two,
		at(1, l.blocks), at(6, l.blocks))
	l.visit("restored, after yet another one was written", one, at(5, l.blocks), nil)
}

// checkLarger restores a snapshot into two larger volumes. Both must be zero behind the
// snapshot's end.
func (l *lineage) checkLarger(from *snapshot) {
	const which = "restored from the second of two snapshots into a larger volume"
	var larger [2]*volume
	blank := append(at(2, l.blocks), at(0, l.behind)...)
	for i := range larger {
		larger[i] = l.restored(which, from, 2, blank, at(uint64(10+i), l.behind))
	}
	for i, v := range larger {
		want := append(at(2, l.blocks), at(uint64(10+i), l.behind)...)
		l.visit(which+", after both were written behind it", v, want, nil)
		l.must(l.delete(l.ctx, v))
	}
}

// checkRecreated writes a volume, restores it from its snapshot, deletes it, and creates a volume
// with the same name.
func checkRecreated(s *checkRun) {
	l := &lineage{checkRun: s, whole: map[uint64]guest.Scan{}}
	u := s.newInUse(s.A)
	old := u.volume
	l.blocks = u.patterns(1)
	u.writeAll(1, true)
	l.whole[1] = u.scan(nil)
	snap := s.snap(old)
	u.leave()
	s.must(s.delete(s.ctx, old))
	again := &volume{name: old.name, kind: Again, access: old.access, capability: old.capability,
		seed: old.seed, request: old.request}
	s.volumes = append(s.volumes, again)
	s.must(s.make(s.ctx, again))
	if again.GetVolumeId() == old.GetVolumeId() {
		s.fail("volume %s was deleted, and another one of its name has its ID %s", old.name,
			old.GetVolumeId())
	}
	const which = "a volume with the name of one that was deleted"
	l.visit(which, again, at(0, l.blocks), at(2, l.blocks))
	u = s.inUse(again, s.A)
	s.during(which+", and written", func() { u.verify(at(2, l.blocks)...) })
	l.whole[2] = u.scan(nil)
	u.leave()
	l.restoredOnce("restored from the snapshot of the deleted volume", snap, 1)
	s.must(s.deleteSnapshot(s.ctx, snap))
	snap.deleted = true
	named := &snapshot{name: snap.name, times: 1,
		request: harness.SnapshotRequest(snap.name, again.GetVolumeId())}
	s.snapshots = append(s.snapshots, named)
	s.must(s.take(s.ctx, named))
	l.restoredOnce("restored from a snapshot with the name of a deleted one", named, 2)
	s.Log.Skip("an image with the name of a deleted one", "the driver makes no image")
}

// spread returns blocks all over a raw volume.
func spread(v *volume) []guest.Pattern {
	size := v.GetCapacityBytes()
	return []guest.Pattern{
		{Seed: v.seed, Count: size / largeStride, Stride: largeStride},
		{Seed: v.seed, First: size/guest.BlockBytes - 1, Count: 1},
	}
}

// checkRestoredLarge restores a volume with data behind 2 GiB.
func checkRestoredLarge(s *checkRun) {
	u := s.inUse(s.create(restoredTimes, nil), s.A)
	u.isBlank()
	l := &lineage{checkRun: s, whole: map[uint64]guest.Scan{}, blocks: spread(u.volume)}
	u.write(true, at(1, l.blocks)...)
	l.whole[1] = u.scan(nil)
	snap := s.snap(u.volume)
	u.leave()
	which := fmt.Sprintf("restored from a snapshot of %d GiB", u.volume.GetCapacityBytes()/harness.GiB)
	v := l.restored(which, snap, restoredTimes, at(1, l.blocks), nil)
	l.during(which+", detached and attached again", func() {
		u := l.inUse(v, l.A)
		u.isLike(l.whole[1])
	})
}

const (
	// restoredTimes is the size of a large volume that is restored, in usual sizes.
	restoredTimes = 3
	// largeTimes is the size of a large volume in usual sizes: 17 GiB, so that offsets need more
	// than 34 bits.
	largeTimes = 17
	// largeStride is the distance between the blocks that are compared in a large volume.
	largeStride = 64 * harness.MiB
)

// checkLarge writes blocks all over a large volume. Every block must be zero before, and must
// have its own content afterwards.
func checkLarge(s *checkRun) {
	s.writtenAndDeleted()
	v := s.create(largeTimes, nil)
	blocks := spread(v)
	l := &lineage{checkRun: s, whole: map[uint64]guest.Scan{}}
	which := fmt.Sprintf("a volume of %d GiB", v.GetCapacityBytes()/harness.GiB)
	for generation := range uint64(2) {
		l.visit(which, v, at(generation, blocks), at(generation+1, blocks))
	}
	l.visit(which, v, at(2, blocks), nil)
}
