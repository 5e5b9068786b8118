//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// workers is the number of drivers that work at once.
const workers = 5

// job is work on the disk of a volume.
type job struct {
	access string
	do     func(*bench)
}

// trials are trials that several drivers run at once.
type trials struct {
	p   *proof.Proof
	t   *testing.T
	run *harness.Run

	// mu guards the fields below, and the counters.
	mu    sync.Mutex
	said  time.Time
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
	for n := uint64(0); ; n++ {
		round(c.t.Context(), c.p.Seed+n)
		if !c.p.Long() || c.p.Over() || c.t.Failed() {
			break
		}
	}
	peak, err := peakMiB()
	if err != nil {
		c.t.Error(err)
	}
	return peak
}

// over reports whether the time is over, or whether there are so many failures that more would
// show nothing new.
func (c *trials) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.p.Over() || c.wrong >= 20
}

// work does the jobs until the time is over. The kernel identifies a btrfs by its UUID, so
// only one of these is mounted at a time.
func (c *trials) work(ctx context.Context, jobs []job) {
	queues := map[bool]chan job{true: make(chan job), false: make(chan job)}
	errs := make([]error, workers)
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			b, err := newBench(ctx, c.run, "", nil)
			if err == nil {
				b.Forged = c.p.Forged
				err = b.AddBystanders(ctx, proof.Members[i%len(proof.Members)], c.p.Bystanders)
			}
			for j := range queues[i == 0] {
				if err == nil && !c.over() {
					j.do(b)
					c.noteHarm(b)
				}
			}
			if err == nil {
				err = b.close()
			}
			errs[i] = err
		})
	}
	for single, queue := range queues {
		all.Go(func() {
			defer close(queue)
			for _, j := range jobs {
				if (j.access == btrfs) == single {
					queue <- j
				}
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		c.t.Error(err)
	}
}
