//go:build linux

package sanity

import (
	"context"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// otherProject stands beside the driver's own on racks that are started with it.
const otherProject = "other"

var withOtherProject = harness.RackOptions{Args: []string{"--project", otherProject}}

// foreignSnapshot takes a snapshot of a disk in the other project, by hand.
func (f *rackFixture) foreignSnapshot(ctx context.Context) *oxide.Snapshot {
	GinkgoHelper()
	disk := f.rackDisk(ctx, fresh("foreign"), otherProject)
	snapshot, err := f.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
		Project: otherProject,
		Body: &oxide.SnapshotCreate{Name: oxide.Name(fresh("foreign")), Description: "by hand",
			Disk: oxide.NameOrId(disk.Id)},
	})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.Client.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{
			Snapshot: oxide.NameOrId(snapshot.Id),
		})).To(Succeed())
	}, NodeTimeout(callTimeout))
	return snapshot
}

var _ = describeController("a volume from a snapshot", fixtureOptions{rack: withOtherProject},
	func(f *fixture) {
		var snapshot *csi.Snapshot
		BeforeEach(func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("origin"))
			withRange(2*harness.GiB, 2*harness.GiB)(req)
			snapshot = f.snapshotted(ctx, f.created(ctx, req))
		})
		restore := func() *csi.CreateVolumeRequest {
			req := harness.FromSnapshot(harness.CreateRequest(fresh("restored")), snapshot.GetSnapshotId())
			req.CapacityRange = nil
			return req
		}

		It("CV-14 says that there is no such snapshot", func(ctx SpecContext) {
			_, err := f.ctl.CreateVolume(ctx, harness.FromSnapshot(harness.CreateRequest(fresh("lost")),
				someUUID))
			expectRefusal(err, codes.NotFound, someUUID)
		})

		It("CV-15 cannot come from another project's snapshot", func(ctx SpecContext) {
			foreign := f.foreignSnapshot(ctx)
			_, err := f.ctl.CreateVolume(ctx,
				harness.FromSnapshot(harness.CreateRequest(fresh("foreign")), foreign.Id))
			expectRefusal(err, codes.InvalidArgument, "project")
		})

		It("CV-15 cannot have other blocks than its snapshot", func(ctx SpecContext) {
			req := restore()
			withParameter("blockSize", "512")(req)
			before := f.disks(ctx)
			_, err := f.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.InvalidArgument, "blockSize")
			Expect(f.disks(ctx)).To(HaveLen(len(before)))
		})

		It("CV-15 cannot have other blocks than its snapshot whose disk is gone",
			func(ctx SpecContext) {
				_, err := f.ctl.DeleteVolume(ctx,
					&csi.DeleteVolumeRequest{VolumeId: snapshot.GetSourceVolumeId()})
				Expect(err).NotTo(HaveOccurred())
				req := restore()
				withParameter("blockSize", "512")(req)
				_, err = f.ctl.CreateVolume(ctx, req)
				expectRefusal(err, codes.InvalidArgument, "blockSize")
				Expect(f.disks(ctx)).To(BeEmpty())
			})

		DescribeTable("CV-16 a snapshot that is not ready cannot be restored",
			func(ctx SpecContext, state string, code codes.Code) {
				f.pretendSnapshot(ctx, snapshot.GetSnapshotId(), state)
				_, err := f.ctl.CreateVolume(ctx, restore())
				expectRefusal(err, code)
			},
			Entry("CV-16 while it is created", "creating", codes.FailedPrecondition),
			Entry("CV-16 when it is faulted", "faulted", codes.FailedPrecondition),
			Entry("CV-16 when it is destroyed, which is gone", "destroyed", codes.NotFound),
		)

		It("CV-17 does not fit into less than its snapshot", func(ctx SpecContext) {
			req := restore()
			withRange(0, harness.GiB)(req)
			_, err := f.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.OutOfRange, "limit_bytes")
		})

		DescribeTable("CV-17 is as large as its snapshot, or larger when that is asked for",
			func(ctx SpecContext, resize change, want int64) {
				req := restore()
				resize(req)
				volume := f.created(ctx, req)
				Expect(volume.GetCapacityBytes()).To(Equal(want))
				Expect(int64(f.disk(ctx, volume.GetVolumeId()).Size)).To(Equal(want))
			},
			Entry("CV-17 without a range", change(func(*csi.CreateVolumeRequest) {}), 2*harness.GiB),
			Entry("CV-17 with a smaller requirement", withRange(harness.GiB, 0), 2*harness.GiB),
			Entry("CV-17 with a larger requirement", withRange(3*harness.GiB, 0), 3*harness.GiB),
		)

		It("CV-18 is found again by its name and source", func(ctx SpecContext) {
			req := restore()
			first := f.created(ctx, req)
			resp, err := f.ctl.CreateVolume(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetVolume().GetVolumeId()).To(Equal(first.GetVolumeId()))
			Expect(resp.GetVolume().GetContentSource().GetSnapshot().GetSnapshotId()).
				To(Equal(snapshot.GetSnapshotId()))
		})

		It("CV-19 is not a blank volume of the same name, nor one from another snapshot",
			func(ctx SpecContext) {
				req := restore()
				first := f.created(ctx, req)
				other := f.snapshotted(ctx, first)
				_, err := f.ctl.CreateVolume(ctx, harness.FromSnapshot(req, other.GetSnapshotId()))
				expectRefusal(err, codes.AlreadyExists, "source")
				req.VolumeContentSource = nil
				_, err = f.ctl.CreateVolume(ctx, req)
				expectRefusal(err, codes.AlreadyExists, "source")
			})

		It("DV-4 and its snapshot outlive the volume that they came from", func(ctx SpecContext) {
			_, err := f.ctl.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: snapshot.GetSourceVolumeId()})
			Expect(err).NotTo(HaveOccurred())
			resp, err := f.ctl.GetSnapshot(ctx,
				&csi.GetSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetSnapshot().GetReadyToUse()).To(BeTrue())
			f.created(ctx, restore())
		})

		It("DS-4 does not hold its snapshot", func(ctx SpecContext) {
			volume := f.created(ctx, restore())
			_, err := f.ctl.DeleteSnapshot(ctx,
				&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			Expect(err).NotTo(HaveOccurred())
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
		})
	})

