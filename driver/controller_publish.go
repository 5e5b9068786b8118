package driver

import (
	"context"
	"errors"
	"fmt"
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
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext(disk)}, nil
}

// ControllerUnpublishVolume detaches the volume's disk from the node's instance, or from whichever
// has it when no node is named. Not attached there is a success.
func (c *Controller) ControllerUnpublishVolume(ctx context.Context,
	req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, volumeIDMissing()
	}
	disk, isDisk := rackID(req.GetVolumeId())
	instance, isInstance := rackID(req.GetNodeId())
	// What is no UUID is no disk, or no instance, and so nothing is attached to it.
	if !isDisk || (req.GetNodeId() != "" && !isInstance) {
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	}
	var err error
	if isInstance {
		err = c.detachDisk(ctx, disk, instance)
	} else {
		err = c.detachEverywhere(ctx, disk)
	}
	if err != nil {
		return nil, err
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// attachment is a ControllerPublishVolume request that was understood.
type attachment struct {
	Disk, Instance oxide.NameOrId
	DiskName       string // what volume_context says, empty for most static volumes
}

func attachmentOf(req *csi.ControllerPublishVolumeRequest) (attachment, error) {
	a := attachment{DiskName: req.GetVolumeContext()[ctxDiskName]}
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

// attachDisk attaches and believes only what the answer shows. A disk of our own making has a
// serial of its own, so that nothing has to be looked at before; any other is compared with its
// neighbours.
func (c *Controller) attachDisk(ctx context.Context, a attachment) (*oxide.Disk, error) {
	const doing = "attach disk"
	if !isOwnName(a.DiskName) {
		if disk, err := c.checkSerial(ctx, a); disk != nil || err != nil {
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

// checkSerial looks at the disks beside a static one: of two whose names begin with the same 20
// bytes the guest shows one only (CP-12). A disk that is attached there already is returned.
func (c *Controller) checkSerial(ctx context.Context, a attachment) (*oxide.Disk, error) {
	disk, err := c.diskByID(ctx, a.Disk)
	if err != nil {
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

func (c *Controller) instanceDisks(ctx context.Context, instance oxide.NameOrId) ([]oxide.Disk,
	error) {
	disks, err := c.Client.InstanceDiskListAllPages(ctx, oxide.InstanceDiskListParams{
		Instance: instance,
	})
	switch {
	case unknown(err):
		return nil, instanceNotFound(string(instance))
	case err != nil:
		return nil, statusError(ctx, "list the instance's disks", err)
	}
	return disks, nil
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
	case a.DiskName != "" && a.DiskName != string(disk.Name):
		return nil, fail(codes.InvalidArgument, ReasonFieldInvalid, "volume_context: %s is %.80q, "+
			"but the disk's name is %s; correct the volume's attributes", ctxDiskName, a.DiskName,
			disk.Name)
	}
	return disk, nil
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
			"https://github.com/oxidecomputer/oxide-csi-plugin#limits (the rack says: %s)",
			instance.Name, instance.RunState, verb, words)
	}
	return fail(codes.FailedPrecondition, ReasonInstanceState, "the rack does not %s a disk while "+
		"the instance %s is %s (it says: %s)", verb, instance.Name, instance.RunState, words)
}

// detachEverywhere detaches a disk from the instance that has it.
func (c *Controller) detachEverywhere(ctx context.Context, id oxide.NameOrId) error {
	disk, err := c.diskByID(ctx, id)
	switch {
	case isNotFound(err):
		return c.projectVisible(ctx)
	case err != nil:
		return err
	case holder(disk) == "":
		return nil
	}
	return c.detachDisk(ctx, id, oxide.NameOrId(holder(disk)))
}

// detachDisk detaches and returns when the rack says that the disk is free.
func (c *Controller) detachDisk(ctx context.Context, id, instance oxide.NameOrId) error {
	const doing = "detach disk"
	disk, err := c.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: instance,
		Body:     &oxide.DiskPath{Disk: id},
	})
	switch {
	case err != nil && (unknown(err) || refused(err)):
		return c.refusedDetach(ctx, id, instance, err)
	case err != nil:
		return statusError(ctx, doing, err)
	}
	if err := believable(doing, disk); err != nil {
		return err
	}
	if disk.Id != string(id) {
		return wrongAnswer(doing, "asked for the disk %s and got %.80q", id, disk.Id)
	}
	disk, err = c.await(ctx, disk, oxide.DiskStateStateDetaching)
	switch {
	case isNotFound(err):
		return c.projectVisible(ctx)
	case err != nil:
		return err
	case disk.State.State() == oxide.DiskStateStateDetaching:
		return fail(codes.DeadlineExceeded, ReasonDeadlineExceeded, "the rack is still detaching "+
			"the disk %s; a repeated call goes on waiting", disk.Name)
	case holder(disk) == string(instance):
		return wrongAnswer(doing, "the disk %s is still %s", disk.Name, disk.State.State())
	}
	return nil
}

// refusedDetach finds the reason of a refusal in the state of disk and instance. A disk that is
// gone, or elsewhere, is as detached from the instance as one could wish.
func (c *Controller) refusedDetach(ctx context.Context, id, instanceID oxide.NameOrId,
	why error) error {
	disk, err := c.diskByID(ctx, id)
	switch {
	case isNotFound(err):
		return c.projectVisible(ctx)
	case err != nil:
		return err
	case holder(disk) != string(instanceID):
		return nil
	case disk.State.State() != oxide.DiskStateStateAttached:
		return diskBusy(disk)
	}
	instance, err := c.instanceByID(ctx, instanceID)
	switch {
	case isNotFound(err):
		return fail(codes.NotFound, ReasonInstanceNotFound, "the rack says that the disk %s is "+
			"attached to the instance %s, and that there is no such instance; it cannot be taken "+
			"for unpublished", disk.Name, instanceID)
	case err != nil:
		return err
	case instance.BootDiskId == disk.Id:
		return fail(codes.FailedPrecondition, ReasonBootDisk, "the disk %s is the boot disk of "+
			"the instance %s, which the rack does not detach; choose another boot disk first",
			disk.Name, instance.Name)
	}
	return instanceRefusal("detach", instance, fmt.Errorf("detach disk: %w", why))
}
