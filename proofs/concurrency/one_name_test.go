//go:build linux

package concurrency

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// nameCallers is how many callers create one name at the same time.
const nameCallers = 50

// condition describes the rack's behavior while all callers create one name.
type condition struct {
	name    string
	fault   *adminapi.Fault
	hold    string
	restore bool
	// If whole is true, the callers also do the rest of the lifecycle. The long form always does
	// this, and it also runs the rare conditions.
	whole, rare bool
	// allowed contains the answers that the condition allows, besides busy.
	allowed answers
}

var unavailable = answers{codes.Unavailable: {"RackUnavailable", "EffectUnknown"}}

func (env *environment) conditions(seed uint64) []condition {
	unlucky := func(operation string, f adminapi.Fault) *adminapi.Fault {
		f.Operation, f.Probability, f.Seed = operation, 0.4, seed
		return &f
	}
	throttled := &adminapi.Response{Status: 429, Body: "slow down"}
	down := &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "not now"}
	return []condition{
		{name: "fair", whole: true},
		{name: "restored", restore: true},
		{name: "slow", rare: true, hold: "300ms"},
		{name: "throttled", fault: unlucky("", adminapi.Fault{Phase: adminapi.Before,
			Response: throttled}),
			allowed: unavailable},
		{name: "throttled-restored", rare: true, restore: true, allowed: unavailable,
			fault: unlucky("", adminapi.Fault{Phase: adminapi.Before, Response: throttled})},
		{name: "down", rare: true, fault: unlucky("disk_view", adminapi.Fault{Response: down}),
			allowed: unavailable},
		{name: "answer-lost", allowed: unavailable,
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.After, Cut: true})},
		{name: "answer-lost-restored", allowed: unavailable, restore: true, hold: "200ms",
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.After, Cut: true})},
		{name: "done-but-failed", rare: true, allowed: unavailable,
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.After,
				Response: &adminapi.Response{Status: 500, ErrorCode: "Internal",
					Message: "Internal Server Error"}})},
		{name: "repeated-by-a-proxy", fault: unlucky("disk_create",
			adminapi.Fault{Phase: adminapi.Twice})},
		{name: "undone", allowed: unavailable,
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.Unwind})},
	}
}

// oneName makes many callers create one name at two controllers, in every condition. Then they
// do the rest of the lifecycle at once, too.
func (env *environment) oneName(round int) {
	ctx := env.t.Context()
	origin := env.origin(ctx, round)
	conditions := env.conditions(env.Proof.Seed + uint64(round))
	if !env.Proof.Long() {
		conditions = slices.DeleteFunc(conditions, func(c condition) bool { return c.rare })
	}
	if env.Proof.Short() {
		conditions = append(conditions[:1], short.Some(env.t, 2, conditions[1:])...)
	}
	for _, cond := range conditions {
		if env.Proof.Over() {
			continue
		}
		name := fmt.Sprintf("one-%s-%d", cond.name, round)
		volume := env.createdByAll(ctx, name, cond, origin.GetSnapshotId())
		if volume == nil {
			continue
		}
		if cond.whole || env.Proof.Long() {
			env.attachedByAll(ctx, volume)
			env.snapshotByAll(ctx, volume, "snapshot-of-"+name)
			env.deletedByAll(ctx, volume)
		} else {
			env.deleted(ctx, volume.GetVolumeId())
		}
		if env.t.Failed() {
			env.Proof.Say("the condition was %s", cond.name)
			return
		}
	}
	env.twoSizes(ctx, fmt.Sprintf("two-sizes-%d", round))
	env.createAndDelete(ctx, fmt.Sprintf("born-and-buried-%d", round))
	env.manyClusters(ctx, fmt.Sprintf("many-clusters-%d", round))
	env.snapshotDeleted(ctx, origin.GetSnapshotId())
	env.deleted(ctx, origin.GetSourceVolumeId())
}

// origin makes a snapshot from which volumes are restored.
func (env *environment) origin(ctx context.Context, round int) *csi.Snapshot {
	name := fmt.Sprintf("origin-%d", round)
	volume := env.created(ctx, harness.CreateRequest(name))
	return ask(ctx, env, busy, env.controller(1).CreateSnapshot,
		harness.SnapshotRequest(name, volume.GetVolumeId())).GetSnapshot()
}

