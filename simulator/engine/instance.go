package engine

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Instances has the operations on instances.
type Instances struct{ *Simulation }

// change locks an instance and edits its record. If the record has changed, it calls work().
func (s Instances) change(call *Call, change func(*store.Tx, *store.Instance),
	work func(before, after store.Instance) error) (store.Instance, error) {
	before, err := view(s.Simulation, call, store.Instances)
	if err != nil {
		return before, err
	}
	var after store.Instance
	defer s.locks.Lock(before.ID)()
	err = s.store.Update(func(tx *store.Tx) {
		before = byID(tx, store.Instances, before.ID)
		after = before
		if change(tx, &after); after != before {
			store.Instances.Put(tx, after)
		}
	})
	if err != nil || after == before {
		return after, err
	}
	if err := work(before, after); err != nil {
		return before, errors.Join(err, s.putInstance(before))
	}
	return after, nil
}

// errStillCreating is the refusal to stop or reboot an instance that is being created (A53).
var errStillCreating = invalidRequest(
	"cannot change instance state while it is still being created")

// Start starts a stopped or failed instance. It does not change a running or starting one (A45).
func (s Instances) Start(call *Call) (store.Instance, error) {
	return s.change(call, func(tx *store.Tx, i *store.Instance) {
		tx.Refuse(i.RunState == store.RunStopping,
			conflict("instance must finish stopping before it can be started"))
		tx.Refuse(i.RunState == store.StateCreating, // A53
			conflict("instance is in state creating but it must be stopped to be started"))
		if i.RunState == store.RunStopped || i.RunState == store.RunFailed {
			i.SetRunState(store.RunStarting)
		}
	}, func(_, i store.Instance) error {
		if err := s.run(call, i); err != nil {
			return errors.Join(err, s.unplugAll(i))
		}
		s.settleLater(i)
		return nil
	})
}

// Stop halts the guest at once. The instance becomes stopped after the InstanceDelay (A46).
func (s Instances) Stop(call *Call) (store.Instance, error) {
	return s.change(call, func(tx *store.Tx, i *store.Instance) {
		switch i.RunState {
		case store.RunStarting, store.RunRunning, store.RunRebooting:
			i.SetRunState(store.RunStopping)
		case store.RunFailed:
			i.SetRunState(store.RunStopped)
		case store.StateCreating:
			tx.Check(errStillCreating)
		}
	}, func(before, i store.Instance) error {
		if !before.Active() {
			return nil
		}
		if err := s.halt(i); err != nil {
			return err
		}
		s.settleLater(i)
		return nil
	})
}

// Reboot resets the virtual machine. Without one, it removes the devices of the guest view and adds
// them with other numbers (A47). On an error the instance becomes failed; the call succeeds (A60).
func (s Instances) Reboot(call *Call) (store.Instance, error) {
	return s.change(call, func(tx *store.Tx, i *store.Instance) {
		switch i.RunState {
		case store.RunRunning, store.RunRebooting:
			i.SetRunState(store.RunRebooting)
		case store.RunStarting:
			tx.Check(invalidRequest("Forbidden")) // the sled's error, which Nexus passes on
		case store.StateCreating:
			tx.Check(errStillCreating)
		case store.RunStopping:
			tx.Check(invalidRequest("cannot reboot an instance in state %s", i.RunState))
		case store.RunFailed:
			tx.Check(invalidRequest("instance state cannot be changed from %s", i.RunState))
		default:
			tx.Check(invalidRequest("cannot reboot an instance in state %s with no VMM", i.RunState))
		}
	}, func(_, i store.Instance) error {
		machine, err := s.plane.VMs.Reset(i.ID)
		if err == nil && !machine {
			err = s.unplugAll(i)
			if err == nil {
				err = s.plugAll(call, i)
			}
		}
		if err != nil {
			s.failInstance(i, err)
			return nil
		}
		s.settleLater(i)
		return nil
	})
}

// failInstance halts i and makes it failed, so it can be started again. The caller has locked i.
func (s Instances) failInstance(i store.Instance, cause error) {
	s.logFailure("an instance has failed", "instance", i.ID, cause)
	i.SetRunState(store.RunFailed)
	s.unchanged(i, errors.Join(s.halt(i), s.putInstance(i)))
}

func (s Instances) unchanged(i store.Instance, err error) {
	if err != nil {
		s.log.Error("an instance cannot change its state", slog.String("instance", i.ID),
			slog.String("state", i.RunState), slog.String("error", err.Error()))
	}
}

