//go:build linux

package sanity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// The benchmarks (make bench) alternately measure work with and without the driver, so that other
// load on the machine affects both. Each benchmark prints its medians as FIGURE lines.

// bench is a running rack and driver, whose programs are built as a release is.
type bench struct {
	run    *harness.Run
	rack   *harness.Rack
	driver *harness.Plugin
	// byHand calls the rack with Oxide's client, which keeps its connections open.
	byHand harness.Administrator
	dir    string
}

func openBench(b *testing.B) *bench {
	b.Helper()
	run, err := harness.NewRun(os.Stdout)
	csitest.Must(b, err)
	b.Cleanup(func() { csitest.Must(b, run.Close()) })
	buildShipped(b, run)
	rack, err := run.StartRack(b.Context(), harness.RackOptions{})
	csitest.Must(b, err)
	b.Cleanup(func() { csitest.Must(b, rack.Stop()) })
	driver, err := rack.StartPlugin(b.Context(), harness.PluginOptions{})
	csitest.Must(b, err)
	bn := &bench{run: run, rack: rack, driver: driver, dir: filepath.Join(rack.Dir, "bench")}
	b.Cleanup(func() { csitest.Must(b, bn.driver.Stop()) })
	bn.byHand.Client, err = oxide.NewClient(oxide.WithHost(rack.URL), oxide.WithToken(rack.Token))
	csitest.Must(b, err)
	return bn
}

// buildShipped builds the programs as a release is built, and makes the harness use them.
func buildShipped(b *testing.B, run *harness.Run) {
	b.Helper()
	dir := filepath.Join(run.Dir, "shipped")
	for _, program := range programs {
		path := filepath.Join(dir, program)
		build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-o", path,
			harness.Module+"/cmd/"+program)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			b.Fatalf("build %s: %v\n%s", program, err, out)
		}
		b.Setenv(harness.BinaryVariable(program), path)
	}
}

func median[T cmp.Ordered](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

func timed(b *testing.B, do func(context.Context) error) time.Duration {
	b.Helper()
	start := time.Now()
	err := do(b.Context())
	took := time.Since(start)
	csitest.Must(b, err)
	return took
}

// awaitDevice waits until the guest has the disk's device, so that no measured time includes this.
func (bn *bench) awaitDevice(b *testing.B, serial string) (device string) {
	b.Helper()
	csitest.Must(b, harness.Await(b.Context(), time.Minute, func() error {
		d, err := bn.rack.Instance("").Device(serial)
		device = d.Path
		return err
	}))
	return device
}

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// BenchmarkProcess measures the driver's processes: their start-up time and idle memory, and the
// size of the program files.
func BenchmarkProcess(b *testing.B) {
	bn := openBench(b)
	for _, mode := range []string{harness.ModeController, harness.ModeNode, harness.ModeAll} {
		b.Run(mode, func(b *testing.B) {
			plugin, err := bn.rack.StartPlugin(b.Context(), harness.PluginOptions{Mode: mode})
			csitest.Must(b, err)
			var starts []time.Duration
			for b.Loop() {
				csitest.Must(b, plugin.Stop())
				took, err := startUp(b.Context(), plugin)
				csitest.Must(b, err)
				starts = append(starts, took)
			}
			_, err = plugin.Identity().Probe(b.Context(), &csi.ProbeRequest{})
			csitest.Must(b, err)
			memory, err := residentMiB(plugin.PID())
			csitest.Must(b, err)
			fmt.Printf("FIGURE process mode=%s start_ms=%.1f rounds=%d idle_rss_mib=%.1f\n",
				mode, ms(median(starts)), len(starts), memory)
			csitest.Must(b, plugin.Stop())
		})
	}
	for _, program := range programs {
		path, err := bn.run.Binary(b.Context(), program)
		csitest.Must(b, err)
		info, err := os.Stat(path)
		csitest.Must(b, err)
		fmt.Printf("FIGURE binary program=%s mib=%.1f\n", program,
			float64(info.Size())/float64(harness.MiB))
	}
}

// BenchmarkListVolumes lists 100, 1,000 and 10,000 volumes, through the driver and with Oxide's
// client alone, and measures the driver's memory afterwards.
func BenchmarkListVolumes(b *testing.B) {
	bn := openBench(b)
	for have, size := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			group, ctx := errgroup.WithContext(b.Context())
			group.SetLimit(16)
			for i := []int{0, 100, 1000}[have]; i < size; i++ {
				group.Go(func() error {
					return errOf(bn.driver.Controller().CreateVolume(ctx,
						harness.CreateRequest(fmt.Sprint("list-", i))))
				})
			}
			csitest.Must(b, group.Wait())
			var driver, client []time.Duration
			for b.Loop() {
				driver = append(driver, timed(b, func(ctx context.Context) error {
					resp, err := bn.driver.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
					if n := len(resp.GetEntries()); err == nil && n != size {
						err = fmt.Errorf("ListVolumes shows %d volumes of %d", n, size)
					}
					return err
				}))
				limit := 1000
				client = append(client, timed(b, func(ctx context.Context) error {
					return errOf(bn.byHand.Client.DiskListAllPages(ctx, oxide.DiskListParams{
						Project: oxide.NameOrId(bn.rack.Project), Limit: &limit}))
				}))
			}
			memory, err := residentMiB(bn.driver.PID())
			csitest.Must(b, err)
			fmt.Printf("FIGURE list-volumes volumes=%d driver_ms=%.1f client_ms=%.1f rss_mib=%.1f\n",
				size, ms(median(driver)), ms(median(client)), memory)
		})
	}
}

