//go:build linux

package sanity

import (
	"errors"
	"io/fs"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

// expectGone demands that nothing exists at a path.
func expectGone(path string) {
	GinkgoHelper()
	_, err := os.Lstat(path)
	Expect(errors.Is(err, fs.ErrNotExist)).To(BeTrue(), "%s is still there: %v", path, err)
}

// describeSharedVolumes registers specs about a second pod that uses a volume on the same node.
func describeSharedVolumes(f *nodeFixture) {
	DescribeTable("D-31 NP-8 the access mode decides whether a second pod may use the volume",
		func(ctx SpecContext, mode csi.VolumeCapability_AccessMode_Mode, want codes.Code) {
			for _, capability := range []*csi.VolumeCapability{harness.Mounted(""), harness.Raw()} {
				p := f.inUse(ctx, f.volume(ctx, capability), f.a, harness.InMode(mode, capability))
				second := p.another()
				err := second.publish(ctx)
				Expect(codeOf(err)).To(Equal(want), "%v", err)
				if want != codes.OK {
					expectRefusal(err, want, p.Target)
					expectGone(second.Target)
					continue
				}
				Expect(p.write(0)).To(Succeed())
				Expect(second.verify(0)).To(Succeed())
				// The unpublish of one pod does not affect the other.
				Expect(p.unpublish(ctx)).To(Succeed())
				expectRefusal(p.unstage(ctx), codes.Internal, second.Target)
				Expect(second.verify(0)).To(Succeed())
			}
		},
		Entry("NP-8 one node that writes",
			csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, codes.FailedPrecondition),
		Entry("NP-8 one pod that writes", singleWriter, codes.FailedPrecondition),
		Entry("NP-8 several pods of one node that write", multiWriter, codes.OK),
	)

	It("NP-9 a read-only pod and one that writes share a filesystem", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.InMode(multiWriter, harness.Mounted("")))
		reader := p.another()
		reader.ReadOnly = true
		Expect(reader.publish(ctx)).To(Succeed())
		Expect(p.write(0)).To(Succeed())
		Expect(reader.verify(0)).To(Succeed())
		Expect(reader.write(1)).NotTo(Succeed())
	})

	It("NP-9 a read-only pod and one that writes cannot share a device", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx, harness.InMode(multiWriter, harness.Raw())), f.a,
			harness.InMode(multiWriter, harness.Raw()))
		reader := p.another()
		reader.ReadOnly = true
		expectRefusal(reader.publish(ctx), codes.FailedPrecondition, p.Target)
		Expect(p.write(0)).To(Succeed())
	})
}

// describeBusyVolumes registers specs about pods that use a volume while it is taken away.
func describeBusyVolumes(f *nodeFixture) {
	It("UP-6 does not take a volume from a pod that has a file open, nor any of its files",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			Expect(p.write(0)).To(Succeed())
			pod := p.keepWriting()
			expectRefusal(p.unpublish(ctx), codes.Internal)
			Expect(p.verify(0)).To(Succeed())
			lines, err := pod.stop()
			Expect(err).NotTo(HaveOccurred())
			p.holdsLines(lines)
			Expect(p.unpublish(ctx)).To(Succeed())
			p.stageAndPublish(ctx)
			Expect(p.verify(0)).To(Succeed())
		})

	It("NU-5 does not unstage a volume that a pod uses, and loses nothing that the pod wrote",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			pod := p.keepWriting()
			expectRefusal(p.unstage(ctx), codes.Internal, p.Target)
			Expect(mountsAt(p.Staging)).To(HaveLen(1), "a refusal changes nothing")
			Expect(mountsAt(p.Target)).To(HaveLen(1))
			Expect(p.write(0)).To(Succeed())
			lines, err := pod.stop()
			Expect(err).NotTo(HaveOccurred())
			Expect(lines).NotTo(BeZero())
			f.detached(ctx, p)

			moved := f.inUse(ctx, p.Volume, f.b, harness.Mounted(""))
			moved.holdsLines(lines)
			Expect(moved.verify(0)).To(Succeed())
		})
}
