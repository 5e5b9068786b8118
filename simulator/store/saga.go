package store

import (
	"encoding/json"
	"errors"
	"fmt"
)

// OpenSaga records the request of a creation that has begun, so that a restart can complete it.
func (tx *Tx) OpenSaga(id string, request any) error {
	data, err := json.Marshal(request)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketSagas).Put([]byte(id), data)
}

// SagaRequest reads what OpenSaga has recorded. It does not change into if there is nothing.
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
