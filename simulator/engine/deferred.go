package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// deferredWork is the work of calls that have been answered already.
type deferredWork struct {
	mu sync.Mutex
	// mu guards items.
	items []*deferredItem
}

// deferredItem is one piece of deferred work: now is closed to end its wait, done when it has
// ended.
type deferredItem struct{ now, done chan struct{} }

func (w *deferredWork) add() *deferredItem {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.items = slices.DeleteFunc(w.items, (*deferredItem).over)
	h := &deferredItem{now: make(chan struct{}), done: make(chan struct{})}
	w.items = append(w.items, h)
	return h
}

func (i *deferredItem) over() bool {
	select {
	case <-i.done:
		return true
	default:
		return false
	}
}

// release ends the wait of all items and returns them.
func (w *deferredWork) release() []*deferredItem {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.items
	w.items = nil
	for _, h := range all {
		close(h.now)
	}
	return all
}

// DeferWork does something when ctx has ended and then the delay is over. A rack that closes
// meanwhile drops it.
func (r *Rack) DeferWork(ctx context.Context, delay time.Duration, do func()) {
	h := r.deferred.add()
	drop := func() { close(h.done) }
	end, ok := r.Begin()
	if !ok {
		drop()
		return
	}
	go func() {
		defer end()
		defer drop()
		select {
		case <-ctx.Done():
		case <-r.ctx.Done():
		}
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-h.now:
		case <-r.ctx.Done():
		}
		if r.ctx.Err() == nil {
			do()
		}
	}()
}

// RunDeferred does the deferred work now, and returns when all of it is done, including what was in
// progress already.
func (r *Rack) RunDeferred(ctx context.Context) error {
	for _, h := range r.deferred.release() {
		select {
		case <-h.done:
		case <-ctx.Done():
			return fmt.Errorf("run deferred work: %w", ctx.Err())
		}
	}
	return nil
}
