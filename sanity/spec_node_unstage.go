package sanity

import (
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

func describeUnstage(s *nodeScene) {
	It("NU-1 refuses a path that is relative", func(ctx SpecContext) {
		_, err := s.a.Node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: someUUID, StagingTargetPath: "some/path",
		})
		expectRefusal(err, codes.InvalidArgument, "absolute")
	})

	It("NU-2 has nothing to do for a volume that is not staged", func(ctx SpecContext) {
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(p.stage(ctx)).To(Succeed())
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(os.Remove(p.staging)).To(Succeed(), "the directory is the CO's")
		Expect(p.unstage(ctx)).To(Succeed())
	})

	It("NU-3 has nothing to do for a volume that nobody knows", func(ctx SpecContext) {
		p := s.a.hold(&csi.Volume{VolumeId: someUUID}, mounted())
		Expect(p.unstage(ctx)).To(Succeed())
		p.volume = &csi.Volume{VolumeId: "no-uuid"}
		Expect(p.unstage(ctx)).To(Succeed())
	})

	It("NU-4 takes down every layer that lies at the path", func(ctx SpecContext) {
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		Expect(p.stage(ctx)).To(Succeed())
		Expect(unix.Mount(p.staging, p.staging, "", unix.MS_BIND, "")).To(Succeed())
		Expect(mountsAt(p.staging)).To(HaveLen(2))
		Expect(p.unstage(ctx)).To(Succeed())
		Expect(mountsAt(p.staging)).To(BeEmpty())
	})

	It("NU-5 does not let go of a volume while a pod has it, and loses nothing that it wrote",
		func(ctx SpecContext) {
			p := s.settled(ctx, s.volume(ctx), s.a, mounted())
			pod := p.keepWriting()
			expectRefusal(p.unstage(ctx), codes.Internal, p.target)
			Expect(mountsAt(p.staging)).To(HaveLen(1), "a refusal changes nothing")
			Expect(mountsAt(p.target)).To(HaveLen(1))
			Expect(p.write(0)).To(Succeed())
			lines, err := pod.stop()
			Expect(err).NotTo(HaveOccurred())
			Expect(lines).NotTo(BeZero())
			s.detached(ctx, p)

			moved := s.settled(ctx, p.volume, s.b, mounted())
			moved.holdsLines(lines)
			Expect(moved.holds(0)).To(Succeed())
		})

	It("NU-5 does not let go of a volume while something has a file open at its staging path",
		func(ctx SpecContext) {
			p := s.placed(ctx, s.volume(ctx), s.a, mounted())
			Expect(p.stage(ctx)).To(Succeed())
			file, err := os.Create(filepath.Join(p.staging, "open"))
			Expect(err).NotTo(HaveOccurred())
			defer file.Close()
			expectRefusal(p.unstage(ctx), codes.Internal)
			Expect(mountsAt(p.staging)).To(HaveLen(1))
			Expect(file.Close()).To(Succeed())
			Expect(p.unstage(ctx)).To(Succeed())
		})

	It("NU-5 does not let go of a raw volume while a pod has it", func(ctx SpecContext) {
		p := s.settled(ctx, s.volume(ctx, raw()), s.a, raw())
		expectRefusal(p.unstage(ctx), codes.Internal, p.target)
		Expect(p.write(0)).To(Succeed())
		Expect(p.holds(0)).To(Succeed())
	})

	It("NU-5 does not take down what no volume has", func(ctx SpecContext) {
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		Expect(unix.Mount("tmpfs", p.staging, "tmpfs", 0, "size=1m")).To(Succeed())
		DeferCleanup(func() { Expect(unix.Unmount(p.staging, 0)).To(Succeed()) })
		expectRefusal(p.unstage(ctx), codes.AlreadyExists, "tmpfs")
		Expect(mountsAt(p.staging)).To(HaveLen(1))
	})
}