// createdByAll makes many callers create one name at two controllers. Each repeats its call
// until it is OK. All must get the same volume, and the rack must have one disk.
func (env *environment) createdByAll(ctx context.Context, name string, cond condition,
	origin string,
) *csi.Volume {
	env.setCondition(ctx, cond)
	req := harness.CreateRequest(name)
	if cond.restore {
		harness.FromSnapshot(req, origin)
	}
	volumes := make([]*csi.Volume, nameCallers)
	harness.AtOnce(nameCallers, func(caller int) {
		env.converge(ctx, "CreateVolume "+name, busy.and(cond.allowed), func(ctx context.Context) error {
			env.tally.creates.Add(1)
			answer, err := env.controller(caller).CreateVolume(ctx, req)
			volumes[caller] = answer.GetVolume()
			return err
		})
	})
	env.clearCondition(ctx)
	env.expectOneDisk(ctx, name, ids(volumes, (*csi.Volume).GetVolumeId))
	return volumes[0]
}

// expectOneDisk reports a failure unless all callers got one ID and the rack has one disk of
// that name.
func (env *environment) expectOneDisk(ctx context.Context, name string, ids []string) {
	disks := env.disksOf(ctx, name)
	env.tally.names.Add(1)
	env.tally.disks.Add(int64(len(disks)))
	env.tally.ids.Add(int64(len(ids)))
	if len(disks) != 1 || len(ids) != 1 || disks[0].Id != ids[0] {
		env.fail("%s is the disks %v and has the ids %q", name, disks, ids)
	}
}

