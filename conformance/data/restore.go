package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const (
	// recordInterval is a writer's pause between two records, in which a rack can copy the disk.
	recordInterval = 25 * time.Millisecond
	// minRecords is how many records to await before a snapshot, and how many more after it.
	minRecords   = 20
	maxRecords   = 1 << 12
	writeTimeout = time.Minute
)

// snapshot is a snapshot of a check. If id is "" and deleted is false, it may or may not exist.
type snapshot struct {
	id, name string
	// whole is nil, or the scan that a volume restored from the snapshot must equal.
	whole *guest.Scan
	// times is the size of the snapshot's volume in GiB.
	times   int64
	request *csi.CreateSnapshotRequest
	deleted bool
}

func (s *checkRun) snap(name string, v *volume) *snapshot {
	snap := &snapshot{name: name, times: v.GetCapacityBytes() / volumeBytes}
	snap.request = harness.SnapshotRequest(snap.name, v.GetVolumeId())
	s.undo = append(s.undo, func(ctx context.Context) error { return s.deleteSnapshot(ctx, snap) })
	harness.Must(s.take(s.ctx, snap))
	return snap
}

// take takes the snapshot, or finds it if an earlier call has taken it.
func (s *checkRun) take(ctx context.Context, snap *snapshot) error {
	err := repeat(ctx, func() error {
		resp, err := s.Controller.CreateSnapshot(ctx, snap.request)
		snap.id = resp.GetSnapshot().GetSnapshotId()
		if err == nil && !resp.GetSnapshot().GetReadyToUse() {
			err = status.Error(codes.Unavailable, "it is not ready")
		}
		return harness.Wrap(err, "take snapshot %s", snap.name)
	})
	snap.deleted = err != nil && !mayExist(err)
	return err
}

func (u *use) snapWhole() *snapshot {
	whole := u.scan(nil)
	snap := u.snap(u.Name("snapshot"), u.volume)
	snap.whole = &whole
	return snap
}

func (s *checkRun) deleteSnapshot(ctx context.Context, snap *snapshot) (err error) {
	defer harness.Catch(&err)
	if snap.id == "" && !snap.deleted {
		harness.Must(s.take(ctx, snap))
	}
	if snap.deleted {
		return nil
	}
	return repeat(ctx, func() error {
		_, err := s.Controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snap.id})
		snap.deleted = err == nil
		return harness.Wrap(err, "delete snapshot %s", snap.name)
	})
}

func checkSnapshot(s *checkRun) {
	u := s.newInUse(s.A)
	records := guest.Pattern{Seed: u.volume.seed, Generation: 1, Count: maxRecords}
	if s.access != "block" {
		// First write older records, which the writer then overwrites. So a torn snapshot shows old
		// records among the new ones, and not only a shorter file.
		u.write(true, records.At(2))
	}
	w := u.record(records)
	before := w.await(minRecords)
	snap := s.snap(s.Name("snapshot"), u.volume)
	after := harness.Got(guest.Acknowledged(s.ctx, u.guest, w.number))
	w.await(min(after+minRecords, maxRecords))
	end := harness.Got(w.stop(s.ctx))
	u.leave()
	restored := s.inUse(s.create(1, snap), s.A)
	found := harness.Got(guest.Verify(s.ctx, restored.guest,
		guest.Task{Place: restored.place(), Pattern: records}))
	harness.Must(judgeRecords(found, before, end.Acknowledged))
	s.Log.more.Look(report.Measure{What: "snapshots of a volume with a writer, on " + s.access,
		Looked: 1, Unit: "snapshots"})
}

type writer struct {
	*use
	number  int
	stopped bool
}

func (u *use) record(p guest.Pattern) *writer {
	number, err := guest.StartWriter(u.ctx, u.guest, guest.Task{Place: u.place(),
		Pattern: p, Interval: recordInterval})
	harness.Must(harness.Wrap(err, "write records to volume %s", u.volume.name))
	w := &writer{use: u, number: number}
	u.undo = append(u.undo, func(ctx context.Context) error {
		_, err := w.stop(ctx)
		return err
	})
	return w
}

// await waits until fsync has acknowledged want or more records, and returns their number.
func (w *writer) await(want int64) (n int64) {
	err := harness.Await(w.ctx, writeTimeout, func() (err error) {
		n, err = guest.Acknowledged(w.ctx, w.guest, w.number)
		if err == nil && n < want {
			err = fmt.Errorf("%d records of volume %s are acknowledged, not %d", n, w.volume.name, want)
		}
		return err
	})
	if err != nil {
		_, failed := w.stop(w.ctx)
		harness.Must(errors.Join(err, failed))
	}
	return n
}

