//go:build linux

package sanity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	mountutils "k8s.io/mount-utils"
	"k8s.io/utils/exec"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

const benchDisk = 10 * harness.GiB

// The aims: the driver's time should not exceed these multiples of the time of mkfs and mount by
// hand, and of the time of the drivers of other clouds.
const (
	aimBlank          = 1.35
	aimFormatted      = 1.15
	aimPeersBlank     = 1.0
	aimPeersFormatted = 0.8
)

// BenchmarkNode compares NodeStageVolume and NodePublishVolume with two other ways to make the same
// mounts: mkfs, mount and a bind mount by hand, and k8s.io/mount-utils, which most drivers of other
// clouds use (FormatAndMount, NeedResize, Resize and a bind mount). Each way has its own disk of
// the same instance.
func BenchmarkNode(b *testing.B) {
	bn := openBench(b)
	var contests []*contest
	for _, fsType := range []string{"ext4", "xfs"} {
		contests = append(contests, &contest{fsType: fsType, state: "blank", aim: aimBlank,
			aimPeers: aimPeersBlank}, &contest{fsType: fsType, state: "formatted", aim: aimFormatted,
			aimPeers: aimPeersFormatted})
	}
	for round := 0; b.Loop(); round++ {
		for i := 0; i < len(contests); i += 2 {
			ways, err := bn.openWays(b.Context(), contests[i].fsType, round)
			csitest.Must(b, err)
			for _, c := range contests[i : i+2] {
				csitest.Must(b, c.run(b.Context(), ways, round))
			}
			csitest.Must(b, bn.closeWays(b.Context(), ways))
		}
	}
	for _, c := range contests {
		c.report()
	}
}

type way struct {
	stage, publish func(ctx context.Context) error
	// undo removes the mounts and keeps the filesystem.
	undo func(ctx context.Context) error
	// volume is the driver's volume. disk is the disk of another way.
	volume *csi.Volume
	disk   *oxide.Disk
}

// The ways, in the order of openWays.
const (
	byDriver = iota
	byHand
	byPeers
	countOfWays
)

// contest contains the durations of all ways, for a filesystem that is created or one that exists.
type contest struct {
	fsType, state string
	aim, aimPeers float64
	staged, both  [countOfWays][]time.Duration
}

