//go:build linux

package sanity

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

type nodeFixture struct {
	*fixture
	a, b *node
}

type node struct {
	*harness.Plugin
	rack *harness.Rack
}

// describeNodes registers a container whose specs share a fixture with nodes. rack contains further
// arguments of the simulator.
func describeNodes(text string, specs func(f *nodeFixture), rack ...string) bool {
	return Describe(text, Offset(1), Ordered, ContinueOnFailure, func() {
		f := &nodeFixture{fixture: &fixture{}}
		BeforeAll(func(ctx SpecContext) {
			f.open(ctx, fixtureOptions{rack: harness.RackOptions{Args: rack}})
			// At this level a leak of a secret into the log would be visible.
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
	device, err := n.Instance.Device(diskName)
	Expect(err).NotTo(HaveOccurred())
	return device.Path
}

type placement struct {
	*node
	harness.Placement
}

// attachedTo attaches the volume to the node's instance. At the end of the spec the volume is
// unpublished, unstaged and detached.
func (f *nodeFixture) attachedTo(
	ctx context.Context, volume *csi.Volume, n *node, capability *csi.VolumeCapability,
) *placement {
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
		Staging: n.Kubelet(name, "globalmount"),
		Target:  n.Kubelet(fresh("pod"), name)}}
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
	ctx context.Context, volume *csi.Volume, n *node, capability *csi.VolumeCapability,
) *placement {
	GinkgoHelper()
	p := f.attachedTo(ctx, volume, n, capability)
	Expect(p.stage(ctx)).To(Succeed())
	Expect(p.publish(ctx)).To(Succeed())
	return p
}

func (f *nodeFixture) detached(ctx context.Context, p *placement) {
	GinkgoHelper()
	p.remove(ctx)
	expectOK(ctx, f.ctl.ControllerUnpublishVolume,
		harness.UnpublishRequest(p.Volume, p.Instance.ID))
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

func mountsAt(path string) []*mountinfo.Info {
	GinkgoHelper()
	mounts, err := harness.MountsAt(path)
	Expect(err).NotTo(HaveOccurred())
	return mounts
}

// edges returns the first and the last MiB of a device, where every format has its signatures.
func edges(device string) string {
	GinkgoHelper()
	file, err := os.Open(device)
	Expect(err).NotTo(HaveOccurred())
	defer file.Close()
	end, err := file.Seek(0, io.SeekEnd)
	Expect(err).NotTo(HaveOccurred())
	both := make([]byte, 2*harness.MiB)
	_, err = file.ReadAt(both[:harness.MiB], 0)
	Expect(err).NotTo(HaveOccurred())
	_, err = file.ReadAt(both[harness.MiB:], end-harness.MiB)
	Expect(err).NotTo(HaveOccurred())
	return string(both)
}

func blank(edges string) bool { return strings.Trim(edges, "\x00") == "" }

// writeUntilItFails makes a pod write lines, each with an fsync, until one fails. The channel
// receives the number of the lines before.
func (p *placement) writeUntilItFails() <-chan int {
	GinkgoHelper()
	file, err := os.OpenFile(filepath.Join(p.Target, "lines"),
		os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640)
	Expect(err).NotTo(HaveOccurred())
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

// holdsLines demands that the volume contains at least the lines that a writer had synced, in
// order.
func (p *placement) holdsLines(lines int) {
	GinkgoHelper()
	text, err := os.ReadFile(filepath.Join(p.Target, "lines"))
	Expect(err).NotTo(HaveOccurred())
	found := strings.Fields(string(text))
	Expect(len(found)).To(BeNumerically(">=", lines))
	for i := range lines {
		Expect(found[i]).To(Equal(fmt.Sprint(i)))
	}
}

func (p *placement) health(ctx context.Context) []*csi.VolumeHealth_VolumeHealthEntry {
	GinkgoHelper()
	resp, err := p.Node().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{
		VolumeId: p.Volume.GetVolumeId(), VolumePublishPath: p.Target,
		StagingTargetPath: p.Staging,
	})
	Expect(err).NotTo(HaveOccurred())
	return resp.GetVolumeHealth().GetHealthStatuses()
}
