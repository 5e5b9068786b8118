package data

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// lineage is a raw volume, two snapshots of it and the volumes that were restored from them. Which
// of them wrote a block last is told by its generation: each writes its own.
type lineage struct {
	*session
	// blocks are those of the origin, and behind those of a volume of twice its size behind them.
	// Those of an own volume are of the origin's seed, too.
	blocks, behind []guest.Pattern
}

// at returns the patterns in a generation.
func at(generation uint64, patterns []guest.Pattern) (all []guest.Pattern) {
	for _, p := range patterns {
		all = append(all, p.At(generation))
	}
	return all
}

// visit demands blocks in a volume, writes others, and detaches it.
func (l *lineage) visit(ctx context.Context, v *volume, want, write []guest.Pattern) error {
	u, err := l.inUse(ctx, v, l.A)
	if err != nil {
		return err
	}
	if err := u.verify(ctx, want...); err != nil {
		return err
	}
	for _, p := range write {
		if err := u.write(ctx, p, true); err != nil {
			return err
		}
	}
	return u.leave(ctx)
}

// restored restores a snapshot and visits the volume.
func (l *lineage) restored(
	ctx context.Context, from *snapshot, times int64, want, write []guest.Pattern,
) (*volume, error) {
	v, err := l.create(ctx, "block", times, from)
	if err != nil {
		return nil, err
	}
	return v, l.visit(ctx, v, want, write)
}

// restoredOnce restores a snapshot, demands its blocks, and deletes the volume.
func (l *lineage) restoredOnce(ctx context.Context, from *snapshot, generation uint64) error {
	v, err := l.restored(ctx, from, 1, at(generation, l.blocks), nil)
	if err != nil {
		return err
	}
	return l.delete(ctx, v)
}

// checkLineage writes a volume and those that were restored from its snapshots, and deletes the
// volume and a snapshot. None of it may change another one of them.
func checkLineage(ctx context.Context, s *session) error {
	l := &lineage{session: s}
	origin, err := s.create(ctx, "block", 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, origin, s.A)
	if err != nil {
		return err
	}
	l.blocks = u.patterns(1)
	p := next(next(u.pattern(1)))
	end := u.lastBlock(1)
	end.First += s.volumeBytes() / guest.BlockBytes
	l.behind = []guest.Pattern{p, next(p), end}
	var snaps [2]*snapshot
	for i := range snaps {
		if err := u.writeAll(ctx, uint64(i+1), true); err != nil {
			return err
		}
		if snaps[i], err = s.snap(ctx, origin); err != nil {
			return err
		}
	}
	if err := u.leave(ctx); err != nil {
		return err
	}
	first, second := snaps[0], snaps[1]
	if err := l.restoredOnce(ctx, second, 2); err != nil {
		return fmt.Errorf("restored from the second of two snapshots: %w", err)
	}
	one, err := l.restored(ctx, first, 1, at(1, l.blocks), at(3, l.blocks))
	if err != nil {
		return fmt.Errorf("restored from the first of two snapshots: %w", err)
	}
	if err := l.checkLarger(ctx, second); err != nil {
		return fmt.Errorf("restored from the second of two snapshots into a larger volume: %w", err)
	}
	if err := l.visit(ctx, origin, at(2, l.blocks), nil); err != nil {
		return fmt.Errorf("the origin, after writes to what was restored from its snapshots: %w", err)
	}
	if err := l.visit(ctx, one, at(3, l.blocks), nil); err != nil {
		return fmt.Errorf("restored from the first of two snapshots and written: %w", err)
	}
	two, err := l.restored(ctx, first, 1, at(1, l.blocks), nil)
	if err != nil {
		return fmt.Errorf("restored again, after a write to what was restored before: %w", err)
	}
	if err := l.delete(ctx, origin); err != nil {
		return err
	}
	if err := l.visit(ctx, one, at(3, l.blocks), at(4, l.blocks)); err != nil {
		return fmt.Errorf("restored, after the origin was deleted: %w", err)
	}
	for i, snap := range snaps {
		if err := l.restoredOnce(ctx, snap, uint64(i+1)); err != nil {
			return fmt.Errorf("restored from snapshot %d of 2 after the origin was deleted: %w", i+1, err)
		}
	}
	if err := l.deleteSnapshot(ctx, first); err != nil {
		return err
	}
	first.deleted = true
	if err := l.visit(ctx, one, at(4, l.blocks), at(5, l.blocks)); err != nil {
		return fmt.Errorf("restored, after the snapshot was deleted: %w", err)
	}
	if err := l.visit(ctx, two, at(1, l.blocks), at(6, l.blocks)); err != nil {
		return fmt.Errorf("restored, after the snapshot was deleted and another one written: %w", err)
	}
	return l.visit(ctx, one, at(5, l.blocks), nil)
}

