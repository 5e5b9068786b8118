//go:build linux

package guest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

// agentTest is a rack with a controller, and its instance b, in which an agent runs.
type agentTest struct {
	*testing.T
	rack       *harness.Rack
	controller csi.ControllerClient
	config     guest.Config
}

func newAgentTest(t *testing.T) *agentTest {
	t.Helper()
	run := harness.RunFor(t)
	ctx := t.Context()
	env, err := run.StartEnvironment(ctx, harness.RackOptions{})
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, env.Close()) })
	controller, err := env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController})
	csitest.Must(t, err)
	driver, err := run.Binary(ctx, "oxide-csi-plugin")
	csitest.Must(t, err)
	return &agentTest{T: t, rack: env.Rack, controller: controller.Controller(),
		config: guest.Config{Plugin: []string{driver}}}
}

// shell returns a command that runs a script with the view of an instance.
func (w *agentTest) shell(instance string) []string {
	view := w.rack.Instance(instance).Guest
	return []string{"env", "OXIDE_SYSFS_ROOT=" + filepath.Join(view, "sys"),
		"OXIDE_DEV_ROOT=" + filepath.Join(view, "dev"), "sh", "-c"}
}

func (w *agentTest) connect(instance string) *guest.AgentClient {
	w.Helper()
	g, err := guest.Connect(w.Context(), w.shell(instance), w.config)
	w.must(err)
	return g
}

func (w *agentTest) must(err error) {
	w.Helper()
	csitest.Must(w.T, err)
}

// attached creates a volume and attaches it to an instance.
func (w *agentTest) attached(g *guest.AgentClient, instance, access string) *harness.Placement {
	w.Helper()
	ctx := w.Context()
	capability := harness.Access(access)
	created, err := w.controller.CreateVolume(ctx, harness.CreateRequest("v-"+access, capability))
	w.must(err)
	req := harness.PublishRequest(created.GetVolume(), w.rack.Instance(instance).ID)
	req.VolumeCapability = capability
	published, err := w.controller.ControllerPublishVolume(ctx, req)
	w.must(err)
	p := &harness.Placement{Volume: created.GetVolume(), Capability: capability,
		PublishContext: published.GetPublishContext(),
		Staging:        g.Path(access, "staging"), Target: g.Path(access, "pod", "data")}
	_, err = guest.MakeDirs(ctx, g, []string{p.Staging, filepath.Dir(p.Target)})
	w.must(err)
	return p
}

// remove detaches and deletes a volume.
func (w *agentTest) remove(p *harness.Placement) {
	w.Helper()
	_, err := w.controller.ControllerUnpublishVolume(w.Context(),
		harness.UnpublishRequest(p.Volume, ""))
	w.must(err)
	_, err = w.controller.DeleteVolume(w.Context(),
		&csi.DeleteVolumeRequest{VolumeId: p.Volume.GetVolumeId()})
	w.must(err)
}

func TestTheAgentReturnsTheDriversErrorsUnchanged(t *testing.T) {
	w := newAgentTest(t)
	g := w.connect("b")
	defer func() { w.must(g.Close()) }()
	node := csi.NewNodeClient(g)
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
	info, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	w.must(err)
	facts, err := guest.ReadFacts(t.Context(), g, guest.Nothing{})
	w.must(err)
	if want := w.rack.Instance("b").ID; info.GetNodeId() != want || facts.InstanceID != want {
		t.Errorf("the node is %q, the instance %q; want %q", info.GetNodeId(), facts.InstanceID, want)
	}
}

func TestKillDoesNotWaitForAnInstanceThatIsDown(t *testing.T) {
	w := newAgentTest(t)
	// This command stays when its agent has ended, as ssh does until it notices that the instance is
	// down.
	g, err := guest.Connect(t.Context(), []string{"sh", "-c",
		`sh -c "$0"; case $0 in *" agent;"*) sleep 1000; esac`}, guest.Config{})
	w.must(err)
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		g.Kill()
	}()
	select {
	case <-killed:
	case <-time.After(20 * time.Second):
		t.Error("Kill has not returned after 20 s")
	}
}

