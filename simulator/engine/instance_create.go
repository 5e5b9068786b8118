package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// InstanceCreate has the parameters of a new instance.
type InstanceCreate struct {
	Name, Description, Hostname string
	NCPUs                       int
	Memory                      int64
	Boot                        *DiskAttachment
	Disks                       []DiskAttachment
	Interfaces                  []InterfaceCreate
	Start                       bool
	AutoRestartPolicy           *string
	CPUPlatform                 *string
	JumboFrames                 bool
	// Unsupported names a part of the request that this simulator does not support.
	Unsupported string
}

// DiskAttachment is a new or existing disk of a new instance.
type DiskAttachment struct {
	Create *DiskCreate
	Attach string
}

// Create runs the rack's saga: it creates the instance and its disks, attaches the disks, and
// starts the instance. A failure undoes everything (A51).
func (s Instances) Create(call *Call, project store.Selector, c InstanceCreate) (
	none store.Instance, _ error,
) {
	if c.Unsupported != "" {
		return none, lacking(c.Unsupported)
	}
	// The caller's role is checked before the request (A28).
	err := s.store.View(func(tx *store.Tx) error {
		owner, err := s.project(call, tx, project)
		if err != nil {
			return err
		}
		return s.checkCreate(tx, owner, c)
	})
	if err != nil {
		return none, err
	}
	attachments := c.attachments()
	i, owner, err := s.insert(call, project, c, attachments)
	if err != nil {
		return none, err
	}
	err = s.fill(call, owner, i, attachments)
	if err == nil {
		i, err = s.finish(call, i, c)
	}
	call.Object = i.Identity
	if err != nil {
		return none, s.undo(i, attachments, err)
	}
	return i, nil
}

// insert records the instance and the disks that are created for it.
func (s Instances) insert(call *Call, project store.Selector, c InstanceCreate,
	attachments []DiskAttachment,
) (
	i store.Instance, owner store.Project, err error,
) {
	i = store.Instance{
		Identity: store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		NCPUs:    c.NCPUs, Memory: c.Memory, Hostname: c.Hostname,
		AutoRestartEnabled: store.Deref(c.AutoRestartPolicy) != "never",
		AutoRestartPolicy:  c.AutoRestartPolicy, CPUPlatform: c.CPUPlatform,
	}
	i.SetRunState(store.StateCreating)
	created := []string{}
	for _, a := range attachments {
		if a.Create != nil {
			created = append(created, a.Create.ID)
		}
	}
	err = s.store.Update(func(tx *store.Tx) error {
		if owner, err = s.project(call, tx, project); err != nil {
			return err
		}
		i.ProjectID = owner.ID
		if store.Instances.Taken(tx, owner.ID, i.Name) {
			return alreadyExists("instance", i.Name)
		}
		nics, err := newInterfaces(tx, i, c.Interfaces)
		if err != nil {
			return err
		}
		return tx.InsertInstance(i, nics, created)
	})
	return i, owner, err
}

func (s Instances) fill(call *Call, owner store.Project, i store.Instance,
	attachments []DiskAttachment,
) error {
	if err := s.plane.AddGuest(dataplane.Firmware{InstanceID: i.ID, Name: i.Name}); err != nil {
		return err
	}
	for _, a := range attachments {
		id, err := s.attachmentDisk(call, owner, a)
		if err != nil {
			return err
		}
		s.creating.wait(id) // A32
		unlock := s.locks.Lock(i.ID, id)
		_, err = s.Attachments.attach(call, i.ID, id)
		unlock()
		if err != nil {
			return err
		}
	}
	if call.Unwind {
		return errInternal
	}
	return nil
}

// attachmentDisk creates or finds the disk and returns its ID.
func (s Instances) attachmentDisk(call *Call, owner store.Project, a DiskAttachment) (string,
	error) {
	if a.Create != nil {
		d, err := s.Disks.create(call, owner, *a.Create)
		return d.ID, err
	}
	var d store.Disk
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		d, err = find(tx, store.Disks, owner.ID, store.Selector{Name: a.Attach})
		return err
	})
	return d.ID, err
}

