//go:build linux

package sanity

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// An rpc is one of the standard's, by name, with a request that has every REQUIRED field. The
// objects in it do not exist.
type rpc struct {
	service, name string
	full          proto.Message
	// required are the request's REQUIRED fields; those that are no field of the request itself
	// are left to specs of their own.
	required []string
	// code is what a request without one of them gets, where it is not INVALID_ARGUMENT.
	code map[string]codes.Code
}

// rpcs are those of which the standard REQUIRES a field.
func rpcs() []rpc {
	const volume, node, path = someUUID, someUUID, "/nonexistent/kubelet/globalmount"
	return []rpc{
		{service: "Controller", name: "CreateVolume", full: harness.CreateRequest("limits"),
			required: []string{"name", "volume_capabilities"}},
		{service: "Controller", name: "DeleteVolume",
			full:     &csi.DeleteVolumeRequest{VolumeId: volume},
			required: []string{"volume_id"}},
		{service: "Controller", name: "ControllerPublishVolume",
			full:     harness.PublishRequest(&csi.Volume{VolumeId: volume}, node),
			required: []string{"volume_id", "node_id", "volume_capability"}},
		{service: "Controller", name: "ControllerUnpublishVolume",
			full:     harness.UnpublishRequest(&csi.Volume{VolumeId: volume}, node),
			required: []string{"volume_id"}},
		{service: "Controller", name: "ValidateVolumeCapabilities",
			full: &csi.ValidateVolumeCapabilitiesRequest{VolumeId: volume,
				VolumeCapabilities: []*csi.VolumeCapability{harness.Mounted("")}},
			required: []string{"volume_id", "volume_capabilities"}},
		{service: "Controller", name: "ControllerGetVolume",
			full:     &csi.ControllerGetVolumeRequest{VolumeId: volume},
			required: []string{"volume_id"}},
		{service: "Controller", name: "ControllerGetVolumeHealth",
			full:     &csi.ControllerGetVolumeHealthRequest{VolumeId: volume},
			required: []string{"volume_id"}},
		{service: "Controller", name: "CreateSnapshot",
			full:     &csi.CreateSnapshotRequest{Name: "limits", SourceVolumeId: volume},
			required: []string{"name", "source_volume_id"}},
		{service: "Controller", name: "DeleteSnapshot",
			full:     &csi.DeleteSnapshotRequest{SnapshotId: volume},
			required: []string{"snapshot_id"}},
		{service: "Controller", name: "GetSnapshot",
			full:     &csi.GetSnapshotRequest{SnapshotId: volume},
			required: []string{"snapshot_id"}},
		{service: "Node", name: "NodeStageVolume",
			full: &csi.NodeStageVolumeRequest{VolumeId: volume, StagingTargetPath: path,
				VolumeCapability: harness.Mounted(""),
				PublishContext:   map[string]string{"diskName": "csi-of-nobody-at-all"}},
			required: []string{"volume_id", "staging_target_path", "volume_capability"}},
		{service: "Node", name: "NodeUnstageVolume",
			full:     &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: path},
			required: []string{"volume_id", "staging_target_path"}},
		{service: "Node", name: "NodePublishVolume",
			full: &csi.NodePublishVolumeRequest{VolumeId: volume, StagingTargetPath: path,
				TargetPath: path + "/target", VolumeCapability: harness.Mounted("")},
			required: []string{"volume_id", "target_path", "volume_capability",
				"staging_target_path"},
			code: map[string]codes.Code{"staging_target_path": codes.FailedPrecondition}},
		{service: "Node", name: "NodeUnpublishVolume",
			full:     &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: path},
			required: []string{"volume_id", "target_path"}},
		{service: "Node", name: "NodeGetVolumeStats",
			full:     &csi.NodeGetVolumeStatsRequest{VolumeId: volume, VolumePath: path},
			required: []string{"volume_id", "volume_path"}},
		{service: "Node", name: "NodeGetVolumeHealth",
			full:     &csi.NodeGetVolumeHealthRequest{VolumeId: volume},
			required: []string{"volume_id"}},
	}
}

// field finds a field of the RPC's request by its name in the standard.
func (r rpc) field(name string) protoreflect.FieldDescriptor {
	return r.full.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
}

// without is the request without a field; with is the request with another value in it.
func (r rpc) without(field string) proto.Message {
	req := proto.Clone(r.full)
	req.ProtoReflect().Clear(r.field(field))
	return req
}

func (r rpc) with(field string, value protoreflect.Value) proto.Message {
	req := proto.Clone(r.full)
	req.ProtoReflect().Set(r.field(field), value)
	return req
}

// call sends a request, whose answer does not matter.
func (r rpc) call(ctx context.Context, p *harness.Plugin, req proto.Message) error {
	return p.Conn.Invoke(ctx, fmt.Sprintf("/csi.v1.%s/%s", r.service, r.name), req,
		&csi.ProbeResponse{})
}

