//go:build linux

package crash_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// The processes of an environment: the driver with its controller in instance a, the node
// driver in instance b, and the rack.
const (
	driverA     = "a"
	driverB     = "b"
	rackProcess = "rack"
	// beside is a second node driver in instance a, with the state directory of the first one. A
	// surge update, or the forced deletion of a pod, starts one.
	beside = "beside"
)

// environment is a rack with a driver in two instances, and a tracer. It runs one lifecycle at a
// time.
type environment struct {
	*harness.Environment
	// name makes the serials of two environments on one machine different.
	name    string
	run     *harness.Run
	plugins map[string]*harness.Plugin
	watcher *trace.Watcher
	// files contains the files that existed before the first lifecycle.
	files      map[string]bool
	lifecycles int
	// killed contains the processes that were killed in this lifecycle. Each is the leader of a
	// process group.
	killed map[int]bool
	// bystanders are other disks of an instance, which no call may change. forged counts
	// comparisons of files with forged records.
	bystanders *proof.RackBystanders
	forged     *proof.Invariant
	// kills counts how often a process was killed. overlaps counts how often a second driver was
	// called while the first one stood still.
	kills, overlaps int
}

// newEnvironment starts all processes and takes the baseline. The bystanders are disks of an
// instance that is never stopped.
func newEnvironment(ctx context.Context, run *harness.Run, name string,
	bystanders, forged *proof.Invariant) (*environment, error) {
	started, err := run.StartEnvironment(ctx, harness.RackOptions{})
	if err != nil {
		return nil, err
	}
	env := &environment{Environment: started, name: name, run: run,
		plugins: map[string]*harness.Plugin{}, killed: map[int]bool{}, forged: forged}
	instance := driverB
	if name == driverProof {
		instance = driverA
	}
	env.bystanders, err = proof.NewRackBystanders(ctx, env.Rack, instance, proof.Journal, bystanders)
	if err != nil {
		return env, err
	}
	for _, name := range []string{driverA, driverB, beside} {
		options := harness.PluginOptions{Mode: harness.ModeNode, Instance: name}
		switch name {
		case driverA:
			options.Mode = harness.ModeAll
		case beside:
			options.Instance = driverA
			options.Env = map[string]string{
				"OXIDE_STATE_DIR": filepath.Join(env.plugins[driverA].Dir, "volumes"),
			}
		}
		if env.plugins[name], err = env.StartPlugin(ctx, options); err != nil {
			return env, err
		}
		if err := os.Mkdir(filepath.Join(env.plugins[name].Dir, "kubelet"), 0o750); err != nil {
			return env, err
		}
	}
	if env.watcher, err = trace.NewWatcher(tracer); err != nil {
		return env, err
	}
	if err := env.TakeBaseline(ctx); err != nil {
		return env, err
	}
	env.files, err = env.filesNow()
	return env, err
}

// close ends all processes in order and returns an error if something is left.
func (env *environment) close() error {
	var err error
	if env.watcher != nil {
		err = env.watcher.Close()
	}
	return errors.Join(err, env.bystanders.Close(), env.Close())
}

// abandon ends an environment after a failure. Its files are kept. Its devices are released,
// at the latest together with the mounts of these tests.
func (env *environment) abandon(ctx context.Context) {
	env.run.Failed()
	_ = env.bystanders.Suspend() // the trial's failure has been reported
	for _, p := range env.plugins {
		p.Kill()
	}
	env.Rack.Kill()
	if env.Rack.Start(ctx) == nil {
		_ = env.Rack.Stop()
	}
	if env.watcher != nil {
		_ = env.watcher.Close()
	}
}

// kill kills a process, if it is alive, and waits for its end.
func (env *environment) kill(name string) {
	if name == rackProcess {
		env.Rack.Kill()
		return
	}
	env.plugins[name].Kill()
}

// watched calls do while a process is watched. If a point is given, the process is killed
// there. failed is the error of do. err is a failure of the proof itself.
func (env *environment) watched(name string, kill *trace.Point, do func() error) (
	report trace.Report, failed, err error) {
	order, err := env.order(name, kill)
	if err != nil {
		return report, nil, err
	}
	if name == rackProcess {
		order.PID = env.Rack.PID()
	} else {
		order.PID = env.plugins[name].PID()
	}
	if err := env.watcher.Watch(order); err != nil {
		return report, nil, err
	}
	failed = do()
	report, err = env.watcher.Release()
	if report.Killed {
		env.noteKilled(order.PID)
	}
	return report, failed, err
}

// order returns an order to watch a process of the environment, without the process ID.
func (env *environment) order(name string, kill *trace.Point) (order trace.Order, err error) {
	order = trace.Order{As: "driver", Root: env.Rack.Dir, Kill: kill}
	if name == rackProcess {
		order.As, order.Logs = "rack", []string{env.Rack.LogFile()}
	} else {
		order.Logs = []string{env.plugins[name].LogFile}
	}
	order.Rack, err = portOf(env.Rack.URL)
	return order, err
}

// noteKilled records that a process was killed.
func (env *environment) noteKilled(pid int) {
	env.killed[pid] = true
	env.kills++
}

func portOf(address string) (uint16, error) {
	u, err := url.Parse(address)
	if err != nil {
		return 0, err
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	return uint16(port), err
}

// checkClean returns an error if something exists that did not exist before the first
// lifecycle.
func (env *environment) checkClean(ctx context.Context) error {
	if err := harness.Await(ctx, patience, env.noProcessLeft); err != nil {
		return err
	}
	clear(env.killed) // other processes may soon get these numbers
	if err := env.Balance(ctx); err != nil {
		return err
	}
	now, err := env.filesNow()
	if err != nil {
		return err
	}
	var more, less []string
	for path := range now {
		if !env.files[path] {
			more = append(more, path)
		}
	}
	for path := range env.files {
		if !now[path] {
			less = append(less, path)
		}
	}
	if len(more)+len(less) > 0 {
		return fmt.Errorf("files left behind: %q, files lost: %q", more, less)
	}
	return env.consistent(ctx)
}

// noProcessLeft returns an error if a program that a killed process has started still runs.
func (env *environment) noProcessLeft() error {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it ended since the directory was read
		}
		// The name may contain any character. The fields after it are state, parent and process
		// group.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 3 || fields[0] == "Z" {
			continue
		}
		if group, err := strconv.Atoi(fields[2]); err == nil && env.killed[group] {
			return fmt.Errorf("a killed process left one behind: %s", stat)
		}
	}
	return nil
}

// filesNow lists the files below the rack's directory: the disks' files, the guest views, the
// drivers' records, and the orchestrator's directories. It omits logs and flight recorders,
// because they grow, and sockets, because they come and go.
func (env *environment) filesNow() (map[string]bool, error) {
	files := map[string]bool{}
	err := filepath.WalkDir(env.Rack.Dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.Type()&fs.ModeSocket == 0 && !strings.HasSuffix(path, ".log") &&
			!strings.Contains(path, "/flight") {
			files[strings.TrimPrefix(path, env.Rack.Dir)] = true
		}
		return nil
	})
	return files, err
}

// patience limits waits that take milliseconds on an idle machine.
const patience = 20 * time.Second

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
