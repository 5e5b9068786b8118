package engine

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// deferredWork has the work of calls that were answered before it is done.
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

// free removes the bytes of a deleted object and frees its share of the quota, now or some time
// after the response (A68). If the rack is closed before, its next start frees them.
func (r *Simulation) free(call *Call, id string, size int64, remove func(id string) error,
	now adminapi.Switches) error {
	if now.FreeDelay <= 0 {
		return remove(id)
	}
	if now.QuotaFirst {
		r.unfreed.Add(size)
	}
	r.DeferWork(call.Context, time.Duration(now.FreeDelay), func() {
		defer r.locks.Lock(id)()
		err := remove(id)
		switch {
		case err != nil:
		case now.QuotaFirst:
			r.unfreed.Add(-size)
		default:
			err = r.store.Update(func(tx *store.Tx) { tx.ReleaseDeferred(id) })
		}
		if err != nil {
			r.log.Error("cannot free what was deleted", slog.String("id", id),
				slog.String("error", err.Error()))
		}
	})
	return nil
}

// settleDeleted releases the quota of deleted objects. Reconcile removes their files.
func settleDeleted(tx *store.Tx) {
	for _, id := range tx.DeferredReleases() {
		tx.ReleaseDeferred(id)
	}
}

// release returns the quota of a deleted object, now or after the delay (A68).
func release(tx *store.Tx, id string, size int64, now adminapi.Switches) {
	if now.FreeDelay > 0 && !now.QuotaFirst {
		tx.DeferRelease(id, size)
	} else {
		tx.AddStorage(-size)
	}
}

// noSpace reports whether the rack lacks physical space for a number of bytes in addition to what
// the quota counts (A27). Deleted objects use their space until it is freed (A68).
func (r *Simulation) noSpace(more int64) bool {
	now, unfreed := r.switches.get(), r.unfreed.Load()
	if now.Full || unfreed == 0 {
		return now.Full
	}
	used, err := reading(r, (*store.Tx).Storage)
	return err != nil || used+more > int64(now.QuotaBytes)-unfreed
}

// Reset puts the rack back to its start: it has the objects and the switches of the Config, with
// the same IDs, and nothing else. The guests lose their disks even if they use them; their views
// stay where they are. Calls that come in the meantime get ErrClosed.
func (r *Simulation) Reset(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // a rack that is half reset cannot be used
	r.life.Lock()
	defer r.life.Unlock()
	if !r.end() {
		return ErrClosed
	}
	// No call and no work is in progress, so the fields below can be changed without a lock.
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(r.ctx))
	r.unfreed.Store(0)
	err := r.plane.Empty()
	if err == nil {
		_, err = r.ChangeSwitches(func(now *adminapi.Switches) error {
			*now = r.config.switches()
			return nil
		})
	}
	if err == nil {
		err = r.restore(ctx, (*store.Tx).Clear)
	}
	r.mu.Lock()
	r.closed = false
	r.mu.Unlock()
	if err != nil {
		return fmt.Errorf("reset the rack in %s: %w", r.config.Dir, err)
	}
	return nil
}
