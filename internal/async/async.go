// Package async starts the driver's goroutines and paces its retries. A panic that nobody recovers
// ends the process, and with it all calls. So this package recovers each panic. The caller that
// waits for the goroutine gets an error, or panics itself.
package async

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Recover converts a panic to an error, and logs its stack. It must be called by defer.
func Recover(ctx context.Context, log *slog.Logger, work string, err *error) {
	p := recover()
	if p == nil {
		return
	}
	raised, ok := p.(*RaisedPanic)
	if !ok {
		raised = &RaisedPanic{p, debug.Stack()}
	}
	// Do not log the panic's value, which may quote the request. The stack does not.
	log.ErrorContext(ctx, "panic", "in", work, "type", fmt.Sprintf("%T", raised.Value),
		"stack", string(raised.stack))
	*err = csierr.New(csierr.Internal, "bug in the driver: %s panicked; see its log", work)
}

// Guard runs f, and converts a panic of f to an error.
func Guard(ctx context.Context, log *slog.Logger, work string, f func() error) (err error) {
	defer Recover(ctx, log, work, &err)
	return f()
}

// RaisedPanic is the panic of another goroutine.
type RaisedPanic struct {
	Value any
	stack []byte
}

// String returns the text that the Go runtime prints if the panic ends the process.
func (p *RaisedPanic) String() string {
	return fmt.Sprintf("%v, raised in another goroutine:\n%s", p.Value, p.stack)
}

// Group is a set of goroutines. If one of them panics, Wait panics with a RaisedPanic.
type Group struct {
	group sync.WaitGroup
	mu    sync.Mutex
	// guarded by mu
	panicked *RaisedPanic
}

// Go starts a goroutine.
func (c *Group) Go(f func()) {
	c.group.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.panicked = &RaisedPanic{p, debug.Stack()}
			}
		}()
		f()
	})
}

// Wait waits for all goroutines.
func (c *Group) Wait() {
	c.group.Wait()
	if c.panicked != nil {
		panic(c.panicked)
	}
}

// Start runs f in a goroutine. The caller must call the returned function, which waits for f and
// returns its result.
func Start[T any](f func() (T, error)) func() (T, error) {
	var result T
	var err error
	var one Group
	one.Go(func() { result, err = f() })
	return func() (T, error) {
		one.Wait()
		return result, err
	}
}

// AfterDone runs f in a goroutine when ctx ends, and logs a panic of f.
func AfterDone(ctx context.Context, log *slog.Logger, work string, f func()) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		_ = Guard(ctx, log, work, func() error {
			f()
			return nil
		})
	})
}

// Linger returns a context that ends the given time after ctx, or when the caller calls end.
func Linger(ctx context.Context, while time.Duration) (longer context.Context, end func()) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(while, cancel)
		context.AfterFunc(longer, func() { timer.Stop() })
	})
	return longer, func() {
		stop()
		cancel()
	}
}

// hanging has the keys of the functions that took too long. A key's value is a channel, which is
// closed when the function returns.
var hanging sync.Map

// Within runs f, which may hang, and reports whether f returned in time. While an earlier f with
// the same key hangs, Within returns false without running f, so that not every call for a hanging
// file blocks a thread. If Within returns false, f may still run, so do not read what f writes.
func Within(key string, wait time.Duration, f func()) bool {
	if ended, ok := hanging.Load(key); ok {
		select {
		case <-ended.(chan struct{}):
			hanging.Delete(key)
		default:
			return false
		}
	}
	ended := make(chan struct{})
	Detach(func() {
		defer close(ended)
		f()
	})
	select {
	case <-ended:
		return true
	case <-time.After(wait):
		hanging.Store(key, ended)
		return false
	}
}

// Detach runs f in a goroutine that nobody waits for. f must recover its own panics.
func Detach(f func()) { go f() }

// Backoff paces attempts. Each pause is twice as long as the one before, up to Max.
type Backoff struct {
	Pause time.Duration // before the next attempt
	Max   time.Duration
	End   time.Time // no pause begins later
}

// Wait pauses before the next attempt. After End it returns false at once. The last pause is
// shorter if necessary, so that the last attempt begins at End. If ctx ends during a pause, Wait
// returns the context's error.
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
