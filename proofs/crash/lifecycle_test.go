//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// step is one call of a lifecycle. The orchestrator repeats it until it succeeds.
type step struct {
	// rpc is the call, and on is the node on which it is made.
	rpc, on string
	// watched is the process to which the step's points belong, or "" for a step without points.
	watched string
	call    func(context.Context) error
	// then, if it is set, does the work of a workload after the call has succeeded.
	then func() error
}

func (st step) String() string { return strings.TrimSpace(st.rpc + " " + st.on) }

// lifecycle is the life of a volume and, if it has snapshots, of a volume that is made from one.
type lifecycle struct {
	*environment
	kind      string
	volumes   []*volume
	snapshots []*snapshot
	steps     []step
	// effects contains the effects of the step if its point was not reached.
	effects []trace.Effect
	// stopped is set if instance a may be stopped.
	stopped bool
}

// The kinds of lifecycles. A plain one moves a volume from one node to another. A restored one has
// a second, larger volume, which is made from a snapshot. In a shared one the volume is also
// published read-only. In a deviceless one an attach leaves no device.
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

// snapshot prepares a snapshot, which no call has created yet.
func (l *lifecycle) snapshot(of *volume, suffix string) *snapshot {
	sn := &snapshot{of: of, name: fmt.Sprintf("snapshot-%d%s", l.lifecycles, suffix)}
	l.snapshots = append(l.snapshots, sn)
	return sn
}

func (l *lifecycle) add(steps ...step) { l.steps = append(l.steps, l.checked(steps)...) }

// checked returns the same steps with a check of the bystanders after each call.
func (l *lifecycle) checked(steps []step) []step {
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

// shared adds the steps of a volume that is written on one node and then published read-only on the
// other. To publish a device read-only, the driver makes the device itself read-only.
func (l *lifecycle) shared(v *volume) {
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(append(v.up(driverA), v.down(driverA)...))...)
	v.at[driverB].ReadOnly = true
	up, down := v.up(driverB), v.down(driverB)
	l.add(unwatched(up[:2])...)
	l.add(up[2])
	l.add(down[:2]...)
	l.add(unwatched(down[2:])...)
	// After the volume is unpublished, its device must be writable again.
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

// undo returns the steps of an orchestrator that gives up: it undoes all calls that it has made,
// answered or not. If it does not know the ID of an object, it first repeats the create.
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
	return l.checked(steps)
}

// undo returns the steps that remove the volume from a node: one for each step that was made and
// not undone.
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

// deviceless is the shape of a lifecycle on a rack that records an attach before the instance has
// the device, and then gives it none (docs/hot-plug.md). leastDeviceless is the minimum number of
// its points that are tried.
const (
	deviceless      = "deviceless"
	leastDeviceless = 3
)

// withoutDevice adds the steps of a volume with data that is attached without a device, and then
// detached and attached again. Only the first attach and its detach have points.
func (l *lifecycle) withoutDevice(v *volume) {
	l.add(step{rpc: "CreateVolume", call: v.create})
	l.add(unwatched(append(v.up(driverB), v.down(driverB)...))...)
	attach, detach := v.up(driverA)[0], v.down(driverA)[2]
	attach.then = func() error { return v.checkDevices(0) }
	l.add(step{rpc: "Fault", call: l.failDevices}, attach, detach,
		step{rpc: "Fault", on: "ends", call: l.mendDevices})
	up := unwatched(v.up(driverA))
	up[0].then = func() error { return v.checkDevices(1) }
	l.add(up...)
	l.add(unwatched(v.down(driverA))...)
	l.add(step{rpc: "DeleteVolume", call: v.delete})
}

// failDevices makes the rack record every attach without giving the instance a device.
func (l *lifecycle) failDevices(ctx context.Context) error {
	_, err := l.Rack.Admin.AddFault(ctx, adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{Fails: true}})
	return errors.Join(err, l.Rack.Admin.Switch(ctx, map[string]any{
		"hotplug": adminapi.HotplugFull.With(adminapi.RecordFirst)}))
}

