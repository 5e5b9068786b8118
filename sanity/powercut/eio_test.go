//go:build linux && powercut

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// shortSectors is how many sectors of a scenario fail in the short form, of requests that differ.
const shortSectors = 12

// failing is a sector that fails while a volume is staged.
type failing struct {
	of     *recording
	op     flakydisk.Op
	sector int64
	// proving is set when the sector is read to prove that the disk is blank.
	proving bool
	times   int
}

func (f failing) String() string {
	return fmt.Sprintf("%s, the sector at %d fails, op %d, %d times (0 is always)", f.of.name,
		f.sector, f.op, f.times)
}

// TestNoSectorThatFailsMakesAStageGuess is the proof: a sector fails that a stage reads or writes,
// first once, and then each time.
func TestNoSectorThatFailsMakesAStageGuess(t *testing.T) {
	p := proof.New(t, "eio")
	run := harness.RunFor(t)
	recorder := &count{p: p, t: t, run: run}
	var mu sync.Mutex
	sectors, right, wrong := 0, 0, 0
	said := time.Now()
	for round := uint64(0); ; round++ {
		seed := p.Seed + round
		recorded, err := recorder.record(t.Context(), seed)
		if err != nil {
			t.Fatal(err)
		}
		all, err := sectorsOf(t.Context(), run, recorded, rand.New(rand.NewPCG(seed, 3)), p.Long())
		if err != nil {
			t.Fatal(err)
		}
		p.Say("%d sectors of %d scenarios", len(all), len(recorded))
		var jobs []job
		for _, f := range all {
			jobs = append(jobs, job{f.of.volume.access, func(b *bench) {
				err := b.fail(t.Context(), f)
				mu.Lock()
				defer mu.Unlock()
				if sectors++; err == nil {
					right++
				} else {
					wrong++
					t.Errorf("%v (seed %d): %v", f, seed, err)
				}
				if time.Since(said) > 10*time.Second {
					said = time.Now()
					p.Say("%d sectors; the last one: %v", sectors, f)
				}
			}})
		}
		err = work(t.Context(), run, jobs, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return p.Over() || wrong >= 20
		})
		if err != nil {
			t.Error(err)
		}
		if !p.Long() || p.Over() || t.Failed() {
			break
		}
	}
	p.Figure("sectors", sectors, "right", right, "wrong", wrong)
}

// sectorsOf stages the base of each recording once and returns the sectors that were read or
// written meanwhile: all of them, or some of each request.
func sectorsOf(ctx context.Context, run *harness.Run, recorded []*recording, r *rand.Rand,
	whole bool) ([]failing, error) {
	b, err := newBench(ctx, run, "")
	if err != nil {
		return nil, err
	}
	var all []failing
	for _, of := range recorded {
		log, err := b.stageOnce(ctx, of)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", of.name, err)
		}
		found := requests(of, log, r, whole)
		r.Shuffle(len(found), func(i, j int) { found[i], found[j] = found[j], found[i] })
		if !whole {
			found = found[:min(shortSectors, len(found))]
		}
		for i := range found {
			found[i].times = i % 2
		}
		all = append(all, found...)
	}
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all, b.close()
}

// stageOnce returns the log of a stage, with what it reads.
func (b *bench) stageOnce(ctx context.Context, of *recording) (log []flakydisk.Record, err error) {
	disk := flakydisk.NewDisk(of.base.Fork())
	place, err := b.show(ctx, of.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	if err != nil {
		return nil, err
	}
	disk.StartLog(true)
	if err := place.stage(ctx); err != nil {
		return nil, err
	}
	log = disk.Log()
	return log, place.unstage(ctx)
}

// requests returns the sectors of a log, of each request one or all.
func requests(of *recording, log []flakydisk.Record, r *rand.Rand, whole bool) (all []failing) {
	seen := map[failing]bool{}
	proving := of.blank
	for _, record := range log {
		op := flakydisk.OnRead
		switch {
		case record.Changes():
			op, proving = flakydisk.OnWrite, false
		case record.Kind != flakydisk.Read:
			continue
		}
		first, n := record.Offset/flakydisk.SectorBytes, record.Sectors()
		if !whole {
			first, n = first+r.Int64N(n), 1
		}
		for sector := first; sector < first+n; sector++ {
			f := failing{of: of, op: op, sector: sector * flakydisk.SectorBytes}
			if !seen[f] {
				seen[f] = true
				f.proving = proving && op == flakydisk.OnRead
				all = append(all, f)
			}
		}
	}
	return all
}

// fail stages a volume on a disk of which a sector fails, and again when the disk is in order.
func (b *bench) fail(ctx context.Context, f failing) (err error) {
	content := f.of.base.Fork()
	disk := flakydisk.NewDisk(content)
	place, err := b.show(ctx, f.of.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	if err != nil {
		return err
	}
	fired := disk.AddFault(flakydisk.Fault{On: f.op, From: f.sector,
		To: f.sector + flakydisk.SectorBytes, Times: f.times})
	before, err := b.formatted()
	if err != nil {
		return err
	}
	answer := place.stage(ctx)
	if answer != nil && f.times == 0 {
		if reason := wrongReason(f, answer); reason != nil {
			return reason
		}
		answer = place.stage(ctx)
	}
	after, err := b.formatted()
	if err != nil {
		return err
	}
	struck, said := fired(), fmt.Sprint(answer)
	disk.Heal()
	switch {
	case after != before && !f.of.blank:
		return fmt.Errorf("a disk that was in use was formatted, and the answer is %s", said)
	case after != before && f.proving && f.times == 0 && struck > 0:
		return fmt.Errorf("a disk was formatted that could not be read, and the answer is %s", said)
	}
	if answer != nil {
		if reason := wrongReason(f, answer); reason != nil {
			return reason
		}
	} else if err := place.unstage(ctx); err != nil {
		return err // what could not be done on this disk is done when it is staged again
	}
	if err := place.stage(ctx); err != nil {
		return fmt.Errorf("after %s the disk is in order, and the call does not converge: %w", said,
			err)
	}
	promises, _ := f.of.ledger.at(0)
	if err := errors.Join(place.staged(), place.checkData(ctx, promises), place.usable(f.of),
		place.unstage(ctx)); err != nil {
		return fmt.Errorf("after %s: %w", said, err)
	}
	var left []int64
	disk.WithStore(func(flakydisk.Store) { left = recordsLeft(content, f.of) })
	if len(left) > 0 {
		return fmt.Errorf("after %s: records of the driver are left at %d", said, left)
	}
	return nil
}

// wrongReason returns an error unless the answer to a stage gives a right reason.
func wrongReason(f failing, answer error) error {
	reasons := []string{"NodeToolFailed"}
	if f.op == flakydisk.OnRead {
		reasons = append(reasons, "DeviceUnreadable")
	}
	if slices.ContainsFunc(reasons, func(reason string) bool {
		return strings.Contains(answer.Error(), "desc = "+reason+": ")
	}) {
		return nil
	}
	return fmt.Errorf("the reason is none of %q: %w", reasons, answer)
}
