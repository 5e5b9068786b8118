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

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

const benchDisk = 10 * harness.GiB

// The aims: the driver's time should not exceed these multiples of the time of mkfs and mount by
// hand.
const (
	aimBlank     = 1.35
	aimFormatted = 1.15
)

// BenchmarkNode compares NodeStageVolume and NodePublishVolume with mkfs, mount and a bind mount by
// hand, first with a blank disk and then with the filesystem that it got. Each way has its own disk
// of the same instance.
func BenchmarkNode(b *testing.B) {
	bn := openBench(b)
	for _, fsType := range []string{"ext4", "xfs"} {
		b.Run(fsType, func(b *testing.B) {
			var blank, formatted contest
			for round := 0; b.Loop(); round++ {
				driver, remove, err := bn.driversWay(b.Context(), fsType, round)
				csitest.Must(b, err)
				hand, removeToo, err := bn.handsWay(b.Context(), fsType, round)
				csitest.Must(b, err)
				for _, c := range []*contest{&blank, &formatted} {
					csitest.Must(b, c.run(b.Context(), round, driver, hand))
				}
				csitest.Must(b, errors.Join(remove(), removeToo()))
			}
			blank.report("blank-"+fsType, aimBlank)
			formatted.report("formatted-"+fsType, aimFormatted)
		})
	}
}

// way is one way to mount a volume for a workload. undo removes the mounts and keeps the
// filesystem.
type way struct{ stage, publish, undo func(context.Context) error }

// contest contains the durations of a stage, and of a stage and a publish: first the driver's.
type contest struct{ staged, both [2][]time.Duration }

// run uses both ways. Each round begins with the other way.
func (c *contest) run(ctx context.Context, round int, ways ...way) error {
	for i := range ways {
		n := (round + i) % len(ways)
		staged, err := timed(func() error { return ways[n].stage(ctx) })
		if err != nil {
			return err
		}
		published, err := timed(func() error { return ways[n].publish(ctx) })
		if err != nil {
			return err
		}
		c.staged[n] = append(c.staged[n], staged)
		c.both[n] = append(c.both[n], staged+published)
		if err := ways[n].undo(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (c *contest) report(what string, aim float64) {
	parts := map[string][2][]time.Duration{"stage-publish": c.both, "stage": c.staged}
	for part, times := range parts {
		driver, hand := median(times[0]), median(times[1])
		ratio := float64(driver) / float64(hand)
		reached := "met"
		if ratio > aim {
			reached = "missed"
		}
		fmt.Printf("FIGURE %s-%s driver_ms=%.2f by_hand_ms=%.2f ratio=%.2f aim=%.2f %s rounds=%d\n", part,
			what, ms(driver), ms(hand), ratio, aim, reached, len(times[0]))
	}
}

// driversWay uses NodeStageVolume and NodePublishVolume. remove detaches and deletes the volume.
func (bn *bench) driversWay(ctx context.Context, fsType string, round int) (w way,
	remove func() error, err error) {
	controller, node, at := bn.driver.Controller(), bn.driver.Node(), bn.rack.Instance("").ID
	req := harness.CreateRequest(fmt.Sprint("bench-", fsType, "-", round))
	req.CapacityRange.RequiredBytes = benchDisk
	created, err := controller.CreateVolume(ctx, req)
	if err != nil {
		return w, nil, err
	}
	volume := created.GetVolume()
	published, err := controller.ControllerPublishVolume(ctx, harness.PublishRequest(volume, at))
	if err != nil {
		return w, nil, err
	}
	dir := filepath.Join(bn.dir, req.GetName())
	p := &harness.Placement{Volume: volume, Capability: harness.Mounted(fsType),
		PublishContext: published.GetPublishContext(),
		Staging:        filepath.Join(dir, "staging"), Target: filepath.Join(dir, "target")}
	_, err = bn.awaitDevice(ctx, volume.GetVolumeContext()["diskName"])
	return way{
			stage:   func(ctx context.Context) error { return p.Stage(ctx, node) },
			publish: func(ctx context.Context) error { return p.Publish(ctx, node) },
			undo:    func(ctx context.Context) error { return p.Remove(ctx, node) },
		}, func() error {
			_, err := controller.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, at))
			_, deleteErr := controller.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
			return errors.Join(err, deleteErr)
		}, errors.Join(err, p.MakeDirs())
}

// handsWay runs the commands that an administrator types. mkfs gets the driver's options: without
// them it would discard the disk first and take longer. remove detaches and deletes the disk.
func (bn *bench) handsWay(ctx context.Context, fsType string, round int) (w way,
	remove func() error, err error) {
	name, at := fmt.Sprintf("by-hand-%s-%d", fsType, round), bn.rack.Instance("").ID
	disk, err := bn.byHand.CreateDisk(ctx, bn.rack.Project, name, benchDisk)
	if err != nil {
		return w, nil, err
	}
	err = bn.byHand.AttachDisk(ctx, disk.Id, at)
	device, waitErr := bn.awaitDevice(ctx, name)
	staging, target := filepath.Join(bn.dir, name, "staging"), filepath.Join(bn.dir, name, "target")
	mkfs := map[string][]string{"ext4": {"mkfs.ext4", "-q", "-E", "nodiscard", "-m", "0", device},
		"xfs": {"mkfs.xfs", "-q", "-K", device}}[fsType]
	return way{
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
		}, func() error {
			return errors.Join(bn.byHand.DetachDisk(ctx, disk.Id, at),
				bn.byHand.DeleteDisk(ctx, disk.Id))
		}, errors.Join(err, waitErr, os.MkdirAll(staging, 0o750), os.MkdirAll(target, 0o750))
}
