//go:build linux

package sanity

import (
	"regexp"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// The places of the two deployments below.
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

var _ = describeController("topology", fixtureOptions{plugin: harness.PluginOptions{Env: placeR1}},
	func(f *fixture) {
		requirement := func(requisite, preferred []*csi.Topology) *csi.TopologyRequirement {
			return &csi.TopologyRequirement{Requisite: requisite, Preferred: preferred}
		}
		here := at(topologyRack, "R1", topologyZone, "Z2", topologyRegion, "north")
		elsewhere := at(topologyRack, "R2", topologyZone, "Z2", topologyRegion, "north")

		It("CAP-2 is declared by controller and node when it is configured", func(ctx SpecContext) {
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode, Env: placeR1})
			for _, p := range []*harness.Plugin{f.plugin, node} {
				resp, err := p.Identity().GetPluginCapabilities(ctx,
					&csi.GetPluginCapabilitiesRequest{})
				Expect(err).NotTo(HaveOccurred())
				Expect(resp.String()).To(ContainSubstring("VOLUME_ACCESSIBILITY_CONSTRAINTS"))
			}
		})

		It("NI-3 is where the node says it is, and only when it is configured",
			func(ctx SpecContext) {
				node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode, Env: placeR1})
				resp, err := node.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
				Expect(err).NotTo(HaveOccurred())
				Expect(resp.GetAccessibleTopology()).To(BeComparableTo(here, protoCmp))
				plain := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode})
				resp, err = plain.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
				Expect(err).NotTo(HaveOccurred())
				Expect(resp.GetAccessibleTopology()).To(BeNil())
			})

		It("B-27 has keys of one prefix and names that every orchestrator takes",
			func(ctx SpecContext) {
				node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode, Env: placeR1})
				resp, err := node.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
				Expect(err).NotTo(HaveOccurred())
				name := regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
				for key, value := range resp.GetAccessibleTopology().GetSegments() {
					prefix, rest, _ := strings.Cut(key, "/")
					Expect(prefix).To(Equal("topology.csi.oxide.computer"))
					Expect(rest).To(MatchRegexp(name.String()))
					Expect(value).To(MatchRegexp(name.String()))
				}
			})

		It("D-75 can be given as one list of pairs", func(ctx SpecContext) {
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode,
				Env: map[string]string{"OXIDE_TOPOLOGY": "rack=R1,zone=Z2,region=north"}})
			resp, err := node.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetAccessibleTopology()).To(BeComparableTo(here, protoCmp))
		})

		DescribeTable("CV-23 a volume is where its rack is",
			func(ctx SpecContext, wanted *csi.TopologyRequirement) {
				req := harness.CreateRequest(fresh("placed"))
				req.AccessibilityRequirements = wanted
				volume := f.created(ctx, req)
				Expect(volume.GetAccessibleTopology()).To(HaveLen(1))
				Expect(volume.GetAccessibleTopology()[0]).To(BeComparableTo(here, protoCmp))
			},
			Entry("CV-23 wherever, when nothing is required", nil),
			Entry("CV-23 the only place", requirement([]*csi.Topology{here}, nil)),
			Entry("CV-23 a place that is named in part",
				requirement([]*csi.Topology{at(topologyRack, "R1")}, nil)),
			Entry("D-17 a place that is required though another is preferred",
				requirement([]*csi.Topology{elsewhere, here}, []*csi.Topology{elsewhere, here})),
			Entry("D-17 the preferred place",
				requirement(nil, []*csi.Topology{here})),
		)

		DescribeTable("D-14 CV-10 a volume is in no place where its rack is not",
			func(ctx SpecContext, wanted *csi.TopologyRequirement) {
				req := harness.CreateRequest(fresh("elsewhere"))
				req.AccessibilityRequirements = wanted
				_, err := f.ctl.CreateVolume(ctx, req)
				expectRefusal(err, codes.ResourceExhausted)
				Expect(f.disks(ctx)).To(BeEmpty())
			},
			Entry("CV-10 another rack", requirement([]*csi.Topology{elsewhere}, nil)),
			Entry("CV-10 another zone of the rack",
				requirement([]*csi.Topology{at(topologyRack, "R1", topologyZone, "Z3")}, nil)),
		)

		DescribeTable("CV-9 a requirement that is none is refused",
			func(ctx SpecContext, wanted *csi.TopologyRequirement) {
				req := harness.CreateRequest(fresh("nowhere"))
				req.AccessibilityRequirements = wanted
				Expect(f.calls(ctx, func() {
					_, err := f.ctl.CreateVolume(ctx, req)
					expectRefusal(err, codes.InvalidArgument)
				})).To(BeEmpty())
			},
			Entry("CV-9 neither required nor preferred places", requirement(nil, nil)),
			Entry("CV-9 a preferred place that is not a required one",
				requirement([]*csi.Topology{here}, []*csi.Topology{elsewhere})),
			Entry("CV-9 a key that is none", requirement([]*csi.Topology{at("a b", "R1")}, nil)),
			Entry("CV-9 a value that is none",
				requirement([]*csi.Topology{at(topologyRack, "-R1-")}, nil)),
		)

		It("CV-19 a second create that wants another place is refused", func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("moved"))
			req.AccessibilityRequirements = requirement([]*csi.Topology{here}, nil)
			f.created(ctx, req)
			req.AccessibilityRequirements = requirement([]*csi.Topology{elsewhere}, nil)
			_, err := f.ctl.CreateVolume(ctx, req)
			Expect(codeOf(err)).To(BeElementOf(codes.AlreadyExists, codes.ResourceExhausted))
		})

		It("D-72 two racks do not answer for each other", func(ctx SpecContext) {
			two := f.controller(ctx, harness.PluginOptions{Env: map[string]string{
				"OXIDE_TOPOLOGY_RACK": "R2", "OXIDE_TOPOLOGY_ZONE": "Z2",
				"OXIDE_TOPOLOGY_REGION": "north"}}).Controller()
			req := harness.CreateRequest(fresh("of-two"))
			req.AccessibilityRequirements = requirement([]*csi.Topology{elsewhere}, nil)
			_, err := f.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.ResourceExhausted)
			resp, err := two.CreateVolume(ctx, req)
			Expect(err).NotTo(HaveOccurred())
			f.deletedLater(resp.GetVolume().GetVolumeId())
			Expect(resp.GetVolume().GetAccessibleTopology()[0]).
				To(BeComparableTo(elsewhere, protoCmp))
		})

		DescribeTable("CG-2 the capacity is that of the rack's own place",
			func(ctx SpecContext, place *csi.Topology, some bool) {
				resp, err := f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{AccessibleTopology: place})
				Expect(err).NotTo(HaveOccurred())
				Expect(resp.GetAvailableCapacity() > 0).To(Equal(some))
			},
			Entry("CG-2 here", here, true),
			Entry("CG-2 elsewhere", elsewhere, false),
		)
	})

