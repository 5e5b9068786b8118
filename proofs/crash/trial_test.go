//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/model"
)

// trialTimeout limits a trial, which takes seconds on an idle machine.
const trialTimeout = 5 * time.Minute

// tries is the number of lifecycles in which a trial tries to reach its point: in some of them, the
// goroutines may run in an order without that point.
const tries = 3

// lifecycle is the life of a volume and, if it has a snapshot, of a volume that is made from that.
// The orchestrator repeats each call until it succeeds.
type lifecycle struct {
	*environment
	*model.History
	steps []step
	// copies is the number of volumes whose filesystem comes from a snapshot.
	copies int
	// reached is set if the process was killed or paused at its point. Otherwise effects contains the
	// effects of the step.
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

// finish ends a lifecycle, and returns an error if something of it remains.
func (l *lifecycle) finish(ctx context.Context) error {
	if err := l.TearDown(ctx, false); err != nil {
		return err
	}
	return l.checkClean(ctx, l.copies)
}

// run does steps one after the other.
func (l *lifecycle) run(ctx context.Context, steps []step) error {
	for _, st := range steps {
		if err := l.Do(ctx, st.Step); err != nil {
			return err
		}
	}
	return nil
}

// runTrial runs a lifecycle in which a process is killed at one point, and returns an error unless
// the lifecycle converges. If the lifecycle has fewer effects of the point's name than the dry run,
// the last of them becomes the point.
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

// runOnce runs one lifecycle of a trial.
func (env *environment) runOnce(ctx context.Context, t trial) (*lifecycle, error) {
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	l := env.begin(t.lifecycle)
	err := l.runInterrupted(ctx, t)
	if err == nil {
		err = l.finish(ctx)
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, l.Transcript())
	}
	return l, err
}

// runInterrupted runs the steps of a lifecycle. In one of them the process is killed or paused, and
// the orchestrator acts after that.
func (l *lifecycle) runInterrupted(ctx context.Context, t trial) error {
	if err := l.run(ctx, l.steps[:t.step]); err != nil {
		return fmt.Errorf("before the kill: %w", err)
	}
	if done := strings.Count(l.Transcript(), "\n") + 1; done < t.step {
		return fmt.Errorf("only %d of %d steps before the kill were possible", done, t.step)
	}
	st := l.steps[t.step]
	if t.then == overlap {
		return l.overlapped(ctx, t)
	}
	killed, err := l.killDuring(ctx, st, t.trace, t.starting)
	l.reached = killed
	if err == nil && killed && t.second != nil {
		// The repeated call may not reach the second point, because less work is left.
		_, err = l.killDuring(ctx, st, *t.second, nil)
	}
	switch {
	case err != nil:
		return err
	case l.reached && t.then == giveUp && st.on == "":
		return l.Do(ctx, st.Step) // now the instance is stopped, and is started at the end
	case l.reached && t.then == giveUp:
		return nil // every lifecycle ends with the calls that are left to make
	case l.reached && t.then == elsewhere:
		return errors.Join(l.Release(ctx), l.run(ctx, stepsOf(elsewhere, t.lifecycle)))
	}
	return l.run(ctx, l.steps[t.step:])
}

// mayOutliveDriver contains the tools that continue when their driver dies, because an interrupted
// repair is worse than the damage. They must end, and until then no call may succeed.
var mayOutliveDriver = []string{"e2fsck", "resize2fs"}

// mayOutlive reports whether a program may continue when its driver was killed at a point. A child
// of the driver has the driver's name until its execve.
func mayOutlive(program string, at trace.Point) bool {
	const driver = "driver"
	if program == driver && at.Phase == trace.Before {
		_, program, _ = strings.Cut(at.Name, driver+": execve ")
	}
	return slices.Contains(mayOutliveDriver, program)
}

// killDuring does a step, kills its process at a point, and starts it again. If starting is set, it
// kills the process at that point of its start, too.
func (l *lifecycle) killDuring(ctx context.Context, st step, at trace.Point,
	starting *trace.Point) (killed bool, err error) {
	process := l.process(st.watched)
	st.Around = func(ctx context.Context, do func(context.Context)) (model.Mishap, error) {
		calling, stop := ctx, func() {}
		if st.on == "" { // an administrator would wait long for a dead rack
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
		return model.Killed, l.startAgain(ctx, st.watched, starting)
	}
	return killed, l.Do(ctx, st.Step)
}

// whileRunning returns a context that ends with a process, and a function that ends it, too. After
// that nothing watches the process, which may then be started again.
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

// startAgain starts a process that was killed. If at is set, the process is killed again at that
// point of its start, and started once more.
func (l *lifecycle) startAgain(ctx context.Context, name string, at *trace.Point) error {
	if at != nil {
		report, err := l.startWatched(ctx, name, at)
		if err != nil || !report.Killed {
			return err
		}
	}
	if err := l.process(name).Start(ctx); err != nil {
		return fmt.Errorf("start again after the kill: %w", err)
	}
	return nil
}

// overlapTimeout limits a call to the second process, which may wait for the first one.
const overlapTimeout = 3 * time.Second

// overlapped makes a step's call. While the process is paused at the point, overlapped makes the
// same call, and the following calls on the node, to a second process of the driver. Whatever the
// first process does afterwards must not undo the calls that the second process answered with OK.
func (l *lifecycle) overlapped(ctx context.Context, t trial) error {
	st := l.steps[t.step]
	st.Around = func(ctx context.Context, do func(context.Context)) (model.Mishap, error) {
		if err := l.watcher.Watch(l.order(st.watched, l.plugins[st.watched].PID(),
			&t.trace)); err != nil {
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
	if err := errors.Join(l.Do(ctx, st.Step), l.Wait(ctx)); err != nil {
		return err
	}
	l.overlaps++
	return l.run(ctx, l.steps[l.stageBefore(t.step):])
}

// callSecondProcess makes the calls on the node to the second process, until one of them fails.
func (l *lifecycle) callSecondProcess(ctx context.Context, from int) error {
	for _, st := range l.steps[from:] {
		if !st.OnNode(driverA) {
			return nil
		}
		st.Driver = l.plugins[beside]
		if err := l.Do(ctx, st.AbandonedAfter(overlapTimeout)); err != nil || !l.Succeeded() {
			return err
		}
	}
	return nil
}

// stageBefore returns the step at which the orchestrator continues. Before a publish it stages the
// volume again, because the calls to the second process may have unstaged it.
func (l *lifecycle) stageBefore(i int) int {
	if l.steps[i].rpc != "NodePublish" {
		return i
	}
	for ; l.steps[i].rpc != "NodeStage"; i-- {
	}
	return i
}
