//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// point is a place in a lifecycle.
type point struct {
	lifecycle string
	// process is whose point it is.
	process string
	// step is the number of the step in the lifecycle, rpc its name.
	step int
	rpc  string
	// kind is what the effect has in common with others.
	kind  string
	trace trace.Point
}

// What the orchestrator does after the process was killed and started again.
const (
	again     = "the orchestrator repeats the call"
	giveUp    = "the orchestrator gives up and takes everything back"
	elsewhere = "the orchestrator moves the volume to the other node"
	// This one kills nobody.
	overlap = "the orchestrator asks a second process while the first one stands still"
)

// trial is a run: a point, whom to kill there, and what the orchestrator does then.
type trial struct {
	point
	then string
	// second is where the process is killed again when the call is repeated for the first time.
	second *trace.Point
	// starting is where it is killed again before that, while it starts.
	starting *trace.Point
}

func (p point) String() string {
	return fmt.Sprintf("%s: %s (step %d): %s", p.lifecycle, p.rpc, p.step, p.trace)
}

// Between a trial's name and its second kill.
const (
	andAgain    = ", and it is killed again "
	andStarting = ", and it is killed while it starts, "
)

func (t trial) String() string {
	name := t.point.String() + ": " + t.then
	if t.second != nil {
		name += andAgain + t.second.String()
	}
	if t.starting != nil {
		name += andStarting + fmt.Sprintf("%s effect %d", t.starting.Phase, t.starting.N)
	}
	return name
}

// countPoints runs every kind of lifecycle once, watched, and numbers its points.
func countPoints(ctx context.Context, env *environment, kinds []string, seed uint64) ([]point,
	error) {
	var points []point
	for _, kind := range kinds {
		l, err := env.begin(kind, seed)
		if err != nil {
			return nil, err
		}
		for i, st := range l.steps {
			more, err := l.countStepPoints(ctx, i, st)
			if err != nil {
				return nil, fmt.Errorf("the dry run of %s: %w", kind, err)
			}
			points = append(points, more...)
		}
		if err := l.finish(ctx); err != nil {
			return nil, fmt.Errorf("the dry run of %s: %w", kind, err)
		}
	}
	return points, nil
}

func (l *lifecycle) countStepPoints(ctx context.Context, i int, st step) ([]point, error) {
	if st.watched == "" {
		replies, err := st.callUntilOK(ctx)
		if err != nil {
			err = fmt.Errorf("%w\n    %s", err, formatErrors(replies))
		}
		return nil, err
	}
	report, failed, err := l.watched(st.watched, nil, func() error { return st.callOnce(ctx) })
	if err == nil {
		err = failed
	}
	if err == nil && st.then != nil {
		err = st.then()
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", st, err)
	}
	var points []point
	for _, e := range report.Effects {
		if e.Failed { // nothing happened, so there is nothing to be before or after
			continue
		}
		for _, phase := range e.Phases() {
			points = append(points, point{lifecycle: l.kind, process: st.watched, step: i, rpc: st.rpc,
				kind: e.Kind(), trace: trace.Point{Name: e.Name(), N: e.N, Phase: phase}})
		}
	}
	return points, nil
}

// trials are all that can be tried at a point.
func trials(p point) []trial {
	then := []string{again}
	if p.goingUp() {
		then = append(then, giveUp)
	}
	if strings.HasPrefix(p.lifecycle, "plain") && p.rpc == "NodeStageVolume" {
		then = append(then, elsewhere)
	}
	var all []trial
	for _, next := range then {
		for _, group := range []bool{false, true} {
			t := trial{point: p, then: next}
			t.trace.Group = group
			all = append(all, t)
		}
	}
	if p.overlaps() {
		t := trial{point: p, then: overlap}
		t.trace.Pause = true
		all = append(all, t)
	}
	return all
}

// overlaps reports whether a second node driver can be asked for the same.
func (p point) overlaps() bool {
	switch p.rpc {
	case "NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume":
		return p.process == driverA
	}
	return false
}

// goingUp reports whether the orchestrator has something to give up. On the way down it can only go
// on.
func (p point) goingUp() bool {
	switch p.rpc {
	case "CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
		"NodeGetVolumeStats", "CreateSnapshot", "InstanceStop":
		return true
	}
	return false
}

// choose decides by chance what is left open at a point; starts is how many effects the start of
// its process has.
func choose(p point, points []point, starts int, rng *rand.Rand) trial {
	all := trials(p)
	t := all[rng.IntN(len(all))]
	if t.then == overlap {
		return t
	}
	switch rng.IntN(4) {
	case 0:
		more := inStepOf(p, points)
		t.second = &more[rng.IntN(len(more))]
	case 1:
		// There is more to do after a kill than at an ordinary start.
		const most = 12
		phase := []trace.Phase{trace.Before, trace.After}[rng.IntN(2)]
		t.starting = &trace.Point{N: 1 + rng.IntN(starts+most), Phase: phase}
	}
	return t
}

// inStepOf lists the places in the step that a point belongs to.
func inStepOf(p point, points []point) []trace.Point {
	var more []trace.Point
	for _, other := range points {
		if other.lifecycle == p.lifecycle && other.step == p.step {
			more = append(more, other.trace)
		}
	}
	return more
}

// sample takes points by chance until there are n, or more if it takes more to have every RPC and
// every kind of effect among them. Points that add both come first, so that few are enough.
func sample(points []point, n int, rng *rand.Rand) []point {
	rest := slices.Clone(points)
	rng.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	var first []point
	have := map[string]bool{}
	for _, adds := range []int{2, 1} {
		rest = slices.DeleteFunc(rest, func(p point) bool {
			rpc, kind, added := "rpc "+p.rpc, "kind "+p.kind, 0
			for _, name := range []string{rpc, kind} {
				if !have[name] {
					added++
				}
			}
			if added < adds {
				return false
			}
			have[rpc], have[kind] = true, true
			first = append(first, p)
			return true
		})
	}
	return append(first, rest[:min(len(rest), max(0, n-len(first)))]...)
}

// rpcsOf counts the RPCs that points belong to.
func rpcsOf(points []point) int {
	rpcs := map[string]bool{}
	for _, p := range points {
		rpcs[p.rpc] = true
	}
	return len(rpcs)
}

// census is a table of how many points there are of which kind in which RPC.
func census(points []point) string {
	counts := map[string]int{}
	for _, p := range points {
		counts[fmt.Sprintf("%-16s %-26s %s", p.lifecycle, p.rpc, p.kind)]++
	}
	var table strings.Builder
	table.WriteString("points by lifecycle, RPC and kind of effect:\n")
	for _, line := range sorted(counts) {
		fmt.Fprintf(&table, "%5d %s\n", counts[line], line)
	}
	return table.String()
}
