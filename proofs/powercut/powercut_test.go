//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(-1) // see collect
	namespace.Main(m)
}

// size is the size of a round: the number of images, how many flushes of a scenario have an image
// each, and the minimum number of other images of a scenario, which are sampled.
type size struct{ images, flushes, sampled int }

// The sizes of a round of the short form, of the proof, and of the long form.
var (
	shortRound = size{images: 60, flushes: 1, sampled: 1}
	wholeRound = size{images: 500, flushes: 12, sampled: 10}
	longRound  = size{images: 2000, flushes: math.MaxInt, sampled: 10}
)

// size returns the size of a round.
func (c *count) size() size {
	switch {
	case c.p.Long():
		return longRound
	case c.p.Short():
		return shortRound
	}
	return wholeRound
}

func TestAStageConvergesAfterAPowerCutAtAnyPoint(t *testing.T) {
	c := &count{trials: newTrials(t, "powercut")}
	peak := c.rounds(c.round)
	c.p.Figure("records", c.records, "writes", c.writes, "flushes", c.flushes, "images", c.images,
		"equal", c.equal, "converged", c.converged, "refused_rightly", c.refused, "lost", c.lost,
		"formatted_used", c.formatted, "peak_mib", peak)
	c.p.Bystanders.Report()
	c.p.Forged.Report()
	if c.p.Short() {
		short.Left(t, wholeRound.images-c.images)
	}
	if want := c.size().images; !c.p.Long() && c.images < want {
		t.Errorf("%d images were checked, want at least %d", c.images, want)
	}
}

// count counts the results of the images.
type count struct {
	*trials
	records, writes, flushes, images int
	equal, converged, refused        int
	lost, formatted                  int
}

// round records every scenario with a seed and checks its images.
func (c *count) round(ctx context.Context, seed uint64) {
	recorded, err := recordAll(ctx, c.run, seed)
	if err != nil {
		c.t.Errorf("record (seed %d): %v", seed, err)
		return
	}
	recorded = slices.DeleteFunc(slices.Clone(recorded), func(r *recording) bool {
		return r.readWhole
	})
	for _, rec := range recorded {
		c.records += len(rec.log)
		for _, r := range rec.log {
			switch {
			case r.Changes():
				c.writes++
			case r.Kind == flakydisk.Flush:
				c.flushes++
			}
		}
	}
	r := rand.New(rand.NewPCG(seed, 2))
	var images []image
	var samplers []*sampler
	for _, rec := range recorded {
		s, err := newSampler(rec, r)
		if err != nil {
			c.t.Errorf("%s (seed %d): %v", rec.name, seed, err)
			return
		}
		samplers = append(samplers, s)
		flushes := s.flushes()
		r.Shuffle(len(flushes), func(i, j int) { flushes[i], flushes[j] = flushes[j], flushes[i] })
		images = append(images, flushes[:min(c.size().flushes, len(flushes))]...)
	}
	c.p.Say("%d scenarios, an image for each of %d flushes of %d", len(recorded), len(images),
		c.flushes)
	for i, s := range samplers {
		images = append(images, s.sample(max(c.size().sampled,
			(c.size().images-len(images)+len(samplers)-i-1)/(len(samplers)-i)))...)
		c.equal += s.equal
		if s.err != nil {
			c.t.Errorf("%s (seed %d): %v", s.of.name, seed, s.err)
		}
	}
	r.Shuffle(len(images), func(i, j int) { images[i], images[j] = images[j], images[i] })
	c.check(ctx, images, seed)
}

// latest contains the latest recordings. The tests share them.
var latest struct {
	seed uint64
	all  []*recording
}

// recordAll records the scenarios of every access type, several at once.
func recordAll(ctx context.Context, run *harness.Run, seed uint64) (all []*recording, err error) {
	if latest.all != nil && latest.seed == seed {
		return latest.all, nil
	}
	accesses := append(slices.Clone(filesystems), raw)
	found, errs := make([][]*recording, len(accesses)), make([]error, len(accesses))
	harness.AtOnce(len(accesses), func(i int) {
		b, err := newBench(ctx, run, "", nil)
		if err == nil {
			found[i], err = recordings(ctx, b, accesses[i], rand.New(rand.NewPCG(seed, uint64(i))))
			err = errors.Join(err, b.close())
		}
		errs[i] = err
	})
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	latest.seed, latest.all = seed, slices.Concat(found...)
	return latest.all, nil
}

