package simulator

import (
	"context"
	"fmt"
	"time"
)

// Duration is a time.Duration that reads and writes as "1.5s" in JSON.
type Duration time.Duration

// MarshalText writes the duration as "1.5s".
func (d Duration) MarshalText() ([]byte, error) {
	return []byte(time.Duration(d).String()), nil
}

// UnmarshalText reads "1.5s"; a negative duration is refused.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err == nil && parsed < 0 {
		err = fmt.Errorf("%s is negative", text)
	}
	*d = Duration(parsed)
	return err
}

// wait lets d pass; it ends early, with false, when ctx does.
func wait(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
