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

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// The specs of the node service share one fixture, because a rack and four processes take long to
// start.
var _ = describeNodes("the node service", func(f *nodeFixture) {
	Describe("NodeStageVolume", func() {
		describeRepeatedStages(f)
		describeStages(f)
	})
	Describe("NodePublishVolume", func() { describeSharedVolumes(f) })
	Describe("NodeUnpublishVolume and NodeUnstageVolume", func() { describeBusyVolumes(f) })
	Describe("a node's information about itself and its volumes", func() { describeNodeInfo(f) })
})

// describeRepeatedStages registers specs about calls for a volume that is staged or being staged.
func describeRepeatedStages(f *nodeFixture) {
	DescribeTable("NS-7 a repeated stage finds that nothing is left to do",
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

	It("NS-9 NU-6 NP-10 other calls for a volume that is being staged are refused for now",
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

	It("B-12 a format continues when its caller has gone, and no second one runs beside it",
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

// describeStages registers specs about a first stage that is more than a format and a mount.
func describeStages(f *nodeFixture) {
	It("E-1 a filesystem that an administrator made by hand, with the volume's UUID, is used", func(
		ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		tool("mkfs.ext4", "-q", "-L", "by-hand", "-U", p.Volume.GetVolumeId(), p.device())
		p.stageAndPublish(ctx)
		out, err := exec.Command("e2label", p.device()).Output()
		Expect(err).NotTo(HaveOccurred())
		Expect(string(out)).To(Equal("by-hand\n"))
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

	It("OF-8 finds a disk whose name is longer than its serial", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("a-disk-with-a-name-longer-than-a-serial"), f.rack.Project)
		// A static volume is known only by its disk's UUID.
		p := f.attachedTo(ctx, &csi.Volume{VolumeId: disk.Id}, f.a, harness.Mounted(""))
		p.stageAndPublish(ctx)
		Expect(p.write(0)).To(Succeed())
		Expect(mountsAt(p.Staging)[0].Source).To(HaveSuffix(
			filepath.Base(f.a.device(string(disk.Name)))))
	})
}

// toolsWith returns a PATH in which a shell script replaces one tool.
func toolsWith(tool, script string) string {
	GinkgoHelper()
	dir := GinkgoT().TempDir()
	Expect(os.WriteFile(filepath.Join(dir, tool), []byte("#!/bin/sh\n"+script+"\n"), 0o755)).
		To(Succeed())
	return dir + ":" + os.Getenv("PATH")
}

// heldTool is a mke2fs that waits until it is released.
type heldTool struct{ path, dir string }

// heldFormat returns an attached volume on a node whose mke2fs waits.
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
	return errOf(os.Stat(filepath.Join(t.dir, "runs")))
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
