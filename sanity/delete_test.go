//go:build linux

package sanity

import (
	"context"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("DeleteVolume", fixtureOptions{}, deleteVolumeSpecs)

func deleteVolumeSpecs(f *fixture) {
	deleteVolume := func(ctx context.Context, id string) error {
		_, err := f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		return err
	}

	It("DV-2 an ID that is no UUID is gone, and the disk that it names is left alone",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("named"), f.rack.Project)
			Expect(f.calls(ctx, func() {
				Expect(deleteVolume(ctx, string(disk.Name))).To(Succeed())
			})).To(BeEmpty())
			Expect(stateOf(f.disk(ctx, disk.Id))).To(Equal("detached"))
		})

	It("DV-3 an attached volume is neither deleted nor detached", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		node := f.rack.Instance("a").ID
		expectRefusal(deleteVolume(ctx, volume.GetVolumeId()), codes.FailedPrecondition, node)
		Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("attached to " + node))
	})

	DescribeTable("DV-3 what state the disk is in decides, not the rack's words",
		func(ctx SpecContext, state string, code codes.Code) {
			volume := f.volume(ctx)
			instance := ""
			if state == "attaching" || state == "detaching" {
				instance = f.rack.Instance("a").ID
			}
			f.pretend(ctx, volume, state, instance)
			f.refuse(ctx, "disk_delete", "", http.StatusBadRequest, "InvalidRequest", "no, sorry")
			expectRefusal(deleteVolume(ctx, volume.GetVolumeId()), code, state)
		},
		Entry("DV-3 attaching", "attaching", codes.FailedPrecondition),
		Entry("DV-3 detaching", "detaching", codes.FailedPrecondition),
		Entry("DV-3 creating", "creating", codes.Aborted),
		Entry("DV-3 maintenance, while a snapshot is taken", "maintenance", codes.Aborted),
	)

	It("DV-5 is not begun twice", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.fault(ctx, adminapi.Fault{Operation: "disk_delete", Phase: adminapi.Before,
			Delay: adminapi.Duration(time.Second), Times: 1})
		expectOneAborted(atOnce(2, func(context.Context) error {
			return deleteVolume(ctx, volume.GetVolumeId())
		}))
	})

	It("DV-5 waits for a publish that is under way", func(ctx SpecContext) {
		volume := f.volume(ctx)
		node := f.rack.Instance("a").ID
		f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After,
			Delay: adminapi.Duration(2 * time.Second),
			Times: 1})
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

	It("OX-6 a disk that cannot be found is not gone when the project cannot be found either",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.refuse(ctx, "disk_delete", "", http.StatusNotFound, "ObjectNotFound", "not found")
			f.refuse(ctx, "disk_view", "", http.StatusNotFound, "ObjectNotFound", "not found")
			f.refuse(ctx, "project_view", "", http.StatusNotFound, "ObjectNotFound", "not found")
			Expect(deleteVolume(ctx, volume.GetVolumeId())).NotTo(Succeed())
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

	It("D-69 DiskNotOurs: a boot disk is not deleted, not even when it could be",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("boot"), f.rack.Project)
			instance := f.rack.Instance("b").ID
			f.published(ctx, &csi.Volume{VolumeId: disk.Id}, "b")
			f.stopInstance(ctx, instance)
			id := oxide.NameOrId(disk.Id)
			f.setBootDisk(ctx, instance, &id)
			DeferCleanup(func(ctx SpecContext) {
				f.setBootDisk(ctx, instance, nil)
				f.startInstance(ctx, instance)
			}, NodeTimeout(callTimeout))
			expectReason(deleteVolume(ctx, disk.Id), codes.FailedPrecondition, "DiskNotOurs")
			Expect(stateOf(f.disk(ctx, disk.Id))).To(Equal("attached to " + instance))
		})

	It("D-69 DiskNotOurs: a cluster does not delete another's volume", func(ctx SpecContext) {
		other := f.controller(ctx,
			harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "two"}})
		volume := f.volume(ctx)
		_, err := other.Controller().DeleteVolume(ctx,
			&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
		expectReason(err, codes.FailedPrecondition, "DiskNotOurs")
		Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
	})

	It("D-69 DiskNotOurs: a description that was copied does not make a disk the driver's",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			copied, err := f.rack.Client.DiskCreate(ctx, oxide.DiskCreateParams{
				Project: oxide.NameOrId(f.rack.Project),
				Body: &oxide.DiskCreate{Name: oxide.Name(fresh("copied")),
					Description: f.disk(ctx, volume.GetVolumeId()).Description,
					Size:        oxide.ByteCount(harness.GiB), DiskBackend: harness.BlankBackend()},
			})
			Expect(err).NotTo(HaveOccurred())
			f.removedLater(copied.Id)
			expectReason(deleteVolume(ctx, copied.Id), codes.FailedPrecondition, "DiskNotOurs")
			Expect(stateOf(f.disk(ctx, copied.Id))).To(Equal("detached"))
		})

	It("D-69 DiskNotOurs: a snapshot taken by hand is not deleted", func(ctx SpecContext) {
		snapshot, err := f.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
			Project: oxide.NameOrId(f.rack.Project),
			Body: &oxide.SnapshotCreate{Name: oxide.Name(fresh("by-hand")),
				Description: "before the upgrade",
				Disk:        oxide.NameOrId(f.volume(ctx).GetVolumeId())},
		})
		Expect(err).NotTo(HaveOccurred())
		f.snapshotRemovedLater(snapshot.Id)
		Expect(f.calls(ctx, func() {
			_, err := f.ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot.Id})
			expectReason(err, codes.FailedPrecondition, "DiskNotOurs")
		})).To(Equal([]string{"snapshot_view"}))
		again, err := f.rack.Client.SnapshotView(ctx,
			oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(snapshot.Id)})
		Expect(err).NotTo(HaveOccurred())
		Expect(again.State).To(Equal(oxide.SnapshotStateReady))
	})

	It("OX-6 a page that is not the rack's does not prove that a disk is gone",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.fault(ctx, adminapi.Fault{Operation: "disk_delete", Phase: adminapi.Instead,
				Response: &adminapi.Response{
					Status: http.StatusNotFound, ContentType: "text/html",
					Body: "<html>404 no such page</html>",
				}})
			expectRefusal(deleteVolume(ctx, volume.GetVolumeId()), codes.Internal)
		})
}