func (w *writer) stop(ctx context.Context) (end guest.WriterEnd, err error) {
	if w.stopped {
		return end, nil
	}
	end, err = guest.StopWriter(ctx, w.guest, w.number)
	w.stopped = err == nil
	if end.Failed != "" {
		err = fmt.Errorf("the writer of volume %s failed: %s", w.volume.name, end.Failed)
	}
	return end, err
}

// judgeRecords checks that a snapshot has the first records without a gap: at least those that were
// acknowledged before it, and at most one that was never acknowledged.
func judgeRecords(found guest.Report, before, all int64) error {
	whole, prefix, gap := found.Read-found.Wrong, found.Read, ""
	if found.Wrong > 0 {
		prefix, gap = found.Findings[0].Block, found.Findings[0].What
	}
	switch {
	case whole != prefix:
		return fmt.Errorf("the snapshot is torn: it has %d whole records, but only the first %d have "+
			"no gap: record %d is %s, and later ones are whole", whole, prefix, prefix, gap)
	case prefix < before:
		return fmt.Errorf("the snapshot has %d records; %d were acknowledged before it was asked for",
			prefix, before)
	case prefix > all+1:
		return fmt.Errorf("the snapshot has %d records; the writer wrote at most %d", prefix, all+1)
	}
	return nil
}

// checkRestore restores two snapshots of a volume, one of them into a larger volume.
func checkRestore(s *checkRun) {
	u := s.newInUse(s.A)
	var snaps [2]*snapshot
	for i := range snaps {
		u.write(true, u.pattern(uint64(i+1)))
		snaps[i] = s.snap(s.Name("snapshot"), u.volume)
	}
	size := u.size()
	u.write(true, u.pattern(3))
	u.leave()
	for i, snap := range snaps {
		restored := s.create(int64(i+1), snap)
		which := []string{"first", "second"}[i]
		s.during("the volume restored from the "+which+" of two snapshots", func() {
			r, want := s.inUse(restored, s.A), int64(i+1)*size
			r.verify(u.pattern(uint64(i + 1)))
			if got := r.size(); got < want-want/10 || got > want+want/10 {
				s.fail("a workload has %d MiB in volume %s, not about %d", got/harness.MiB, restored.name,
					want/harness.MiB)
			}
			r.leave()
		})
	}
}

func (u *use) size() int64 {
	if u.volume.access != "block" {
		return harness.Got(guest.FilesystemBytes(u.ctx, u.guest, u.Target))
	}
	for _, d := range u.facts(u.guest).With(u.serial()) {
		return d.SizeBytes
	}
	u.fail("the instance shows no device with the serial %q", u.serial())
	return 0
}

// checkNeighbours writes two volumes at the same time, and deletes a third while both are detached.
func checkNeighbours(s *checkRun) {
	pair := []*volume{s.create(1, nil), s.create(1, nil)}
	third := s.create(1, nil)
	uses := s.allInUse(pair)
	var together errgroup.Group
	for _, u := range uses {
		together.Go(func() error { return u.tryWrite(false, u.patterns(1)...) })
	}
	harness.Must(together.Wait())
	for _, u := range uses {
		u.leave()
	}
	harness.Must(s.delete(s.ctx, third))
	uses = s.allInUse(pair)
	s.during("after two volumes were written at once, and a third deleted", func() {
		for _, u := range uses {
			u.verify(u.patterns(1)...)
		}
	})
}

func (s *checkRun) allInUse(volumes []*volume) (uses []*use) {
	for _, v := range volumes {
		uses = append(uses, s.attach(v, s.A))
	}
	for _, u := range uses {
		u.mount()
	}
	return uses
}

func (s *checkRun) writtenAndDeleted() *volume {
	u := s.newInUse(s.A)
	u.write(true, u.patterns(1)...)
	u.leave()
	harness.Must(s.delete(s.ctx, u.volume))
	return u.volume
}

func checkBlank(s *checkRun) {
	old := s.writtenAndDeleted()
	for times := range int64(2) {
		u := s.inUse(s.create(times+1, nil), s.A)
		s.during(fmt.Sprintf("a volume with seed %d was deleted before", old.seed), u.isBlank)
		u.leave()
	}
}

