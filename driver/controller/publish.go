package controller

import (
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// ControllerPublishVolume attaches the volume's disk to the node's instance. The rack accepts a
// disk that is already attached there.
func (c *Service) ControllerPublishVolume(ctx context.Context,
	req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	a, err := attachmentOf(req)
	if err != nil {
		return nil, err
	}
	disk, err := c.attachDisk(ctx, a)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext(disk)}, nil
}

// attachment is a parsed ControllerPublishVolume request.
type attachment struct {
	Disk, Instance oxide.NameOrId
	DiskName       string // from volume_context, empty for most static volumes
	ContextID      string // the disk's id in volume_context
	Capability     *csi.VolumeCapability
}

// change is the attach that is requested, or the detach that undoes it.
func (a attachment) change(attach bool) change { return change{a.Disk, a.Instance, attach} }

func attachmentOf(req *csi.ControllerPublishVolumeRequest) (attachment, error) {
	a := attachment{
		DiskName:   req.GetVolumeContext()[volume.CtxDiskName],
		ContextID:  req.GetVolumeContext()[volume.CtxDiskID],
		Capability: req.GetVolumeCapability(),
	}
	switch {
	case req.GetVolumeId() == "":
		return a, volumeIDMissing()
	case req.GetNodeId() == "":
		return a, csierr.New(csierr.FieldMissing, "node_id is missing")
	}
	if err := volume.CheckCapability(req.GetVolumeCapability()); err != nil {
		return a, err
	}
	if req.GetReadonly() {
		return a, csierr.New(csierr.ReadOnlyUnsupported, "readonly is not supported when a disk is "+
			"attached; let the node mount the volume read-only")
	}
	var ok bool
	if a.Disk, ok = rack.ID(req.GetVolumeId()); !ok {
		return a, rack.VolumeNotFound(req.GetVolumeId())
	}
	if a.Instance, ok = rack.ID(req.GetNodeId()); !ok {
		return a, rack.InstanceNotFound(req.GetNodeId())
	}
	return a, nil
}

// attachDisk lists the instance's disks before and after it attaches one: of two disks whose names
// begin with the same bytes the guest shows only one (CP-12), whoever made them. The list before
// saves an attach that would have to be undone. The list after finds what was attached meanwhile:
// if two such disks are attached at once, the later list shows both, so that the two calls never
// both return OK.
//
// Right before the attach it reads the disk, so that it never asks for one that another instance
// has. A rack refuses that by its rules (A34); one that breaks them would take the disk away from a
// running workload. What is attached elsewhere between the read and the attach is left to the rack.
func (c *Service) attachDisk(ctx context.Context, a attachment) (*oxide.Disk, error) {
	if _, err := c.awaitLate(ctx, a.change(false)); err != nil {
		return nil, err
	}
	before, err := c.neighbours(ctx, a)
	if own := before.Own; err == nil && own != nil && rack.InstanceOf(own) == string(a.Instance) &&
		own.State.State() == oxide.DiskStateStateAttached {
		confirmAttach(ctx, own)
		c.late.seen(a.change(true))
		return own, a.checkAttached(own, before)
	}
	if err != nil && !csierr.IsNotFound(err) {
		return nil, err
	}
	// CP-4: an unknown disk is reported before an unknown instance.
	found, lookErr := c.Rack.Disk(ctx, a.Disk)
	switch {
	case lookErr != nil:
		return nil, lookErr
	case err != nil:
		return nil, err
	}
	if err := a.checkBeforeAttach(found, before); err != nil {
		return nil, err
	}
	disk, mine, err := c.requestAttach(ctx, a, before, rack.InstanceOf(found) != "")
	if err != nil {
		return nil, err
	}
	confirmAttach(ctx, disk)
	after, err := c.listAfterAttach(ctx, a, disk)
	if err != nil {
		return nil, err
	}
	why := a.checkAttached(disk, after)
	if why != nil && mine && before.Own == nil && rack.InstanceOf(found) == "" {
		why = c.undoAttach(ctx, a, disk, why)
	}
	return disk, why
}

// confirmAttach notes that a disk has turned out to be attached.
func confirmAttach(ctx context.Context, disk *oxide.Disk) {
	flight.Confirm(ctx, flight.DiskAttached, flight.Fields{}, flight.Fields{Disk: string(disk.Name)})
}