// checkLarger restores a snapshot into two larger volumes, which are zero behind it.
func (l *lineage) checkLarger(ctx context.Context, from *snapshot) error {
	var larger [2]*volume
	blank := append(at(2, l.blocks), at(0, l.behind)...)
	for i := range larger {
		var err error
		larger[i], err = l.restored(ctx, from, 2, blank, at(uint64(10+i), l.behind))
		if err != nil {
			return err
		}
	}
	for i, v := range larger {
		want := append(at(2, l.blocks), at(uint64(10+i), l.behind)...)
		if err := l.visit(ctx, v, want, nil); err != nil {
			return fmt.Errorf("after both were written behind it: %w", err)
		}
		if err := l.delete(ctx, v); err != nil {
			return err
		}
	}
	return nil
}

// checkRecreated makes a volume with the name of one that was written, restored from a snapshot of
// it, and deleted.
func checkRecreated(ctx context.Context, s *session) error {
	l := &lineage{session: s}
	old, err := s.create(ctx, "block", 1, nil)
	if err != nil {
		return err
	}
	u, err := s.inUse(ctx, old, s.A)
	if err != nil {
		return err
	}
	l.blocks = u.patterns(1)
	if err := u.writeAll(ctx, 1, true); err != nil {
		return err
	}
	snap, err := s.snap(ctx, old)
	if err != nil {
		return err
	}
	if err := u.leave(ctx); err != nil {
		return err
	}
	if err := s.delete(ctx, old); err != nil {
		return err
	}
	again := &volume{name: old.name, access: old.access, capability: old.capability, seed: old.seed,
		request: old.request}
	s.volumes = append(s.volumes, again)
	if err := s.make(ctx, again); err != nil {
		return err
	}
	if again.GetVolumeId() == old.GetVolumeId() {
		return fmt.Errorf("volume %s was deleted, and another one of its name has its ID %s", old.name,
			old.GetVolumeId())
	}
	if err := l.visit(ctx, again, at(0, l.blocks), at(2, l.blocks)); err != nil {
		return fmt.Errorf("a volume with the name of one that was deleted: %w", err)
	}
	if err := l.visit(ctx, again, at(2, l.blocks), nil); err != nil {
		return fmt.Errorf("a volume with the name of one that was deleted, and written: %w", err)
	}
	return wrap(l.restoredOnce(ctx, snap, 1), "restored from the snapshot of the deleted volume")
}

const (
	// largeTimes is how many times the usual size a large volume has: 17 GiB, so that offsets need
	// more than 34 bits.
	largeTimes = 17
	// largeStride is the distance of the blocks that are compared in it.
	largeStride = 64 * harness.MiB
)

// checkLarge writes blocks all over a large volume, which was zero there, and none is another's.
func checkLarge(ctx context.Context, s *session) error {
	if _, err := s.writtenAndDeleted(ctx); err != nil {
		return err
	}
	v, err := s.create(ctx, "block", largeTimes, nil)
	if err != nil {
		return err
	}
	size := largeTimes * s.volumeBytes()
	blocks := []guest.Pattern{
		{Seed: v.seed, Count: size / largeStride, Stride: largeStride},
		{Seed: v.seed, First: size/guest.BlockBytes - 1, Count: 1},
	}
	l := &lineage{session: s}
	for generation := range uint64(2) {
		err := l.visit(ctx, v, at(generation, blocks), at(generation+1, blocks))
		if err != nil {
			return fmt.Errorf("a volume of %d GiB: %w", size/harness.GiB, err)
		}
	}
	return l.visit(ctx, v, at(2, blocks), nil)
}
