package concurrency

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
)

// place is a volume on a node: what a CO passes to each of the node's calls.
type place struct {
	s          *site
	node       *host
	volume     *csi.Volume
	published  map[string]string
	capability *csi.VolumeCapability
	staging    string
}

// newPlace makes the directories that a CO makes.
func (s *site) newPlace(n *host, volume *csi.Volume, published map[string]string,
	capability *csi.VolumeCapability) *place {
	p := &place{s, n, volume, published, capability,
		filepath.Join(n.dir, volume.GetVolumeId(), "globalmount")}
	for _, dir := range []string{p.staging, filepath.Dir(p.target(0))} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			s.wrong("prepare a path: %v", err)
		}
	}
	return p
}

// target is the path of one of the volume's workloads.
func (p *place) target(i int) string {
	return filepath.Join(p.node.dir, "pods", p.volume.GetVolumeId()+fmt.Sprint("-", i))
}

func (p *place) block() bool { return p.capability.GetBlock() != nil }

func (p *place) stage(ctx context.Context) error {
	p.s.tally.stages.Add(1)
	_, err := p.node.Node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), StagingTargetPath: p.staging,
		VolumeCapability: p.capability, PublishContext: p.published,
		VolumeContext: p.volume.GetVolumeContext(),
	})
	return err
}

func (p *place) unstage(ctx context.Context) error {
	_, err := p.node.Node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), StagingTargetPath: p.staging,
	})
	return err
}

func (p *place) publish(ctx context.Context, target string) error {
	p.s.tally.publishes.Add(1)
	_, err := p.node.Node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), StagingTargetPath: p.staging, TargetPath: target,
		VolumeCapability: p.capability, PublishContext: p.published,
		VolumeContext: p.volume.GetVolumeContext(),
	})
	return err
}

func (p *place) unpublish(ctx context.Context, target string) error {
	_, err := p.node.Node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), TargetPath: target,
	})
	return err
}

// settle stages the volume and shows it at its first target, as a CO does that does not give up.
func (p *place) settle(ctx context.Context) {
	p.s.converge(ctx, "NodeStageVolume", busy, p.stage)
	p.s.converge(ctx, "NodePublishVolume", busy, func(ctx context.Context) error {
		return p.publish(ctx, p.target(0))
	})
	staged := 1
	if p.block() {
		staged = 0
	}
	p.expect("settled", staged, 1)
}

// leave takes the volume from its targets and from the node, and looks whether it is gone.
func (p *place) leave(ctx context.Context, targets int) {
	for i := range targets {
		p.s.converge(ctx, "NodeUnpublishVolume", busy, func(ctx context.Context) error {
			return p.unpublish(ctx, p.target(i))
		})
		if _, err := os.Lstat(p.target(i)); !os.IsNotExist(err) {
			p.s.wrong("the target %s is unpublished and still there: %v", p.target(i), err)
		}
	}
	p.s.converge(ctx, "NodeUnstageVolume", busy, p.unstage)
	p.expect("left", 0, 0)
}

// expect demands that many mounts at the staging path and at the first target.
func (p *place) expect(when string, staged, shown int) {
	if got := p.s.mountsAt(p.staging); got != staged {
		p.s.wrong("%s: %d mounts at the staging path %s, want %d", when, got, p.staging, staged)
	}
	if got := p.s.mountsAt(p.target(0)); got != shown {
		p.s.wrong("%s: %d mounts at the target %s, want %d", when, got, p.target(0), shown)
	}
}

// mountsAt counts what is mounted at a path.
func (s *site) mountsAt(path string) int {
	mounts, err := mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		return info.Mountpoint != path, false
	})
	if err != nil {
		s.wrong("read the mount table: %v", err)
	}
	return len(mounts)
}

// keep writes what holds may look for later. A block volume has it in its first bytes.
func (p *place) keep(text string) {
	path, flags := filepath.Join(p.target(0), "kept"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC
	if p.block() {
		path, flags = p.target(0), os.O_WRONLY
	}
	f, err := os.OpenFile(path, flags, 0o640)
	if err == nil && p.block() {
		err = p.s.rack.Owns(f)
	}
	if err == nil {
		_, err = f.WriteString(text)
		if syncErr := f.Sync(); err == nil {
			err = syncErr
		}
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
	}
	if err != nil {
		p.s.wrong("write into a published volume: %v", err)
	}
}

// holds demands what keep wrote.
func (p *place) holds(text string) {
	path := filepath.Join(p.target(0), "kept")
	if p.block() {
		path = p.target(0)
	}
	got := make([]byte, len(text))
	f, err := os.Open(path)
	if err == nil {
		_, err = f.ReadAt(got, 0)
		_ = f.Close()
	}
	if err != nil || string(got) != text {
		p.s.wrong("the volume %s has lost what was on its disk: it reads %q, %v, and not %q",
			p.volume.GetVolumeId(), got, err, text)
	}
}

// uuid is that of the mounted filesystem, behind its device.
func (p *place) uuid() string {
	source, err := exec.Command("findmnt", "--noheadings", "--output", "SOURCE,UUID",
		p.staging).Output()
	if err != nil {
		p.s.wrong("ask for the filesystem's UUID: %v", err)
	}
	return strings.TrimSpace(string(source))
}
