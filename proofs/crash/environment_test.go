//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
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
	*proof.Environment
	plugins map[string]*harness.Plugin
	watcher *trace.Watcher
	// files contains the files that existed before the first lifecycle, and storage is what the rack
	// charged then.
	files      map[string]bool
	storage    int64
	lifecycles int
	// killed contains the processes that were killed in this lifecycle. Each is the leader of a
	// process group.
	killed map[int]bool
	// kills counts how often a process was killed. overlaps counts how often a second driver was
	// called while the first one stood still.
	kills, overlaps int
}

// newEnvironment starts all processes and takes the baseline. The bystanders are disks of an
// instance that is never stopped.
func newEnvironment(ctx context.Context, run *harness.Run, p *proof.Proof) (*environment, error) {
	instance := driverB
	if p.Name == driverProof {
		instance = driverA
	}
	started, err := p.StartEnvironment(ctx, run, harness.RackOptions{}, instance, proof.Journal)
	env := &environment{Environment: started, plugins: map[string]*harness.Plugin{},
		killed: map[int]bool{}}
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
		// The driver makes the directory of its records once, at the first change of a volume. No
		// later lifecycle would reach that point.
		records := filepath.Dir(env.plugins[name].FlightFile("none"))
		if err := errors.Join(os.Mkdir(env.plugins[name].Kubelet(), 0o750),
			os.MkdirAll(records, 0o700)); err != nil {
			return env, err
		}
	}
	if env.watcher, err = trace.NewWatcher(tracer); err != nil {
		return env, err
	}
	if err := env.TakeBaseline(ctx); err != nil {
		return env, err
	}
	if env.files, err = env.filesNow(); err != nil {
		return env, err
	}
	state, err := env.Rack.Admin.State(ctx)
	env.storage = state.StorageBytes
	return env, err
}

// close ends all processes in order and returns an error if something is left.
func (env *environment) close() error {
	var err error
	if env.watcher != nil {
		err = env.watcher.Close()
	}
	return errors.Join(err, env.Close())
}

// controller returns the client of the controller.
func (env *environment) controller() csi.ControllerClient {
	return env.plugins[driverA].Controller()
}

// process is a driver or the rack. Kill waits for its end.
type process interface {
	PID() int
	Kill()
	Start(ctx context.Context) error
}

func (env *environment) process(name string) process {
	if name == rackProcess {
		return env.Rack
	}
	return env.plugins[name]
}

// watched calls do while a process is watched. If a point is given, the process is killed
// there. failed is the error of do. err is a failure of the proof itself.
func (env *environment) watched(name string, kill *trace.Point, do func() error) (
	report trace.Report, failed, err error) {
	order := env.order(name, env.process(name).PID(), kill)
	if err := env.watcher.Watch(order); err != nil {
		return report, nil, err
	}
	failed = do()
	report, err = env.watcher.Release()
	if report.Killed {
		env.noteKilled(name, order.PID)
	}
	return report, failed, err
}

// order returns an order to watch a process of the environment.
func (env *environment) order(name string, pid int, kill *trace.Point) trace.Order {
	order := trace.Order{As: "driver", Root: env.Rack.Dir, Rack: env.Rack.Port(), PID: pid,
		Kill: kill}
	if name == rackProcess {
		order.As, order.Logs = "rack", []string{env.Rack.LogFile()}
	} else {
		order.Logs = []string{env.plugins[name].LogFile}
	}
	return order
}

// noteKilled records that the watcher has killed a process.
func (env *environment) noteKilled(name string, pid int) {
	lane := history.Rack
	if name != rackProcess {
		lane = env.plugins[name].Lane()
	}
	env.Rack.History.Mark(lane, "killed at the point")
	env.killed[pid] = true
	env.kills++
}

// checkClean returns an error if something exists that did not exist before the first
// lifecycle.
func (env *environment) checkClean(ctx context.Context) error {
	if err := harness.Await(ctx, patience, func() error {
		return harness.NoneLeft("a killed process", env.killed)
	}); err != nil {
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
	state, err := env.Rack.Admin.State(ctx)
	if err == nil && state.StorageBytes != env.storage {
		err = fmt.Errorf("the rack charges %d bytes, and charged %d before", state.StorageBytes,
			env.storage)
	}
	return err
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

// tracer is the environment variable that makes this binary run as a tracer.
const tracer = "CRASH_TRACER"

func TestMain(m *testing.M) {
	if os.Getenv(tracer) != "" {
		if err := trace.Serve(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "tracer:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	namespace.Main(m)
}