func (s Instances) halt(i store.Instance) error {
	if err := s.plane.VMs.Halt(i.ID); err != nil {
		return err
	}
	return s.unplugAll(i)
}

// settleLater completes an instance's start, stop or reboot after the InstanceDelay. If the rack
// closes first, the rack's next start completes it.
func (s Instances) settleLater(i store.Instance) {
	delay := time.Duration(s.Switches().InstanceDelay)
	s.background(func() {
		if !s.Pause(s.ctx, delay) {
			return
		}
		s.unchanged(i, s.store.Update(func(tx *store.Tx) {
			now, ok := store.Instances.Get(tx, i.ID)
			if !ok || !now.TimeRunStateUpdated.Equal(i.TimeRunStateUpdated.Time) {
				return // another transition has begun
			}
			now.SetRunState(settled[now.RunState])
			store.Instances.Put(tx, now)
		}))
	})
}

func (s Instances) run(call *Call, i store.Instance) error {
	if err := s.plugAll(call, i); err != nil {
		return err
	}
	f := firmwareOf(i)
	err := s.store.View(func(tx *store.Tx) {
		for _, key := range linkedTo(tx, SSHKey.Table(), SSHKey, i.ID) {
			if line, is := key.Fields["public_key"].(string); is {
				f.Keys = append(f.Keys, line)
			}
		}
	})
	if err != nil {
		return err
	}
	err = s.plane.VMs.Run(f)
	if errors.Is(err, dataplane.ErrNoMemory) {
		s.log.Warn("an instance is not started", slog.String("instance", i.ID),
			slog.String("error", err.Error()))
		return insufficientCapacity("No sleds can fit the requested instance")
	}
	return err
}

// ErrNoConsole means that this rack's instances have no serial consoles.
var ErrNoConsole = errors.New("the instances of this rack are not virtual machines")

// Console reads an instance's serial console, as [dataplane.VMs.Console] does.
func (s Instances) Console(call *Call, from, most int64) (text []byte, end int64, err error) {
	i, err := view(s.Simulation, call, store.Instances)
	switch {
	case err != nil:
		return nil, 0, err
	case s.plane.VMs.SSHKey() == "":
		return nil, 0, ErrNoConsole
	case i.RunState == store.RunRunning || i.RunState == store.RunRebooting:
		return s.plane.VMs.Console(i.ID, from, most)
	case i.Active():
		return nil, 0, invalidRequest("cannot connect to serial console of instance in state \"%s\"",
			i.RunState)
	}
	return nil, 0, invalidRequest("instance is %s and has no active serial console server", i.RunState)
}

func firmwareOf(i store.Instance) dataplane.Firmware {
	return dataplane.Firmware{InstanceID: i.ID, Name: cmp.Or(i.Hostname, i.Name),
		MemoryBytes: i.Memory}
}

// ended records that the virtual machine of an instance has ended by itself.
func (s Instances) ended(id string, poweredOff bool) {
	defer s.locks.Lock(id)()
	i, err := Reading(s.Simulation, func(tx *store.Tx) store.Instance {
		return byID(tx, store.Instances, id)
	})
	_, again := s.plane.VMs.SSH()[id]
	switch {
	case err != nil || !i.HasGuest() || again:
		return // it was deleted, stopped or started again meanwhile
	case !poweredOff:
		s.failInstance(i, errors.New("its machine has ended"))
		return
	}
	i.SetRunState(store.RunStopped)
	s.unchanged(i, errors.Join(s.unplugAll(i), s.putInstance(i)))
}

func (s Instances) plugAll(call *Call, i store.Instance) error {
	return s.eachDisk("start", i, func(d store.Disk) error {
		return s.plane.Plug(deviceOf(d, i.ID), call.deviceFault(s.Switches().DeviceDelay))
	})
}

func (s Instances) unplugAll(i store.Instance) error {
	return s.eachDisk("stop", i, func(d store.Disk) error { return s.plane.Unplug(i.ID, d.ID) })
}

// eachDisk calls do() for each disk of an instance, while it holds the lock of the disk.
func (s Instances) eachDisk(what string, i store.Instance, do func(store.Disk) error) error {
	attached, err := Reading(s.Simulation, func(tx *store.Tx) []store.Disk {
		return tx.DisksOf(i.ID)
	})
	for _, d := range attached {
		unlock := s.locks.Lock(d.ID)
		err = do(d)
		unlock()
		if err != nil {
			return fmt.Errorf("%s with disk %s: %w", what, d.Name, err)
		}
	}
	return err
}

