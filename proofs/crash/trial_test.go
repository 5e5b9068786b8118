//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// trialTimeout is much longer than any trial takes.
const trialTimeout = 5 * time.Minute

// tries is the number of attempts to reach a point, because the order of goroutines may hide a
// point. A point that is never reached is a failure.
const tries = 3

// runTrial runs a lifecycle in which a process is killed at one point, and returns an error
// unless the lifecycle converges. A lifecycle may have fewer effects of a name than the dry
// run, for example if a disk's bytes are in fewer pieces. Then the last effect is the point.
func (env *environment) runTrial(ctx context.Context, t trial, seed uint64) error {
	for range tries {
		last, err := env.runOnce(ctx, t, seed)
		if err != nil || last == pointReached {
			return err
		}
		if last > 0 {
			t.trace.N = min(t.trace.N, last)
		}
	}
	return fmt.Errorf("the point was not reached in %d lifecycles", tries)
}

// pointReached replaces the number of the last effect when the point was reached.
const pointReached = -1

// runOnce runs one such lifecycle. If the point was not reached, the lifecycle is an ordinary
// one, and last is the number of the last effect of the point's name.
func (env *environment) runOnce(ctx context.Context, t trial, seed uint64) (last int, err error) {
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	l, err := env.begin(t.lifecycle, seed)
	if err != nil {
		return 0, err
	}
	killed, replies, err := l.runInterrupted(ctx, t)
	if err == nil {
		err = l.finish(ctx)
	}
	switch {
	case err != nil:
		return 0, fmt.Errorf("%w\n  the orchestrator was told:\n    %s", err, formatErrors(replies))
	case killed:
		return pointReached, nil
	}
	for _, e := range l.effects {
		if e.Name() == t.trace.Name {
			last = e.N
		}
	}
	return last, nil
}

// runInterrupted runs the steps of a lifecycle. In one of them the process is killed or
// paused.
func (l *lifecycle) runInterrupted(ctx context.Context, t trial) (killed bool, replies []string,
	err error) {
	replies, err = runSteps(ctx, l.steps[:t.step])
	if err != nil {
		return false, replies, fmt.Errorf("before the kill: %w", err)
	}
	st := l.steps[t.step]
	if t.then == overlap {
		paused, more, err := l.overlapped(ctx, t)
		return paused, append(replies, more...), err
	}
	killed, what, err := l.killDuring(ctx, st, t.trace)
	replies = append(replies, what)
	switch {
	case err != nil:
		return killed, replies, err
	case !killed:
		t.then = again
	default:
		more, err := l.restartAndKillAgain(ctx, st, t)
		replies = append(replies, more...)
		if err != nil {
			return killed, replies, err
		}
	}
	more, err := l.resume(ctx, t)
	return killed, append(replies, more...), err
}

// mayOutliveDriver contains the tools that are meant to continue when their driver dies,
// because an interrupted repair is worse than the original damage. The tools must end, and until
// then no call may succeed.
var mayOutliveDriver = []string{"e2fsck", "resize2fs"}

// mayOutlive reports whether a program may continue when its driver was killed at a point.
// Before the driver's child has become the tool, it still has the driver's name.
func mayOutlive(program string, at trace.Point) bool {
	const driver = "driver"
	if program == driver && at.Phase == trace.Before {
		_, program, _ = strings.Cut(at.Name, driver+": execve ")
	}
	return slices.Contains(mayOutliveDriver, program)
}

// restartAndKillAgain starts a process that was killed, and kills it again where the trial
// says so. If less work is left, the second point may not exist any more.
func (l *lifecycle) restartAndKillAgain(ctx context.Context, st step, t trial) (replies []string,
	err error) {
	if err := l.startAgain(ctx, st.watched, t.starting); err != nil || t.second == nil {
		return nil, err
	}
	killed, what, err := l.killDuring(ctx, st, *t.second)
	if err == nil && killed {
		err = l.startAgain(ctx, st.watched, nil)
	}
	return []string{what}, err
}

// killDuring makes a step's call and kills its process at a point.
func (l *lifecycle) killDuring(ctx context.Context, st step, at trace.Point) (killed bool,
	replies string,
	err error) {
	report, failed, err := l.watched(st.watched, &at, func() error { return st.callOnce(ctx) })
	switch {
	case err != nil:
		return false, "", err
	case !report.Killed:
		l.effects = report.Effects
		return false, fmt.Sprintf("%s: %v (%d effects, and no kill)", st, failed,
			len(report.Effects)), nil
	}
	replies = fmt.Sprintf("%s: %v (this is the kill)", st, failed)
	if st.watched != rackProcess {
		for _, tool := range report.Orphans {
			if !mayOutlive(tool, at) {
				return true, replies, fmt.Errorf("%s went on working after its driver was killed", tool)
			}
		}
	}
	l.process(st.watched).Kill()
	return true, replies, nil
}

// startAgain starts a process that was killed. If a point is given, it kills the process again
// during the start.
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

// resume does the orchestrator's action after the kill.
func (l *lifecycle) resume(ctx context.Context, t trial) (replies []string, err error) {
	switch t.then {
	case giveUp:
		return runSteps(ctx, l.undo())
	case elsewhere:
		return l.moveVolume(ctx)
	}
	st := l.steps[t.step]
	replies, err = st.callUntilOK(ctx)
	if err != nil {
		return replies, err
	}
	more, err := runSteps(ctx, l.steps[t.step+1:])
	return append(replies, more...), err
}

// moveVolume removes the volume from the node on which it was staged, uses it on the other
// node, and then on the first node again.
func (l *lifecycle) moveVolume(ctx context.Context) (replies []string, err error) {
	v := l.volumes[0]
	steps := v.undo(driverA)
	steps = append(steps, v.undo(driverB)...)
	for _, node := range []string{driverB, driverA} {
		steps = append(steps, v.up(node)...)
		steps = append(steps, v.down(node)...)
	}
	return runSteps(ctx, l.watching(append(steps, step{rpc: "DeleteVolume", call: v.delete})))
}
