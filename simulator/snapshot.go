package simulator

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/google/uuid"
)

// repairs are the disks that hold the rack's "volume repair lock": one snapshot at a time (A39).
type repairs struct {
	mu sync.Mutex
	// mu guards disks.
	disks map[string]bool
}

func (l *repairs) begin(diskID string) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.disks == nil {
		l.disks = map[string]bool{}
	}
	if l.disks[diskID] {
		return false
	}
	l.disks[diskID] = true
	return true
}

func (l *repairs) end(diskID string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.disks, diskID)
}

func (s *Server) snapshotList(r *request) (int, any, error) {
	var items []store.SnapshotRecord
	err := s.store.View(func(tx *store.Tx) error {
		p, err := s.queryProject(r, tx)
		if err != nil {
			return err
		}
		items, err = store.Snapshots.Scan(tx, p.ID, r.scan.SortBy, r.scan.LastSeen, r.scan.limit)
		return err
	})
	shown := make([]store.Snapshot, len(items))
	for i := range items {
		shown[i] = items[i].Snapshot
	}
	return http.StatusOK, newPage(r.scan, shown,
		func(sn store.Snapshot) store.Identity { return sn.Identity }), err
}

func (s *Server) snapshotView(r *request) (int, any, error) {
	var record store.SnapshotRecord
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		record, err = lookup(s, r, tx, store.Snapshots, r.path.Get("snapshot"))
		return err
	})
	return http.StatusOK, record.Snapshot, err
}

type snapshotCreate struct {
	name, description string
	disk              store.Selector
}

func parseSnapshotCreate(f *fields) any {
	name, description := f.identity()
	return snapshotCreate{name, description, f.nameOrID("disk")}
}

// snapshotCreate is the rack's saga: it answers when the snapshot is ready; meanwhile others see it
// creating, and its disk, unless attached, in maintenance (A38).
func (s *Server) snapshotCreate(r *request) (int, any, error) {
	c := r.body.(snapshotCreate)
	var d store.Disk
	err := s.store.View(func(tx *store.Tx) error {
		owner, err := s.queryProject(r, tx)
		if err != nil {
			return err
		}
		if d, err = find(tx, store.Disks, owner.ID, c.disk); err != nil {
			return err
		}
		return snapshotProblem(owner, d)
	})
	if err != nil {
		return 0, nil, err
	}
	s.creating.wait(d.ID)
	if !s.repairs.begin(d.ID) {
		return 0, nil, conflict("volume repair lock")
	}
	defer s.repairs.end(d.ID)
	record := store.SnapshotRecord{BlockSize: d.BlockSize, Snapshot: store.Snapshot{
		Identity:  store.NewIdentity(uuid.NewString(), c.name, c.description),
		ProjectID: d.ProjectID, DiskID: d.ID, State: store.SnapshotCreating, Size: d.Size,
	}}
	r.about(record.Identity)
	if err := s.beginSnapshot(record); err != nil {
		return 0, nil, err
	}
	if record, err = s.fillSnapshot(r, record); err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, record.Snapshot, nil
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

// beginSnapshot inserts the record, charges its full size, and takes a detached disk into
// maintenance (A38). A name that is taken is heard of before the quota, and that before a disk in
// no state for it (A41).
func (s *Server) beginSnapshot(record store.SnapshotRecord) error {
	return s.store.Update(func(tx *store.Tx) error {
		d, err := find(tx, store.Disks, "", store.Selector{ID: record.DiskID})
		if err != nil {
			return err
		}
		if store.Snapshots.Taken(tx, record.ProjectID, record.Name) {
			return alreadyExists("snapshot", record.Name)
		}
		if err := s.takeStorage(tx, record.Size); err != nil {
			return err
		}
		switch d.State.State {
		case store.StateAttached:
		case store.StateDetached:
			d.State.State = store.StateMaintenance
			if err := tx.PutDisk(d); err != nil {
				return err
			}
		default:
			// A42: the disk's state changed underneath, or does not allow it yet.
			return errUnavailable
		}
		return store.Snapshots.Put(tx, record)
	})
}

// fillSnapshot copies the bytes and makes the snapshot ready, or takes everything back.
func (s *Server) fillSnapshot(r *request, record store.SnapshotRecord) (store.SnapshotRecord, error) {
	err := func() error {
		defer s.locks.Lock(record.DiskID)()
		return s.plane.SnapshotDisk(context.WithoutCancel(s.life), record.ID, record.DiskID)
	}()
	s.hold(s.switches.get().SnapshotHold)
	if err == nil && r.unwinds() {
		err = errInternal
	}
	if err == nil {
		record.State = store.SnapshotReady
		err = s.endSnapshot(record, func(tx *store.Tx) error { return store.Snapshots.Put(tx, record) })
	}
	if err == nil {
		return record, nil
	}
	undo := s.plane.RemoveSnapshot(record.ID)
	if undo == nil {
		undo = s.endSnapshot(record, func(tx *store.Tx) error {
			if err := tx.AddStorage(-record.Size); err != nil {
				return err
			}
			return store.Snapshots.Delete(tx, record)
		})
	}
	if undo != nil {
		err = fmt.Errorf("%w; and taking it back: %w", err, undo)
	}
	return record, err
}

// endSnapshot changes the snapshot's record and ends the maintenance of its disk.
func (s *Server) endSnapshot(record store.SnapshotRecord, change func(*store.Tx) error) error {
	return s.store.Update(func(tx *store.Tx) error {
		d, ok, err := store.Disks.Get(tx, record.DiskID)
		if err != nil {
			return err
		}
		if ok && d.State.State == store.StateMaintenance {
			d.State.State = store.StateDetached
			if err := tx.PutDisk(d); err != nil {
				return err
			}
		}
		return change(tx)
	})
}

// snapshotDelete frees the snapshot's share of the quota, now or later. Disks made from it do not
// mind (A43).
func (s *Server) snapshotDelete(r *request) (int, any, error) {
	var record store.SnapshotRecord
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		record, err = lookup(s, r, tx, store.Snapshots, r.path.Get("snapshot"))
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	defer s.locks.Lock(record.ID)()
	delay := s.switches.get().FreeDelay
	err = s.store.Update(func(tx *store.Tx) error {
		if record, err = find(tx, store.Snapshots, "", store.Selector{ID: record.ID}); err != nil {
			return err
		}
		if record.State == store.SnapshotCreating {
			return invalidRequest("snapshot cannot be deleted in state Creating")
		}
		if err := release(tx, record.ID, record.Size, delay); err != nil {
			return err
		}
		return store.Snapshots.Delete(tx, record)
	})
	if err != nil {
		return 0, nil, err
	}
	if delay > 0 {
		s.freeLater(r, record.ID, s.plane.RemoveSnapshot, delay)
		return http.StatusNoContent, nil, nil
	}
	// Bytes that cannot be removed now are no snapshot any more; the next start sweeps them.
	return http.StatusNoContent, nil, s.plane.RemoveSnapshot(record.ID)
}
