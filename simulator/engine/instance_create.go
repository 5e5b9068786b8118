package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"

	"github.com/google/uuid"

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
	ExternalIPs                 []ExternalIPCreate
	// SSHKeys are the user's keys for the guest; nil means all of them.
	SSHKeys *[]store.Selector
	// Groups are the anti-affinity groups.
	Groups            []store.Selector
	Start             bool
	AutoRestartPolicy *string
	CPUPlatform       *string
	JumboFrames       bool
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
	none store.Instance, _ error) {
	if c.Unsupported != "" {
		return none, lacking(c.Unsupported)
	}
	// The caller's role is checked before the request (A28).
	err := s.store.View(func(tx *store.Tx) {
		s.checkCreate(tx, s.project(call, tx, project), c)
	})
	if err != nil {
		return none, err
	}
	i, owner, err := s.insert(call, project, c)
	if err != nil {
		return none, err
	}
	i, err = s.complete(call, owner, i, c)
	call.Object = i.Identity
	if err != nil {
		return none, err
	}
	return i, nil
}

// complete does everything that follows the record of a new instance, or undoes the creation.
func (s Instances) complete(call *Call, owner store.Project, i store.Instance, c InstanceCreate) (
	store.Instance, error) {
	err := s.fill(call, owner, i, c.attachments())
	if err == nil {
		i, err = s.finish(call, i, c)
	}
	if err != nil {
		return i, s.undo(i, c.attachments(), err)
	}
	return i, nil
}

// resume completes a creation that was open when the last simulator ended, or undoes it (A19).
func (s Instances) resume(i store.Instance) error {
	var c InstanceCreate
	var owner store.Project
	err := s.store.View(func(tx *store.Tx) {
		owner, _ = store.Projects.Get(tx, i.ProjectID)
		tx.SagaRequest(i.ID, &c)
	})
	if err != nil {
		return s.undo(i, nil, err)
	}
	_, err = s.complete(&Call{Resumed: true}, owner, i, c)
	return err
}

// insert records the instance and the request that creates it.
func (s Instances) insert(call *Call, project store.Selector, c InstanceCreate) (
	i store.Instance, owner store.Project, err error) {
	i = store.Instance{
		Identity: store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		NCPUs:    c.NCPUs, Memory: c.Memory, Hostname: c.Hostname,
		AutoRestartEnabled: store.Deref(c.AutoRestartPolicy) != "never",
		AutoRestartPolicy:  c.AutoRestartPolicy, CPUPlatform: c.CPUPlatform,
	}
	i.SetRunState(store.StateCreating)
	err = s.store.Update(func(tx *store.Tx) {
		owner = s.project(call, tx, project)
		i.ProjectID = owner.ID
		tx.Check(checkDescription(i.Description))
		tx.Refuse(store.Instances.Taken(tx, owner.ID, i.Name), alreadyExists("instance", i.Name))
		nics := newInterfaces(tx, i, c.Interfaces)
		tx.InsertInstance(i, nics)
		tx.OpenSaga(i.ID, c)
		keys, groups := linksOf(tx, owner.ID, c)
		for _, id := range keys {
			tx.Link(SSHKey.Name, i.ID, id)
		}
		for _, id := range groups {
			tx.Link(AntiAffinityGroup.Name, i.ID, id)
		}
		s.attachNAT(tx, i, nics)
		s.attachExternalIPs(tx, i, c.ExternalIPs)
	})
	return i, owner, err
}

