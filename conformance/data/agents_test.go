//go:build linux

package data_test

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
)

// used creates a volume, attaches it to an instance, and stages and publishes it there.
func (b *bench) used(t *testing.T, g *guest.AgentClient, instance, access string,
) *harness.Placement {
	t.Helper()
	ctx, capability := t.Context(), harness.Access(access)
	created, err := b.Controller.CreateVolume(ctx, harness.CreateRequest(b.Name(access), capability))
	csitest.Must(t, err)
	req := harness.PublishRequest(created.GetVolume(), b.env.Rack.Instance(instance).ID)
	req.VolumeCapability = capability
	published, err := b.Controller.ControllerPublishVolume(ctx, req)
	csitest.Must(t, err)
	p := &harness.Placement{Volume: created.GetVolume(), Capability: capability,
		PublishContext: published.GetPublishContext(),
		Staging:        g.Path(access, "staging"), Target: g.Path(access, "pod", "data")}
	_, err = guest.MakeDirs(ctx, g, []string{p.Staging, filepath.Dir(p.Target)})
	csitest.Must(t, err)
	csitest.Must(t, p.Stage(ctx, csi.NewNodeClient(g)))
	csitest.Must(t, p.Publish(ctx, csi.NewNodeClient(g)))
	return p
}

// remove detaches and deletes a volume.
func (b *bench) remove(t *testing.T, p *harness.Placement) {
	t.Helper()
	_, err := b.Controller.ControllerUnpublishVolume(t.Context(),
		harness.UnpublishRequest(p.Volume, ""))
	csitest.Must(t, err)
	_, err = b.Controller.DeleteVolume(t.Context(),
		&csi.DeleteVolumeRequest{VolumeId: p.Volume.GetVolumeId()})
	csitest.Must(t, err)
}

func (b *bench) connect(t *testing.T) *guest.AgentClient {
	t.Helper()
	g, err := guest.Connect(t.Context(), shell(b.env.Rack, "b"), b.config)
	csitest.Must(t, err)
	return g
}

func TestTheAgentReturnsTheDriversErrorsUnchanged(t *testing.T) {
	b := newBench(t, harness.RackOptions{})
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
	info, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	csitest.Must(t, err)
	facts, err := guest.ReadFacts(t.Context(), b.B, guest.Nothing{})
	csitest.Must(t, err)
	if want := b.env.Rack.Instance("b").ID; info.GetNodeId() != want || facts.InstanceID != want {
		t.Errorf("the node is %q, the instance %q; want %q", info.GetNodeId(), facts.InstanceID, want)
	}
}

func TestAnAgentThatEndsLeavesNothing(t *testing.T) {
	b := newBench(t, harness.RackOptions{})
	// The agents of other tests have their directories in another place.
	dir, err := os.MkdirTemp("", "agents-")
	csitest.Must(t, err)
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
				if err := g.Close(); err == nil || !strings.Contains(err.Error(), "exit status") {
					t.Errorf("Close with a volume mounted = %v", err)
				}
			} else {
				g.Kill()
				csitest.Must(t, errors.Join(g.Reconnect(t.Context()), g.Close()))
			}
			// Nothing holds the device any more, so the disk can be detached.
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
	b := newBench(t, harness.RackOptions{})
	placed := []*harness.Placement{b.used(t, b.A, "a", "ext4"), b.used(t, b.A, "a", "block")}
	// The agent's namespace begins as a copy of this one, with the volumes in it.
	g := b.connect(t)
	for _, p := range placed {
		csitest.Must(t, p.Remove(t.Context(), csi.NewNodeClient(b.A)))
		b.remove(t, p)
	}
	csitest.Must(t, g.Close())
}
