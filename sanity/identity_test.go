//go:build linux

package sanity

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// capabilities is everything that a driver declares, in words.
func capabilities(ctx context.Context, p *harness.Plugin) []string {
	GinkgoHelper()
	var declared []string
	plugin, err := p.Identity().GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	Expect(err).NotTo(HaveOccurred())
	for _, c := range plugin.GetCapabilities() {
		if expansion := c.GetVolumeExpansion(); expansion != nil {
			declared = append(declared, "plugin EXPANSION_"+expansion.GetType().String())
			continue
		}
		declared = append(declared, "plugin "+c.GetService().GetType().String())
	}
	controller, err := p.Controller().ControllerGetCapabilities(ctx,
		&csi.ControllerGetCapabilitiesRequest{})
	Expect(err).NotTo(HaveOccurred())
	for _, c := range controller.GetCapabilities() {
		declared = append(declared, "controller "+c.GetRpc().GetType().String())
	}
	node, err := p.Node().NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	Expect(err).NotTo(HaveOccurred())
	for _, c := range node.GetCapabilities() {
		declared = append(declared, "node "+c.GetRpc().GetType().String())
	}
	return declared
}

var _ = describeController("what the driver declares", fixtureOptions{}, func(f *fixture) {
	var all *harness.Plugin
	BeforeAll(func(ctx SpecContext) { all = f.all(ctx) })

	DescribeTable("capabilities that are declared",
		func(ctx SpecContext, names ...string) {
			Expect(capabilities(ctx, all)).To(ContainElements(names))
		},
		Entry("CAP-1 the plugin has a controller", "plugin CONTROLLER_SERVICE"),
		Entry("CAP-7 volumes are created and published",
			"controller CREATE_DELETE_VOLUME", "controller PUBLISH_UNPUBLISH_VOLUME"),
		Entry("CAP-8 volumes are listed with the nodes they are published to",
			"controller LIST_VOLUMES", "controller LIST_VOLUMES_PUBLISHED_NODES"),
		Entry("CAP-9 the capacity is reported", "controller GET_CAPACITY"),
		Entry("CAP-10 snapshots are created and listed",
			"controller CREATE_DELETE_SNAPSHOT", "controller LIST_SNAPSHOTS"),
		Entry("CAP-15 one volume and one snapshot can be looked at",
			"controller GET_VOLUME", "controller GET_SNAPSHOT"),
		Entry("CAP-16 several pods of a node may share a volume, on both services",
			"controller SINGLE_NODE_MULTI_WRITER", "node SINGLE_NODE_MULTI_WRITER"),
		Entry("CAP-18 the health of volumes is reported, one by one and as a list",
			"controller GET_VOLUME_HEALTH", "controller LIST_VOLUME_HEALTH"),
		Entry("CAP-19 volumes are staged", "node STAGE_UNSTAGE_VOLUME"),
		Entry("CAP-20 nodes measure volumes", "node GET_VOLUME_STATS"),
		Entry("CAP-24 nodes report the health of volumes and of the storage",
			"node GET_VOLUME_HEALTH", "node GET_STORAGE_HEALTH"),
	)

	DescribeTable("capabilities that a rack cannot keep are not declared",
		func(ctx SpecContext, names ...string) {
			declared := capabilities(ctx, all)
			for _, name := range names {
				Expect(declared).NotTo(ContainElement(name))
			}
		},
		Entry("CAP-2 topology, unless it is configured", "plugin VOLUME_ACCESSIBILITY_CONSTRAINTS"),
		Entry("CAP-3 group snapshots", "plugin GROUP_CONTROLLER_SERVICE"),
		Entry("CAP-4 changed blocks", "plugin SNAPSHOT_METADATA_SERVICE"),
		Entry("CAP-5 where a snapshot is reachable", "plugin SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"),
		Entry("CAP-6 expansion", "plugin EXPANSION_ONLINE", "plugin EXPANSION_OFFLINE"),
		Entry("CAP-11 clones", "controller CLONE_VOLUME"),
		Entry("CAP-12 read-only attachments", "controller PUBLISH_READONLY"),
		Entry("CAP-13 expansion by the controller", "controller EXPAND_VOLUME"),
		Entry("CAP-14 the controller's reserved number", "controller 11"),
		Entry("CAP-17 modification", "controller MODIFY_VOLUME"),
		Entry("CAP-21 expansion by the node", "node EXPAND_VOLUME"),
		Entry("CAP-22 the node's reserved number", "node 4"),
		Entry("CAP-23 mounting for a group", "node VOLUME_MOUNT_GROUP"),
	)

	It("CC-1 declares nothing twice and nothing unknown", func(ctx SpecContext) {
		declared := capabilities(ctx, all)
		Expect(slices.Compact(slices.Sorted(slices.Values(declared)))).To(HaveLen(len(declared)))
		Expect(declared).NotTo(ContainElement(HaveSuffix("UNKNOWN")))
	})

	It("CC-2 declares from memory, without a call to the rack", func(ctx SpecContext) {
		Expect(f.calls(ctx, func() { capabilities(ctx, all) })).To(BeEmpty())
	})

	It("GC-1 answers the same from a node as from a controller", func(ctx SpecContext) {
		node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode})
		var answers [][]byte
		for _, p := range []*harness.Plugin{f.plugin, node, all} {
			resp, err := p.Identity().GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
			Expect(err).NotTo(HaveOccurred())
			bytes, err := proto.MarshalOptions{Deterministic: true}.Marshal(resp)
			Expect(err).NotTo(HaveOccurred())
			answers = append(answers, bytes)
		}
		Expect(answers[1]).To(Equal(answers[0]))
		Expect(answers[2]).To(Equal(answers[0]))
	})

	It("GI-2 reports one version in every mode", func(ctx SpecContext) {
		node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode})
		var versions []string
		for _, p := range []*harness.Plugin{f.plugin, node, all} {
			resp, err := p.Identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetName()).To(Equal("csi.oxide.computer"))
			versions = append(versions, resp.GetVendorVersion())
		}
		Expect(versions[0]).NotTo(BeEmpty())
		Expect(slices.Compact(versions)).To(HaveLen(1), "%v", versions)
	})

	It("D-5 B-20 serves all its services at one address, and identity in every mode",
		func(ctx SpecContext) {
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode})
			expectServices(ctx, all, true, true)
			expectServices(ctx, f.plugin, true, false)
			expectServices(ctx, node, false, true)
		})

	describeUnimplemented(func() *harness.Plugin { return all })
})