// check checks images, several at once.
func (c *count) check(ctx context.Context, images []image, seed uint64) {
	var jobs []job
	for _, m := range images {
		jobs = append(jobs, job{m.of.volume.access, func(b *bench) {
			v, failed := b.check(ctx, m)
			c.note(ctx, b, m, v, failed, seed)
		}})
	}
	c.work(ctx, jobs)
}

// note counts the result of an image, and saves an image with a fault.
func (c *count) note(ctx context.Context, b *bench, m image, v verdict, failed error,
	seed uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.images++
	for n, happened := range map[*int]bool{&c.converged: v.converged, &c.refused: v.refused,
		&c.lost: v.lost, &c.formatted: v.formatted} {
		if happened {
			*n++
		}
	}
	if err := errors.Join(failed, v.wrong); err != nil {
		c.wrong++
		b.draw(ctx, c.p, c.run.Dir, seed, fmt.Errorf("%s: %w", m.name, err))
		path := filepath.Join(c.run.Dir, fmt.Sprintf("image-%d", c.images))
		c.t.Errorf("%s (seed %d): %v; the image is %s", m.name, seed, err, path)
		c.p.Error(m.content().Save(path))
	}
	c.p.SayOften("%d images; the last one: %s", c.images, m.name)
}

// workers is the number of drivers that work at once.
const workers = 5

// job is work on the disk of a volume.
type job struct {
	access string
	do     func(*bench)
}

// trials runs trials with several drivers at once.
type trials struct {
	p   *proof.Proof
	t   *testing.T
	run *harness.Run

	// mu guards the fields below, and the counters.
	mu    sync.Mutex
	wrong int
}

func newTrials(t *testing.T, name string) *trials {
	return &trials{p: proof.New(t, name), t: t, run: harness.RunFor(t)}
}

// noteHarm fails the test if a trial has changed a bystander.
func (c *trials) noteHarm(b *bench) {
	if err := b.Bystanders.Harm(); err != nil {
		c.t.Errorf("after volume %d of %s: %v", b.shown, b.Dir, err)
	}
}

// rounds calls round once, or in the long form with one seed after the other until the time is
// over. It returns the maximum memory of this process in MiB.
func (c *trials) rounds(round func(ctx context.Context, seed uint64)) (peak int64) {
	for seed := range c.p.Rounds() {
		round(c.t.Context(), seed)
	}
	peak, err := peakMiB()
	c.p.Error(err)
	return peak
}

// over reports whether the time is over, or many trials have failed.
func (c *trials) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.p.Over() || c.wrong >= 20
}

// work does the jobs until the time is over. All images of a btrfs have the same UUID, by which the
// kernel identifies a btrfs, so one worker does these jobs alone.
func (c *trials) work(ctx context.Context, jobs []job) {
	work := func(i int, jobs <-chan job) (err error) {
		defer harness.Catch(&err)
		b := harness.Got(newBench(ctx, c.run, "", nil))
		b.Forged = c.p.Forged
		harness.Must(b.AddBystanders(ctx, proof.Members[i%len(proof.Members)], c.p.Bystanders))
		for j := range jobs {
			if c.over() {
				break
			}
			j.do(b)
			c.noteHarm(b)
		}
		return b.close()
	}
	ofBtrfs := func(j job) bool { return j.access == btrfs }
	others := slices.DeleteFunc(slices.Clone(jobs), ofBtrfs)
	jobs = slices.DeleteFunc(jobs, func(j job) bool { return !ofBtrfs(j) })
	var errs [2]error
	harness.AtOnce(2, func(i int) {
		if i == 0 {
			errs[i] = harness.Share(1, jobs, work)
		} else {
			errs[i] = harness.Share(workers-1, others, work)
		}
	})
	c.p.Error(errors.Join(errs[:]...))
}