var _ = describeController("volumes that stay with their node", fixtureOptions{
	plugin: harness.PluginOptions{Env: map[string]string{"OXIDE_TOPOLOGY_INSTANCE": "true"}}},
	func(f *fixture) {
		const key = "topology.csi.oxide.computer/instance"
		// place is where the node in an instance says that it is.
		place := func(ctx SpecContext, instance string) *csi.Topology {
			GinkgoHelper()
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode,
				Instance: instance, Env: map[string]string{"OXIDE_TOPOLOGY_INSTANCE": "true"}})
			resp, err := node.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			Expect(err).NotTo(HaveOccurred())
			return resp.GetAccessibleTopology()
		}
		// strict is what the provisioner requires of a node with --strict-topology.
		strict := func(places ...*csi.Topology) *csi.TopologyRequirement {
			return &csi.TopologyRequirement{Requisite: places, Preferred: places}
		}

		It("CAP-2 NI-3 a node says in which instance it is", func(ctx SpecContext) {
			Expect(place(ctx, "a")).To(BeComparableTo(at(key, f.rack.Instance("a").ID), protoCmp))
			resp, err := f.plugin.Identity().GetPluginCapabilities(ctx,
				&csi.GetPluginCapabilitiesRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.String()).To(ContainSubstring("VOLUME_ACCESSIBILITY_CONSTRAINTS"))
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
					_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(again, id))
					Expect(err).NotTo(HaveOccurred())
					_, err = f.ctl.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
						VolumeId: again.GetVolumeId(), NodeId: id})
					Expect(err).NotTo(HaveOccurred())
				}
			})

		It("CV-23 a volume of the rack is at no instance", func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("free"))
			req.AccessibilityRequirements = strict(place(ctx, "a"))
			Expect(f.created(ctx, req).GetAccessibleTopology()).To(BeEmpty())
		})

		It("CV-9 a volume that could stay with two nodes is refused", func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("torn"))
			req.Parameters = map[string]string{"placement": "instance"}
			req.AccessibilityRequirements = strict(place(ctx, "a"), place(ctx, "b"))
			Expect(f.calls(ctx, func() {
				_, err := f.ctl.CreateVolume(ctx, req)
				expectRefusal(err, codes.InvalidArgument, "2 instances", "WaitForFirstConsumer")
			})).To(BeEmpty())
		})
	})
