package store

import (
	"encoding/json"
	"errors"
	"fmt"
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
	data, err := json.Marshal(sum + delta)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketMeta).Put(keyStorage, data)
}

// DeferRelease records that the quota still counts a deleted object, until ReleaseDeferred.
func (tx *Tx) DeferRelease(id string, size int64) error {
	data, err := json.Marshal(size)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketUnfreed).Put([]byte(id), data)
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
