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
func (r *Simulation) freeLater(call *Call, id string, remove func(id string) error,
	delay adminapi.Duration) {
	r.DeferWork(call.Context, time.Duration(delay), func() {
		defer r.locks.Lock(id)()
		err := remove(id)
		if err == nil {
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
func release(tx *store.Tx, id string, size int64, delay adminapi.Duration) error {
	if delay > 0 {
		return tx.DeferRelease(id, size)
	}
	return tx.AddStorage(-size)
}
