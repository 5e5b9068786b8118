//go:build linux

package sanity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func capabilities(ctx context.Context, p *harness.Plugin) []string {
	GinkgoHelper()
	var declared []string
	plugin := expectOK(ctx, p.Identity().GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})
	for _, c := range plugin.GetCapabilities() {
		if expansion := c.GetVolumeExpansion(); expansion != nil {
			declared = append(declared, "plugin EXPANSION_"+expansion.GetType().String())
			continue
		}
		declared = append(declared, "plugin "+c.GetService().GetType().String())
	}
	controller := expectOK(ctx, p.Controller().ControllerGetCapabilities,
		&csi.ControllerGetCapabilitiesRequest{})
	for _, c := range controller.GetCapabilities() {
		declared = append(declared, "controller "+c.GetRpc().GetType().String())
	}
	node := expectOK(ctx, p.Node().NodeGetCapabilities, &csi.NodeGetCapabilitiesRequest{})
	for _, c := range node.GetCapabilities() {
		declared = append(declared, "node "+c.GetRpc().GetType().String())
	}
	return declared
}

var _ = describeController("the driver", harness.PluginOptions{}, func(f *fixture) {
	var all *harness.Plugin
	BeforeAll(func(ctx SpecContext) { all = f.ready(ctx, harness.PluginOptions{}) })

	It("declares exactly the capabilities that a rack can support, each once (CC-1, NC-1)", func(
		ctx SpecContext) {
		Expect(capabilities(ctx, all)).To(ConsistOf("plugin CONTROLLER_SERVICE",
			"controller CREATE_DELETE_VOLUME", "controller PUBLISH_UNPUBLISH_VOLUME",
			"controller LIST_VOLUMES", "controller LIST_VOLUMES_PUBLISHED_NODES", "controller GET_CAPACITY",
			"controller CREATE_DELETE_SNAPSHOT", "controller LIST_SNAPSHOTS", "controller GET_VOLUME",
			"controller GET_SNAPSHOT", "controller SINGLE_NODE_MULTI_WRITER", "controller GET_VOLUME_HEALTH",
			"controller LIST_VOLUME_HEALTH", "node STAGE_UNSTAGE_VOLUME", "node GET_VOLUME_STATS",
			"node SINGLE_NODE_MULTI_WRITER", "node GET_VOLUME_HEALTH", "node GET_STORAGE_HEALTH"))
	})

	It("reports the topology of nodes and volumes if a topology is configured (CAP-2, CV-23, NI-3)",
		func(ctx SpecContext) {
			const zone, instance = "topology.csi.oxide.computer/zone", "topology.csi.oxide.computer/instance"
			placed := f.ready(ctx, harness.PluginOptions{Instance: "a",
				Env: map[string]string{"OXIDE_TOPOLOGY_ZONE": "z2", "OXIDE_TOPOLOGY_INSTANCE": "true"}})
			Expect(capabilities(ctx, placed)).To(ContainElement("plugin VOLUME_ACCESSIBILITY_CONSTRAINTS"))
			node := expectOK(ctx, placed.Node().NodeGetInfo, &csi.NodeGetInfoRequest{})
			Expect(node.GetAccessibleTopology().GetSegments()).To(Equal(map[string]string{zone: "z2",
				instance: f.rack.Instance("a").ID}))
			for placement, want := range map[string]map[string]string{"rack": {zone: "z2"},
				"instance": node.GetAccessibleTopology().GetSegments()} {
				req := harness.CreateRequest(fresh("placed"))
				req.Parameters = map[string]string{"placement": placement}
				req.AccessibilityRequirements = &csi.TopologyRequirement{
					Requisite: []*csi.Topology{node.GetAccessibleTopology()}}
				created := expectOK(ctx, placed.Controller().CreateVolume, req).GetVolume()
				f.deletedLater(created.GetVolumeId())
				Expect(created.GetAccessibleTopology()).To(HaveExactElements(HaveField("Segments", want)))
			}
		})

	It("declares its capabilities without a call to the rack (CC-2)", func(ctx SpecContext) {
		Expect(f.calls(ctx, func() { capabilities(ctx, all) })).To(BeEmpty())
	})

	It("has one socket, and the same name and capabilities in every mode (GC-1, D-5, D-6)",
		func(ctx SpecContext) {
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode})
			expectServices(ctx, all, true, true)
			expectServices(ctx, f.plugin, true, false)
			expectServices(ctx, node, false, true)
			for _, p := range []*harness.Plugin{f.plugin, node} {
				Expect(identityOf(ctx, p)).To(BeComparableTo(identityOf(ctx, all), protocmp.Transform()))
			}
			info := identityOf(ctx, all)[0].(*csi.GetPluginInfoResponse)
			Expect(info.GetName()).To(Equal("csi.oxide.computer"))
			Expect(info.GetVendorVersion()).NotTo(BeEmpty())
		})

	It("answers every RPC of the standard, some with UNIMPLEMENTED (B-41, EX-1, MV-1)", func(
		ctx SpecContext) {
		rpcs, absent := 0, []string{}
		for _, service := range csiServices() {
			for i := range service.Methods().Len() {
				method := service.Methods().Get(i)
				rpcs++
				err := all.Conn.Invoke(ctx, fmt.Sprintf("/%s/%s", service.FullName(), method.Name()),
					dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output()))
				if status.Code(err) == codes.Unimplemented {
					absent = append(absent, string(method.Name()))
					continue
				}
				// No RPC changes anything for an empty request. Most refuse it, because they need a field.
				Expect(status.Code(err)).To(BeElementOf(codes.OK, codes.InvalidArgument),
					"%s: %v", method.Name(), err)
			}
		}
		Expect(rpcs).To(Equal(36), "CSI v1.13 has 36 RPCs")
		Expect(absent).To(ConsistOf("ControllerExpandVolume", "ControllerModifyVolume",
			"NodeExpandVolume", "GroupControllerGetCapabilities", "CreateVolumeGroupSnapshot",
			"DeleteVolumeGroupSnapshot", "GetVolumeGroupSnapshot", "GetMetadataAllocated",
			"GetMetadataDelta"))
	})
})

