//go:build linux

package concurrency

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// clusters contains the IDs of clusters that share the project with the controllers of the
// site, which have no cluster ID.
var clusters = []string{"east", "west"}

// manyClusters makes all clusters create the same name at once. Each must get a disk of its
// own, and none may delete another's. The same must hold for snapshots.
func (env *environment) manyClusters(ctx context.Context, name string) {
	all := []csi.ControllerClient{env.controller(0)}
	for _, id := range clusters {
		p, err := env.Rack.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController,
			Env: map[string]string{"OXIDE_CLUSTER_ID": id}})
		csitest.Must(env.t, err)
		csitest.Must(env.t, p.AwaitReady(ctx))
		defer func() { csitest.Must(env.t, p.Stop()) }()
		all = append(all, p.Controller())
	}
	volumes := make([]*csi.Volume, nameCallers)
	snapshots := make([]*csi.Snapshot, nameCallers)
	harness.AtOnce(nameCallers, func(caller int) {
		client := all[caller%len(all)]
		volumes[caller] = ask(ctx, env, busy, client.CreateVolume,
			harness.CreateRequest(name)).GetVolume()
		snapshots[caller] = ask(ctx, env, busy, client.CreateSnapshot,
			harness.SnapshotRequest(name, volumes[caller].GetVolumeId())).GetSnapshot()
	})
	if got := ids(volumes, (*csi.Volume).GetVolumeId); len(got) != len(all) {
		env.fail("%d clusters that share a project created %s as the disks %q", len(all), name, got)
	}
	if got := ids(snapshots, (*csi.Snapshot).GetSnapshotId); len(got) != len(all) {
		env.fail("%d clusters that share a project took %s as the snapshots %q", len(all), name, got)
	}
	env.eachDeletesItsOwn(ctx, all, volumes[:len(all)], snapshots[:len(all)])
}

func (env *environment) eachDeletesItsOwn(ctx context.Context, all []csi.ControllerClient,
	volumes []*csi.Volume, snapshots []*csi.Snapshot) {
	notOurs := answers{codes.FailedPrecondition: {"DiskNotOurs"}}
	for i, client := range all {
		for _, volume := range slices.Delete(slices.Clone(volumes), i, i+1) {
			_, err := client.DeleteVolume(ctx, &csi.DeleteVolumeRequest{
				VolumeId: volume.GetVolumeId()})
			if env.judge("DeleteVolume of another cluster's", err, notOurs) {
				env.fail("a cluster deleted the disk %s of another one", volume.GetVolumeId())
			}
		}
	}
	for i, client := range all {
		ask(ctx, env, busy, client.DeleteSnapshot,
			&csi.DeleteSnapshotRequest{SnapshotId: snapshots[i].GetSnapshotId()})
		ask(ctx, env, busy, client.DeleteVolume,
			&csi.DeleteVolumeRequest{VolumeId: volumes[i].GetVolumeId()})
	}
}