// requestAttach attaches the disk and returns it. mine reports whether this request may have
// attached it, and repeated is set if an earlier one has, or is about to.
func (c *Service) requestAttach(ctx context.Context, a attachment, before neighbours,
	repeated bool) (disk *oxide.Disk, mine bool, err error) {
	const doing = "attach disk"
	change := flight.Begin(ctx, flight.DiskAttached, flight.Fields{})
	c.late.sent(a.change(true))
	disk, err = c.Rack.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: a.Instance,
		Body:     &oxide.DiskPath{Disk: a.Disk},
	})
	mine = err == nil || rack.MaybeApplied(err)
	if err != nil {
		settle(change, err, flight.Fields{})
	} else {
		err = a.checkAnswer(doing, disk)
	}
	if err != nil && !rack.Definite(err) {
		c.late.lost(a.change(true), c.lateLimit(), repeated)
	}
	answered := err == nil
	switch {
	case err == nil:
	case mine:
		disk, err = c.resolveAttach(ctx, a, rack.Error(ctx, doing, err))
	case rack.NotFound(err), rack.Refused(err):
		disk, err = c.explainRefusedAttach(ctx, a, before, err)
	default:
		err = rack.Error(ctx, doing, err)
	}
	if err != nil {
		return nil, mine, err
	}
	disk, err = c.awaitAttached(ctx, a, disk)
	if err == nil && answered {
		change.End(nil, flight.Fields{Disk: string(disk.Name)})
	}
	return disk, mine, retryLater(err)
}

// checkAnswer compares the rack's response with the request.
func (a attachment) checkAnswer(doing string, disk *oxide.Disk) error {
	switch err := rack.ValidateDisk(doing, disk); {
	case err != nil:
		return err
	case disk.Id != string(a.Disk):
		return rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", a.Disk, disk.Id)
	}
	return a.checkPlace(doing, disk)
}

// checkPlace returns an error unless the disk is attached to the instance, or being attached to it.
func (a attachment) checkPlace(doing string, disk *oxide.Disk) error {
	state := disk.State.State()
	if rack.InstanceOf(disk) != string(a.Instance) || state == oxide.DiskStateStateDetaching {
		return rack.InvalidResponse(doing, "the disk %s is %s %s, not attached to the instance %s",
			disk.Name,
			state, rack.InstanceOf(disk), a.Instance)
	}
	return nil
}

// checkContext compares volume_context with the disk.
func (a attachment) checkContext(disk *oxide.Disk) error {
	switch {
	case a.DiskName != "" && a.DiskName != string(disk.Name):
		return csierr.New(csierr.FieldInvalid, "volume_context: %s is %.80q, but "+
			"the disk's name is %s; correct the volume's attributes", volume.CtxDiskName, a.DiskName,
			disk.Name)
	case a.ContextID != "" && a.ContextID != disk.Id:
		return csierr.New(csierr.FieldInvalid, "volume_context: %s is %.80q, but "+
			"the volume is the disk %s; correct the volume's attributes", volume.CtxDiskID, a.ContextID,
			disk.Id)
	}
	return nil
}

// awaitAttached waits while the rack is attaching the disk.
func (c *Service) awaitAttached(ctx context.Context, a attachment, disk *oxide.Disk) (
	*oxide.Disk, error) {
	disk, err := c.await(ctx, disk, oxide.DiskStateStateAttaching)
	switch {
	case err != nil:
		return nil, err
	case disk.State.State() == oxide.DiskStateStateAttaching:
		return nil, csierr.New(csierr.DeadlineExceeded, "the rack is still attaching the disk %s; "+
			"repeat the call", disk.Name)
	}
	return disk, a.checkPlace("attach disk", disk)
}

// resolveAttach reads the disk to find out whether an attach without a clear response was done.
func (c *Service) resolveAttach(ctx context.Context, a attachment, why error) (*oxide.Disk,
	error) {
	disk, err := c.Rack.Disk(ctx, a.Disk)
	switch {
	case csierr.IsNotFound(err):
		return nil, err
	case err != nil:
		return nil, retryLater(err)
	case disk.State.State() == oxide.DiskStateStateDetached:
		return nil, retryLater(why)
	case rack.InstanceOf(disk) == string(a.Instance):
		c.late.seen(a.change(true))
	}
	return disk, a.stateProblem(disk)
}

