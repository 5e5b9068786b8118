//go:build linux

package concurrency

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// patience limits how long a condition may take to become true. It is much longer than any
// call takes on a busy machine.
const patience = 2 * time.Minute

// environment is a rack with two controllers, and with a node driver in each of its two
// instances. All programs have the race detector if this binary has it.
type environment struct {
	*proof.Environment
	t *testing.T

	controllers []*harness.Plugin
	nodes       []*harness.Plugin
	formats     proof.Formats
	tally       tally
}

// newEnvironment starts all processes, and takes the baseline when they are idle. The options
// apply to the node drivers, and the arguments to the rack.
func newEnvironment(t *testing.T, p *proof.Proof, nodes harness.PluginOptions,
	args ...string) *environment {
	t.Helper()
	run := harness.RunFor(t)
	withBystanders := "a"
	if len(args) > 0 { // the disks can hang, so they are no ordinary files
		withBystanders = ""
	}
	started, err := p.StartEnvironment(t.Context(), run, harness.RackOptions{Args: args},
		withBystanders, proof.BtrfsMember)
	csitest.Must(t, err)
	env := &environment{Environment: started, t: t}
	tools := filepath.Join(run.Dir, "tools")
	env.formats, err = proof.CountFormats(tools)
	csitest.Must(t, err)
	for range 2 {
		p, err := env.StartPlugin(t.Context(), harness.PluginOptions{Mode: harness.ModeController})
		csitest.Must(t, err)
		env.controllers = append(env.controllers, p)
	}
	variables := map[string]string{"PATH": tools + ":" + os.Getenv("PATH")}
	maps.Copy(variables, nodes.Env)
	nodes.Env = variables
	all, err := env.StartNodes(t.Context(), nodes)
	csitest.Must(t, err)
	for _, instance := range env.Rack.Instances {
		env.nodes = append(env.nodes, all[instance.Name])
	}
	csitest.Must(t, env.TakeBaseline(t.Context()))
	return env
}

// formatted returns the number of filesystems that were made.
func (env *environment) formatted() int {
	env.t.Helper()
	n, err := env.formats.Count()
	csitest.Must(env.t, err)
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
	if err := env.Close(); err != nil {
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
	csitest.Must(t, err)
	return int64(strings.Count(string(text), "WARNING: DATA RACE"))
}
