package engine

import (
	"errors"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Attachments are the operations that attach disks to instances.
type Attachments struct{ *Simulation }

// List lists the disks that are attached to an instance.
func (s Attachments) List(call *Call, ref Ref) ([]store.Disk, error) {
	return ofInstance(s.Simulation, call, ref, func(tx *store.Tx, i store.Instance) ([]store.Disk,
		error) {
		return tx.DisksOf(i.ID)
	})
}

// pair finds the instance and then the disk of an attach or a detach. It finds a disk's name only
// in the instance's project, and its ID in every project (A30).
func (s Attachments) pair(call *Call, tx *store.Tx, ref Ref, disk store.Selector) (
	store.Instance, store.Disk, error) {
	i, err := lookup(s.Simulation, call, tx, store.Instances, ref)
	if err != nil {
		return i, store.Disk{}, err
	}
	d, err := find(tx, store.Disks, i.ProjectID, disk)
	if err != nil {
		return i, d, err
	}
	call.Object = d.Identity
	return i, d, nil
}

// locked finds the instance and the disk, and locks both during the change. A disk that is being
// created may be attached; the call waits for its bytes (A32).
func (s Attachments) locked(call *Call, ref Ref, disk store.Selector,
	work func(store.Instance, store.Disk) (store.Disk, error)) (d store.Disk, err error) {
	var i store.Instance
	err = s.store.View(func(tx *store.Tx) error {
		i, d, err = s.pair(call, tx, ref, disk)
		return err
	})
	if err != nil {
		return d, err
	}
	s.creating.Lock(d.ID)() // A32
	defer s.locks.Lock(i.ID, d.ID)()
	if d, err = work(i, d); err != nil {
		return d, err
	}
	if call.Reread {
		return d, errUnavailable // A67
	}
	return d, nil
}

// Attach attaches a disk to an instance.
func (s Attachments) Attach(call *Call, ref Ref, disk store.Selector) (store.Disk, error) {
	return s.locked(call, ref, disk, func(i store.Instance, d store.Disk) (store.Disk, error) {
		if d.ProjectID != i.ProjectID {
			return d, invalidRequest("disk must be in the same project as the instance")
		}
		d, err := s.attach(call, i.ID, d.ID)
		var refused *Error
		if errors.As(err, &refused) && s.switches.get().Hotplug.Has(adminapi.RefusalsAs500) {
			return d, errInternal
		}
		return d, err
	})
}

// attach decides and records in one transaction (A31), and then shows the device to a running
// guest.
func (s Attachments) attach(call *Call, instanceID, diskID string) (store.Disk, error) {
	var i store.Instance
	var d store.Disk
	changed, now := false, s.switches.get()
	err := s.store.Update(func(tx *store.Tx) error {
		var err error
		if i, d, err = pairByID(tx, instanceID, diskID); err != nil {
			return err
		}
		if d.AttachedTo(i.ID) {
			changed = now.Hotplug.Has(adminapi.RecordFirst) // the machine is asked again
			return nil                                      // A33: already attached, even while it runs
		}
		attached, err := tx.DisksOf(i.ID)
		if err != nil {
			return err
		}
		if err := attachProblem(i, d, len(attached), now); err != nil {
			return err
		}
		changed = true
		d.State = store.DiskState{State: store.StateAttached, Instance: i.ID}
		return tx.PutDisk(d)
	})
	if err != nil || !changed || !i.HasGuest() {
		return d, err
	}
	err = s.plane.Plug(deviceOf(d, i.ID), call.deviceFault(now.DeviceDelay))
	if err != nil && !now.Hotplug.Has(adminapi.RecordFirst) {
		err = errors.Join(err, s.setState(d, store.DiskState{State: store.StateDetached}))
	}
	return d, err
}

func pairByID(tx *store.Tx, instanceID, diskID string) (store.Instance, store.Disk, error) {
	i, err := find(tx, store.Instances, "", store.Selector{ID: instanceID})
	if err != nil {
		return i, store.Disk{}, err
	}
	d, err := find(tx, store.Disks, "", store.Selector{ID: diskID})
	return i, d, err
}

func (s Attachments) setState(d store.Disk, state store.DiskState) error {
	d.State = state
	return s.store.Update(func(tx *store.Tx) error { return tx.PutDisk(d) })
}

// attachProblem returns the reason why a disk that is not attached here cannot be attached, in
// the rack's words. It checks in the rack's order: the disk's state, the guest's state, the
// instance's state, and then the limit (A34).
func attachProblem(i store.Instance, d store.Disk, attached int, now adminapi.Switches) error {
	switch d.State.State {
	case store.StateCreating, store.StateDetached:
	case store.StateAttached, "attaching", "detaching":
		return invalidRequest("cannot attach disk %q: disk is attached to another instance", d.Name)
	default:
		return invalidRequest("cannot attach disk %q: invalid state %s", d.Name, d.State.State)
	}
	switch {
	case i.Active() && !now.Hotplug.Attaches():
		return invalidRequest("cannot attach disk: instance is not fully stopped")
	case i.Active() && d.DiskType == store.TypeLocal:
		// A35: a local disk cannot be added to the zone of a running guest, with or without hot-plug.
		return conflict("cannot attach local storage disk: instance is starting")
	case !i.Active() && i.RunState != store.RunStopped && i.RunState != store.StateCreating:
		return invalidRequest("cannot attach disk to instance in %s state", i.RunState)
	case attached >= now.DiskLimit:
		return invalidRequest("cannot attach more than %d disks to instance", now.DiskLimit)
	}
	return nil
}

// ejectTime is how long the prototype waits for a guest to release a disk before it removes the
// disk by surprise (adminapi.SurpriseRemoval).
const ejectTime = time.Second

// Detach detaches a disk from an instance.
func (s Attachments) Detach(call *Call, ref Ref, disk store.Selector) (store.Disk, error) {
	return s.locked(call, ref, disk, func(i store.Instance, d store.Disk) (store.Disk, error) {
		now := s.switches.get()
		if now.Hotplug.Has(adminapi.SurpriseRemoval) && i.HasGuest() && detachProblem(i, d, now) == nil {
			s.Pause(s.ctx, ejectTime) // the guest uses the disk meanwhile
		}
		return s.detach(i.ID, d.ID)
	})
}

// detach decides and records in one transaction. The device is gone from the guest before the
// caller has the response (A31).
func (s Attachments) detach(instanceID, diskID string) (store.Disk, error) {
	var i store.Instance
	var d store.Disk
	changed := false
	err := s.store.Update(func(tx *store.Tx) error {
		var err error
		if i, d, err = pairByID(tx, instanceID, diskID); err != nil {
			return err
		}
		if d.State.State == store.StateDetached {
			return nil // A36: already detached, for any instance
		}
		if err := detachProblem(i, d, s.switches.get()); err != nil {
			return err
		}
		changed = true
		d.State = store.DiskState{State: store.StateDetached}
		return tx.PutDisk(d)
	})
	if err != nil || !changed || !i.HasGuest() {
		return d, err
	}
	if err := s.plane.Unplug(i.ID, d.ID); err != nil {
		return d, errors.Join(err, s.setState(d, store.DiskState{State: store.StateAttached,
			Instance: i.ID}))
	}
	return d, nil
}

// detachProblem returns the reason why a disk cannot be detached, in the rack's words and order
// (A37).
func detachProblem(i store.Instance, d store.Disk, now adminapi.Switches) error {
	switch {
	case d.AttachedTo(i.ID):
	case d.State.Instance != "":
		return invalidRequest("cannot detach disk %q: disk is attached to another instance", d.Name)
	default:
		return invalidRequest("cannot detach disk %q: invalid state %s", d.Name, d.State.State)
	}
	boot := store.Deref(i.BootDiskID) == d.ID
	switch {
	// A35: a local disk cannot be removed from a running guest either.
	case i.Active() && (!now.Hotplug.Detaches() || d.DiskType == store.TypeLocal):
		return invalidRequest("cannot detach disk: instance is not fully stopped")
	case i.Active(), i.RunState == store.StateCreating, i.RunState == store.RunStopped:
		if boot {
			return conflict("boot disk cannot be detached")
		}
		return nil
	case i.RunState == store.RunFailed && !boot:
		return nil
	}
	return invalidRequest("cannot detach disk from instance in %s state", i.RunState)
}
