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
	return ofInstance(s.Simulation, call, ref, func(tx *store.Tx, i store.Instance) []store.Disk {
		return tx.DisksOf(i.ID)
	})
}

// locked finds the instance and the disk, and locks both during the change. It finds a disk's name
// only in the instance's project, and its ID in every project (A30). A disk that is being created
// may be attached; the call waits for its bytes (A32).
func (s Attachments) locked(call *Call, ref Ref, disk store.Selector,
	work func(store.Instance, store.Disk) (store.Disk, error)) (d store.Disk, err error) {
	var i store.Instance
	err = s.store.View(func(tx *store.Tx) {
		i = lookup(s.Simulation, call, tx, store.Instances, ref)
		d = find(tx, store.Disks, i.ProjectID, disk)
		call.Object = d.Identity
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
	err := s.store.Update(func(tx *store.Tx) {
		i, d = byID(tx, store.Instances, instanceID), byID(tx, store.Disks, diskID)
		if d.AttachedTo(i.ID) {
			changed = now.Hotplug.Has(adminapi.RecordFirst) // the machine is asked again
			return                                          // A33: already attached, even while it runs
		}
		tx.Check(attachProblem(i, d, len(tx.DisksOf(i.ID)), now))
		changed = true
		d.State = store.DiskState{State: store.StateAttached, Instance: i.ID}
		tx.PutDisk(d)
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

func (s Attachments) setState(d store.Disk, state store.DiskState) error {
	d.State = state
	return s.store.Update(func(tx *store.Tx) { tx.PutDisk(d) })
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
	err := s.store.Update(func(tx *store.Tx) {
		i, d = byID(tx, store.Instances, instanceID), byID(tx, store.Disks, diskID)
		if d.State.State == store.StateDetached {
			return // A36: already detached, for any instance
		}
		tx.Check(detachProblem(i, d, s.switches.get()))
		changed = true
		d.State = store.DiskState{State: store.StateDetached}
		tx.PutDisk(d)
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