// Delete deletes a stopped or failed instance; its disks become detached (A48).
func (s Instances) Delete(call *Call) error {
	return remove(s.Simulation, call, store.Instances,
		func(tx *store.Tx, i store.Instance) {
			tx.Refuse(i.Active(),
				invalidRequest("cannot delete instance: instance is running or has not yet fully stopped"))
			tx.Refuse(i.RunState != store.RunStopped && i.RunState != store.RunFailed,
				invalidRequest("instance cannot be deleted in state %q", i.RunState))
			s.releaseAddresses(tx, i.ID)
			tx.DeleteInstance(i)
		}, func(i store.Instance) error { return s.plane.RemoveGuest(i.ID) })
}

// InstanceUpdate has the new values of an instance.
type InstanceUpdate struct {
	NCPUs                          int
	Memory                         int64
	BootDisk                       store.Selector
	AutoRestartPolicy, CPUPlatform *string
	JumboFrames                    bool
	// Unsupported names a part of the request that the simulator lacks; if set, the request fails.
	Unsupported string
}

// RestartPolicies and CPUPlatforms are the values that the rack allows.
var (
	RestartPolicies = []string{"never", "best_effort"}
	CPUPlatforms    = []string{"amd_milan", "amd_turin", "amd_turin_v2"}
)

// Update sets every value in an [InstanceUpdate]. The instance must be stopped if the boot disk,
// the CPUs, the memory or the CPU platform changes. An update does not change time_modified (A49).
func (s Instances) Update(call *Call) (store.Instance, error) {
	u := call.Body.(InstanceUpdate)
	if u.Unsupported != "" {
		return store.Instance{}, lacking(u.Unsupported)
	}
	return s.change(call, func(tx *store.Tx, i *store.Instance) {
		checkSize(tx, u.NCPUs, u.Memory)
		tx.Refuse(u.JumboFrames, invalidRequest("enable_jumbo_frames may only be set to true when the "+
			"fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"))
		if u.BootDisk.Given() {
			find(tx, store.Disks, i.ProjectID, u.BootDisk)
		}
		resized := u.NCPUs != i.NCPUs || u.Memory != i.Memory ||
			store.Deref(u.CPUPlatform) != store.Deref(i.CPUPlatform)
		tx.Refuse(resized && i.Active(), conflict("instance must be stopped to change CPU or memory"))
		boot := bootDisk(tx, *i, u.BootDisk)
		tx.Refuse(store.Deref(boot) != store.Deref(i.BootDiskID) && i.Active(),
			conflict("instance must be stopped to set boot disk"))
		i.NCPUs, i.Memory, i.BootDiskID = u.NCPUs, u.Memory, boot
		i.AutoRestartPolicy, i.CPUPlatform = u.AutoRestartPolicy, u.CPUPlatform
		i.AutoRestartEnabled = store.Deref(u.AutoRestartPolicy) != "never"
	}, func(_, _ store.Instance) error { return nil })
}

// bootDisk finds the new boot disk, which must be attached already.
func bootDisk(tx *store.Tx, i store.Instance, sel store.Selector) *string {
	if !sel.Given() {
		return nil
	}
	d := find(tx, store.Disks, i.ProjectID, sel)
	tx.Refuse(!d.AttachedTo(i.ID), conflict("boot disk must be attached"))
	return &d.ID
}

// InstanceCreate has the parameters of a new instance.
type InstanceCreate struct {
	Name, Description, Hostname string
	NCPUs                       int
	Memory                      int64
	Boot                        *DiskAttachment
	Disks                       []DiskAttachment
	Interfaces                  []InterfaceCreate
	ExternalIPs                 []ExternalIPCreate
	// SSHKeys are the user's keys for the guest; nil means all keys of the user.
	SSHKeys *[]store.Selector
	// Groups are the anti-affinity groups that the instance joins.
	Groups                         []store.Selector
	AutoRestartPolicy, CPUPlatform *string
	Start, JumboFrames             bool
	// Unsupported names a part of the request that the simulator lacks; if set, the request fails.
	Unsupported string
}

// DiskAttachment is a disk of a new instance: a new one, or the existing disk with the name Attach.
type DiskAttachment struct {
	Create *DiskCreate
	Attach string
}

// Create runs the rack's saga for an [InstanceCreate]: it creates an instance and disks, attaches
// the disks, and starts the instance if requested. A failure before the start undoes all (A51).
func (s Instances) Create(call *Call) (i store.Instance, err error) {
	c := call.Body.(InstanceCreate)
	if c.Unsupported != "" {
		return i, lacking(c.Unsupported)
	}
	// The rack first checks the caller's role, and then the request.
	if err := s.store.View(func(tx *store.Tx) {
		s.checkCreate(tx, s.project(call, tx), c)
	}); err != nil {
		return i, err
	}
	i, owner, err := s.insert(call, c)
	if err == nil {
		i, err = s.complete(call, owner, i, c)
		call.Object = i.Identity
	}
	return i, err
}

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

