//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/model"
)

const (
	leastTrials     = 20
	leastRackTrials = 15
	shortTrials     = 4
)

const only = "CRASH_ONLY"

func TestEveryCallConvergesAfterTheDriverOrRackIsKilledAtAnyPoint(t *testing.T) { // B-10
	run := harness.RunFor(t)
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

const driverProof = "crash-points"

// campaign runs the trials of a proof, which kills either the driver or the rack.
type campaign struct {
	*proof.Proof
	t   *testing.T
	run *harness.Run
	// The environments run trials at the same time, because a trial mostly waits.
	envs  []*environment
	kinds []string
	least int

	points []point

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
		kinds: kinds, least: least, tried: map[string]bool{}, rpcs: map[string]bool{}}
	if c.Short() {
		c.envs, c.kinds = c.envs[:1], kinds[:min(1, len(kinds))]
	}
	t.Cleanup(func() {
		for _, env := range c.envs {
			if env != nil {
				c.Error(env.close())
			}
		}
	})
	return c
}

// runProof runs the trials and returns their number.
func (c *campaign) runProof() int64 {
	ctx := c.t.Context()
	c.Fatal(c.each(func(i int) error { return c.openEnvironment(ctx, i) }))
	c.count(ctx)
	c.Say("%d points", len(c.points))
	named := os.Getenv(only)
	some, want := matching(c.points, named), c.least
	switch {
	case named != "" && len(some) == 0:
		return 0 // CRASH_ONLY may name points of the other campaign
	case named != "":
		some, want = sample(some, len(some), c.Rand()), 1
	case c.Long():
		some = sample(some, len(some), c.Rand())
	case c.Short():
		want = shortTrials
		ofNode := matching(some, ": Node")
		others := without(some, ofNode)
		ofNode = sample(ofNode, want/2, c.Rand())[:min(want/2, len(ofNode))]
		some = slices.Concat(ofNode, sample(others, want, c.Rand())[:want-len(ofNode)])
	default:
		first := sample(some, c.least, c.Rand())
		some = slices.Concat(first, sample(matching(without(some, first), deviceless),
			leastDeviceless, c.Rand()))
	}
	for seed := range c.Rounds() {
		c.attempts(ctx, some, seed)
	}
	short.Left(c.t, c.least-c.trials)
	c.Figure("points", len(c.points), "tried", len(c.tried), "trials", c.trials,
		"converged", c.converged, "kills", c.kills, "overlaps", c.overlaps,
		"rpcs", len(c.rpcs))
	if c.trials < want {
		c.t.Errorf("%d trials were made, want at least %d", c.trials, want)
	}
	c.Bystanders.Report()
	c.Forged.Report()
	return int64(c.trials)
}

// count makes two dry runs, and keeps the points that occur in both. Some points do not occur in
// every run, such as those that depend on a file's extents or on the size of the rack's records.
func (c *campaign) count(ctx context.Context) {
	var runs [2][]point
	c.Fatal(c.each(func(i int) (err error) {
		for n := i; n < len(runs) && err == nil; n += len(c.envs) {
			runs[n], err = countPoints(ctx, c.envs[i], c.kinds)
		}
		return err
	}))
	c.points = slices.DeleteFunc(runs[1], func(p point) bool { return !slices.Contains(runs[0], p) })
}

func (c *campaign) each(do func(i int) error) error {
	errs := make([]error, len(c.envs))
	harness.AtOnce(len(c.envs), func(i int) { errs[i] = do(i) })
	return errors.Join(errs...)
}

func (c *campaign) openEnvironment(ctx context.Context, i int) (err error) {
	c.envs[i], err = newEnvironment(ctx, c.run, c.Proof)
	return err
}

func (c *campaign) attempts(ctx context.Context, points []point, seed uint64) {
	c.Error(harness.Share(len(c.envs), points, func(i int, jobs <-chan point) error {
		for p := range jobs {
			if c.Over() {
				break
			}
			if err := c.attempt(ctx, i, choose(p, c.points, seed)); err != nil {
				return err
			}
		}
		return nil
	}))
}

func matching(points []point, text string) []point {
	return slices.DeleteFunc(slices.Clone(points), func(p point) bool {
		return !strings.Contains(p.String(), text)
	})
}

func without(points, others []point) []point {
	return slices.DeleteFunc(slices.Clone(points), func(p point) bool {
		return slices.Contains(others, p)
	})
}

