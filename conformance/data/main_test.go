//go:build linux

package data_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// TestMain turns this binary into an agent when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == guest.Verb {
		os.Exit(guest.Main(context.Background()))
	}
	namespace.Main(m)
}

// bench is a Bench on a simulated rack with the instances a, b and helper.
type bench struct {
	*data.Bench
	env *harness.Environment
}

// deviceTimeout limits how long the driver and the checks wait for a device.
const deviceTimeout = time.Second

// newBench starts a bench whose programs have no race detector. With RACE=-race,
// TestARackInOrderPassesEveryCheck runs every check with it.
func newBench(t *testing.T, options harness.RackOptions) *bench {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = true
	return benchOf(t, run, options)
}

func benchOf(t *testing.T, run *harness.Run, options harness.RackOptions) *bench {
	t.Helper()
	ctx := t.Context()
	options.Instances = []string{"a", "b", "helper"}
	env, err := run.StartEnvironment(ctx, options)
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, env.Close()) })
	controller, err := env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController})
	csitest.Must(t, err)
	driver, err := run.Binary(ctx, "oxide-csi-plugin")
	csitest.Must(t, err)
	config := guest.Config{Plugin: []string{driver},
		Args: []string{"--device-timeout=" + deviceTimeout.String()}}
	here := config
	view := env.Rack.Instance("a").Guest
	here.SysfsRoot, here.DevRoot = filepath.Join(view, "sys"), filepath.Join(view, "dev")
	a, err := guest.Here(ctx, here)
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, a.Close()) })
	b, err := guest.Connect(ctx, shell(env.Rack, "b"), config)
	csitest.Must(t, err)
	b.Name = "instance b"
	t.Cleanup(func() { csitest.Must(t, b.Close()) })
	helper := env.Rack.Instance("helper").ID
	csitest.Must(t, env.Rack.StopInstance(ctx, helper))
	csitest.Must(t, env.TakeBaseline(ctx))
	var names atomic.Int64
	return &bench{env: env, Bench: &data.Bench{
		Controller: controller.Controller(), A: a, B: b,
		Helper: &data.Helper{InstanceID: helper,
			Connect: func(ctx context.Context) (*guest.AgentClient, error) {
				return guest.Connect(ctx, shell(env.Rack, "helper"), config)
			}},
		Oxide: env.Rack.Client, Project: env.Rack.Project, Hotplug: options.Hotplug == "",
		Name:          func(what string) string { return fmt.Sprintf("%s-%d", what, names.Add(1)) },
		Seed:          1,
		DeviceTimeout: deviceTimeout, SampleTime: time.Second,
	}}
}

// shell returns a command that runs a script with the view of an instance.
func shell(rack *harness.Rack, instance string) []string {
	view := rack.Instance(instance).Guest
	return []string{"env", "OXIDE_SYSFS_ROOT=" + filepath.Join(view, "sys"),
		"OXIDE_DEV_ROOT=" + filepath.Join(view, "dev"), "sh", "-c"}
}
