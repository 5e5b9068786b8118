package sanity

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// callTimeout bounds a call of a spec, which is far longer than any of them takes.
const callTimeout = time.Minute

// scene is what the specs of a container share: a rack and the driver's controller. Each spec uses
// names of its own and removes what it made; a ledger at the end proves that.
type scene struct {
	rack *Rack
	// plugin is the controller's process, ctl a client of it.
	plugin *Plugin
	ctl    csi.ControllerClient
}

// sceneOptions says which rack and which controller a scene has; the zero value has the defaults of
// both.
type sceneOptions struct {
	rack   RackOptions
	plugin PluginOptions
}

// onStage registers a container whose specs share a scene. One that fails does not keep the others
// from running.
func onStage(text string, options sceneOptions, specs func(s *scene)) bool {
	return Simulated(text, Ordered, ContinueOnFailure, Label("controller"), func() {
		s := &scene{}
		BeforeAll(func(ctx SpecContext) { s.open(ctx, options) }, NodeTimeout(2*time.Minute))
		specs(s)
	})
}

func (s *scene) open(ctx context.Context, options sceneOptions) {
	s.rack = NewRack(ctx, options.rack)
	s.plugin = s.controller(ctx, options.plugin)
	s.ctl = s.plugin.Controller()
	s.rack.Balanced(ctx, s.plugin)
}

// controller starts another controller on the scene's rack, which ends with the spec. It is ready:
// it has asked the rack what it needs to know, and idles.
func (s *scene) controller(ctx context.Context, options PluginOptions) *Plugin {
	GinkgoHelper()
	options.Mode = ModeController
	p := s.rack.Plugin(ctx, options)
	awaitReady(ctx, p)
	return p
}

// all starts a driver in mode all, which ends with the spec or the container, and is ready.
func (s *scene) all(ctx context.Context) *Plugin {
	GinkgoHelper()
	p := s.rack.Plugin(ctx, PluginOptions{})
	awaitReady(ctx, p)
	return p
}

// freshNumber makes names that no other spec of this run uses.
var freshNumber atomic.Int64

func fresh(prefix string) string {
	return fmt.Sprintf("%s-%d", prefix, freshNumber.Add(1))
}

// mounted and raw are the two access types, in the mode that every orchestrator knows.
func mounted() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: accessMode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	}
}

func raw() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: accessMode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	}
}

func accessMode(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability_AccessMode {
	return &csi.VolumeCapability_AccessMode{Mode: mode}
}

// createRequest asks for a volume of 1 GiB.
func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities: []*csi.VolumeCapability{mounted()},
	}
}

func fromSnapshot(req *csi.CreateVolumeRequest, snapshot string) *csi.CreateVolumeRequest {
	req.VolumeContentSource = &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot},
		},
	}
	return req
}

// created makes the volume that the request asks for, and deletes it when the spec ends.
func (s *scene) created(ctx context.Context, req *csi.CreateVolumeRequest) *csi.Volume {
	GinkgoHelper()
	resp, err := s.ctl.CreateVolume(ctx, req)
	Expect(err).NotTo(HaveOccurred())
	s.deletedLater(resp.GetVolume().GetVolumeId())
	return resp.GetVolume()
}

// volume makes a volume of 1 GiB for these ways to have it, or for filesystems, that ends with the
// spec.
func (s *scene) volume(ctx context.Context, uses ...*csi.VolumeCapability) *csi.Volume {
	GinkgoHelper()
	req := createRequest(fresh("volume"))
	if len(uses) > 0 {
		req.VolumeCapabilities = uses
	}
	return s.created(ctx, req)
}

func (s *scene) deletedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		_, err := s.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		Expect(err).NotTo(HaveOccurred())
	}, NodeTimeout(callTimeout))
}

func publishRequest(volume *csi.Volume, node string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId: volume.GetVolumeId(), NodeId: node,
		VolumeCapability: mounted(), VolumeContext: volume.GetVolumeContext(),
	}
}

func unpublishRequest(volume *csi.Volume, node string) *csi.ControllerUnpublishVolumeRequest {
	return &csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node}
}

// published attaches the volume to the instance of that name, and detaches it when the spec ends.
// The capability is mounted() unless another is given.
func (s *scene) published(
	ctx context.Context, volume *csi.Volume, instance string, as ...*csi.VolumeCapability,
) map[string]string {
	GinkgoHelper()
	node := s.rack.Instance(instance).ID
	req := publishRequest(volume, node)
	for _, capability := range as {
		req.VolumeCapability = capability
	}
	resp, err := s.ctl.ControllerPublishVolume(ctx, req)
	Expect(err).NotTo(HaveOccurred())
	s.unpublishedLater(volume, node)
	return resp.GetPublishContext()
}

func (s *scene) unpublishedLater(volume *csi.Volume, node string) {
	DeferCleanup(func(ctx SpecContext) {
		_, err := s.ctl.ControllerUnpublishVolume(ctx, unpublishRequest(volume, node))
		Expect(err).NotTo(HaveOccurred())
	}, NodeTimeout(callTimeout))
}

// snapshotted takes a snapshot that ends with the spec.
func (s *scene) snapshotted(ctx context.Context, volume *csi.Volume) *csi.Snapshot {
	GinkgoHelper()
	resp, err := s.ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: fresh("snapshot"), SourceVolumeId: volume.GetVolumeId(),
	})
	Expect(err).NotTo(HaveOccurred())
	s.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
	return resp.GetSnapshot()
}

func (s *scene) snapshotDeletedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		_, err := s.ctl.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
		Expect(err).NotTo(HaveOccurred())
	}, NodeTimeout(callTimeout))
}

