//go:build linux

package sanity

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// longPath is a directory below dir whose path has more than 1,000 bytes.
func longPath(dir string) string {
	return filepath.Join(append([]string{dir}, strings.Split(
		strings.Repeat(strings.Repeat("d", 249)+"/", 4), "/")...)...)
}

// The specs of the node service share one fixture: a rack and four processes take their time.
var _ = describeNodes("the node service", func(f *nodeFixture) {
	Describe("NodeStageVolume", func() {
		describeBadStages(f)
		describeRepeatedStages(f)
		describeStagesOfUsedDisks(f)
		describeStageOptions(f)
	})
	Describe("NodeUnstageVolume", func() { describeUnstage(f) })
	Describe("NodePublishVolume", func() {
		describeRefusedTargets(f)
		describeSecondTargets(f)
		describeReadOnlyTargets(f)
	})
	Describe("NodeUnpublishVolume", func() { describeTakenTargets(f) })
	Describe("NodeGetVolumeStats", func() { describeStats(f) })
	Describe("what a node says of itself", func() { describeNodeInfo(f) })
})

// describeBadStages registers what is refused without a look at any device.
func describeBadStages(f *nodeFixture) {
	type change func(*csi.NodeStageVolumeRequest)
	mode := func(mode csi.VolumeCapability_AccessMode_Mode) change {
		return func(req *csi.NodeStageVolumeRequest) {
			req.VolumeCapability = harness.InMode(mode, harness.Mounted(""))
		}
	}
	DescribeTable("a bad request is refused and says why",
		func(ctx SpecContext, bad change, code codes.Code, words ...string) {
			req := &csi.NodeStageVolumeRequest{
				VolumeId: someUUID, StagingTargetPath: f.a.dir, VolumeCapability: harness.Mounted(""),
				PublishContext: map[string]string{"diskName": "csi-0000000000000000"},
			}
			bad(req)
			_, err := f.a.Node().NodeStageVolume(ctx, req)
			expectRefusal(err, code, words...)
			Expect(mountsAt(f.a.dir)).To(BeEmpty())
		},
		Entry("NS-2 a path that is relative", change(func(req *csi.NodeStageVolumeRequest) {
			req.StagingTargetPath = "some/path"
		}), codes.InvalidArgument, "absolute"),
		Entry("NS-3 a filesystem that the driver does not make",
			change(func(req *csi.NodeStageVolumeRequest) {
				req.VolumeCapability = harness.Mounted("ntfs")
			}), codes.FailedPrecondition, "ntfs"),
		Entry("NS-3 many nodes that write",
			mode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER),
			codes.FailedPrecondition, "MULTI_NODE_MULTI_WRITER"),
		Entry("NS-3 one node that only reads",
			mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY),
			codes.FailedPrecondition, "SINGLE_NODE_READER_ONLY"),
		Entry("NS-3 a group to mount for", change(func(req *csi.NodeStageVolumeRequest) {
			req.VolumeCapability.GetMount().VolumeMountGroup = "1000"
		}), codes.FailedPrecondition),
		Entry("NS-1 a capability without an access type",
			change(func(req *csi.NodeStageVolumeRequest) {
				req.VolumeCapability.AccessType = nil
			}), codes.InvalidArgument),
		Entry("NS-4 a disk that neither context names",
			change(func(req *csi.NodeStageVolumeRequest) { req.PublishContext = nil }),
			codes.InvalidArgument, "diskName"),
	)
}

