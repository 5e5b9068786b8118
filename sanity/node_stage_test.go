//go:build linux

package sanity

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// The specs of the node service share one fixture, because a rack and four processes take long to
// start.
var _ = describeNodes("the node service", func(f *nodeFixture) {
	describeNodeInfo(f)

	It("B-12 NS-9 NU-6 NP-10 a format continues when its caller has gone, and no other call for its "+
		"volume runs beside it",
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
			expectRefusal(p.unstage(ctx), codes.Aborted)
			expectRefusal(p.publish(ctx), codes.Aborted)
			tools.goOn()
			eventually(ctx, func() error { return p.stage(ctx) })
			Expect(tools.runs()).To(Equal(1))
			Expect(mountsAt(p.Staging)).To(HaveLen(1))
		})

	It("E-1 a filesystem that an administrator made by hand, with the volume's UUID, is used", func(
		ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		tool("mkfs.ext4", "-q", "-L", "by-hand", "-U", p.Volume.GetVolumeId(), p.device())
		p.stageAndPublish(ctx)
		out, err := exec.Command("e2label", p.device()).Output()
		Expect(err).NotTo(HaveOccurred())
		Expect(string(out)).To(Equal("by-hand\n"))
	})
})

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
