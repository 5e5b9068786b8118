package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// use is a volume that is used in an instance.
type use struct {
	*checkRun
	harness.Placement
	volume   *volume
	guest    *guest.AgentClient
	instance string
	// attached and mounted are set before the call that may attach or mount, and cleared when that
	// is undone.
	attached, mounted bool
	// doubtful is set when it is unknown whether an attach took effect.
	doubtful bool
	// stopped is set while the instance may be stopped or may have no agent.
	stopped bool
}

func (u *use) mount() {
	u.Staging = u.guest.Path(u.volume.name, "staging")
	u.Target = u.guest.Path(u.volume.name, "workload", "volume")
	got[guest.Nothing](u.checkRun)(guest.MakeDirs(u.ctx, u.guest,
		[]string{u.Staging, filepath.Dir(u.Target)}))
	u.mounted = true
	u.must(u.nodeCall(u.ctx, u.Stage, "stage"))
	u.must(u.nodeCall(u.ctx, u.Publish, "publish"))
}

func (u *use) nodeCall(
	ctx context.Context, call func(context.Context, csi.NodeClient) error, verb string,
) error {
	return repeat(ctx, func() error {
		return wrap(call(ctx, csi.NewNodeClient(u.guest)), "%s volume %s", verb, u.volume.name)
	})
}

func (u *use) unmount(ctx context.Context) error {
	if !u.mounted {
		return nil
	}
	err := u.nodeCall(ctx, u.Unpublish, "unpublish")
	if err == nil {
		err = u.nodeCall(ctx, u.Unstage, "unstage")
	}
	u.mounted = err != nil
	return err
}

func (u *use) publish(ctx context.Context) error {
	req := harness.PublishRequest(u.volume.Volume, u.instance)
	req.VolumeCapability = u.Capability
	err := repeat(ctx, func() error {
		resp, err := u.Controller.ControllerPublishVolume(ctx, req)
		u.PublishContext = resp.GetPublishContext()
		return wrap(err, "attach volume %s to instance %s", u.volume.name, u.instance)
	})
	u.doubtful = err != nil && mayExist(err)
	return err
}

// unpublish detaches the volume. A rack continues an attach whose caller gave up, and may finish
// it after the detach. To attach again waits until that attach has ended.
func (u *use) unpublish(ctx context.Context) error {
	if !u.attached {
		return nil
	}
	if u.doubtful {
		_ = u.publish(ctx) // only its end matters
	}
	return repeat(ctx, func() error {
		_, err := u.Controller.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(u.volume.Volume, u.instance))
		u.attached = err != nil
		return wrap(err, "detach volume %s", u.volume.name)
	})
}

// detach detaches the volume, and demands that its instance no longer shows the device.
func (u *use) detach() {
	u.must(u.unpublish(u.ctx))
	u.awaitDevices(0)
	if u.volume.disk != nil {
		u.volume.disk.detached()
	}
}

func (u *use) leave() {
	u.must(u.unmount(u.ctx))
	u.detach()
}

func (u *use) serial() string {
	name := u.volume.GetVolumeContext()["diskName"]
	return name[:min(len(name), 20)]
}

// awaitDevices demands that the guest comes to show the given number of devices with the volume's
// serial.
func (u *use) awaitDevices(want int) {
	u.must(harness.Await(u.ctx, u.deviceTimeout(), func() error {
		facts, err := guest.ReadFacts(u.ctx, u.guest, guest.Nothing{})
		if err != nil {
			return err
		}
		var serials, names []string
		for _, d := range facts.With(u.serial()) {
			names = append(names, d.Name)
		}
		for _, d := range facts.Devices {
			serials = append(serials, d.Serial)
		}
		if len(names) != want {
			return fmt.Errorf("instance %s shows %d devices with the serial %q of volume %s, not %d: %q; "+
				"the serials it shows are %q",
				u.instance, len(names), u.serial(), u.volume.name, want, names, serials)
		}
		return nil
	}))
}

func (u *use) place() guest.Place {
	if u.volume.access == "block" {
		return guest.Place{Path: u.Target, Serial: u.serial()}
	}
	return guest.Place{Path: filepath.Join(u.Target, "blocks")}
}

// pattern returns the first blocks of a generation. On a device they are spread over the whole
// device.
func (u *use) pattern(generation uint64) guest.Pattern {
	p := guest.Pattern{Seed: u.volume.seed, Generation: generation, Count: cmp.Or(u.Blocks, 512)}
	if u.volume.access == "block" {
		spread := volumeBytes / (2 * p.Count) / guest.BlockBytes * guest.BlockBytes
		p.Stride = max(spread, guest.BlockBytes)
	}
	return p
}

// lastBlock returns the block at the end of a device, which pattern does not reach.
func (u *use) lastBlock(generation uint64) guest.Pattern {
	return guest.Pattern{Seed: u.volume.seed, Generation: generation,
		First: volumeBytes/guest.BlockBytes - 1, Count: 1}
}

