//go:build linux

package sanity

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// The benchmarks measure the driver and the same work without it, alternately within one run, so
// that other load on the machine affects both. Each benchmark prints its medians as FIGURE lines:
//
//	make bench
//
// An aim is the ratio that the driver should reach. A benchmark that misses its aim does not
// fail, because the figures of two machines differ.
const (
	aimController = 1.3
	aimAttach     = 1.4 // for attach and detach
	aimListMS     = 1000
)

// bench is a rack and a driver whose programs are built as they are shipped.
type bench struct {
	run    *harness.Run
	rack   *harness.Rack
	driver *harness.Plugin
	// byHand uses Oxide's client without changes.
	byHand harness.Administrator
	dir    string
}

func openBench(b *testing.B, options harness.RackOptions) *bench {
	b.Helper()
	run, err := harness.NewRun(os.Stdout)
	csitest.Must(b, err)
	b.Cleanup(func() { csitest.Must(b, run.Close()) })
	buildShipped(b, run)
	rack, err := run.StartRack(b.Context(), options)
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

// buildShipped builds the programs as `make build` does, and makes the harness use them.
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

// duel compares the durations of two ways to do the same work.
type duel struct {
	name string
	// aim is the ratio that should not be exceeded; 0 means none.
	aim float64
	// theirs names, in one word, the way with which the driver is compared.
	theirs         string
	driver, byHand []time.Duration
}

func median[T cmp.Ordered](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// report prints the medians and their ratio.
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

// reached reports whether a figure reaches its aim.
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

// inTurns calls both functions. Every second round it begins with the other one.
func inTurns(round int, one, other func() error) error {
	if round%2 == 1 {
		one, other = other, one
	}
	if err := one(); err != nil {
		return err
	}
	return other()
}

// awaitDevice waits until a disk appears, so that no measured time includes the wait.
func (bn *bench) awaitDevice(ctx context.Context, serial string) (device string, err error) {
	err = harness.Await(ctx, time.Minute, func() error {
		d, err := bn.rack.Instance("").Device(serial)
		device = d.Path
		return err
	})
	return device, err
}

// command runs a program as a shell does.
func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
