//go:build linux

package concurrency

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const gib = harness.GiB

const (
	oneWriter   = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	manyWriters = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

// exactly returns a request for a volume of exactly this size.
func exactly(name string, sizeBytes int64) *csi.CreateVolumeRequest {
	req := harness.CreateRequest(name)
	req.CapacityRange.RequiredBytes, req.CapacityRange.LimitBytes = sizeBytes, sizeBytes
	return req
}

// controller returns one of the controllers. They are used in turn.
func (env *environment) controller(turn int) csi.ControllerClient {
	return env.controllers[turn%len(env.controllers)].Controller()
}

// created, attached, detached, deleted and snapshotDeleted make one call for a caller who
// repeats it until it succeeds.

func (env *environment) created(ctx context.Context, req *csi.CreateVolumeRequest) *csi.Volume {
	return ask(ctx, env, busy, env.controller(0).CreateVolume, req).GetVolume()
}

func (env *environment) attached(ctx context.Context,
	req *csi.ControllerPublishVolumeRequest) (said map[string]string) {
	return ask(ctx, env, busy, env.controller(1).ControllerPublishVolume, req).GetPublishContext()
}

func (env *environment) detached(ctx context.Context, id string) {
	ask(ctx, env, busy, env.controller(0).ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id})
}

func (env *environment) deleted(ctx context.Context, id string) {
	ask(ctx, env, busy, env.controller(1).DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
}

func (env *environment) snapshotDeleted(ctx context.Context, id string) {
	ask(ctx, env, forgetting, env.controller(0).DeleteSnapshot,
		&csi.DeleteSnapshotRequest{SnapshotId: id})
}

// disksOf lists the rack's disks of a CSI volume name, which the driver writes into the
// description.
func (env *environment) disksOf(ctx context.Context, name string) []oxide.Disk {
	env.t.Helper()
	all, err := env.Rack.Client.DiskListAllPages(ctx,
		oxide.DiskListParams{Project: oxide.NameOrId(env.Rack.Project)})
	if err != nil {
		env.fail("list the rack's disks: %v", err)
	}
	return slices.DeleteFunc(all, func(d oxide.Disk) bool {
		return harness.NameIn(d.Description) != name
	})
}

// snapshotsNamed lists the IDs of the rack's snapshots of a CSI name.
func (env *environment) snapshotsNamed(ctx context.Context, name string) []string {
	all, err := env.Rack.Client.SnapshotListAllPages(ctx,
		oxide.SnapshotListParams{Project: oxide.NameOrId(env.Rack.Project)})
	if err != nil {
		env.fail("list the rack's snapshots: %v", err)
	}
	var found []string
	for _, snapshot := range all {
		if harness.NameIn(snapshot.Description) == name {
			found = append(found, snapshot.Id)
		}
	}
	slices.Sort(found)
	return found
}

// holderOf returns the instance that has the disk according to the rack, or "" if none has it.
func (env *environment) holderOf(ctx context.Context, id string) string {
	disk, err := env.Rack.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
	if err != nil {
		env.fail("look at the disk %s: %v", id, err)
		return ""
	}
	if attached, ok := disk.State.AsAttached(); ok {
		return attached.Instance
	}
	if disk.State.State() != oxide.DiskStateStateDetached {
		env.fail("the disk %s is %s when nothing is under way", id, disk.State.State())
	}
	return ""
}
