//go:build linux

package sanity

import (
	"context"
	"maps"
	"net/http"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// listed is what ListVolumes shows, by ID.
func (f *fixture) listed(
	ctx context.Context, ctl csi.ControllerClient,
) map[string]*csi.ListVolumesResponse_Entry {
	GinkgoHelper()
	resp, err := ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
	Expect(err).NotTo(HaveOccurred())
	Expect(resp.GetNextToken()).To(BeEmpty())
	volumes := map[string]*csi.ListVolumesResponse_Entry{}
	for _, entry := range resp.GetEntries() {
		volumes[entry.GetVolume().GetVolumeId()] = entry
	}
	Expect(volumes).To(HaveLen(len(resp.GetEntries())), "no volume is listed twice")
	return volumes
}

// listedIDs are their IDs.
func (f *fixture) listedIDs(ctx context.Context, ctl csi.ControllerClient) []string {
	GinkgoHelper()
	return slices.Collect(maps.Keys(f.listed(ctx, ctl)))
}

var _ = describeController("ListVolumes", fixtureOptions{}, func(f *fixture) {
	It("LV-1 a negative number of entries is refused", func(ctx SpecContext) {
		_, err := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: -1})
		expectRefusal(err, codes.InvalidArgument, "max_entries")
	})

	It("LV-2 a token that the driver did not give is refused, with entries and without",
		func(ctx SpecContext) {
			for _, token := range []string{"invalid-token", "-1", "7", someUUID + "x"} {
				_, err := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: token})
				expectRefusal(err, codes.Aborted)
			}
		})

	It("LV-3 without a limit everything comes in one answer", func(ctx SpecContext) {
		ids := []string{}
		for range 5 {
			ids = append(ids, f.volume(ctx).GetVolumeId())
		}
		Expect(f.listedIDs(ctx, f.ctl)).To(ConsistOf(ids))
	})

	It("LV-4 pages hold what was asked for, and together everything", func(ctx SpecContext) {
		// A disk that is not a volume is left out before the entries are counted.
		f.rackDisk(ctx, fresh("foreign"), f.rack.Project)
		ids := []string{}
		for range 5 {
			ids = append(ids, f.volume(ctx).GetVolumeId())
		}
		for _, size := range []int32{1, 2, 3, 5, 6} {
			Expect(f.pages(ctx, size)).To(ConsistOf(ids), "in pages of %d", size)
		}
	})

	It("LV-4 a token is good for the rest, even when a volume of the page is deleted",
		func(ctx SpecContext) {
			for range 4 {
				f.volume(ctx)
			}
			first, err := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 2})
			Expect(err).NotTo(HaveOccurred())
			seen := volumeIDs(first.GetEntries())
			_, err = f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: seen[1]})
			Expect(err).NotTo(HaveOccurred())
			rest, err := f.ctl.ListVolumes(ctx,
				&csi.ListVolumesRequest{StartingToken: first.GetNextToken()})
			Expect(err).NotTo(HaveOccurred())
			Expect(rest.GetEntries()).To(HaveLen(2))
			Expect(volumeIDs(rest.GetEntries())).NotTo(ContainElements(seen[0], seen[1]))
		})

	It("LV-5 every volume says where it is published", func(ctx SpecContext) {
		free, used := f.volume(ctx), f.volume(ctx)
		f.published(ctx, used, "b")
		volumes := f.listed(ctx, f.ctl)
		Expect(volumes[free.GetVolumeId()].GetStatus()).NotTo(BeNil())
		Expect(volumes[free.GetVolumeId()].GetStatus().GetPublishedNodeIds()).To(BeEmpty())
		Expect(volumes[used.GetVolumeId()].GetStatus().GetPublishedNodeIds()).
			To(ConsistOf(f.rack.Instance("b").ID))
	})

	DescribeTable("LV-5 a disk between two places still counts as published",
		func(ctx SpecContext, state string) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			f.pretend(ctx, volume, state, node)
			Expect(f.listed(ctx, f.ctl)[volume.GetVolumeId()].GetStatus().GetPublishedNodeIds()).
				To(ConsistOf(node))
		},
		Entry("LV-5 attaching", "attaching"),
		Entry("LV-5 detaching", "detaching"),
	)

	It("LV-6 a volume is listed as soon as it is there, and no longer", func(ctx SpecContext) {
		resp, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("brief")))
		Expect(err).NotTo(HaveOccurred())
		id := resp.GetVolume().GetVolumeId()
		Expect(f.listed(ctx, f.ctl)).To(HaveKey(id))
		_, err = f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		Expect(err).NotTo(HaveOccurred())
		Expect(f.listed(ctx, f.ctl)).NotTo(HaveKey(id))
	})

	It("D-69 disks that others made are listed only while they are attached",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("static"), f.rack.Project)
			Expect(f.listed(ctx, f.ctl)).NotTo(HaveKey(disk.Id))
			f.published(ctx, &csi.Volume{VolumeId: disk.Id}, "a")
			Expect(f.listed(ctx, f.ctl)[disk.Id].GetStatus().GetPublishedNodeIds()).
				To(ConsistOf(f.rack.Instance("a").ID))
		})

	It("D-69 a boot disk is no volume", func(ctx SpecContext) {
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
		Expect(f.listed(ctx, f.ctl)).NotTo(HaveKey(disk.Id))
	})

	It("D-69 two clusters in one project do not see each other's volumes",
		func(ctx SpecContext) {
			one := f.controller(ctx,
				harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "one"}})
			two := f.controller(ctx,
				harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "two"}})
			resp, err := one.Controller().CreateVolume(ctx, harness.CreateRequest(fresh("of-one")))
			Expect(err).NotTo(HaveOccurred())
			id := resp.GetVolume().GetVolumeId()
			f.removedLater(id)
			Expect(f.listed(ctx, one.Controller())).To(HaveKey(id))
			Expect(f.listed(ctx, two.Controller())).NotTo(HaveKey(id))
		})

	It("E-17 two clusters in one project may use the same names for their own",
		func(ctx SpecContext) {
			one := f.controller(ctx,
				harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "one"}})
			two := f.controller(ctx,
				harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "two"}})
			name := fresh("db")
			var ids, snapshots []string
			for _, p := range []*harness.Plugin{f.plugin, one, two, one, two} {
				resp, err := p.Controller().CreateVolume(ctx, harness.CreateRequest(name))
				Expect(err).NotTo(HaveOccurred())
				ids = append(ids, resp.GetVolume().GetVolumeId())
				taken, err := p.Controller().CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
					Name: name, SourceVolumeId: resp.GetVolume().GetVolumeId()})
				Expect(err).NotTo(HaveOccurred())
				snapshots = append(snapshots, taken.GetSnapshot().GetSnapshotId())
			}
			Expect(ids[3:]).To(Equal(ids[1:3]), "the repeated creates")
			Expect(snapshots[3:]).To(Equal(snapshots[1:3]), "the repeated snapshots")
			Expect(f.disks(ctx)).To(HaveLen(3))
			for i, p := range []*harness.Plugin{f.plugin, one, two} {
				_, err := p.Controller().DeleteSnapshot(ctx,
					&csi.DeleteSnapshotRequest{SnapshotId: snapshots[i]})
				Expect(err).NotTo(HaveOccurred())
				_, err = p.Controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: ids[i]})
				Expect(err).NotTo(HaveOccurred())
				Expect(f.disks(ctx)).To(HaveLen(2 - i))
			}
		})

	It("D-25 B-6 a volume's context is the same wherever it is returned", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("context"))
		req.Parameters = map[string]string{
			"blockSize": "4096", "mkfsOptions": "bytesPerInode=16384,reservedPercent=0",
		}
		volume := f.created(ctx, req)
		again, err := f.ctl.CreateVolume(ctx, req)
		Expect(err).NotTo(HaveOccurred())
		got, err := f.ctl.ControllerGetVolume(ctx,
			&csi.ControllerGetVolumeRequest{VolumeId: volume.GetVolumeId()})
		Expect(err).NotTo(HaveOccurred())
		for _, shown := range []*csi.Volume{again.GetVolume(), got.GetVolume(),
			f.listed(ctx, f.ctl)[volume.GetVolumeId()].GetVolume()} {
			Expect(shown).To(BeComparableTo(volume, protoCmp))
		}
	})
})

