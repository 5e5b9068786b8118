//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// trialTimeout is far longer than any trial takes.
const trialTimeout = 5 * time.Minute

// tries is how often a point is looked for: the order of goroutines may hide one. A point that is
// never reached is a failure.
const tries = 3

// runTrial runs a lifecycle in which a process is killed at one point, and demands that it
// converges. A lifecycle may have fewer effects of a name than the dry run had, where a disk's
// bytes lie in fewer pieces; then the last one is the point.
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

// pointReached is in place of the number of a last effect.
const pointReached = -1

// runOnce is one such lifecycle. Without the kill it is an ordinary one, and last is the number of
// the last effect of the point's name.
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

// runInterrupted takes the steps of a lifecycle, in one of which the process is killed, or paused.
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

// mayOutliveDriver are the tools that go on on purpose when their driver dies: to cut off a repair
// leaves worse than it found. The rack has one too, which thaws what it left frozen. They must end,
// though, and until then no call may succeed.
var mayOutliveDriver = []string{"e2fsck", "resize2fs"}

// mayOutlive reports whether a program may go on when its driver was killed at a point. Right
// before it runs its tool, the child that does so still bears the driver's name.
func mayOutlive(program string, at trace.Point) bool {
	const driver = "driver"
	if program == driver && at.Phase == trace.Before {
		_, program, _ = strings.Cut(at.Name, driver+": execve ")
	}
	return slices.Contains(mayOutliveDriver, program)
}

// restartAndKillAgain starts what was killed, and kills it again where the trial says so. What is
// left to do may not have the point any more.
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

// killDuring makes a step's call while its process is to be killed.
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
	l.kill(st.watched)
	return true, replies, nil
}

// startAgain starts what was killed; where the trial says so, it is killed once more meanwhile.
func (l *lifecycle) startAgain(ctx context.Context, name string, at *trace.Point) error {
	if at != nil {
		report, err := l.startWatched(ctx, name, at)
		if err != nil || !report.Killed {
			return err
		}
	}
	if err := l.start(ctx, name); err != nil {
		return fmt.Errorf("start again after the kill: %w", err)
	}
	return nil
}

// resume is what the orchestrator does after the kill.
func (l *lifecycle) resume(ctx context.Context, t trial) (replies []string, err error) {
	switch t.then {
	case giveUp:
		return runSteps(ctx, l.undo())
	case elsewhere:
		return l.moveVolume(ctx)
	}
	st := l.steps[t.step]
	replies, err = st.callUntilOK(ctx)
	if err == nil && st.watched == rackProcess {
		err = harness.Await(ctx, patience, func() error { return l.consistent(ctx) })
	}
	if err != nil {
		return replies, err
	}
	more, err := runSteps(ctx, l.steps[t.step+1:])
	return append(replies, more...), err
}

// moveVolume is an orchestrator that takes the volume away from the node where it was staged, has
// it on the other node, and then on the first one again.
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
