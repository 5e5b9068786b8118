package harness

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Await calls ask until it returns nil. When the time is over, Await returns the last error.
func Await(ctx context.Context, timeout time.Duration, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for backoff := (Backoff{Max: 100 * time.Millisecond}); ; {
		err := ask()
		if err == nil {
			return nil
		}
		if backoff.Wait(ctx) != nil {
			return fmt.Errorf("after %s: %w", timeout, err)
		}
	}
}

// AtOnce makes n calls at the same moment and waits for all of them.
func AtOnce(n int, call func(caller int)) {
	start := make(chan struct{})
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			<-start
			call(i)
		})
	}
	close(start)
	callers.Wait()
}

// Backoff is a pause between two attempts. It doubles with each attempt.
type Backoff struct {
	// Next is the next pause; 0 means a millisecond. No pause is longer than Max.
	Next, Max time.Duration
}

// Wait waits for the pause. It returns the context's error if the context ends first.
func (b *Backoff) Wait(ctx context.Context) error {
	if b.Next == 0 {
		b.Next = time.Millisecond
	}
	timer := time.NewTimer(b.Next)
	defer timer.Stop()
	b.Next = min(2*b.Next, b.Max)
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