// attempt runs a trial. After a failure it keeps the files and opens a new environment.
func (c *campaign) attempt(ctx context.Context, i int, tr trial) error {
	env := c.envs[i]
	env.kills, env.overlaps = 0, 0
	err := env.runTrial(ctx, tr)
	c.note(env, tr, err == nil)
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

// draw writes a page about the failed trial and returns its path.
func (c *campaign) draw(ctx context.Context, env *environment, tr trial, broken error) string {
	return c.Draw(ctx, proof.Failure{Name: tr.String(), Seed: tr.seed, Broken: broken,
		Repeat: fmt.Sprintf("%s=%q make crash SEED=%d", only, tr.point, tr.seed), Dir: c.run.Dir,
		Rack: env.Rack, Plugins: env.Plugins, History: env.Rack.History})
}

func TestATrialWithALeftoverFileFailsAndGetsAFailurePage(t *testing.T) {
	run := harness.RunFor(t)
	c := newCampaign(t, run, driverProof, nil, 0)
	c.Fatal(c.openEnvironment(t.Context(), 0))
	env := c.envs[0]
	points, err := countPoints(t.Context(), env, driverLifecycles[:1])
	c.Fatal(err)
	points = matching(points, "NodeStage")
	tr := trial{point: points[len(points)/2], action: again, seed: c.Seed}
	left := filepath.Join(env.Nodes[driverA].Dir, "volumes", "nobody-needs-this")
	c.Fatal(os.WriteFile(left, nil, 0o600))
	broken := env.runTrial(t.Context(), tr)
	if broken == nil {
		t.Fatal("the trial does not notice the file")
	}
	c.Fatal(c.CheckPage(c.draw(t.Context(), env, tr, broken), "nobody-needs-this",
		"killed at the point", "NodeStageVolume", "Formatted", "disk_create", tr.String()))
}

func (c *campaign) note(env *environment, tr trial, converged bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kills += env.kills
	c.overlaps += env.overlaps
	c.trials++
	c.tried[tr.point.String()], c.rpcs[tr.rpc] = true, true
	if converged {
		c.converged++
	}
	c.SayOften("%d trials, %d converged, %d kills; last %s", c.trials, c.converged, c.kills, tr.rpc)
}

// point is a time in a lifecycle: right before, during or after an effect of a process.
type point struct {
	lifecycle string
	process   string
	step      int
	rpc       string
	// kind is the name of the effect without its target.
	kind  string
	trace trace.Point
}

// After the killed process has started again, the orchestrator takes one of these actions.
const (
	again     = "the orchestrator repeats the call"
	giveUp    = "the orchestrator gives up and undoes everything"
	elsewhere = "the orchestrator moves the volume to the other node"
	// overlap is for a trial that pauses the process instead of killing it.
	overlap = "the orchestrator calls a second process while the first one is paused"
)

// trial kills or pauses a process at a point. The orchestrator then takes the action.
type trial struct {
	point
	action string
	seed   uint64
	// second, if not nil, is a point in the first repetition of the call, at which the process is
	// killed again.
	second *trace.Point
	// soon, if not 0, limits the restart: if the process does not serve in time, it is killed again.
	soon time.Duration
}

func (p point) String() string {
	return fmt.Sprintf("%s: %s (step %d): %s", p.lifecycle, p.rpc, p.step, p.trace)
}

func (t trial) String() string {
	name := t.point.String() + ": " + t.action
	if t.second != nil {
		name += ", and it is killed again " + t.second.String()
	}
	if t.soon > 0 {
		name += fmt.Sprintf(", and it is killed %s after its start", t.soon)
	}
	return name
}

// countPoints makes a dry run of each kind of lifecycle, and returns the points for its trials.
func countPoints(ctx context.Context, env *environment, kinds []string) (points []point,
	err error) {
	defer harness.Catch(&err)
	for _, kind := range kinds {
		l := env.begin(kind)
		for i, st := range l.steps {
			if st.watched != "" {
				st.Around = func(ctx context.Context, do func(context.Context)) (model.Mishap, error) {
					report, err := env.watched(st.watched, nil, func() { do(ctx) })
					points = append(points, pointsOf(report.Effects, kind, i, st)...)
					return model.None, err
				}
			}
			if err := l.Do(ctx, st.Step); err != nil {
				return nil, fmt.Errorf("the dry run of %s: %w\n%s", kind, err, l.Transcript())
			}
		}
		l.finish(ctx)
		if kind == deviceless && l.Deviceless() == 0 {
			return nil, errors.New("in the dry run every attach gave a device")
		}
	}
	return points, nil
}

func pointsOf(effects []trace.Effect, kind string, i int, st step) (points []point) {
	for _, e := range effects {
		if e.Failed { // a failed call has no effect, so there is no time before or after it
			continue
		}
		for _, phase := range e.Phases() {
			points = append(points, point{lifecycle: kind, process: st.watched, step: i, rpc: st.rpc,
				kind: e.Kind(), trace: trace.Point{Name: e.Name(), N: e.N, Phase: phase}})
		}
	}
	return points
}

func trials(p point) []trial {
	actions := []string{again}
	if p.goingUp() {
		actions = append(actions, giveUp)
	}
	if strings.HasPrefix(p.lifecycle, "plain") && p.rpc == "NodeStage" {
		actions = append(actions, elsewhere)
	}
	var all []trial
	for _, next := range actions {
		for _, group := range []bool{false, true} {
			t := trial{point: p, action: next}
			t.trace.Group = group
			all = append(all, t)
		}
	}
	// While the process is paused, the orchestrator can call the instance's second node driver.
	if p.process == driverA && p.rpc != "NodeGetVolumeStats" {
		t := trial{point: p, action: overlap}
		t.trace.Pause = true
		all = append(all, t)
	}
	return all
}

// goingUp reports whether the orchestrator is not yet removing the volume, so that it can give up.
func (p point) goingUp() bool {
	return slices.Contains([]string{"CreateVolume", "ControllerPublish", "NodeStage", "NodePublish",
		"NodeGetVolumeStats", "CreateSnapshot", "stop instance a"}, p.rpc)
}

func choose(p point, points []point, seed uint64) trial {
	name := fnv.New64a()
	fmt.Fprint(name, p)
	rng := rand.New(rand.NewPCG(seed, name.Sum64()))
	all := trials(p)
	t := all[rng.IntN(len(all))]
	t.seed = seed
	if t.action == overlap {
		return t
	}
	switch rng.IntN(4) {
	case 0:
		more := slices.DeleteFunc(slices.Clone(points), func(other point) bool {
			return other.lifecycle != p.lifecycle || other.step != p.step
		})
		t.second = &more[rng.IntN(len(more))].trace
	case 1: // on an idle machine a start takes a tenth of a second
		t.soon = time.Duration(1+rng.IntN(100)) * time.Millisecond
	}
	return t
}

// sample chooses n random points, or more if n points do not contain every RPC and every kind of
// effect. It prefers points that add both an RPC and a kind, so that few points are necessary.
func sample(points []point, n int, rng *rand.Rand) []point {
	rest := slices.Clone(points)
	rng.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	var first []point
	have := map[string]bool{}
	for _, adds := range []int{2, 1} {
		rest = slices.DeleteFunc(rest, func(p point) bool {
			added := slices.DeleteFunc([]string{"rpc " + p.rpc, "kind " + p.kind},
				func(name string) bool { return have[name] })
			if len(added) < adds {
				return false
			}
			for _, name := range added {
				have[name] = true
			}
			first = append(first, p)
			return true
		})
	}
	return append(first, rest[:min(len(rest), max(0, n-len(first)))]...)
}

// deviceless is a lifecycle on a rack that records an attach but gives the instance no device (see
// docs/hot-plug.md). By default, the proof tries leastDeviceless of its points in addition.
const (
	deviceless      = "deviceless ext4"
	leastDeviceless = 3
)

// The driver is killed in driverLifecycles, and the rack in rackLifecycles.
var driverLifecycles = []string{
	"plain ext4", "plain xfs", "plain btrfs", "plain block",
	"restored ext4", "restored xfs", "restored btrfs", "shared block", "shared ext4", deviceless,
}

var rackLifecycles = []string{"rack ext4", "rack block"}

// shapes contains the steps of each kind of lifecycle. VOL is a volume, SNAP a snapshot of it, and
// COPY a volume that is made from SNAP. Only steps with a star have points.
var shapes = map[string]string{
	"plain": `
		* controller 1: create VOL, and bring it to pod 1 on a, which writes block 0
		* node a: NodeGetVolumeStats VOL of pod 1
		* controller 1: take VOL from pod 1 on a
		* controller 1: bring VOL to pod 1 on b, which writes block 1
		* controller 1: take VOL from pod 1 on b
		* controller 1: DeleteVolume VOL`,
	// To publish a device read-only, the driver makes the device itself read-only. After it has
	// unpublished the volume, the device must be writable again.
	"shared": `
		controller 1: create VOL, and bring it to pod 1 on a, which writes block 0
		controller 1: take VOL from pod 1 on a
		controller 1: ControllerPublish VOL → node b
		node b: NodeStage VOL
		* node b: NodePublish VOL to pod 1
		pod 1 on b: write and fsync VOL block 1
		* node b: withdraw VOL from pod 1
		controller 1: ControllerUnpublish VOL → node b
		controller 1: bring VOL to pod 1 on a, which writes block 2
		controller 1: take VOL from pod 1 on a
		controller 1: DeleteVolume VOL`,
	"restored": `
		controller 1: create VOL, and bring it to pod 1 on a, which writes block 0
		* controller 1: CreateSnapshot SNAP
		controller 1: take VOL from pod 1 on a
		* controller 1: CreateVolume COPY
		controller 1: ControllerPublish COPY → node a
		* node a: give COPY to pod 1
		pod 1 on a: write and fsync COPY block 1
		controller 1: take COPY from pod 1 on a
		controller 1: DeleteVolume COPY
		controller 1: DeleteVolume VOL
		* controller 1: DeleteSnapshot SNAP`,
	"deviceless": `
		controller 1: create VOL, and bring it to pod 1 on b, which writes block 0
		controller 1: take VOL from pod 1 on b
		rack: no device
		* controller 1: ControllerPublish VOL → node a
		* controller 1: ControllerUnpublish VOL → node a
		controller 1: bring VOL to pod 1 on a, which writes block 1
		controller 1: take VOL from pod 1 on a
		controller 1: DeleteVolume VOL`,
	"rack": `
		* controller 1: CreateVolume VOL
		* controller 1: ControllerPublish VOL → node a
		node a: give VOL to pod 1
		pod 1 on a: write and fsync VOL block 0
		* controller 1: CreateSnapshot SNAP
		node a: withdraw VOL from pod 1
		* controller 1: DeleteSnapshot SNAP
		* stop instance a
		* start instance a
		node a: give VOL to pod 1
		pod 1 on a: write and fsync VOL block 1
		node a: withdraw VOL from pod 1
		* controller 1: ControllerUnpublish VOL → node a
		* controller 1: CreateSnapshot SNAP
		* controller 1: CreateVolume COPY
		controller 1: bring COPY to pod 1 on b, which writes block 2
		controller 1: take COPY from pod 1 on b
		* controller 1: DeleteVolume COPY
		* controller 1: DeleteVolume VOL
		* controller 1: DeleteSnapshot SNAP`,
	// To move a volume, the orchestrator detaches it and takes these steps.
	elsewhere: `
		controller 1: bring VOL to pod 1 on b, which writes block 1
		controller 1: take VOL from pod 1 on b
		controller 1: bring VOL to pod 1 on a, which writes block 2
		controller 1: take VOL from pod 1 on a`,
}

// objects replaces VOL, SNAP and COPY with names in package model, which depend on the access type.
var objects = map[string]*strings.Replacer{
	"ext4":  strings.NewReplacer("VOL", "v1", "SNAP", "s1", "COPY", "v5"),
	"xfs":   strings.NewReplacer("VOL", "v2", "SNAP", "s3", "COPY", "v7"),
	"btrfs": strings.NewReplacer("VOL", "v3", "SNAP", "s4", "COPY", "v8"),
	"block": strings.NewReplacer("VOL", "v4", "SNAP", "s2", "COPY", "v6"),
}

// step is a step of a lifecycle. For a call, it contains the name of the RPC and the called driver.
type step struct {
	model.Step
	rpc, on string
	// watched is the process that trials kill or pause at this step, or "" if no trial does so.
	watched string
}

func stepsOf(shape, kind string) (steps []step) {
	killed, access, _ := strings.Cut(kind, " ")
	for _, s := range harness.Got(model.ParseHistory(objects[access].Replace(shapes[shape]))) {
		on, rpc, isCall := strings.Cut(s.String(), ": ")
		st := step{Step: s, rpc: on}
		if isCall {
			st.rpc, _, _ = strings.Cut(rpc, " ")
			st.on = strings.TrimPrefix(on, "node ")
		}
		switch {
		case !s.Starred:
		case killed == "rack":
			st.watched = rackProcess
		default:
			st.watched = st.on
		}
		steps = append(steps, st)
	}
	return steps
}
