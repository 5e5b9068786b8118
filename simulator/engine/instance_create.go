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
	err := s.store.View(func(tx *store.Tx) (err error) {
		owner, _, err = store.Projects.Get(tx, i.ProjectID)
		return errors.Join(err, tx.SagaRequest(i.ID, &c))
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
	err = s.store.Update(func(tx *store.Tx) error {
		if owner, err = s.project(call, tx, project); err != nil {
			return err
		}
		i.ProjectID = owner.ID
		if err := checkDescription(i.Description); err != nil {
			return err
		}
		if store.Instances.Taken(tx, owner.ID, i.Name) {
			return alreadyExists("instance", i.Name)
		}
		nics, err := newInterfaces(tx, i, c.Interfaces)
		if err != nil {
			return err
		}
		return errors.Join(tx.InsertInstance(i, nics), tx.OpenSaga(i.ID, c), s.link(tx, i, c),
			s.attachNAT(tx, i, nics), s.attachExternalIPs(tx, i, c.ExternalIPs))
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

// attachmentDisk creates or finds the disk and returns its ID. It also finds a disk that an earlier
// simulator has created.
func (s Instances) attachmentDisk(call *Call, owner store.Project, a DiskAttachment) (string,
	error) {
	sel := store.Selector{Name: a.Attach}
	if a.Create != nil {
		sel = store.Selector{ID: a.Create.ID}
	}
	var d store.Disk
	err := s.store.View(func(tx *store.Tx) (err error) {
		d, err = find(tx, store.Disks, owner.ID, sel)
		return err
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
		return errors.Join(tx.CloseSaga(i.ID), store.Instances.Put(tx, i))
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
	return s.store.Update(func(tx *store.Tx) error { return store.Instances.Put(tx, i) })
}

func (s Instances) undo(i store.Instance, attachments []DiskAttachment, cause error) error {
	defer s.locks.Lock(i.ID)()
	var made []string
	for _, a := range attachments {
		if a.Create != nil {
			made = append(made, a.Create.ID)
		}
	}
	err := s.store.Update(func(tx *store.Tx) error {
		return errors.Join(s.releaseAddresses(tx, i.ID), tx.UndoInstance(i, made))
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
		if err := s.Disks.describe(tx, owner, *a.Create, &store.Disk{}); err != nil {
			return err
		}
	}
	if len(c.ExternalIPs) > maxExternalIPs {
		return externalIPsProblem(c.ExternalIPs)
	}
	if c.JumboFrames {
		return invalidRequest("enable_jumbo_frames may only be set on an instance when the " +
			"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator")
	}
	if err := externalIPsProblem(c.ExternalIPs); err != nil {
		return err
	}
	if err := interfacesProblem(c.Interfaces); err != nil {
		return err
	}
	_, _, err := linksOf(tx, owner.ID, c)
	return err
}

func linksOf(tx *store.Tx, projectID string, c InstanceCreate) (keys, groups []string, err error) {
	if c.SSHKeys == nil {
		all, err := SSHKey.Table().Scan(tx, userID, store.ByName, nil, noLimit)
		if err != nil {
			return nil, nil, err
		}
		for _, key := range all {
			keys = append(keys, key.ID)
		}
	} else if keys, err = idsOf(tx, SSHKey, userID, *c.SSHKeys); err != nil {
		return nil, nil, err
	}
	const maxKeys = 100
	if c.SSHKeys != nil && len(keys) > maxKeys {
		return nil, nil, invalidRequest("cannot attach more than %d ssh keys to the instance", maxKeys)
	}
	groups, err = idsOf(tx, AntiAffinityGroup, projectID, c.Groups)
	return keys, groups, err
}

// idsOf returns the IDs of records that must be in a parent, each once.
func idsOf(tx *store.Tx, k *Kind, parent string, wanted []store.Selector) (ids []string,
	err error) {
	for _, sel := range wanted {
		r, err := find(tx, k.Table(), parent, sel)
		if err == nil && k.Table().Parent(r) != parent {
			err = notFound(k.Name, sel)
		}
		if err != nil {
			return nil, err
		}
		if !slices.Contains(ids, r.ID) {
			ids = append(ids, r.ID)
		}
	}
	return ids, nil
}

func (s Instances) link(tx *store.Tx, i store.Instance, c InstanceCreate) error {
	keys, groups, err := linksOf(tx, i.ProjectID, c)
	for _, id := range keys {
		err = errors.Join(err, tx.Link(SSHKey.Name, i.ID, id))
	}
	for _, id := range groups {
		err = errors.Join(err, tx.Link(AntiAffinityGroup.Name, i.ID, id))
	}
	return err
}

// lacking returns an error that no rack returns, for a part of an instance that this simulator does
// not support.
func lacking(part string) error {
	return &Error{Status: http.StatusNotImplemented, Message: fmt.Sprintf(
		"the simulator does not have an instance's %s, which the rack has", part)}
}
