//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
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
	// seed is the seed of the random parts.
	seed uint64
	// starting, if it is set, is the point at which the process is killed again while it starts.
	starting *trace.Point
	// second, if it is set, is the point at which the process is killed again when the call is
	// repeated for the first time.
	second *trace.Point
}

func (p point) String() string {
	return fmt.Sprintf("%s: %s (step %d): %s", p.lifecycle, p.rpc, p.step, p.trace)
}

func (t trial) String() string {
	name := t.point.String() + ": " + t.then
	if t.second != nil {
		name += ", and it is killed again " + t.second.String()
	}
	if t.starting != nil {
		name += fmt.Sprintf(", and it is killed while it starts, %s effect %d", t.starting.Phase,
			t.starting.N)
	}
	return name
}

// countPoints runs every kind of lifecycle once, watches it, and numbers its points.
func countPoints(ctx context.Context, env *environment, kinds []string) ([]point, error) {
	var points []point
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

// choose makes the choices of a seed for a trial at a point. starts is the number of effects in the
// start of the point's process.
func choose(p point, points []point, starts int, seed uint64) trial {
	name := fnv.New64a()
	fmt.Fprint(name, p)
	rng := rand.New(rand.NewPCG(seed, name.Sum64()))
	all := trials(p)
	t := all[rng.IntN(len(all))]
	t.seed = seed
	if t.then == overlap {
		return t
	}
	switch rng.IntN(4) {
	case 0:
		more := slices.DeleteFunc(slices.Clone(points), func(other point) bool {
			return other.lifecycle != p.lifecycle || other.step != p.step
		})
		t.second = &more[rng.IntN(len(more))].trace
	case 1:
		// A start after a kill has more effects than an ordinary start.
		const most = 12
		phase := []trace.Phase{trace.Before, trace.After}[rng.IntN(2)]
		t.starting = &trace.Point{N: 1 + rng.IntN(starts+most), Phase: phase}
	}
	return t
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

// deviceless is the name of a lifecycle on a rack that records an attach before the instance has
// the device, and then gives it none (docs/hot-plug.md). leastDeviceless is the minimum number of
// its points that are tried.
const (
	deviceless      = "deviceless ext4"
	leastDeviceless = 3
)

// The kinds of lifecycles. A plain one moves a volume from one node to another. A restored one has
// a second, larger volume, which is made from a snapshot. In a shared one the volume is also
// published read-only on node b.
var driverLifecycles = []string{
	"plain ext4", "plain xfs", "plain btrfs", "plain block",
	"restored ext4", "restored xfs", "restored btrfs", "shared block", "shared ext4", deviceless,
}

// rackLifecycles are the lifecycles in which the rack is killed. Snapshots are taken of the volume
// in use and detached, and its instance is stopped and started.
var rackLifecycles = []string{"rack ext4", "rack block"}

// shapes contains the steps of lifecycles. VOL is a volume, SNAP its snapshot, and COPY a volume
// that is made from the snapshot. The steps with a star have points.
var shapes = map[string]string{
	"plain": `
		* controller 1: CreateVolume VOL
		* controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 0
		* node a: NodeGetVolumeStats VOL of pod 1
		* controller 1: take VOL from pod 1 on a
		* controller 1: bring VOL to pod 1 on b
		pod 1 on b: write and fsync VOL block 1
		* controller 1: take VOL from pod 1 on b
		* controller 1: DeleteVolume VOL`,
	// To publish a device read-only, the driver makes the device itself read-only. After the volume
	// is unpublished, its device must be writable again.
	"shared": `
		controller 1: CreateVolume VOL
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 0
		controller 1: take VOL from pod 1 on a
		controller 1: ControllerPublish VOL → node b
		node b: NodeStage VOL
		* node b: NodePublish VOL to pod 1
		pod 1 on b: write and fsync VOL block 1
		* node b: NodeUnpublish VOL from pod 1
		* node b: NodeUnstage VOL
		controller 1: ControllerUnpublish VOL → node b
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 2
		controller 1: take VOL from pod 1 on a
		controller 1: DeleteVolume VOL`,
	"restored": `
		controller 1: CreateVolume VOL
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 0
		* controller 1: CreateSnapshot SNAP
		controller 1: take VOL from pod 1 on a
		* controller 1: CreateVolume COPY
		controller 1: ControllerPublish COPY → node a
		* node a: NodeStage COPY
		* node a: NodePublish COPY to pod 1
		pod 1 on a: write and fsync COPY block 1
		controller 1: take COPY from pod 1 on a
		controller 1: DeleteVolume COPY
		controller 1: DeleteVolume VOL
		* controller 1: DeleteSnapshot SNAP`,
	"deviceless": `
		controller 1: CreateVolume VOL
		controller 1: bring VOL to pod 1 on b
		pod 1 on b: write and fsync VOL block 0
		controller 1: take VOL from pod 1 on b
		rack: no device
		* controller 1: ControllerPublish VOL → node a
		* controller 1: ControllerUnpublish VOL → node a
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 1
		controller 1: take VOL from pod 1 on a
		controller 1: DeleteVolume VOL`,
	"rack": `
		* controller 1: CreateVolume VOL
		* controller 1: ControllerPublish VOL → node a
		node a: NodeStage VOL
		node a: NodePublish VOL to pod 1
		pod 1 on a: write and fsync VOL block 0
		* controller 1: CreateSnapshot SNAP
		node a: NodeUnpublish VOL from pod 1
		node a: NodeUnstage VOL
		* controller 1: DeleteSnapshot SNAP
		* stop instance a
		* start instance a
		node a: NodeStage VOL
		node a: NodePublish VOL to pod 1
		pod 1 on a: write and fsync VOL block 1
		node a: NodeUnpublish VOL from pod 1
		node a: NodeUnstage VOL
		* controller 1: ControllerUnpublish VOL → node a
		* controller 1: CreateSnapshot SNAP
		* controller 1: CreateVolume COPY
		controller 1: bring COPY to pod 1 on b
		pod 1 on b: write and fsync COPY block 2
		controller 1: take COPY from pod 1 on b
		* controller 1: DeleteVolume COPY
		* controller 1: DeleteVolume VOL
		* controller 1: DeleteSnapshot SNAP`,
	// The volume is removed from its nodes before this.
	elsewhere: `
		controller 1: bring VOL to pod 1 on b
		pod 1 on b: write and fsync VOL block 1
		controller 1: take VOL from pod 1 on b
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 2
		controller 1: take VOL from pod 1 on a`,
}

// objects contains the volume, the snapshot and the copy of each access type, as the model names
// them.
var objects = map[string]*strings.Replacer{
	"ext4":  strings.NewReplacer("VOL", "v1", "SNAP", "s1", "COPY", "v5"),
	"xfs":   strings.NewReplacer("VOL", "v2", "SNAP", "s3", "COPY", "v7"),
	"btrfs": strings.NewReplacer("VOL", "v3", "SNAP", "s4", "COPY", "v8"),
	"block": strings.NewReplacer("VOL", "v4", "SNAP", "s2", "COPY", "v6"),
}

// step is a step of a lifecycle. rpc is its call, and on the driver that gets it, or "".
type step struct {
	model.Step
	rpc, on string
	// watched is the process to which the step's points belong, or "" for a step without points.
	watched string
}

// stepsOf returns the steps of a shape for the volume of a kind of lifecycle.
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