// describeRepeatedStages registers calls for a volume that is staged or being staged.
func describeRepeatedStages(f *nodeFixture) {
	DescribeTable("NS-7 a second stage of the same finds that nothing is left to do",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(p.write(0)).To(Succeed())
			Expect(p.stage(ctx)).To(Succeed())
			Expect(mountsAt(p.Staging)).To(HaveLen(map[bool]int{true: 0, false: 1}[name == "block"]))
			Expect(p.verify(0)).To(Succeed(), "it was formatted again")
		},
		Entry("NS-7 ext4", "ext4"), Entry("NS-7 ext3", "ext3"), Entry("NS-7 xfs", "xfs"),
		Entry("NS-7 btrfs", "btrfs"), Entry("NS-12 block, which mounts nothing", "block"))

	It("NS-7 a node service that was killed knows what it staged", func(ctx SpecContext) {
		n := f.node(ctx, "a", harness.PluginOptions{})
		p := f.inUse(ctx, f.volume(ctx), n, harness.Mounted(""))
		Expect(p.write(0)).To(Succeed())
		n.Kill()
		Expect(n.Start(ctx)).To(Succeed())
		p.stageAndPublish(ctx)
		Expect(mountsAt(p.Staging)).To(HaveLen(1))
		Expect(mountsAt(p.Target)).To(HaveLen(1))
		Expect(p.verify(0)).To(Succeed())
	})

	DescribeTable("NS-8 what is staged otherwise is not taken for the same",
		func(ctx SpecContext, capability *csi.VolumeCapability) {
			p := f.attachedTo(ctx, f.volume(ctx, harness.Mounted(""), harness.Raw()), f.a,
				harness.Mounted("ext4", "noatime"))
			Expect(p.stage(ctx)).To(Succeed())
			other := *p
			other.Capability = capability
			expectRefusal(other.stage(ctx), codes.AlreadyExists, p.Staging)
			Expect(p.stage(ctx)).To(Succeed(), "the first one is as it was")
		},
		Entry("NS-8 with another filesystem", harness.Mounted("xfs", "noatime")),
		Entry("NS-8 with other flags", harness.Mounted("ext4", "nodev")),
		Entry("NS-8 with another access type", harness.Raw()),
	)

	It("NS-8 another volume is not staged over one", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(p.stage(ctx)).To(Succeed())
		over := *f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		over.Staging = p.Staging
		expectRefusal(over.stage(ctx), codes.AlreadyExists, p.Staging)
		Expect(blank(edges(over.device()))).To(BeTrue(), "it was formatted all the same")
	})

	It("NS-9 NU-6 NP-10 what else is asked of a volume that is being staged is refused for now",
		func(ctx SpecContext) {
			p, tools := f.heldFormat(ctx)
			staged := inBackground(func() (any, error) { return nil, p.stage(ctx) })
			eventually(ctx, tools.started)
			expectRefusal(p.stage(ctx), codes.Aborted)
			expectRefusal(p.unstage(ctx), codes.Aborted)
			expectRefusal(p.publish(ctx), codes.Aborted)
			tools.goOn()
			staged()
			Expect(mountsAt(p.Staging)).To(HaveLen(1))
			Expect(p.publish(ctx)).To(Succeed())
			Expect(tools.runs()).To(Equal(1))
		})

	It("B-12 a format goes on when its caller has gone, and no second format runs beside it",
		func(ctx SpecContext) {
			p, tools := f.heldFormat(ctx)
			impatient, leave := context.WithCancel(ctx)
			failed := inBackground(func() (codes.Code, error) {
				return codeOf(p.stage(impatient)), nil
			})
			eventually(ctx, tools.started)
			leave()
			Expect(failed()).To(Equal(codes.Canceled))
			expectRefusal(p.stage(ctx), codes.Aborted)
			tools.goOn()
			eventually(ctx, func() error { return p.stage(ctx) })
			Expect(tools.runs()).To(Equal(1))
			Expect(mountsAt(p.Staging)).To(HaveLen(1))
		})
}

