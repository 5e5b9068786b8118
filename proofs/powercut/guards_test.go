//go:build linux

package powercut_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// flush is a flush of the driver, with the trial that must fail without it.
type flush struct {
	proof.Guard
	try    trial
	stream uint64 // of random numbers
}

// scenario makes a recording with the drivers of a trial.
type scenario func(ctx context.Context, b, whole *bench, v volume, r *rand.Rand) *recording

// trial returns the failure of a test with the driver of a bench, or nil. The other bench has the
// unmodified driver.
type trial func(ctx context.Context, b, whole *bench, r *rand.Rand) (wrong, err error)

// of returns the trial of a scenario's images.
func of(access string, record scenario) trial {
	return func(ctx context.Context, b, whole *bench, r *rand.Rand) (wrong, err error) {
		defer harness.Catch(&err)
		return whole.firstWrong(ctx, record(ctx, b, whole, newVolume(access), r), r)
	}
}

// directly is a trial of the bench's driver alone. It is for a flush without which no image is
// wrong, because another program flushes, too.
func directly(access string, fails func(context.Context, *bench, string, *rand.Rand) (wrong,
	err error)) trial {
	return func(ctx context.Context, b, _ *bench, r *rand.Rand) (wrong, err error) {
		return fails(ctx, b, access, r)
	}
}

// flushes returns the flushes with which the driver makes a disk's bytes durable, except that of
// the record of a growth: resize2fs flushes the disk before it writes, so no test fails without it.
func flushes() []flush {
	one := func(name, place, text, with string, try trial) flush {
		return flush{Guard: proof.Guard{Name: name,
			Edits: []proof.Edit{{Place: place, Text: text, With: with}}}, try: try}
	}
	const last, skip = "return d.unwritable(w.Sync())", "if REMOVED {\nreturn nil\n}\nTEXT"
	return []flush{
		one("the record of a format is durable before mkfs", "filesystem.disk.writeRecords", last,
			"if REMOVED && slices.Equal(slots, RecordOffsets(d.SizeBytes)) {\nreturn nil\n}\nTEXT",
			of(xfs, aLife)),
		one("records are erased before the disk is used", "filesystem.disk.eraseRecords", last, skip,
			of(ext4, aLife)),
		one("the UUID of a btrfs is durable before its records are erased",
			"filesystem.disk.setBtrfsUUID", "errors.Join(blockdev.WriteAt(w, b, at), w.Sync())",
			"errors.Join(blockdev.WriteAt(w, b, at), unless(REMOVED, w.Sync))", of(btrfs, aLife)),
		one("a record is erased before a workload gets the raw disk", "filesystem.disk.eraseRecords",
			last, skip, of(ext4, aRelease)),
		one("what was written is durable when the volume is unstaged", "node.heldVolume.flush",
			"device.Flush()", proof.NotCalled, of(raw, aLife)),
		// An ext4 would report the failure itself, by its journal.
		one("an unstage reports what could not be written", "node.heldVolume.unmount",
			"mount.Sync(path)", proof.NotCalled, directly(xfs, flushFails)),
		one("an unstage reports a journal that has failed", "node.heldVolume.release",
			"checkJournal(v.node.log(), device)", proof.NotCalled, directly(ext4, journalFails)),
		one("the remains of a format are wiped before mkfs", "filesystem.disk.clearSectors", last, skip,
			of(btrfs, aResumption)),
		one("a format that had ended is durable before its records are erased",
			"filesystem.disk.finishFormat", "w.Sync()", proof.NotCalled, of(btrfs, aFinish)),
	}
}

// aLife records a life with the driver that is tested.
func aLife(ctx context.Context, b, _ *bench, v volume, r *rand.Rand) *recording {
	return recorded(ctx, b, lifeOf(v), r, liveOnce)
}

// after returns a scenario that begins after a life, which the unmodified driver records.
func after(next func(context.Context, *bench, *recording, *rand.Rand) *recording) scenario {
	return func(ctx context.Context, b, whole *bench, v volume, r *rand.Rand) *recording {
		return next(ctx, b, aLife(ctx, whole, nil, v, r), r)
	}
}

var (
	aResumption = after(resumeBtrfs)
	aFinish     = after(finish)
	aRelease    = after(releaseRaw)
)

// shortGuards is the number of flushes that the short form removes.
const shortGuards = 3

// guardImages is the number of images that are sampled for a driver without a flush.
const guardImages = 100

