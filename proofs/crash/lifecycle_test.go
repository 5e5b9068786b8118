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
	// rpc is what is called, and on which node.
	rpc, on string
	// watched is the process that the step's points are those of; "" for a step without points.
	watched string
	call    func(context.Context) error
	// then is what a workload does when the call has succeeded.
	then func() error
}

func (st step) String() string { return strings.TrimSpace(st.rpc + " " + st.on) }

// lifecycle is all that happens to a volume, and to those made from it.
type lifecycle struct {
	*environment
	kind      string
	volumes   []*volume
	snapshots []*snapshot
	steps     []step
	// effects are those of a call in which no point was reached.
	effects []trace.Effect
	// stopped reports whether instance a may be stopped.
	stopped bool
}

// The kinds of lifecycles. A plain one moves a volume from one node to another; a restored one is
// that of a volume made from a snapshot, and larger than it; a shared one ends with a reader.
var driverLifecycles = []string{
	"plain ext4", "plain xfs", "plain btrfs", "plain block",
	"restored ext4", "restored xfs", "restored btrfs", "shared block", "shared ext4",
}

// begin prepares a lifecycle; its data come from the seed.
func (env *environment) begin(kind string, seed uint64) (*lifecycle, error) {
	env.lifecycles++
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
	case "rack":
		err = l.onRack(v)
	}
	return l, err
}

func (l *lifecycle) volume(access string, size int64, seed uint64) (*volume, error) {
	name := fmt.Sprintf("%s-%d-%d", l.name, l.lifecycles, len(l.volumes))
	v, err := l.newVolume(name, access, size, seed)
	l.volumes = append(l.volumes, v)
	return v, err
}

func (l *lifecycle) add(steps ...step) { l.steps = append(l.steps, l.watching(steps)...) }

// watching are the same steps with a look at the bystanders after each call.
func (l *lifecycle) watching(steps []step) []step {
	for i, st := range steps {
		steps[i].call = func(ctx context.Context) error { return l.bystanders.Called(st.call(ctx)) }
	}
	return steps
}

// plain is a volume on one node, then on the other.
func (l *lifecycle) plain(v *volume) {
	l.add(step{rpc: "CreateVolume", watched: driverA, call: v.create})
	for _, node := range []string{driverA, driverB} {
		l.add(v.up(node)...)
		if node == driverA {
			l.add(step{rpc: "NodeGetVolumeStats", on: node, watched: node,
				call: func(ctx context.Context) error { return v.stats(ctx, node) }})
		}
		l.add(v.down(node)...)
	}
	l.add(step{rpc: "DeleteVolume", watched: driverA, call: v.delete})
}

// up brings the volume to a workload on the node.
func (v *volume) up(node string) []step {
	return []step{
		{rpc: "ControllerPublishVolume", on: node, watched: driverA,
			call: func(ctx context.Context) error { return v.attach(ctx, node) }},
		{rpc: "NodeStageVolume", on: node, watched: node,
			call: func(ctx context.Context) error { return v.stage(ctx, node) }},
		{rpc: "NodePublishVolume", on: node, watched: node,
			call: func(ctx context.Context) error { return v.publish(ctx, node) },
			then: func() error { return v.writeAndVerify(node) }},
	}
}

// down takes it away again.
func (v *volume) down(node string) []step {
	return []step{
		{rpc: "NodeUnpublishVolume", on: node, watched: node,
			call: func(ctx context.Context) error { return v.unpublish(ctx, node) }},
		{rpc: "NodeUnstageVolume", on: node, watched: node,
			call: func(ctx context.Context) error { return v.unstage(ctx, node) }},
		{rpc: "ControllerUnpublishVolume", on: node, watched: driverA,
			call: func(ctx context.Context) error { return v.detach(ctx, node) }},
	}
}

// shared is a volume that is written on one node and then read only, which for a device is a switch
// of its own.
func (l *lifecycle) shared(v *volume) {
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(append(v.up(driverA), v.down(driverA)...))...)
	v.at[driverB].ReadOnly = true
	up, down := v.up(driverB), v.down(driverB)
	l.add(unwatched(up[:2])...)
	l.add(up[2])
	l.add(down[:2]...)
	l.add(unwatched(down[2:])...)
	// The switch does not stay behind.
	l.add(unwatched(append(v.up(driverA), v.down(driverA)...))...)
	l.add(step{rpc: "DeleteVolume", call: v.delete})
}

// unwatched are the same steps without points.
func unwatched(steps []step) []step {
	for i := range steps {
		steps[i].watched = ""
	}
	return steps
}

// restored is a volume that is in use while a snapshot of it is taken, and a larger one made from
// that. Only what differs from a plain lifecycle has points.
func (l *lifecycle) restored(v *volume) error {
	copied, err := l.volume(v.access, 2*gib, v.seed)
	if err != nil {
		return err
	}
	sn := &snapshot{name: fmt.Sprintf("snapshot-%d", l.lifecycles)}
	l.snapshots = append(l.snapshots, sn)
	copied.source = sn
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(v.up(driverA))...)
	l.add(step{rpc: "CreateSnapshot", watched: driverA,
		call: func(ctx context.Context) error { return v.snapshot(ctx, sn) }})
	l.add(unwatched(v.down(driverA))...)
	l.add(step{rpc: "CreateVolume", on: "from a snapshot", watched: driverA, call: copied.create})
	up := copied.up(driverA)
	l.add(unwatched(up[:1])...)
	l.add(up[1:]...)
	l.add(unwatched(copied.down(driverA))...)
	l.add(
		step{rpc: "DeleteVolume", call: copied.delete},
		step{rpc: "DeleteVolume", call: v.delete},
		step{rpc: "DeleteSnapshot", watched: driverA,
			call: func(ctx context.Context) error { return l.deleteSnapshot(ctx, sn) }})
	return nil
}

// undo are the steps of an orchestrator that gives up: it takes back what it has asked for, whether
// it was answered or not. To learn an unknown id it repeats the create.
func (l *lifecycle) undo() []step {
	var steps []step
	if l.stopped {
		steps = append(steps, step{rpc: "InstanceStart", call: l.startInstance})
	}
	for _, v := range l.volumes {
		if !v.requested {
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
		if sn.requested && sn.id == "" {
			v := l.volumes[0]
			steps = append(steps, step{rpc: "CreateSnapshot",
				call: func(ctx context.Context) error { return v.snapshot(ctx, sn) }})
		}
	}
	for _, v := range l.volumes {
		if v.requested {
			steps = append(steps, step{rpc: "DeleteVolume", call: v.delete})
		}
	}
	for _, sn := range l.snapshots {
		if sn.requested {
			steps = append(steps, step{rpc: "DeleteSnapshot",
				call: func(ctx context.Context) error { return l.deleteSnapshot(ctx, sn) }})
		}
	}
	return l.watching(steps)
}

// undo takes the volume away from a node, as far as it had come.
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
