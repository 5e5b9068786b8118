//go:build linux

package data_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == guest.Verb {
		os.Exit(guest.Main(context.Background()))
	}
	namespace.Main(m)
}

// bench is a Bench on a simulated rack with the instances a, b and helper.
type bench struct {
	*data.Bench
	env    *harness.Environment
	config guest.Config
}

const deviceTimeout = time.Second

// newBench starts a bench whose programs have no race detector. With RACE=-race, only the programs
// of TestAHealthyRackPassesEveryCheck have it.
func newBench(t *testing.T) *bench {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = true
	return benchOf(t, run)
}

func benchOf(t *testing.T, run *harness.Run) *bench {
	t.Helper()
	ctx := t.Context()
	env := harness.Need(run.StartEnvironment(ctx,
		harness.RackOptions{Instances: []string{"a", "b", "helper"}}))(t)
	t.Cleanup(func() { csitest.Must(t, env.Close()) })
	controller := harness.Need(env.StartPlugin(ctx,
		harness.PluginOptions{Mode: harness.ModeController}))(t)
	driver := harness.Need(run.Binary(ctx, "oxide-csi-plugin"))(t)
	config := guest.Config{Plugin: []string{driver},
		Args: []string{"--device-timeout=" + deviceTimeout.String()}}
	here := config
	view := env.Rack.Instance("a").Guest
	here.SysfsRoot, here.DevRoot = filepath.Join(view, "sys"), filepath.Join(view, "dev")
	a := harness.Need(guest.Here(ctx, here))(t)
	t.Cleanup(func() { csitest.Must(t, a.Close()) })
	b := harness.Need(guest.Connect(ctx, shell(env.Rack, "b"), config))(t)
	b.Name = "instance b"
	t.Cleanup(func() { csitest.Must(t, b.Close()) })
	helper := env.Rack.Instance("helper").ID
	csitest.Must(t, env.Rack.StopInstance(ctx, helper))
	csitest.Must(t, env.TakeBaseline(ctx))
	var names atomic.Int64
	return &bench{env: env, config: config, Bench: &data.Bench{
		Controller: controller.Controller(), A: a, B: b,
		Helper: &data.Helper{InstanceID: helper,
			Connect: func(ctx context.Context) (*guest.AgentClient, error) {
				return guest.Connect(ctx, shell(env.Rack, "helper"), config)
			}},
		MayStop: func(context.Context, string) error { return nil },
		Oxide:   env.Rack.Client, Hotplug: true,
		Name:          func(what string) string { return fmt.Sprintf("%s-%d", what, names.Add(1)) },
		Seed:          1,
		DeviceTimeout: deviceTimeout, SampleTime: time.Second,
	}}
}

// shell returns a command that runs a script with an instance's guest view.
func shell(rack *harness.Rack, instance string) []string {
	view := rack.Instance(instance).Guest
	return []string{"env", "OXIDE_SYSFS_ROOT=" + filepath.Join(view, "sys"),
		"OXIDE_DEV_ROOT=" + filepath.Join(view, "dev"), "sh", "-c"}
}

func TestAHealthyRackPassesEveryCheck(t *testing.T) { // D-12
	t.Parallel()
	b := benchOf(t, harness.RunFor(t))
	if testing.Short() {
		b.Accesses = []string{"ext4", "block"}
		short.Left(t, 2*len(data.Checks()))
	}
	for _, check := range data.Checks() {
		t.Run(check.ID+" "+check.Says, func(t *testing.T) {
			if blocked := check.Blocked(b.Bench); blocked != "" {
				t.Fatal(blocked)
			}
			ctx, start, made := t.Context(), time.Now(), map[string]bool{}
			mode := map[bool]string{true: "full", false: "none"}[check.Needs.Hotplug]
			csitest.Must(t, b.env.Rack.Admin.Switch(ctx, map[string]any{"hotplug": mode}))
			csitest.Must(t, b.env.Rack.Admin.ClearRequests(ctx))
			b.Log = &data.Log{}
			csitest.Must(t, check.Run(ctx, b.Bench))
			if len(b.Log.Extent()) == 0 {
				t.Error("the check does not state how far it looked")
			}
			t.Logf("%.1fs: %s", time.Since(start).Seconds(), b.Log.Extent())
			for _, r := range harness.Need(b.env.Rack.Admin.Requests(ctx, 0))(t) {
				made[r.Operation] = true
			}
			for _, call := range check.Calls {
				// Test only the rack's operations: RPCs of CSI begin with a capital letter.
				if call[0] >= 'a' && !made[call] {
					t.Errorf("the check promises the call %s and did not make it", call)
				}
			}
			csitest.Must(t, b.env.Balance(ctx))
		})
	}
}

func TestEachDataCheckIsCompleteAndIsBlockedIfANeedIsUnmet(t *testing.T) {
	ids := map[string]bool{}
	for _, c := range data.Checks() {
		if c.ID == "" || ids[c.ID] || c.Says == "" || c.Source == "" || len(c.Calls) == 0 ||
			c.Run == nil {
			t.Errorf("%s has a field that is empty, or an ID that another one has", c.ID)
		}
		ids[c.ID] = true
		blocked := c.Blocked(&data.Bench{Hotplug: true})
		if got, want := blocked == "", !c.Needs.Second && !c.Needs.Helper; got != want {
			t.Errorf("%s, which needs %+v, is blocked by %q", c.ID, c.Needs, blocked)
		}
		blocked = c.Blocked(&data.Bench{B: &guest.AgentClient{}, Helper: &data.Helper{}})
		if got := strings.Contains(blocked, "of stopped instances only"); got != c.Needs.Hotplug {
			t.Errorf("%s, which needs %+v, is blocked on a rack without hot-plug by %q", c.ID, c.Needs,
				blocked)
		}
	}
}

