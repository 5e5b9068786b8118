//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// leastTrials and leastRackTrials are the minimum numbers of trials. The short form makes
// shortTrials.
const (
	leastTrials     = 20
	leastRackTrials = 15
	shortTrials     = 4
)

// only is the environment variable with a part of the names of the points to try. With the same
// seed a point has the same trial.
const only = "CRASH_ONLY"

func TestEveryCallConvergesAfterAKillAtAnyPoint(t *testing.T) { // B-10
	run := harness.RunFor(t)
	putGates(t, run)
	var trials atomic.Int64
	t.Cleanup(func() {
		if trials.Load() == 0 {
			t.Errorf("no point was tried with %s=%q", only, os.Getenv(only))
		}
	})
	t.Run("the driver is killed", func(t *testing.T) {
		t.Parallel()
		trials.Add(newCampaign(t, run, driverProof, driverLifecycles, leastTrials).runProof())
	})
	t.Run("the rack is killed", func(t *testing.T) {
		t.Parallel()
		trials.Add(newCampaign(t, run, "crash-points-rack", rackLifecycles, leastRackTrials).runProof())
	})
}

// driverProof is the name of the proof in which the driver is killed.
const driverProof = "crash-points"

// campaign is one run of a proof.
type campaign struct {
	*proof.Proof
	t   *testing.T
	run *harness.Run
	// envs run trials at the same time, because a trial mostly waits for processes and disks. There
	// are two, one for each dry run, and in the short form one.
	envs  []*environment
	kinds []string
	// least is the minimum number of trials.
	least int

	points []point
	// starts contains, by process, the number of effects while it starts.
	starts map[string]int

	// mu guards the fields below.
	mu        sync.Mutex
	tried     map[string]bool
	rpcs      map[string]bool
	trials    int
	kills     int
	overlaps  int
	converged int
}

func newCampaign(t *testing.T, run *harness.Run, name string, kinds []string, least int) *campaign {
	t.Helper()
	c := &campaign{Proof: proof.New(t, name), t: t, run: run, envs: make([]*environment, 2),
		kinds: kinds, least: least, tried: map[string]bool{}, rpcs: map[string]bool{},
		starts: map[string]int{}}
	if c.Short() {
		c.envs, c.kinds = c.envs[:1], kinds[:min(1, len(kinds))]
	}
	return c
}

// runProof counts the points, tries them, and prints the figure. It returns the number of trials.
func (c *campaign) runProof() int64 {
	ctx := c.t.Context()
	defer c.close()
	c.Fatal(c.each(func(i int) error { return c.openEnvironment(ctx, i) }))
	c.count(ctx)
	c.countStarts(ctx)
	c.Say("%d points", len(c.points))
	some := matching(c.points, os.Getenv(only))
	switch {
	case len(some) == 0 && os.Getenv(only) != "":
		return 0 // it may be a point of the other campaign
	case c.Long() || os.Getenv(only) != "":
		some = sample(some, len(some), c.Rand())
	case c.Short():
		ofNode := matching(some, ": Node")
		ofNode = sample(ofNode, shortTrials/2, c.Rand())[:min(shortTrials/2, len(ofNode))]
		others := without(some, matching(some, ": Node"))
		some = slices.Concat(ofNode, sample(others, shortTrials, c.Rand())[:shortTrials-len(ofNode)])
	default:
		first := sample(some, c.least, c.Rand())
		some = slices.Concat(first, sample(matching(without(some, first), deviceless),
			leastDeviceless, c.Rand()))
	}
	for seed := range c.Rounds() {
		c.attempts(ctx, c.round(some, seed))
	}
	short.Left(c.t, c.least-c.trials)
	c.Figure("points", len(c.points), "tried", len(c.tried), "trials", c.trials,
		"converged", c.converged, "kills", c.kills, "overlaps", c.overlaps,
		"rpcs", len(c.rpcs))
	want := c.least
	switch {
	case os.Getenv(only) != "":
		want = 1
	case c.Short():
		want = shortTrials
	}
	if c.trials < want {
		c.t.Errorf("%d trials were made, want at least %d", c.trials, want)
	}
	c.Bystanders.Report()
	c.Forged.Report()
	return int64(c.trials)
}

// count finds the points. It makes two dry runs and keeps the points that both have: the others are
// random, such as those that depend on the number of extents of a file, or the size of the rack's
// records.
func (c *campaign) count(ctx context.Context) {
	var runs [2][]point
	c.Fatal(c.each(func(i int) (err error) {
		for n := i; n < len(runs) && err == nil; n += len(c.envs) {
			runs[n], err = countPoints(ctx, c.envs[i], c.kinds)
		}
		return err
	}))
	known := map[string]bool{}
	for _, p := range runs[0] {
		known[p.String()] = true
	}
	c.points = slices.DeleteFunc(runs[1], func(p point) bool { return !known[p.String()] })
}