var _ = describeController("the limits of every field", fixtureOptions{}, func(f *fixture) {
	var all *harness.Plugin
	BeforeAll(func(ctx SpecContext) { all = f.all(ctx) })

	// refused demands that a request is refused with the code, before the rack is asked.
	refused := func(ctx context.Context, r rpc, req proto.Message, code codes.Code) {
		GinkgoHelper()
		Expect(f.calls(ctx, func() {
			err := r.call(ctx, all, req)
			Expect(codeOf(err)).To(Equal(code), "%s %v: %v", r.name, req, err)
		})).To(BeEmpty(), r.name)
	}

	It("B-3 every RPC demands each of its REQUIRED fields", func(ctx SpecContext) {
		for _, r := range rpcs() {
			for _, field := range r.required {
				code, special := r.code[field]
				if !special {
					code = codes.InvalidArgument
				}
				refused(ctx, r, r.without(field), code)
				Expect(r.call(ctx, all, r.without(field))).To(MatchError(ContainSubstring(field)),
					"the message names the field")
			}
		}
	})

	It("B-1 every RPC refuses an ID or a name of more than 128 bytes", func(ctx SpecContext) {
		long := protoreflect.ValueOfString(strings.Repeat("x", 129))
		for _, r := range rpcs() {
			for _, field := range []string{"volume_id", "name", "source_volume_id",
				"snapshot_id"} {
				if r.field(field) != nil {
					refused(ctx, r, r.with(field, long), codes.InvalidArgument)
				}
			}
		}
	})

	It("B-2 every RPC refuses a map of more than 4 KiB", func(ctx SpecContext) {
		for _, r := range rpcs() {
			for _, field := range []string{"parameters", "secrets", "volume_context",
				"publish_context"} {
				descriptor := r.field(field)
				if descriptor == nil {
					continue
				}
				req := proto.Clone(r.full)
				big := req.ProtoReflect().Mutable(descriptor).Map()
				for i := range 41 {
					big.Set(protoreflect.ValueOfString(fmt.Sprintf("key-%d", i)).MapKey(),
						protoreflect.ValueOfString(strings.Repeat("v", 100)))
				}
				refused(ctx, r, req, codes.InvalidArgument)
			}
		}
	})

	It("B-4 a path may be as long as the system allows, if it is absolute",
		func(ctx SpecContext) {
			long := "/nonexistent" + strings.Repeat("/"+strings.Repeat("p", 109), 9)
			Expect(len(long)).To(BeNumerically(">", 1000))
			_, err := all.Node().NodeUnpublishVolume(ctx,
				&csi.NodeUnpublishVolumeRequest{VolumeId: someUUID, TargetPath: long})
			Expect(err).NotTo(HaveOccurred())
			_, err = all.Node().NodeUnstageVolume(ctx,
				&csi.NodeUnstageVolumeRequest{VolumeId: someUUID, StagingTargetPath: long})
			Expect(err).NotTo(HaveOccurred())
			for _, r := range rpcs() {
				for _, field := range []string{"target_path", "staging_target_path"} {
					if !slices.Contains(r.required, field) {
						continue
					}
					refused(ctx, r, r.with(field, protoreflect.ValueOfString("a/path")),
						codes.InvalidArgument)
				}
			}
		})

	It("B-5 every RPC refuses a negative number", func(ctx SpecContext) {
		calls := map[string]func() error{
			"CreateVolume required": func() error {
				req := harness.CreateRequest("negative")
				withRange(-1, 0)(req)
				_, err := f.ctl.CreateVolume(ctx, req)
				return err
			},
			"CreateVolume limit": func() error {
				req := harness.CreateRequest("negative")
				withRange(0, -1)(req)
				_, err := f.ctl.CreateVolume(ctx, req)
				return err
			},
			"ListVolumes": func() error {
				_, err := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: -1})
				return err
			},
			"ListSnapshots": func() error {
				_, err := f.ctl.ListSnapshots(ctx, &csi.ListSnapshotsRequest{MaxEntries: -1})
				return err
			},
			"ControllerListVolumeHealth": func() error {
				_, err := f.ctl.ControllerListVolumeHealth(ctx,
					&csi.ControllerListVolumeHealthRequest{MaxEntries: -1})
				return err
			},
		}
		for name, call := range calls {
			Expect(codeOf(call())).To(Equal(codes.InvalidArgument), name)
		}
	})

	It("B-8 every error has a code of the standard, a message and no details",
		func(ctx SpecContext) {
			// harness.ErrorRules checks every error of the suite; here it is seen to have had one.
			err := rpcs()[0].call(ctx, all, &csi.CreateVolumeRequest{})
			Expect(err).To(HaveOccurred())
			Expect(harness.ErrorFaultOf(err)).To(BeEmpty())
		})

	It("an ID that is no UUID never reaches the rack, which would take it for a name",
		func(ctx SpecContext) {
			for _, r := range rpcs() {
				for _, field := range []string{"volume_id", "source_volume_id", "snapshot_id"} {
					if r.service == "Controller" && r.field(field) != nil {
						Expect(f.calls(ctx, func() {
							_ = r.call(ctx, all, r.with(field, protoreflect.ValueOfString("name")))
						})).To(BeEmpty(), "%s with a %s that is a name", r.name, field)
					}
				}
			}
		})

	It("D-4 B-39 the node's ID is the instance's UUID, by which volumes are published to it",
		func(ctx SpecContext) {
			resp, err := all.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(resp.GetNodeId()).To(Equal(f.rack.Instance("a").ID))
			Expect(len(resp.GetNodeId())).To(BeNumerically("<=", 128))
			volume := f.volume(ctx)
			_, err = f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, resp.GetNodeId()))
			Expect(err).NotTo(HaveOccurred())
			f.unpublishedLater(volume, resp.GetNodeId())
		})
})
