package simulator

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"

	"github.com/google/uuid"
)

// instanceCreate is the rack's saga: the instance, its disks, their attachment, and the start; what
// fails takes everything back (A51).
func (s *Server) instanceCreate(r *request) (int, any, error) {
	c := r.body.(instanceCreate)
	if c.unsupported != "" {
		return 0, nil, lacking(c.unsupported)
	}
	// Who may not do this is told so before what is wrong with it (A28).
	err := s.store.View(func(tx *store.Tx) error {
		owner, err := s.queryProject(r, tx)
		if err != nil {
			return err
		}
		return s.instanceProblem(tx, owner, c)
	})
	if err != nil {
		return 0, nil, err
	}
	attachments := c.attachments()
	i, owner, err := s.insertInstance(r, c, attachments)
	if err != nil {
		return 0, nil, err
	}
	err = s.fillInstance(r, owner, i, attachments)
	if err == nil {
		i, err = s.finishInstance(r, i, c)
	}
	r.about(i.Identity)
	if err != nil {
		return 0, nil, s.unmakeInstance(i, attachments, err)
	}
	return http.StatusCreated, i, nil
}

// insertInstance records the instance, and what is being made for it.
func (s *Server) insertInstance(r *request, c instanceCreate, attachments []diskAttachment) (
	i store.Instance, owner store.Project, err error,
) {
	i = store.Instance{
		Identity: store.NewIdentity(uuid.NewString(), c.name, c.description),
		NCPUs:    c.ncpus, Memory: c.memory, Hostname: c.hostname,
		AutoRestartEnabled: store.Deref(c.autoRestartPolicy) != "never",
		AutoRestartPolicy:  c.autoRestartPolicy, CPUPlatform: c.cpuPlatform,
	}
	i.Become(store.StateCreating)
	created := []string{}
	for _, a := range attachments {
		if a.create != nil {
			created = append(created, a.create.id)
		}
	}
	err = s.store.Update(func(tx *store.Tx) error {
		if owner, err = s.queryProject(r, tx); err != nil {
			return err
		}
		i.ProjectID = owner.ID
		if store.Instances.Taken(tx, owner.ID, i.Name) {
			return alreadyExists("instance", i.Name)
		}
		nics, err := newInterfaces(tx, i, c.interfaces)
		if err != nil {
			return err
		}
		return tx.InsertInstance(i, nics, created)
	})
	return i, owner, err
}

func (s *Server) fillInstance(r *request, owner store.Project, i store.Instance,
	attachments []diskAttachment,
) error {
	if err := s.plane.AddGuest(dataplane.Guest{InstanceID: i.ID, Name: i.Name}); err != nil {
		return err
	}
	for _, a := range attachments {
		id, err := s.attachmentDisk(r, owner, a)
		if err != nil {
			return err
		}
		s.creating.wait(id) // A32
		unlock := s.locks.Lock(i.ID, id)
		_, err = s.attach(r, i.ID, id)
		unlock()
		if err != nil {
			return err
		}
	}
	if r.unwinds() {
		return errInternal
	}
	return nil
}

// attachmentDisk makes or finds the disk, and returns its ID.
func (s *Server) attachmentDisk(r *request, owner store.Project, a diskAttachment) (string, error) {
	if a.create != nil {
		d, err := s.createDisk(r, owner, *a.create)
		return d.ID, err
	}
	var d store.Disk
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		d, err = find(tx, store.Disks, owner.ID, store.Selector{Name: a.attach})
		return err
	})
	return d.ID, err
}

// finishInstance makes the instance a stopped one and, where wanted, starts it. A start that fails
// leaves it stopped, and created all the same (A58).
func (s *Server) finishInstance(r *request, made store.Instance, c instanceCreate) (store.Instance, error) {
	defer s.locks.Lock(made.ID)()
	i := made
	i.Become(store.RunStopped)
	if c.start {
		i.Become(store.RunStarting)
	}
	err := s.store.Update(func(tx *store.Tx) error {
		if c.boot != nil {
			sel := store.Selector{Name: c.boot.attach}
			if c.boot.create != nil {
				sel = store.Selector{ID: c.boot.create.id}
			}
			boot, err := bootDisk(tx, i, sel)
			if err != nil {
				return err
			}
			i.BootDiskID = boot
		}
		return tx.FinishInstance(i)
	})
	if err != nil {
		return made, err
	}
	if !c.start {
		return i, nil
	}
	if err := s.plugAll(r, i); err != nil {
		s.log.Error("an instance that was created could not be started",
			slog.String("instance", i.ID), slog.String("error", err.Error()))
		i.Become(store.RunStopped)
		if err := errors.Join(s.unplugAll(i), s.putInstance(i)); err != nil {
			s.log.Error("an instance is stuck", slog.String("instance", i.ID),
				slog.String("error", err.Error()))
		}
		return i, nil
	}
	s.settleLater(i)
	return i, nil
}

func (s *Server) putInstance(i store.Instance) error {
	return s.store.Update(func(tx *store.Tx) error { return store.Instances.Put(tx, i) })
}

// unmakeInstance takes a half-made instance back.
func (s *Server) unmakeInstance(i store.Instance, attachments []diskAttachment, cause error) error {
	defer s.locks.Lock(i.ID)()
	err := s.store.Update(func(tx *store.Tx) error { return tx.UnwindInstance(i.ID) })
	for _, a := range attachments {
		if err == nil && a.create != nil {
			err = s.plane.RemoveDisk(a.create.id)
		}
	}
	if err == nil {
		err = s.plane.RemoveGuest(i.ID)
	}
	if err != nil {
		return fmt.Errorf("%w; and taking the instance back: %w", cause, err)
	}
	return cause
}