// pages lists everything in pages of a size, which no page may exceed.
func (f *fixture) pages(ctx context.Context, size int32) []string {
	GinkgoHelper()
	ids := []string{}
	token := ""
	for {
		resp, err := f.ctl.ListVolumes(ctx,
			&csi.ListVolumesRequest{MaxEntries: size, StartingToken: token})
		Expect(err).NotTo(HaveOccurred())
		Expect(len(resp.GetEntries())).To(BeNumerically("<=", size))
		ids = append(ids, volumeIDs(resp.GetEntries())...)
		token = resp.GetNextToken()
		if token == "" {
			return ids
		}
		Expect(resp.GetEntries()).To(HaveLen(int(size)), "only the last page may be short")
	}
}

var _ = describeController("one volume, its health, and the capacity", fixtureOptions{},
	func(f *fixture) {
		It("GV-1 a volume must be named", func(ctx SpecContext) {
			_, err := f.ctl.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{})
			expectRefusal(err, codes.InvalidArgument, "volume_id")
		})

		DescribeTable("GV-2 a volume that is not there", func(ctx SpecContext, id string) {
			_, err := f.ctl.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
			expectRefusal(err, codes.NotFound, id)
		},
			Entry("GV-2 with a UUID", someUUID),
			Entry("GV-2 with an ID that is none", "volume"),
		)

		It("GV-3 a volume is returned as it was created, with its node", func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.published(ctx, volume, "a")
			resp, err := f.ctl.ControllerGetVolume(ctx,
				&csi.ControllerGetVolumeRequest{VolumeId: volume.GetVolumeId()})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetVolume()).To(BeComparableTo(volume, protoCmp))
			Expect(resp.GetStatus().GetPublishedNodeIds()).To(ConsistOf(f.rack.Instance("a").ID))
		})

		It("VH-2 the list of unhealthy volumes refuses bad pages as every list does",
			func(ctx SpecContext) {
				_, err := f.ctl.ControllerListVolumeHealth(ctx,
					&csi.ControllerListVolumeHealthRequest{StartingToken: "invalid-token"})
				expectRefusal(err, codes.Aborted)
				_, err = f.ctl.ControllerListVolumeHealth(ctx,
					&csi.ControllerListVolumeHealthRequest{MaxEntries: -1})
				expectRefusal(err, codes.InvalidArgument)
			})

		It("VH-4 a volume that is not there has no health", func(ctx SpecContext) {
			for _, id := range []string{someUUID, "volume"} {
				_, err := f.ctl.ControllerGetVolumeHealth(ctx,
					&csi.ControllerGetVolumeHealthRequest{VolumeId: id})
				expectRefusal(err, codes.NotFound, id)
			}
		})

		DescribeTable("VH-5 a volume in any ordinary state is healthy",
			func(ctx SpecContext, state string) {
				volume := f.volume(ctx)
				if state != "detached" {
					f.pretend(ctx, volume, state, "")
				}
				health, err := f.ctl.ControllerGetVolumeHealth(ctx,
					&csi.ControllerGetVolumeHealthRequest{VolumeId: volume.GetVolumeId()})
				Expect(err).NotTo(HaveOccurred())
				Expect(health.GetVolumeHealth().GetVolumeId()).To(Equal(volume.GetVolumeId()))
				Expect(health.GetVolumeHealth().GetHealthStatuses()).To(BeEmpty())
				list, err := f.ctl.ControllerListVolumeHealth(ctx,
					&csi.ControllerListVolumeHealthRequest{})
				Expect(err).NotTo(HaveOccurred())
				Expect(list.GetEntries()).To(BeEmpty())
			},
			Entry("VH-5 detached", "detached"),
			Entry("VH-5 maintenance, while a snapshot is taken", "maintenance"),
		)

		It("VH-6 a faulted disk is inaccessible, alone and in the list", func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.volume(ctx)
			f.pretend(ctx, volume, "faulted", "")
			one, err := f.ctl.ControllerGetVolumeHealth(ctx,
				&csi.ControllerGetVolumeHealthRequest{VolumeId: volume.GetVolumeId()})
			Expect(err).NotTo(HaveOccurred())
			list, err := f.ctl.ControllerListVolumeHealth(ctx,
				&csi.ControllerListVolumeHealthRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(list.GetEntries()).To(HaveLen(1))
			for _, health := range []*csi.VolumeHealth{one.GetVolumeHealth(), list.GetEntries()[0]} {
				Expect(health.GetVolumeId()).To(Equal(volume.GetVolumeId()))
				Expect(health.GetHealthStatuses()).To(HaveLen(1))
				status := health.GetHealthStatuses()[0]
				Expect(status.GetStatus()).To(Equal(csi.VolumeHealthErrorType_INACCESSIBLE))
				Expect(status.GetReason()).To(Equal("DiskFaulted"))
			}
		})

		It("CG-1 what is left is what the silo has not given out", func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", 10*harness.GiB, 1024*harness.GiB)
			f.volume(ctx)
			resp, err := f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetAvailableCapacity()).To(Equal(9 * harness.GiB))
			f.switched(ctx, "quota_bytes", harness.GiB/2, 1024*harness.GiB)
			resp, err = f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetAvailableCapacity()).To(BeZero(), "never negative")
		})

		DescribeTable("CG-2 there is no capacity for what a rack cannot do",
			func(ctx SpecContext, req *csi.GetCapacityRequest) {
				resp, err := f.ctl.GetCapacity(ctx, req)
				Expect(err).NotTo(HaveOccurred())
				Expect(resp.GetAvailableCapacity()).To(BeZero())
			},
			Entry("CG-2 a mode of many nodes", &csi.GetCapacityRequest{
				VolumeCapabilities: []*csi.VolumeCapability{harness.InMode(
					csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, harness.Mounted(""))},
			}),
			Entry("CG-2 an unknown parameter",
				&csi.GetCapacityRequest{Parameters: map[string]string{"color": "red"}}),
			Entry("CG-2 a block size that no disk has",
				&csi.GetCapacityRequest{Parameters: map[string]string{"blockSize": "1024"}}),
		)

		It("CG-3 reports the smallest and the largest disk", func(ctx SpecContext) {
			resp, err := f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetMinimumVolumeSize().GetValue()).To(Equal(harness.GiB))
			Expect(resp.GetMaximumVolumeSize().GetValue()).To(Equal(1023 * harness.GiB))
		})

		It("CG-4 a topology is refused when none is configured", func(ctx SpecContext) {
			_, err := f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{
				AccessibleTopology: &csi.Topology{Segments: map[string]string{topologyRack: "r1"}},
			})
			expectRefusal(err, codes.InvalidArgument)
		})

		DescribeTable("CG-5 a capacity that cannot be read is not invented",
			func(ctx SpecContext, statusCode int, errorCode string, want codes.Code) {
				f.refuse(ctx, "utilization_view", "", statusCode, errorCode, errorCode)
				_, err := f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
				expectRefusal(err, want)
			},
			Entry("CG-5 without the right to", http.StatusForbidden, "Forbidden",
				codes.PermissionDenied),
			Entry("CG-5 while the rack is down", http.StatusServiceUnavailable,
				"ServiceNotAvailable", codes.Unavailable),
		)
	})