// run uses every way once. Each round begins with another way.
func (c *contest) run(ctx context.Context, ways []*way, round int) error {
	for i := range ways {
		n := (round + i) % len(ways)
		w := ways[n]
		staged, err := timed(func() error { return w.stage(ctx) })
		if err != nil {
			return err
		}
		published, err := timed(func() error { return w.publish(ctx) })
		if err != nil {
			return err
		}
		c.staged[n] = append(c.staged[n], staged)
		c.both[n] = append(c.both[n], staged+published)
		if err := w.undo(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (c *contest) report() {
	for _, part := range []struct {
		name  string
		times [countOfWays][]time.Duration
	}{{"stage-publish", c.both}, {"stage", c.staged}} {
		driver, hand := median(part.times[byDriver]), median(part.times[byHand])
		peers := median(part.times[byPeers])
		ratio, toPeers := float64(driver)/float64(hand), float64(driver)/float64(peers)
		fmt.Printf("FIGURE %s-%s-%s driver_ms=%.2f by_hand_ms=%.2f peers_path_ms=%.2f ratio=%.2f "+
			"aim=%.2f %s ratio_to_peers=%.2f aim_to_peers=%.1f %s rounds=%d\n", part.name, c.state,
			c.fsType, ms(driver), ms(hand), ms(peers), ratio, c.aim, reached(ratio, c.aim), toPeers,
			c.aimPeers, reached(toPeers, c.aimPeers), len(part.times[byDriver]))
	}
}

func (bn *bench) openWays(ctx context.Context, fsType string, round int) ([]*way, error) {
	dir := filepath.Join(bn.dir, fmt.Sprint(fsType, "-", round))
	driver, err := bn.driversWay(ctx, fsType, round, filepath.Join(dir, "driver"))
	if err != nil {
		return nil, err
	}
	ways := []*way{driver}
	for _, open := range []func(device, fsType, staging, target string) *way{
		handsWay, peersWay,
	} {
		name := fmt.Sprintf("way-%d-%s-%d", len(ways), fsType, round)
		disk, err := bn.byHand.CreateDisk(ctx, bn.rack.Project, name, benchDisk)
		if err != nil {
			return nil, err
		}
		if err := bn.byHand.AttachDisk(ctx, disk.Id, bn.rack.Instance("").ID); err != nil {
			return nil, err
		}
		device, err := bn.awaitDevice(ctx, name)
		if err != nil {
			return nil, err
		}
		staging, target := filepath.Join(dir, name, "staging"), filepath.Join(dir, name, "target")
		if err := errors.Join(os.MkdirAll(staging, 0o750), os.MkdirAll(target, 0o750)); err != nil {
			return nil, err
		}
		w := open(device, fsType, staging, target)
		w.disk = disk
		ways = append(ways, w)
	}
	return ways, nil
}

func (bn *bench) driversWay(ctx context.Context, fsType string, round int, dir string) (*way,
	error) {
	req := harness.CreateRequest(fmt.Sprint("bench-", fsType, "-", round))
	req.CapacityRange.RequiredBytes = benchDisk
	created, err := bn.driver.Controller().CreateVolume(ctx, req)
	if err != nil {
		return nil, err
	}
	volume := created.GetVolume()
	published, err := bn.driver.Controller().ControllerPublishVolume(ctx,
		harness.PublishRequest(volume, bn.rack.Instance("").ID))
	if err != nil {
		return nil, err
	}
	if _, err := bn.awaitDevice(ctx, volume.GetVolumeContext()["diskName"]); err != nil {
		return nil, err
	}
	node := bn.driver.Node()
	p := &harness.Placement{Volume: volume, Capability: harness.Mounted(fsType),
		PublishContext: published.GetPublishContext(),
		Staging:        filepath.Join(dir, "staging"), Target: filepath.Join(dir, "target")}
	return &way{
		volume:  volume,
		stage:   func(ctx context.Context) error { return p.Stage(ctx, node) },
		publish: func(ctx context.Context) error { return p.Publish(ctx, node) },
		undo:    func(ctx context.Context) error { return p.Remove(ctx, node) },
	}, p.MakeDirs()
}

// handsWay runs the commands that an administrator types. mkfs gets the driver's options: without
// them it would discard the disk first and take longer.
func handsWay(device, fsType, staging, target string) *way {
	mkfs := map[string][]string{
		"ext4": {"mkfs.ext4", "-q", "-E", "nodiscard", "-m", "0", device},
		"xfs":  {"mkfs.xfs", "-q", "-K", device},
	}[fsType]
	return &way{
		stage: func(context.Context) error {
			if mkfs != nil {
				if err := command(mkfs[0], mkfs[1:]...); err != nil {
					return err
				}
				mkfs = nil
			}
			return command("mount", device, staging)
		},
		publish: func(context.Context) error { return command("mount", "--bind", staging, target) },
		undo: func(context.Context) error {
			return errors.Join(command("umount", target), command("umount", staging))
		},
	}
}

// peersWay calls the library of the drivers of other clouds in the order in which they call it, but
// without gRPC.
func peersWay(device, fsType, staging, target string) *way {
	mounter := &mountutils.SafeFormatAndMount{Interface: mountutils.New(""), Exec: exec.New()}
	return &way{
		stage: func(context.Context) error {
			if err := mounter.FormatAndMount(device, staging, fsType, nil); err != nil {
				return err
			}
			resizer := mountutils.NewResizeFs(mounter.Exec)
			needed, err := resizer.NeedResize(device, staging)
			if err == nil && needed {
				_, err = resizer.Resize(device, staging)
			}
			return err
		},
		publish: func(context.Context) error {
			return mounter.Mount(staging, target, "", []string{"bind"})
		},
		undo: func(context.Context) error {
			return errors.Join(mounter.Unmount(target), mounter.Unmount(staging))
		},
	}
}

func (bn *bench) closeWays(ctx context.Context, ways []*way) error {
	for _, w := range ways {
		if w.volume == nil {
			if err := errors.Join(bn.byHand.DetachDisk(ctx, w.disk.Id, bn.rack.Instance("").ID),
				bn.byHand.DeleteDisk(ctx, w.disk.Id)); err != nil {
				return err
			}
			continue
		}
		_, err := bn.driver.Controller().ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(w.volume, bn.rack.Instance("").ID))
		if err != nil {
			return err
		}
		_, err = bn.driver.Controller().DeleteVolume(ctx,
			&csi.DeleteVolumeRequest{VolumeId: w.volume.GetVolumeId()})
		if err != nil {
			return err
		}
	}
	return nil
}
