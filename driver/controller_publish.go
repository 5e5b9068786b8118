package driver

import (
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
)

// ControllerPublishVolume attaches the volume's disk to the node's instance. The rack answers the
// same for a disk that is attached there already.
func (c *Controller) ControllerPublishVolume(ctx context.Context,
	req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	a, err := attachmentOf(req)
	if err != nil {
		return nil, err
	}
	disk, err := c.attachDisk(ctx, a)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: c.publishContext(disk)}, nil
}

// attachment is a ControllerPublishVolume request that was understood.
type attachment struct {
	Disk, Instance oxide.NameOrId
	DiskName       string // what volume_context says, empty for most static volumes
	ContextID      string // whose volume_context it is, as volume_context says
}

// certain says whether the context is the one that this driver gave the volume. Then the disk has a
// name of our own making, and with that a serial of its own.
func (a attachment) certain() bool {
	return isOwnName(a.DiskName) && a.ContextID == string(a.Disk)
}

func attachmentOf(req *csi.ControllerPublishVolumeRequest) (attachment, error) {
	a := attachment{
		DiskName:  req.GetVolumeContext()[ctxDiskName],
		ContextID: req.GetVolumeContext()[ctxDiskID],
	}
	switch {
	case req.GetVolumeId() == "":
		return a, volumeIDMissing()
	case req.GetNodeId() == "":
		return a, fail(codes.InvalidArgument, ReasonFieldMissing, "node_id is missing")
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return a, err
	}
	if req.GetReadonly() {
		return a, fail(codes.InvalidArgument, ReasonReadOnlyUnsupported, "readonly is not "+
			"supported when a disk is attached; let the node mount the volume read-only")
	}
	var ok bool
	if a.Disk, ok = rackID(req.GetVolumeId()); !ok {
		return a, volumeNotFound(req.GetVolumeId())
	}
	if a.Instance, ok = rackID(req.GetNodeId()); !ok {
		return a, instanceNotFound(req.GetNodeId())
	}
	return a, nil
}

func instanceNotFound(id string) error {
	return fail(codes.NotFound, ReasonInstanceNotFound, "the rack has no instance %.80q, or shows "+
		"this token none; node_id is an instance's UUID", id)
}

// attachDisk attaches and believes only what the answer shows. Nothing has to be looked at before
// when the volume's context is certain. Any other disk is compared with its context and with its
// neighbours first: a refusal after the attach would leave it attached.
func (c *Controller) attachDisk(ctx context.Context, a attachment) (*oxide.Disk, error) {
	const doing = "attach disk"
	if !a.certain() {
		if disk, err := c.checkStatic(ctx, a); disk != nil || err != nil {
			return disk, err
		}
	}
	disk, err := c.Client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: a.Instance,
		Body:     &oxide.DiskPath{Disk: a.Disk},
	})
	switch {
	case err != nil && (unknown(err) || refused(err)):
		disk, err = c.refusedAttach(ctx, a, err)
	case err != nil:
		return nil, statusError(ctx, doing, err)
	default:
		err = believable(doing, disk)
	}
	if err != nil {
		return nil, err
	}
	return c.checkAttached(ctx, a, disk)
}

// checkStatic looks at a static disk and those beside it: of two whose names begin with the same 20
// bytes the guest shows one only (CP-12). A disk that is attached there already is returned.
func (c *Controller) checkStatic(ctx context.Context, a attachment) (*oxide.Disk, error) {
	disk, err := c.diskByID(ctx, a.Disk)
	if err != nil {
		return nil, err
	}
	if err := a.checkContext(disk); err != nil {
		return nil, err
	}
	beside, err := c.instanceDisks(ctx, a.Instance)
	if err != nil {
		return nil, err
	}
	for _, other := range beside {
		if other.Id != disk.Id && diskSerial(string(other.Name)) == diskSerial(string(disk.Name)) {
			return nil, fail(codes.FailedPrecondition, ReasonSerialTaken, "the names of the disks "+
				"%s and %s, which is attached to the instance %s, begin with the same %d bytes, "+
				"and the guest would show only one of them; detach that one", disk.Name, other.Name,
				a.Instance, ownNameBytes)
		}
	}
	if disk.State.State() == oxide.DiskStateStateAttached && holder(disk) == string(a.Instance) {
		return c.checkAttached(ctx, a, disk)
	}
	return nil, nil
}

// checkContext holds what volume_context says to the disk.
func (a attachment) checkContext(disk *oxide.Disk) error {
	switch {
	case a.DiskName != "" && a.DiskName != string(disk.Name):
		return fail(codes.InvalidArgument, ReasonFieldInvalid, "volume_context: %s is %.80q, but "+
			"the disk's name is %s; correct the volume's attributes", ctxDiskName, a.DiskName,
			disk.Name)
	case a.ContextID != "" && a.ContextID != disk.Id:
		return fail(codes.InvalidArgument, ReasonFieldInvalid, "volume_context: %s is %.80q, but "+
			"the volume is the disk %s; correct the volume's attributes", ctxDiskID, a.ContextID,
			disk.Id)
	}
	return nil
}

func (c *Controller) instanceDisks(ctx context.Context, instance oxide.NameOrId) ([]oxide.Disk,
	error) {
	const doing = "list the instance's disks"
	var disks []oxide.Disk
	var inside error
	err := eachObject(func(token string) ([]oxide.Disk, string, error) {
		page, err := c.Client.InstanceDiskList(ctx, oxide.InstanceDiskListParams{
			Instance: instance, Limit: oxide.NewPointer(rackPage), PageToken: token,
		})
		switch {
		case unknown(err):
			return nil, "", instanceNotFound(string(instance))
		case err != nil:
			return nil, "", statusError(ctx, doing, err)
		}
		return page.Items, page.NextPage, nil
	}, func(disk *oxide.Disk) (enough bool) {
		disks = append(disks, *disk)
		inside = believable(doing, disk)
		return inside != nil
	})
	if inside != nil {
		return nil, inside
	}
	return disks, err
}

