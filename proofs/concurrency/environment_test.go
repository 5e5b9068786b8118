//go:build linux

package concurrency

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// patience limits how long a condition may take to become true. It is much longer than any
// call takes on a busy machine.
const patience = 2 * time.Minute

// environment is a rack with two controllers, and with a node driver in each of its two
// instances. All programs have the race detector if this binary has it.
type environment struct {
	*harness.Environment
	t     *testing.T
	proof *proof.Proof
	run   *harness.Run

	controllers []*harness.Plugin
	nodes       []*node
	// bystanders are other disks of the first node's instance, which no call may change. It is nil
	// on a rack whose disks can hang.
	bystanders *proof.RackBystanders
	looked     *proof.Invariant
	formats    proof.Formats
	tally      tally
}

// node is a process of the driver that serves the node service in one instance.
type node struct {
	*harness.Plugin
	instance harness.Instance
	// dir is the directory of the orchestrator's paths on this node.
	dir string
}

// newEnvironment starts all processes, and takes the baseline when they are idle. The options
// apply to the node drivers, and the arguments to the rack.
func newEnvironment(t *testing.T, p *proof.Proof, nodes harness.PluginOptions,
	args ...string) *environment {
	t.Helper()
	run := harness.RunFor(t)
	env := &environment{t: t, proof: p, run: run,
		looked: &proof.Invariant{Name: "bystanders"}}
	var err error
	env.Environment, err = run.StartEnvironment(t.Context(), harness.RackOptions{Args: args})
	must(t, err)
	if len(args) == 0 { // on a rack with ordinary disks, which are files
		env.bystanders, err = proof.NewRackBystanders(t.Context(), env.Rack,
			env.Rack.Instances[0].Name, proof.BtrfsMember, env.looked)
		must(t, err)
	}
	tools := filepath.Join(run.Dir, "tools")
	env.formats, err = proof.CountFormats(tools)
	must(t, err)
	for range 2 {
		p, err := env.StartPlugin(t.Context(), harness.PluginOptions{Mode: harness.ModeController})
		must(t, err)
		env.controllers = append(env.controllers, p)
	}
	for _, instance := range env.Rack.Instances {
		options := nodes
		options.Mode, options.Instance = harness.ModeNode, instance.Name
		options.Env = map[string]string{"PATH": tools + ":" + os.Getenv("PATH")}
		maps.Copy(options.Env, nodes.Env)
		p, err := env.StartPlugin(t.Context(), options)
		must(t, err)
		env.nodes = append(env.nodes, &node{p, instance, filepath.Join(p.Dir, "kubelet")})
	}
	must(t, env.TakeBaseline(t.Context()))
	return env
}

// formatted returns the number of filesystems that were made.
func (env *environment) formatted() int {
	env.t.Helper()
	n, err := env.formats.Count()
	must(env.t, err)
	return n
}

// close returns an error if something is left, or if a process fails. A process in which the
// race detector found a race ends with status 66.
func (env *environment) close() {
	env.t.Helper()
	if err := env.Balance(context.Background()); err != nil {
		env.t.Errorf("the ledger does not balance: %v", err)
		env.tally.leaked.Add(int64(strings.Count(err.Error(), "goroutine of")))
	}
	var err error
	if env.bystanders != nil {
		err = env.bystanders.Close()
	}
	if err := errors.Join(err, env.Close()); err != nil {
		env.t.Error(err)
	}
	for _, p := range env.Plugins {
		env.tally.races.Add(races(env.t, p.LogFile))
	}
	env.tally.races.Add(races(env.t, env.Rack.LogFile()))
}

// races counts the reports of the race detector in a log.
func races(t *testing.T, log string) int64 {
	t.Helper()
	text, err := os.ReadFile(log)
	must(t, err)
	return int64(strings.Count(string(text), "WARNING: DATA RACE"))
}

// must ends the test on an error. Only the goroutine of the test may call it.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// atOnce makes n calls at the same moment and waits for all of them.
func atOnce(n int, call func(caller int)) {
	start := make(chan struct{})
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			<-start
			call(i)
		})
	}
	close(start)
	callers.Wait()
}
