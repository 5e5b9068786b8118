//go:build linux

package sanity

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("DeleteVolume", fixtureOptions{}, deleteVolumeSpecs)

func deleteVolumeSpecs(f *fixture) {
	deleteVolume := func(ctx context.Context, id string) error {
		return errOf(f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}))
	}

	It("DV-3 an attached volume is neither deleted nor detached", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		node := f.rack.Instance("a").ID
		expectRefusal(deleteVolume(ctx, volume.GetVolumeId()), codes.FailedPrecondition, node)
		Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("attached to " + node))
	})

	It("DV-5 waits for a publish that is under way", func(ctx SpecContext) {
		volume := f.volume(ctx)
		node := f.rack.Instance("a").ID
		f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After,
			Delay: adminapi.Duration(time.Second), Times: 1})
		publish := inBackground(func() (*csi.ControllerPublishVolumeResponse, error) {
			return f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
		})
		f.awaitDisk(ctx, "attached")
		expectRefusal(deleteVolume(ctx, volume.GetVolumeId()), codes.Aborted)
		publish()
		f.unpublishedLater(volume, node)
	})

	It("DV-6 leaves nothing on the rack", func(ctx SpecContext) {
		volume := f.volume(ctx)
		Expect(deleteVolume(ctx, volume.GetVolumeId())).To(Succeed())
		_, err := f.rack.Client.DiskView(ctx,
			oxide.DiskViewParams{Disk: oxide.NameOrId(volume.GetVolumeId())})
		Expect(err).To(MatchError(oxide.ErrObjectNotFound))
		Expect(f.disks(ctx)).To(BeEmpty())
		Expect(deleteVolume(ctx, volume.GetVolumeId())).To(Succeed(), "the second time")
	})

	It("D-69 DiskNotOurs: a disk made by hand is not deleted, whatever a volume says of it",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("by-hand"), f.rack.Project)
			Expect(f.calls(ctx, func() {
				err := deleteVolume(ctx, disk.Id)
				expectReason(err, codes.FailedPrecondition, "DiskNotOurs")
				expectRefusal(err, codes.FailedPrecondition, "Retain", string(disk.Name))
			})).To(Equal([]string{"disk_view"}))
			Expect(stateOf(f.disk(ctx, disk.Id))).To(Equal("detached"))
		})
}

// removedLater deletes a disk when the spec ends. The driver did not create the disk, so it does
// not delete it.
func (f *fixture) removedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.Client.DiskDelete(ctx,
			oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)})).To(Succeed())
	}, NodeTimeout(callTimeout))
}
