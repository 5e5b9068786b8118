//go:build linux

package sanity

import (
	"cmp"
	"context"
	"fmt"
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

// The benchmarks (make bench) print their medians as FIGURE lines, which docs/sizing.md cites. The
// benchmark of lists alternates between the driver and Oxide's client, so that other load on the
// machine affects both.

type bench struct {
	run    *harness.Run
	rack   *harness.Rack
	driver *harness.Plugin
	// byHand calls the rack with Oxide's client, which keeps its connections open.
	byHand harness.Administrator
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
	bn := &bench{run: run, rack: rack, driver: driver}
	b.Cleanup(func() { csitest.Must(b, bn.driver.Stop()) })
	bn.byHand.Client, err = oxide.NewClient(oxide.WithHost(rack.URL), oxide.WithToken(rack.Token))
	csitest.Must(b, err)
	return bn
}

// buildShipped builds the programs like a release, but with symbols, and makes the harness use
// them.
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

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func BenchmarkProcess(b *testing.B) {
	bn := openBench(b)
	for _, mode := range []string{harness.ModeController, harness.ModeNode, harness.ModeAll} {
		b.Run(mode, func(b *testing.B) {
			plugin, err := bn.rack.StartPlugin(b.Context(), harness.PluginOptions{Mode: mode})
			csitest.Must(b, err)
			var starts []time.Duration
			for b.Loop() {
				csitest.Must(b, plugin.Stop())
				took := csitest.Got(startUp(b.Context(), plugin))(b)
				starts = append(starts, took)
			}
			_, err = plugin.Identity().Probe(b.Context(), &csi.ProbeRequest{})
			csitest.Must(b, err)
			memory := csitest.Got(residentMiB(plugin.PID()))(b)
			fmt.Printf("FIGURE process mode=%s start_ms=%.1f rounds=%d idle_rss_mib=%.1f\n",
				mode, ms(median(starts)), len(starts), memory)
			csitest.Must(b, plugin.Stop())
		})
	}
	for _, program := range programs {
		path := csitest.Got(bn.run.Binary(b.Context(), program))(b)
		info := csitest.Got(os.Stat(path))(b)
		fmt.Printf("FIGURE binary program=%s mib=%.1f\n", program,
			float64(info.Size())/float64(harness.MiB))
	}
}

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
			memory := csitest.Got(residentMiB(bn.driver.PID()))(b)
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
