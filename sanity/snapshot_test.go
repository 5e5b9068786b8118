//go:build linux

package sanity

import (
	"net/http"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// otherProject is a second project, on racks that are started with it.
const otherProject = "other"

var withOtherProject = harness.RackOptions{Args: []string{"--project", otherProject}}

var _ = describeController("a snapshot", fixtureOptions{}, func(f *fixture) {
	create := func(volume, name string) *csi.CreateSnapshotRequest {
		return &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: name}
	}

	It("CS-5 CS-7 is found again by its name and source, and in progress while the rack takes it",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			req := create(volume.GetVolumeId(), fresh("again"))
			first := expectOK(ctx, f.ctl.CreateSnapshot, req)
			id := first.GetSnapshot().GetSnapshotId()
			f.snapshotDeletedLater(id)
			Expect(first.GetSnapshot().GetReadyToUse()).To(BeTrue())
			Expect(first.GetSnapshot().GetCreationTime().IsValid()).To(BeTrue())
			Expect(first.GetSnapshot().GetSizeBytes()).To(Equal(harness.GiB))
			again := expectOK(ctx, f.ctl.CreateSnapshot, req)
			Expect(again.GetSnapshot()).To(BeComparableTo(first.GetSnapshot(), protoCmp))
			f.pretendSnapshot(ctx, id, "creating")
			expectRefusal(errOf(f.ctl.CreateSnapshot(ctx, req)), codes.Aborted, "still taking", id)
		})

	It("CS-9 that faulted is an error, which its deletion ends", func(ctx SpecContext) {
		volume := f.volume(ctx)
		req := create(volume.GetVolumeId(), fresh("faulted"))
		resp := expectOK(ctx, f.ctl.CreateSnapshot, req)
		id := resp.GetSnapshot().GetSnapshotId()
		f.snapshotDeletedLater(id)
		f.pretendSnapshot(ctx, id, "faulted")
		expectRefusal(errOf(f.ctl.CreateSnapshot(ctx, req)), codes.Internal, "delete it")
	})

	It("CS-10 cannot be taken of a disk on local storage", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("local"))
		withParameter("diskType", "local")(req)
		volume := f.created(ctx, req)
		_, err := f.ctl.CreateSnapshot(ctx, create(volume.GetVolumeId(), fresh("local")))
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

	It("CV-15 whose volume inherited other blocks: what cannot be deleted goes with the next call",
		func(ctx SpecContext) {
			origin := f.volume(ctx)
			snapshot := f.snapshotted(ctx, origin)
			expectOK(ctx, f.ctl.DeleteVolume,
				&csi.DeleteVolumeRequest{VolumeId: origin.GetVolumeId()})
			req := harness.FromSnapshot(harness.CreateRequest(fresh("blocks")), snapshot.GetSnapshotId())
			withParameter("blockSize", "512")(req)
			f.fault(ctx, adminapi.Fault{Operation: "disk_delete", Phase: adminapi.Instead, Times: 1,
				Response: &adminapi.Response{Status: http.StatusGone, ErrorCode: "Gone", Message: "Gone"}})
			expectReason(errOf(f.ctl.CreateVolume(ctx, req)), codes.Aborted, "DiskBusy")
			Expect(f.disks(ctx)).To(HaveLen(1))
			_, err := f.ctl.CreateVolume(ctx, req)
			expectReason(err, codes.InvalidArgument, "SourceIncompatible")
			Expect(f.disks(ctx)).To(BeEmpty())
			delete(req.Parameters, "blockSize")
			volume := f.created(ctx, req)
			Expect(volume.GetVolumeContext()).To(HaveKeyWithValue("blockSize", "4096"))
		})
})