func identityOf(ctx context.Context, p *harness.Plugin) []proto.Message {
	GinkgoHelper()
	info := expectOK(ctx, p.Identity().GetPluginInfo, &csi.GetPluginInfoRequest{})
	declared := expectOK(ctx, p.Identity().GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})
	return []proto.Message{info, declared}
}

func expectServices(ctx context.Context, p *harness.Plugin, controller, node bool) {
	GinkgoHelper()
	want := map[bool]codes.Code{true: codes.OK, false: codes.Unimplemented}
	_, err := p.Controller().ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	expectRefusal(err, want[controller])
	_, err = p.Node().NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	expectRefusal(err, want[node])
}

func csiServices() []protoreflect.ServiceDescriptor {
	var services []protoreflect.ServiceDescriptor
	list := (&csi.ProbeRequest{}).ProtoReflect().Descriptor().ParentFile().Services()
	for i := range list.Len() {
		services = append(services, list.Get(i))
	}
	return services
}

func TestTheDriverImplementsOneVersionOfCSI(t *testing.T) { // B-7, B-21
	mod := csitest.Got(os.ReadFile("../go.mod"))(t)
	const want = "github.com/container-storage-interface/spec v1.13.0"
	if !strings.Contains(string(mod), want) {
		t.Fatalf("go.mod does not require %s", want)
	}
	for _, service := range csiServices() {
		if service.FullName().Parent() != "csi.v1" {
			t.Errorf("%s is not of csi.v1", service.FullName())
		}
	}
}

