//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// trialTimeout is far longer than any trial takes.
const trialTimeout = 5 * time.Minute

// errNotReached says that the effect was not seen in this run.
var errNotReached = errors.New("the point was not reached")

// try lives a life in which a process is killed at one point, and demands that it converges.
func (s *site) try(ctx context.Context, t trial, seed uint64) error {
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	l, err := s.begin(t.life, seed)
	if err != nil {
		return err
	}
	told, err := l.interrupted(ctx, t)
	if err == nil {
		err = l.end(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w\n  the CO was told:\n    %s", err, inLines(told))
	}
	return nil
}

// interrupted takes the steps of a life, in one of which the process is killed.
func (l *life) interrupted(ctx context.Context, t trial) (told []string, err error) {
	told, err = walk(ctx, l.steps[:t.step])
	if err != nil {
		return told, fmt.Errorf("before the kill: %w", err)
	}
	st := l.steps[t.step]
	report, failed, err := l.watched(st.watched, &t.trace, func() error { return st.once(ctx) })
	switch {
	case err != nil:
		return told, err
	case !report.Killed:
		return told, fmt.Errorf("%w: %s ended with %v after %d effects", errNotReached, st, failed,
			len(report.Effects))
	case len(report.Orphans) > 0 && st.watched != theRack:
		// The rack has one on purpose, which thaws what it left frozen; it must end, though.
		return told, fmt.Errorf("%s went on working after its driver was killed",
			strings.Join(report.Orphans, ", "))
	}
	told = append(told, fmt.Sprintf("%s: %v (this is the kill)", st, failed))
	if err := l.restart(ctx, st.watched); err != nil {
		return told, fmt.Errorf("start again after the kill: %w", err)
	}
	more, err := l.goOn(ctx, t)
	return append(told, more...), err
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
