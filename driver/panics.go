package driver

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Every goroutine of the driver is started here: a panic in one that nobody recovers ends the
// process, and with it the mounts and attaches of all other calls.

// recovered is deferred. It turns a panic into an error, and logs where it was.
func recovered(ctx context.Context, log *slog.Logger, work string, err *error) {
	p := recover()
	if p == nil {
		return
	}
	raised, ok := p.(*raisedPanic)
	if !ok {
		raised = &raisedPanic{p, debug.Stack()}
	}
	// The panic's value may quote the request; the stack does not.
	log.ErrorContext(ctx, "panic", "in", work, "type", fmt.Sprintf("%T", raised.value),
		"stack", string(raised.stack))
	*err = csierr.New(csierr.Internal, "the driver has a bug in %s; its log has the "+
		"details", work)
}

// guarded runs f, and makes an error of a panic in it.
func guarded(ctx context.Context, log *slog.Logger, work string, f func() error) (err error) {
	defer recovered(ctx, log, work, &err)
	return f()
}

// raisedPanic is a panic of another goroutine.
type raisedPanic struct {
	value any
	stack []byte
}

// String is what the runtime prints of one that nobody recovers.
func (p *raisedPanic) String() string {
	return fmt.Sprintf("%v, raised in another goroutine:\n%s", p.value, p.stack)
}

// crew are goroutines that one caller waits for. A panic in one of them is raised again in the
// caller, where it is recovered as the caller's own.
type crew struct {
	group sync.WaitGroup
	mu    sync.Mutex
	// guarded by mu
	panicked *raisedPanic
}

// Go starts one more.
func (c *crew) Go(f func()) {
	c.group.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.panicked = &raisedPanic{p, debug.Stack()}
			}
		}()
		f()
	})
}

// Wait waits for all of them.
func (c *crew) Wait() {
	c.group.Wait()
	if c.panicked != nil {
		panic(c.panicked)
	}
}

// inBackground starts f at once; what it returns waits for the result, and has to be called.
func inBackground[T any](f func() (T, error)) func() (T, error) {
	var result T
	var err error
	var one crew
	one.Go(func() { result, err = f() })
	return func() (T, error) {
		one.Wait()
		return result, err
	}
}

// afterwards runs f in a goroutine of its own when ctx ends.
func afterwards(ctx context.Context, log *slog.Logger, work string, f func()) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		_ = guarded(ctx, log, work, func() error {
			f()
			return nil
		})
	})
}

// detached runs f in a goroutine that nobody waits for, and which guards itself.
func detached(f func()) { go f() }