// resume completes a creation that was unfinished when the simulator ended, or undoes it (A19).
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

func (s Instances) insert(call *Call, c InstanceCreate) (i store.Instance, owner store.Project,
	err error) {
	i = store.Instance{
		Identity: store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		NCPUs:    c.NCPUs, Memory: c.Memory, Hostname: c.Hostname,
		AutoRestartEnabled: store.Deref(c.AutoRestartPolicy) != "never",
		AutoRestartPolicy:  c.AutoRestartPolicy, CPUPlatform: c.CPUPlatform,
	}
	i.SetRunState(store.StateCreating)
	err = s.store.Update(func(tx *store.Tx) {
		owner = s.project(call, tx)
		i.ProjectID = owner.ID
		tx.Check(checkDescription(i.Description))
		tx.Refuse(store.Instances.Taken(tx, owner.ID, i.Name), alreadyExists("instance", i.Name))
		nics := newInterfaces(tx, i, c.Interfaces)
		tx.PutInterfaces(i.ID, nics)
		store.Instances.Put(tx, i)
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
		d, err := Reading(s.Simulation, func(tx *store.Tx) store.Disk {
			return find(tx, store.Disks, owner.ID, a.selector())
		})
		if a.Create != nil && err != nil { // if err is nil, d was made before a restart
			d, err = Disks(s).create(call, owner, *a.Create)
		}
		if err != nil {
			return err
		}
		s.creating.Lock(d.ID)() // A32
		unlock := s.locks.Lock(i.ID, d.ID)
		_, err = Attachments(s).attach(call, i.ID, d.ID)
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

// selector returns the name of an existing disk, or the ID that is chosen for a new disk.
func (a DiskAttachment) selector() store.Selector {
	if a.Create != nil {
		return store.Selector{ID: a.Create.ID}
	}
	return store.Selector{Name: a.Attach}
}

// finish ends the creation, and starts the instance if requested. An instance whose start fails
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
		s.logFailure("an instance that was created could not be started", "instance", i.ID, err)
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
	return undone(cause, err)
}

func (c InstanceCreate) attachments() []DiskAttachment {
	if c.Boot == nil {
		return c.Disks
	}
	return append([]DiskAttachment{*c.Boot}, c.Disks...)
}

// checkSize checks the rack's limits for an instance (A50).
func checkSize(tx *store.Tx, ncpus int, memory int64) {
	const maxCPUs, maxMemory = 254, 1536 * gibibyte
	tx.Refuse(ncpus > maxCPUs, invalidRequest("cannot have more than %d vCPUs per instance", maxCPUs))
	tx.Refuse(memory < gibibyte, invalidValue("size", "memory must be at least 1 GiB"))
	tx.Refuse(memory%gibibyte != 0, invalidValue("size", "memory must be divisible by 1 GiB"))
	tx.Refuse(memory > maxMemory,
		invalidValue("size", "memory must be less than or equal to 1536 GiB"))
	tx.Refuse(ncpus == 0, lacking("ncpus of 0"))
}

// checkCreate makes the checks that precede the check of the name, in the rack's order (A66).
func (s Instances) checkCreate(tx *store.Tx, owner store.Project, c InstanceCreate) {
	checkSize(tx, c.NCPUs, c.Memory)
	attachments := c.attachments()
	limit := s.config.diskLimit(s.Switches(), c.Boot != nil)
	tx.Refuse(len(attachments) > limit,
		invalidRequest("cannot attach more than %d disks to instance", limit))
	for _, a := range attachments {
		if a.Create != nil {
			Disks(s).describe(tx, owner, *a.Create, &store.Disk{})
		}
	}
	tx.Refuse(len(c.ExternalIPs) > maxExternalIPs,
		invalidRequest("An instance may not have more than %d external IP addresses", maxExternalIPs))
	tx.Refuse(c.JumboFrames, invalidRequest("enable_jumbo_frames may only be set on an instance "+
		"when the fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"))
	checkExternalIPs(tx, c.ExternalIPs)
	checkInterfaces(tx, c.Interfaces)
	linksOf(tx, owner.ID, c)
}

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

func lacking(part string) error {
	return &Error{Status: http.StatusNotImplemented, Message: fmt.Sprintf(
		"the simulator does not have an instance's %s, which the rack has", part)}
}
