package engine

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// SnapshotCreate has the parameters of a new snapshot.
type SnapshotCreate struct {
	Name, Description string
	Disk              store.Selector
}

// Snapshots are the operations on snapshots.
type Snapshots struct{ *Simulation }

// List lists the snapshots of a project.
func (s Snapshots) List(call *Call, project store.Selector, w Window) ([]store.Snapshot, error) {
	records, err := list(s.Simulation, call, store.Snapshots, project, w)
	shown := make([]store.Snapshot, len(records))
	for i := range records {
		shown[i] = records[i].Snapshot
	}
	return shown, err
}

// View reads a snapshot.
func (s Snapshots) View(call *Call, ref Ref) (store.Snapshot, error) {
	record, err := view(s.Simulation, call, store.Snapshots, ref)
	return record.Snapshot, err
}

// Create runs the rack's saga, and returns when the snapshot is ready. In the meantime others see
// the snapshot in the state creating, and its disk, unless attached, in maintenance (A38).
func (s Snapshots) Create(call *Call, project store.Selector, c SnapshotCreate) (store.Snapshot,
	error) {
	d, err := reading(s.Simulation, func(tx *store.Tx) store.Disk {
		owner := s.project(call, tx, project)
		d := find(tx, store.Disks, owner.ID, c.Disk)
		tx.Check(snapshotProblem(owner, d))
		return d
	})
	if err != nil {
		return store.Snapshot{}, err
	}
	s.creating.Lock(d.ID)()
	return s.take(call, d, store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		func(*store.Tx) {})
}

// take takes a snapshot of a disk, unless the disk's state forbids it. It calls begin before its
// own checks, in the transaction that adds the record.
func (s Snapshots) take(call *Call, d store.Disk, ident store.Identity,
	begin func(*store.Tx)) (store.Snapshot, error) {
	_, locked := s.repairs.LoadOrStore(d.ID, true)
	if !locked {
		defer s.repairs.Delete(d.ID)
	}
	if locked || s.switches.get().Replacing {
		return store.Snapshot{}, conflict("volume repair lock") // A39
	}
	if s.noSpace(d.Size) {
		return store.Snapshot{}, errNoSpace // A41: space is checked before the name and the quota
	}
	record := store.SnapshotRecord{BlockSize: d.BlockSize, Snapshot: store.Snapshot{
		Identity: ident, ProjectID: d.ProjectID, DiskID: d.ID,
		State: store.SnapshotCreating, Size: d.Size,
	}}
	call.Object = record.Identity
	if err := s.insert(record, begin); err != nil {
		return store.Snapshot{}, err
	}
	record, err := s.fill(call, record)
	return record.Snapshot, err
}

func snapshotProblem(owner store.Project, d store.Disk) error {
	switch {
	case d.ProjectID != owner.ID:
		return invalidRequest("can't create a snapshot of a disk in a different project")
	case d.DiskType == store.TypeLocal:
		return invalidRequest("can't create a snapshot of a local storage disk")
	case d.ReadOnly:
		return invalidRequest("can't create a snapshot of a read-only disk")
	}
	return nil
}

// insert adds the record, charges its full size, and sets a detached disk to maintenance (A38).
// It checks the name before the quota, and the disk's state last (A41).
func (s Snapshots) insert(record store.SnapshotRecord, begin func(*store.Tx)) error {
	return s.store.Update(func(tx *store.Tx) {
		begin(tx)
		d := byID(tx, store.Disks, record.DiskID)
		tx.Check(checkDescription(record.Description))
		if store.Snapshots.Taken(tx, record.ProjectID, record.Name) {
			tx.Check(alreadyExists("snapshot", record.Name))
		}
		s.chargeStorage(tx, record.Size)
		switch d.State.State {
		case store.StateAttached, store.StateFinalizing:
		case store.StateDetached:
			d.State.State = store.StateMaintenance
			tx.PutDisk(d)
		default:
			// A42: the disk's state has changed, or does not permit a snapshot yet.
			tx.Check(errUnavailable)
		}
		store.Snapshots.Put(tx, record)
	})
}

// fill copies the bytes and makes the snapshot ready, or undoes everything. It does not repeat a
// copy that an earlier simulator has completed (A19).
func (s Snapshots) fill(call *Call, record store.SnapshotRecord) (store.SnapshotRecord, error) {
	err := func() error {
		defer s.locks.Lock(record.DiskID)()
		return s.plane.SnapshotDisk(context.WithoutCancel(s.ctx), record.ID, record.DiskID)
	}()
	s.hold(call, func(now adminapi.Switches) adminapi.Duration { return now.SnapshotHold })
	if err == nil && call.Unwind {
		err = errInternal
	}
	if err == nil {
		record.State = store.SnapshotReady
		err = s.end(record, store.StateDetached,
			func(tx *store.Tx) { store.Snapshots.Put(tx, record) })
	}
	if err == nil {
		return record, nil
	}
	undo := s.end(record, store.StateImportReady, func(tx *store.Tx) {
		tx.AddStorage(-record.Size)
		store.Snapshots.Delete(tx, record)
	})
	if undo == nil {
		undo = s.plane.RemoveSnapshot(record.ID)
	}
	if undo != nil {
		err = fmt.Errorf("%w; and undoing it: %w", err, undo)
	}
	return record, err
}

// end changes the snapshot's record and ends the maintenance of its disk. If the snapshot finalizes
// an import, imported becomes the state of the disk (A90).
func (s Snapshots) end(record store.SnapshotRecord, imported string,
	change func(*store.Tx)) error {
	return s.store.Update(func(tx *store.Tx) {
		d, ok := store.Disks.Get(tx, record.DiskID)
		next := map[string]string{store.StateMaintenance: store.StateDetached,
			store.StateFinalizing: imported}[d.State.State]
		if ok && next != "" {
			d.State.State = next
			tx.PutDisk(d)
		}
		change(tx)
	})
}

// Delete deletes a snapshot and frees its share of the quota, now or later. Disks that were created
// from it stay unchanged (A43). If the bytes cannot be removed now, the next start removes them.
func (s Snapshots) Delete(call *Call, ref Ref) error {
	now := s.switches.get()
	return remove(s.Simulation, call, store.Snapshots, ref,
		func(tx *store.Tx, record store.SnapshotRecord) {
			if record.State == store.SnapshotCreating {
				tx.Check(invalidRequest("snapshot cannot be deleted in state Creating"))
			}
			release(tx, record.ID, record.Size, now)
			store.Snapshots.Delete(tx, record)
		}, func(record store.SnapshotRecord) error {
			return s.free(call, record.ID, record.Size, s.plane.RemoveSnapshot, now)
		})
}
