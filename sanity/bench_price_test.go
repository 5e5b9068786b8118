//go:build linux

package sanity

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// stageSteps are the steps of a stage. The step other is the rest: the way to the driver and
// back, the mount table, the flight recorder and the node's record.
var stageSteps = []proof.Step{
	{Name: "find", Functions: []string{"blockdev.Host.Await"}},
	{Name: "open_lock", Functions: []string{"node.nodeVolume.open"}},
	{Name: "proof", Functions: []string{"filesystem.disk.inspect", "filesystem.Preparation.proveBlank",
		"filesystem.Preparation.proveMountable", "filesystem.disk.btrfsBroken",
		"blockdev.OpenDevice.AwaitNoWriters", "blockdev.OpenDevice.Reverify"}},
	// This step contains the driver's own writes to the disk with their flushes, for btrfs including
	// the UUID.
	{Name: "records", Functions: []string{"blockdev.OpenDevice.WithExclusive"}},
	{Name: "mkfs", Functions: []string{"filesystem.disk.mkfs"}},
	{Name: "mount", Functions: []string{"node.nodeVolume.mountAt"}},
	{Name: "other", Functions: []string{"node.nodeVolume.stage", "node.nodeVolume.begin"}},
}

func TestTheStepsOfAStageAreFunctionsOfTheDriver(t *testing.T) {
	if err := proof.CheckSteps("../driver", stageSteps); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkStagePrice measures the durations of the steps of a stage. The build adds clocks to
// the driver's functions that do the steps; the source has none.
func BenchmarkStagePrice(b *testing.B) {
	bn := openBench(b, harness.RackOptions{})
	program, err := proof.BuildTimed(b.Context(), bn.run.Dir, stageSteps)
	csitest.Must(b, err)
	file := filepath.Join(bn.run.Dir, "step-times")
	csitest.Must(b, bn.driver.Stop())
	bn.driver, err = bn.rack.StartPlugin(b.Context(), harness.PluginOptions{
		Command: []string{program}, Env: map[string]string{proof.StepTimes: file}})
	csitest.Must(b, err)
	prices := map[string]*stagePrice{}
	for round := 0; b.Loop(); round++ {
		for _, fsType := range stageKinds {
			w, err := bn.driversWay(b.Context(), fsType, round,
				filepath.Join(bn.dir, fmt.Sprint("price-", fsType, "-", round)))
			csitest.Must(b, err)
			for _, state := range []string{"blank", "formatted"} {
				price := prices[state+fsType]
				if price == nil {
					price = &stagePrice{steps: map[string][]time.Duration{}}
					prices[state+fsType] = price
				}
				csitest.Must(b, price.add(b.Context(), w, file))
			}
			csitest.Must(b, bn.closeWays(b.Context(), []*way{w}))
		}
	}
	for _, fsType := range stageKinds {
		for _, state := range []string{"blank", "formatted"} {
			prices[state+fsType].report(state, fsType)
		}
	}
}

// stageKinds are the filesystems that are measured.
var stageKinds = []string{"ext4", "xfs", "btrfs"}

// stagePrice has the durations of stages of one kind, and of their steps.
type stagePrice struct {
	total []time.Duration
	steps map[string][]time.Duration
}

// add stages a volume and unstages it again.
func (p *stagePrice) add(ctx context.Context, w *way, file string) error {
	took, err := timed(func() error { return w.stage(ctx) })
	if err != nil {
		return err
	}
	calls, err := proof.ReadStepTimes(file)
	if err == nil && len(calls) != 1 {
		err = fmt.Errorf("the driver wrote the times of %d calls, not of 1", len(calls))
	}
	if err != nil {
		return err
	}
	p.total = append(p.total, took)
	rest := took
	for _, step := range stageSteps[:len(stageSteps)-1] {
		p.steps[step.Name] = append(p.steps[step.Name], calls[0][step.Name])
		rest -= calls[0][step.Name]
	}
	p.steps["other"] = append(p.steps["other"], rest)
	err = w.undo(ctx)
	_, unread := proof.ReadStepTimes(file) // undo has steps, too
	return errors.Join(err, unread)
}

func (p *stagePrice) report(state, fsType string) {
	fmt.Printf("FIGURE stage-price kind=%s fs=%s total_ms=%.2f", state, fsType, ms(median(p.total)))
	for _, step := range stageSteps {
		fmt.Printf(" %s_ms=%.2f", step.Name, ms(median(p.steps[step.Name])))
	}
	fmt.Printf(" rounds=%d\n", len(p.total))
}

// BenchmarkPublishPrice measures the durations of the parts of a publish and an unpublish: each
// request to the rack with its reason, and the rest of the RPC.
func BenchmarkPublishPrice(b *testing.B) {
	bn := openBench(b, harness.RackOptions{})
	created, err := bn.driver.Controller().CreateVolume(b.Context(), harness.CreateRequest("price"))
	csitest.Must(b, err)
	volume, instance := created.GetVolume(), bn.rack.Instance("").ID
	rpcs := []*rpcPrice{
		{rpc: "ControllerPublishVolume", call: func(ctx context.Context) error {
			return errOf(bn.driver.Controller().ControllerPublishVolume(ctx,
				harness.PublishRequest(volume, instance)))
		}},
		{rpc: "ControllerUnpublishVolume", call: func(ctx context.Context) error {
			return errOf(bn.driver.Controller().ControllerUnpublishVolume(ctx,
				harness.UnpublishRequest(volume, instance)))
		}},
	}
	for b.Loop() {
		for _, p := range rpcs {
			csitest.Must(b, p.add(b.Context(), bn))
		}
	}
	for _, p := range rpcs {
		p.report()
	}
}

// rpcPrice has the duration of an RPC outside the rack, and of each of its requests to the rack.
type rpcPrice struct {
	rpc   string
	call  func(ctx context.Context) error
	rest  []time.Duration
	calls [][]time.Duration
}

func (p *rpcPrice) add(ctx context.Context, bn *bench) error {
	if err := bn.rack.Admin.ClearRequests(ctx); err != nil {
		return err
	}
	rest, err := timed(func() error { return p.call(ctx) })
	if err != nil {
		return err
	}
	requests, err := bn.rack.Admin.Requests(ctx, 0)
	if err != nil {
		return err
	}
	i, want := 0, callsOfLife(p.rpc)
	p.calls = append(p.calls, make([][]time.Duration, max(0, len(want)-len(p.calls)))...)
	for _, request := range requests {
		if request.Operation == "project_view" {
			continue // made by Probe
		}
		if i == len(want) || request.Operation != want[i] {
			return fmt.Errorf("call %d of %s is %s; want %v", i+1, p.rpc, request.Operation, want)
		}
		took := time.Duration(request.DurationMS * float64(time.Millisecond))
		p.calls[i] = append(p.calls[i], took)
		rest -= took
		i++
	}
	if i != len(want) {
		return fmt.Errorf("%s made %d calls; want %v", p.rpc, i, want)
	}
	p.rest = append(p.rest, rest)
	return nil
}

func (p *rpcPrice) report() {
	i := 0
	for _, call := range lifeCalls {
		if call.rpc != p.rpc {
			continue
		}
		fmt.Printf("FIGURE publish-price rpc=%s call=%s what_for=%q ms=%.2f rounds=%d\n", p.rpc,
			call.operation, call.reason, ms(median(p.calls[i])), len(p.calls[i]))
		i++
	}
	fmt.Printf("FIGURE publish-price rpc=%s call=none what_for=%q ms=%.2f rounds=%d\n", p.rpc,
		"the driver, and the way to it and to the rack", ms(median(p.rest)), len(p.rest))
}