// finish sets the instance to stopped, and starts it if requested. If the start fails, the
// instance exists all the same, and is stopped (A58).
func (s Instances) finish(call *Call, made store.Instance, c InstanceCreate) (store.Instance,
	error) {
	defer s.locks.Lock(made.ID)()
	i := made
	i.SetRunState(store.RunStopped)
	if c.Start {
		i.SetRunState(store.RunStarting)
	}
	err := s.store.Update(func(tx *store.Tx) error {
		if c.Boot != nil {
			sel := store.Selector{Name: c.Boot.Attach}
			if c.Boot.Create != nil {
				sel = store.Selector{ID: c.Boot.Create.ID}
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
	if !c.Start {
		return i, nil
	}
	if err := s.plugAll(call, i); err != nil {
		s.log.Error("an instance that was created could not be started",
			slog.String("instance", i.ID), slog.String("error", err.Error()))
		i.SetRunState(store.RunStopped)
		if err := errors.Join(s.unplugAll(i), s.putInstance(i)); err != nil {
			s.log.Error("an instance cannot change its state", slog.String("instance", i.ID),
				slog.String("error", err.Error()))
		}
		return i, nil
	}
	s.settleLater(i)
	return i, nil
}

func (s Instances) putInstance(i store.Instance) error {
	return s.store.Update(func(tx *store.Tx) error { return store.Instances.Put(tx, i) })
}

// undo removes a partly created instance.
func (s Instances) undo(i store.Instance, attachments []DiskAttachment, cause error) error {
	defer s.locks.Lock(i.ID)()
	err := s.store.Update(func(tx *store.Tx) error { return tx.UnwindInstance(i.ID) })
	for _, a := range attachments {
		if err == nil && a.Create != nil {
			err = s.plane.RemoveDisk(a.Create.ID)
		}
	}
	if err == nil {
		err = s.plane.RemoveGuest(i.ID)
	}
	if err != nil {
		return fmt.Errorf("%w; and undoing the instance: %w", cause, err)
	}
	return cause
}

// attachments returns the disks of the new instance, its boot disk first.
func (c InstanceCreate) attachments() []DiskAttachment {
	if c.Boot == nil {
		return c.Disks
	}
	return append([]DiskAttachment{*c.Boot}, c.Disks...)
}

// checkSize checks the rack's limits for an instance (A50).
func checkSize(ncpus int, memory int64) error {
	const maxCPUs, maxMemory = 254, 1536 * gibibyte
	switch {
	case ncpus > maxCPUs:
		return invalidRequest("cannot have more than %d vCPUs per instance", maxCPUs)
	case memory < gibibyte:
		return invalidValue("size", "memory must be at least 1 GiB")
	case memory%gibibyte != 0:
		return invalidValue("size", "memory must be divisible by 1 GiB")
	case memory > maxMemory:
		return invalidValue("size", "memory must be less than or equal to 1536 GiB")
	case ncpus == 0:
		return lacking("ncpus of 0")
	}
	return nil
}

// checkCreate makes the checks that the rack makes before that of the name, in the rack's order
// (A66).
func (s Instances) checkCreate(tx *store.Tx, owner store.Project, c InstanceCreate) error {
	if err := checkSize(c.NCPUs, c.Memory); err != nil {
		return err
	}
	attachments := c.attachments()
	if limit := s.switches.get().DiskLimit; len(attachments) > limit {
		return invalidRequest("cannot attach more than %d disks to instance", limit)
	}
	for _, a := range attachments {
		if a.Create == nil {
			continue
		}
		if _, err := s.Disks.describe(tx, owner, *a.Create, &store.Disk{}); err != nil {
			return err
		}
	}
	if c.JumboFrames {
		return invalidRequest("enable_jumbo_frames may only be set on an instance when the " +
			"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator")
	}
	return interfacesProblem(c.Interfaces)
}

// lacking is an error that no rack returns: it names a part of an instance that this simulator
// does not support.
func lacking(part string) error {
	return &Error{Status: http.StatusNotImplemented, Message: fmt.Sprintf(
		"the simulator does not have an instance's %s, which the rack has", part)}
}
