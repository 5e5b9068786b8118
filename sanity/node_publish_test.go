//go:build linux

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

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
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

func describeRefusedTargets(f *nodeFixture) {
	type change func(*csi.NodePublishVolumeRequest)
	DescribeTable("a bad request is refused, says why and leaves nothing",
		func(ctx SpecContext, bad change, code codes.Code, words ...string) {
			p := f.a.placement(&csi.Volume{VolumeId: someUUID}, harness.Mounted(""))
			req := &csi.NodePublishVolumeRequest{
				VolumeId: someUUID, StagingTargetPath: p.Staging, TargetPath: p.Target,
				VolumeCapability: harness.Mounted(""),
				PublishContext:   map[string]string{"diskName": "csi-0000000000000000"},
			}
			bad(req)
			_, err := f.a.Node().NodePublishVolume(ctx, req)
			expectRefusal(err, code, words...)
			expectGone(p.Target)
		},
		Entry("NP-2 a target that is relative", change(func(req *csi.NodePublishVolumeRequest) {
			req.TargetPath = "some/path"
		}), codes.InvalidArgument, "absolute"),
		Entry("NP-3 no staging path", change(func(req *csi.NodePublishVolumeRequest) {
			req.StagingTargetPath = ""
		}), codes.FailedPrecondition, "staging_target_path"),
		Entry("NP-4 a filesystem that the driver does not make",
			change(func(req *csi.NodePublishVolumeRequest) {
				req.VolumeCapability = harness.Mounted("ntfs")
			}), codes.FailedPrecondition, "ntfs"),
		Entry("NP-4 many nodes that write", change(func(req *csi.NodePublishVolumeRequest) {
			req.VolumeCapability = harness.InMode(
				csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, harness.Mounted(""))
		}), codes.FailedPrecondition, "MULTI_NODE_MULTI_WRITER"),
		Entry("NP-5 a volume whose disk is not here", change(func(*csi.NodePublishVolumeRequest) {
		}), codes.NotFound, "csi-0000000000000000"),
	)

	It("D-29 NP-5 a volume that is attached but not staged does not become a directory of the node",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			expectRefusal(p.publish(ctx), codes.FailedPrecondition, p.Staging)
			expectGone(p.Target)
			// Not even when another volume, or a directory, is where it should be.
			other := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			Expect(other.stage(ctx)).To(Succeed())
			stray := *p
			stray.Staging = other.Staging
			expectRefusal(stray.publish(ctx), codes.FailedPrecondition, other.Staging)
			expectGone(p.Target)
		})

	It("NP-5 a volume whose staging mount vanished is not published from the directory below",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			Expect(p.stage(ctx)).To(Succeed())
			Expect(unix.Unmount(p.Staging, 0)).To(Succeed())
			expectRefusal(p.publish(ctx), codes.FailedPrecondition, "stage")
			expectGone(p.Target)
			p.stageAndPublish(ctx)
		})

	It("NP-10 a target without a directory above it is refused, and none is made",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			Expect(p.stage(ctx)).To(Succeed())
			lost := *p
			lost.Target = filepath.Join(p.dir, fresh("nobody"), "volume")
			Expect(lost.publish(ctx)).NotTo(Succeed())
			expectGone(filepath.Dir(lost.Target))
		})
}