func TestAnAgentThatEndsLeavesNothing(t *testing.T) {
	w := newAgentTest(t)
	// The agents of other tests have their directories in another place.
	dir, err := os.MkdirTemp("", "agents-")
	w.must(err)
	t.Cleanup(func() { csitest.Must(t, os.Remove(dir)) })
	t.Setenv("TMPDIR", dir)
	for _, c := range []struct {
		name string
		end  func(g *guest.AgentClient) error
	}{
		{"in order", func(g *guest.AgentClient) error { return g.Close() }},
		{"with its instance", func(g *guest.AgentClient) error {
			g.Kill()
			return errors.Join(g.Reconnect(t.Context()), g.Close())
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &agentTest{T: t, rack: w.rack, controller: w.controller, config: w.config}
			g := w.connect("b")
			if holders := holdersBelow(t, dir); holders < 2 {
				t.Errorf("%d processes hold the agent's directory, want the agent and its driver", holders)
			}
			node := csi.NewNodeClient(g)
			p := w.attached(g, "b", "ext4")
			w.must(p.Stage(t.Context(), node))
			w.must(p.Publish(t.Context(), node))
			err := c.end(g)
			if c.name == "in order" {
				if err == nil || !strings.Contains(err.Error(), "exit status") {
					t.Errorf("Close with a volume mounted = %v", err)
				}
			} else {
				w.must(err)
			}
			// Nothing holds the device any more, so the disk can be detached.
			w.remove(p)
			w.must(harness.Await(t.Context(), 10*time.Second, func() error {
				guest.Sweep() // the driver of a killed agent may live a moment longer
				left, err := filepath.Glob(filepath.Join(dir, "*"))
				if len(left) > 0 {
					err = errors.Join(err, fmt.Errorf("left: %q", left))
				}
				if err != nil {
					return err
				}
				ledger, err := harness.KernelLedger(w.rack.Dir)
				if err == nil && len(ledger.More(nil)) > 0 {
					err = fmt.Errorf("left: %q", ledger.More(nil))
				}
				return err
			}))
		})
	}
}

// holdersBelow returns how many processes have opened an agent's directory in dir.
func holdersBelow(t *testing.T, dir string) (holders int) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	csitest.Must(t, err)
	for _, link := range links {
		// A process that has ended meanwhile has no files.
		if path, err := os.Readlink(link); err == nil && filepath.Dir(path) == dir {
			holders++
		}
	}
	return holders
}

func TestAnAgentReleasesTheVolumesThatItsNamespaceInherits(t *testing.T) {
	w := newAgentTest(t)
	ctx := t.Context()
	c := w.config
	view := w.rack.Instance("a").Guest
	c.SysfsRoot, c.DevRoot = filepath.Join(view, "sys"), filepath.Join(view, "dev")
	a, err := guest.Here(ctx, c)
	w.must(err)
	node := csi.NewNodeClient(a)
	var placed []*harness.Placement
	for _, access := range []string{"ext4", "block"} {
		p := w.attached(a, "a", access)
		w.must(p.Stage(ctx, node))
		w.must(p.Publish(ctx, node))
		placed = append(placed, p)
	}
	// The agent's namespace begins as a copy of this one, with the volumes in it.
	b := w.connect("b")
	for _, p := range placed {
		w.must(p.Remove(ctx, node))
		w.remove(p)
	}
	w.must(errors.Join(b.Close(), a.Close()))
}

func TestConnectReportsWhyACommandDoesNotReachTheInstance(t *testing.T) {
	for _, c := range []struct {
		command []string
		says    string
	}{
		{nil, "expected a command such as ssh b"},
		{[]string{"sh", "-c", "echo no route >&2; exit 255; #"}, "no route"},
		{[]string{"sh", "-c", "cat >/dev/null; echo hello; #"}, "expected the name of a directory"},
	} {
		_, err := guest.Connect(t.Context(), c.command, guest.Config{})
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("Connect(%q) = %v, want an error with %q", c.command, err, c.says)
		}
	}
}
