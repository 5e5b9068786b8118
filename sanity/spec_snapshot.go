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

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// otherProject stands beside the driver's own on racks that are started with it.
const otherProject = "other"

var withOtherProject = RackOptions{Args: []string{"--project", otherProject}}

// foreignSnapshot takes a snapshot of a disk in the other project, by hand.
func (s *scene) foreignSnapshot(ctx context.Context) *oxide.Snapshot {
	GinkgoHelper()
	disk := s.rackDisk(ctx, fresh("foreign"), otherProject)
	snapshot, err := s.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
		Project: otherProject,
		Body: &oxide.SnapshotCreate{Name: oxide.Name(fresh("foreign")), Description: "by hand",
			Disk: oxide.NameOrId(disk.Id)},
	})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		Expect(s.rack.Client.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{
			Snapshot: oxide.NameOrId(snapshot.Id),
		})).To(Succeed())
	}, NodeTimeout(callTimeout))
	return snapshot
}

var _ = onStage("a volume from a snapshot", sceneOptions{rack: withOtherProject},
	func(s *scene) {
		var snapshot *csi.Snapshot
		BeforeEach(func(ctx SpecContext) {
			req := createRequest(fresh("origin"))
			withRange(2*gib, 2*gib)(req)
			snapshot = s.snapshotted(ctx, s.created(ctx, req))
		})
		restore := func() *csi.CreateVolumeRequest {
			req := fromSnapshot(createRequest(fresh("restored")), snapshot.GetSnapshotId())
			req.CapacityRange = nil
			return req
		}

		It("CV-14 says that there is no such snapshot", func(ctx SpecContext) {
			_, err := s.ctl.CreateVolume(ctx, fromSnapshot(createRequest(fresh("lost")), someUUID))
			expectRefusal(err, codes.NotFound, someUUID)
		})

		It("CV-15 cannot come from another project's snapshot", func(ctx SpecContext) {
			foreign := s.foreignSnapshot(ctx)
			_, err := s.ctl.CreateVolume(ctx,
				fromSnapshot(createRequest(fresh("foreign")), foreign.Id))
			expectRefusal(err, codes.InvalidArgument, "project")
		})

		It("CV-15 cannot have other blocks than its snapshot", func(ctx SpecContext) {
			req := restore()
			withParameter("blockSize", "512")(req)
			before := s.disks(ctx)
			_, err := s.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.InvalidArgument, "blockSize")
			Expect(s.disks(ctx)).To(HaveLen(len(before)))
		})

		It("CV-15 cannot have other blocks than its snapshot whose disk is gone",
			func(ctx SpecContext) {
				_, err := s.ctl.DeleteVolume(ctx,
					&csi.DeleteVolumeRequest{VolumeId: snapshot.GetSourceVolumeId()})
				Expect(err).NotTo(HaveOccurred())
				req := restore()
				withParameter("blockSize", "512")(req)
				_, err = s.ctl.CreateVolume(ctx, req)
				expectRefusal(err, codes.InvalidArgument, "blockSize")
				Expect(s.disks(ctx)).To(BeEmpty())
			})

		DescribeTable("CV-16 a snapshot that is not ready cannot be restored",
			func(ctx SpecContext, state string, code codes.Code) {
				s.pretendSnapshot(ctx, snapshot.GetSnapshotId(), state)
				_, err := s.ctl.CreateVolume(ctx, restore())
				expectRefusal(err, code)
			},
			Entry("CV-16 while it is created", "creating", codes.FailedPrecondition),
			Entry("CV-16 when it is faulted", "faulted", codes.FailedPrecondition),
			Entry("CV-16 when it is destroyed, which is gone", "destroyed", codes.NotFound),
		)

		It("CV-17 does not fit into less than its snapshot", func(ctx SpecContext) {
			req := restore()
			withRange(0, gib)(req)
			_, err := s.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.OutOfRange, "limit_bytes")
		})

		DescribeTable("CV-17 is as large as its snapshot, or larger when that is asked for",
			func(ctx SpecContext, resize change, want int64) {
				req := restore()
				resize(req)
				volume := s.created(ctx, req)
				Expect(volume.GetCapacityBytes()).To(Equal(want))
				Expect(int64(s.disk(ctx, volume.GetVolumeId()).Size)).To(Equal(want))
			},
			Entry("CV-17 without a range", change(func(*csi.CreateVolumeRequest) {}), 2*gib),
			Entry("CV-17 with a smaller requirement", withRange(gib, 0), 2*gib),
			Entry("CV-17 with a larger requirement", withRange(3*gib, 0), 3*gib),
		)

		It("CV-18 is found again by its name and source", func(ctx SpecContext) {
			req := restore()
			first := s.created(ctx, req)
			resp, err := s.ctl.CreateVolume(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetVolume().GetVolumeId()).To(Equal(first.GetVolumeId()))
			Expect(resp.GetVolume().GetContentSource().GetSnapshot().GetSnapshotId()).
				To(Equal(snapshot.GetSnapshotId()))
		})

		It("CV-19 is not a blank volume of the same name, nor one from another snapshot",
			func(ctx SpecContext) {
				req := restore()
				first := s.created(ctx, req)
				other := s.snapshotted(ctx, first)
				_, err := s.ctl.CreateVolume(ctx, fromSnapshot(req, other.GetSnapshotId()))
				expectRefusal(err, codes.AlreadyExists, "source")
				req.VolumeContentSource = nil
				_, err = s.ctl.CreateVolume(ctx, req)
				expectRefusal(err, codes.AlreadyExists, "source")
			})

		It("DV-4 and its snapshot outlive the volume that they came from", func(ctx SpecContext) {
			_, err := s.ctl.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: snapshot.GetSourceVolumeId()})
			Expect(err).NotTo(HaveOccurred())
			resp, err := s.ctl.GetSnapshot(ctx,
				&csi.GetSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetSnapshot().GetReadyToUse()).To(BeTrue())
			s.created(ctx, restore())
		})

		It("DS-4 does not hold its snapshot", func(ctx SpecContext) {
			volume := s.created(ctx, restore())
			_, err := s.ctl.DeleteSnapshot(ctx,
				&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			Expect(err).NotTo(HaveOccurred())
			Expect(stateOf(s.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
		})
	})

var _ = onStage("snapshots", sceneOptions{rack: withOtherProject}, snapshotSpecs)

func snapshotSpecs(s *scene) {
	create := func(volume, name string) *csi.CreateSnapshotRequest {
		return &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: name}
	}

	DescribeTable("a bad request does nothing and says why",
		func(ctx SpecContext, bad func(*csi.CreateSnapshotRequest), code codes.Code) {
			req := create(someUUID, fresh("bad"))
			bad(req)
			Expect(s.calls(ctx, func() {
				_, err := s.ctl.CreateSnapshot(ctx, req)
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
		_, err := s.ctl.CreateSnapshot(ctx, create(someUUID, fresh("lost")))
		expectRefusal(err, codes.NotFound, someUUID)
	})

	It("CS-5 is found again by its name and source, and not ready while it is created",
		func(ctx SpecContext) {
			volume := s.volume(ctx)
			req := create(volume.GetVolumeId(), fresh("again"))
			first, err := s.ctl.CreateSnapshot(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			id := first.GetSnapshot().GetSnapshotId()
			s.snapshotDeletedLater(id)
			Expect(first.GetSnapshot().GetReadyToUse()).To(BeTrue())
			Expect(first.GetSnapshot().GetCreationTime().IsValid()).To(BeTrue())
			Expect(first.GetSnapshot().GetSizeBytes()).To(Equal(gib))
			again, err := s.ctl.CreateSnapshot(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(again.GetSnapshot()).To(BeComparableTo(first.GetSnapshot(), protoCmp))
			s.pretendSnapshot(ctx, id, "creating")
			again, err = s.ctl.CreateSnapshot(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			Expect(again.GetSnapshot().GetSnapshotId()).To(Equal(id))
			Expect(again.GetSnapshot().GetReadyToUse()).To(BeFalse())
		})

	It("CS-6 cannot have the name of another volume's", func(ctx SpecContext) {
		one, other := s.volume(ctx), s.volume(ctx)
		name := fresh("same")
		resp, err := s.ctl.CreateSnapshot(ctx, create(one.GetVolumeId(), name))
		Expect(err).NotTo(HaveOccurred())
		s.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
		_, err = s.ctl.CreateSnapshot(ctx, create(other.GetVolumeId(), name))
		expectRefusal(err, codes.AlreadyExists)
	})

	It("CS-7 meets another of its name under way and is told so", func(ctx SpecContext) {
		volume := s.volume(ctx)
		s.switched(ctx, "snapshot_hold", "1s", "0s")
		req := create(volume.GetVolumeId(), fresh("flight"))
		expectOneAborted(atOnce(2, func(context.Context) error {
			resp, err := s.ctl.CreateSnapshot(ctx, req)
			if err == nil {
				s.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
			}
			return err
		}))
	})

	It("CS-8 needs capacity as a disk does", func(ctx SpecContext) {
		volume := s.volume(ctx)
		s.switched(ctx, "quota_bytes", gib+gib/2, 1024*gib)
		_, err := s.ctl.CreateSnapshot(ctx, create(volume.GetVolumeId(), fresh("full")))
		expectRefusal(err, codes.ResourceExhausted)
	})

	It("CS-9 that faulted is an error, which its deletion ends", func(ctx SpecContext) {
		volume := s.volume(ctx)
		req := create(volume.GetVolumeId(), fresh("faulted"))
		resp, err := s.ctl.CreateSnapshot(ctx, req)
		Expect(err).NotTo(HaveOccurred())
		id := resp.GetSnapshot().GetSnapshotId()
		s.snapshotDeletedLater(id)
		s.pretendSnapshot(ctx, id, "faulted")
		_, err = s.ctl.CreateSnapshot(ctx, req)
		expectRefusal(err, codes.Internal, "delete it")
	})

	It("CS-10 cannot be taken of a disk on local storage", func(ctx SpecContext) {
		req := createRequest(fresh("local"))
		withParameter("diskType", "local")(req)
		volume := s.created(ctx, req)
		_, err := s.ctl.CreateSnapshot(ctx, create(volume.GetVolumeId(), fresh("local")))
		expectRefusal(err, codes.FailedPrecondition, "local")
	})

	It("DS-2 whose ID is no UUID is gone, without a call to the rack", func(ctx SpecContext) {
		Expect(s.calls(ctx, func() {
			_, err := s.ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: "name"})
			Expect(err).NotTo(HaveOccurred())
		})).To(BeEmpty())
	})

	It("DS-5 that is being deleted is not deleted twice", func(ctx SpecContext) {
		snapshot := s.snapshotted(ctx, s.volume(ctx))
		s.fault(ctx, adminapi.Fault{Operation: "snapshot_delete", Phase: adminapi.Before,
			Delay: adminapi.Duration(time.Second), Times: 1})
		expectOneAborted(atOnce(2, func(context.Context) error {
			_, err := s.ctl.DeleteSnapshot(ctx,
				&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			return err
		}))
	})

	It("CAP-10 of an attached volume can be taken", func(ctx SpecContext) {
		volume := s.volume(ctx)
		s.published(ctx, volume, "a")
		Expect(s.snapshotted(ctx, volume).GetReadyToUse()).To(BeTrue())
	})
}
