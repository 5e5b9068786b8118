package async

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestBackoffDoublesPausesUpToMaxAndStopsAtEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		b := Backoff{Pause: time.Second, Max: 4 * time.Second, End: began.Add(13 * time.Second)}
		var attempts []time.Duration
		for again := true; again; {
			attempts = append(attempts, time.Since(began)/time.Second)
			var err error
			if again, err = b.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if want := []time.Duration{0, 1, 3, 7, 11, 13}; !slices.Equal(attempts, want) {
			t.Errorf("attempts began at %v seconds, want %v", attempts, want)
		}
	})
}

func TestBackoffReturnsTheContextsError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := Backoff{Pause: time.Hour, Max: time.Hour, End: time.Now().Add(time.Hour)}
	if again, err := b.Wait(ctx); again || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, %v, want false and the context's error", again, err)
	}
}
