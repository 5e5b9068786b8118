package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// release gives back what a deleted object takes of the quota, or notes that this comes later.
func (tx *tx) release(id string, size int64, delay adminapi.Duration) error {
	if delay <= 0 {
		return tx.addStorage(-size)
	}
	data, err := json.Marshal(size)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketUnfreed).Put([]byte(id), data)
}

// reclaim undoes release.
func (tx *tx) reclaim(id string, size int64) error {
	unfreed := tx.Bucket(bucketUnfreed)
	if unfreed.Get([]byte(id)) == nil {
		return tx.addStorage(size)
	}
	return unfreed.Delete([]byte(id))
}

// free gives back what release has left.
func (tx *tx) free(id string) error {
	var size int64
	unfreed := tx.Bucket(bucketUnfreed)
	if err := json.Unmarshal(unfreed.Get([]byte(id)), &size); err != nil {
		return fmt.Errorf("read what is to be freed of %s: %w", id, err)
	}
	return errors.Join(tx.addStorage(-size), unfreed.Delete([]byte(id)))
}

// freeLater removes the bytes of a deleted object and frees its share of the quota, some time after
// the request's answer (A68). What a closed rack has not freed, the next start frees.
func (s *Server) freeLater(r *request, id string, remove func(id string) error,
	delay adminapi.Duration) {
	s.holdBack(r.Context(), time.Duration(delay), func() {
		defer s.locks.Lock(id)()
		err := remove(id)
		if err == nil {
			err = s.store.update(func(tx *tx) error { return tx.free(id) })
		}
		if err != nil {
			s.log.Error("what was deleted is not freed", slog.String("id", id),
				slog.String("error", err.Error()))
		}
	})
}

// settleDeleted frees what was deleted; its files go with all others that no record names.
func settleDeleted(tx *tx) error {
	var ids []string
	err := tx.Bucket(bucketUnfreed).ForEach(func(id, _ []byte) error {
		ids = append(ids, string(id))
		return nil
	})
	for _, id := range ids {
		err = errors.Join(err, tx.free(id))
	}
	return err
}