// isBlank checks that a new raw volume is zero. It reads only a sample of a volume over 1 GiB.
func (u *use) isBlank() {
	var sample *guest.Sample
	if u.volume.GetCapacityBytes() > harness.GiB {
		sample = &guest.Sample{Seed: u.Seed, Within: cmp.Or(u.SampleTime, 10*time.Second)}
	}
	scan := u.scan(sample)
	if scan.NonZero > 0 {
		u.fail("the new volume %s is not zero: %d of its blocks hold something, the first at %s",
			u.volume.name, scan.NonZero, scan.First)
	}
	for _, r := range scan.Ranges {
		u.volume.disk.read(r)
	}
}

func (u *use) isLike(before guest.Scan) {
	if after := u.scan(nil); before.SHA256 != after.SHA256 || before.NonZero != after.NonZero {
		u.fail("volume %s is another: expected the SHA-256 %s, and %d blocks that are not zero; found "+
			"%s and %d", u.volume.name, before.SHA256, before.NonZero, after.SHA256, after.NonZero)
	}
	u.volume.disk.read(guest.Range{To: u.volume.GetCapacityBytes()})
}

func checkWhole(s *checkRun) {
	u := s.newInUse(s.A)
	u.write(true, u.patterns(1)...)
	before := u.scan(nil)
	u.leave()
	u = s.inUse(u.volume, s.A)
	s.during("after detaching and attaching", func() { u.isLike(before) })
	u.verify(u.patterns(1)...)
}

// scan reads a device, or a sample of it, and checks the device's size.
func (u *use) scan(sample *guest.Sample) guest.Scan {
	scan, err := guest.ScanDevice(u.ctx, u.guest, guest.Task{Place: u.place(), Sample: sample})
	if err == nil && scan.Bytes != u.volume.GetCapacityBytes() {
		err = fmt.Errorf("volume %s has %d bytes, its device %d", u.volume.name,
			u.volume.GetCapacityBytes(), scan.Bytes)
	}
	harness.Must(err)
	return scan
}

func at(generation uint64, patterns []guest.Pattern) (all []guest.Pattern) {
	for _, p := range patterns {
		all = append(all, p.At(generation))
	}
	return all
}

// visit attaches a volume, verifies its content, writes to it, and detaches it.
func (s *checkRun) visit(which string, v *volume, want, write []guest.Pattern) {
	first := v.disk.visit == 1
	s.during(which, func() {
		u := s.inUse(v, s.A)
		switch {
		case first && v.like != nil:
			u.isLike(*v.like)
		case first && want[0].Generation == 0:
			u.isBlank()
		}
		u.verify(want...)
		u.write(true, write...)
		u.leave()
	})
}

func (s *checkRun) restored(which string, from *snapshot, times int64,
	want, write []guest.Pattern) *volume {
	v := s.create(times, from)
	s.visit(which, v, want, write)
	return v
}

func (s *checkRun) restoredOnce(which string, from *snapshot, want []guest.Pattern) {
	harness.Must(s.delete(s.ctx, s.restored(which, from, 1, want, nil)))
}

// checkLineage writes a volume and the volumes that were restored from its snapshots, and deletes
// the volume and a snapshot. No step may change another volume or snapshot. Each write has a new
// generation, so a block shows which write it is from.
func checkLineage(s *checkRun) {
	u := s.newInUse(s.A)
	origin, blocks := u.volume, u.patterns(1)
	var snaps [2]*snapshot
	for i := range snaps {
		u.write(true, u.patterns(uint64(i+1))...)
		snaps[i] = u.snapWhole()
	}
	u.leave()
	first, second := snaps[0], snaps[1]
	s.restoredOnce("restored from the second of two snapshots", second, at(2, blocks))
	one := s.restored("restored from the first of two snapshots", first, 1, at(1, blocks),
		at(3, blocks))
	u.checkLarger(second)
	s.visit("the origin, after writes to what was restored from its snapshots", origin,
		at(2, blocks), nil)
	s.visit("restored from the first of two snapshots and written", one, at(3, blocks), nil)
	two := s.restored("restored again, after a write to what was restored before", first, 1,
		at(1, blocks), nil)
	harness.Must(s.delete(s.ctx, origin))
	s.visit("restored, after the origin was deleted", one, at(3, blocks), at(4, blocks))
	for i, snap := range snaps {
		s.restoredOnce(fmt.Sprintf("restored from snapshot %d of 2 after the origin was deleted", i+1),
			snap, at(uint64(i+1), blocks))
	}
	harness.Must(s.deleteSnapshot(s.ctx, first))
	s.visit("restored, after the snapshot was deleted", one, at(4, blocks), at(5, blocks))
	s.visit("restored, after the snapshot was deleted and another one written", two,
		at(1, blocks), at(6, blocks))
	s.visit("restored, after yet another one was written", one, at(5, blocks), nil)
}

