//go:build linux

package powercut_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// flush is a flush of the driver, with the tests that must notice its absence.
type flush struct {
	proof.Guard
	// scenarios are the scenarios whose images must show the absence. Each is for a filesystem or
	// for a raw volume.
	scenarios []scenario
	// trial notices the absence where no power cut can, because another program flushes, too.
	trial func(context.Context, *bench, *rand.Rand) (wrong, err error)
}

// scenario records something with the driver of a bench.
type scenario struct {
	access string
	record func(context.Context, *bench, *bench, volume, *rand.Rand) (*recording, error)
}

// flushes returns all flushes of the driver that make a disk's bytes durable. The flush of the
// record of a growth is missing: resize2fs flushes the disk before it writes, so no image
// would be wrong without the driver's flush.
func flushes() []flush {
	one := func(name, place, text, with string, scenarios ...scenario) flush {
		return flush{Guard: proof.Guard{Name: name,
			Edits: []proof.Edit{{Place: place, Text: text, With: with}}}, scenarios: scenarios}
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
		{Guard: proof.Guard{Name: "what could not be written is told when the volume is unstaged",
			Edits: []proof.Edit{{Place: "node.heldVolume.unmount", Text: "mount.Sync(path)",
				With: proof.NotCalled}}}, trial: failFlush},
		{Guard: proof.Guard{Name: "a journal that has failed is told of when the volume is unstaged",
			Edits: []proof.Edit{{Place: "node.heldVolume.release",
				Text: "checkJournal(v.node.log(), device)", With: proof.NotCalled}}}, trial: failJournal},
		one("what a format had left is wiped before mkfs", "filesystem.disk.clearSectors", last, skip,
			of(btrfs, aResumption)),
		one("a format that had ended is durable before its records are erased",
			"filesystem.disk.finishFormat", "w.Sync()", proof.NotCalled, of(btrfs, aFinish)),
	}
}

func of(access string, record func(context.Context, *bench, *bench, volume, *rand.Rand) (*recording,
	error)) scenario {
	return scenario{access, record}
}

// aLife records a life with the driver that is tested.
func aLife(ctx context.Context, b, _ *bench, v volume, r *rand.Rand) (*recording, error) {
	life := lifeOf(v)
	return life, record(ctx, b, life, r, liveOnce)
}

// after records a scenario that needs a life before it. The unmodified driver records that
// life.
func after(next func(context.Context, *bench, *recording, *rand.Rand) (*recording, error)) func(
	context.Context, *bench, *bench, volume, *rand.Rand) (*recording, error) {
	return func(ctx context.Context, b, whole *bench, v volume, r *rand.Rand) (*recording, error) {
		life, err := aLife(ctx, whole, nil, v, r)
		if err != nil {
			return nil, err
		}
		return next(ctx, b, life, r)
	}
}

var (
	aResumption = after(resumeBtrfs)
	aFinish     = after(finish)
	aRelease    = after(releaseRaw)
)

// shortGuards is the number of flushes that the short form removes.
const shortGuards = 3

// guardImages is the number of images that are sampled to notice the absence of a flush.
const guardImages = 100

// TestTheAbsenceOfEachFlushIsNoticed removes each flush from the driver in turn. It also makes
// a disk that ignores all flushes.
func TestTheAbsenceOfEachFlushIsNoticed(t *testing.T) {
	p := proof.New(t, "flush-guards")
	run := harness.RunFor(t)
	all := flushes()
	var guards []proof.Guard
	for _, f := range all {
		guards = append(guards, f.Guard)
	}
	program, err := proof.BuildMutant(t.Context(), run.Dir, guards)
	if err != nil {
		t.Fatal(err)
	}
	g := guardTrials{t: t, p: p, run: run, program: program}
	var jobs []func(whole *bench)
	for i, f := range all {
		if os.Getenv("PROOF_ONLY") == "" || os.Getenv("PROOF_ONLY") == f.Name {
			jobs = append(jobs, func(whole *bench) { g.remove(whole, f, uint64(i)) })
		}
	}
	var lies []func(whole *bench)
	for i, access := range append([]string{raw}, filesystems...) {
		lies = append(lies, func(whole *bench) { g.lie(whole, access, uint64(100+i)) })
	}
	jobs, lies = short.Some(t, shortGuards, jobs), short.Some(t, 1, lies)
	g.work(append(slices.Clip(jobs), lies...))
	removed := len(jobs)
	p.Figure("removed", removed, "noticed", g.noticed.Load(), "lies", len(lies),
		"lies_noticed", g.lies.Load())
}

// guardTrials remove flushes, several at once.
type guardTrials struct {
	t       *testing.T
	p       *proof.Proof
	run     *harness.Run
	program string
	// noticed and lies count the flushes and the disks of which the absence was noticed.
	noticed, lies atomic.Int64
}

// guardWorkers is the number of flushes that are removed at once. Each often waits.
const guardWorkers = 3

