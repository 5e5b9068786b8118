//go:build linux

package sanity

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const someUUID = "0e5be1f8-5f0f-4d3c-9a52-2c1f1d4bd20e"

// callTimeout limits a clean-up, or a spec on a broken rack. Both take far less time.
const callTimeout = time.Minute

// fixture is a rack and the driver's controller, which the specs of a container share. Each spec
// uses names of its own and removes what it created. mustBalance checks that nothing is left.
type fixture struct {
	rack   *harness.Rack
	plugin *harness.Plugin
	ctl    csi.ControllerClient
}

// describeController registers a container whose specs share a fixture.
func describeController(text string, options harness.PluginOptions, specs func(f *fixture)) bool {
	return Describe(text, Offset(1), Ordered, ContinueOnFailure, Label("controller"), func() {
		f := &fixture{}
		BeforeAll(func(ctx SpecContext) {
			f.open(ctx, harness.RackOptions{}, options)
		}, NodeTimeout(2*time.Minute))
		specs(f)
	})
}

func (f *fixture) open(ctx context.Context, rack harness.RackOptions,
	plugin harness.PluginOptions) {
	f.rack = startRack(ctx, rack)
	f.plugin = f.controller(ctx, plugin)
	f.ctl = f.plugin.Controller()
	mustBalance(ctx, f.rack, f.plugin)
}

// controller starts another controller for the fixture's rack. It waits until this controller is
// ready, because a starting controller sends requests on its own.
func (f *fixture) controller(ctx context.Context, options harness.PluginOptions) *harness.Plugin {
	GinkgoHelper()
	options.Mode = harness.ModeController
	return f.ready(ctx, options)
}

func (f *fixture) ready(ctx context.Context, options harness.PluginOptions) *harness.Plugin {
	GinkgoHelper()
	p := startPlugin(ctx, f.rack, options)
	Expect(p.AwaitReady(ctx)).To(Succeed())
	return p
}

var freshNumber atomic.Int64

func fresh(prefix string) string {
	return fmt.Sprintf("%s-%d", prefix, freshNumber.Add(1))
}

func (f *fixture) created(ctx context.Context, req *csi.CreateVolumeRequest) *csi.Volume {
	GinkgoHelper()
	resp := expectOK(ctx, f.ctl.CreateVolume, req)
	f.deletedLater(resp.GetVolume().GetVolumeId())
	return resp.GetVolume()
}

// volume creates a volume of 1 GiB, by default for a mounted filesystem.
func (f *fixture) volume(ctx context.Context, uses ...*csi.VolumeCapability) *csi.Volume {
	GinkgoHelper()
	return f.created(ctx, harness.CreateRequest(fresh("volume"), uses...))
}

func (f *fixture) deletedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		expectOK(ctx, f.ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
	}, NodeTimeout(callTimeout))
}

func (f *fixture) published(
	ctx context.Context, volume *csi.Volume, instance string, as ...*csi.VolumeCapability,
) map[string]string {
	GinkgoHelper()
	node := f.rack.Instance(instance).ID
	req := harness.PublishRequest(volume, node)
	for _, capability := range as {
		req.VolumeCapability = capability
	}
	resp := expectOK(ctx, f.ctl.ControllerPublishVolume, req)
	DeferCleanup(func(ctx SpecContext) {
		expectOK(ctx, f.ctl.ControllerUnpublishVolume, harness.UnpublishRequest(volume, node))
	}, NodeTimeout(callTimeout))
	return resp.GetPublishContext()
}

func (f *fixture) snapshotted(ctx context.Context, volume *csi.Volume) *csi.Snapshot {
	GinkgoHelper()
	resp := expectOK(ctx, f.ctl.CreateSnapshot,
		harness.SnapshotRequest(fresh("snapshot"), volume.GetVolumeId()))
	f.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
	return resp.GetSnapshot()
}

func (f *fixture) snapshotDeletedLater(id string) {
	DeferCleanup(func(ctx SpecContext) {
		expectOK(ctx, f.ctl.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: id})
	}, NodeTimeout(callTimeout))
}

func (f *fixture) disk(ctx context.Context, id string) *oxide.Disk {
	GinkgoHelper()
	return got(f.rack.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(id)}))
}

func (f *fixture) disks(ctx context.Context) []oxide.Disk {
	GinkgoHelper()
	return got(f.rack.Client.DiskListAllPages(ctx,
		oxide.DiskListParams{Project: oxide.NameOrId(f.rack.Project)}))
}

