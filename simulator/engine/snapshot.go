package engine

import (
	"cmp"
	"context"
	"errors"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// SnapshotCreate has the parameters of a new snapshot.
type SnapshotCreate struct {
	Name, Description string
	Disk              store.Selector
}

// Snapshots has the operations on snapshots.
type Snapshots struct{ *Simulation }

// List lists the snapshots of a project.
func (s Snapshots) List(call *Call, tx *store.Tx) []store.Snapshot {
	shown := []store.Snapshot{}
	for _, record := range scan(tx, call, store.Snapshots, s.project(call, tx).ID) {
		shown = append(shown, record.Snapshot)
	}
	return shown
}

// View returns a snapshot.
func (s Snapshots) View(call *Call, tx *store.Tx) store.Snapshot {
	return lookup(s.Simulation, call, tx, store.Snapshots).Snapshot
}

// Create creates the snapshot that a [SnapshotCreate] describes, and returns when it is ready.
// Until then other callers see the snapshot in the state "creating" and, unless the disk is
// attached, the disk in the state "maintenance" (A38).
func (s Snapshots) Create(call *Call) (store.Snapshot, error) {
	c := call.Body.(SnapshotCreate)
	d, err := Reading(s.Simulation, func(tx *store.Tx) store.Disk {
		owner := s.project(call, tx)
		d := find(tx, store.Disks, owner.ID, c.Disk)
		tx.Refuse(d.ProjectID != owner.ID,
			invalidRequest("can't create a snapshot of a disk in a different project"))
		tx.Refuse(d.DiskType == store.TypeLocal,
			invalidRequest("can't create a snapshot of a local storage disk"))
		tx.Refuse(d.ReadOnly, invalidRequest("can't create a snapshot of a read-only disk"))
		return d
	})
	if err != nil {
		return store.Snapshot{}, err
	}
	s.creating.Lock(d.ID)()
	return s.take(call, d, store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		func(*store.Tx) {})
}

// take takes a snapshot of a disk, if the disk's state permits it. The transaction that adds the
// record calls begin() first.
func (s Snapshots) take(call *Call, d store.Disk, ident store.Identity,
	begin func(*store.Tx)) (store.Snapshot, error) {
	_, locked := s.repairs.LoadOrStore(d.ID, true)
	if !locked {
		defer s.repairs.Delete(d.ID)
	}
	if locked || s.Switches().Replacing {
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
	// A38: the quota counts the disk's full size, and a detached disk goes into maintenance. A41: the
	// rack checks the name, then the quota, and the disk's state last.
	err := s.store.Update(func(tx *store.Tx) {
		begin(tx)
		d := byID(tx, store.Disks, record.DiskID)
		tx.Check(checkDescription(record.Description))
		tx.Refuse(store.Snapshots.Taken(tx, record.ProjectID, record.Name),
			alreadyExists("snapshot", record.Name))
		s.chargeStorage(tx, record.Size)
		switch d.State.State {
		case store.StateAttached, store.StateFinalizing:
		case store.StateDetached:
			d.State.State = store.StateMaintenance
			tx.PutDisk(d)
		default:
			// A42: the disk's state has changed since the call began, or never permitted a snapshot.
			tx.Check(errUnavailable)
		}
		store.Snapshots.Put(tx, record)
	})
	if err != nil {
		return store.Snapshot{}, err
	}
	record, err = s.fill(call, record)
	return record.Snapshot, err
}

// fill copies the bytes and makes the snapshot ready, or undoes its creation. It does not repeat a
// copy that was finished before a restart (A19).
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
		err = s.end(record, store.StateDetached, func(tx *store.Tx) { store.Snapshots.Put(tx, record) })
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
	return record, undone(err, undo)
}

// end calls change() to update the snapshot's record, and ends the maintenance of the disk. If the
// snapshot finalizes an import, the parameter imported is the disk's next state (A90).
func (s Snapshots) end(record store.SnapshotRecord, imported string, change func(*store.Tx)) error {
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

// Delete deletes a snapshot and frees its share of the quota, now or later (A68). Disks that were
// created from it do not change (A43). The simulator's next start removes what Delete could not.
func (s Snapshots) Delete(call *Call) error {
	now := s.Switches()
	return remove(s.Simulation, call, store.Snapshots,
		func(tx *store.Tx, record store.SnapshotRecord) {
			tx.Refuse(record.State == store.SnapshotCreating,
				invalidRequest("snapshot cannot be deleted in state Creating"))
			release(tx, record.ID, record.Size, now)
			store.Snapshots.Delete(tx, record)
		}, func(record store.SnapshotRecord) error {
			return s.free(call, record.ID, record.Size, s.plane.RemoveSnapshot, now)
		})
}

// ImageCreate has the parameters of a new image.
type ImageCreate struct{ Name, Description, OS, Version, SnapshotID string }

// maxWord is the greatest length of an image's OS and version in the rack's database (A91).
const maxWord = 64

// Images has the operations on images. The quota does not count images (A91).
type Images struct{ *Simulation }

// List returns the images of a project or, without a project, of the silo (A44).
func (s Images) List(call *Call, tx *store.Tx) []store.Image {
	if call.Named["project"].Given() {
		return scan(tx, call, store.Images, s.project(call, tx).ID)
	}
	return scan(tx, call, store.Images, "")
}

// Create creates an image from a snapshot. The body is an [ImageCreate]. The image belongs to the
// project that the call names or, without one, to the silo.
func (s Images) Create(call *Call) (store.Image, error) {
	c := call.Body.(ImageCreate)
	defer s.locks.Lock(c.SnapshotID)() // so that no call deletes the snapshot during the copy
	img := store.Image{Identity: store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		OS: c.OS, Version: c.Version}
	// A91: the rack makes these checks, in this order, before it checks the image's fields.
	err := s.store.Update(func(tx *store.Tx) {
		if call.Named["project"].Given() {
			owner := s.project(call, tx)
			img.ProjectID = &owner.ID
		} else {
			s.allowInSilo(call, tx)
		}
		source := byID(tx, store.Snapshots, c.SnapshotID)
		tx.Refuse(img.ProjectID != nil && *img.ProjectID != source.ProjectID,
			invalidRequest("snapshot does not belong to this project"))
		tx.Refuse(source.State == store.SnapshotCreating, errInternal) // A59
		img.BlockSize, img.Size = source.BlockSize, source.Size
		tx.Leave(img.ID)
	})
	if err != nil {
		return img, err
	}
	call.Object = img.Identity
	err = s.plane.ImportImage(context.WithoutCancel(s.ctx), img.ID,
		s.plane.Files.SnapshotPath(c.SnapshotID), img.Size)
	if err == nil {
		err = s.store.Update(func(tx *store.Tx) {
			tx.Refuse(call.Unwind, errInternal)
			tx.Check(cmp.Or(checkDescription(c.Description), checkLength(c.OS, maxWord),
				checkLength(c.Version, maxWord)))
			putImage(tx, "project-image", img)
		})
	}
	if err != nil {
		return img, errors.Join(err, s.plane.RemoveImage(img.ID))
	}
	return img, nil
}

func putImage(tx *store.Tx, kind string, img store.Image) {
	tx.Refuse(store.Images.Taken(tx, store.Deref(img.ProjectID), img.Name),
		alreadyExists(kind, img.Name))
	store.Images.Put(tx, img)
}

// Delete deletes an image. Disks that were created from it do not change (A91). The simulator's
// next start removes what Delete could not.
func (s Images) Delete(call *Call) error {
	return remove(s.Simulation, call, store.Images, store.Images.Delete,
		func(i store.Image) error { return s.plane.RemoveImage(i.ID) })
}

// Promote moves a project's image to the silo. A name without a project means an image of the silo,
// and is refused even if the silo has no such image (A91).
func (s Images) Promote(call *Call) (store.Image, error) {
	errSilo, project := invalidRequest("Cannot promote a silo image"), call.Named["project"]
	if call.Named["image"].Name != "" && !project.Given() {
		return store.Image{}, errSilo
	}
	return s.move(call, project, "silo-image", func(tx *store.Tx, img store.Image) *string {
		tx.Refuse(img.ProjectID == nil, errSilo)
		return nil
	})
}

// Demote moves an image of the silo to the project that the query names (A91).
func (s Images) Demote(call *Call) (store.Image, error) {
	return s.move(call, store.Selector{}, "project-image",
		func(tx *store.Tx, img store.Image) *string {
			tx.Refuse(img.ProjectID != nil, invalidRequest("Cannot demote a project image"))
			owner := s.project(call, tx)
			return &owner.ID
		})
}

// move moves an image to the project whose ID to() returns, or to the silo if to() returns nil. The
// parameter from is the project in which move looks up the image's name.
func (s Images) move(call *Call, from store.Selector, kind string,
	to func(*store.Tx, store.Image) *string) (img store.Image, err error) {
	err = s.store.Update(func(tx *store.Tx) {
		img = lookupIn(s.Simulation, call, tx, store.Images, from)
		img.ProjectID = to(tx, img)
		img.Touch()
		putImage(tx, kind, img)
	})
	return img, err
}
