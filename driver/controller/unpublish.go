package controller

import (
	"context"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// ControllerUnpublishVolume detaches the volume's disk from the node's instance, or from whichever
// has it when no node is named. Not attached there is a success; what is not seen to be detached is
// none.
func (c *Service) ControllerUnpublishVolume(ctx context.Context,
	req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, volumeIDMissing()
	}
	disk, isDisk := rack.ID(req.GetVolumeId())
	instance, isInstance := rack.ID(req.GetNodeId())
	// What is no UUID is no disk, or no instance, and so nothing is attached to it.
	if !isDisk || (req.GetNodeId() != "" && !isInstance) {
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	}
	var err error
	if isInstance {
		_, err = c.detachDisk(ctx, disk, instance)
	} else {
		err = c.detachEverywhere(ctx, disk)
	}
	if err != nil {
		return nil, err
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// detachEverywhere detaches a disk from the instance that has it.
func (c *Service) detachEverywhere(ctx context.Context, id oxide.NameOrId) error {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return c.Rack.CheckProject(ctx)
	case err != nil:
		return err
	case rack.Holder(disk) != "":
		disk, err = c.detachDisk(ctx, id, oxide.NameOrId(rack.Holder(disk)))
	}
	switch {
	case disk == nil || err != nil:
		return err
	case rack.Holder(disk) != "":
		// Somebody attached it to another instance meanwhile.
		return diskBusy(disk)
	case slices.Contains(statesAtNone, disk.State.State()):
		return nil
	case disk.State.State() == oxide.DiskStateStateFaulted:
		return diskFaulted(disk)
	}
	return diskBusy(disk)
}

// detachDisk detaches, and returns when it is seen that the instance does not have the disk. The
// disk comes as it was seen last, nil when it is gone.
func (c *Service) detachDisk(ctx context.Context, id, instance oxide.NameOrId) (*oxide.Disk,
	error) {
	const doing = "detach disk"
	disk, err := c.Rack.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: instance,
		Body:     &oxide.DiskPath{Disk: id},
	})
	switch {
	case err != nil && (rack.Unknown(err) || rack.Refused(err)):
		return c.refusedDetach(ctx, id, instance, err)
	case err != nil:
		return nil, rack.Error(ctx, doing, err)
	}
	if err := rack.ValidateDisk(doing, disk); err != nil {
		return nil, err
	}
	if disk.Id != string(id) {
		return nil, rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", id, disk.Id)
	}
	disk, err = c.await(ctx, disk, oxide.DiskStateStateDetaching)
	switch {
	case csierr.IsNotFound(err):
		return nil, c.Rack.CheckProject(ctx)
	case err != nil:
		return nil, err
	case disk.State.State() == oxide.DiskStateStateDetaching:
		return nil, csierr.New(csierr.DeadlineExceeded, "the rack is still "+
			"detaching the disk %s; a repeated call goes on waiting", disk.Name)
	case rack.Holder(disk) == string(instance):
		return nil, rack.InvalidResponse(doing, "the disk %s is still %s", disk.Name, disk.State.State())
	}
	return disk, c.checkAway(ctx, disk, instance)
}

// statesAtNone are those that a disk comes to from detached, or before it can be attached.
var statesAtNone = []oxide.DiskStateState{
	oxide.DiskStateStateDetached, oxide.DiskStateStateCreating, oxide.DiskStateStateMaintenance,
	oxide.DiskStateStateImportReady, oxide.DiskStateStateImportingFromUrl,
	oxide.DiskStateStateImportingFromBulkWrites, oxide.DiskStateStateFinalizing,
	oxide.DiskStateStateDestroyed,
}

// checkAway proves that an instance does not have a disk that is not said to be there. A state that
// says nothing of instances, as a faulted disk's, proves nothing: the instance's own list does.
func (c *Service) checkAway(ctx context.Context, disk *oxide.Disk, instance oxide.NameOrId,
) error {
	if rack.Holder(disk) != "" || slices.Contains(statesAtNone, disk.State.State()) {
		return nil
	}
	disks, err := c.Rack.InstanceDisks(ctx, instance)
	switch {
	case csierr.IsNotFound(err):
		// Deleted, or hidden from this token with all that is in the project.
		return c.Rack.CheckProject(ctx)
	case err != nil:
		return err
	case slices.ContainsFunc(disks, func(d oxide.Disk) bool { return d.Id == disk.Id }):
		return csierr.New(csierr.DiskFaulted, "the disk %s is %s and still among "+
			"those of the instance %s, so it cannot be taken for detached; stop the instance, or "+
			"ask the rack's operator", disk.Name, disk.State.State(), instance)
	}
	return nil
}

// refusedDetach finds the reason of a refusal in the state of disk and instance. A disk that is
// gone, or elsewhere, is as detached from the instance as one could wish.
func (c *Service) refusedDetach(ctx context.Context, id, instanceID oxide.NameOrId,
	why error) (*oxide.Disk, error) {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return nil, c.Rack.CheckProject(ctx)
	case err != nil:
		return nil, err
	case rack.Holder(disk) != string(instanceID):
		return disk, c.checkAway(ctx, disk, instanceID)
	case disk.State.State() != oxide.DiskStateStateAttached:
		return nil, diskBusy(disk)
	}
	instance, err := c.Rack.Instance(ctx, instanceID)
	switch {
	case csierr.IsNotFound(err):
		return nil, csierr.New(csierr.InstanceNotFound, "the rack says that the disk %s "+
			"is attached to the instance %s, and that there is no such instance; it cannot be "+
			"taken for unpublished", disk.Name, instanceID)
	case err != nil:
		return nil, err
	case instance.BootDiskId == disk.Id:
		return nil, csierr.New(csierr.BootDisk, "the disk %s is the boot disk "+
			"of the instance %s, which the rack does not detach; choose another boot disk first",
			disk.Name, instance.Name)
	}
	return nil, instanceRefusal("detach", disk, instance, fmt.Errorf("detach disk: %w", why))
}