// countStarts counts the effects in the start of each process.
func (c *campaign) countStarts(ctx context.Context) {
	for _, p := range c.points {
		if c.starts[p.process] > 0 {
			continue
		}
		c.envs[0].process(p.process).Kill()
		report, err := c.envs[0].startWatched(ctx, p.process, nil)
		c.Fatal(err)
		c.starts[p.process] = len(report.Effects)
	}
}

// each calls do for every environment, at the same time.
func (c *campaign) each(do func(i int) error) error {
	errs := make([]error, len(c.envs))
	harness.AtOnce(len(c.envs), func(i int) { errs[i] = do(i) })
	return errors.Join(errs...)
}

func (c *campaign) openEnvironment(ctx context.Context, i int) (err error) {
	c.envs[i], err = newEnvironment(ctx, c.run, c.Proof)
	return err
}

func (c *campaign) close() {
	for _, env := range c.envs {
		if env == nil {
			continue
		}
		c.Error(env.close())
	}
}

// round returns a trial for each point. The seed determines the other parts of a trial.
func (c *campaign) round(points []point, seed uint64) (all []trial) {
	for _, p := range points {
		all = append(all, choose(p, c.points, c.starts[p.process], seed))
	}
	return all
}

// attempts runs trials in all environments.
func (c *campaign) attempts(ctx context.Context, trials []trial) {
	c.Error(harness.Share(len(c.envs), trials, func(i int, jobs <-chan trial) error {
		for t := range jobs {
			if c.Over() {
				break
			}
			if err := c.attempt(ctx, i, t); err != nil {
				return err
			}
		}
		return nil
	}))
}

// matching returns the points whose names contain the text.
func matching(points []point, text string) []point {
	return slices.DeleteFunc(slices.Clone(points), func(p point) bool {
		return !strings.Contains(p.String(), text)
	})
}

// without returns the points that are not among the others.
func without(points, others []point) []point {
	return slices.DeleteFunc(slices.Clone(points), func(p point) bool {
		return slices.Contains(others, p)
	})
}

// attempt runs a trial in an environment. After a failed trial it keeps the files of the
// environment and opens a new environment. It returns an error if that fails.
func (c *campaign) attempt(ctx context.Context, i int, tr trial) error {
	env := c.envs[i]
	kills, overlaps := env.kills, env.overlaps
	err := env.runTrial(ctx, tr)
	c.note(tr, err == nil, env.kills-kills, env.overlaps-overlaps)
	if err == nil {
		return nil
	}
	c.Say("%s failed", tr)
	c.draw(ctx, env, tr, err)
	c.t.Errorf("%s\n  %v\n  the logs are in %s; repeat it with\n  %s=%q PROOF_SEED=%d", tr, err,
		env.Rack.Dir, only, tr.point, tr.seed)
	_ = env.Abandon(ctx) // the trial's failure has been reported
	if env.watcher != nil {
		_ = env.watcher.Close()
	}
	c.envs[i] = nil
	return c.openEnvironment(ctx, i)
}

// draw draws the page of a failed trial, and returns its path.
func (c *campaign) draw(ctx context.Context, env *environment, tr trial, broken error) string {
	return c.Draw(ctx, proof.Failure{Name: tr.String(), Seed: tr.seed, Broken: broken,
		Repeat: fmt.Sprintf("%s=%q make crash SEED=%d", only, tr.point, tr.seed), Dir: c.run.Dir,
		Rack: env.Rack, Plugins: env.Plugins, History: env.Rack.History})
}

func TestATrialThatLeavesAFileFailsAndIsDrawn(t *testing.T) {
	run := harness.RunFor(t)
	putGates(t, run)
	c := newCampaign(t, run, driverProof, nil, 0)
	defer c.close()
	c.Fatal(c.openEnvironment(t.Context(), 0))
	env := c.envs[0]
	points, err := countPoints(t.Context(), env, driverLifecycles[:1])
	c.Fatal(err)
	points = matching(points, "NodeStage")
	tr := trial{point: points[len(points)/2], then: again, seed: c.Seed}
	left := filepath.Join(env.plugins[driverA].Dir, "volumes", "nobody-needs-this")
	c.Fatal(os.WriteFile(left, nil, 0o600))
	broken := env.runTrial(t.Context(), tr)
	if broken == nil {
		t.Fatal("the trial does not notice the file")
	}
	c.Fatal(c.CheckPage(c.draw(t.Context(), env, tr, broken), "nobody-needs-this",
		"killed at the point", "NodeStageVolume", "Formatted", "disk_create", tr.String()))
}

// note counts a trial.
func (c *campaign) note(tr trial, converged bool, kills, overlaps int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kills += kills
	c.overlaps += overlaps
	c.trials++
	c.tried[tr.point.String()], c.rpcs[tr.rpc] = true, true
	if converged {
		c.converged++
	}
	c.SayOften("%d trials, %d converged, %d kills; last %s", c.trials, c.converged, c.kills, tr.rpc)
}
