//go:build linux

package sanity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// listed returns the volumes of ListVolumes, by ID.
func (f *fixture) listed(
	ctx context.Context, ctl csi.ControllerClient,
) map[string]*csi.ListVolumesResponse_Entry {
	GinkgoHelper()
	resp := expectOK(ctx, ctl.ListVolumes, &csi.ListVolumesRequest{})
	Expect(resp.GetNextToken()).To(BeEmpty())
	volumes := map[string]*csi.ListVolumesResponse_Entry{}
	for _, entry := range resp.GetEntries() {
		volumes[entry.GetVolume().GetVolumeId()] = entry
	}
	Expect(volumes).To(HaveLen(len(resp.GetEntries())), "no volume is listed twice")
	return volumes
}

var _ = describeController("what is listed", fixtureOptions{}, func(f *fixture) {
	It("LV-4 a token returns the rest, even when a volume of the page is deleted",
		func(ctx SpecContext) {
			for range 4 {
				f.volume(ctx)
			}
			first := expectOK(ctx, f.ctl.ListVolumes, &csi.ListVolumesRequest{MaxEntries: 2})
			seen := volumeIDs(first.GetEntries())
			expectOK(ctx, f.ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: seen[1]})
			rest := expectOK(ctx, f.ctl.ListVolumes,
				&csi.ListVolumesRequest{StartingToken: first.GetNextToken()})
			Expect(rest.GetEntries()).To(HaveLen(2))
			Expect(volumeIDs(rest.GetEntries())).NotTo(ContainElements(seen[0], seen[1]))
		})

	It("LV-5 every volume shows where it is published", func(ctx SpecContext) {
		free, used := f.volume(ctx), f.volume(ctx)
		f.published(ctx, used, "b")
		volumes := f.listed(ctx, f.ctl)
		Expect(volumes[free.GetVolumeId()].GetStatus()).NotTo(BeNil())
		Expect(volumes[free.GetVolumeId()].GetStatus().GetPublishedNodeIds()).To(BeEmpty())
		Expect(volumes[used.GetVolumeId()].GetStatus().GetPublishedNodeIds()).
			To(ConsistOf(f.rack.Instance("b").ID))
	})

	It("D-69 disks that others made are listed only while they are attached",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("static"), f.rack.Project)
			Expect(f.listed(ctx, f.ctl)).NotTo(HaveKey(disk.Id))
			f.published(ctx, &csi.Volume{VolumeId: disk.Id}, "a")
			Expect(f.listed(ctx, f.ctl)[disk.Id].GetStatus().GetPublishedNodeIds()).
				To(ConsistOf(f.rack.Instance("a").ID))
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
				resp := expectOK(ctx, p.Controller().CreateVolume, harness.CreateRequest(name))
				ids = append(ids, resp.GetVolume().GetVolumeId())
				taken := expectOK(ctx, p.Controller().CreateSnapshot, &csi.CreateSnapshotRequest{
					Name: name, SourceVolumeId: resp.GetVolume().GetVolumeId()})
				snapshots = append(snapshots, taken.GetSnapshot().GetSnapshotId())
			}
			Expect(ids[3:]).To(Equal(ids[1:3]), "the repeated creates")
			Expect(snapshots[3:]).To(Equal(snapshots[1:3]), "the repeated snapshots")
			Expect(f.disks(ctx)).To(HaveLen(3))
			for i, p := range []*harness.Plugin{f.plugin, one, two} {
				expectOK(ctx, p.Controller().DeleteSnapshot,
					&csi.DeleteSnapshotRequest{SnapshotId: snapshots[i]})
				expectOK(ctx, p.Controller().DeleteVolume,
					&csi.DeleteVolumeRequest{VolumeId: ids[i]})
				Expect(f.disks(ctx)).To(HaveLen(2 - i))
			}
		})

	It("VH-6 a faulted disk is inaccessible, alone and in the list", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.volume(ctx)
		f.pretend(ctx, volume, "faulted", "")
		one := expectOK(ctx, f.ctl.ControllerGetVolumeHealth,
			&csi.ControllerGetVolumeHealthRequest{VolumeId: volume.GetVolumeId()})
		list := expectOK(ctx, f.ctl.ControllerListVolumeHealth,
			&csi.ControllerListVolumeHealthRequest{})
		Expect(list.GetEntries()).To(HaveLen(1))
		for _, health := range []*csi.VolumeHealth{one.GetVolumeHealth(), list.GetEntries()[0]} {
			Expect(health.GetVolumeId()).To(Equal(volume.GetVolumeId()))
			Expect(health.GetHealthStatuses()).To(HaveLen(1))
			status := health.GetHealthStatuses()[0]
			Expect(status.GetStatus()).To(Equal(csi.VolumeHealthErrorType_INACCESSIBLE))
			Expect(status.GetReason()).To(Equal("DiskFaulted"))
		}
	})

	It("CG-1 the capacity is the rest of the silo's quota", func(ctx SpecContext) {
		f.switched(ctx, "quota_bytes", 10*harness.GiB, 1024*harness.GiB)
		f.volume(ctx)
		resp := expectOK(ctx, f.ctl.GetCapacity, &csi.GetCapacityRequest{})
		Expect(resp.GetAvailableCapacity()).To(Equal(9 * harness.GiB))
		f.switched(ctx, "quota_bytes", harness.GiB/2, 1024*harness.GiB)
		resp = expectOK(ctx, f.ctl.GetCapacity, &csi.GetCapacityRequest{})
		Expect(resp.GetAvailableCapacity()).To(BeZero(), "never negative")
	})
})
