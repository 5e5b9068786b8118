package data

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const (
	// recordInterval is the pause between two records, so that a rack can copy a disk in the
	// meantime.
	recordInterval = 25 * time.Millisecond
	// minRecords is the number of records that must be acknowledged before a snapshot is taken, and
	// again after.
	minRecords = 20
	maxRecords = 1 << 12
	// writeTimeout limits how long minRecords may take.
	writeTimeout = time.Minute
)

// checkSnapshot takes a snapshot of a volume that is being written.
func checkSnapshot(s *checkRun) {
	u := s.newInUse(s.A)
	records := guest.Pattern{Seed: u.volume.seed, Generation: 1, Count: maxRecords}
	if s.access != "block" {
		// The records overwrite older ones. Otherwise a torn snapshot could go unnoticed, because the
		// file would only be shorter.
		u.write(true, records.At(2))
	}
	w := u.record(records)
	before := w.await(minRecords)
	snap := s.snap(u.volume)
	after := got[int64](s)(u.guest.Acknowledged(s.ctx, w.number))
	w.await(min(after+minRecords, maxRecords))
	end := got[guest.WriterEnd](s)(w.stop(s.ctx))
	u.leave()
	restored := s.inUse(s.create(1, snap), s.A)
	found := got[guest.Records](s)(restored.guest.Records(s.ctx, restored.place(), records))
	s.must(judgeRecords(found, before, end.Acknowledged))
	s.Log.note("snapshots of a volume with a writer, on "+s.access, 1, "snapshots")
}

// writer appends records to a volume.
type writer struct {
	*use
	number  int
	stopped bool
}

// record starts a writer.
func (u *use) record(p guest.Pattern) *writer {
	number, err := u.guest.StartWriter(u.ctx, guest.Recording{Place: u.place(), Pattern: p,
		Interval: recordInterval})
	u.must(wrap(err, "write records to volume %s", u.volume.name))
	w := &writer{use: u, number: number}
	u.writers = append(u.writers, w)
	return w
}

// await waits until the given number of records is acknowledged, and returns the number that are.
// It returns early if the writer has failed.
func (w *writer) await(want int64) (n int64) {
	err := harness.Await(w.ctx, writeTimeout, func() (err error) {
		n, err = w.guest.Acknowledged(w.ctx, w.number)
		if err == nil && n < want {
			err = fmt.Errorf("%d records of volume %s are acknowledged, not %d", n, w.volume.name, want)
		}
		return err
	})
	if err != nil {
		_, failed := w.stop(w.ctx)
		w.must(errors.Join(err, failed))
	}
	return n
}

// stop stops the writer if it still runs.
func (w *writer) stop(ctx context.Context) (end guest.WriterEnd, err error) {
	if w.stopped {
		return end, nil
	}
	end, err = w.guest.StopWriter(ctx, w.number)
	w.stopped = err == nil
	if end.Failed != "" {
		err = fmt.Errorf("the writer of volume %s failed: %s", w.volume.name, end.Failed)
	}
	return end, err
}

// judgeRecords demands the records that a snapshot must contain.
func judgeRecords(found guest.Records, before, all int64) error {
	switch {
	case found.Whole != found.Prefix:
		return fmt.Errorf("the snapshot is torn: it has %d whole records, but only the first %d have "+
			"no gap: %s, and later ones are whole", found.Whole, found.Prefix, found.Gap)
	case found.Prefix < before:
		return fmt.Errorf("the snapshot has %d records; %d were acknowledged before it was asked for",
			found.Prefix, before)
	case found.Prefix > all+1:
		return fmt.Errorf("the snapshot has %d records; the writer wrote at most %d", found.Prefix,
			all+1)
	}
	return nil
}

// checkRestore restores two snapshots of a volume, one of them into a larger volume.
func checkRestore(s *checkRun) {
	u := s.newInUse(s.A)
	var snaps [2]*snapshot
	for i := range snaps {
		u.write(true, u.pattern(uint64(i+1)))
		snaps[i] = s.snap(u.volume)
	}
	size := u.size()
	u.write(true, u.pattern(3))
	u.leave()
	for i, snap := range snaps {
		restored := s.create(int64(i+1), snap)
		which := []string{"first", "second"}[i]
		s.during("the volume restored from the "+which+" of two snapshots", func() {
			s.checkRestored(restored, u.pattern(uint64(i+1)), int64(i+1)*size)
		})
	}
}

// checkRestored demands the blocks of the origin in a restored volume, and the volume's size. A
// filesystem uses some of that size itself.
func (s *checkRun) checkRestored(v *volume, p guest.Pattern, size int64) {
	u := s.inUse(v, s.A)
	u.verify(p)
	if got := u.size(); got < size-size/10 || got > size+size/10 {
		s.fail("a workload has %d MiB in volume %s, not about %d", got/harness.MiB, v.name,
			size/harness.MiB)
	}
	u.leave()
}

// size returns the number of bytes of the filesystem or device that the workload can use.
func (u *use) size() int64 {
	if u.volume.access != "block" {
		return got[int64](u.checkRun)(u.guest.FilesystemBytes(u.ctx, u.Target))
	}
	for _, d := range got[guest.Facts](u.checkRun)(u.guest.Facts(u.ctx)).With(u.serial()) {
		return d.SizeBytes
	}
	u.fail("the instance shows no device with the serial %q", u.serial())
	return 0
}
