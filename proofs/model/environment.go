//go:build linux

package model

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	gib = harness.GiB
	// patience limits every wait. An ordinary wait is much shorter.
	patience = time.Minute
)

// Environment is a rack with three instances and an administrator's own disks, two controllers, and
// a node driver in each instance. A history that succeeds leaves it for the next one.
type Environment struct {
	*proof.Environment
	Controllers []*harness.Plugin
	Nodes       map[string]*harness.Plugin
	foreign     []*foreignDisk
	// bystandersAt is the node that has the bystanders.
	bystandersAt string
	// stopped contains the nodes whose instance is stopped.
	stopped map[string]bool
}

// NewEnvironment starts a rack and its drivers. The environment of an error can be closed, too.
func NewEnvironment(ctx context.Context, run *harness.Run, p *proof.Proof, bystandersAt string,
	member proof.Member, node harness.PluginOptions) (*Environment, error) {
	started, err := p.StartEnvironment(ctx, run, harness.RackOptions{Instances: nodes}, bystandersAt,
		member)
	env := &Environment{Environment: started, bystandersAt: bystandersAt, stopped: map[string]bool{}}
	if err != nil {
		return env, err
	}
	if err := env.makeForeign(ctx); err != nil {
		return env, err
	}
	for range 2 {
		p, err := env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController})
		if err != nil {
			return env, err
		}
		env.Controllers = append(env.Controllers, p)
	}
	env.Nodes, err = env.StartNodes(ctx, node)
	return env, err
}

// running returns the drivers that run.
func (env *Environment) running() []*harness.Plugin {
	return slices.DeleteFunc(slices.Clone(env.Plugins), func(p *harness.Plugin) bool {
		return env.stopped[p.Instance.Name]
	})
}

// staging and target return the orchestrator's paths on a node.
func (env *Environment) staging(v int, n string) string {
	return env.Nodes[n].Kubelet(fmt.Sprintf("v%d", v), "globalmount")
}

func (env *Environment) target(v int, n string, p int) string {
	return env.Nodes[n].Kubelet(fmt.Sprintf("pod-%d", p), fmt.Sprintf("v%d", v))
}

// awaitIdle waits until no driver and no rack works on a request.
func (env *Environment) awaitIdle(ctx context.Context, rackDown bool) error {
	return harness.Await(ctx, patience, func() error {
		if !rackDown {
			profile, err := env.Rack.Admin.Goroutines(ctx)
			if err == nil {
				err = idle(profile, "simulator.(*Server).handle+")
			}
			if err != nil {
				return fmt.Errorf("the rack: %w", err)
			}
		}
		for _, p := range env.running() {
			profile, err := p.GoroutineProfile(ctx)
			if err == nil {
				err = idle(profile, "_Handler+")
			}
			if err != nil {
				return fmt.Errorf("%s: %w", p.LogFile, err)
			}
		}
		return nil
	})
}

// idle returns an error if a goroutine of the profile is in the handler of a request.
func idle(profile []byte, handler string) error {
	if i := bytes.Index(profile, []byte(handler)); i >= 0 {
		return fmt.Errorf("a request is in progress: %.200s", profile[i:])
	}
	return nil
}

// activeFaults returns the names of the fault rules that may still apply.
func (env *Environment) activeFaults(ctx context.Context, names map[string]string) ([]string,
	error) {
	rules, err := env.Rack.Admin.Faults(ctx)
	if err != nil {
		return nil, err
	}
	var left []string
	for _, r := range rules {
		if r.Fired == 0 {
			left = append(left, names[r.ID])
		}
	}
	return left, nil
}

// stopNode stops an instance: the driver ends, and all mounts disappear.
func (env *Environment) stopNode(ctx context.Context, n string) error {
	if n == env.bystandersAt {
		if err := env.Bystanders.Suspend(); err != nil {
			return err
		}
	}
	if err := env.Rack.StopInstance(ctx, env.Rack.Instance(n).ID); err != nil {
		return err
	}
	env.Nodes[n].Kill()
	env.stopped[n] = true
	return proof.EndMountsBelow(env.Nodes[n].Kubelet())
}

func (env *Environment) startNode(ctx context.Context, n string) error {
	if err := env.Rack.StartInstance(ctx, env.Rack.Instance(n).ID); err != nil {
		return err
	}
	env.stopped[n] = false
	return errors.Join(env.resumeBystanders(ctx), env.Nodes[n].Start(ctx))
}

// resumeBystanders mounts the bystander again, unless its instance is stopped.
func (env *Environment) resumeBystanders(ctx context.Context) error {
	if env.stopped[env.bystandersAt] {
		return nil
	}
	return env.Bystanders.Resume(ctx)
}

// recordFirst makes the rack record an attach before the instance has the device, or after it.
func (env *Environment) recordFirst(ctx context.Context, first bool) error {
	mode := adminapi.HotplugFull
	if first {
		mode = mode.With(adminapi.RecordFirst)
	}
	return env.Rack.Admin.Switch(ctx, map[string]any{"hotplug": mode})
}

// name returns the name that the orchestrator gives to a volume or a snapshot.
func name(kind string, number int) string { return fmt.Sprintf("model-%s%d", kind, number) }