func TestDataChecksStopNoInstanceThatSomebodyElseUses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Accesses = []string{"block"}
	b.MayStop = func(context.Context, string) error { return errors.New("it is in use") }
	// After the preflight, somebody else starts the helper instance.
	rack := b.env.Rack
	errStart := rack.StartInstance(t.Context(), b.Helper.InstanceID)
	began, err := rack.Admin.Requests(t.Context(), 0)
	csitest.Must(t, errors.Join(errStart, err))
	for _, check := range data.Checks() {
		if check.ID != "D03" && check.ID != "D11" {
			continue
		}
		if err := check.Run(t.Context(), b.Bench); err == nil {
			t.Errorf("%s: expected that it fails", check.ID)
		}
	}
	since := harness.Need(rack.Admin.Requests(t.Context(), began[len(began)-1].Seq))(t)
	for _, r := range since {
		if r.Operation == "instance_stop" {
			t.Errorf("it was stopped: %+v", r)
		}
	}
}

func (b *bench) used(t *testing.T, g *guest.AgentClient, instance, access string,
) *harness.Placement {
	t.Helper()
	ctx, capability := t.Context(), harness.Access(access)
	created, err := b.Controller.CreateVolume(ctx, harness.CreateRequest(b.Name(access), capability))
	csitest.Must(t, err)
	req := harness.PublishRequest(created.GetVolume(), b.env.Rack.Instance(instance).ID)
	req.VolumeCapability = capability
	published := harness.Need(b.Controller.ControllerPublishVolume(ctx, req))(t)
	p := &harness.Placement{Volume: created.GetVolume(), Capability: capability,
		PublishContext: published.GetPublishContext(),
		Staging:        g.Path(access, "staging"), Target: g.Path(access, "pod", "data")}
	harness.Need(guest.MakeDirs(ctx, g, []string{p.Staging, filepath.Dir(p.Target)}))(t)
	csitest.Must(t, p.Stage(ctx, csi.NewNodeClient(g)))
	csitest.Must(t, p.Publish(ctx, csi.NewNodeClient(g)))
	return p
}

func (b *bench) remove(t *testing.T, p *harness.Placement) {
	t.Helper()
	harness.Need(b.Controller.ControllerUnpublishVolume(t.Context(),
		harness.UnpublishRequest(p.Volume, "")))(t)
	harness.Need(b.Controller.DeleteVolume(t.Context(),
		&csi.DeleteVolumeRequest{VolumeId: p.Volume.GetVolumeId()}))(t)
}

func (b *bench) connect(t *testing.T) *guest.AgentClient {
	t.Helper()
	return harness.Need(guest.Connect(t.Context(), shell(b.env.Rack, "b"), b.config))(t)
}

func TestTheAgentReturnsTheDriversErrorsUnchanged(t *testing.T) {
	b := newBench(t)
	node := csi.NewNodeClient(b.B)
	_, err := node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{})
	if status.Code(err) != codes.InvalidArgument ||
		harness.ReasonOf(status.Convert(err)) != "VolumeIDMissing" {
		t.Errorf("NodeStageVolume = %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if status.Code(err) != codes.Canceled {
		t.Errorf("NodeGetInfo in an ended context = %v", err)
	}
}

func TestAnAgentLeavesNoMountsOrFilesWhenItEnds(t *testing.T) {
	b := newBench(t)
	// The test has its own TMPDIR, so that it does not see the directories of other tests' agents.
	dir := harness.Need(os.MkdirTemp("", "agents-"))(t)
	t.Cleanup(func() { csitest.Must(t, os.Remove(dir)) })
	t.Setenv("TMPDIR", dir)
	for _, end := range []string{"in order", "with its instance"} {
		t.Run(end, func(t *testing.T) {
			g := b.connect(t)
			if holders := holdersBelow(t, dir); holders < 2 {
				t.Errorf("%d processes hold the agent's directory, want the agent and its driver", holders)
			}
			p := b.used(t, g, "b", "ext4")
			if end == "in order" {
				csitest.Says(t, g.Close(), "exit status") // Close fails: a volume is mounted
			} else {
				g.Kill()
				csitest.Must(t, errors.Join(g.Reconnect(t.Context()), g.Close()))
			}
			// No process uses the device any more, so the disk can be detached.
			b.remove(t, p)
			csitest.Must(t, harness.Await(t.Context(), 10*time.Second, func() error {
				guest.Sweep() // the driver of a killed agent may live a moment longer
				left, err := filepath.Glob(filepath.Join(dir, "*"))
				if err == nil && len(left) > 0 {
					err = fmt.Errorf("left: %q", left)
				}
				return errors.Join(err, b.env.Compare(t.Context()))
			}))
		})
	}
}

// holdersBelow counts the processes that have opened an agent's directory in dir.
func holdersBelow(t *testing.T, dir string) (holders int) {
	t.Helper()
	links := harness.Need(filepath.Glob("/proc/[0-9]*/fd/*"))(t)
	for _, link := range links {
		// A process that has ended meanwhile has no files.
		if path, err := os.Readlink(link); err == nil && filepath.Dir(path) == dir {
			holders++
		}
	}
	return holders
}

func TestANewAgentDoesNotKeepTheVolumesOfAnotherAgentInUse(t *testing.T) {
	b := newBench(t)
	placed := []*harness.Placement{b.used(t, b.A, "a", "ext4"), b.used(t, b.A, "a", "block")}
	// Both volumes are mounted in this process's namespace, and the new agent gets a copy of it.
	g := b.connect(t)
	for _, p := range placed {
		csitest.Must(t, p.Remove(t.Context(), csi.NewNodeClient(b.A)))
		b.remove(t, p)
	}
	csitest.Must(t, g.Close())
}
