package sanity

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
)

// expectGone demands that nothing is left at a path.
func expectGone(path string) {
	GinkgoHelper()
	_, err := os.Lstat(path)
	Expect(errors.Is(err, fs.ErrNotExist)).To(BeTrue(), "%s is still there: %v", path, err)
}

func describeRefusedTargets(s *nodeScene) {
	type change func(*csi.NodePublishVolumeRequest)
	DescribeTable("a bad request is refused, says why and leaves nothing",
		func(ctx SpecContext, bad change, code codes.Code, words ...string) {
			p := s.a.hold(&csi.Volume{VolumeId: someUUID}, mounted())
			req := &csi.NodePublishVolumeRequest{
				VolumeId: someUUID, StagingTargetPath: p.staging, TargetPath: p.target,
				VolumeCapability: mounted(),
				PublishContext:   map[string]string{"diskName": "csi-0000000000000000"},
			}
			bad(req)
			_, err := s.a.Node().NodePublishVolume(ctx, req)
			expectRefusal(err, code, words...)
			expectGone(p.target)
		},
		Entry("NP-2 a target that is relative", change(func(req *csi.NodePublishVolumeRequest) {
			req.TargetPath = "some/path"
		}), codes.InvalidArgument, "absolute"),
		Entry("NP-3 no staging path", change(func(req *csi.NodePublishVolumeRequest) {
			req.StagingTargetPath = ""
		}), codes.FailedPrecondition, "staging_target_path"),
		Entry("NP-4 a filesystem that the driver does not make",
			change(func(req *csi.NodePublishVolumeRequest) {
				req.VolumeCapability = filesystem("ntfs")
			}), codes.FailedPrecondition, "ntfs"),
		Entry("NP-4 many nodes that write", change(func(req *csi.NodePublishVolumeRequest) {
			req.VolumeCapability = inMode(
				csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, mounted())
		}), codes.FailedPrecondition, "MULTI_NODE_MULTI_WRITER"),
		Entry("NP-5 a volume whose disk is not here", change(func(*csi.NodePublishVolumeRequest) {
		}), codes.NotFound, "csi-0000000000000000"),
	)

	It("NP-5 a volume that is attached but not staged does not become a directory of the node",
		func(ctx SpecContext) {
			p := s.placed(ctx, s.volume(ctx), s.a, mounted())
			expectRefusal(p.publish(ctx), codes.FailedPrecondition, p.staging)
			expectGone(p.target)
			// Not even when another volume, or a directory, is where it should be.
			other := s.placed(ctx, s.volume(ctx), s.a, mounted())
			Expect(other.stage(ctx)).To(Succeed())
			stray := *p
			stray.staging = other.staging
			expectRefusal(stray.publish(ctx), codes.FailedPrecondition, other.staging)
			expectGone(p.target)
		})

	It("NP-5 a volume whose staging mount vanished is not published from the directory below",
		func(ctx SpecContext) {
			p := s.placed(ctx, s.volume(ctx), s.a, mounted())
			Expect(p.stage(ctx)).To(Succeed())
			Expect(unix.Unmount(p.staging, 0)).To(Succeed())
			expectRefusal(p.publish(ctx), codes.FailedPrecondition, "stage")
			expectGone(p.target)
			p.settle(ctx)
		})

	It("NP-10 a target without a directory above it is refused, and none is made",
		func(ctx SpecContext) {
			p := s.placed(ctx, s.volume(ctx), s.a, mounted())
			Expect(p.stage(ctx)).To(Succeed())
			lost := *p
			lost.target = filepath.Join(p.dir, fresh("nobody"), "volume")
			Expect(lost.publish(ctx)).NotTo(Succeed())
			expectGone(filepath.Dir(lost.target))
		})
}

func describeSecondTargets(s *nodeScene) {
	DescribeTable("NP-7 what is published otherwise at the target is not taken for the same",
		func(ctx SpecContext, capability *csi.VolumeCapability, change func(*placement)) {
			p := s.settled(ctx, s.volume(ctx, capability), s.a, capability)
			other := *p
			change(&other)
			expectRefusal(other.publish(ctx), codes.AlreadyExists, p.target)
			Expect(p.publish(ctx)).To(Succeed(), "the first one is as it was")
			Expect(mountsAt(p.target)).To(HaveLen(1))
		},
		Entry("NP-7 read-only", mounted(), func(p *placement) { p.readOnly = true }),
		Entry("NP-7 with other flags", filesystem("ext4"), func(p *placement) {
			p.capability = filesystem("ext4", "nodev")
		}),
		Entry("NP-7 a raw volume read-only", raw(), func(p *placement) { p.readOnly = true }),
	)

	DescribeTable("NP-8 whether a second pod may have it is for the access mode to say",
		func(ctx SpecContext, mode csi.VolumeCapability_AccessMode_Mode, want codes.Code) {
			for _, capability := range []*csi.VolumeCapability{mounted(), raw()} {
				p := s.settled(ctx, s.volume(ctx, capability), s.a, inMode(mode, capability))
				second := p.another()
				err := second.publish(ctx)
				Expect(codeOf(err)).To(Equal(want), "%v", err)
				if want != codes.OK {
					expectRefusal(err, want, p.target)
					expectGone(second.target)
					continue
				}
				Expect(p.write(0)).To(Succeed())
				Expect(second.holds(0)).To(Succeed())
				// The one that goes takes nothing from the one that stays.
				Expect(p.unpublish(ctx)).To(Succeed())
				expectRefusal(p.unstage(ctx), codes.Internal, second.target)
				Expect(second.holds(0)).To(Succeed())
			}
		},
		Entry("NP-8 one node that writes",
			csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, codes.FailedPrecondition),
		Entry("NP-8 one pod that writes", singleWriter, codes.FailedPrecondition),
		Entry("NP-8 several pods of one node that write", multiWriter, codes.OK),
	)

	It("NP-8 a second pod cannot have the volume with another capability",
		func(ctx SpecContext) {
			p := s.settled(ctx, s.volume(ctx), s.a, inMode(multiWriter, mounted()))
			second := p.another()
			second.capability = inMode(multiWriter, filesystem("ext4", "noatime"))
			expectRefusal(second.publish(ctx), codes.FailedPrecondition, p.target)
			expectGone(second.target)
		})
}