// work does the jobs, each with an unmodified driver.
func (g *guardTrials) work(jobs []func(whole *bench)) {
	queue := make(chan func(*bench))
	var all sync.WaitGroup
	for range guardWorkers {
		all.Go(func() {
			whole, err := newBench(g.t.Context(), g.run, "", nil)
			for do := range queue {
				if err == nil {
					do(whole)
				}
			}
			if err == nil {
				err = whole.close()
			}
			if err != nil {
				g.t.Error(err)
			}
		})
	}
	for _, do := range jobs {
		queue <- do
	}
	close(queue)
	all.Wait()
}

// remove checks that the absence of a flush is noticed.
func (g *guardTrials) remove(whole *bench, f flush, stream uint64) {
	b, err := newBench(g.t.Context(), g.run, g.program,
		map[string]string{proof.RemovedGuard: f.Name})
	if err != nil {
		g.t.Error(err)
		return
	}
	wrong, err := f.try(g.t.Context(), b, whole, rand.New(rand.NewPCG(g.p.Seed, stream)))
	switch {
	case err != nil:
		g.t.Errorf("without %q: %v", f.Name, err)
	case wrong == nil:
		g.t.Errorf("without %q nothing happens (seed %d)", f.Name, g.p.Seed)
	default:
		g.noticed.Add(1)
		g.p.Say("without %q: %v", f.Name, wrong)
	}
	if err := b.close(); err != nil {
		g.t.Error(err)
	}
}

// try returns the fault that the absence of the flush causes.
func (f flush) try(ctx context.Context, b, whole *bench, r *rand.Rand) (wrong, err error) {
	if f.trial != nil {
		return f.trial(ctx, b, r)
	}
	for _, s := range f.scenarios {
		rec, err := s.record(ctx, b, whole, newVolume(s.access), r)
		if err != nil {
			return nil, err
		}
		if wrong, err = whole.firstWrong(ctx, rec, r); wrong != nil || err != nil {
			return wrong, err
		}
	}
	return nil, nil
}

// firstWrong checks images of a recording until one is wrong.
func (b *bench) firstWrong(ctx context.Context, rec *recording, r *rand.Rand) (wrong, err error) {
	s, err := newSampler(rec, r)
	if err != nil {
		return nil, err
	}
	for _, m := range slices.Concat(fromBothEnds(s.early()), s.flushes(), s.sample(guardImages)) {
		v, err := b.check(ctx, m)
		if err != nil {
			return nil, err
		}
		if v.wrong != nil {
			return fmt.Errorf("%s: %w", m.name, v.wrong), nil
		}
	}
	return nil, s.err
}

// fromBothEnds orders images so that the first and the last ones come first. The driver's own
// flushes are before and after the many writes of mkfs, so a wrong image is found soon.
func fromBothEnds(images []image) (all []image) {
	for i, j := 0, len(images)-1; i <= j; i, j = i+1, j-1 {
		all = append(all, images[i])
		if i < j {
			all = append(all, images[j])
		}
	}
	return all
}

// lie makes a disk ignore every flush, and checks that the loss is noticed.
func (g *guardTrials) lie(b *bench, access string, stream uint64) {
	r := rand.New(rand.NewPCG(g.p.Seed, stream))
	life := lifeOf(newVolume(access))
	err := record(g.t.Context(), b, life, r, liveOnce,
		flakydisk.Fault{On: flakydisk.OnFlush, Lie: true})
	if err != nil {
		g.t.Error(err)
		return
	}
	life.used = 0 // without flushes everything after the first stage counts
	wrong, err := b.firstLoss(g.t.Context(), life, r)
	if err != nil || wrong == nil {
		g.t.Errorf("a disk of %s that lies about flushes loses nothing (seed %d), %v", access,
			g.p.Seed, err)
		return
	}
	page := b.draw(g.t.Context(), g.p, g.run.Dir, g.p.Seed, wrong)
	if err := g.p.CheckPage(page, wrong.Error(), "power cut: ", "NodeStageVolume",
		"make powercut SEED="); err != nil {
		g.t.Error(err)
	}
	g.lies.Add(1)
	g.p.Say("a disk of %s that lies: %v", access, wrong)
}

// firstLoss checks images of a recording until one lacks acknowledged data.
func (b *bench) firstLoss(ctx context.Context, rec *recording, r *rand.Rand) (lost, err error) {
	s, err := newSampler(rec, r)
	if err != nil {
		return nil, err
	}
	for _, m := range append(s.flushes(), s.sample(guardImages)...) {
		if _, staged := rec.ledger.at(m.events); !staged {
			continue
		}
		v, err := b.check(ctx, m)
		if err != nil {
			return nil, err
		}
		if v.lost || v.formatted {
			return fmt.Errorf("%s: %w", m.name, v.wrong), nil
		}
	}
	return nil, s.err
}
