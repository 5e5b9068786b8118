package async

import (
	"context"
	"time"
)

// Backoff paces repeated attempts. Each pause is twice the one before it, up to Max.
type Backoff struct {
	Pause time.Duration // before the next attempt
	Max   time.Duration
	End   time.Time // no pause begins later
}

// Wait pauses before the next attempt. It reports false, without a pause, once End has passed, and
// returns the context's error if ctx ends first. The last pause is shortened so that the last
// attempt begins at End.
func (b *Backoff) Wait(ctx context.Context) (again bool, err error) {
	left := time.Until(b.End)
	if left <= 0 {
		return false, nil
	}
	timer := time.NewTimer(min(b.Pause, left))
	defer timer.Stop()
	b.Pause = min(2*b.Pause, b.Max)
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-timer.C:
		return true, nil
	}
}