func (f *fixture) ids(ctx context.Context) []string {
	GinkgoHelper()
	ids := []string{}
	for _, disk := range f.disks(ctx) {
		ids = append(ids, disk.Id)
	}
	return ids
}

func (f *fixture) fault(ctx context.Context, fault adminapi.Fault) (id string) {
	GinkgoHelper()
	id = got(f.rack.Admin.AddFault(ctx, fault))
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
	}, NodeTimeout(callTimeout))
	return id
}

func (f *fixture) switched(ctx context.Context, name string, now, later any) {
	GinkgoHelper()
	Expect(f.rack.Admin.Switch(ctx, map[string]any{name: now})).To(Succeed())
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.Admin.Switch(ctx, map[string]any{name: later})).To(Succeed())
	}, NodeTimeout(callTimeout))
}

// calls() runs do() and returns, in order, the operations that the rack receives meanwhile. It
// omits reads of the project, which every controller sends once a minute for Probe.
func (f *fixture) calls(ctx context.Context, do func()) []string {
	GinkgoHelper()
	before := got(f.rack.Admin.Requests(ctx, 0))
	last := 0
	if len(before) > 0 {
		last = before[len(before)-1].Seq
	}
	do()
	after := got(f.rack.Admin.Requests(ctx, last))
	operations := []string{}
	for _, request := range after {
		if request.Operation != "project_view" {
			operations = append(operations, request.Operation)
		}
	}
	return operations
}

func expectOK[Req, Resp any](
	ctx context.Context, call func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req,
) Resp {
	GinkgoHelper()
	return got(call(ctx, req))
}

func errOf[T any](_ T, err error) error { return err }

func got[T any](result T, err error) T {
	GinkgoHelper()
	Expect(err).NotTo(HaveOccurred())
	return result
}

func callsOf[Req, Resp any](ctx context.Context, f *fixture, req Req,
	call func(context.Context, Req, ...grpc.CallOption) (Resp, error)) []string {
	GinkgoHelper()
	return f.calls(ctx, func() { expectOK(ctx, call, req) })
}

func expectRefusal(err error, code codes.Code) {
	GinkgoHelper()
	Expect(status.Code(err)).To(Equal(code), "the driver answered: %v", err)
}

func expectReason(err error, code codes.Code, reason string) {
	GinkgoHelper()
	expectRefusal(err, code)
	Expect(harness.ReasonOf(status.Convert(err))).To(Equal(reason), "%v", err)
}

func eventually(ctx context.Context, ask func() error) {
	GinkgoHelper()
	Expect(harness.Await(ctx, 20*time.Second, ask)).To(Succeed())
}

func stateOf(disk *oxide.Disk) string {
	if attached, ok := disk.State.AsAttached(); ok {
		return "attached to " + attached.Instance
	}
	return string(disk.State.State())
}

type nodeFixture struct {
	*fixture
	a, b *node
}

type node struct {
	*harness.Plugin
	rack *harness.Rack
}

// describeNodes registers a container whose specs share a fixture with two nodes. The parameter
// rack has further arguments for the simulator.
func describeNodes(text string, specs func(f *nodeFixture), rack ...string) bool {
	return Describe(text, Offset(1), Ordered, ContinueOnFailure, func() {
		f := &nodeFixture{fixture: &fixture{}}
		BeforeAll(func(ctx SpecContext) {
			f.open(ctx, harness.RackOptions{Args: rack}, harness.PluginOptions{})
			// At this level, the logs of a failed spec show the messages of its calls.
			verbose := harness.PluginOptions{Args: []string{"--log-level=debug"}}
			f.a, f.b = f.node(ctx, "a", verbose), f.node(ctx, "b", verbose)
			mustBalance(ctx, f.rack, f.plugin, f.a.Plugin, f.b.Plugin)
		}, NodeTimeout(2*time.Minute))
		specs(f)
	})
}

func (f *nodeFixture) node(ctx context.Context, instance string,
	options harness.PluginOptions) *node {
	GinkgoHelper()
	options.Mode, options.Instance = harness.ModeNode, instance
	return &node{Plugin: startPlugin(ctx, f.rack, options), rack: f.rack}
}

func (n *node) device(diskName string) string {
	GinkgoHelper()
	device := got(n.Instance.Device(diskName))
	return device.Path
}

type placement struct {
	*node
	harness.Placement
}

