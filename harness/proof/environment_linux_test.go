package proof_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestAnAbandonedEnvironmentLeavesNoProcessNoMountAndNoDevice(t *testing.T) {
	run, ctx := harness.RunFor(t), t.Context()
	env, err := proof.New(t, "abandoned").StartEnvironment(ctx, run, harness.RackOptions{}, "a",
		proof.Journal)
	csitest.Must(t, err)
	nodes, err := env.StartNodes(ctx, harness.PluginOptions{})
	csitest.Must(t, err)
	mountpoint := nodes["b"].Kubelet("volume")
	csitest.Must(t, os.MkdirAll(mountpoint, 0o750))
	csitest.Must(t, unix.Mount("volume", mountpoint, "tmpfs", 0, ""))
	used, err := os.Create(filepath.Join(mountpoint, "used"))
	csitest.Must(t, err)
	defer used.Close()
	before, err := harness.KernelLedger(env.Rack.Dir)
	csitest.Must(t, err)
	if len(before) != 4 {
		t.Errorf("the environment has %v, want a mount and the devices of three bystanders", before)
	}
	csitest.Must(t, env.Abandon(ctx))
	left, err := harness.KernelLedger(env.Rack.Dir)
	csitest.Must(t, err)
	if len(left) > 0 || env.Rack.Running() || nodes["a"].Running() || nodes["b"].Running() {
		t.Errorf("the abandoned environment has left %v, or a process", left)
	}
}
