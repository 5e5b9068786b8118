package engine

import (
	"errors"
	"log/slog"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// freeLater removes the bytes of a deleted object and frees its share of the quota some time
// after the response (A68). The next start frees what a closed rack has not freed.
func (r *Simulation) freeLater(call *Call, id string, size int64, remove func(id string) error,
	now adminapi.Switches) {
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
			err = r.store.Update(func(tx *store.Tx) error { return tx.ReleaseDeferred(id) })
		}
		if err != nil {
			r.log.Error("cannot free what was deleted", slog.String("id", id),
				slog.String("error", err.Error()))
		}
	})
}

// settleDeleted releases the quota of deleted objects. Reconcile removes their files.
func settleDeleted(tx *store.Tx) error {
	ids, err := tx.DeferredReleases()
	for _, id := range ids {
		err = errors.Join(err, tx.ReleaseDeferred(id))
	}
	return err
}

// release returns the quota of a deleted object, now or after the delay (A68).
func release(tx *store.Tx, id string, size int64, now adminapi.Switches) error {
	if now.FreeDelay > 0 && !now.QuotaFirst {
		return tx.DeferRelease(id, size)
	}
	return tx.AddStorage(-size)
}

// noSpace reports whether the rack lacks the space for what the quota counts now and more bytes
// (A27). Deleted objects have theirs until it is freed (A68).
func (r *Simulation) noSpace(more int64) bool {
	now, unfreed := r.switches.get(), r.unfreed.Load()
	if now.Full || unfreed == 0 {
		return now.Full
	}
	var used int64
	err := r.store.View(func(tx *store.Tx) (err error) {
		used, err = tx.Storage()
		return err
	})
	return err != nil || used+more > int64(now.QuotaBytes)-unfreed
}