func (l *lifecycle) mendDevices(ctx context.Context) error {
	return errors.Join(l.Rack.Admin.ClearFaults(ctx), l.Rack.Admin.Switch(ctx,
		map[string]any{"hotplug": adminapi.HotplugFull}))
}

// checkDevices returns an error unless instance a has that number of devices of the volume.
func (v *volume) checkDevices(want int) error {
	devices, err := v.Rack.Instance(driverA).Devices()
	if err != nil {
		return err
	}
	got := 0
	for _, d := range devices {
		if d.Serial == v.created.GetVolumeContext()["diskName"] {
			got++
		}
	}
	if got != want {
		return fmt.Errorf("volume %s is attached with %d devices, want %d", v.name, got, want)
	}
	return nil
}

// rackLifecycles are the lifecycles in which the rack is killed. Snapshots are taken of the volume
// in use and detached, and its instance is stopped and started.
var rackLifecycles = []string{"rack ext4", "rack block"}

func (l *lifecycle) onRack(v *volume) error {
	copied, err := l.volume(v.access, 2*gib, v.seed)
	if err != nil {
		return err
	}
	inUse, atRest := l.snapshot(v, "-in-use"), l.snapshot(v, "-at-rest")
	copied.source = atRest
	up, down := v.up(driverA), v.down(driverA)
	taken := func(sn *snapshot) step {
		return step{rpc: "CreateSnapshot", on: sn.name, call: sn.create}
	}
	gone := func(sn *snapshot) step {
		return step{rpc: "DeleteSnapshot", on: sn.name, call: sn.delete}
	}
	l.add(byRack(step{rpc: "CreateVolume", call: v.create}, up[0])...)
	l.add(unwatched(up[1:])...)
	l.add(byRack(taken(inUse))...)
	l.add(unwatched(down[:2])...)
	l.add(byRack(
		step{rpc: "InstanceStop", call: l.stopInstance},
		step{rpc: "InstanceStart", call: l.startInstance})...)
	l.add(unwatched(v.up(driverA)[1:])...)
	l.add(unwatched(v.down(driverA)[:2])...)
	l.add(byRack(down[2], taken(atRest),
		step{rpc: "CreateVolume", on: "from a snapshot", call: copied.create})...)
	l.add(unwatched(copied.up(driverB))...)
	l.add(unwatched(copied.down(driverB))...)
	l.add(byRack(step{rpc: "DeleteVolume", on: "made from a snapshot", call: copied.delete},
		step{rpc: "DeleteVolume", call: v.delete}, gone(inUse), gone(atRest))...)
	return nil
}

// byRack returns the same steps with the rack's points.
func byRack(steps ...step) []step {
	for i := range steps {
		steps[i].watched = rackProcess
	}
	return steps
}

// stopInstance and startInstance act as an administrator. Their errors are UNAVAILABLE, so that
// they are repeated like the orchestrator's calls.
func (l *lifecycle) stopInstance(ctx context.Context) error {
	l.stopped = true
	_, err := l.Rack.Client.InstanceStop(ctx, oxide.InstanceStopParams{
		Instance: oxide.NameOrId(l.Rack.Instance(driverA).ID)})
	return l.awaitInstance(ctx, err, oxide.InstanceStateStopped)
}

func (l *lifecycle) startInstance(ctx context.Context) error {
	_, err := l.Rack.Client.InstanceStart(ctx, oxide.InstanceStartParams{
		Instance: oxide.NameOrId(l.Rack.Instance(driverA).ID)})
	err = l.awaitInstance(ctx, err, oxide.InstanceStateRunning)
	if err == nil {
		l.stopped = false
	}
	return err
}

func (l *lifecycle) awaitInstance(ctx context.Context, err error, want oxide.InstanceState) error {
	for err == nil {
		instance, viewErr := l.Rack.Client.InstanceView(ctx, oxide.InstanceViewParams{
			Instance: oxide.NameOrId(l.Rack.Instance(driverA).ID)})
		if viewErr == nil && instance.RunState == want {
			return nil
		}
		err = viewErr
	}
	return status.Error(codes.Unavailable, err.Error())
}
