package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// deferredWork is the rest of calls that have already been answered.
type deferredWork struct {
	mu sync.Mutex
	// mu guards items.
	items []*deferredItem
}

// deferredItem is one piece of deferred work. Closing now ends its wait; done is closed when it
// has ended.
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

// release ends the wait of all items and returns the items.
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

// DeferWork calls do when ctx has ended and the delay after that has passed. If the rack closes
// before, do is not called.
func (r *Simulation) DeferWork(ctx context.Context, delay time.Duration, do func()) {
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

// RunDeferred carries out the deferred work at once. It returns when all of it is done, including
// work that was already in progress.
func (r *Simulation) RunDeferred(ctx context.Context) error {
	for _, h := range r.deferred.release() {
		select {
		case <-h.done:
		case <-ctx.Done():
			return fmt.Errorf("run deferred work: %w", ctx.Err())
		}
	}
	return nil
}