var _ = describeController("ListSnapshots", fixtureOptions{rack: withOtherProject},
	func(f *fixture) {
		It("LS-1 a negative number of entries is refused", func(ctx SpecContext) {
			_, err := f.ctl.ListSnapshots(ctx, &csi.ListSnapshotsRequest{MaxEntries: -1})
			expectRefusal(err, codes.InvalidArgument, "max_entries")
		})

		It("LS-2 a token that the driver did not give is refused", func(ctx SpecContext) {
			_, err := f.ctl.ListSnapshots(ctx,
				&csi.ListSnapshotsRequest{StartingToken: "invalid-token"})
			expectRefusal(err, codes.Aborted)
		})

		It("LS-3 a filter that nothing matches, UUID or not, gives nothing", func(ctx SpecContext) {
			f.snapshotted(ctx, f.volume(ctx))
			for _, id := range []string{someUUID, "name"} {
				for _, req := range []*csi.ListSnapshotsRequest{
					{SnapshotId: id}, {SourceVolumeId: id},
				} {
					resp, err := f.ctl.ListSnapshots(ctx, req)
					Expect(err).NotTo(HaveOccurred())
					Expect(resp.GetEntries()).To(BeEmpty())
				}
			}
		})

		It("LS-5 every snapshot of the project is listed, however it was made, once it is cut",
			func(ctx SpecContext) {
				own, uncut := f.snapshotted(ctx, f.volume(ctx)), f.snapshotted(ctx, f.volume(ctx))
				disk := f.rackDisk(ctx, fresh("manual"), f.rack.Project)
				manual, err := f.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
					Project: oxide.NameOrId(f.rack.Project),
					Body: &oxide.SnapshotCreate{Name: oxide.Name(fresh("manual")),
						Description: "by hand", Disk: oxide.NameOrId(disk.Id)},
				})
				Expect(err).NotTo(HaveOccurred())
				f.snapshotRemovedLater(manual.Id)
				f.foreignSnapshot(ctx)
				f.pretendSnapshot(ctx, uncut.GetSnapshotId(), "creating")
				resp, err := f.ctl.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
				Expect(err).NotTo(HaveOccurred())
				ids := []string{}
				for _, entry := range resp.GetEntries() {
					ids = append(ids, entry.GetSnapshot().GetSnapshotId())
				}
				Expect(ids).To(ConsistOf(own.GetSnapshotId(), manual.Id))
			})

		It("LS-5 one that is not cut yet can still be looked at", func(ctx SpecContext) {
			snapshot := f.snapshotted(ctx, f.volume(ctx))
			f.pretendSnapshot(ctx, snapshot.GetSnapshotId(), "creating")
			resp, err := f.ctl.GetSnapshot(ctx,
				&csi.GetSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetSnapshot().GetReadyToUse()).To(BeFalse())
		})

		It("LS-7 one whose ID is no UUID is not there, without a call to the rack",
			func(ctx SpecContext) {
				Expect(f.calls(ctx, func() {
					_, err := f.ctl.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: "name"})
					expectRefusal(err, codes.NotFound, "name")
				})).To(BeEmpty())
			})
	})