func (s Instances) fill(call *Call, owner store.Project, i store.Instance,
	attachments []DiskAttachment) error {
	if err := s.plane.AddGuest(firmwareOf(i)); err != nil {
		return err
	}
	for _, a := range attachments {
		id, err := s.attachmentDisk(call, owner, a)
		if err != nil {
			return err
		}
		s.creating.Lock(id)() // A32
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

// selector names the disk of an attachment. A disk that is to be created has an ID already.
func (a DiskAttachment) selector() store.Selector {
	if a.Create != nil {
		return store.Selector{ID: a.Create.ID}
	}
	return store.Selector{Name: a.Attach}
}

// attachmentDisk creates or finds the disk and returns its ID. It also finds a disk that an earlier
// simulator has created.
func (s Instances) attachmentDisk(call *Call, owner store.Project, a DiskAttachment) (string,
	error) {
	d, err := reading(s.Simulation, func(tx *store.Tx) store.Disk {
		return find(tx, store.Disks, owner.ID, a.selector())
	})
	if a.Create != nil && err != nil {
		d, err = s.Disks.create(call, owner, *a.Create)
	}
	return d.ID, err
}

// finish sets the instance to stopped, and starts it if requested. An instance whose start fails
// still exists, and is stopped (A58).
func (s Instances) finish(call *Call, made store.Instance, c InstanceCreate) (store.Instance,
	error) {
	defer s.locks.Lock(made.ID)()
	i := made
	i.SetRunState(store.RunStopped)
	if c.Start {
		i.SetRunState(store.RunStarting)
	}
	err := s.store.Update(func(tx *store.Tx) {
		if c.Boot != nil {
			i.BootDiskID = bootDisk(tx, i, c.Boot.selector())
		}
		tx.CloseSaga(i.ID)
		store.Instances.Put(tx, i)
	})
	if err != nil {
		return made, err
	}
	if !c.Start {
		return i, nil
	}
	if err := s.run(call, i); err != nil {
		s.log.Error("an instance that was created could not be started",
			slog.String("instance", i.ID), slog.String("error", err.Error()))
		i.SetRunState(store.RunStopped)
		s.unchanged(i, errors.Join(s.unplugAll(i), s.putInstance(i)))
		return i, nil
	}
	s.settleLater(i)
	return i, nil
}

func (s Instances) putInstance(i store.Instance) error {
	return s.store.Update(func(tx *store.Tx) { store.Instances.Put(tx, i) })
}

func (s Instances) undo(i store.Instance, attachments []DiskAttachment, cause error) error {
	defer s.locks.Lock(i.ID)()
	var made []string
	for _, a := range attachments {
		if a.Create != nil {
			made = append(made, a.Create.ID)
		}
	}
	err := s.store.Update(func(tx *store.Tx) {
		s.releaseAddresses(tx, i.ID)
		tx.UndoInstance(i, made)
	})
	for _, id := range made {
		if err == nil {
			err = s.plane.RemoveDisk(id)
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

// checkCreate makes the checks that precede the check of the name, in the rack's order (A66).
func (s Instances) checkCreate(tx *store.Tx, owner store.Project, c InstanceCreate) {
	tx.Check(checkSize(c.NCPUs, c.Memory))
	attachments := c.attachments()
	if limit := s.switches.get().DiskLimit; len(attachments) > limit {
		tx.Check(invalidRequest("cannot attach more than %d disks to instance", limit))
	}
	for _, a := range attachments {
		if a.Create != nil {
			s.Disks.describe(tx, owner, *a.Create, &store.Disk{})
		}
	}
	tx.Refuse(len(c.ExternalIPs) > maxExternalIPs, externalIPsProblem(c.ExternalIPs))
	tx.Refuse(c.JumboFrames, invalidRequest("enable_jumbo_frames may only be set on an instance "+
		"when the fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"))
	tx.Check(externalIPsProblem(c.ExternalIPs))
	tx.Check(interfacesProblem(c.Interfaces))
	linksOf(tx, owner.ID, c)
}

// linksOf returns the IDs of the SSH keys and of the groups of a new instance.
func linksOf(tx *store.Tx, projectID string, c InstanceCreate) (keys, groups []string) {
	const maxKeys = 100
	if c.SSHKeys == nil {
		for _, key := range within(tx, SSHKey, userID) {
			keys = append(keys, key.ID)
		}
	} else if keys = idsOf(tx, SSHKey, userID, *c.SSHKeys); len(keys) > maxKeys {
		tx.Check(invalidRequest("cannot attach more than %d ssh keys to the instance", maxKeys))
	}
	return keys, idsOf(tx, AntiAffinityGroup, projectID, c.Groups)
}

// idsOf returns the IDs of records that must be in a parent, each once.
func idsOf(tx *store.Tx, k *Kind, parent string, wanted []store.Selector) (ids []string) {
	for _, sel := range wanted {
		r := find(tx, k.Table(), parent, sel)
		tx.Refuse(k.Table().Parent(r) != parent, notFound(k.Name, sel))
		if !slices.Contains(ids, r.ID) {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

// lacking returns an error that no rack returns, for a part of an instance that this simulator does
// not support.
func lacking(part string) error {
	return &Error{Status: http.StatusNotImplemented, Message: fmt.Sprintf(
		"the simulator does not have an instance's %s, which the rack has", part)}
}