var _ = describeController("snapshots", fixtureOptions{rack: withOtherProject}, snapshotSpecs)

func snapshotSpecs(f *fixture) {
	create := func(volume, name string) *csi.CreateSnapshotRequest {
		return &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: name}
	}

	DescribeTable("a bad request does nothing and says why",
		func(ctx SpecContext, bad func(*csi.CreateSnapshotRequest), code codes.Code) {
			req := create(someUUID, fresh("bad"))
			bad(req)
			Expect(f.calls(ctx, func() {
				_, err := f.ctl.CreateSnapshot(ctx, req)
				expectRefusal(err, code)
			})).To(BeEmpty())
		},
		Entry("CS-2 a name of 129 bytes", func(req *csi.CreateSnapshotRequest) {
			req.Name = strings.Repeat("n", 129)
		}, codes.InvalidArgument),
		Entry("CS-2 a name with a control character", func(req *csi.CreateSnapshotRequest) {
			req.Name = "ring\a"
		}, codes.InvalidArgument),
		Entry("CS-2 an unknown parameter", func(req *csi.CreateSnapshotRequest) {
			req.Parameters = map[string]string{"color": "red"}
		}, codes.InvalidArgument),
		Entry("CS-3 where it is to be reachable", func(req *csi.CreateSnapshotRequest) {
			req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{
				{Segments: map[string]string{topologyRack: "r1"}},
			}}
		}, codes.InvalidArgument),
		Entry("CS-4 a volume whose ID is no UUID", func(req *csi.CreateSnapshotRequest) {
			req.SourceVolumeId = "volume"
		}, codes.NotFound),
	)

	It("CS-4 cannot be taken of a volume that is not there", func(ctx SpecContext) {
		_, err := f.ctl.CreateSnapshot(ctx, create(someUUID, fresh("lost")))
		expectRefusal(err, codes.NotFound, someUUID)
	})

	It("CS-5 is found again by its name and source, and not ready while it is created",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			req := create(volume.GetVolumeId(), fresh("again"))
			first, err := f.ctl.CreateSnapshot(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			id := first.GetSnapshot().GetSnapshotId()
			f.snapshotDeletedLater(id)
			Expect(first.GetSnapshot().GetReadyToUse()).To(BeTrue())
			Expect(first.GetSnapshot().GetCreationTime().IsValid()).To(BeTrue())
			Expect(first.GetSnapshot().GetSizeBytes()).To(Equal(harness.GiB))
			again, err := f.ctl.CreateSnapshot(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(again.GetSnapshot()).To(BeComparableTo(first.GetSnapshot(), protoCmp))
			f.pretendSnapshot(ctx, id, "creating")
			again, err = f.ctl.CreateSnapshot(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(again.GetSnapshot().GetSnapshotId()).To(Equal(id))
			Expect(again.GetSnapshot().GetReadyToUse()).To(BeFalse())
		})

	It("CS-6 cannot have the name of another volume's", func(ctx SpecContext) {
		one, other := f.volume(ctx), f.volume(ctx)
		name := fresh("same")
		resp, err := f.ctl.CreateSnapshot(ctx, create(one.GetVolumeId(), name))
		Expect(err).NotTo(HaveOccurred())
		f.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
		_, err = f.ctl.CreateSnapshot(ctx, create(other.GetVolumeId(), name))
		expectRefusal(err, codes.AlreadyExists)
	})

	It("CS-7 meets another of its name under way and is aborted", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.switched(ctx, "snapshot_hold", "1s", "0s")
		req := create(volume.GetVolumeId(), fresh("flight"))
		expectOneAborted(atOnce(2, func(context.Context) error {
			resp, err := f.ctl.CreateSnapshot(ctx, req)
			if err == nil {
				f.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
			}
			return err
		}))
	})

	It("CS-8 needs capacity as a disk does", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.switched(ctx, "quota_bytes", harness.GiB+harness.GiB/2, 1024*harness.GiB)
		_, err := f.ctl.CreateSnapshot(ctx, create(volume.GetVolumeId(), fresh("full")))
		expectRefusal(err, codes.ResourceExhausted)
	})

	It("CS-9 that faulted is an error, which its deletion ends", func(ctx SpecContext) {
		volume := f.volume(ctx)
		req := create(volume.GetVolumeId(), fresh("faulted"))
		resp, err := f.ctl.CreateSnapshot(ctx, req)
		Expect(err).NotTo(HaveOccurred())
		id := resp.GetSnapshot().GetSnapshotId()
		f.snapshotDeletedLater(id)
		f.pretendSnapshot(ctx, id, "faulted")
		_, err = f.ctl.CreateSnapshot(ctx, req)
		expectRefusal(err, codes.Internal, "delete it")
	})

	It("CS-10 cannot be taken of a disk on local storage", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("local"))
		withParameter("diskType", "local")(req)
		volume := f.created(ctx, req)
		_, err := f.ctl.CreateSnapshot(ctx, create(volume.GetVolumeId(), fresh("local")))
		expectRefusal(err, codes.FailedPrecondition, "local")
	})

	It("DS-2 whose ID is no UUID is gone, without a call to the rack", func(ctx SpecContext) {
		Expect(f.calls(ctx, func() {
			_, err := f.ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: "name"})
			Expect(err).NotTo(HaveOccurred())
		})).To(BeEmpty())
	})

	It("DS-5 that is being deleted is not deleted twice", func(ctx SpecContext) {
		snapshot := f.snapshotted(ctx, f.volume(ctx))
		f.fault(ctx, adminapi.Fault{Operation: "snapshot_delete", Phase: adminapi.Before,
			Delay: adminapi.Duration(time.Second), Times: 1})
		expectOneAborted(atOnce(2, func(context.Context) error {
			_, err := f.ctl.DeleteSnapshot(ctx,
				&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			return err
		}))
	})

	It("CAP-10 of an attached volume can be taken", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		Expect(f.snapshotted(ctx, volume).GetReadyToUse()).To(BeTrue())
	})
}
