//go:build linux

package corpus_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// TestOnlyABlankDiskOrAnUnfinishedFormatIsFormatted is the proof.
func TestOnlyABlankDiskOrAnUnfinishedFormatIsFormatted(t *testing.T) { // E-1
	p := proof.New(t, "blank-corpus")
	run := harness.RunFor(t)
	bases, err := newBases(run.Dir, p.Rand())
	if err != nil {
		t.Fatal(err)
	}
	program, err := proof.BuildMutant(t.Context(), run.Dir, mutable(guards()))
	if err != nil {
		t.Fatal(err)
	}
	c := &tally{p: p, t: t, outcomes: map[outcome]int{}}
	m := &mutation{p: p, t: t, run: run, bases: bases, program: program, all: corpus(),
		unnoticed: map[string]bool{}}
	noticesHarm(t.Context(), t, run, bases)
	tried, removed := chosen(t, m.all), guards()
	if p.Short() {
		tried, removed = some(t, tried, p.Seed), short.Some(t, shortGuards, removed)
	}
	for round := uint64(0); ; round++ {
		c.round(t.Context(), run, bases, tried, round)
		p.Say("%d disks; now without each of %d guards in turn", c.disks, len(removed))
		m.check(t.Context(), removed, p.Seed+round)
		if !p.Long() || p.Over() || t.Failed() {
			break
		}
	}
	p.Figure("disks", c.disks, "formatted_blank", c.outcomes[formatted]-c.overwritten,
		"mounted", c.outcomes[mounted], "refused", c.outcomes[refused],
		"formatted_nonblank", c.overwritten, "guards", len(removed),
		"noticed", len(removed)-len(m.unnoticed))
	p.Bystanders.Report()
	if os.Getenv("PROOF_ONLY") != "" {
		return // the chosen disks need not have forged files or every outcome
	}
	p.Forged.Report()
	for _, outcome := range []outcome{formatted, mounted, refused} {
		if c.outcomes[outcome] == 0 {
			t.Errorf("no disk was %s", outcome)
		}
	}
}

// shortKinds is the number of kinds of disks that the short form tries, by the wanted outcome, or
// because they have forged records. shortGuards is the number of guards without which it tries one.
var shortKinds = map[string]int{string(formatted): 4, string(mounted): 8, string(refused): 32,
	"forged records": 1}

const shortGuards = 10

// some returns the generators of the short form.
func some(t *testing.T, all []generator, seed uint64) (chosen []generator) {
	kinds := map[string][]generator{}
	for _, g := range all {
		kind := string(g.trial(seed).Want.Outcome)
		if strings.Contains(g.name, "forged records") {
			kind = "forged records"
		}
		kinds[kind] = append(kinds[kind], g)
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		chosen = append(chosen, short.Some(t, shortKinds[kind], kinds[kind])...)
	}
	return chosen
}

// chosen returns the generators whose names PROOF_ONLY matches, or all if it is not set.
func chosen(t *testing.T, all []generator) []generator {
	t.Helper()
	only, err := regexp.Compile(os.Getenv("PROOF_ONLY"))
	if err != nil {
		t.Fatalf("PROOF_ONLY has to be a regular expression: %v", err)
	}
	var some []generator
	for _, g := range all {
		if only.MatchString(g.name) {
			some = append(some, g)
		}
	}
	return some
}

// tally counts the results.
type tally struct {
	p *proof.Proof
	t *testing.T

	// mu guards the fields below.
	mu          sync.Mutex
	said        time.Time
	disks       int
	overwritten int
	outcomes    map[outcome]int
}

// benches is the number of drivers that work at once. Each often waits for the kernel.
const benches = 3

// round tries each generator once. The first round is always completed, so that it has every
// kind of disk.
func (c *tally) round(
	ctx context.Context, run *harness.Run, bases *bases, all []generator, round uint64,
) {
	work := make(chan generator)
	var workers sync.WaitGroup
	for i := range benches {
		workers.Go(func() {
			b, err := newBench(ctx, run, bases, "", nil)
			if err == nil {
				b.Forged = c.p.Forged
				err = b.AddBystanders(ctx, proof.Members[i%len(proof.Members)], c.p.Bystanders)
			}
			if err != nil {
				c.t.Errorf("start a driver: %v", err)
			}
			for g := range work {
				if err == nil {
					b.evidence = true
					c.one(ctx, b, g, c.p.Seed+round, len(all))
				}
			}
			if err != nil {
				return
			}
			if err := b.close(); err != nil {
				c.t.Error(err)
			}
		})
	}
	for _, g := range all {
		if round > 0 && c.p.Over() {
			break
		}
		work <- g
	}
	close(work)
	workers.Wait()
}

// one runs one trial and counts the result.
func (c *tally) one(ctx context.Context, b *bench, g generator, seed uint64, of int) {
	start := time.Now()
	v, err := b.try(ctx, g.trial(seed))
	took := time.Since(start).Round(time.Millisecond)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.disks++
	c.outcomes[v.Outcome]++
	if v.Overwritten {
		c.overwritten++
	}
	if err != nil {
		c.t.Errorf("%q (seed %d) cannot be tried: %v", g.name, seed, err)
	}
	if v.Wrong != nil {
		c.t.Errorf("%q (seed %d): %v", g.name, seed, v.Wrong)
	}
	if os.Getenv("PROOF_ANSWERS") != "" {
		c.p.Say("%q: %v %s %v", g.name, took, v.Outcome, v.Answer)
	}
	if time.Since(c.said) > 5*time.Second {
		c.said = time.Now()
		c.p.Say("%d disks, %d in a round; the last one: %s", c.disks, of, g.name)
	}
}

// trial returns the generator's trial for a seed.
func (g generator) trial(seed uint64) *trial {
	h := fnv.New64a()
	fmt.Fprint(h, g.name)
	t := defaults(g.name, rand.New(rand.NewPCG(seed, h.Sum64())))
	g.make(t)
	return t
}