// ids returns the different IDs in the answers.
func ids[T any](all []T, id func(T) string) []string {
	var found []string
	for _, one := range all {
		found = append(found, id(one))
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func (env *environment) setCondition(ctx context.Context, cond condition) {
	env.t.Helper()
	if cond.hold != "" {
		csitest.Must(env.t, env.Rack.Admin.Switch(ctx, map[string]any{"create_hold": cond.hold}))
	}
	if cond.fault != nil {
		_, err := env.Rack.Admin.AddFault(ctx, *cond.fault)
		csitest.Must(env.t, err)
	}
}

func (env *environment) clearCondition(ctx context.Context) {
	env.t.Helper()
	csitest.Must(env.t, env.Rack.Admin.ClearFaults(ctx))
	csitest.Must(env.t, env.Rack.Admin.Switch(ctx, map[string]any{"create_hold": "0s"}))
}

// attachedByAll makes many callers attach the volume to one of two instances. One instance
// must get it, and only the callers that asked for this instance may get OK. Then all callers
// detach it.
func (env *environment) attachedByAll(ctx context.Context, volume *csi.Volume) {
	answered := make([]string, nameCallers)
	harness.AtOnce(nameCallers, func(caller int) {
		node := env.nodes[caller/2%2].Instance.ID
		env.tally.attaches.Add(1)
		_, err := env.controller(caller).ControllerPublishVolume(ctx, harness.PublishRequest(volume,
			node))
		if env.judge("ControllerPublishVolume", err, attaching) {
			answered[caller] = node
		}
	})
	answered = slices.DeleteFunc(answered, func(node string) bool { return node == "" })
	holders := ids(answered, func(node string) string { return node })
	if holder := env.holderOf(ctx, volume.GetVolumeId()); len(holders) != 1 || holders[0] != holder {
		env.fail("the instance %s has the disk, and callers got an OK for %q", holder, holders)
	}
	harness.AtOnce(nameCallers, func(caller int) {
		ask(ctx, env, busy, env.controller(caller).ControllerUnpublishVolume,
			harness.UnpublishRequest(volume, ""))
	})
	if holder := env.holderOf(ctx, volume.GetVolumeId()); holder != "" {
		env.fail("all detaches succeeded, and %s has the disk", holder)
	}
}

// snapshotByAll makes many callers take one snapshot. One caller deletes it.
func (env *environment) snapshotByAll(ctx context.Context, volume *csi.Volume, name string) {
	taken := make([]*csi.Snapshot, nameCallers)
	harness.AtOnce(nameCallers, func(caller int) {
		env.converge(ctx, "CreateSnapshot", busy, func(ctx context.Context) error {
			env.tally.snapshots.Add(1)
			answer, err := env.controller(caller).CreateSnapshot(ctx,
				harness.SnapshotRequest(name, volume.GetVolumeId()))
			taken[caller] = answer.GetSnapshot()
			return err
		})
	})
	answered := ids(taken, (*csi.Snapshot).GetSnapshotId)
	if listed := env.snapshotsNamed(ctx, name); len(answered) != 1 ||
		!slices.Equal(listed, answered) {
		env.fail("the snapshot %s has the ids %q, and the rack has %q", name, answered, listed)
	}
	harness.AtOnce(nameCallers, func(caller int) {
		ask(ctx, env, forgetting, env.controller(caller).DeleteSnapshot,
			&csi.DeleteSnapshotRequest{SnapshotId: answered[0]})
	})
	if left := env.snapshotsNamed(ctx, name); len(left) > 0 {
		env.fail("the deleted snapshot %s is there as %q", name, left)
	}
}

// deletedByAll makes many callers delete the volume.
func (env *environment) deletedByAll(ctx context.Context, volume *csi.Volume) {
	harness.AtOnce(nameCallers, func(caller int) {
		env.converge(ctx, "DeleteVolume", busy, func(ctx context.Context) error {
			env.tally.deletes.Add(1)
			_, err := env.controller(caller).DeleteVolume(ctx, &csi.DeleteVolumeRequest{
				VolumeId: volume.GetVolumeId()})
			return err
		})
	})
	disks, err := env.Rack.Client.DiskListAllPages(ctx,
		oxide.DiskListParams{Project: oxide.NameOrId(env.Rack.Project)})
	if err != nil || slices.ContainsFunc(disks, func(d oxide.Disk) bool {
		return d.Id == volume.GetVolumeId()
	}) {
		env.fail("all deletes of the disk %s succeeded, but the rack lists it, or: %v",
			volume.GetVolumeId(), err)
	}
}

// twoSizes makes callers create one name in two sizes. The rack must have one of them, and
// callers that asked for the other one must get ALREADY_EXISTS.
func (env *environment) twoSizes(ctx context.Context, name string) {
	taken := answers{codes.AlreadyExists: {"VolumeExists"}}
	var mu sync.Mutex
	answered := map[int64][]string{}
	harness.AtOnce(nameCallers, func(caller int) {
		size := int64(1+caller/2%2) * gib
		err := harness.Await(ctx, patience, func() error {
			env.tally.creates.Add(1)
			answer, err := env.controller(caller).CreateVolume(ctx, exactly(name, size))
			if env.judge("CreateVolume in two sizes", err, busy.and(taken)) {
				mu.Lock()
				defer mu.Unlock()
				answered[size] = append(answered[size], answer.GetVolume().GetVolumeId())
			}
			if codeOf(err) == codes.AlreadyExists {
				return nil
			}
			return err
		})
		if err != nil {
			env.fail("CreateVolume in two sizes does not converge: %v", err)
		}
	})
	if len(answered) != 1 {
		env.fail("%s was made in %d sizes: %v", name, len(answered), answered)
	}
	for _, same := range answered {
		id := ids(same, func(id string) string { return id })
		env.expectOneDisk(ctx, name, id)
		env.deletedByAll(ctx, &csi.Volume{VolumeId: id[0]})
	}
}

// createAndDelete makes callers create and delete one name at the same time, repeatedly. One
// more create at the end must return the only disk.
func (env *environment) createAndDelete(ctx context.Context, name string) {
	req := harness.CreateRequest(name)
	harness.AtOnce(nameCallers, func(caller int) {
		for turn := range 4 {
			env.tally.creates.Add(1)
			answer, err := env.controller(caller+turn).CreateVolume(ctx, req)
			if !env.judge("CreateVolume among deletes", err, busy) {
				continue
			}
			env.tally.deletes.Add(1)
			_, err = env.controller(caller).DeleteVolume(ctx, &csi.DeleteVolumeRequest{
				VolumeId: answer.GetVolume().GetVolumeId()})
			env.judge("DeleteVolume among creates", err, busy)
		}
	})
	env.tally.creates.Add(1)
	volume := env.created(ctx, req)
	env.expectOneDisk(ctx, name, []string{volume.GetVolumeId()})
	env.deletedByAll(ctx, volume)
}