// expectServices demands that identity answers, and that the other services answer or are absent.
func expectServices(ctx context.Context, p *harness.Plugin, controller, node bool) {
	GinkgoHelper()
	_, err := p.Identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	Expect(err).NotTo(HaveOccurred())
	want := map[bool]codes.Code{true: codes.OK, false: codes.Unimplemented}
	_, err = p.Controller().ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	expectRefusal(err, want[controller])
	_, err = p.Node().NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	expectRefusal(err, want[node])
}

// describeUnimplemented registers a spec for each RPC that a rack has no use for.
func describeUnimplemented(plugin func() *harness.Plugin) {
	DescribeTable("what a rack cannot do is not implemented",
		func(ctx SpecContext, call func(context.Context, *harness.Plugin) error) {
			expectRefusal(call(ctx, plugin()), codes.Unimplemented)
		},
		Entry("D-68 EX-1 expanding a volume", func(ctx context.Context, p *harness.Plugin) error {
			_, err := p.Controller().ControllerExpandVolume(ctx,
				&csi.ControllerExpandVolumeRequest{VolumeId: "v"})
			return err
		}),
		Entry("MV-1 modifying a volume", func(ctx context.Context, p *harness.Plugin) error {
			_, err := p.Controller().ControllerModifyVolume(ctx,
				&csi.ControllerModifyVolumeRequest{VolumeId: "v"})
			return err
		}),
		Entry("NE-1 expanding a volume on the node", func(ctx context.Context, p *harness.Plugin) error {
			_, err := p.Node().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: "v"})
			return err
		}),
		Entry("GR-1 the group controller's capabilities",
			func(ctx context.Context, p *harness.Plugin) error {
				_, err := groups(p).GroupControllerGetCapabilities(ctx,
					&csi.GroupControllerGetCapabilitiesRequest{})
				return err
			}),
		Entry("GR-2 a snapshot of a group", func(ctx context.Context, p *harness.Plugin) error {
			_, err := groups(p).CreateVolumeGroupSnapshot(ctx,
				&csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{"v"}})
			return err
		}),
		Entry("GR-3 deleting a group's snapshot", func(ctx context.Context, p *harness.Plugin) error {
			_, err := groups(p).DeleteVolumeGroupSnapshot(ctx,
				&csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: "g"})
			return err
		}),
		Entry("GR-4 looking at a group's snapshot", func(ctx context.Context, p *harness.Plugin) error {
			_, err := groups(p).GetVolumeGroupSnapshot(ctx,
				&csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "g"})
			return err
		}),
		Entry("SM-1 the allocated blocks", func(ctx context.Context, p *harness.Plugin) error {
			stream, err := csi.NewSnapshotMetadataClient(p.Conn).GetMetadataAllocated(ctx,
				&csi.GetMetadataAllocatedRequest{SnapshotId: "s"})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}),
		Entry("SM-2 the changed blocks", func(ctx context.Context, p *harness.Plugin) error {
			stream, err := csi.NewSnapshotMetadataClient(p.Conn).GetMetadataDelta(ctx,
				&csi.GetMetadataDeltaRequest{BaseSnapshotId: "s", TargetSnapshotId: "t"})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}),
	)

	It("B-41 answers every RPC of the standard, if only to say that it is not implemented",
		func(ctx SpecContext) {
			rpcs, absent := 0, []string{}
			for _, service := range csiServices() {
				for i := range service.Methods().Len() {
					method := service.Methods().Get(i)
					rpcs++
					err := plugin().Conn.Invoke(ctx,
						fmt.Sprintf("/%s/%s", service.FullName(), method.Name()),
						dynamicpb.NewMessage(method.Input()),
						dynamicpb.NewMessage(method.Output()))
					if status.Code(err) == codes.Unimplemented {
						absent = append(absent, string(method.Name()))
						continue
					}
					// None of them does anything for an empty request.
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
}

// csiServices are the services of the standard, from the standard's own description.
func csiServices() []protoreflect.ServiceDescriptor {
	var services []protoreflect.ServiceDescriptor
	list := (&csi.ProbeRequest{}).ProtoReflect().Descriptor().ParentFile().Services()
	for i := range list.Len() {
		services = append(services, list.Get(i))
	}
	return services
}

func groups(p *harness.Plugin) csi.GroupControllerClient {
	return csi.NewGroupControllerClient(p.Conn)
}

// probe asks whether a plugin is ready.
func probe(ctx context.Context, p *harness.Plugin) (bool, error) {
	resp, err := p.Identity().Probe(ctx, &csi.ProbeRequest{})
	return resp.GetReady().GetValue(), err
}

var _ = describeController("Probe", fixtureOptions{}, func(f *fixture) {
	It("PR-1 is ready, and costs the rack nothing however often it is asked",
		func(ctx SpecContext) {
			Expect(f.callsAndLooks(ctx, func() {
				for range 50 {
					Expect(probe(ctx, f.plugin)).To(BeTrue())
				}
			})).To(BeEmpty())
		})

	It("PR-2 is well but not ready while the rack's first answer is outstanding",
		func(ctx SpecContext) {
			f.fault(ctx, adminapi.Fault{Operation: "project_view", Phase: adminapi.Before,
				Delay: adminapi.Duration(2 * time.Second)})
			p := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeController})
			ready, err := probe(ctx, p)
			Expect(err).NotTo(HaveOccurred())
			Expect(ready).To(BeFalse())
			Expect(p.AwaitReady(ctx)).To(Succeed())
		})

	DescribeTable("a controller that can never work",
		func(ctx SpecContext, env map[string]string, word string) {
			p := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeController, Env: env})
			var last error
			eventually(ctx, func() error {
				_, last = probe(ctx, p)
				if last == nil {
					return fmt.Errorf("the driver is well with %v", env)
				}
				return nil
			})
			expectRefusal(last, codes.FailedPrecondition, word)
		},
		Entry("PR-3 says so when the rack rejects its token",
			map[string]string{"OXIDE_TOKEN": harness.TokenPrefix + "of-nobody"}, "token"),
		Entry("PR-3 says so when there is no such project",
			map[string]string{"OXIDE_PROJECT": "nowhere"}, "project"),
	)

	It("PR-4 is not well on a node without the programs that it needs", func(ctx SpecContext) {
		p := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode,
			Env: map[string]string{"PATH": "/nonexistent"}})
		_, err := probe(ctx, p)
		expectRefusal(err, codes.FailedPrecondition, "mkfs")
	})

	It("PR-5 stays well while the rack cannot be reached", func(ctx SpecContext) {
		Expect(f.rack.Stop()).To(Succeed())
		DeferCleanup(func(ctx SpecContext) { Expect(f.rack.Start(ctx)).To(Succeed()) })
		for range 5 {
			Expect(probe(ctx, f.plugin)).To(BeTrue())
		}
		_, err := f.ctl.CreateVolume(ctx, harness.CreateRequest(fresh("down")))
		expectRefusal(err, codes.Unavailable)
	})
})
