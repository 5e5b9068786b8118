package model

import "context"

// lies change what the CO hears, or what is so behind its back, to try the model itself.
type lies []lie

// lie is one of them; a nil function is the truth.
type lie struct {
	// answer takes the place of a call; real makes it.
	answer func(h *history, s step, real func() (reply, error)) (reply, error)
	// deed happens when a step is done, before anybody looks.
	deed func(h *history, j *joint) error
}

func (l lies) call(ctx context.Context, h *history, s step) (reply, error) {
	real := func() (reply, error) { return h.call(ctx, s) }
	for _, lie := range l {
		if lie.answer != nil {
			return lie.answer(h, s, real)
		}
	}
	return real()
}

func (l lies) world(h *history, j *joint) error {
	for _, lie := range l {
		if lie.deed != nil {
			if err := lie.deed(h, j); err != nil {
				return err
			}
		}
	}
	return nil
}
