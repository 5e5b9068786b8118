//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// step is one call of a lifecycle. The orchestrator repeats it until it succeeds.
type step struct {
	// rpc is the call, and on is the node on which it is made.
	rpc, on string
	// watched is the process to which the step's points belong, or "" for a step without points.
	watched string
	call    func(context.Context) error
	// then does the work of a workload after the call has succeeded.
	then func() error
}

func (st step) String() string { return strings.TrimSpace(st.rpc + " " + st.on) }

// lifecycle is the life of a volume, and of the volumes that are made from it.
type lifecycle struct {
	*environment
	kind      string
	volumes   []*volume
	snapshots []*snapshot
	steps     []step
	// effects are the effects of a call in which the point was not reached.
	effects []trace.Effect
	// stopped reports whether instance a may be stopped.
	stopped bool
}

// The kinds of lifecycles. A plain lifecycle moves a volume from one node to another. A
// restored lifecycle has a second volume, which is made from a snapshot and is larger than it.
// A shared lifecycle ends with a reader. In a deviceless one an
// attach leaves no device.
var driverLifecycles = []string{
	"plain ext4", "plain xfs", "plain btrfs", "plain block",
	"restored ext4", "restored xfs", "restored btrfs", "shared block", "shared ext4",
	deviceless + " ext4",
}

// begin prepares a lifecycle. The seed determines its data.
func (env *environment) begin(kind string, seed uint64) (*lifecycle, error) {
	env.lifecycles++
	env.Rack.History.Begin()
	l := &lifecycle{environment: env, kind: kind}
	shape, access, _ := strings.Cut(kind, " ")
	v, err := l.volume(access, gib, seed)
	if err != nil {
		return nil, err
	}
	switch shape {
	case "plain":
		l.plain(v)
	case "restored":
		err = l.restored(v)
	case "shared":
		l.shared(v)
	case deviceless:
		l.withoutDevice(v)
	case "rack":
		err = l.onRack(v)
	}
	return l, err
}

func (l *lifecycle) volume(access string, size int64, seed uint64) (*volume, error) {
	name := fmt.Sprintf("%s-%d-%d", l.Proof.Name, l.lifecycles, len(l.volumes))
	v, err := l.newVolume(name, access, size, seed)
	l.volumes = append(l.volumes, v)
	return v, err
}

// snapshot prepares a snapshot for the orchestrator. The driver is not called.
func (l *lifecycle) snapshot(of *volume, suffix string) *snapshot {
	sn := &snapshot{of: of, name: fmt.Sprintf("snapshot-%d%s", l.lifecycles, suffix)}
	l.snapshots = append(l.snapshots, sn)
	return sn
}

func (l *lifecycle) add(steps ...step) { l.steps = append(l.steps, l.watching(steps)...) }

// watching returns the same steps with a check of the bystanders after each call.
func (l *lifecycle) watching(steps []step) []step {
	for i, st := range steps {
		steps[i].call = func(ctx context.Context) error {
			done := l.Rack.History.Step(st.String())
			err := st.call(ctx)
			done(err)
			return l.Bystanders.Called(err)
		}
	}
	return steps
}

// plain adds the steps of a volume on one node, and then on the other.
func (l *lifecycle) plain(v *volume) {
	l.add(step{rpc: "CreateVolume", watched: driverA, call: v.create})
	for _, node := range []string{driverA, driverB} {
		l.add(v.up(node)...)
		if node == driverA {
			l.add(step{rpc: "NodeGetVolumeStats", on: node, watched: node, call: v.at[node].stats})
		}
		l.add(v.down(node)...)
	}
	l.add(step{rpc: "DeleteVolume", watched: driverA, call: v.delete})
}

// up returns the steps that bring the volume to a workload on the node.
func (v *volume) up(node string) []step {
	p := v.at[node]
	return []step{
		{rpc: "ControllerPublishVolume", on: node, watched: driverA, call: p.attach},
		{rpc: "NodeStageVolume", on: node, watched: node, call: p.stage},
		{rpc: "NodePublishVolume", on: node, watched: node, call: p.publish,
			then: func() error { return v.writeAndVerify(node) }},
	}
}

