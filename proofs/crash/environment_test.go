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
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/model"
)

// A trial can kill or call these processes, and the controller "controller 1".
const (
	driverA     = "a"
	driverB     = "b"
	rackProcess = "rack"
	// beside is a second node driver in the instance of driverA. It uses the state directory of the
	// first one, as after a forced deletion of the first driver's pod.
	beside = "beside"
)

// environment is package model's environment with a tracer. It runs one lifecycle at a time.
type environment struct {
	*model.Environment
	processes map[string]process
	// second is the second node driver in the instance of driverA (see beside).
	second  *harness.Plugin
	watcher *trace.Watcher
	// Before the first lifecycle, the rack has these files, and charges storage bytes to the quota.
	files   harness.Ledger
	storage int64
	// unformatted counts restored volumes that were mounted. No driver has formatted them.
	unformatted int
	// killed contains the killed process groups of this lifecycle.
	killed map[int]bool
	// overlaps is 1 if the trial called a second driver while the first one was paused.
	kills, overlaps int
}

// newEnvironment puts the disks of [proof.Bystanders] into an instance that no lifecycle stops.
func newEnvironment(ctx context.Context, run *harness.Run, p *proof.Proof) (env *environment,
	err error) {
	instance := driverB
	if p.Name == driverProof {
		instance = driverA
	}
	started, err := model.NewEnvironment(ctx, run, p, instance, proof.Journal,
		harness.PluginOptions{})
	env = &environment{Environment: started, killed: map[int]bool{}}
	defer harness.Catch(&err)
	harness.Must(err)
	env.second = harness.Got(env.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeNode,
		Instance: driverA, Env: map[string]string{
			"OXIDE_STATE_DIR": filepath.Join(env.Nodes[driverA].Dir, "volumes")}}))
	env.processes = map[string]process{
		rackProcess: {env.Rack, "rack", env.Rack.LogFile(), history.Rack}}
	for name, p := range map[string]*harness.Plugin{driverA: env.Nodes[driverA],
		driverB: env.Nodes[driverB], beside: env.second, "controller 1": env.Controllers[0]} {
		env.processes[name] = process{p, "driver", p.LogFile, p.Lane()}
		// Make this directory now, so that its creation is not an effect of only the first lifecycle.
		harness.Must(os.MkdirAll(filepath.Dir(p.FlightFile("none")), 0o700))
	}
	env.watcher = harness.Got(trace.NewWatcher())
	harness.Must(env.TakeBaseline(ctx))
	env.files = harness.Got(env.filesNow())
	env.storage = harness.Got(env.Rack.Admin.State(ctx)).StorageBytes
	return env, nil
}

func (env *environment) close() error {
	var err error
	if env.watcher != nil {
		err = env.watcher.Close()
	}
	return errors.Join(err, env.Close())
}

// process is a driver or the rack. The field "as" is its name in effects, log is the path of its
// log, and lane is its name in the history. The method Kill waits until the process has ended.
type process struct {
	killable
	as, log, lane string
}

type killable interface {
	PID() int
	Running() bool
	Kill()
	Start(ctx context.Context) error
}

// watched runs do() with a tracer. If kill is not nil, the tracer kills the process at that point.
func (env *environment) watched(name string, kill *trace.Point, do func()) (trace.Report, error) {
	order := env.order(name, kill)
	if err := env.watcher.Watch(order); err != nil {
		return trace.Report{}, err
	}
	do()
	report, err := env.watcher.Release()
	if report.Killed {
		env.Rack.History.Mark(env.processes[name].lane, "killed at the point")
		env.killed[order.PID] = true
		env.kills++
	}
	return report, err
}

func (env *environment) order(name string, kill *trace.Point) trace.Order {
	p := env.processes[name]
	return trace.Order{As: p.as, Root: env.Rack.Dir, Rack: env.Rack.Port(), PID: p.PID(),
		Logs: []string{p.log}, Kill: kill}
}

// checkClean returns an error if files or the charged storage differ from those before the first
// lifecycle, if a killed process still runs, or if the flight recorders contain impossible changes.
// copies is the number of restored volumes: only these may be mounted without a driver's format.
func (env *environment) checkClean(ctx context.Context, copies int) (err error) {
	defer harness.Catch(&err)
	formatted, mounted := map[string]bool{}, map[string]bool{} // by volume
	for _, node := range []string{driverA, driverB} {
		for _, changes := range harness.Got(env.Nodes[node].FlightRecords()) {
			if err := harness.CheckChanges(changes); err != nil {
				return fmt.Errorf("the flight recorders of %s: %w", node, err)
			}
			for _, c := range changes {
				formatted[c.Volume] = formatted[c.Volume] || c.Event == "Formatted"
				mounted[c.Volume] = mounted[c.Volume] || c.Event == "Mounted" && c.Outcome == "done"
			}
		}
	}
	maps.DeleteFunc(mounted, func(volume string, is bool) bool { return !is || formatted[volume] })
	if more := len(mounted) - env.unformatted; more > copies {
		return fmt.Errorf("%d filesystems were mounted whose formats are in no flight recorder, want at "+
			"most %d", more, copies)
	}
	env.unformatted = len(mounted)
	harness.Must(harness.Await(ctx, patience, func() error {
		return harness.NoneLeft("a killed process", env.killed)
	}))
	clear(env.killed) // other processes may soon get these numbers
	now := harness.Got(env.filesNow())
	if more, less := now.More(env.files), env.files.More(now); len(more)+len(less) > 0 {
		return fmt.Errorf("files that were not removed: %q, files lost: %q", more, less)
	}
	if now := harness.Got(env.Rack.Admin.State(ctx)).StorageBytes; now != env.storage {
		return fmt.Errorf("the rack charges %d bytes, and charged %d before", now, env.storage)
	}
	return nil
}

