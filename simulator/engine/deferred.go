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

// deferredItem is one piece of it: now is closed to end its wait, done when it has ended.
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

// release ends the wait of all and returns them.
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

// deferWork does something when ctx and then the delay are over. A rack that closes meanwhile drops
// it.
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
		case <-r.life.Done():
		}
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-h.now:
		case <-r.life.Done():
		}
		if r.life.Err() == nil {
			do()
		}
	}()
}

// runDeferred carries out now what faults of the phase Deferred and the switch FreeDelay hold back,
// and returns when all of it is done, including what was under way already.
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
