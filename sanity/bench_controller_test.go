//go:build linux

package sanity

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
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

// controllerRounds is the number of rounds of one iteration, because these calls are quick and
// their durations vary.
const controllerRounds = 4

// BenchmarkController compares the controller's calls with the same requests to the rack from
// Oxide's client alone. A call that does nothing shows the part of the difference that is the way
// to the driver and back.
func BenchmarkController(b *testing.B) {
	c := controllerBench{bench: openBench(b, harness.RackOptions{})}
	c.duels = []*duel{
		{name: "create", aim: aimController, theirs: "sdk"},
		{name: "attach", aim: aimAttach, theirs: "sdk"},
		{name: "detach", aim: aimAttach, theirs: "sdk"},
		{name: "delete", aim: aimController, theirs: "sdk"},
	}
	round := 0
	for b.Loop() {
		for range controllerRounds {
			csitest.Must(b, c.round(b.Context(), round))
			round++
		}
	}
	for _, d := range c.duels {
		d.report()
	}
	fmt.Printf("FIGURE empty-call driver_ms=%.2f rounds=%d\n", ms(median(c.empty)), len(c.empty))
}

type controllerBench struct {
	*bench
	// duels are create, attach, detach and delete.
	duels []*duel
	// empty has the durations of calls that do nothing.
	empty []time.Duration
}

// round creates, attaches, detaches and deletes one volume and one disk.
func (c *controllerBench) round(ctx context.Context, round int) error {
	var (
		ctl      = c.driver.Controller()
		instance = c.rack.Instance("").ID
		byHand   = fmt.Sprint("by-hand-", round)
		volume   *csi.Volume
		disk     *oxide.Disk
	)
	for i, step := range []struct{ driver, sdk func() error }{
		{func() error {
			resp, err := ctl.CreateVolume(ctx, harness.CreateRequest(fmt.Sprint("bench-", round)))
			volume = resp.GetVolume()
			return err
		}, func() (err error) {
			disk, err = c.byHand.CreateDisk(ctx, c.rack.Project, byHand, harness.GiB)
			return err
		}},
		{func() error {
			return errOf(ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, instance)))
		}, func() error { return c.byHand.AttachDisk(ctx, disk.Id, instance) }},
		{func() error {
			return errOf(ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, instance)))
		}, func() error { return c.byHand.DetachDisk(ctx, disk.Id, instance) }},
		{func() error {
			return errOf(ctl.DeleteVolume(ctx,
				&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()}))
		}, func() error {
			// The driver reads the disk's owner before it deletes the disk.
			_, err := c.byHand.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Id)})
			return errors.Join(err, c.byHand.DeleteDisk(ctx, disk.Id))
		}},
	} {
		d := c.duels[i]
		err := inTurns(round, d.time(&d.driver, step.driver), d.time(&d.byHand, step.sdk))
		if err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
		if d.name == "attach" {
			if _, err := c.awaitDevice(ctx, byHand); err != nil {
				return err
			}
		}
	}
	took, err := timed(func() error {
		return errOf(c.driver.Identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}))
	})
	c.empty = append(c.empty, took)
	return err
}

// time returns do, which then also adds its duration to one side of the duel.
func (d *duel) time(side *[]time.Duration, do func() error) func() error {
	return func() error {
		took, err := timed(do)
		*side = append(*side, took)
		return err
	}
}

// BenchmarkListVolumes lists 100, 1,000 and 10,000 volumes, and measures what the controller has in
// memory after it.
func BenchmarkListVolumes(b *testing.B) {
	bn := openBench(b, harness.RackOptions{})
	const small, large = 1000, 10000
	medians := map[int]time.Duration{}
	have := 0
	for _, size := range []int{100, small, large} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			csitest.Must(b, bn.fill(b.Context(), have, size))
			have = size
			list := duel{name: fmt.Sprint("list-volumes-", size), theirs: "sdk"}
			for round := 0; b.Loop(); round++ {
				csitest.Must(b, inTurns(round, list.time(&list.driver, func() error {
					return bn.listVolumes(b.Context(), size)
				}), list.time(&list.byHand, func() error {
					return bn.listDisks(b.Context(), size)
				})))
			}
			list.report()
			memory, err := residentMiB(bn.driver.PID())
			csitest.Must(b, err)
			fmt.Printf("FIGURE controller-memory volumes=%d rss_mib=%.1f\n", size, memory)
			medians[size] = median(list.driver)
		})
	}
	if medians[small] == 0 || medians[large] == 0 {
		return // the caller chose only one size
	}
	fmt.Printf("FIGURE list-volumes-growth volumes=%d driver_ms=%.1f aim_ms=%d %s "+
		"times_the_volumes=%d times_the_duration=%.1f\n",
		large, ms(medians[large]), aimListMS, reached(ms(medians[large]), aimListMS),
		large/small, float64(medians[large])/float64(medians[small]))
}

// fillers is the number of calls that create the volumes of the list at the same time.
const fillers = 16

// fill creates the volumes from one number up to another through the driver.
func (bn *bench) fill(ctx context.Context, from, to int) error {
	bn.run.Say("creating %d volumes", to-from)
	start := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(fillers)
	for i := from; i < to; i++ {
		group.Go(func() error {
			return errOf(bn.driver.Controller().CreateVolume(ctx,
				harness.CreateRequest(fmt.Sprint("list-", i))))
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	took := time.Since(start)
	fmt.Printf("FIGURE create-volumes volumes=%d seconds=%.1f per_volume_ms=%.2f at_once=%d\n",
		to-from, took.Seconds(), ms(took)/float64(to-from), fillers)
	return nil
}

func (bn *bench) listVolumes(ctx context.Context, want int) error {
	resp, err := bn.driver.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err == nil && len(resp.GetEntries()) != want {
		err = fmt.Errorf("ListVolumes shows %d volumes of %d", len(resp.GetEntries()), want)
	}
	return err
}

func (bn *bench) listDisks(ctx context.Context, want int) error {
	limit := 1000
	disks, err := bn.byHand.Client.DiskListAllPages(ctx, oxide.DiskListParams{
		Project: oxide.NameOrId(bn.rack.Project), Limit: &limit,
	})
	if err == nil && len(disks) != want {
		err = fmt.Errorf("the rack lists %d disks of %d", len(disks), want)
	}
	return err
}

// BenchmarkProcess measures the programs: the time until they serve, their idle memory and the
// size of their files.
func BenchmarkProcess(b *testing.B) {
	bn := openBench(b, harness.RackOptions{})
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

// startUp starts a stopped plugin and returns the time until its socket accepts a connection.
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

// residentMiB returns the part of a process's memory that is in RAM.
func residentMiB(pid int) (float64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	fields := strings.Fields(rest)
	if len(fields) < 2 || fields[1] != "kB" {
		return 0, fmt.Errorf("process %d does not say its VmRSS", pid)
	}
	kib, err := strconv.ParseFloat(fields[0], 64)
	return kib / 1024, err
}
