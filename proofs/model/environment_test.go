//go:build linux

package model

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// environment is a rack with three instances and an administrator's own disks, two controllers, and
// a node driver in each instance. A history that succeeds leaves it for the next one.
type environment struct {
	*proof.Environment
	controllers []*harness.Plugin
	nodes       map[string]*harness.Plugin
	foreign     []*foreignDisk
	formats     proof.Formats
	// stopped contains the nodes whose instance is stopped.
	stopped map[string]bool
}

// bystandersAt is the node that has the bystanders.
const bystandersAt = "c"

// newEnvironment starts a rack and its drivers.
func newEnvironment(ctx context.Context, run *harness.Run, p *proof.Proof) (*environment, error) {
	started, err := p.StartEnvironment(ctx, run, harness.RackOptions{Instances: nodes},
		bystandersAt, proof.BtrfsMember)
	if err != nil {
		return nil, err
	}
	env := &environment{Environment: started, stopped: map[string]bool{}}
	if err := env.makeForeign(ctx); err != nil {
		return nil, err
	}
	for range 2 {
		p, err := env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController})
		if err != nil {
			return nil, err
		}
		env.controllers = append(env.controllers, p)
	}
	tools := filepath.Join(env.Rack.Dir, "tools")
	if env.formats, err = proof.CountFormats(tools); err != nil {
		return nil, err
	}
	env.nodes, err = env.StartNodes(ctx, harness.PluginOptions{
		Args: []string{"--device-timeout=1s"},
		Env:  map[string]string{"PATH": tools + ":" + os.Getenv("PATH")}})
	if err != nil {
		return nil, err
	}
	return env, env.TakeBaseline(ctx)
}

// balance waits until nothing exists that did not exist at the start.
func (env *environment) balance(ctx context.Context) error {
	return harness.Await(ctx, 20*time.Second, func() error { return env.Compare(ctx) })
}

// running returns the drivers that run.
func (env *environment) running() []*harness.Plugin {
	all := slices.Clone(env.controllers)
	for _, n := range nodes {
		if !env.stopped[n] {
			all = append(all, env.nodes[n])
		}
	}
	return all
}

// staging and target return the orchestrator's paths on a node.
func (env *environment) staging(v int, n string) string {
	return env.nodes[n].Kubelet(fmt.Sprintf("v%d", v), "globalmount")
}

func (env *environment) target(v int, n string, p int) string {
	return env.nodes[n].Kubelet(fmt.Sprintf("pod-%d", p), fmt.Sprintf("v%d", v))
}

// cleanUp removes everything that a manipulated history has left, so that the next history needs no
// new environment. After an error the environment cannot be used again.
func (env *environment) cleanUp(ctx context.Context) error {
	for _, n := range nodes {
		kubelet := env.nodes[n].Kubelet()
		if err := errors.Join(proof.EndMountsBelow(kubelet), os.RemoveAll(kubelet)); err != nil {
			return err
		}
	}
	j := &joint{facts: facts{}, serials: map[int]string{}}
	if err := env.observeRack(ctx, j); err != nil {
		return err
	}
	for v := range kinds {
		id, holder := j.facts[diskField(v)], j.facts[holderField(v)]
		if id == "" {
			continue
		}
		if holder != "" {
			if err := env.detachDisk(ctx, id, holder); err != nil {
				return err
			}
		}
		if err := env.Rack.DeleteDisk(ctx, id); err != nil {
			return err
		}
	}
	for _, d := range slices.Clone(env.foreign) {
		if d.of == 0 {
			continue
		}
		if err := env.takeForeign(ctx, d); err != nil {
			return err
		}
	}
	if err := errors.Join(env.Rack.Admin.ClearFaults(ctx), env.recordFirst(ctx, false)); err != nil {
		return err
	}
	fake := filepath.Join(env.Rack.Instance("b").Guest, "sys/block", fakeDevice)
	if err := os.RemoveAll(fake); err != nil {
		return err
	}
	// A manipulation may have made loop devices that the rack does not know.
	loops, err := livingLoops(filepath.Join(env.Rack.Dir, "sim"))
	if err != nil {
		return err
	}
	for path, devices := range loops {
		for _, device := range devices {
			if !env.Bystanders.HasFile(path) &&
				!slices.ContainsFunc(env.foreign, func(d *foreignDisk) bool { return d.path == path }) {
				// If the device is in use, the kernel releases it with its last user.
				_ = exec.Command("losetup", "--detach", "/dev/"+device).Run()
			}
		}
	}
	return newHistory(env).observeAndCheck(ctx, nil)
}

// awaitIdle waits until no driver and no rack works on a request.
func (env *environment) awaitIdle(ctx context.Context, rackDown bool) error {
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
func (env *environment) activeFaults(ctx context.Context, names map[string]string) ([]string,
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
func (env *environment) stopNode(ctx context.Context, n string) error {
	if n == bystandersAt {
		if err := env.Bystanders.Suspend(); err != nil {
			return err
		}
	}
	if err := env.Rack.StopInstance(ctx, env.Rack.Instance(n).ID); err != nil {
		return err
	}
	env.nodes[n].Kill()
	env.stopped[n] = true
	return proof.EndMountsBelow(env.nodes[n].Kubelet())
}

func (env *environment) startNode(ctx context.Context, n string) error {
	if err := env.Rack.StartInstance(ctx, env.Rack.Instance(n).ID); err != nil {
		return err
	}
	env.stopped[n] = false
	return errors.Join(env.resumeBystanders(ctx), env.nodes[n].Start(ctx))
}

// resumeBystanders mounts the bystander again, unless its instance is stopped.
func (env *environment) resumeBystanders(ctx context.Context) error {
	if env.stopped[bystandersAt] {
		return nil
	}
	return env.Bystanders.Resume(ctx)
}

// recordFirst makes the rack record an attach before the instance has the device, or after it.
func (env *environment) recordFirst(ctx context.Context, first bool) error {
	mode := adminapi.HotplugFull
	if first {
		mode = mode.With(adminapi.RecordFirst)
	}
	return env.Rack.Admin.Switch(ctx, map[string]any{"hotplug": mode})
}

// name returns the name that the orchestrator gives to a volume or a snapshot.
func name(kind string, number int) string { return fmt.Sprintf("model-%s%d", kind, number) }
