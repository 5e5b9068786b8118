package store

import (
	"encoding/json"
	"errors"
	"fmt"

	"go.etcd.io/bbolt"
)

// Storage returns the quota that disks and snapshots use.
func (tx *Tx) Storage() (int64, error) {
	var sum int64
	data := tx.Bucket(bucketMeta).Get(keyStorage)
	if data == nil {
		return 0, nil
	}
	if err := json.Unmarshal(data, &sum); err != nil {
		return 0, fmt.Errorf("read the record of provisioned storage: %w", err)
	}
	return sum, nil
}

// AddStorage changes the quota that disks and snapshots use.
func (tx *Tx) AddStorage(delta int64) error {
	sum, err := tx.Storage()
	if err != nil {
		return err
	}
	return putJSON(tx.Bucket(bucketMeta), keyStorage, sum+delta)
}

func putJSON(b *bbolt.Bucket, key []byte, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return b.Put(key, data)
}

// DeferRelease records that the quota still counts a deleted object, until ReleaseDeferred.
func (tx *Tx) DeferRelease(id string, size int64) error {
	return putJSON(tx.Bucket(bucketUnfreed), []byte(id), size)
}

// Reclaim makes the quota count a deleted object again, with or without a DeferRelease.
func (tx *Tx) Reclaim(id string, size int64) error {
	unfreed := tx.Bucket(bucketUnfreed)
	if unfreed.Get([]byte(id)) == nil {
		return tx.AddStorage(size)
	}
	return unfreed.Delete([]byte(id))
}

// ReleaseDeferred returns the quota that DeferRelease has recorded.
func (tx *Tx) ReleaseDeferred(id string) error {
	var size int64
	unfreed := tx.Bucket(bucketUnfreed)
	if err := json.Unmarshal(unfreed.Get([]byte(id)), &size); err != nil {
		return fmt.Errorf("read what is to be freed of %s: %w", id, err)
	}
	return errors.Join(tx.AddStorage(-size), unfreed.Delete([]byte(id)))
}

// DeferredReleases lists the deleted objects that the quota still counts.
func (tx *Tx) DeferredReleases() (ids []string, err error) {
	err = tx.Bucket(bucketUnfreed).ForEach(func(id, _ []byte) error {
		ids = append(ids, string(id))
		return nil
	})
	return ids, err
}

// OpenSaga records the request of a creation that has begun, so that a restart can complete it.
func (tx *Tx) OpenSaga(id string, request any) error {
	return putJSON(tx.Bucket(bucketSagas), []byte(id), request)
}

// SagaRequest reads the request that OpenSaga has recorded. Without one it does not change into.
func (tx *Tx) SagaRequest(id string, into any) error {
	data := tx.Bucket(bucketSagas).Get([]byte(id))
	if data == nil {
		return nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read the request that creates %s: %w", id, err)
	}
	return nil
}

// CloseSaga forgets the request of a creation that has ended.
func (tx *Tx) CloseSaga(id string) error { return tx.Bucket(bucketSagas).Delete([]byte(id)) }

// UndoDisk removes the record of a disk whose creation has failed, and its share of the quota.
func (tx *Tx) UndoDisk(d Disk) error {
	return errors.Join(tx.CloseSaga(d.ID), Disks.Delete(tx, d), tx.AddStorage(-d.Size))
}

// UndoInstance removes an instance whose creation has failed, together with the disks that were
// made for it.
func (tx *Tx) UndoInstance(i Instance, made []string) error {
	if err := tx.DeleteInstance(i); err != nil {
		return err
	}
	for _, id := range made {
		d, ok, err := Disks.Get(tx, id)
		if err == nil && ok {
			err = tx.UndoDisk(d)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
