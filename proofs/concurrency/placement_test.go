//go:build linux

package concurrency

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// placement is a volume on a node, with several targets.
type placement struct {
	harness.Placement
	env  *environment
	node *harness.Plugin
}

// newPlacement makes the directories that an orchestrator makes.
func (env *environment) newPlacement(n *harness.Plugin, volume *csi.Volume,
	publishContext map[string]string, capability *csi.VolumeCapability) *placement {
	p := &placement{env: env, node: n, Placement: harness.Placement{Volume: volume,
		PublishContext: publishContext, Capability: capability,
		Staging: n.Kubelet(volume.GetVolumeId(), "globalmount")}}
	p.Target = p.target(0)
	if err := p.MakeDirs(); err != nil {
		env.fail("prepare a path: %v", err)
	}
	return p
}

// target returns the target path of one of the volume's workloads.
func (p *placement) target(i int) string {
	return p.node.Kubelet("pods", p.Volume.GetVolumeId()+fmt.Sprint("-", i))
}

func (p *placement) block() bool { return p.Capability.GetBlock() != nil }

func (p *placement) stage(ctx context.Context) error {
	p.env.tally.stages.Add(1)
	return p.Stage(ctx, p.node.Node())
}

func (p *placement) unstage(ctx context.Context) error { return p.Unstage(ctx, p.node.Node()) }

// publish and unpublish return the call for a target.
func (p *placement) publish(target int) func(context.Context) error {
	return func(ctx context.Context) error {
		p.env.tally.publishes.Add(1)
		return p.at(target).Publish(ctx, p.node.Node())
	}
}

func (p *placement) unpublish(target int) func(context.Context) error {
	return func(ctx context.Context) error { return p.at(target).Unpublish(ctx, p.node.Node()) }
}

// at returns the placement of the volume at another target.
func (p *placement) at(target int) *harness.Placement {
	other := p.Placement
	other.Target = p.target(target)
	return &other
}

// stageAndPublish stages the volume and publishes it at its first target. It repeats each
// call, as an orchestrator does.
func (p *placement) stageAndPublish(ctx context.Context) {
	p.env.converge(ctx, "NodeStageVolume", busy, p.stage)
	p.env.converge(ctx, "NodePublishVolume", busy, p.publish(0))
	staged := 1
	if p.block() {
		staged = 0
	}
	p.expect("settled", staged, 1)
}

// remove unpublishes all targets, unstages the volume, and reports a failure if something is
// left.
func (p *placement) remove(ctx context.Context, targets int) {
	for i := range targets {
		p.env.converge(ctx, "NodeUnpublishVolume", busy, p.unpublish(i))
		if _, err := os.Lstat(p.target(i)); !os.IsNotExist(err) {
			p.env.fail("the target %s is unpublished and still there: %v", p.target(i), err)
		}
	}
	p.env.converge(ctx, "NodeUnstageVolume", busy, p.unstage)
	p.expect("left", 0, 0)
}

// expect reports a failure unless the staging path and the first target have these numbers of
// mounts.
func (p *placement) expect(when string, staged, shown int) {
	if got := p.env.mountsAt(p.Staging); got != staged {
		p.env.fail("%s: %d mounts at the staging path %s, want %d", when, got, p.Staging, staged)
	}
	if got := p.env.mountsAt(p.target(0)); got != shown {
		p.env.fail("%s: %d mounts at the target %s, want %d", when, got, p.target(0), shown)
	}
}

// mountsAt counts the mounts at a path.
func (env *environment) mountsAt(path string) int {
	mounts, err := harness.MountsAt(path)
	if err != nil {
		env.fail("read the mount table: %v", err)
	}
	return len(mounts)
}

// data returns the data that belong to a seed.
func (p *placement) data(seed uint64) harness.Data {
	return harness.Data{Rack: p.env.Rack, Target: p.target(0), Raw: p.block(), Seed: seed,
		PieceBytes: 4096}
}

// write writes the data of a seed, which verify expects later.
func (p *placement) write(seed uint64) {
	if err := p.data(seed).Write(0, true); err != nil {
		p.env.fail("write into a published volume: %v", err)
	}
}

func (p *placement) verify(seed uint64) {
	if err := p.data(seed).Verify(0); err != nil {
		p.env.fail("the volume %s has lost what was on its disk: %v", p.Volume.GetVolumeId(), err)
	}
}

// uuid returns the UUID of the mounted filesystem, read from its device.
func (p *placement) uuid() string {
	source, err := exec.Command("findmnt", "--noheadings", "--output", "SOURCE,UUID",
		p.Staging).Output()
	if err != nil {
		p.env.fail("ask for the filesystem's UUID: %v", err)
	}
	return strings.TrimSpace(string(source))
}
