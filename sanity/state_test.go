//go:build linux

package sanity

import (
	"context"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// stateDir is the directory in which the node records the disk of each volume.
func (n *node) stateDir() string { return filepath.Join(n.Dir, "volumes") }

// records returns the files in which the node records the disk of each volume.
func (n *node) records() []string {
	GinkgoHelper()
	files, err := filepath.Glob(filepath.Join(n.stateDir(), "*.json"))
	Expect(err).NotTo(HaveOccurred())
	return files
}

// dieAndReturn kills the node's driver and starts it again.
func (n *node) dieAndReturn(ctx context.Context) {
	GinkgoHelper()
	n.Kill()
	Expect(n.Start(ctx)).To(Succeed())
}

var _ = describeOutage("the node's driver is killed and started again", func(f *nodeFixture) {
	var n *node
	BeforeEach(func(ctx SpecContext) { n = f.node(ctx, "a", harness.PluginOptions{}) })

	It("NU-5 and does not unstage a raw volume that a pod uses", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx, harness.Raw()), n, harness.Raw())
		Expect(p.write(0)).To(Succeed())
		n.dieAndReturn(ctx)
		expectReason(p.unstage(ctx), codes.Internal, "StillMounted")
		expectRefusal(p.unstage(ctx), codes.Internal, p.Target)
		Expect(p.verify(0)).To(Succeed())
		Expect(n.records()).To(HaveLen(1))
		f.detached(ctx, p)
		Expect(n.records()).To(BeEmpty(), "what is unstaged is forgotten")
	})

	DescribeTable("VS-5 and recognizes a path that shows another volume",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), n, harness.Access(name))
			other := f.inUse(ctx, f.volume(ctx, harness.Access(name)), n, harness.Access(name))
			n.dieAndReturn(ctx)
			_, err := n.Node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
				VolumeId: p.Volume.GetVolumeId(), VolumePath: other.Target,
			})
			expectReason(err, codes.NotFound, "VolumeNotAtPath")
			_, err = n.Node().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{
				VolumeId: p.Volume.GetVolumeId(), VolumePublishPath: other.Target,
			})
			expectReason(err, codes.NotFound, "VolumeNotAtPath")
		},
		Entry("killed over ext4", "ext4"), Entry("killed over block", "block"))

	DescribeTable("B-10 and its state directory is lost before any call, and the life goes on",
		func(ctx SpecContext, name string) {
			p := f.attachedTo(ctx, f.volume(ctx, harness.Access(name)), n, harness.Access(name))
			for i, step := range []func(context.Context) error{
				p.stage, p.stage, p.publish, p.publish,
				func(context.Context) error { return p.writeThrough(0) },
				p.unpublish, p.unpublish, p.unstage, p.unstage, p.stage, p.publish,
				func(context.Context) error { return p.verify(0) },
			} {
				n.Kill()
				Expect(os.RemoveAll(n.stateDir())).To(Succeed())
				Expect(n.Start(ctx)).To(Succeed())
				Expect(step(ctx)).To(Succeed(), "step %d", i)
			}
			f.detached(ctx, p)
		},
		Entry("over ext4", "ext4"), Entry("over btrfs", "btrfs"), Entry("over block", "block"))

	It("B-10 and a truncated record is named in the log and stops no call",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx, harness.Raw()), n, harness.Raw())
			record := filepath.Join(n.stateDir(), p.Volume.GetVolumeId()+".json")
			Expect(os.Truncate(record, 20)).To(Succeed())
			n.dieAndReturn(ctx)
			Expect(n.logged()).To(ContainSubstring(filepath.Base(record)))
			Expect(p.publish(ctx)).To(Succeed())
			expectReason(p.unstage(ctx), codes.Internal, "StillMounted")
			f.detached(ctx, p)
		})
})
