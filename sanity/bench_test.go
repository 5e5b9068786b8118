package sanity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// The benchmarks measure the driver beside the same work done without it, in turns within one run,
// so that whatever else the machine does hits both. Each prints its medians as FIGURE lines:
//
//	make bench
//
// An aim is what the driver should reach. Missing one does not fail a benchmark: a figure is to be
// read, and another machine has another one.
const (
	aimBlank      = 1.2
	aimFormatted  = 1.5
	aimController = 1.3
	aimListMS     = 1000
)

// bench is a rack and a driver whose programs are built as they are shipped.
type bench struct {
	run    *Run
	rack   *Rack
	driver *Plugin
	// sdk is Oxide's client as anybody gets it.
	sdk *oxide.Client
	dir string
}

func openBench(b *testing.B) *bench {
	b.Helper()
	run, err := NewRun(os.Stdout)
	must(b, err)
	b.Cleanup(func() { must(b, run.Close()) })
	buildShipped(b, run)
	rack, err := run.StartRack(b.Context(), RackOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, rack.Stop()) })
	driver, err := rack.StartPlugin(b.Context(), PluginOptions{})
	must(b, err)
	b.Cleanup(func() { must(b, driver.Stop()) })
	sdk, err := oxide.NewClient(oxide.WithHost(rack.URL), oxide.WithToken(rack.Token))
	must(b, err)
	return &bench{run: run, rack: rack, driver: driver, sdk: sdk,
		dir: filepath.Join(rack.Dir, "bench")}
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// buildShipped builds the programs as `make build` does and lets the harness use them.
func buildShipped(b *testing.B, run *Run) {
	b.Helper()
	dir := filepath.Join(run.Dir, "shipped")
	for _, program := range programs {
		path := filepath.Join(dir, program)
		build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-o", path,
			module+"/cmd/"+program)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			b.Fatalf("build %s: %v\n%s", program, err, out)
		}
		b.Setenv(binaryVariable(program), path)
	}
}

// duel is one piece of work, timed in two ways.
type duel struct {
	name string
	// aim is the ratio not to exceed; 0 is none.
	aim float64
	// theirs is what the driver is compared with, in a word.
	theirs         string
	driver, byHand []time.Duration
}

func median(times []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(times))
	return sorted[len(sorted)/2]
}

// report prints the medians and what they are to each other.
func (d *duel) report() {
	driver, byHand := median(d.driver), median(d.byHand)
	ratio := float64(driver) / float64(byHand)
	fmt.Printf("FIGURE %s driver_ms=%.2f %s_ms=%.2f more_ms=%.2f ratio=%.2f rounds=%d", d.name,
		ms(driver), d.theirs, ms(byHand), ms(driver-byHand), ratio, len(d.driver))
	if d.aim != 0 {
		fmt.Printf(" aim=%.1f %s", d.aim, reached(ratio, d.aim))
	}
	fmt.Println()
}

// reached says whether a figure reaches its aim.
func reached(figure, aim float64) string {
	if figure > aim {
		return "missed"
	}
	return "met"
}

func timed(do func() error) (time.Duration, error) {
	start := time.Now()
	err := do()
	return time.Since(start), err
}

// inTurns does both, and every second time the other one first.
func inTurns(round int, one, other func() error) error {
	if round%2 == 1 {
		one, other = other, one
	}
	if err := one(); err != nil {
		return err
	}
	return other()
}

const benchDisk = 10 * gib

// BenchmarkNode compares NodeStageVolume and NodePublishVolume with mkfs.ext4, mount and a bind
// mount by hand, on equal disks of the same instance.
func BenchmarkNode(b *testing.B) {
	bn := openBench(b)
	blank := duel{name: "stage-publish-blank-ext4", aim: aimBlank, theirs: "by_hand"}
	stageBlank := duel{name: "stage-blank-ext4", aim: aimBlank, theirs: "by_hand"}
	formatted := duel{name: "stage-publish-formatted-ext4", aim: aimFormatted, theirs: "by_hand"}
	stageFormatted := duel{name: "stage-formatted-ext4", aim: aimFormatted, theirs: "by_hand"}
	for round := 0; b.Loop(); round++ {
		disks, err := bn.twoDisks(b.Context(), round)
		must(b, err)
		for _, d := range []struct{ both, stage *duel }{
			{&blank, &stageBlank}, {&formatted, &stageFormatted},
		} {
			must(b, inTurns(round,
				func() error { return disks.byDriver(b.Context(), d.both, d.stage) },
				func() error { return disks.byHand(d.both, d.stage, d.both == &blank) },
			))
		}
		must(b, disks.gone(b.Context()))
	}
	for _, d := range []*duel{&blank, &stageBlank, &formatted, &stageFormatted} {
		d.report()
	}
}

// twoDisks are two blank disks, attached to one instance: one for the driver, one for the hand.
type twoDisks struct {
	*bench
	volume    *csi.Volume
	published map[string]string
	disk      *oxide.Disk
	device    string
	// staging and target are the driver's; mount and bind the hand's.
	staging, target, mount, bind string
}