// describeStagesOfUsedDisks registers disks that are not blank.
func describeStagesOfUsedDisks(f *nodeFixture) {
	at := func(offset int64, mark string) func(device string) {
		return func(device string) {
			file, err := os.OpenFile(device, os.O_WRONLY, 0)
			Expect(err).NotTo(HaveOccurred())
			defer file.Close()
			if offset < 0 {
				offset += harness.GiB
			}
			_, err = file.WriteAt([]byte(mark), offset)
			Expect(err).NotTo(HaveOccurred())
			Expect(file.Sync()).To(Succeed())
		}
	}
	tool := func(name string, args ...string) func(device string) {
		return func(device string) {
			out, err := exec.Command(name, append(args, device)...).CombinedOutput()
			Expect(err).NotTo(HaveOccurred(), "%s", out)
		}
	}
	DescribeTable("NS-10 a disk that holds anything else is left as it is",
		func(ctx SpecContext, access string, use func(device string)) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(access))
			device := p.device()
			use(device)
			before := edges(device)
			expectRefusal(p.stage(ctx), codes.FailedPrecondition, device)
			Expect(edges(device) == before).To(BeTrue(), "the disk was written")
			Expect(mountsAt(p.Staging)).To(BeEmpty())
		},
		Entry("NS-10 another filesystem", "ext4", tool("mkfs.xfs", "-q")),
		Entry("NS-10 another filesystem of the same family", "ext4", tool("mkfs.ext3", "-q")),
		Entry("NS-10 swap", "btrfs", tool("mkswap", "-q")),
		Entry("NS-10 an MBR partition table", "ext4", at(446,
			"\x00\x01\x01\x00\x83\x02\x03\x04\x00\x08\x00\x00\x00\x10\x00\x00"+
				strings.Repeat("\x00", 48)+"\x55\xaa")),
		Entry("NS-10 the copy of a GPT at the end", "ext4", at(-512, "EFI PART")),
		Entry("NS-10 a LUKS header", "xfs", at(0, "LUKS\xba\xbe\x00\x02")),
		Entry("NS-10 a logical volume", "ext4", at(512, "LABELONE")),
		Entry("NS-10 an unknown byte at the start", "ext4", at(700_000, "x")),
		Entry("NS-10 an unknown byte at the end", "btrfs", at(-700_000, "x")),
	)

	It("E-1 a filesystem that an administrator made by hand, with the volume's UUID, is used", func(
		ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		tool("mkfs.ext4", "-q", "-L", "by-hand", "-U", p.Volume.GetVolumeId())(p.device())
		p.stageAndPublish(ctx)
		out, err := exec.Command("e2label", p.device()).Output()
		Expect(err).NotTo(HaveOccurred())
		Expect(string(out)).To(Equal("by-hand\n"))
	})
}

