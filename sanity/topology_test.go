//go:build linux

package sanity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// These are the places of the two deployments below.
const (
	topologyRegion = "topology.csi.oxide.computer/region"
	topologyZone   = "topology.csi.oxide.computer/zone"
)

var placeR1 = map[string]string{
	"OXIDE_TOPOLOGY_RACK": "R1", "OXIDE_TOPOLOGY_ZONE": "Z2", "OXIDE_TOPOLOGY_REGION": "north",
}

func at(segments ...string) *csi.Topology {
	topology := &csi.Topology{Segments: map[string]string{}}
	for i := 0; i < len(segments); i += 2 {
		topology.Segments[segments[i]] = segments[i+1]
	}
	return topology
}

// expectTopology demands that a plugin declares that volumes have a topology.
func expectTopology(ctx context.Context, p *harness.Plugin) {
	GinkgoHelper()
	resp := expectOK(ctx, p.Identity().GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})
	Expect(resp.String()).To(ContainSubstring("VOLUME_ACCESSIBILITY_CONSTRAINTS"))
}

var _ = describeController("topology", fixtureOptions{plugin: harness.PluginOptions{Env: placeR1}},
	func(f *fixture) {
		here := at(topologyRack, "R1", topologyZone, "Z2", topologyRegion, "north")
		elsewhere := at(topologyRack, "R2", topologyZone, "Z2", topologyRegion, "north")

		It("CAP-2 NI-3 D-75 is declared by controller and node, and names the node's place",
			func(ctx SpecContext) {
				node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode,
					Env: map[string]string{"OXIDE_TOPOLOGY": "rack=R1,zone=Z2,region=north"}})
				expectTopology(ctx, f.plugin)
				expectTopology(ctx, node)
				resp := expectOK(ctx, node.Node().NodeGetInfo, &csi.NodeGetInfoRequest{})
				Expect(resp.GetAccessibleTopology()).To(BeComparableTo(here, protoCmp))
			})

		It("CV-23 D-17 a volume is where its rack is, though another place is preferred",
			func(ctx SpecContext) {
				req := harness.CreateRequest(fresh("placed"))
				req.AccessibilityRequirements = &csi.TopologyRequirement{
					Requisite: []*csi.Topology{elsewhere, here},
					Preferred: []*csi.Topology{elsewhere, here}}
				Expect(f.created(ctx, req).GetAccessibleTopology()).
					To(HaveExactElements(BeComparableTo(here, protoCmp)))
			})

		It("D-72 D-14 CV-10 two racks do not answer for each other", func(ctx SpecContext) {
			two := f.controller(ctx, harness.PluginOptions{Env: map[string]string{
				"OXIDE_TOPOLOGY_RACK": "R2", "OXIDE_TOPOLOGY_ZONE": "Z2",
				"OXIDE_TOPOLOGY_REGION": "north"}}).Controller()
			req := harness.CreateRequest(fresh("of-two"))
			req.AccessibilityRequirements = &csi.TopologyRequirement{
				Requisite: []*csi.Topology{elsewhere}}
			expectRefusal(errOf(f.ctl.CreateVolume(ctx, req)), codes.ResourceExhausted)
			resp := expectOK(ctx, two.CreateVolume, req)
			f.deletedLater(resp.GetVolume().GetVolumeId())
			Expect(resp.GetVolume().GetAccessibleTopology()).
				To(HaveExactElements(BeComparableTo(elsewhere, protoCmp)))
			Expect(f.disks(ctx)).To(HaveLen(1))
		})
	})

var _ = describeController("volumes that stay with their node", fixtureOptions{
	plugin: harness.PluginOptions{Env: map[string]string{"OXIDE_TOPOLOGY_INSTANCE": "true"}}},
	func(f *fixture) {
		const key = "topology.csi.oxide.computer/instance"
		// place returns the place that the node in an instance reports.
		place := func(ctx SpecContext, instance string) *csi.Topology {
			GinkgoHelper()
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode,
				Instance: instance, Env: map[string]string{"OXIDE_TOPOLOGY_INSTANCE": "true"}})
			resp := expectOK(ctx, node.Node().NodeGetInfo, &csi.NodeGetInfoRequest{})
			return resp.GetAccessibleTopology()
		}
		// strict returns the requirement that the provisioner sends for a node with --strict-topology.
		strict := func(places ...*csi.Topology) *csi.TopologyRequirement {
			return &csi.TopologyRequirement{Requisite: places, Preferred: places}
		}

		It("CAP-2 NI-3 a node reports its instance", func(ctx SpecContext) {
			Expect(place(ctx, "a")).To(BeComparableTo(at(key, f.rack.Instance("a").ID), protoCmp))
			expectTopology(ctx, f.plugin)
		})

		It("D-61 a volume is where the scheduler chose last, and its disk moves like any other",
			func(ctx SpecContext) {
				a, b := place(ctx, "a"), place(ctx, "b")
				req := harness.CreateRequest(fresh("staying"))
				req.Parameters = map[string]string{"placement": "instance"}
				req.AccessibilityRequirements = strict(a)
				first := f.created(ctx, req)
				Expect(first.GetAccessibleTopology()).To(HaveExactElements(BeComparableTo(a, protoCmp)))
				req.AccessibilityRequirements = strict(b)
				again := f.created(ctx, req)
				Expect(again.GetVolumeId()).To(Equal(first.GetVolumeId()))
				Expect(again.GetAccessibleTopology()).To(HaveExactElements(BeComparableTo(b, protoCmp)))
				for _, instance := range []string{"a", "b"} {
					id := f.rack.Instance(instance).ID
					expectOK(ctx, f.ctl.ControllerPublishVolume, harness.PublishRequest(again, id))
					expectOK(ctx, f.ctl.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{
						VolumeId: again.GetVolumeId(), NodeId: id})
				}
			})
	})