// filesNow lists the files in the rack's directory except logs, flight recorders and sockets. It
// removes the numbers of devices from names, because they change when an instance stops and starts.
func (env *environment) filesNow() (harness.Ledger, error) {
	files := harness.Ledger{}
	err := filepath.WalkDir(env.Rack.Dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.Type()&fs.ModeSocket == 0 && !strings.HasSuffix(path, ".log") &&
			!strings.Contains(path, "/flight") &&
			(!entry.IsDir() || !strings.Contains(path+"/", "/kubelet/")) {
			files[devices.ReplaceAllString(strings.TrimPrefix(path, env.Rack.Dir), "nvme")]++
		}
		return nil
	})
	return files, err
}

var devices = regexp.MustCompile(`nvme\d+n1`)

// patience limits a wait that takes milliseconds on an idle machine.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	trace.Main()
	namespace.Main(m)
}

// trialTimeout limits a trial, which takes seconds on an idle machine.
const trialTimeout = 5 * time.Minute

// tries limits a trial's lifecycles. A lifecycle can miss the point: goroutines run in any order.
const tries = 3

// lifecycle runs the steps of a volume's lifecycle, and repeats each call until it succeeds.
type lifecycle struct {
	*environment
	*model.History
	steps []step
	// copies counts the volumes that the lifecycle restores from a snapshot.
	copies int
	// reached is set after the kill or the pause. effects are those of the trial's step.
	reached bool
	effects []trace.Effect
}

func (env *environment) begin(kind string) *lifecycle {
	env.Rack.History.Begin()
	l := &lifecycle{environment: env, History: model.NewHistory(env.Environment)}
	l.Patient = true
	shape, _, _ := strings.Cut(kind, " ")
	if shape == "shared" {
		l.ReadOnlyAt = driverB
	}
	if strings.Contains(shapes[shape], "CreateVolume COPY") {
		l.copies = 1
	}
	l.steps = stepsOf(shape, kind)
	return l
}

func (l *lifecycle) finish(ctx context.Context) {
	harness.Must(l.TearDown(ctx, false))
	harness.Must(l.checkClean(ctx, l.copies))
}

func (l *lifecycle) run(ctx context.Context, steps []step) {
	for _, st := range steps {
		harness.Must(l.Do(ctx, st.Step))
	}
}

// runTrial repeats the lifecycle until it reaches t.trace, the N-th effect with a certain name. If
// a lifecycle has fewer effects with this name, the next one is interrupted at the first of them.
func (env *environment) runTrial(ctx context.Context, t trial) error {
	for range tries {
		l, err := env.runOnce(ctx, t)
		if err != nil || l.reached {
			return err
		}
		for _, e := range l.effects {
			if e.Name() == t.trace.Name {
				t.trace.N = min(t.trace.N, e.N)
			}
		}
	}
	return fmt.Errorf("the point was not reached in %d lifecycles", tries)
}

func (env *environment) runOnce(ctx context.Context, t trial) (l *lifecycle, err error) {
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	l = env.begin(t.lifecycle)
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, l.Transcript())
		}
	}()
	defer harness.Catch(&err)
	l.runInterrupted(ctx, t)
	l.finish(ctx)
	return l, nil
}

func (l *lifecycle) runInterrupted(ctx context.Context, t trial) {
	l.run(ctx, l.steps[:t.step])
	if done := strings.Count(l.Transcript(), "\n") + 1; done < t.step {
		harness.Must(fmt.Errorf("only %d of %d steps before the kill were possible", done, t.step))
	}
	st := l.steps[t.step]
	if t.action == overlap {
		l.overlapped(ctx, t)
		return
	}
	l.reached = l.killDuring(ctx, st, t.trace, t.soon)
	if l.reached && t.second != nil {
		// The repeated call has less work to do, so it may not reach the second point.
		l.killDuring(ctx, st, *t.second, 0)
	}
	switch {
	case l.reached && t.action == giveUp && st.on == "":
		harness.Must(l.Do(ctx, st.Step)) // stops the instance; finish starts it
	case l.reached && t.action == giveUp:
		// The orchestrator gives up: finish() undoes everything.
	case l.reached && t.action == elsewhere:
		harness.Must(l.Release(ctx))
		l.run(ctx, stepsOf(elsewhere, t.lifecycle))
	default:
		l.run(ctx, l.steps[t.step:])
	}
}