// attachedTo attaches the volume to the node's instance. At the end of the spec it unpublishes,
// unstages and detaches the volume.
func (f *nodeFixture) attachedTo(
	ctx context.Context, volume *csi.Volume, n *node, capability *csi.VolumeCapability) *placement {
	GinkgoHelper()
	p := n.placement(volume, capability)
	p.PublishContext = f.published(ctx, volume, n.Instance.Name, capability)
	DeferCleanup(func(ctx SpecContext) { p.remove(ctx) }, NodeTimeout(callTimeout))
	return p
}

func (n *node) placement(volume *csi.Volume, capability *csi.VolumeCapability) *placement {
	GinkgoHelper()
	name := fresh("volume")
	p := &placement{n, harness.Placement{Volume: volume, Capability: capability,
		Staging: n.Kubelet(name, "globalmount"), Target: n.Kubelet(fresh("pod"), name)}}
	Expect(p.MakeDirs()).To(Succeed())
	return p
}

func (p *placement) stage(ctx context.Context) error   { return p.Stage(ctx, p.Node()) }
func (p *placement) publish(ctx context.Context) error { return p.Publish(ctx, p.Node()) }

func (p *placement) unpublish(ctx context.Context) error { return p.Unpublish(ctx, p.Node()) }
func (p *placement) unstage(ctx context.Context) error   { return p.Unstage(ctx, p.Node()) }

func (p *placement) remove(ctx context.Context) {
	GinkgoHelper()
	Expect(p.unpublish(ctx)).To(Succeed())
	Expect(p.unstage(ctx)).To(Succeed())
}

func (f *nodeFixture) inUse(
	ctx context.Context, volume *csi.Volume, n *node, capability *csi.VolumeCapability) *placement {
	GinkgoHelper()
	p := f.attachedTo(ctx, volume, n, capability)
	Expect(p.stage(ctx)).To(Succeed())
	Expect(p.publish(ctx)).To(Succeed())
	return p
}

func (f *nodeFixture) detached(ctx context.Context, p *placement) {
	GinkgoHelper()
	p.remove(ctx)
	expectOK(ctx, f.ctl.ControllerUnpublishVolume, harness.UnpublishRequest(p.Volume, p.Instance.ID))
}

func (p *placement) device() string {
	GinkgoHelper()
	return p.node.device(p.Volume.GetVolumeContext()["diskName"])
}

func (p *placement) shown() error {
	return errOf(p.Instance.Device(p.Volume.GetVolumeContext()["diskName"]))
}

const pieceSize = 4 * harness.MiB

func (p *placement) data() harness.Data {
	return harness.Data{Rack: p.rack, Target: p.Target, Raw: p.Capability.GetBlock() != nil,
		PieceBytes: pieceSize}
}

func (p *placement) writeThrough(n int) error { return p.data().Write(n, true) }

func (p *placement) verify(n int) error { return p.data().Verify(n) }

// edges returns the first and the last MiB of a device, which contain every filesystem's signature.
func edges(device string) string {
	GinkgoHelper()
	file := got(os.Open(device))
	defer file.Close()
	end := got(file.Seek(0, io.SeekEnd))
	both := make([]byte, 2*harness.MiB)
	got(file.ReadAt(both[:harness.MiB], 0))
	got(file.ReadAt(both[harness.MiB:], end-harness.MiB))
	return string(both)
}

func blank(edges string) bool { return strings.Trim(edges, "\x00") == "" }

// writeUntilItFails appends lines to a file of the volume, each with an fsync, until a write or an
// fsync fails. The channel then receives the number of lines that were synced.
func (p *placement) writeUntilItFails() <-chan int {
	GinkgoHelper()
	file := got(os.OpenFile(filepath.Join(p.Target, "lines"),
		os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640))
	acknowledged := make(chan int, 1)
	go func() {
		lines := 0
		for ; ; lines++ {
			if _, err := fmt.Fprintln(file, lines); err != nil || file.Sync() != nil {
				break
			}
		}
		_ = file.Close()
		acknowledged <- lines
	}()
	return acknowledged
}

func (p *placement) health(ctx context.Context) []*csi.VolumeHealth_VolumeHealthEntry {
	GinkgoHelper()
	resp := expectOK(ctx, p.Node().NodeGetVolumeHealth, &csi.NodeGetVolumeHealthRequest{
		VolumeId: p.Volume.GetVolumeId(), VolumePublishPath: p.Target, StagingTargetPath: p.Staging})
	return resp.GetVolumeHealth().GetHealthStatuses()
}