func describeReadOnlyTargets(s *nodeScene) {
	DescribeTable("NP-9 a read-only volume cannot be written",
		func(ctx SpecContext, name string) {
			volume := s.volume(ctx, access(name))
			p := s.settled(ctx, volume, s.a, access(name))
			Expect(p.writeThrough(0)).To(Succeed())
			Expect(p.unpublish(ctx)).To(Succeed())

			p.readOnly = true
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.publish(ctx)).To(Succeed(), "again the same")
			Expect(p.holds(0)).To(Succeed())
			Expect(p.writeThrough(1)).NotTo(Succeed())
			Expect(p.unpublish(ctx)).To(Succeed())

			p.readOnly = false
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.writeThrough(1)).To(Succeed())
			Expect(p.holds(0)).To(Succeed())
		},
		Entry("NP-9 ext4", "ext4"), Entry("NP-9 xfs", "xfs"), Entry("NP-9 btrfs", "btrfs"),
		Entry("NP-9 block, where a read-only mount of a node would stop nobody", "block"))

	It("NP-9 a read-only pod and one that writes share a filesystem", func(ctx SpecContext) {
		p := s.settled(ctx, s.volume(ctx), s.a, inMode(multiWriter, mounted()))
		reader := p.another()
		reader.readOnly = true
		Expect(reader.publish(ctx)).To(Succeed())
		Expect(p.write(0)).To(Succeed())
		Expect(reader.holds(0)).To(Succeed())
		Expect(reader.write(1)).NotTo(Succeed())
	})

	It("NP-9 a read-only pod and one that writes cannot share a device", func(ctx SpecContext) {
		p := s.settled(ctx, s.volume(ctx, inMode(multiWriter, raw())), s.a, inMode(multiWriter, raw()))
		reader := p.another()
		reader.readOnly = true
		expectRefusal(reader.publish(ctx), codes.FailedPrecondition, p.target)
		Expect(p.write(0)).To(Succeed())
	})
}

func describeTakenTargets(s *nodeScene) {
	It("UP-1 refuses a path that is relative", func(ctx SpecContext) {
		_, err := s.a.Node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
			VolumeId: someUUID, TargetPath: "some/path",
		})
		expectRefusal(err, codes.InvalidArgument, "absolute")
	})

	DescribeTable("UP-3 UP-2 removes what publishing made, and has then nothing left to do",
		func(ctx SpecContext, name string) {
			p := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			info, err := os.Stat(p.target)
			Expect(err).NotTo(HaveOccurred())
			Expect(info.IsDir()).To(Equal(name != "block"))
			Expect(p.unpublish(ctx)).To(Succeed())
			expectGone(p.target)
			Expect(p.unpublish(ctx)).To(Succeed())
			Expect(os.Stat(filepath.Dir(p.target))).NotTo(BeNil(), "the CO's directory stays")
		},
		Entry("UP-3 ext4", "ext4"), Entry("UP-3 block", "block"))

	It("UP-4 has nothing to do for a volume that nobody knows", func(ctx SpecContext) {
		p := s.a.hold(&csi.Volume{VolumeId: someUUID}, mounted())
		Expect(p.unpublish(ctx)).To(Succeed())
		p.volume = &csi.Volume{VolumeId: "no-uuid"}
		Expect(p.unpublish(ctx)).To(Succeed())
	})

	It("UP-6 does not take a volume from a pod that has a file open, nor any of its files",
		func(ctx SpecContext) {
			p := s.settled(ctx, s.volume(ctx), s.a, mounted())
			Expect(p.write(0)).To(Succeed())
			pod := p.keepWriting()
			expectRefusal(p.unpublish(ctx), codes.Internal)
			Expect(p.holds(0)).To(Succeed())
			lines, err := pod.stop()
			Expect(err).NotTo(HaveOccurred())
			p.holdsLines(lines)
			Expect(p.unpublish(ctx)).To(Succeed())
			p.settle(ctx)
			Expect(p.holds(0)).To(Succeed())
		})

	It("UP-6 leaves alone a directory that holds somebody's files", func(ctx SpecContext) {
		p := s.placed(ctx, s.volume(ctx), s.a, mounted())
		Expect(os.MkdirAll(p.target, 0o750)).To(Succeed())
		file := filepath.Join(p.target, "somebody's")
		Expect(os.WriteFile(file, []byte("data"), 0o600)).To(Succeed())
		expectRefusal(p.unpublish(ctx), codes.Internal, p.target)
		Expect(os.ReadFile(file)).To(Equal([]byte("data")))
		Expect(os.Remove(file)).To(Succeed())
	})
}
