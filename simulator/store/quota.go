package store

import "fmt"

const keyStorage = "storage provisioned"

// Storage returns the quota that disks and snapshots use.
func (tx *Tx) Storage() (sum int64) {
	tx.get(bucketMeta, keyStorage, &sum)
	return sum
}

// AddStorage changes the quota that disks and snapshots use.
func (tx *Tx) AddStorage(delta int64) { tx.put(bucketMeta, keyStorage, tx.Storage()+delta) }

// DeferRelease records that the quota still counts a deleted object, until ReleaseDeferred.
func (tx *Tx) DeferRelease(id string, size int64) { tx.put(bucketUnfreed, id, size) }

// Reclaim makes the quota count a deleted object again, with or without a DeferRelease.
func (tx *Tx) Reclaim(id string, size int64) {
	if tx.Bucket(bucketUnfreed).Get([]byte(id)) == nil {
		tx.AddStorage(size)
	}
	tx.drop(bucketUnfreed, id)
}

// ReleaseDeferred returns the quota that DeferRelease has recorded.
func (tx *Tx) ReleaseDeferred(id string) {
	var size int64
	if !tx.get(bucketUnfreed, id, &size) {
		tx.Check(fmt.Errorf("there is no record of what is to be freed of %s", id))
	}
	tx.AddStorage(-size)
	tx.drop(bucketUnfreed, id)
}

// DeferredReleases lists the deleted objects that the quota still counts.
func (tx *Tx) DeferredReleases() []string { return tx.keys(bucketUnfreed, "") }

// OpenSaga records the request of a creation that has begun, so that a restart can complete it.
func (tx *Tx) OpenSaga(id string, request any) { tx.put(bucketSagas, id, request) }

// SagaRequest reads the request that OpenSaga has recorded. Without one it does not change into.
func (tx *Tx) SagaRequest(id string, into any) { tx.get(bucketSagas, id, into) }

// CloseSaga forgets the request of a creation that has ended.
func (tx *Tx) CloseSaga(id string) { tx.drop(bucketSagas, id) }

// UndoDisk removes the record of a disk whose creation has failed, and its share of the quota.
func (tx *Tx) UndoDisk(d Disk) {
	tx.CloseSaga(d.ID)
	Disks.Delete(tx, d)
	tx.AddStorage(-d.Size)
}

// UndoInstance removes an instance whose creation has failed, together with the disks that were
// made for it.
func (tx *Tx) UndoInstance(i Instance, made []string) {
	tx.DeleteInstance(i)
	for _, id := range made {
		if d, ok := Disks.Get(tx, id); ok {
			tx.UndoDisk(d)
		}
	}
}
