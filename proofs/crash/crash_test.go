//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// shortTrials and shortRackTrials are the minimum numbers of trials in the short form.
const (
	shortTrials     = 20
	shortRackTrials = 15
)

// only is the environment variable that repeats a trial by its name, which a failure prints. A
// part of a name repeats all trials whose names contain it. In the long form it repeats all
// such points, with random choices for the rest of the trial.
const only = "CRASH_ONLY"

func TestEveryCallConvergesAfterAKillAtAnyPoint(t *testing.T) {
	run := harness.RunFor(t)
	putGates(t, run)
	t.Run("the driver is killed", func(t *testing.T) {
		t.Parallel()
		newCampaign(t, run, driverProof, driverLifecycles, shortTrials).runProof()
	})
	t.Run("the rack is killed", func(t *testing.T) {
		t.Parallel()
		newCampaign(t, run, "crash-points-rack", rackLifecycles, shortRackTrials).runProof()
	})
}

// driverProof is the name of the proof in which the driver is killed.
const driverProof = "crash-points"

// campaign is one run of a proof.
type campaign struct {
	*proof.Proof
	t     *testing.T
	run   *harness.Run
	env   *environment
	kinds []string
	// short is the number of trials in its short form.
	short int
	// bystanders and forged count the comparisons of disks and files that must not change.
	bystanders, forged *proof.Invariant

	points []point
	tried  map[string]bool
	rpcs   map[string]bool
	// starts contains the number of effects in the start of each process.
	starts    map[string]int
	trials    int
	kills     int
	overlaps  int
	converged int
	said      time.Time
}

func newCampaign(t *testing.T, run *harness.Run, name string, kinds []string, short int) *campaign {
	t.Helper()
	return &campaign{Proof: proof.New(t, name), t: t, run: run, kinds: kinds, short: short,
		bystanders: &proof.Invariant{Name: "bystanders"},
		forged:     &proof.Invariant{Name: "forged-contents"},
		tried:      map[string]bool{}, rpcs: map[string]bool{}, starts: map[string]int{}}
}

// runProof counts the points, tries them, and prints the figure.
func (c *campaign) runProof() {
	ctx := c.t.Context()
	c.openEnvironment(ctx)
	defer c.close()
	c.count(ctx)
	c.countStarts(ctx)
	c.Say("%d points in %d RPCs", len(c.points), rpcsOf(c.points))
	if testing.Verbose() {
		c.t.Log(census(c.points))
	}
	switch {
	case os.Getenv(only) != "" && !c.Long():
		c.chosen(ctx, os.Getenv(only))
	case c.Long():
		for !c.Over() && !c.t.Failed() {
			some := matching(c.points, os.Getenv(only))
			c.round(ctx, sample(some, len(some), c.Rand()))
		}
	default:
		c.round(ctx, sample(c.points, c.short, c.Rand()))
	}
	c.Figure("points", len(c.points), "tried", len(c.tried), "trials", c.trials,
		"converged", c.converged, "kills", c.kills, "overlaps", c.overlaps,
		"rpcs", len(c.rpcs))
	c.bystanders.Report(c.t, c.Name)
	c.forged.Report(c.t, c.Name)
}

// count finds the points: the points that two dry runs have in common. Points that only one of
// them has are random, such as the number of pieces of a file on the disk, or the size of the
// rack's records.
func (c *campaign) count(ctx context.Context) {
	known := map[string]int{}
	for range 2 {
		points, err := countPoints(ctx, c.env, c.kinds, c.Seed)
		if err != nil {
			c.t.Fatal(err)
		}
		c.points = nil
		for _, p := range points {
			if known[p.String()]++; known[p.String()] == 2 {
				c.points = append(c.points, p)
			}
		}
	}
}

// countStarts counts the effects in the start of each process.
func (c *campaign) countStarts(ctx context.Context) {
	for _, p := range c.points {
		if c.starts[p.process] > 0 {
			continue
		}
		c.env.kill(p.process)
		report, err := c.env.startWatched(ctx, p.process, nil)
		if err != nil {
			c.t.Fatal(err)
		}
		c.starts[p.process] = len(report.Effects)
	}
}

func (c *campaign) openEnvironment(ctx context.Context) {
	var err error
	if c.env, err = newEnvironment(ctx, c.run, c.Name, c.bystanders, c.forged); err != nil {
		c.t.Fatal(err)
	}
}

func (c *campaign) close() {
	if c.env == nil {
		return
	}
	if err := c.env.close(); err != nil {
		c.t.Error(err)
	}
}

// round tries points one after the other, with random choices for the rest of each trial.
func (c *campaign) round(ctx context.Context, points []point) {
	for i, p := range points {
		if c.Over() {
			return
		}
		c.attempt(ctx, choose(p, c.points, c.starts[p.process], c.Rand()))
		if time.Since(c.said) > 10*time.Second {
			c.said = time.Now()
			c.Say("%d of %d: %d trials, %d converged, %d kills; last %s", i+1, len(points), c.trials,
				c.converged, c.kills, p.rpc)
		}
	}
}

// matching returns the points whose names contain the text.
func matching(points []point, text string) []point {
	return slices.DeleteFunc(slices.Clone(points), func(p point) bool {
		return !strings.Contains(p.String(), text)
	})
}

// chosen tries the trials whose names contain the text.
func (c *campaign) chosen(ctx context.Context, text string) {
	text, second, twice := strings.Cut(text, andAgain)
	for _, p := range c.points {
		for _, t := range trials(p) {
			if !strings.Contains(t.String(), text) {
				continue
			}
			if twice {
				t.second = named(inStepOf(p, c.points), second)
			}
			c.attempt(ctx, t)
		}
	}
	if c.trials == 0 {
		c.t.Fatalf("%s: no trial has this in its name; the first is %q", only,
			trials(c.points[0])[0])
	}
}

// named returns the point of that name, or nil.
func named(points []trace.Point, name string) *trace.Point {
	for _, p := range points {
		if p.String() == name {
			return &p
		}
	}
	return nil
}

// attempt runs a trial. After a failure it keeps the environment as it is, and opens a new
// one.
func (c *campaign) attempt(ctx context.Context, tr trial) {
	seed := c.Rand().Uint64()
	kills, overlaps := c.env.kills, c.env.overlaps
	err := c.env.runTrial(ctx, tr, seed)
	c.kills += c.env.kills - kills
	c.overlaps += c.env.overlaps - overlaps
	c.trials++
	c.tried[tr.point.String()], c.rpcs[tr.rpc] = true, true
	if err == nil {
		c.converged++
		return
	}
	c.Say("%s failed", tr)
	c.t.Errorf("%s\n  %v\n  the logs lie in %s; repeat it with\n  %s=%q PROOF_SEED=%d", tr, err,
		c.env.Rack.Dir, only, fmt.Sprint(tr), c.Seed)
	c.env.abandon(ctx)
	c.env = nil
	c.openEnvironment(ctx)
}
