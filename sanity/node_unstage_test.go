//go:build linux

package sanity

import (
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

func describeUnstage(f *nodeFixture) {
	It("NU-1 refuses a path that is relative", func(ctx SpecContext) {
		_, err := f.a.Node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: someUUID, StagingTargetPath: "some/path",
		})
		expectRefusal(err, codes.InvalidArgument, "absolute")
	})

	It("NU-2 has nothing to do for a volume that is not staged", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(p.stage(ctx)).To(Succeed())
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(os.Remove(p.Staging)).To(Succeed(), "the directory is the orchestrator's")
		Expect(p.unstage(ctx)).To(Succeed())
	})

	It("NU-3 has nothing to do for an unknown volume", func(ctx SpecContext) {
		p := f.a.placement(&csi.Volume{VolumeId: someUUID}, harness.Mounted(""))
		Expect(p.unstage(ctx)).To(Succeed())
		p.Volume = &csi.Volume{VolumeId: "no-uuid"}
		Expect(p.unstage(ctx)).To(Succeed())
	})

	It("NU-4 takes down every layer that lies at the path", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(p.stage(ctx)).To(Succeed())
		Expect(unix.Mount(p.Staging, p.Staging, "", unix.MS_BIND, "")).To(Succeed())
		Expect(mountsAt(p.Staging)).To(HaveLen(2))
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(mountsAt(p.Staging)).To(BeEmpty())
	})

	It("NU-5 does not let go of a volume while a pod has it, and loses nothing that it wrote",
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

	It("NU-5 does not let go of a volume while something has a file open at its staging path",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			Expect(p.stage(ctx)).To(Succeed())
			file, err := os.Create(filepath.Join(p.Staging, "open"))
			Expect(err).NotTo(HaveOccurred())
			defer file.Close()
			expectRefusal(p.unstage(ctx), codes.Internal)
			Expect(mountsAt(p.Staging)).To(HaveLen(1))
			Expect(file.Close()).To(Succeed())
			Expect(p.unstage(ctx)).To(Succeed())
		})

	It("NU-5 does not let go of a raw volume while a pod has it", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx, harness.Raw()), f.a, harness.Raw())
		expectRefusal(p.unstage(ctx), codes.Internal, p.Target)
		Expect(p.write(0)).To(Succeed())
		Expect(p.verify(0)).To(Succeed())
	})

	It("NU-5 does not take down what no volume has", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(unix.Mount("tmpfs", p.Staging, "tmpfs", 0, "size=1m")).To(Succeed())
		DeferCleanup(func() { Expect(unix.Unmount(p.Staging, 0)).To(Succeed()) })
		expectRefusal(p.unstage(ctx), codes.AlreadyExists, "tmpfs")
		Expect(mountsAt(p.Staging)).To(HaveLen(1))
	})
}
