//go:build linux

package sanity

import (
	"net/http"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// What a call that fails must not leave behind.
var _ = describeController("what a refused call leaves", fixtureOptions{}, func(f *fixture) {
	DescribeTable("D-24 a volume whose attributes are another's is not attached",
		func(ctx SpecContext, spoil func(attributes map[string]string, other *csi.Volume)) {
			volume, other := f.volume(ctx), f.volume(ctx)
			req := harness.PublishRequest(volume, f.rack.Instance("a").ID)
			req.VolumeContext = map[string]string{}
			spoil(req.GetVolumeContext(), other)
			Expect(f.calls(ctx, func() {
				_, err := f.ctl.ControllerPublishVolume(ctx, req)
				expectReason(err, codes.InvalidArgument, "FieldInvalid")
			})).To(Equal([]string{"instance_disk_list", "disk_view"}))
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
			Expect(stateOf(f.disk(ctx, other.GetVolumeId()))).To(Equal("detached"))
		},
		Entry("D-24 a diskName written by hand", func(to map[string]string, other *csi.Volume) {
			to["diskName"] = other.GetVolumeContext()["diskName"]
		}),
		Entry("D-24 everything copied", func(to map[string]string, other *csi.Volume) {
			for key, value := range other.GetVolumeContext() {
				to[key] = value
			}
		}),
	)

	It("CV-15 a disk that inherited other blocks and could not be deleted goes with the next call",
		func(ctx SpecContext) {
			origin := f.volume(ctx)
			snapshot := f.snapshotted(ctx, origin)
			_, err := f.ctl.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: origin.GetVolumeId()})
			Expect(err).NotTo(HaveOccurred())
			req := harness.FromSnapshot(harness.CreateRequest(fresh("blocks")), snapshot.GetSnapshotId())
			withParameter("blockSize", "512")(req)
			f.fault(ctx, adminapi.Fault{Operation: "disk_delete", Phase: adminapi.Instead, Times: 1,
				Response: &adminapi.Response{Status: http.StatusGone, ErrorCode: "Gone", Message: "Gone"}})
			_, err = f.ctl.CreateVolume(ctx, req)
			expectReason(err, codes.Aborted, "DiskBusy")
			Expect(f.disks(ctx)).To(HaveLen(1))
			_, err = f.ctl.CreateVolume(ctx, req)
			expectReason(err, codes.InvalidArgument, "SourceIncompatible")
			Expect(f.disks(ctx)).To(BeEmpty())
			delete(req.Parameters, "blockSize")
			volume := f.created(ctx, req)
			Expect(volume.GetVolumeContext()).To(HaveKeyWithValue("blockSize", "4096"))
		})

	It("CU-10 a faulted disk that its instance still lists is not taken for detached",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.published(ctx, volume, "a")
			node := f.rack.Instance("a").ID
			f.pretend(ctx, volume, "faulted", "")
			f.refuse(ctx, "instance_disk_detach", "", http.StatusBadRequest, "InvalidRequest",
				"cannot detach disk")
			_, err := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
			expectReason(err, codes.FailedPrecondition, "DiskFaulted")
			_, err = f.ctl.ControllerUnpublishVolume(ctx,
				harness.UnpublishRequest(volume, f.rack.Instance("b").ID))
			Expect(err).NotTo(HaveOccurred(), "the other instance does not list it")
		})
})
