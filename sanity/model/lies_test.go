package model

import (
	"context"
	"slices"
	"strings"
)

// lies change what the CO hears, or what is so behind its back, to try the model itself.
type lies []lie

// lie is one of them. A nil function is the truth.
type lie struct {
	// answer takes the place of a call; real makes it.
	answer func(h *history, s step, real func() (reply, error)) (reply, error)
	// deed happens after the step whose line begins so, before anybody looks.
	when string
	deed func(ctx context.Context, h *history) error
}

func (l lies) call(ctx context.Context, h *history, s step) (reply, error) {
	real := func() (reply, error) { return h.call(ctx, s) }
	i := slices.IndexFunc(l, func(one lie) bool { return one.answer != nil })
	if i < 0 {
		return real()
	}
	return l[i].answer(h, s, real)
}

func (l lies) happen(ctx context.Context, h *history) error {
	for _, one := range l {
		if one.deed != nil && len(h.lines) > 0 &&
			strings.HasPrefix(h.lines[len(h.lines)-1], one.when) {
			if err := one.deed(ctx, h); err != nil {
				return err
			}
		}
	}
	return nil
}