// patterns returns all blocks of a generation that a check writes, on a device including the last
// block.
func (u *use) patterns(generation uint64) []guest.Pattern {
	p := u.pattern(generation)
	if u.volume.access != "block" {
		return []guest.Pattern{p}
	}
	return []guest.Pattern{p, next(p), u.lastBlock(generation)}
}

// writeAll writes all patterns of a generation. With sync they are on the disk afterwards.
func (u *use) writeAll(generation uint64, sync bool) {
	u.write(sync, u.patterns(generation)...)
}

// verifyAll demands all patterns of a generation in the volume.
func (u *use) verifyAll(generation uint64) { u.verify(u.patterns(generation)...) }

// next returns the same number of blocks, behind those of a pattern.
func next(p guest.Pattern) guest.Pattern {
	p.First += p.Count
	return p
}

// write writes patterns. With sync they are on the disk afterwards.
func (u *use) write(sync bool, patterns ...guest.Pattern) { u.must(u.tryWrite(sync, patterns...)) }

// tryWrite is write for goroutines, which cannot end the check.
func (u *use) tryWrite(sync bool, patterns ...guest.Pattern) error {
	for _, p := range patterns {
		_, err := guest.Write(u.ctx, u.guest, guest.Writing{Place: u.place(), Pattern: p, Sync: sync})
		if err != nil {
			return wrap(err, "write volume %s", u.volume.name)
		}
		for n := p.First; n < p.First+p.Count && u.volume.disk != nil; n++ {
			u.volume.disk.write(p.Range(n))
		}
	}
	return nil
}

func (u *use) verify(patterns ...guest.Pattern) {
	for _, p := range patterns {
		report, err := guest.Verify(u.ctx, u.guest, guest.Reading{Place: u.place(), Pattern: p})
		if err == nil && report.Read != p.Count {
			err = fmt.Errorf("%d blocks were read, not %d", report.Read, p.Count)
		}
		u.must(wrap(errors.Join(err, report.Err()), "verify volume %s", u.volume.name))
		u.Log.note("what was written, on "+u.volume.access, report.Read, "blocks")
		for n := p.First; n < p.First+p.Count && u.volume.disk != nil; n++ {
			u.volume.disk.read(p.Range(n))
		}
	}
}

// checkReturn takes a volume away from its instance twice. The second round detects a disk that
// returns older content than the last.
func checkReturn(s *checkRun) {
	u := s.newInUse(s.A)
	for generation := uint64(1); generation <= 2; generation++ {
		// Nothing syncs these blocks, because unstaging must write them to the disk.
		u.writeAll(generation, false)
		s.must(u.unmount(s.ctx))
		u.mount()
		s.during("after unstaging and staging", func() { u.verifyAll(generation) })
		u.leave()
		u = s.inUse(u.volume, s.A)
		s.during("after detaching and attaching", func() { u.verifyAll(generation) })
	}
}

// checkMove moves a volume to the other instance and back.
func checkMove(s *checkRun) {
	u := s.newInUse(s.A)
	written := []guest.Pattern{u.pattern(1)}
	for _, g := range []*guest.AgentClient{s.B, s.A} {
		last := written[len(written)-1]
		u.write(false, last)
		u.leave()
		u = s.inUse(u.volume, g)
		s.during("moved to "+g.Name, func() { u.verify(written...) })
		// The volume's own instance shows the device by now. The other instance must never show it.
		away := *u
		if away.guest, away.instance = s.A, "of this machine"; g == s.A {
			away.guest, away.instance = s.B, "the second"
		}
		s.during("moved to "+g.Name+", the volume is in another instance, too", func() {
			away.awaitDevices(0)
		})
		written = append(written, next(last))
	}
}

// checkRestart stops and starts the instance that has a volume attached.
func checkRestart(s *checkRun) {
	u := s.newInUse(s.B)
	u.write(true, u.pattern(1))
	s.must(u.restart(s.ctx))
	u.mount()
	s.during("after the instance was stopped and started", func() { u.verify(u.pattern(1)) })
}

// checkCut detaches a volume that is mounted and being written.
func checkCut(s *checkRun) {
	lost := s.newInUse(s.A)
	synced, dirty := lost.pattern(1), next(lost.pattern(1))
	lost.write(true, synced)
	lost.write(false, dirty)
	lost.detach()
	u := s.inUse(lost.volume, s.B)
	s.during("after a detach while it was mounted", func() { u.verify(synced) })
	report := got[guest.Report](s)(guest.Verify(s.ctx, u.guest,
		guest.Reading{Place: u.place(), Pattern: dirty}))
	for _, f := range report.Findings {
		if !f.Lost {
			s.fail("block %d, which was written and never synced, is %s: it may be what was "+
				"written, or zero, and nothing else", f.Block, f.What)
		}
	}
}
