//go:build linux

package concurrency

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

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

func (env *environment) created(ctx context.Context,
	req *csi.CreateVolumeRequest) (volume *csi.Volume) {
	env.converge(ctx, "CreateVolume", busy, func(ctx context.Context) error {
		answer, err := env.controller(0).CreateVolume(ctx, req)
		volume = answer.GetVolume()
		return err
	})
	return volume
}

func (env *environment) attached(ctx context.Context, volume *csi.Volume,
	n *node) (said map[string]string) {
	env.converge(ctx, "ControllerPublishVolume", busy, func(ctx context.Context) error {
		answer, err := env.controller(1).ControllerPublishVolume(ctx,
			harness.PublishRequest(volume, n.instance.ID))
		said = answer.GetPublishContext()
		return err
	})
	return said
}

func (env *environment) detached(ctx context.Context, id string) {
	env.converge(ctx, "ControllerUnpublishVolume", busy, func(ctx context.Context) error {
		_, err := env.controller(0).ControllerUnpublishVolume(ctx,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id})
		return err
	})
}

func (env *environment) deleted(ctx context.Context, id string) {
	env.converge(ctx, "DeleteVolume", busy, func(ctx context.Context) error {
		_, err := env.controller(1).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		return err
	})
}

func (env *environment) snapshotDeleted(ctx context.Context, id string) {
	allowed := busy.and(answers{codes.Aborted: {"SnapshotNotReady"}})
	env.converge(ctx, "DeleteSnapshot", allowed, func(ctx context.Context) error {
		_, err := env.controller(0).DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
		return err
	})
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
	var found []oxide.Disk
	for _, disk := range all {
		if ownsName(disk.Description, name) {
			found = append(found, disk)
		}
	}
	return found
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
		if ownsName(snapshot.Description, name) {
			found = append(found, snapshot.Id)
		}
	}
	slices.Sort(found)
	return found
}

// ownsName reports whether a description is the one that the driver writes for that name.
func ownsName(description, name string) bool {
	return strings.HasPrefix(description, `csi.oxide.computer {"name":"`+name+`"`)
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
