package simulator

import (
	"errors"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func parseDiskPath(f *fields) any { return f.nameOrID("disk") }

func (s *Server) instanceDiskList(r *request) (int, any, error) {
	var p page[disk]
	err := s.store.view(func(tx *tx) error {
		i, err := lookup(s, r, tx, instances, r.path.Get("instance"))
		if err != nil {
			return err
		}
		attached, err := tx.disksOf(i.ID)
		p = slice(r.scan, attached, disks.ident)
		return err
	})
	return http.StatusOK, p, err
}

// pair finds the instance and then the disk of an attach or a detach; a disk's name is looked up
// in the instance's project, its ID anywhere (A30).
func (s *Server) pair(r *request, tx *tx) (instance, disk, error) {
	i, err := lookup(s, r, tx, instances, r.path.Get("instance"))
	if err != nil {
		return i, disk{}, err
	}
	d, err := find(tx, disks, i.ProjectID, r.body.(selector))
	if err != nil {
		return i, d, err
	}
	r.about(d.identity)
	return i, d, nil
}

// locked finds instance and disk, and holds both while it does its work. A disk that is being
// created may be attached; its bytes are waited for (A32).
func (s *Server) locked(r *request, work func(instance, disk) (disk, error)) (int, any, error) {
	var i instance
	var d disk
	err := s.store.view(func(tx *tx) error {
		var err error
		i, d, err = s.pair(r, tx)
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	s.creating.wait(d.ID) // A32
	defer s.locks.Lock(i.ID, d.ID)()
	if d, err = work(i, d); err != nil {
		return 0, nil, err
	}
	if r.struck(adminapi.Reread) {
		return 0, nil, errUnavailable // A67
	}
	return http.StatusAccepted, d, nil
}

func (s *Server) instanceDiskAttach(r *request) (int, any, error) {
	return s.locked(r, func(i instance, d disk) (disk, error) {
		if d.ProjectID != i.ProjectID {
			return d, invalidRequest("disk must be in the same project as the instance")
		}
		return s.attach(r, i.ID, d.ID)
	})
}

// attach decides and records in one transaction (A31), and then shows the device to a guest that
// runs.
func (s *Server) attach(r *request, instanceID, diskID string) (disk, error) {
	var i instance
	var d disk
	changed := false
	err := s.store.update(func(tx *tx) error {
		var err error
		if i, d, err = tx.pairByID(instanceID, diskID); err != nil {
			return err
		}
		if d.attachedTo(i.ID) {
			return nil // A33: already so, even while it runs
		}
		attached, err := tx.disksOf(i.ID)
		if err != nil {
			return err
		}
		if err := attachProblem(i, d, len(attached), s.switches.get()); err != nil {
			return err
		}
		changed = true
		d.State = diskState{stateAttached, i.ID}
		return tx.putDisk(d)
	})
	if err != nil || !changed || !i.sees() {
		return d, err
	}
	delay := s.switches.get().DeviceDelay
	if err := s.plane.Plug(d.device(i.ID), r.device(delay)); err != nil {
		return d, errors.Join(err, s.setState(d, diskState{State: stateDetached}))
	}
	return d, nil
}

func (tx *tx) pairByID(instanceID, diskID string) (instance, disk, error) {
	i, err := find(tx, instances, "", selector{id: instanceID})
	if err != nil {
		return i, disk{}, err
	}
	d, err := find(tx, disks, "", selector{id: diskID})
	return i, d, err
}

func (s *Server) setState(d disk, state diskState) error {
	d.State = state
	return s.store.update(func(tx *tx) error { return tx.putDisk(d) })
}

// attachProblem is why a disk that is not attached here cannot be, in the rack's words and order:
// the disk's state, the guest's, the instance's, and then the room (A34).
func attachProblem(i instance, d disk, attached int, now adminapi.Switches) error {
	switch d.State.State {
	case stateCreating, stateDetached:
	case stateAttached, "attaching", "detaching":
		return invalidRequest("cannot attach disk %q: disk is attached to another instance", d.Name)
	default:
		return invalidRequest("cannot attach disk %q: invalid state %s", d.Name, d.State.State)
	}
	switch {
	case i.active() && !now.Hotplug:
		return invalidRequest("cannot attach disk: instance is not fully stopped")
	case i.active() && d.DiskType == typeLocal:
		// A35: a running guest's zone cannot gain a local disk, hot-plug or not.
		return conflict("cannot attach local storage disk: instance is starting")
	case !i.active() && i.RunState != runStopped && i.RunState != stateCreating:
		return invalidRequest("cannot attach disk to instance in %s state", i.RunState)
	case attached >= now.DiskLimit:
		return invalidRequest("cannot attach more than %d disks to instance", now.DiskLimit)
	}
	return nil
}

func (s *Server) instanceDiskDetach(r *request) (int, any, error) {
	return s.locked(r, func(i instance, d disk) (disk, error) { return s.detach(i.ID, d.ID) })
}

// detach decides and records in one transaction, and the device is gone from the guest before the
// caller is told (A31).
func (s *Server) detach(instanceID, diskID string) (disk, error) {
	var i instance
	var d disk
	changed := false
	err := s.store.update(func(tx *tx) error {
		var err error
		if i, d, err = tx.pairByID(instanceID, diskID); err != nil {
			return err
		}
		if d.State.State == stateDetached {
			return nil // A36: already so, whichever instance is named
		}
		if err := detachProblem(i, d, s.switches.get()); err != nil {
			return err
		}
		changed = true
		d.State = diskState{State: stateDetached}
		return tx.putDisk(d)
	})
	if err != nil || !changed || !i.sees() {
		return d, err
	}
	if err := s.plane.Unplug(i.ID, d.ID); err != nil {
		return d, errors.Join(err, s.setState(d, diskState{stateAttached, i.ID}))
	}
	return d, nil
}

// detachProblem is why a disk cannot be detached, in the rack's words and order (A37).
func detachProblem(i instance, d disk, now adminapi.Switches) error {
	switch {
	case d.attachedTo(i.ID):
	case d.State.Instance != "":
		return invalidRequest("cannot detach disk %q: disk is attached to another instance", d.Name)
	default:
		return invalidRequest("cannot detach disk %q: invalid state %s", d.Name, d.State.State)
	}
	boot := value(i.BootDiskID) == d.ID
	switch {
	case i.active() && (!now.Hotplug || d.DiskType == typeLocal): // A35: nor can it lose a local one
		return invalidRequest("cannot detach disk: instance is not fully stopped")
	case i.active(), i.RunState == stateCreating, i.RunState == runStopped:
		if boot {
			return conflict("boot disk cannot be detached")
		}
		return nil
	case i.RunState == runFailed && !boot:
		return nil
	}
	return invalidRequest("cannot detach disk from instance in %s state", i.RunState)
}