// mayOutliveDriver contains tools that are allowed to continue after their driver is killed: an
// interrupted repair is worse than the damage. No call may succeed before they have ended.
var mayOutliveDriver = []string{"e2fsck", "resize2fs"}

// mayOutlive reports whether a program may continue after its driver was killed at the point. Until
// a child calls execve, it has the driver's name, so the program is taken from the point's name.
func mayOutlive(program string, at trace.Point) bool {
	const driver = "driver"
	if program == driver && at.Phase == trace.Before {
		_, program, _ = strings.Cut(at.Name, driver+": execve ")
	}
	return slices.Contains(mayOutliveDriver, program)
}

// killDuring makes a step, kills the watched process at a point, and starts it again. If soon is
// not 0 and the process does not serve in this time, killDuring kills and starts it once more.
func (l *lifecycle) killDuring(ctx context.Context, st step, at trace.Point,
	soon time.Duration) (killed bool) {
	process := l.processes[st.watched]
	st.Around = func(ctx context.Context, do func(context.Context)) (model.Mishap, error) {
		calling, stop := ctx, func() {}
		if st.on == "" { // an administrator's request must end when the rack ends
			calling, stop = whileRunning(ctx, process)
		}
		report, err := l.watched(st.watched, &at, func() { do(calling) })
		stop()
		l.effects, killed = report.Effects, report.Killed
		if err != nil || !killed {
			return model.Abandoned, err
		}
		if st.watched != rackProcess {
			for _, tool := range report.Orphans {
				if !mayOutlive(tool, at) {
					return model.Killed, fmt.Errorf("%s continued after its driver was killed", tool)
				}
			}
		}
		process.Kill()
		if soon > 0 {
			limited, cancel := context.WithTimeout(ctx, soon)
			defer cancel()
			if err := process.Start(limited); err == nil || limited.Err() == nil {
				return model.Killed, err
			}
			l.Rack.History.Mark(process.lane, "killed while it started")
			l.killed[process.PID()] = true
			l.kills++
		}
		if err := process.Start(ctx); err != nil {
			return model.Killed, fmt.Errorf("start again after the kill: %w", err)
		}
		return model.Killed, nil
	}
	harness.Must(l.Do(ctx, st.Step))
	return killed
}

// whileRunning returns a context that ends with the process, and a function that ends the context.
// The function must be called before the process starts again.
func whileRunning(ctx context.Context, p process) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		defer cancel()
		_ = harness.Await(ctx, trialTimeout, func() error {
			if p.Running() {
				return errors.New("the process runs")
			}
			return nil
		})
	})
	return ctx, func() { cancel(); watch.Wait() }
}

// overlapTimeout limits a call to the second driver, which may wait for the first driver.
const overlapTimeout = 3 * time.Second

// overlapped makes a step's call to the first driver. While this driver is paused at the point, the
// second driver gets the same call and the following calls on the node. After the pause, the first
// driver must not undo a call that the second driver has answered with OK.
func (l *lifecycle) overlapped(ctx context.Context, t trial) {
	st := l.steps[t.step]
	st.Around = func(ctx context.Context, do func(context.Context)) (model.Mishap, error) {
		if err := l.watcher.Watch(l.order(st.watched, &t.trace)); err != nil {
			return model.None, err
		}
		var second error
		report, err := l.watcher.ReleaseAtPause(func() { do(ctx) }, func() {
			l.Doubt(st.Step)
			second = l.callSecondProcess(ctx, t.step)
		})
		l.reached, l.effects = report.Paused, report.Effects
		return model.Overtaken, errors.Join(err, second)
	}
	harness.Must(errors.Join(l.Do(ctx, st.Step), l.Wait(ctx)))
	l.overlaps++
	l.run(ctx, l.steps[l.stageBefore(t.step):])
}

func (l *lifecycle) callSecondProcess(ctx context.Context, from int) error {
	for _, st := range l.steps[from:] {
		if !st.OnNode(driverA) {
			return nil
		}
		st.Driver = l.second
		if err := l.Do(ctx, st.AbandonedAfter(overlapTimeout)); err != nil || !l.Succeeded() {
			return err
		}
	}
	return nil
}

// stageBefore returns i or, if step i is a publish, the index of the stage before it, because the
// second driver may have unstaged the volume. The orchestrator continues from the returned step.
func (l *lifecycle) stageBefore(i int) int {
	if l.steps[i].rpc != "NodePublish" {
		return i
	}
	for ; l.steps[i].rpc != "NodeStage"; i-- {
	}
	return i
}
