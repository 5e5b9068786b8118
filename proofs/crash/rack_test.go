//go:build linux

package crash_test

import (
	"context"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// rackLifecycles are the lifecycles in which the rack is killed. They have a volume of which
// snapshots are taken in use and at rest, and whose instance is stopped and started.
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

// stopInstance and startInstance act as an administrator, who repeats a request like an
// orchestrator.
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
