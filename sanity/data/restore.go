package data

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

const (
	// recordInterval is how often the writer writes; a rack must be able to copy a disk meanwhile.
	recordInterval = 25 * time.Millisecond
	// minRecords are acknowledged before and after a snapshot is taken.
	minRecords = 20
	maxRecords = 1 << 12
	// writeTimeout is how long they may take.
	writeTimeout = time.Minute
)

// checkSnapshot takes a snapshot of a volume that is being written.
func checkSnapshot(ctx context.Context, s *session, access string) error {
	v, err := s.create(ctx, access, 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	records := guest.Pattern{Seed: v.seed, Generation: 1, Count: maxRecords}
	if access != "block" {
		// The records overwrite older ones. Else a torn snapshot could hide behind the size of the file.
		if err := u.write(ctx, records.At(2), true); err != nil {
			return err
		}
	}
	w, err := u.record(ctx, records)
	if err != nil {
		return err
	}
	before, snap, err := s.snapWhileWriting(ctx, u, w)
	end, stopped := w.stop(ctx)
	if err = errors.Join(err, stopped); err != nil {
		return err
	}
	if err := u.leave(ctx); err != nil {
		return err
	}
	restored, err := s.create(ctx, access, 1, snap)
	if err != nil {
		return err
	}
	if u, err = s.inUse(ctx, restored, s.A); err != nil {
		return err
	}
	found, err := u.guest.Records(ctx, u.place(), records)
	if err != nil {
		return err
	}
	return judgeRecords(found, before, end.Acknowledged)
}

// snapWhileWriting waits for records, takes a snapshot, and waits for further ones. It returns how
// many were acknowledged before.
func (s *session) snapWhileWriting(
	ctx context.Context, u *use, w *writer,
) (before int64, snap *snapshot, err error) {
	if before, err = w.await(ctx, minRecords); err != nil {
		return 0, nil, err
	}
	if snap, err = s.snap(ctx, u.volume); err != nil {
		return 0, nil, err
	}
	after, err := u.guest.Acknowledged(ctx, w.number)
	if err == nil {
		_, err = w.await(ctx, min(after+minRecords, maxRecords))
	}
	return before, snap, err
}

// writer appends records to a volume.
type writer struct {
	*use
	number  int
	stopped bool
}

// record starts a writer.
func (u *use) record(ctx context.Context, p guest.Pattern) (*writer, error) {
	number, err := u.guest.StartWriter(ctx, guest.Recording{Place: u.place(), Pattern: p,
		Interval: recordInterval})
	if err != nil {
		return nil, wrap(err, "write records to volume %s", u.volume.name)
	}
	w := &writer{use: u, number: number}
	u.writers = append(u.writers, w)
	return w, nil
}

// await waits until so many records are acknowledged.
func (w *writer) await(ctx context.Context, want int64) (n int64, err error) {
	err = harness.Await(ctx, writeTimeout, func() error {
		n, err = w.guest.Acknowledged(ctx, w.number)
		if err == nil && n < want {
			err = fmt.Errorf("%d records of volume %s are acknowledged, not %d", n, w.volume.name, want)
		}
		return err
	})
	return n, err
}

// stop stops the writer, once.
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

// judgeRecords demands what a snapshot promises.
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
func checkRestore(ctx context.Context, s *session, access string) error {
	v, err := s.create(ctx, access, 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	var snaps [2]*snapshot
	for i := range snaps {
		if err := u.write(ctx, u.pattern(uint64(i+1)), true); err != nil {
			return err
		}
		if snaps[i], err = s.snap(ctx, v); err != nil {
			return err
		}
	}
	size, err := u.size(ctx)
	if err != nil {
		return err
	}
	if err := u.write(ctx, u.pattern(3), true); err != nil {
		return err
	}
	if err := u.leave(ctx); err != nil {
		return err
	}
	for i, snap := range snaps {
		restored, err := s.create(ctx, access, int64(i+1), snap)
		if err != nil {
			return err
		}
		if err := s.checkRestored(ctx, restored, u.pattern(uint64(i+1)), int64(i+1)*size); err != nil {
			return fmt.Errorf("the volume restored from the %s of two snapshots: %w",
				[]string{"first", "second"}[i], err)
		}
	}
	return nil
}

// checkRestored demands the blocks of the origin in a restored volume, and its size, of which a
// filesystem takes some.
func (s *session) checkRestored(
	ctx context.Context, v *volume, p guest.Pattern, size int64,
) error {
	u, err := s.inUse(ctx, v, s.A)
	if err != nil {
		return err
	}
	if err := u.verify(ctx, p); err != nil {
		return err
	}
	got, err := u.size(ctx)
	if err == nil && (got < size-size/10 || got > size+size/10) {
		err = fmt.Errorf("a workload has %d MiB in volume %s, not about %d", got/harness.MiB, v.name,
			size/harness.MiB)
	}
	return errors.Join(err, u.leave(ctx))
}

// size is how many bytes of a filesystem, or of a device, the workload has.
func (u *use) size(ctx context.Context) (int64, error) {
	if u.volume.access != "block" {
		return u.guest.FilesystemBytes(ctx, u.Target)
	}
	facts, err := u.guest.Facts(ctx)
	if err != nil {
		return 0, err
	}
	for _, d := range facts.With(u.serial()) {
		return d.SizeBytes, nil
	}
	return 0, fmt.Errorf("the instance shows no device with the serial %q", u.serial())
}
