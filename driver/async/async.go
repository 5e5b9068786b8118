// Package async starts the goroutines of the driver. A panic in one that nobody recovers would end
// the process, and with it the mounts and attaches of all other calls; here it becomes the error,
// or the panic, of whoever waits for the goroutine.
package async

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Recover is deferred. It turns a panic into an error, and logs where it was.
func Recover(ctx context.Context, log *slog.Logger, work string, err *error) {
	p := recover()
	if p == nil {
		return
	}
	raised, ok := p.(*RaisedPanic)
	if !ok {
		raised = &RaisedPanic{p, debug.Stack()}
	}
	// The panic's value may quote the request; the stack does not.
	log.ErrorContext(ctx, "panic", "in", work, "type", fmt.Sprintf("%T", raised.Value),
		"stack", string(raised.stack))
	*err = csierr.New(csierr.Internal, "the driver has a bug in %s; its log has the "+
		"details", work)
}

// Guard runs f, and makes an error of a panic in it.
func Guard(ctx context.Context, log *slog.Logger, work string, f func() error) (err error) {
	defer Recover(ctx, log, work, &err)
	return f()
}

// RaisedPanic is a panic of another goroutine.
type RaisedPanic struct {
	Value any
	stack []byte
}

// String is what the runtime prints of one that nobody recovers.
func (p *RaisedPanic) String() string {
	return fmt.Sprintf("%v, raised in another goroutine:\n%s", p.Value, p.stack)
}

// Group are goroutines that one caller waits for. A panic in one of them is raised again in the
// caller, where it is recovered as the caller's own.
type Group struct {
	group sync.WaitGroup
	mu    sync.Mutex
	// guarded by mu
	panicked *RaisedPanic
}

// Go starts one more.
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

// Wait waits for all of them.
func (c *Group) Wait() {
	c.group.Wait()
	if c.panicked != nil {
		panic(c.panicked)
	}
}

// Start starts f at once; what it returns waits for the result, and has to be called.
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

// AfterDone runs f in a goroutine of its own when ctx ends.
func AfterDone(ctx context.Context, log *slog.Logger, work string, f func()) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		_ = Guard(ctx, log, work, func() error {
			f()
			return nil
		})
	})
}

// Detach runs f in a goroutine that nobody waits for, and which guards itself.
func Detach(f func()) { go f() }
