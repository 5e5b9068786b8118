//go:build linux

package sanity

import (
	"fmt"
	"regexp"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// metric returns a sample of a process, or 0 if there is none.
func metric(ctx SpecContext, p *harness.Plugin, name string) float64 {
	GinkgoHelper()
	samples, err := p.Metrics(ctx)
	Expect(err).NotTo(HaveOccurred())
	return samples[name]
}

var rackRequests = regexp.MustCompile(
	`^oxide_csi_rack_request_seconds_count\{operation="(.*)",status="(.*)"\}$`)

// The metrics must agree with the events.
var _ = describeNodes("the metrics", func(f *nodeFixture) {
	It("count the requests to the rack as the rack does, by operation and status",
		func(ctx SpecContext) {
			before, err := f.rack.Admin.Requests(ctx, 0)
			Expect(err).NotTo(HaveOccurred())
			controller := f.controller(ctx, harness.PluginOptions{})
			ctl, at := controller.Controller(), f.rack.Instance("a").ID
			resp := expectOK(ctx, ctl.CreateVolume, harness.CreateRequest(fresh("counted")))
			volume := resp.GetVolume()
			f.deletedLater(volume.GetVolumeId())
			expectOK(ctx, ctl.ControllerPublishVolume, harness.PublishRequest(volume, at))
			expectOK(ctx, ctl.ControllerUnpublishVolume, harness.UnpublishRequest(volume, at))
			snapshot := expectOK(ctx, ctl.CreateSnapshot, &csi.CreateSnapshotRequest{Name: fresh("counted"),
				SourceVolumeId: volume.GetVolumeId()})
			id := snapshot.GetSnapshot().GetSnapshotId()
			expectOK(ctx, ctl.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: id})
			expectOK(ctx, ctl.ListSnapshots, &csi.ListSnapshotsRequest{})
			expectOK(ctx, ctl.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: id})
			expectOK(ctx, ctl.ListVolumes, &csi.ListVolumesRequest{})
			expectOK(ctx, ctl.GetCapacity, &csi.GetCapacityRequest{})
			samples, err := controller.Metrics(ctx)
			Expect(err).NotTo(HaveOccurred())
			requests, err := f.rack.Admin.Requests(ctx, len(before))
			Expect(err).NotTo(HaveOccurred())
			want, got := map[string]int{}, map[string]int{}
			for _, r := range requests {
				want[fmt.Sprintf("%s %d", r.Operation, r.Status)]++
			}
			for name, value := range samples {
				if match := rackRequests.FindStringSubmatch(name); match != nil {
					got[match[1]+" "+match[2]] = int(value)
				}
			}
			Expect(got).To(Equal(want))
			Expect(metric(ctx, controller, "oxide_csi_rack_up")).To(Equal(1.0))
		})

	It("count calls by reason, changes by event, and what a node has", func(ctx SpecContext) {
		n := f.node(ctx, "a", harness.PluginOptions{})
		p := f.inUse(ctx, f.volume(ctx), n, harness.Mounted("ext4"))
		Expect(metric(ctx, n.Plugin, `oxide_csi_changes_total{event="Formatted"}`)).To(Equal(1.0))
		Expect(metric(ctx, n.Plugin, `oxide_csi_changes_total{event="Mounted"}`)).To(Equal(1.0))
		Expect(metric(ctx, n.Plugin, "oxide_csi_node_volumes")).To(Equal(1.0))
		Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks")).To(Equal(1.0))
		Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks_limit")).To(Equal(12.0))
		other := *p
		other.Capability = harness.Access("block")
		Expect(other.stage(ctx)).NotTo(Succeed())
		Expect(metric(ctx, n.Plugin, `oxide_csi_calls_total{code="FailedPrecondition",`+
			`method="NodeStageVolume",reason="UseDiffers"}`)).To(Equal(1.0))
		f.detached(ctx, p)
		Expect(metric(ctx, n.Plugin, "oxide_csi_node_volumes")).To(Equal(0.0))
		Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks")).To(Equal(0.0))
	})
})
