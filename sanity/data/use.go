package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// use is a volume in an instance.
type use struct {
	*session
	harness.Placement
	volume   *volume
	guest    *guest.Guest
	instance string
	// attached and mounted are set before the call that may make it so, and cleared when it is undone.
	attached, mounted bool
	// doubtful is set when nobody knows whether an attach was made.
	doubtful bool
	// stopped is set while the instance may not run, or has no agent.
	stopped bool
}

func (u *use) node() csi.NodeClient { return csi.NewNodeClient(u.guest.Conn()) }

// mount stages and publishes the volume.
func (u *use) mount(ctx context.Context) error {
	u.Staging = u.guest.Path(u.volume.name, "staging")
	u.Target = u.guest.Path(u.volume.name, "workload", "volume")
	err := u.guest.MakeDirs(ctx, u.Staging, filepath.Dir(u.Target))
	if err != nil {
		return err
	}
	u.mounted = true
	if err := repeat(ctx, func() error {
		return wrap(u.Stage(ctx, u.node()), "stage volume %s", u.volume.name)
	}); err != nil {
		return err
	}
	return repeat(ctx, func() error {
		return wrap(u.Publish(ctx, u.node()), "publish volume %s", u.volume.name)
	})
}

// unmount unpublishes and unstages the volume.
func (u *use) unmount(ctx context.Context) error {
	if !u.mounted {
		return nil
	}
	if err := repeat(ctx, func() error {
		return wrap(u.Unpublish(ctx, u.node()), "unpublish volume %s", u.volume.name)
	}); err != nil {
		return err
	}
	if err := repeat(ctx, func() error {
		return wrap(u.Unstage(ctx, u.node()), "unstage volume %s", u.volume.name)
	}); err != nil {
		return err
	}
	u.mounted = false
	return nil
}

// publish attaches the volume.
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

// unpublish detaches the volume. A rack goes on with an attach whose caller gave up, and could end
// it after the detach; asking for it again waits for that.
func (u *use) unpublish(ctx context.Context) error {
	if !u.attached {
		return nil
	}
	if u.doubtful {
		_ = u.publish(ctx) // what counts is that it has ended
	}
	return repeat(ctx, func() error {
		_, err := u.Controller.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(u.volume.Volume, u.instance))
		u.attached = err != nil
		return wrap(err, "detach volume %s", u.volume.name)
	})
}

// detach detaches the volume, and demands that its instance does not see it any more.
func (u *use) detach(ctx context.Context) error {
	if err := u.unpublish(ctx); err != nil {
		return err
	}
	return u.awaitDevices(ctx, 0)
}

// leave unmounts and detaches the volume.
func (u *use) leave(ctx context.Context) error {
	if err := u.unmount(ctx); err != nil {
		return err
	}
	return u.detach(ctx)
}

// serial is what the device of the volume's disk has.
func (u *use) serial() string {
	name := u.volume.GetVolumeContext()["diskName"]
	return name[:min(len(name), 20)]
}

// awaitDevices demands that the guest comes to see so many devices with the volume's serial.
func (u *use) awaitDevices(ctx context.Context, want int) error {
	return harness.Await(ctx, u.deviceTimeout(), func() error {
		facts, err := u.guest.Facts(ctx)
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
	})
}

// place is where the workload finds the volume's blocks.
func (u *use) place() guest.Place {
	if u.volume.access == "block" {
		return guest.Place{Path: u.Target, Serial: u.serial()}
	}
	return guest.Place{Path: filepath.Join(u.Target, "blocks")}
}

// pattern is the blocks that a volume has after a write: the first ones, of a generation. On a
// device they are spread over all of it.
func (u *use) pattern(generation uint64) guest.Pattern {
	p := guest.Pattern{Seed: u.volume.seed, Generation: generation, Count: cmp.Or(u.Blocks, 512)}
	if u.volume.access == "block" {
		spread := u.volumeBytes() / (2 * p.Count) / guest.BlockBytes * guest.BlockBytes
		p.Stride = max(spread, guest.BlockBytes)
	}
	return p
}

// lastBlock is the one at the end of a device, which a pattern does not reach.
func (u *use) lastBlock(generation uint64) guest.Pattern {
	return guest.Pattern{Seed: u.volume.seed, Generation: generation,
		First: u.volumeBytes()/guest.BlockBytes - 1, Count: 1}
}

// patterns are all blocks that a check writes of a generation: on a device to its end.
func (u *use) patterns(generation uint64) []guest.Pattern {
	p := u.pattern(generation)
	if u.volume.access != "block" {
		return []guest.Pattern{p}
	}
	return []guest.Pattern{p, next(p), u.lastBlock(generation)}
}

// writeAll writes all patterns of a generation.
func (u *use) writeAll(ctx context.Context, generation uint64, sync bool) error {
	for _, p := range u.patterns(generation) {
		if err := u.write(ctx, p, sync); err != nil {
			return err
		}
	}
	return nil
}

// verifyAll demands all patterns of a generation.
func (u *use) verifyAll(ctx context.Context, generation uint64) error {
	return u.verify(ctx, u.patterns(generation)...)
}

// next is as many blocks again, behind those of a pattern.
func next(p guest.Pattern) guest.Pattern {
	p.First += p.Count
	return p
}

// write writes a pattern, and has it on the disk with sync.
func (u *use) write(ctx context.Context, p guest.Pattern, sync bool) error {
	return wrap(u.guest.Write(ctx, guest.Writing{Place: u.place(), Pattern: p, Sync: sync}),
		"write volume %s", u.volume.name)
}

// verify demands every block of the patterns.
func (u *use) verify(ctx context.Context, patterns ...guest.Pattern) error {
	for _, p := range patterns {
		report, err := u.guest.Verify(ctx, u.place(), p)
		if err == nil && report.Read != p.Count {
			err = fmt.Errorf("%d blocks were read, not %d", report.Read, p.Count)
		}
		if err = errors.Join(err, report.Err()); err != nil {
			return wrap(err, "verify volume %s", u.volume.name)
		}
	}
	return nil
}