// removedLater deletes a disk that the driver did not make, and so does not delete, by hand when
// the spec ends.
func (f *fixture) removedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.Client.DiskDelete(ctx,
			oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)})).To(Succeed())
	}, NodeTimeout(callTimeout))
}

// snapshotRemovedLater does the same for a snapshot.
func (f *fixture) snapshotRemovedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.Client.SnapshotDelete(ctx,
			oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)})).To(Succeed())
	}, NodeTimeout(callTimeout))
}

var _ = describeController("ValidateVolumeCapabilities", fixtureOptions{}, func(f *fixture) {
	request := func(volume *csi.Volume) *csi.ValidateVolumeCapabilitiesRequest {
		return &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: volume.GetVolumeId(), VolumeContext: volume.GetVolumeContext(),
			VolumeCapabilities: []*csi.VolumeCapability{harness.Mounted(""), harness.Raw()},
		}
	}

	It("VC-2 an ID that is no UUID is unknown, without a call to the rack",
		func(ctx SpecContext) {
			Expect(f.calls(ctx, func() {
				_, err := f.ctl.ValidateVolumeCapabilities(ctx,
					request(&csi.Volume{VolumeId: "name"}))
				expectRefusal(err, codes.NotFound)
			})).To(BeEmpty())
		})

	forBoth := func(ctx context.Context) *csi.Volume {
		req := harness.CreateRequest(fresh("both"))
		req.VolumeCapabilities = append(req.VolumeCapabilities, harness.Raw())
		return f.created(ctx, req)
	}

	It("VC-3 confirms what it has checked", func(ctx SpecContext) {
		volume := forBoth(ctx)
		resp, err := f.ctl.ValidateVolumeCapabilities(ctx, request(volume))
		Expect(err).NotTo(HaveOccurred())
		Expect(resp.GetConfirmed().GetVolumeCapabilities()).To(HaveLen(2))
		Expect(resp.GetConfirmed().GetVolumeContext()).To(Equal(volume.GetVolumeContext()))
	})

	It("VC-4 does not confirm raw access to a volume for filesystems, nor the reverse",
		func(ctx SpecContext) {
			for _, created := range []*csi.VolumeCapability{harness.Mounted(""), harness.Raw()} {
				req := harness.CreateRequest(fresh("one-use"))
				req.VolumeCapabilities = []*csi.VolumeCapability{created}
				volume := f.created(ctx, req)
				for _, wanted := range []*csi.VolumeCapability{harness.Mounted(""), harness.Raw()} {
					validate := request(volume)
					validate.VolumeCapabilities = []*csi.VolumeCapability{wanted}
					resp, err := f.ctl.ValidateVolumeCapabilities(ctx, validate)
					Expect(err).NotTo(HaveOccurred())
					same := (created.GetBlock() == nil) == (wanted.GetBlock() == nil)
					Expect(resp.GetConfirmed() != nil).To(Equal(same), resp.GetMessage())
				}
			}
		})

	DescribeTable("does not confirm what it cannot keep, which is no error",
		func(ctx SpecContext, bad func(*csi.ValidateVolumeCapabilitiesRequest), word string) {
			req := request(forBoth(ctx))
			bad(req)
			resp, err := f.ctl.ValidateVolumeCapabilities(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetConfirmed()).To(BeNil())
			Expect(resp.GetMessage()).To(ContainSubstring(word))
		},
		Entry("VC-4 many writers", func(req *csi.ValidateVolumeCapabilitiesRequest) {
			harness.InMode(
				csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, req.VolumeCapabilities[1])
		}, "MULTI_NODE_MULTI_WRITER"),
		Entry("VC-4 an unknown filesystem", func(req *csi.ValidateVolumeCapabilitiesRequest) {
			req.VolumeCapabilities[0].GetMount().FsType = "ntfs"
		}, "ntfs"),
		Entry("VC-5 another disk's context", func(req *csi.ValidateVolumeCapabilitiesRequest) {
			req.VolumeContext = map[string]string{"diskName": "csi-of-another-disk0"}
		}, "diskName"),
		Entry("VC-5 an unknown parameter", func(req *csi.ValidateVolumeCapabilitiesRequest) {
			req.Parameters = map[string]string{"color": "red"}
		}, "color"),
		Entry("VC-5 other blocks", func(req *csi.ValidateVolumeCapabilitiesRequest) {
			req.Parameters = map[string]string{"blockSize": "512"}
		}, "blockSize"),
	)
})
