//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/model"
)

// point is a place in a lifecycle.
type point struct {
	lifecycle string
	// process is the process to which the point belongs.
	process string
	// step is the number of the step in the lifecycle. rpc is its name.
	step int
	rpc  string
	// kind is a name that similar effects have in common.
	kind  string
	trace trace.Point
}

// The actions of the orchestrator after the process was killed and started again.
const (
	again     = "the orchestrator repeats the call"
	giveUp    = "the orchestrator gives up and undoes everything"
	elsewhere = "the orchestrator moves the volume to the other node"
	// This action kills no process.
	overlap = "the orchestrator calls a second process while the first one is paused"
)

// trial is a point, at which a process is killed or paused, and the orchestrator's action after
// that.
type trial struct {
	point
	then string
	// starting, if it is set, is the point at which the process is killed again while it starts.
	starting *trace.Point
	// second, if it is set, is the point at which the process is killed again when the call is
	// repeated for the first time.
	second *trace.Point
}

func (p point) String() string {
	return fmt.Sprintf("%s: %s (step %d): %s", p.lifecycle, p.rpc, p.step, p.trace)
}

// These words separate a trial's name from its second kill.
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

// countPoints runs every kind of lifecycle once, watches it, and numbers its points.
func countPoints(ctx context.Context, env *environment, kinds []string) ([]point, error) {
	var points []point
	for _, kind := range kinds {
		l, err := env.begin(kind)
		if err != nil {
			return nil, err
		}
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
		if err := l.finish(ctx); err != nil {
			return nil, fmt.Errorf("the dry run of %s: %w", kind, err)
		}
		if kind == deviceless && l.Deviceless() == 0 {
			return nil, errors.New("in the dry run every attach gave a device")
		}
	}
	return points, nil
}

// pointsOf returns the points of the effects of a step.
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

// trials returns all trials that are possible at a point.
func trials(p point) []trial {
	then := []string{again}
	if p.goingUp() {
		then = append(then, giveUp)
	}
	if strings.HasPrefix(p.lifecycle, "plain") && p.rpc == "NodeStage" {
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

// overlaps reports whether the same call can be made to a second node driver.
func (p point) overlaps() bool {
	return p.process == driverA && p.rpc != "NodeGetVolumeStats"
}

// goingUp reports whether the orchestrator can give up at the point. While it removes the volume,
// it can only continue.
func (p point) goingUp() bool {
	switch p.rpc {
	case "CreateVolume", "ControllerPublish", "NodeStage", "NodePublish", "NodeGetVolumeStats",
		"CreateSnapshot", "stop instance a":
		return true
	}
	return false
}

// choose makes the random choices for a trial at a point. starts is the number of effects in
// the start of the point's process.
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
		// A start after a kill has more effects than an ordinary start.
		const most = 12
		phase := []trace.Phase{trace.Before, trace.After}[rng.IntN(2)]
		t.starting = &trace.Point{N: 1 + rng.IntN(starts+most), Phase: phase}
	}
	return t
}

// inStepOf lists the points in the step of a point.
func inStepOf(p point, points []point) []trace.Point {
	var more []trace.Point
	for _, other := range points {
		if other.lifecycle == p.lifecycle && other.step == p.step {
			more = append(more, other.trace)
		}
	}
	return more
}

// sample chooses n random points, or more if that is necessary to have every RPC and every kind of
// effect among them. Points that add both come first, so that few more are necessary.
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

// few chooses random points with different RPCs for the short form.
func few(points []point, rng *rand.Rand) (chosen []point) {
	have, count := map[string]bool{}, map[bool]int{}
	for _, i := range rng.Perm(len(points)) {
		p := points[i]
		node := strings.HasPrefix(p.rpc, "Node")
		if !have[p.rpc] && count[node] < shortTrials {
			have[p.rpc] = true
			count[node]++
			chosen = append(chosen, p)
		}
	}
	return chosen
}