// describeStageOptions registers what a caller can choose, and what must not leak of it.
func describeStageOptions(f *nodeFixture) {
	It("D-30 NS-15 mount flags apply and are never logged", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a,
			harness.Mounted("ext4", "noatime", "nosuid", "stripe=4711", "x-canary-flag"))
		for _, path := range []string{p.Staging, p.Target} {
			Expect(mountsAt(path)).To(HaveLen(1))
			Expect(mountsAt(path)[0].Options).To(ContainSubstring("noatime"))
			Expect(mountsAt(path)[0].Options).To(ContainSubstring("nosuid"))
			Expect(mountsAt(path)[0].VFSOptions).To(ContainSubstring("stripe=4711"))
		}
		Expect(f.a.logged()).NotTo(ContainSubstring("stripe"))
		Expect(f.a.logged()).NotTo(ContainSubstring("canary-flag"))
	})

	It("NS-11 B-16 a mount that the kernel refuses leaves nothing and shows no flag",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4", "canaryoption=4711"))
			err := p.stage(ctx)
			expectRefusal(err, codes.FailedPrecondition, "mount flag 1")
			Expect(err.Error()).NotTo(ContainSubstring("canaryoption"))
			Expect(f.a.logged()).NotTo(ContainSubstring("canaryoption"))
			Expect(mountsAt(p.Staging)).To(BeEmpty())
			p.Capability = harness.Mounted("ext4")
			p.stageAndPublish(ctx)
		})

	It("NS-11 a format that fails leaves nothing, and the next one succeeds",
		func(ctx SpecContext) {
			tools := toolsWith("mke2fs", `echo "no good" >&2; exit 1`)
			n := f.node(ctx, "a", harness.PluginOptions{Env: map[string]string{"PATH": tools}})
			p := f.attachedTo(ctx, f.volume(ctx), n, harness.Mounted(""))
			expectRefusal(p.stage(ctx), codes.Internal, "mke2fs", "no good")
			Expect(mountsAt(p.Staging)).To(BeEmpty())
			p.node = f.a
			p.stageAndPublish(ctx)
		})

	It("B-14 B-15 B-16 secrets that are not needed are ignored and never logged",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			p.Secrets = map[string]string{"password": "canary-secret"}
			p.stageAndPublish(ctx)
			p.Capability = harness.Mounted("xfs")
			err := p.stage(ctx)
			expectRefusal(err, codes.AlreadyExists)
			Expect(err.Error()).NotTo(ContainSubstring("canary-secret"))
			Expect(f.a.logged()).NotTo(ContainSubstring("canary-secret"))
			p.Capability = harness.Mounted("")
		})

	It("B-4 paths may be as long as the system takes", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		p.Staging, p.Target = longPath(p.Staging), longPath(filepath.Dir(p.Target))
		Expect(os.MkdirAll(p.Staging, 0o750)).To(Succeed())
		Expect(os.MkdirAll(filepath.Dir(p.Target), 0o750)).To(Succeed())
		p.stageAndPublish(ctx)
		Expect(p.write(0)).To(Succeed())
		p.remove(ctx)
	})

	It("OF-8 finds a disk whose name is longer than its serial", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("a-disk-with-a-name-longer-than-a-serial"), f.rack.Project)
		// A static volume has nothing but the disk's UUID.
		p := f.attachedTo(ctx, &csi.Volume{VolumeId: disk.Id}, f.a, harness.Mounted(""))
		p.stageAndPublish(ctx)
		Expect(p.write(0)).To(Succeed())
		Expect(mountsAt(p.Staging)[0].Source).To(HaveSuffix(
			filepath.Base(f.a.device(string(disk.Name)[:20]))))
	})
}

// toolsWith is a PATH on which a shell script takes the place of one tool.
func toolsWith(tool, script string) string {
	GinkgoHelper()
	dir := GinkgoT().TempDir()
	Expect(os.WriteFile(filepath.Join(dir, tool), []byte("#!/bin/sh\n"+script+"\n"), 0o755)).
		To(Succeed())
	return dir + ":" + os.Getenv("PATH")
}

// heldTool is a mke2fs that waits until it may go on.
type heldTool struct{ path, dir string }

// heldFormat is an attached volume on a node whose mke2fs waits.
func (f *nodeFixture) heldFormat(ctx context.Context) (*placement, heldTool) {
	GinkgoHelper()
	real, err := exec.LookPath("mke2fs")
	Expect(err).NotTo(HaveOccurred())
	dir := GinkgoT().TempDir()
	tools := heldTool{dir: dir, path: toolsWith("mke2fs", `
echo run >>"`+dir+`/runs"
while [ ! -e "`+dir+`/go" ]; do sleep 0.01; done
exec `+real+` "$@"`)}
	n := f.node(ctx, "a", harness.PluginOptions{Env: map[string]string{"PATH": tools.path}})
	p := f.attachedTo(ctx, f.volume(ctx), n, harness.Mounted(""))
	DeferCleanup(tools.goOn)
	return p, tools
}

func (t heldTool) started() error {
	_, err := os.Stat(filepath.Join(t.dir, "runs"))
	return err
}

func (t heldTool) goOn() {
	GinkgoHelper()
	Expect(os.WriteFile(filepath.Join(t.dir, "go"), nil, 0o600)).To(Succeed())
}

func (t heldTool) runs() int {
	GinkgoHelper()
	text, err := os.ReadFile(filepath.Join(t.dir, "runs"))
	Expect(err).NotTo(HaveOccurred())
	return strings.Count(string(text), "run")
}
