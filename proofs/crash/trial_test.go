//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// trialTimeout limits a trial, which takes seconds on an idle machine.
const trialTimeout = 5 * time.Minute

// tries is the number of lifecycles in which a trial tries to reach its point: in some of them, the
// goroutines may run in an order without that point.
const tries = 3

// runTrial runs a lifecycle in which a process is killed at one point, and returns an error unless
// the lifecycle converges. If the lifecycle has fewer effects of the point's name than the dry run,
// the last of them becomes the point.
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

// pointReached is the result of runOnce when the point was reached.
const pointReached = -1

// runOnce runs one lifecycle of a trial. If the point was not reached, last is the number of the
// last effect of the point's name.
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
		return 0, fmt.Errorf("%w\n  the errors of the calls:\n    %s", err, formatErrors(replies))
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

// restartAndKillAgain starts a process that was killed, and kills it again at the trial's further
// points. The repeated call may not reach the second point, because less work is left.
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
				return true, replies, fmt.Errorf("%s continued after its driver was killed", tool)
			}
		}
	}
	l.process(st.watched).Kill()
	return true, replies, nil
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
	return runSteps(ctx, l.checked(append(steps, step{rpc: "DeleteVolume", call: v.delete})))
}

// overlapTimeout limits a call to the second process, which may wait for the first one.
const overlapTimeout = 3 * time.Second

// secondProcess is the context key that sends calls to the second node driver.
type secondProcess struct{}

// driver returns the client of the node driver to which a call goes.
func (env *environment) driver(ctx context.Context, node string) csi.NodeClient {
	if ctx.Value(secondProcess{}) != nil {
		node = beside
	}
	return env.plugins[node].Node()
}

// overlapped makes a step's call. While the process is paused at the point, overlapped makes the
// same call, and the following calls on the node, to a second process of the driver. Whatever the
// first process does afterwards must not undo the calls that the second process answered with OK.
func (l *lifecycle) overlapped(ctx context.Context, t trial) (paused bool, replies []string,
	err error) {
	st := l.steps[t.step]
	order := l.order(st.watched, l.plugins[st.watched].PID(), &t.trace)
	if err := l.watcher.Watch(order); err != nil {
		return false, nil, err
	}
	var first, second error
	report, err := l.watcher.ReleaseAtPause(func() { first = st.callOnce(ctx) }, func() {
		replies, second = l.callSecondProcess(context.WithValue(ctx, secondProcess{}, true), t.step)
	})
	replies = append(replies, fmt.Sprintf("%s: %v (this is the first process)", st, first))
	switch {
	case err != nil:
		return report.Paused, replies, err
	case second != nil:
		return report.Paused, replies, second
	case !report.Paused:
		l.effects = report.Effects
	}
	l.overlaps++
	more, err := runSteps(ctx, l.steps[l.stageBefore(t.step):])
	return report.Paused, append(replies, more...), err
}

// callSecondProcess makes the calls to the second process, until one of them fails.
func (l *lifecycle) callSecondProcess(ctx context.Context, from int) (replies []string, err error) {
	for _, st := range l.steps[from:] {
		if st.on != driverA || st.rpc == "ControllerUnpublishVolume" {
			return replies, nil
		}
		short, cancel := context.WithTimeout(ctx, overlapTimeout)
		answer := st.call(short)
		cancel()
		replies = append(replies, fmt.Sprintf("%s: %v (this is the second process)", st, answer))
		switch code := status.Code(answer); {
		case code != codes.OK && !slices.Contains(retryable, code):
			return replies, fmt.Errorf("%s: no orchestrator would repeat after %s", st, code)
		case code != codes.OK:
			return replies, nil
		case st.then != nil:
			if err := st.then(); err != nil {
				return replies, err
			}
		}
	}
	return replies, nil
}

// stageBefore returns the step at which the orchestrator continues. Before a publish it stages the
// volume again, because the calls to the second process may have unstaged it.
func (l *lifecycle) stageBefore(i int) int {
	if rpc := l.steps[i].rpc; rpc != "NodePublishVolume" {
		return i
	}
	for ; l.steps[i].rpc != "NodeStageVolume"; i-- {
	}
	return i
}