// checkAttached holds the rack's success to what was asked.
func (c *Controller) checkAttached(ctx context.Context, a attachment, disk *oxide.Disk) (
	*oxide.Disk, error) {
	const doing = "attach disk"
	disk, err := c.await(ctx, disk, oxide.DiskStateStateAttaching)
	if err != nil {
		return nil, err
	}
	switch {
	case disk.Id != string(a.Disk):
		return nil, wrongAnswer(doing, "asked for the disk %s and got %.80q", a.Disk, disk.Id)
	case disk.State.State() == oxide.DiskStateStateAttaching:
		return nil, fail(codes.DeadlineExceeded, ReasonDeadlineExceeded, "the rack is still "+
			"attaching the disk %s; a repeated call goes on waiting", disk.Name)
	case disk.State.State() != oxide.DiskStateStateAttached || holder(disk) != string(a.Instance):
		return nil, wrongAnswer(doing, "the disk %s is %s %s, not attached to the instance %s",
			disk.Name, disk.State.State(), holder(disk), a.Instance)
	}
	return disk, a.checkContext(disk)
}

// refusedAttach finds the reason of a refusal in the state of disk and instance. The disk comes
// back when it is attached as wanted after all.
func (c *Controller) refusedAttach(ctx context.Context, a attachment, why error) (*oxide.Disk,
	error) {
	disk, err := c.diskByID(ctx, a.Disk)
	if err != nil {
		return nil, err
	}
	elsewhere := holder(disk) != "" && holder(disk) != string(a.Instance)
	switch state := disk.State.State(); {
	case state == oxide.DiskStateStateDetaching:
		// From whichever instance: it is free in a moment (CP-13).
		return nil, diskBusy(disk)
	case elsewhere:
		return nil, fail(codes.FailedPrecondition, ReasonDiskAttachedElsewhere, "the disk %s is "+
			"%s at the instance %s, which is the node to unpublish it from first", disk.Name, state,
			holder(disk))
	case state == oxide.DiskStateStateAttached, state == oxide.DiskStateStateAttaching:
		return disk, nil
	case state == oxide.DiskStateStateFaulted:
		return nil, diskFaulted(codes.FailedPrecondition, disk)
	case state == oxide.DiskStateStateDetached:
		return nil, c.refusedByInstance(ctx, a, disk, why)
	}
	return nil, diskBusy(disk)
}

// refusedByInstance is for a disk that could be attached: the instance is the reason.
func (c *Controller) refusedByInstance(ctx context.Context, a attachment, disk *oxide.Disk,
	why error) error {
	instance, err := c.instanceByID(ctx, a.Instance)
	if err != nil {
		return err
	}
	if disk.ProjectId != instance.ProjectId {
		return fail(codes.InvalidArgument, ReasonOtherProject, "the disk %s and the instance %s "+
			"are in different projects", disk.Name, instance.Name)
	}
	beside, err := c.instanceDisks(ctx, a.Instance)
	switch {
	case err != nil:
		return err
	case len(beside) >= c.maxDisks():
		return fail(codes.ResourceExhausted, ReasonInstanceFull, "the instance %s has %d disks, "+
			"the boot disk included, and the rack allows %d", instance.Name, len(beside),
			c.maxDisks())
	}
	return instanceRefusal("attach", instance, why)
}

func (c *Controller) instanceByID(ctx context.Context, id oxide.NameOrId) (*oxide.Instance, error) {
	instance, err := c.Client.InstanceView(ctx, oxide.InstanceViewParams{Instance: id})
	switch {
	case unknown(err):
		return nil, instanceNotFound(string(id))
	case err != nil:
		return nil, statusError(ctx, "read instance", err)
	}
	switch err := believableInstance(id, instance); {
	case err != nil:
		return nil, err
	case instance.RunState == oxide.InstanceStateDestroyed:
		return nil, instanceNotFound(string(id))
	}
	return instance, nil
}

// activeStates are those in which an instance has a virtual machine.
var activeStates = []oxide.InstanceState{
	oxide.InstanceStateStarting, oxide.InstanceStateRunning, oxide.InstanceStateStopping,
	oxide.InstanceStateRebooting, oxide.InstanceStateMigrating,
}

// instanceRefusal says what of the instance's state forbids an attach or detach (CP-10, CU-7). The
// driver never stops an instance: what runs on it is not its own.
func instanceRefusal(verb string, instance *oxide.Instance, why error) error {
	words := "no explanation"
	var answer *oxide.HTTPError
	if errors.As(why, &answer) {
		words = answerText(answer)
	}
	if slices.Contains(activeStates, instance.RunState) {
		return fail(codes.FailedPrecondition, ReasonInstanceMustBeStopped, "the instance %s is %s "+
			"and must be stopped to %s a disk: this rack has no hot-plug; see "+
			"https://github.com/oxidecomputer/oxide-csi-plugin#limits (the rack says: %s; if that is "+
			"about the disk, it was busy a moment ago, and a repeated call succeeds)",
			instance.Name, instance.RunState, verb, words)
	}
	return fail(codes.FailedPrecondition, ReasonInstanceState, "the rack does not %s a disk while "+
		"the instance %s is %s (it says: %s)", verb, instance.Name, instance.RunState, words)
}