func describeSecondTargets(f *nodeFixture) {
	DescribeTable("NP-7 what is published otherwise at the target is not taken for the same",
		func(ctx SpecContext, capability *csi.VolumeCapability, change func(*placement)) {
			p := f.inUse(ctx, f.volume(ctx, capability), f.a, capability)
			other := *p
			change(&other)
			expectRefusal(other.publish(ctx), codes.AlreadyExists, p.Target)
			Expect(p.publish(ctx)).To(Succeed(), "the first one is as it was")
			Expect(mountsAt(p.Target)).To(HaveLen(1))
		},
		Entry("NP-7 read-only", harness.Mounted(""), func(p *placement) { p.ReadOnly = true }),
		Entry("NP-7 with other flags", harness.Mounted("ext4"), func(p *placement) {
			p.Capability = harness.Mounted("ext4", "nodev")
		}),
		Entry("NP-7 a raw volume read-only", harness.Raw(), func(p *placement) { p.ReadOnly = true }),
	)

	DescribeTable("D-31 NP-8 whether a second pod may have it is for the access mode to say",
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
				// The one that goes takes nothing from the one that stays.
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

	It("NP-8 a second pod cannot have the volume with another capability",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx), f.a, harness.InMode(multiWriter, harness.Mounted("")))
			second := p.another()
			second.Capability = harness.InMode(multiWriter, harness.Mounted("ext4", "noatime"))
			expectRefusal(second.publish(ctx), codes.FailedPrecondition, p.Target)
			expectGone(second.Target)
		})
}

func describeReadOnlyTargets(f *nodeFixture) {
	DescribeTable("NP-9 a read-only volume cannot be written",
		func(ctx SpecContext, name string) {
			volume := f.volume(ctx, harness.Access(name))
			p := f.inUse(ctx, volume, f.a, harness.Access(name))
			Expect(p.writeThrough(0)).To(Succeed())
			Expect(p.unpublish(ctx)).To(Succeed())

			p.ReadOnly = true
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.publish(ctx)).To(Succeed(), "again the same")
			Expect(p.verify(0)).To(Succeed())
			Expect(p.writeThrough(1)).NotTo(Succeed())
			Expect(p.unpublish(ctx)).To(Succeed())

			p.ReadOnly = false
			Expect(p.publish(ctx)).To(Succeed())
			Expect(p.writeThrough(1)).To(Succeed())
			Expect(p.verify(0)).To(Succeed())
		},
		Entry("NP-9 ext4", "ext4"), Entry("NP-9 xfs", "xfs"), Entry("NP-9 btrfs", "btrfs"),
		Entry("NP-9 block, where a read-only mount of a node would prevent nothing", "block"))

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

func describeTakenTargets(f *nodeFixture) {
	It("UP-1 refuses a path that is relative", func(ctx SpecContext) {
		_, err := f.a.Node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
			VolumeId: someUUID, TargetPath: "some/path",
		})
		expectRefusal(err, codes.InvalidArgument, "absolute")
	})

	DescribeTable("D-36 D-37 UP-3 UP-2 removes what publishing made, and has then nothing left to do",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			info, err := os.Stat(p.Target)
			Expect(err).NotTo(HaveOccurred())
			Expect(info.IsDir()).To(Equal(name != "block"))
			Expect(p.unpublish(ctx)).To(Succeed())
			expectGone(p.Target)
			Expect(p.unpublish(ctx)).To(Succeed())
			Expect(os.Stat(filepath.Dir(p.Target))).NotTo(BeNil(), "the orchestrator's directory stays")
		},
		Entry("UP-3 ext4", "ext4"), Entry("UP-3 block", "block"))

	It("UP-4 has nothing to do for an unknown volume", func(ctx SpecContext) {
		p := f.a.placement(&csi.Volume{VolumeId: someUUID}, harness.Mounted(""))
		Expect(p.unpublish(ctx)).To(Succeed())
		p.Volume = &csi.Volume{VolumeId: "no-uuid"}
		Expect(p.unpublish(ctx)).To(Succeed())
	})

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

	It("UP-6 leaves alone a directory that holds somebody's files", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(os.MkdirAll(p.Target, 0o750)).To(Succeed())
		file := filepath.Join(p.Target, "somebody's")
		Expect(os.WriteFile(file, []byte("data"), 0o600)).To(Succeed())
		expectRefusal(p.unpublish(ctx), codes.Internal, p.Target)
		Expect(os.ReadFile(file)).To(Equal([]byte("data")))
		Expect(os.Remove(file)).To(Succeed())
	})
}