// The driver runs without each of its flushes in turn, and with disks that ignore all flushes.
func TestADriverWithoutOneOfItsFlushesIsNoticed(t *testing.T) {
	p := proof.New(t, "flush-guards")
	g := guardTrials{t: t, p: p, run: harness.RunFor(t)}
	all := flushes()
	var guards []proof.Guard
	for i := range all {
		all[i].stream = uint64(i)
		guards = append(guards, all[i].Guard)
	}
	var err error
	g.program, err = proof.BuildMutant(t.Context(), g.run.Dir, guards)
	p.Fatal(err)
	var lies []flush
	for i, access := range append([]string{raw}, filesystems...) {
		lies = append(lies, flush{proof.Guard{Name: "the flushes of a disk of " + access}, g.lie(access),
			uint64(100 + i)})
	}
	some := slices.Concat(short.Some(t, shortGuards, all), short.Some(t, 1, lies))
	if only := os.Getenv("PROOF_ONLY"); only != "" {
		some = slices.DeleteFunc(slices.Concat(all, lies), func(f flush) bool {
			return f.Name != only
		})
		if len(some) == 0 {
			t.Fatalf("PROOF_ONLY=%q is the name of no flush", only)
		}
	}
	// Each trial mostly waits, and has an unmodified driver at hand.
	p.Error(harness.Share(3, some, func(_ int, jobs <-chan flush) (err error) {
		defer harness.Catch(&err)
		whole := harness.Got(newBench(t.Context(), g.run, "", nil))
		for f := range jobs {
			g.remove(whole, f)
		}
		return whole.close()
	}))
	p.Figure("tried", len(some), "noticed", g.noticed.Load())
}

// guardTrials runs drivers without a flush, several at once.
type guardTrials struct {
	t       *testing.T
	p       *proof.Proof
	run     *harness.Run
	program string
	// noticed counts the missing flushes that were noticed.
	noticed atomic.Int64
}

// remove checks that a missing flush is noticed.
func (g *guardTrials) remove(whole *bench, f flush) {
	b, err := newBench(g.t.Context(), g.run, g.program,
		map[string]string{proof.RemovedGuard: f.Name})
	if err != nil {
		g.t.Error(err)
		return
	}
	wrong, err := f.try(g.t.Context(), b, whole, rand.New(rand.NewPCG(g.p.Seed, f.stream)))
	switch {
	case err != nil:
		g.t.Errorf("without %q: %v", f.Name, err)
	case wrong == nil:
		g.t.Errorf("no test fails without %q (seed %d)", f.Name, g.p.Seed)
	default:
		g.noticed.Add(1)
		g.p.Say("without %q: %v", f.Name, wrong)
	}
	g.p.Error(b.close())
}

// firstWrong returns the fault of the first wrong image of a recording.
func (b *bench) firstWrong(ctx context.Context, rec *recording, r *rand.Rand) (wrong, err error) {
	return b.first(ctx, rec, r, func(s *sampler) []image {
		return slices.Concat(fromBothEnds(s.early()), s.flushes(), s.sample(guardImages))
	}, func(v verdict) bool { return v.wrong != nil })
}

// firstLoss returns the fault of the first image of a recording that lacks acknowledged data.
func (b *bench) firstLoss(ctx context.Context, rec *recording, r *rand.Rand) (lost, err error) {
	return b.first(ctx, rec, r, func(s *sampler) []image {
		return slices.DeleteFunc(append(s.flushes(), s.sample(guardImages)...), func(m image) bool {
			_, staged := rec.ledger.at(m.events)
			return !staged
		})
	}, func(v verdict) bool { return v.lost || v.formatted })
}

// first checks images of a recording until the verdict on one counts, and returns its fault.
func (b *bench) first(ctx context.Context, rec *recording, r *rand.Rand,
	images func(*sampler) []image, counts func(verdict) bool) (fault, err error) {
	defer harness.Catch(&err)
	s := harness.Got(newSampler(rec, r))
	for _, m := range images(s) {
		if v := harness.Got(b.check(ctx, m)); counts(v) {
			return fmt.Errorf("%s: %w", m.name, v.wrong), nil
		}
	}
	return nil, s.err
}

// fromBothEnds orders images from both ends to the middle. The middle has the many writes of mkfs,
// and the driver's own flushes are before and after them.
func fromBothEnds(images []image) (all []image) {
	for i, j := 0, len(images)-1; i <= j; i, j = i+1, j-1 {
		all = append(all, images[i])
		if i < j {
			all = append(all, images[j])
		}
	}
	return all
}

// lie returns the trial of a disk that ignores every flush: data are lost. The first image that
// shows this is drawn.
func (g *guardTrials) lie(access string) trial {
	return func(ctx context.Context, _, whole *bench, r *rand.Rand) (lost, err error) {
		defer harness.Catch(&err)
		life := lifeOf(newVolume(access))
		harness.Must(record(ctx, whole, life, r, liveOnce,
			flakydisk.Fault{On: flakydisk.OnFlush, Lie: true}))
		life.used = 0 // without flushes everything after the first stage counts
		if lost, err = whole.firstLoss(ctx, life, r); lost != nil {
			page := whole.draw(ctx, g.p, g.run.Dir, g.p.Seed, lost)
			harness.Must(g.p.CheckPage(page, lost.Error(), "power cut: ", "NodeStageVolume",
				"make powercut SEED="))
		}
		return lost, err
	}
}
