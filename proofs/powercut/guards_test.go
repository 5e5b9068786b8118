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

// flush is a flush of the driver, with the tests that must fail without it.
type flush struct {
	proof.Guard
	// scenarios contains the scenarios that have a wrong image without the flush.
	scenarios []scenario
	// trial replaces scenarios for a flush without which no image is wrong, because another program
	// flushes, too.
	trial func(context.Context, *bench, *rand.Rand) (wrong, err error)
}

// scenario makes a recording with the driver of a bench.
type scenario struct {
	access string
	record func(context.Context, *bench, *bench, volume, *rand.Rand) (*recording, error)
}

// flushes returns the flushes with which the driver makes a disk's bytes durable, except that of
// the record of a growth: resize2fs flushes the disk before it writes, so no test fails without it.
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
		{Guard: proof.Guard{Name: "an unstage reports what could not be written",
			Edits: []proof.Edit{{Place: "node.heldVolume.unmount", Text: "mount.Sync(path)",
				With: proof.NotCalled}}}, trial: failFlush},
		{Guard: proof.Guard{Name: "an unstage reports a journal that has failed",
			Edits: []proof.Edit{{Place: "node.heldVolume.release",
				Text: "checkJournal(v.node.log(), device)", With: proof.NotCalled}}}, trial: failJournal},
		one("the remains of a format are wiped before mkfs", "filesystem.disk.clearSectors", last, skip,
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

// after returns a scenario that begins after a life, which the unmodified driver records.
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

// guardImages is the number of images that are sampled for a driver without a flush.
const guardImages = 100

// The driver runs without each of its flushes in turn, and with disks that ignore all flushes.
func TestADriverWithoutOneOfItsFlushesIsNoticed(t *testing.T) {
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

// guardTrials runs drivers without a flush, several at once.
type guardTrials struct {
	t       *testing.T
	p       *proof.Proof
	run     *harness.Run
	program string
	// noticed counts the missing flushes, and lies the disks without flushes, that were noticed.
	noticed, lies atomic.Int64
}

// guardWorkers is the number of jobs at once. Each job mostly waits.
const guardWorkers = 3

// work does the jobs, each with an unmodified driver at hand.
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

// remove checks that a driver without a flush is noticed.
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
		g.t.Errorf("no test fails without %q (seed %d)", f.Name, g.p.Seed)
	default:
		g.noticed.Add(1)
		g.p.Say("without %q: %v", f.Name, wrong)
	}
	if err := b.close(); err != nil {
		g.t.Error(err)
	}
}

// try returns the failure of a test without the flush, or nil if none fails.
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

// lie makes a disk ignore every flush, and checks that the loss of data is noticed.
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
		g.t.Errorf("a disk of %s that ignores flushes loses nothing (seed %d), %v", access,
			g.p.Seed, err)
		return
	}
	page := b.draw(g.t.Context(), g.p, g.run.Dir, g.p.Seed, wrong)
	if err := g.p.CheckPage(page, wrong.Error(), "power cut: ", "NodeStageVolume",
		"make powercut SEED="); err != nil {
		g.t.Error(err)
	}
	g.lies.Add(1)
	g.p.Say("a disk of %s that ignores flushes: %v", access, wrong)
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

// In each image, one write with which the driver wipes the remains of mkfs.btrfs is torn: only its
// first sector is written.
func TestATornWipeIsRepeated(t *testing.T) {
	p := proof.New(t, "torn-wipe")
	b, r := startBench(t), rand.New(rand.NewPCG(p.Seed, 400))
	v := newVolume(btrfs)
	v.size = 128 * mib // the smallest, because the driver reads every image whole
	rec, err := aResumption(t.Context(), b, b, v, r)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSampler(rec, r)
	if err != nil {
		t.Fatal(err)
	}
	wipes := 0
	var images []image
	for i, e := range s.epochs {
		for _, one := range s.changes(e) {
			record := rec.log[one]
			if one > rec.used || record.Kind != flakydisk.Write || !isZero(record.Data) {
				continue
			}
			wipes++
			torn := append(s.whole(e.First, one), flakydisk.Piece{Entry: record, To: 1})
			images = s.add(images, i, one+1, fmt.Sprintf("a wipe at %d torn", record.Offset), torn...)
		}
	}
	images = short.Some(t, 5, images)
	p.Say("%d wipes, %d images", wipes, len(images))
	for _, m := range images {
		if v, err := b.check(t.Context(), m); err != nil || !v.converged || v.wrong != nil {
			t.Errorf("%s: converged %t, %v, %v", m.name, v.converged, v.wrong, err)
		}
	}
	if s.err != nil || wipes == 0 {
		t.Errorf("%d writes are wipes, %v", wipes, s.err)
	}
}
