//go:build linux

package sanity

import (
	"fmt"
	"net/http"
	"regexp"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func recorded(p *harness.Plugin) []harness.Change {
	GinkgoHelper()
	changes, err := harness.Changes(p.LogFile)
	Expect(err).NotTo(HaveOccurred())
	return changes
}

func eventsOf(changes []harness.Change) (events []string) {
	for _, c := range changes {
		events = append(events, c.Event)
	}
	return events
}

var operationOf = map[string]string{"DiskCreated": "disk_create", "DiskDeleted": "disk_delete",
	"DiskAttached": "instance_disk_attach", "DiskDetached": "instance_disk_detach",
	"SnapshotCreated": "snapshot_create", "SnapshotDeleted": "snapshot_delete"}

func metric(ctx SpecContext, p *harness.Plugin, name string) float64 {
	GinkgoHelper()
	samples, err := p.Metrics(ctx)
	Expect(err).NotTo(HaveOccurred())
	return samples[name]
}

var rackRequests = regexp.MustCompile(
	`^oxide_csi_rack_request_seconds_count\{operation="(.*)",status="(.*)"\}$`)

var _ = describeNodes("the flight recorder", func(f *nodeFixture) {
	json := harness.PluginOptions{Args: []string{"--log-format=json"}}

	It("records each change of the rack once, with the ID of its request, and counts all requests",
		func(ctx SpecContext) {
			before, err := f.rack.Admin.Requests(ctx, 0)
			Expect(err).NotTo(HaveOccurred())
			controller := f.controller(ctx, json)
			ctl, at := controller.Controller(), f.rack.Instance("a").ID
			req := harness.CreateRequest(fresh("recorded"))
			req.Parameters = map[string]string{"csi.storage.k8s.io/pvc/name": "data",
				"csi.storage.k8s.io/pvc/namespace": "shop"}
			var volume *csi.Volume
			for range 2 { // repeated calls change nothing
				resp := expectOK(ctx, ctl.CreateVolume, req)
				volume = resp.GetVolume()
				expectOK(ctx, ctl.ControllerPublishVolume, harness.PublishRequest(volume, at))
			}
			snapshot := expectOK(ctx, ctl.CreateSnapshot, &csi.CreateSnapshotRequest{
				Name: fresh("recorded"), SourceVolumeId: volume.GetVolumeId()})
			id := snapshot.GetSnapshot().GetSnapshotId()
			expectOK(ctx, ctl.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: id})
			expectOK(ctx, ctl.ListSnapshots, &csi.ListSnapshotsRequest{})
			expectOK(ctx, ctl.ListVolumes, &csi.ListVolumesRequest{})
			expectOK(ctx, ctl.GetCapacity, &csi.GetCapacityRequest{})
			for range 2 {
				expectOK(ctx, ctl.ControllerUnpublishVolume, harness.UnpublishRequest(volume, at))
				expectOK(ctx, ctl.DeleteVolume,
					&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
				expectOK(ctx, ctl.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: id})
			}
			samples, err := controller.Metrics(ctx)
			Expect(err).NotTo(HaveOccurred())
			requests, err := f.rack.Admin.Requests(ctx, len(before))
			Expect(err).NotTo(HaveOccurred())
			want, got := map[string]int{}, map[string]int{}
			var made, recordedChanges []string
			for _, r := range requests {
				want[fmt.Sprintf("%s %d", r.Operation, r.Status)]++
				if r.Method != http.MethodGet && r.Status < 300 {
					made = append(made, r.Operation+" "+r.RequestID)
				}
			}
			for name, value := range samples {
				if match := rackRequests.FindStringSubmatch(name); match != nil {
					got[match[1]+" "+match[2]] = int(value)
				}
			}
			Expect(got).To(Equal(want))
			Expect(samples["oxide_csi_rack_up"]).To(Equal(1.0))
			for _, c := range recorded(controller) {
				recordedChanges = append(recordedChanges, operationOf[c.Event]+" "+c.Request)
			}
			Expect(recordedChanges).To(Equal(made))
			Expect(harness.CheckChanges(recorded(controller))).To(Succeed())
			Expect(recorded(controller)[0]).To(HaveField("Claim", "shop/data"))
		})

	It("records a change whose answer was lost when a repeated call finds it",
		func(ctx SpecContext) {
			controller := f.controller(ctx, json)
			req := harness.CreateRequest(fresh("lost-answer"))
			f.fault(ctx, adminapi.Fault{Operation: "disk_create", Phase: adminapi.After, Times: 1,
				Cut: true})
			f.fault(ctx, adminapi.Fault{Operation: "disk_view", Times: 1, Cut: true})
			Expect(errOf(controller.Controller().CreateVolume(ctx, req))).To(HaveOccurred())
			Expect(recorded(controller)).To(BeEmpty())
			resp := expectOK(ctx, controller.Controller().CreateVolume, req)
			f.deletedLater(resp.GetVolume().GetVolumeId())
			changes := recorded(controller)
			Expect(eventsOf(changes)).To(Equal([]string{"DiskCreated"}))
			Expect(changes[0].Seen).To(BeTrue())
			Expect(changes[0].Volume).To(Equal(resp.GetVolume().GetVolumeId()))
		})

	DescribeTable("records each change of a node once, in the log, the volume's file and the metrics",
		func(ctx SpecContext, access string, stage ...string) {
			n := f.node(ctx, "a", json)
			volume := f.volume(ctx, harness.Access(access))
			p := f.inUse(ctx, volume, n, harness.Access(access))
			for range 2 { // repeated calls change nothing
				Expect(p.stage(ctx)).To(Succeed())
				Expect(p.publish(ctx)).To(Succeed())
			}
			if access != "block" {
				Expect(metric(ctx, n.Plugin, "oxide_csi_node_volumes")).To(Equal(1.0))
				Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks")).To(Equal(1.0))
				Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks_limit")).To(Equal(12.0))
				for _, event := range stage {
					Expect(metric(ctx, n.Plugin, fmt.Sprintf("oxide_csi_changes_total{event=%q}", event))).
						To(Equal(1.0))
				}
				other := *p
				other.Capability = harness.Access("block")
				Expect(other.stage(ctx)).NotTo(Succeed())
				Expect(metric(ctx, n.Plugin, `oxide_csi_calls_total{code="FailedPrecondition",`+
					`method="NodeStageVolume",reason="UseDiffers"}`)).To(Equal(1.0))
			}
			f.detached(ctx, p)
			f.detached(ctx, p)
			Expect(metric(ctx, n.Plugin, "oxide_csi_node_volumes")).To(Equal(0.0))
			Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks")).To(Equal(0.0))
			changes := recorded(n.Plugin)
			want := append(stage, "Published", "Unpublished")
			if access != "block" {
				want = append(want, "Unmounted")
			}
			Expect(eventsOf(changes)).To(Equal(want))
			for _, c := range changes {
				Expect(c.Volume).To(Equal(volume.GetVolumeId()), fmt.Sprint(c))
				Expect(c.Instance).To(Equal(n.Instance.ID), fmt.Sprint(c))
			}
			kept, err := harness.Changes(n.FlightFile(volume.GetVolumeId()))
			Expect(err).NotTo(HaveOccurred())
			var done []harness.Change
			for _, c := range kept {
				if c.Outcome == "done" {
					done = append(done, c)
				}
			}
			Expect(eventsOf(done)).To(Equal(want))
			Expect(harness.CheckChanges(kept)).To(Succeed())
		},
		Entry("ext4", "ext4", "ProvenBlank", "Formatted", "Mounted"),
		Entry("block", "block"))
})
