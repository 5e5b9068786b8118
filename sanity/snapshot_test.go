//go:build linux

package sanity

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// otherProject is a second project, on racks that are started with it.
const otherProject = "other"

var withOtherProject = harness.RackOptions{Args: []string{"--project", otherProject}}

var _ = describeController("a snapshot", fixtureOptions{}, func(f *fixture) {
	It("CS-10 cannot be taken of a disk on local storage", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("local"))
		withParameter("diskType", "local")(req)
		volume := f.created(ctx, req)
		_, err := f.ctl.CreateSnapshot(ctx,
			harness.SnapshotRequest(fresh("local"), volume.GetVolumeId()))
		expectRefusal(err, codes.FailedPrecondition, "local")
	})

	It("CV-18 DV-4 DS-4 outlives its volume, and the volume made from it outlives the snapshot",
		func(ctx SpecContext) {
			origin := f.volume(ctx)
			snapshot := f.snapshotted(ctx, origin)
			req := harness.FromSnapshot(harness.CreateRequest(fresh("restored")),
				snapshot.GetSnapshotId())
			first := f.created(ctx, req)
			expectOK(ctx, f.ctl.DeleteVolume,
				&csi.DeleteVolumeRequest{VolumeId: origin.GetVolumeId()})
			again := expectOK(ctx, f.ctl.CreateVolume, req)
			Expect(again.GetVolume()).To(BeComparableTo(first, protoCmp))
			Expect(first.GetContentSource().GetSnapshot().GetSnapshotId()).
				To(Equal(snapshot.GetSnapshotId()))
			expectOK(ctx, f.ctl.DeleteSnapshot,
				&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			Expect(stateOf(f.disk(ctx, first.GetVolumeId()))).To(Equal("detached"))
		})
})
