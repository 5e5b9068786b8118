package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

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
	err := s.store.view(func(tx *tx) error {
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
	r.about(i.identity)
	if err != nil {
		return 0, nil, s.unmakeInstance(i, attachments, err)
	}
	return http.StatusCreated, i, nil
}

// insertInstance records the instance, and what is being made for it.
func (s *Server) insertInstance(r *request, c instanceCreate, attachments []diskAttachment) (
	i instance, owner project, err error,
) {
	i = instance{
		identity: newIdentity(uuid.NewString(), c.name, c.description),
		NCPUs:    c.ncpus, Memory: c.memory, Hostname: c.hostname,
		AutoRestartEnabled: value(c.autoRestartPolicy) != "never",
		AutoRestartPolicy:  c.autoRestartPolicy, CPUPlatform: c.cpuPlatform,
	}
	i.become(stateCreating)
	created := []string{}
	for _, a := range attachments {
		if a.create != nil {
			created = append(created, a.create.id)
		}
	}
	err = s.store.update(func(tx *tx) error {
		if owner, err = s.queryProject(r, tx); err != nil {
			return err
		}
		i.ProjectID = owner.ID
		if instances.taken(tx, owner.ID, i.Name) {
			return alreadyExists("instance", i.Name)
		}
		return tx.insertInstance(i, c.interfaces, created)
	})
	return i, owner, err
}

// insertInstance writes the record; made are the disks that go if the instance cannot be created.
func (tx *tx) insertInstance(i instance, interfaces []interfaceCreate, made []string) error {
	if err := tx.putInterfaces(i, interfaces); err != nil {
		return err
	}
	if made != nil {
		data, err := json.Marshal(made)
		if err != nil {
			return err
		}
		if err := tx.Bucket(bucketSagas).Put([]byte(i.ID), data); err != nil {
			return err
		}
	}
	return instances.put(tx, i)
}

func (s *Server) fillInstance(r *request, owner project, i instance,
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
func (s *Server) attachmentDisk(r *request, owner project, a diskAttachment) (string, error) {
	if a.create != nil {
		d, err := s.createDisk(r, owner, *a.create)
		return d.ID, err
	}
	var d disk
	err := s.store.view(func(tx *tx) error {
		var err error
		d, err = find(tx, disks, owner.ID, selector{name: a.attach})
		return err
	})
	return d.ID, err
}

// finishInstance makes the instance a stopped one and, where wanted, starts it. A start that fails
// leaves it stopped, and created all the same (A58).
func (s *Server) finishInstance(r *request, made instance, c instanceCreate) (instance, error) {
	defer s.locks.Lock(made.ID)()
	i := made
	i.become(runStopped)
	if c.start {
		i.become(runStarting)
	}
	err := s.store.update(func(tx *tx) error {
		if c.boot != nil {
			sel := selector{name: c.boot.attach}
			if c.boot.create != nil {
				sel = selector{id: c.boot.create.id}
			}
			boot, err := tx.bootDisk(i, sel)
			if err != nil {
				return err
			}
			i.BootDiskID = boot
		}
		return errors.Join(tx.Bucket(bucketSagas).Delete([]byte(i.ID)), instances.put(tx, i))
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
		i.become(runStopped)
		if err := errors.Join(s.unplugAll(i), s.putInstance(i)); err != nil {
			s.log.Error("an instance is stuck", slog.String("instance", i.ID),
				slog.String("error", err.Error()))
		}
		return i, nil
	}
	s.settleLater(i)
	return i, nil
}

func (s *Server) putInstance(i instance) error {
	return s.store.update(func(tx *tx) error { return instances.put(tx, i) })
}

// unmakeInstance takes a half-made instance back.
func (s *Server) unmakeInstance(i instance, attachments []diskAttachment, cause error) error {
	defer s.locks.Lock(i.ID)()
	err := s.store.update(func(tx *tx) error { return tx.unwindInstance(i.ID) })
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

// unwindInstance removes an instance that is being created, with the disks created for it.
func (tx *tx) unwindInstance(id string) error {
	var made []string
	if err := json.Unmarshal(tx.Bucket(bucketSagas).Get([]byte(id)), &made); err != nil {
		return fmt.Errorf("read what was made for instance %s: %w", id, err)
	}
	i, err := find(tx, instances, "", selector{id: id})
	if err != nil {
		return err
	}
	if err := tx.deleteInstance(i); err != nil {
		return err
	}
	for _, diskID := range made {
		d, ok, err := disks.get(tx, diskID)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if err := errors.Join(disks.delete(tx, d), tx.addStorage(-d.Size)); err != nil {
			return err
		}
	}
	return nil
}
