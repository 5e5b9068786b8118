package engine

import (
	"cmp"
	"context"
	"errors"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// ImageCreate has the parameters of a new image.
type ImageCreate struct{ Name, Description, OS, Version, SnapshotID string }

// maxWord is the length of an image's OS and version that fits into the rack's database (A91).
const maxWord = 64

// Images are the operations on images. An image does not count in the quota (A91).
type Images struct{ *Simulation }

// List returns the images of a project or, without a project, of the silo (A44).
func (s Images) List(call *Call, project store.Selector, w Window) ([]store.Image, error) {
	if project.Given() {
		return list(s.Simulation, call, store.Images, project, w)
	}
	return listOfSilo(s.Simulation, store.Images, w)
}

// View reads an image.
func (s Images) View(call *Call, ref Ref) (store.Image, error) {
	return view(s.Simulation, call, store.Images, ref)
}

// Create creates an image from a snapshot, in a project or, without a project, in the silo.
func (s Images) Create(call *Call, project store.Selector, c ImageCreate) (store.Image, error) {
	defer s.locks.Lock(c.SnapshotID)() // it must not be deleted during the copy
	img := store.Image{Identity: store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		OS: c.OS, Version: c.Version}
	err := s.store.Update(func(tx *store.Tx) {
		s.describe(call, tx, project, c, &img)
		tx.Leave(img.ID)
	})
	if err != nil {
		return img, err
	}
	call.Object = img.Identity
	err = s.plane.ImportImage(context.WithoutCancel(s.ctx), img.ID,
		s.plane.SnapshotPath(c.SnapshotID), img.Size)
	if err == nil {
		err = s.store.Update(func(tx *store.Tx) {
			failHalfway(call, tx)
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

// describe makes the checks that come before the record, in the rack's order (A91).
func (s Images) describe(call *Call, tx *store.Tx, project store.Selector, c ImageCreate,
	img *store.Image) {
	if project.Given() {
		owner := s.project(call, tx, project)
		img.ProjectID = &owner.ID
	} else {
		s.allowInSilo(call, tx)
	}
	source := byID(tx, store.Snapshots, c.SnapshotID)
	switch {
	case img.ProjectID != nil && *img.ProjectID != source.ProjectID:
		tx.Check(invalidRequest("snapshot does not belong to this project"))
	case source.State == store.SnapshotCreating:
		tx.Check(errInternal) // A59
	}
	img.BlockSize, img.Size = source.BlockSize, source.Size
}

// putImage writes an image if its name is free. kind is the rack's word for an image in its error.
func putImage(tx *store.Tx, kind string, img store.Image) {
	if store.Images.Taken(tx, store.Deref(img.ProjectID), img.Name) {
		tx.Check(alreadyExists(kind, img.Name))
	}
	store.Images.Put(tx, img)
}

// Delete deletes an image. Disks that were created from it stay unchanged (A91). If the bytes
// cannot be removed now, the next start removes them.
func (s Images) Delete(call *Call, ref Ref) error {
	return remove(s.Simulation, call, store.Images, ref, store.Images.Delete,
		func(i store.Image) error { return s.plane.RemoveImage(i.ID) })
}

// Promote moves a project's image to the silo. A name without a project means an image of the silo,
// for which the rack returns the same error whether it exists or not (A91).
func (s Images) Promote(call *Call, ref Ref) (store.Image, error) {
	errSilo := invalidRequest("Cannot promote a silo image")
	if ref.Object.Name != "" && !ref.Project.Given() {
		return store.Image{}, errSilo
	}
	return s.move(call, ref, "silo-image", func(tx *store.Tx, img store.Image) *string {
		if img.ProjectID == nil {
			tx.Check(errSilo)
		}
		return nil
	})
}

// Demote moves an image of the silo to a project (A91).
func (s Images) Demote(call *Call, image, project store.Selector) (store.Image, error) {
	return s.move(call, Ref{Object: image}, "project-image",
		func(tx *store.Tx, img store.Image) *string {
			if img.ProjectID != nil {
				tx.Check(invalidRequest("Cannot demote a project image"))
			}
			owner := s.project(call, tx, project)
			return &owner.ID
		})
}

// move moves an image to the project with the ID that to returns, or to the silo.
func (s Images) move(call *Call, ref Ref, kind string, to func(*store.Tx, store.Image) *string) (
	img store.Image, err error) {
	err = s.store.Update(func(tx *store.Tx) {
		img = lookup(s.Simulation, call, tx, store.Images, ref)
		img.ProjectID = to(tx, img)
		img.Touch()
		putImage(tx, kind, img)
	})
	return img, err
}