func startUp(ctx context.Context, plugin *harness.Plugin) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	serving := make(chan time.Duration, 1)
	start := time.Now()
	go func() {
		for ctx.Err() == nil {
			conn, err := net.Dial("unix", plugin.Socket())
			if err == nil {
				serving <- time.Since(start)
				_ = conn.Close()
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Microsecond):
			}
		}
	}()
	if err := plugin.Start(ctx); err != nil {
		return 0, err
	}
	return <-serving, nil
}

func residentMiB(pid int) (float64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	fields := strings.Fields(rest)
	if len(fields) < 2 || fields[1] != "kB" {
		return 0, fmt.Errorf("process %d reports no VmRSS", pid)
	}
	kib, err := strconv.ParseFloat(fields[0], 64)
	return kib / 1024, err
}

const benchDisk = 10 * harness.GiB

// BenchmarkNode compares NodeStageVolume and NodePublishVolume with mkfs, mount and a bind mount by
// hand, first on blank disks and then on formatted ones. Each way has a disk of its own, and both
// disks are attached to the same instance.
func BenchmarkNode(b *testing.B) {
	bn := openBench(b)
	took := map[string]*[2][]time.Duration{} // by the driver, and by hand
	for round := 0; b.Loop(); round++ {
		for _, fsType := range []string{"ext4", "xfs"} {
			ways := []*way{bn.driversWay(b, fsType, round), bn.handsWay(b, fsType, round)}
			for _, state := range []string{"blank", "formatted"} {
				for i := range ways {
					n := (round + i) % len(ways) // each round begins with the other way
					staged, published := timed(b, ways[n].stage), timed(b, ways[n].publish)
					csitest.Must(b, ways[n].undo(b.Context()))
					for part, one := range map[string]time.Duration{"stage": staged,
						"stage-publish": staged + published} {
						name := part + "-" + state + "-" + fsType
						if took[name] == nil {
							took[name] = &[2][]time.Duration{}
						}
						took[name][n] = append(took[name][n], one)
					}
				}
			}
			for _, w := range ways {
				csitest.Must(b, w.close(b.Context()))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(took)) {
		driver, hand := median(took[name][0]), median(took[name][1])
		fmt.Printf("FIGURE %s driver_ms=%.2f by_hand_ms=%.2f ratio=%.2f rounds=%d\n", name, ms(driver),
			ms(hand), float64(driver)/float64(hand), len(took[name][0]))
	}
}

type way struct {
	stage, publish func(ctx context.Context) error
	// undo removes the mounts and keeps the filesystem, and close removes the disk.
	undo, close func(ctx context.Context) error
}

func (bn *bench) driversWay(b *testing.B, fsType string, round int) *way {
	b.Helper()
	controller, node := bn.driver.Controller(), bn.driver.Node()
	name := fmt.Sprint("bench-", fsType, "-", round)
	req := harness.CreateRequest(name)
	req.CapacityRange.RequiredBytes = benchDisk
	created, err := controller.CreateVolume(b.Context(), req)
	csitest.Must(b, err)
	volume, instance := created.GetVolume(), bn.rack.Instance("").ID
	published, err := controller.ControllerPublishVolume(b.Context(),
		harness.PublishRequest(volume, instance))
	csitest.Must(b, err)
	bn.awaitDevice(b, volume.GetVolumeContext()["diskName"])
	p := &harness.Placement{Volume: volume, Capability: harness.Mounted(fsType),
		PublishContext: published.GetPublishContext(),
		Staging:        filepath.Join(bn.dir, name, "staging"),
		Target:         filepath.Join(bn.dir, name, "target")}
	csitest.Must(b, p.MakeDirs())
	return &way{
		stage:   func(ctx context.Context) error { return p.Stage(ctx, node) },
		publish: func(ctx context.Context) error { return p.Publish(ctx, node) },
		undo:    func(ctx context.Context) error { return p.Remove(ctx, node) },
		close: func(ctx context.Context) error {
			_, err := controller.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, instance))
			if err != nil {
				return err
			}
			return errOf(controller.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()}))
		},
	}
}

// handsWay runs the commands that an administrator types. mkfs gets the driver's options: without
// them mkfs would discard the disk's content first and take longer.
func (bn *bench) handsWay(b *testing.B, fsType string, round int) *way {
	b.Helper()
	name, instance := fmt.Sprintf("hand-%s-%d", fsType, round), bn.rack.Instance("").ID
	disk, err := bn.byHand.CreateDisk(b.Context(), bn.rack.Project, name, benchDisk)
	csitest.Must(b, err)
	csitest.Must(b, bn.byHand.AttachDisk(b.Context(), disk.Id, instance))
	staging, target := filepath.Join(bn.dir, name, "staging"), filepath.Join(bn.dir, name, "target")
	csitest.Must(b, errors.Join(os.MkdirAll(staging, 0o750), os.MkdirAll(target, 0o750)))
	device := bn.awaitDevice(b, name)
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
		close: func(ctx context.Context) error {
			return errors.Join(bn.byHand.DetachDisk(ctx, disk.Id, instance),
				bn.byHand.DeleteDisk(ctx, disk.Id))
		},
	}
}