func TestTheDriverReadsNoReservedEnvironmentVariableButCSIEndpoint(t *testing.T) { // B-24
	reserved := regexp.MustCompile(`"CSI_[A-Z_]+"`)
	for _, pattern := range []string{"../driver/*.go", "../driver/*/*.go", "../internal/*/*.go",
		"../cmd/oxide-csi-plugin/*.go"} {
		files := csitest.Got(filepath.Glob(pattern))(t)
		for _, file := range files {
			source := csitest.Got(os.ReadFile(file))(t)
			for _, variable := range reserved.FindAllString(string(source), -1) {
				if variable != `"CSI_ENDPOINT"` {
					t.Errorf("%s reads %s, a name that CSI reserves", file, variable)
				}
			}
		}
	}
}

func TestCSISanityCoversBothAccessTypesWithOneAndTwoDriverProcesses(t *testing.T) { // B-48
	seen := map[string]bool{}
	for _, c := range csisuite.Combinations() {
		config := c.Config()
		if config.TestVolumeSize%harness.GiB != 0 || !config.TestNodeVolumeAttachLimit {
			t.Errorf("%s: size %d, limit tried: %t", c, config.TestVolumeSize,
				config.TestNodeVolumeAttachLimit)
		}
		seen[fmt.Sprintf("%s split=%t", config.TestVolumeAccessType, c.Split)] = true
	}
	for _, want := range []string{"mount split=false", "mount split=true",
		"block split=false", "block split=true"} {
		if !seen[want] {
			t.Errorf("csi-sanity does not run with %s", want)
		}
	}
}

// lifeCalls lists, by RPC, the requests that the driver sends to the rack from a volume's creation
// to its deletion. ARCHITECTURE.md has the reasons. The driver sends further reads if the rack does
// not answer a request.
var lifeCalls = map[string][]string{
	"CreateVolume": {"disk_create"},
	"ControllerPublishVolume": {"instance_disk_list", "disk_view", "instance_disk_attach",
		"instance_disk_list"},
	"ControllerUnpublishVolume": {"disk_view", "instance_disk_detach"},
	"DeleteVolume":              {"disk_view", "disk_delete"},
}

// The field Why of a rule names the read that the driver sends right before the change.
func TestConformanceRulesNameTheReadBeforeEachChange(t *testing.T) {
	want, got := map[string]string{}, map[string]string{}
	for _, operations := range lifeCalls {
		for i, operation := range operations[1:] {
			if strings.HasSuffix(operations[i], "_view") {
				want[operation] = operations[i]
			}
		}
	}
	named := regexp.MustCompile("looks first(?: \\(`(\\w+)`\\))?")
	for _, rule := range rules.All() {
		if look := named.FindStringSubmatch(rule.Why); look != nil {
			got[rule.Calls[0]] = look[1]
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the views that the driver requests before changes (-) and those in the rules (+) "+
			"differ; correct Why of the rules:\n%s", diff)
	}
}

var _ = describeController("the driver's controller", harness.PluginOptions{}, func(f *fixture) {
	It("sends 9 requests in a volume's life: create 1, publish 4, unpublish 2, delete 2 (D-27)",
		func(ctx SpecContext) {
			node := f.rack.Instance("a").ID
			req := harness.CreateRequest(fresh("frugal"))
			var volume *csi.Volume
			Expect(f.calls(ctx, func() {
				resp := expectOK(ctx, f.ctl.CreateVolume, req)
				volume = resp.GetVolume()
			})).To(Equal(lifeCalls["CreateVolume"]))
			Expect(callsOf(ctx, f, harness.PublishRequest(volume, node), f.ctl.ControllerPublishVolume)).
				To(Equal(lifeCalls["ControllerPublishVolume"]))
			Expect(callsOf(ctx, f, harness.UnpublishRequest(volume, node), f.ctl.ControllerUnpublishVolume)).
				To(Equal(lifeCalls["ControllerUnpublishVolume"]))
			Expect(callsOf(ctx, f, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()},
				f.ctl.DeleteVolume)).To(Equal(lifeCalls["DeleteVolume"]))
		})
})