// down returns the steps that remove the volume from the node.
func (v *volume) down(node string) []step {
	p := v.at[node]
	return []step{
		{rpc: "NodeUnpublishVolume", on: node, watched: node, call: p.unpublish},
		{rpc: "NodeUnstageVolume", on: node, watched: node, call: p.unstage},
		{rpc: "ControllerUnpublishVolume", on: node, watched: driverA, call: p.detach},
	}
}

// shared adds the steps of a volume that is written on one node and then published read-only,
// for which a device has a switch of its own.
func (l *lifecycle) shared(v *volume) {
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(append(v.up(driverA), v.down(driverA)...))...)
	v.at[driverB].ReadOnly = true
	up, down := v.up(driverB), v.down(driverB)
	l.add(unwatched(up[:2])...)
	l.add(up[2])
	l.add(down[:2]...)
	l.add(unwatched(down[2:])...)
	// The switch must not stay after the volume is unpublished.
	l.add(unwatched(append(v.up(driverA), v.down(driverA)...))...)
	l.add(step{rpc: "DeleteVolume", call: v.delete})
}

// unwatched returns the same steps without points.
func unwatched(steps []step) []step {
	for i := range steps {
		steps[i].watched = ""
	}
	return steps
}

// restored adds the steps of a volume of which a snapshot is taken in use, and of a larger
// volume that is made from the snapshot. Only steps that differ from a plain lifecycle have
// points.
func (l *lifecycle) restored(v *volume) error {
	copied, err := l.volume(v.access, 2*gib, v.seed)
	if err != nil {
		return err
	}
	sn := l.snapshot(v, "")
	copied.source = sn
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(v.up(driverA))...)
	l.add(step{rpc: "CreateSnapshot", watched: driverA, call: sn.create})
	l.add(unwatched(v.down(driverA))...)
	l.add(step{rpc: "CreateVolume", on: "from a snapshot", watched: driverA, call: copied.create})
	up := copied.up(driverA)
	l.add(unwatched(up[:1])...)
	l.add(up[1:]...)
	l.add(unwatched(copied.down(driverA))...)
	l.add(
		step{rpc: "DeleteVolume", call: copied.delete},
		step{rpc: "DeleteVolume", call: v.delete},
		step{rpc: "DeleteSnapshot", watched: driverA, call: sn.delete})
	return nil
}

// undo returns the steps of an orchestrator that gives up. It undoes all that it has asked
// for, with or without an answer. To learn an unknown ID, it repeats the create.
func (l *lifecycle) undo() []step {
	var steps []step
	if l.stopped {
		steps = append(steps, step{rpc: "InstanceStart", call: l.startInstance})
	}
	for _, v := range l.volumes {
		if !v.requested.Load() {
			continue
		}
		if v.created == nil {
			steps = append(steps, step{rpc: "CreateVolume", call: v.create})
		}
		for _, node := range []string{driverA, driverB} {
			steps = append(steps, v.undo(node)...)
		}
	}
	for _, sn := range l.snapshots {
		if sn.requested.Load() && sn.id == "" {
			steps = append(steps, step{rpc: "CreateSnapshot", call: sn.create})
		}
	}
	for _, v := range l.volumes {
		if v.requested.Load() {
			steps = append(steps, step{rpc: "DeleteVolume", call: v.delete})
		}
	}
	for _, sn := range l.snapshots {
		if sn.requested.Load() {
			steps = append(steps, step{rpc: "DeleteSnapshot", call: sn.delete})
		}
	}
	return l.watching(steps)
}

// undo returns the steps that remove the volume from a node, depending on how far the
// orchestrator had come.
func (v *volume) undo(node string) []step {
	p, down := v.at[node], unwatched(v.down(node))
	switch {
	case p.published.Load():
		return down
	case p.staged.Load():
		return down[1:]
	case p.attached.Load():
		return down[2:]
	}
	return nil
}