// disk is what the rack says of a volume.
func (s *scene) disk(ctx context.Context, id string) *oxide.Disk {
	GinkgoHelper()
	disk, err := s.rack.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
	Expect(err).NotTo(HaveOccurred())
	return disk
}

// disks lists the project's.
func (s *scene) disks(ctx context.Context) []oxide.Disk {
	GinkgoHelper()
	disks, err := s.rack.Client.DiskListAllPages(ctx,
		oxide.DiskListParams{Project: oxide.NameOrId(s.rack.Project)})
	Expect(err).NotTo(HaveOccurred())
	return disks
}

// rackDisk makes a disk as an administrator would, by hand, and deletes it when the spec ends.
func (s *scene) rackDisk(ctx context.Context, name, project string) *oxide.Disk {
	GinkgoHelper()
	disk, err := s.rack.Client.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(project),
		Body: &oxide.DiskCreate{
			Name: oxide.Name(name), Description: "made by hand", Size: oxide.ByteCount(gib),
			DiskBackend: blankBackend(),
		},
	})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		err := s.rack.Client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)})
		Expect(err).NotTo(HaveOccurred())
	}, NodeTimeout(callTimeout))
	return disk
}

func blankBackend() oxide.DiskBackend {
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
		DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}},
	}}
}

// fault makes the rack misbehave until the spec ends, and returns the rule's ID.
func (s *scene) fault(ctx context.Context, fault adminapi.Fault) (id string) {
	GinkgoHelper()
	id, err := s.rack.Admin.AddFault(ctx, fault)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		Expect(s.rack.Admin.ClearFaults(ctx)).To(Succeed())
	}, NodeTimeout(callTimeout))
	return id
}

// switched changes a switch of the rack until the spec ends.
func (s *scene) switched(ctx context.Context, name string, now, later any) {
	GinkgoHelper()
	Expect(s.rack.Admin.Switch(ctx, map[string]any{name: now})).To(Succeed())
	DeferCleanup(func(ctx SpecContext) {
		Expect(s.rack.Admin.Switch(ctx, map[string]any{name: later})).To(Succeed())
	}, NodeTimeout(callTimeout))
}

// calls does something and lists the operations that the rack was asked for meanwhile, in order.
// Looks at the project are left out: every controller takes one a minute, for Probe.
func (s *scene) calls(ctx context.Context, do func()) []string {
	GinkgoHelper()
	return slices.DeleteFunc(s.callsAndLooks(ctx, do), func(operation string) bool {
		return operation == "project_view"
	})
}

func (s *scene) callsAndLooks(ctx context.Context, do func()) []string {
	GinkgoHelper()
	before, err := s.rack.Admin.Requests(ctx, 0)
	Expect(err).NotTo(HaveOccurred())
	last := 0
	if len(before) > 0 {
		last = before[len(before)-1].Seq
	}
	do()
	after, err := s.rack.Admin.Requests(ctx, last)
	Expect(err).NotTo(HaveOccurred())
	operations := []string{}
	for _, request := range after {
		operations = append(operations, request.Operation)
	}
	return operations
}

// callsOf lists what an RPC costs, which must succeed.
func callsOf[Req, Resp any](
	ctx context.Context, s *scene, req Req,
	call func(context.Context, Req, ...grpc.CallOption) (Resp, error),
) []string {
	GinkgoHelper()
	return s.calls(ctx, func() {
		_, err := call(ctx, req)
		Expect(err).NotTo(HaveOccurred())
	})
}

// expectRefusal demands an error of that code whose message has each of the words.
func expectRefusal(err error, code codes.Code, words ...string) {
	GinkgoHelper()
	Expect(status.Code(err)).To(Equal(code), "the driver answered: %v", err)
	for _, word := range words {
		Expect(status.Convert(err).Message()).To(ContainSubstring(word))
	}
}

// eventually waits for a condition that something else brings about.
func eventually(ctx context.Context, ask func() error) {
	GinkgoHelper()
	Expect(await(ctx, 20*time.Second, ask)).To(Succeed())
}

// stateOf is a disk's state in one word, with the instance it is attached to.
func stateOf(disk *oxide.Disk) string {
	if attached, ok := disk.State.AsAttached(); ok {
		return "attached to " + attached.Instance
	}
	return string(disk.State.State())
}

// stopInstance and startInstance act as an administrator does, and wait for it.
func (s *scene) stopInstance(ctx context.Context, id string) {
	GinkgoHelper()
	_, err := s.rack.Client.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	Expect(err).NotTo(HaveOccurred())
	s.awaitInstance(ctx, id, oxide.InstanceStateStopped)
}

func (s *scene) startInstance(ctx context.Context, id string) {
	GinkgoHelper()
	_, err := s.rack.Client.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	Expect(err).NotTo(HaveOccurred())
	s.awaitInstance(ctx, id, oxide.InstanceStateRunning)
}

func (s *scene) instanceState(ctx context.Context, id string) oxide.InstanceState {
	GinkgoHelper()
	instance, err := s.rack.Client.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	Expect(err).NotTo(HaveOccurred())
	return instance.RunState
}

func (s *scene) awaitInstance(ctx context.Context, id string, want oxide.InstanceState) {
	GinkgoHelper()
	eventually(ctx, func() error {
		if state := s.instanceState(ctx, id); state != want {
			return fmt.Errorf("instance %s is %s, not %s", id, state, want)
		}
		return nil
	})
}

// volumeIDs lists what ListVolumes shows.
func volumeIDs(entries []*csi.ListVolumesResponse_Entry) []string {
	var ids []string
	for _, entry := range entries {
		ids = append(ids, entry.GetVolume().GetVolumeId())
	}
	return ids
}
