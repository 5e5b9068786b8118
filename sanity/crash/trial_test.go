//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/crash/trace"
)

// trialTimeout is far longer than any trial takes.
const trialTimeout = 5 * time.Minute

// tries is how often a point is looked for: the order of goroutines may hide one. A point that is
// never reached is a failure.
const tries = 3

// try lives a life in which a process is killed at one point, and demands that it converges. A life
// may have fewer effects of a name than the dry run had, where a disk's bytes lie in fewer pieces;
// then the last one is the point.
func (s *site) try(ctx context.Context, t trial, seed uint64) error {
	for range tries {
		last, err := s.live(ctx, t, seed)
		if err != nil || last == reached {
			return err
		}
		if last > 0 {
			t.trace.N = min(t.trace.N, last)
		}
	}
	return fmt.Errorf("the point was not reached in %d lives", tries)
}

// reached is in place of the number of a last effect.
const reached = -1

// live is one such life. Without the kill it is an ordinary one, and last is the number of the last
// effect of the point's name.
func (s *site) live(ctx context.Context, t trial, seed uint64) (last int, err error) {
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	l, err := s.begin(t.life, seed)
	if err != nil {
		return 0, err
	}
	killed, told, err := l.interrupted(ctx, t)
	if err == nil {
		err = l.end(ctx)
	}
	switch {
	case err != nil:
		return 0, fmt.Errorf("%w\n  the CO was told:\n    %s", err, inLines(told))
	case killed:
		return reached, nil
	}
	for _, e := range l.effects {
		if e.Name() == t.trace.Name {
			last = e.N
		}
	}
	return last, nil
}

// interrupted takes the steps of a life, in one of which the process is killed, or paused.
func (l *life) interrupted(ctx context.Context, t trial) (killed bool, told []string, err error) {
	told, err = walk(ctx, l.steps[:t.step])
	if err != nil {
		return false, told, fmt.Errorf("before the kill: %w", err)
	}
	st := l.steps[t.step]
	if t.then == overlap {
		paused, more, err := l.overlapped(ctx, t)
		return paused, append(told, more...), err
	}
	killed, what, err := l.strike(ctx, st, t.trace)
	told = append(told, what)
	switch {
	case err != nil:
		return killed, told, err
	case !killed:
		t.then = again
	default:
		more, err := l.strikeAgain(ctx, st, t)
		told = append(told, more...)
		if err != nil {
			return killed, told, err
		}
	}
	more, err := l.goOn(ctx, t)
	return killed, append(told, more...), err
}

// outliving are the tools that go on on purpose when their driver dies: to cut off a repair leaves
// worse than it found. The rack has one too, which thaws what it left frozen. They must end,
// though, and until then the CO must not be told that all is well.
var outliving = []string{"e2fsck", "resize2fs"}

// mayOutlive says whether a program may go on when its driver was killed at a point. Right before
// it runs its tool, the child that does so still bears the driver's name.
func mayOutlive(program string, at trace.Point) bool {
	const driver = "driver"
	if program == driver && at.Phase == trace.Before {
		_, program, _ = strings.Cut(at.Name, driver+": execve ")
	}
	return slices.Contains(outliving, program)
}

// strikeAgain starts what was killed, and kills it again where the trial says so. What is left to
// do may not have the point any more.
func (l *life) strikeAgain(ctx context.Context, st step, t trial) (told []string, err error) {
	if err := l.startAgain(ctx, st.watched, t.starting); err != nil || t.second == nil {
		return nil, err
	}
	killed, what, err := l.strike(ctx, st, *t.second)
	if err == nil && killed {
		err = l.startAgain(ctx, st.watched, nil)
	}
	return []string{what}, err
}

// strike makes a step's call while its process is to be killed.
func (l *life) strike(ctx context.Context, st step, at trace.Point) (killed bool, told string,
	err error) {
	report, failed, err := l.watched(st.watched, &at, func() error { return st.once(ctx) })
	switch {
	case err != nil:
		return false, "", err
	case !report.Killed:
		l.effects = report.Effects
		return false, fmt.Sprintf("%s: %v (%d effects, and no kill)", st, failed,
			len(report.Effects)), nil
	}
	told = fmt.Sprintf("%s: %v (this is the kill)", st, failed)
	if st.watched != theRack {
		for _, tool := range report.Orphans {
			if !mayOutlive(tool, at) {
				return true, told, fmt.Errorf("%s went on working after its driver was killed", tool)
			}
		}
	}
	l.kill(st.watched)
	return true, told, nil
}

// startAgain starts what was killed; where the trial says so, it is killed once more meanwhile.
func (l *life) startAgain(ctx context.Context, name string, at *trace.Point) error {
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

// goOn is what the CO does after the kill.
func (l *life) goOn(ctx context.Context, t trial) (told []string, err error) {
	switch t.then {
	case giveUp:
		return walk(ctx, l.undo())
	case elsewhere:
		return l.moved(ctx)
	}
	st := l.steps[t.step]
	told, err = st.repeat(ctx)
	if err == nil && st.watched == theRack {
		err = eventually(ctx, func() error { return l.consistent(ctx) })
	}
	if err != nil {
		return told, err
	}
	more, err := walk(ctx, l.steps[t.step+1:])
	return append(told, more...), err
}

// moved is a CO that takes the volume away from the node where it was staged, has it on the other
// node, and then on the first one again.
func (l *life) moved(ctx context.Context) (told []string, err error) {
	v := l.volumes[0]
	steps := v.undo(driverA)
	steps = append(steps, v.undo(driverB)...)
	for _, node := range []string{driverB, driverA} {
		steps = append(steps, v.up(node)...)
		steps = append(steps, v.down(node)...)
	}
	return walk(ctx, append(steps, step{rpc: "DeleteVolume", call: v.delete}))
}