// explainRefusedAttach finds the reason of a refusal in the state of the disk and the instance. It
// returns the disk if it is attached as requested after all.
func (c *Service) explainRefusedAttach(ctx context.Context, a attachment, before neighbours,
	why error) (*oxide.Disk, error) {
	disk, err := c.Rack.Disk(ctx, a.Disk)
	switch {
	case err != nil:
		return nil, err
	case disk.State.State() == oxide.DiskStateStateDetached:
		return nil, c.explainByInstance(ctx, a, disk, before, why)
	}
	return disk, a.stateProblem(disk)
}

// stateProblem returns why a disk that is not detached is not attached as requested, or nil if it
// is.
func (a attachment) stateProblem(disk *oxide.Disk) error {
	switch state := disk.State.State(); {
	case state == oxide.DiskStateStateDetaching:
		// Whichever instance has it, it will soon be free (CP-13).
		return diskBusy(disk)
	case rack.InstanceOf(disk) != "" && rack.InstanceOf(disk) != string(a.Instance):
		return csierr.New(csierr.DiskAttachedElsewhere, "the disk %s is %s at the instance %s; "+
			"unpublish it from that node first", disk.Name, state,
			rack.InstanceOf(disk))
	case state == oxide.DiskStateStateAttached, state == oxide.DiskStateStateAttaching:
		return nil
	case state == oxide.DiskStateStateFaulted:
		return diskFaulted(disk)
	}
	return diskBusy(disk)
}

// explainByInstance finds the reason in the instance, for a disk that could be attached. If the
// instance's disks have changed meanwhile, the reason is unknown.
func (c *Service) explainByInstance(ctx context.Context, a attachment, disk *oxide.Disk,
	before neighbours, why error) error {
	instance, err := c.Rack.Instance(ctx, a.Instance)
	if err != nil {
		return err
	}
	if disk.ProjectId != instance.ProjectId {
		return csierr.New(csierr.OtherProject, "the disk %s and the instance %s "+
			"are in different projects", disk.Name, instance.Name)
	}
	now, err := c.neighbours(ctx, a)
	switch {
	case err != nil:
		return err
	case len(now.Others) >= c.maxDisks():
		return csierr.New(csierr.InstanceFull, "the instance %s has %d disks, "+
			"the boot disk included, and the rack allows %d", instance.Name, len(now.Others),
			c.maxDisks())
	case now.differ(before):
		return csierr.New(csierr.OperationPending, "the rack did not attach the disk %s, and the disks "+
			"of the instance %s changed meanwhile; repeat the call", disk.Name,
			instance.Name)
	}
	return instanceRefusal("attach", disk, instance, why)
}

// activeStates are the states in which an instance has a virtual machine.
var activeStates = []oxide.InstanceState{
	oxide.InstanceStateStarting, oxide.InstanceStateRunning, oxide.InstanceStateStopping,
	oxide.InstanceStateRebooting, oxide.InstanceStateMigrating,
}

// instanceRefusal returns the error for an instance whose state forbids an attach or detach (CP-10,
// CU-7). The driver never stops an instance, because it does not own what runs there.
func instanceRefusal(verb string, disk *oxide.Disk, instance *oxide.Instance, why error) error {
	words := "no explanation"
	var answer *oxide.HTTPError
	if errors.As(why, &answer) {
		words = rack.AnswerText(answer)
	}
	if slices.Contains(activeStates, instance.RunState) {
		cause := "this rack has no hot-plug"
		if disk.DiskType == oxide.DiskTypeLocal {
			// A running zone cannot gain a volume of its sled, not even with hot-plug.
			cause = "a local disk is only attached and detached while the instance is stopped"
		}
		return csierr.New(csierr.InstanceMustBeStopped, "the instance %s is %s and must be stopped to "+
			"%s a disk: %s; see https://github.com/oxidecomputer/oxide-csi-plugin#limits (the rack says: "+
			"%s; if that is about the disk, the disk was busy, and a repeated call succeeds)",
			instance.Name, instance.RunState, verb, cause, words)
	}
	return csierr.New(csierr.InstanceState, "the rack does not %s a disk while "+
		"the instance %s is %s (it says: %s)", verb, instance.Name, instance.RunState, words)
}
