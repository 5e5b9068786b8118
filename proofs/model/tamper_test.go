//go:build linux

package model

import (
	"context"
	"slices"
	"strings"
)

// tampers change answers, or the state without the orchestrator's knowledge, to test the model
// itself.
type tampers []tamper

// tamper is one change. A nil function changes nothing.
type tamper struct {
	// answer replaces a call. real makes the original call.
	answer func(h *history, s step, real func() (reply, error)) (reply, error)
	// action runs after the step whose line begins with when, before the state is observed.
	when   string
	action func(ctx context.Context, h *history) error
}

func (l tampers) call(ctx context.Context, h *history, s step) (reply, error) {
	real := func() (reply, error) { return h.call(ctx, s) }
	i := slices.IndexFunc(l, func(one tamper) bool { return one.answer != nil })
	if i < 0 {
		return real()
	}
	return l[i].answer(h, s, real)
}

func (l tampers) apply(ctx context.Context, h *history) error {
	for _, one := range l {
		if one.action != nil && len(h.lines) > 0 &&
			strings.HasPrefix(h.lines[len(h.lines)-1], one.when) {
			if err := one.action(ctx, h); err != nil {
				return err
			}
		}
	}
	return nil
}