// checkLarger restores a snapshot with blocks of generation 2 into two volumes of twice the size.
// The blocks beyond the snapshot's size must be zero until the check writes them.
func (u *use) checkLarger(from *snapshot) {
	const which = "restored from the second of two snapshots into a larger volume"
	p, end := next(next(u.pattern(0))), u.lastBlock(0)
	end.First += volumeBytes / guest.BlockBytes
	behind := []guest.Pattern{p, next(p), end}
	var larger [2]*volume
	for i := range larger {
		larger[i] = u.restored(which, from, 2, append(u.patterns(2), behind...),
			at(uint64(10+i), behind))
	}
	for i, v := range larger {
		want := append(u.patterns(2), at(uint64(10+i), behind)...)
		u.visit(which+", after both were written behind it", v, want, nil)
		harness.Must(u.delete(u.ctx, v))
	}
}

// checkRecreated creates a volume and a snapshot with the names of deleted ones.
func checkRecreated(s *checkRun) {
	u := s.newInUse(s.A)
	old, blocks := u.volume, u.patterns(1)
	u.write(true, blocks...)
	snap := u.snapWhole()
	u.leave()
	harness.Must(s.delete(s.ctx, old))
	again := &volume{name: old.name, kind: Again, access: old.access, seed: old.seed,
		request: old.request}
	s.undo = append(s.undo, func(ctx context.Context) error { return s.delete(ctx, again) })
	harness.Must(s.make(s.ctx, again))
	if again.GetVolumeId() == old.GetVolumeId() {
		s.fail("volume %s was deleted, and another one of its name has its ID %s", old.name,
			old.GetVolumeId())
	}
	const which = "a volume with the name of one that was deleted"
	s.visit(which, again, at(0, blocks), at(2, blocks))
	u = s.inUse(again, s.A)
	s.during(which+", and written", func() { u.verify(at(2, blocks)...) })
	whole := u.scan(nil)
	u.leave()
	s.restoredOnce("restored from the snapshot of the deleted volume", snap, blocks)
	harness.Must(s.deleteSnapshot(s.ctx, snap))
	named := s.snap(snap.name, again)
	named.whole = &whole
	s.restoredOnce("restored from a snapshot with the name of a deleted one", named, at(2, blocks))
	s.Log.more.Look(report.Measure{What: "an image with the name of a deleted one", Of: 1,
		Unit: "times", Words: "the driver makes no image"})
}

func spread(v *volume) []guest.Pattern {
	size := v.GetCapacityBytes()
	return []guest.Pattern{
		{Seed: v.seed, Count: size / largeStride, Stride: largeStride},
		{Seed: v.seed, First: size/guest.BlockBytes - 1, Count: 1},
	}
}

func checkRestoredLarge(s *checkRun) {
	u := s.inUse(s.create(restoredTimes, nil), s.A)
	u.isBlank()
	blocks := at(1, spread(u.volume))
	u.write(true, blocks...)
	snap := u.snapWhole()
	u.leave()
	which := fmt.Sprintf("restored from a snapshot of %d GiB", u.volume.GetCapacityBytes()/harness.GiB)
	v := s.restored(which, snap, restoredTimes, blocks, nil)
	s.during(which+", detached and attached again", func() { s.inUse(v, s.A).isLike(*v.like) })
}

const (
	// restoredTimes is the size in GiB of the large volume that is restored.
	restoredTimes = 3
	// largeTimes is the size in GiB of the largest volume. Its offsets need more than 34 bits.
	largeTimes = 17
	// largeStride is the distance between two compared blocks of a large volume.
	largeStride = 64 * harness.MiB
)

// checkLarge checks that a large volume is zero at first, and writes blocks all over it.
func checkLarge(s *checkRun) {
	s.writtenAndDeleted()
	v := s.create(largeTimes, nil)
	blocks := spread(v)
	which := fmt.Sprintf("a volume of %d GiB", v.GetCapacityBytes()/harness.GiB)
	for generation := range uint64(2) {
		s.visit(which, v, at(generation, blocks), at(generation+1, blocks))
	}
	s.visit(which, v, at(2, blocks), nil)
}