func (bn *bench) twoDisks(ctx context.Context, round int) (*twoDisks, error) {
	t := &twoDisks{bench: bn}
	created, err := bn.driver.Controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: fmt.Sprint("bench-", round), CapacityRange: &csi.CapacityRange{RequiredBytes: benchDisk},
		VolumeCapabilities: []*csi.VolumeCapability{mounted()},
	})
	if err != nil {
		return nil, err
	}
	t.volume = created.GetVolume()
	published, err := bn.driver.Controller().ControllerPublishVolume(ctx,
		publishRequest(t.volume, bn.rack.Instance("").ID))
	if err != nil {
		return nil, err
	}
	t.published = published.GetPublishContext()
	name := fmt.Sprint("by-hand-", round)
	if t.disk, err = bn.createByHand(ctx, name, benchDisk); err != nil {
		return nil, err
	}
	if err := bn.attachByHand(ctx, t.disk.Id); err != nil {
		return nil, err
	}
	for _, serial := range []string{t.volume.GetVolumeContext()["diskName"], name} {
		if t.device, err = bn.awaitDevice(ctx, serial); err != nil {
			return nil, err
		}
	}
	dir := filepath.Join(bn.dir, fmt.Sprint(round))
	t.staging, t.target = filepath.Join(dir, "staging"), filepath.Join(dir, "target")
	t.mount, t.bind = filepath.Join(dir, "mount"), filepath.Join(dir, "bind")
	return t, errors.Join(os.MkdirAll(t.staging, 0o750), os.MkdirAll(t.mount, 0o750))
}

func (bn *bench) createByHand(ctx context.Context, name string, size int64) (*oxide.Disk, error) {
	return bn.sdk.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(bn.rack.Project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "by hand",
			Size: oxide.ByteCount(size), DiskBackend: blankBackend()},
	})
}

func (bn *bench) attachByHand(ctx context.Context, disk string) error {
	_, err := bn.sdk.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(bn.rack.Instance("").ID),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

func (bn *bench) detachByHand(ctx context.Context, disk string) error {
	_, err := bn.sdk.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(bn.rack.Instance("").ID),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	})
	return err
}

func (bn *bench) deleteByHand(ctx context.Context, disk string) error {
	return bn.sdk.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk)})
}

// awaitDevice waits for a disk to appear, so that nobody's time holds that.
func (bn *bench) awaitDevice(ctx context.Context, serial string) (device string, err error) {
	err = await(ctx, time.Minute, func() error {
		paths, err := devicesWith(bn.rack.Instance(""), serial)
		if err == nil && len(paths) != 1 {
			err = fmt.Errorf("%d devices with serial %q", len(paths), serial)
		}
		if err != nil {
			return err
		}
		device = paths[0]
		return exists(device)
	})
	return device, err
}

// byDriver times the driver's two calls, and undoes them.
func (t *twoDisks) byDriver(ctx context.Context, both, stage *duel) error {
	node := t.driver.Node()
	staged, err := timed(func() error {
		_, err := node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: t.volume.GetVolumeId(), StagingTargetPath: t.staging,
			VolumeCapability: mounted(), PublishContext: t.published,
			VolumeContext: t.volume.GetVolumeContext(),
		})
		return err
	})
	if err != nil {
		return err
	}
	published, err := timed(func() error {
		_, err := node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: t.volume.GetVolumeId(), StagingTargetPath: t.staging, TargetPath: t.target,
			VolumeCapability: mounted(), PublishContext: t.published,
			VolumeContext: t.volume.GetVolumeContext(),
		})
		return err
	})
	if err != nil {
		return err
	}
	stage.driver = append(stage.driver, staged)
	both.driver = append(both.driver, staged+published)
	if _, err = node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: t.volume.GetVolumeId(), TargetPath: t.target,
	}); err != nil {
		return err
	}
	_, err = node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: t.volume.GetVolumeId(), StagingTargetPath: t.staging,
	})
	return err
}

// byHand times what an administrator types, and undoes it. The options of mkfs are the driver's:
// with its own, mkfs would discard the disk first and take longer.
func (t *twoDisks) byHand(both, stage *duel, format bool) error {
	staged, err := timed(func() error {
		if format {
			if err := command("mkfs.ext4", "-q", "-E", "nodiscard", "-m", "0", t.device); err != nil {
				return err
			}
		}
		return command("mount", t.device, t.mount)
	})
	if err != nil {
		return err
	}
	published, err := timed(func() error {
		return errors.Join(command("mkdir", t.bind), command("mount", "--bind", t.mount, t.bind))
	})
	if err != nil {
		return err
	}
	stage.byHand = append(stage.byHand, staged)
	both.byHand = append(both.byHand, staged+published)
	return errors.Join(command("umount", t.bind), os.Remove(t.bind), command("umount", t.mount))
}

// gone detaches and deletes both disks.
func (t *twoDisks) gone(ctx context.Context) error {
	_, err := t.driver.Controller().ControllerUnpublishVolume(ctx,
		unpublishRequest(t.volume, t.rack.Instance("").ID))
	if err != nil {
		return err
	}
	_, err = t.driver.Controller().DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: t.volume.GetVolumeId()})
	if err != nil {
		return err
	}
	if err := t.detachByHand(ctx, t.disk.Id); err != nil {
		return err
	}
	return t.deleteByHand(ctx, t.disk.Id)
}

// command runs a program as a shell does.
func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
