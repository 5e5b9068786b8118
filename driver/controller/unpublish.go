package controller

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"
)

// ControllerUnpublishVolume detaches the volume's disk from the node's instance, or from the
// instance that has it if the request names no node. A disk that is not attached there is a
// success. A disk that cannot be verified to be detached is an error.
func (c *Service) ControllerUnpublishVolume(ctx context.Context,
	req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, volumeIDMissing()
	}
	disk, isDisk := rack.ID(req.GetVolumeId())
	instance, isInstance := rack.ID(req.GetNodeId())
	// An id that is not a UUID names no disk or instance, so there is nothing to detach.
	if !isDisk || (req.GetNodeId() != "" && !isInstance) {
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	}
	for {
		if err := c.lookAndDetach(ctx, disk, instance); err != nil {
			return nil, err
		}
		late, err := c.awaitLate(ctx, change{disk, instance, true})
		if err != nil {
			return nil, err
		}
		if !late {
			return &csi.ControllerUnpublishVolumeResponse{}, nil
		}
	}
}

// lookAndDetach reads the disk and detaches it if the instance has it, or any instance if the id is
// empty. It never asks to detach a disk from an instance that does not have it. A rack does nothing
// then by its rules (A37); one that breaks them would take the disk away from another instance, and
// from a running workload. What moves between the read and the detach is left to the rack.
func (c *Service) lookAndDetach(ctx context.Context, id, instance oxide.NameOrId) error {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		if err = c.Rack.CheckProject(ctx); err == nil {
			c.late.gone(id)
		}
		return err
	case err != nil:
		return err
	}
	at := oxide.NameOrId(rack.InstanceOf(disk))
	c.late.seen(change{id, at, true})
	if disk.State.State() == oxide.DiskStateStateDetached {
		c.late.seen(change{id, instance, false})
	}
	switch {
	case instance == "":
		return c.detachEverywhere(ctx, disk)
	case at != instance:
		return c.confirmDetached(ctx, disk, instance)
	}
	_, err = c.detachDisk(ctx, id, instance, disk.State.State() != oxide.DiskStateStateAttached)
	return err
}

// detachEverywhere detaches a disk from the instance that has it.
func (c *Service) detachEverywhere(ctx context.Context, disk *oxide.Disk) error {
	var err error
	if at := rack.InstanceOf(disk); at != "" {
		disk, err = c.detachDisk(ctx, oxide.NameOrId(disk.Id), oxide.NameOrId(at),
			disk.State.State() != oxide.DiskStateStateAttached)
	}
	switch {
	case disk == nil || err != nil:
		return err
	case rack.InstanceOf(disk) != "":
		// Another call attached it to another instance meanwhile.
		return diskBusy(disk)
	case slices.Contains(statesWithoutInstance, disk.State.State()):
		return nil
	case disk.State.State() == oxide.DiskStateStateFaulted:
		return diskFaulted(disk)
	}
	return diskBusy(disk)
}

// detachDisk detaches the disk and verifies that the instance does not have it any more. It returns
// the disk as it was read last, nil if it is gone.
func (c *Service) detachDisk(ctx context.Context, id, instance oxide.NameOrId, repeated bool) (
	*oxide.Disk, error) {
	const doing = "detach disk"
	detach := change{id, instance, false}
	c.late.sent(detach)
	record := flight.Begin(ctx, flight.DiskDetached, flight.Fields{Instance: string(instance)})
	disk, err := c.Rack.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: instance,
		Body:     &oxide.DiskPath{Disk: id},
	})
	if err != nil {
		settle(record, err, flight.Fields{})
		if !rack.Definite(err) {
			c.late.lost(detach, c.lateLimit(), repeated)
		}
	}
	switch {
	case err != nil && (rack.NotFound(err) || rack.Refused(err)):
		return c.explainRefusedDetach(ctx, id, instance, err)
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
		return nil, csierr.New(csierr.DeadlineExceeded, "the rack is still detaching the disk %s; "+
			"repeat the call", disk.Name)
	case rack.InstanceOf(disk) == string(instance):
		return nil, rack.InvalidResponse(doing, "the disk %s is still %s", disk.Name, disk.State.State())
	}
	if err = c.checkDetached(ctx, disk, instance); err == nil {
		record.End(nil, flight.Fields{Disk: string(disk.Name)})
	}
	return disk, err
}

// confirmDetached verifies that an instance does not have a disk, and notes a detach of which the
// outcome was unknown.
func (c *Service) confirmDetached(ctx context.Context, disk *oxide.Disk, instance oxide.NameOrId,
) error {
	err := c.checkDetached(ctx, disk, instance)
	if err == nil {
		flight.Confirm(ctx, flight.DiskDetached, flight.Fields{Instance: string(instance)},
			flight.Fields{Disk: string(disk.Name)})
	}
	return err
}

// statesWithoutInstance are the states that a disk reaches from detached, or before it can be
// attached.
var statesWithoutInstance = []oxide.DiskStateState{
	oxide.DiskStateStateDetached, oxide.DiskStateStateCreating, oxide.DiskStateStateMaintenance,
	oxide.DiskStateStateImportReady, oxide.DiskStateStateImportingFromUrl,
	oxide.DiskStateStateImportingFromBulkWrites, oxide.DiskStateStateFinalizing,
	oxide.DiskStateStateDestroyed,
}

// checkDetached verifies that an instance does not have a disk whose state names no instance. A
// state such as faulted proves nothing, so the instance's own list of disks decides.
func (c *Service) checkDetached(ctx context.Context, disk *oxide.Disk, instance oxide.NameOrId,
) error {
	if rack.InstanceOf(disk) != "" || slices.Contains(statesWithoutInstance, disk.State.State()) {
		return nil
	}
	disks, err := c.Rack.InstanceDisks(ctx, instance)
	switch {
	case csierr.IsNotFound(err):
		// The instance is deleted, or this token may not see the project.
		return c.Rack.CheckProject(ctx)
	case err != nil:
		return err
	case slices.ContainsFunc(disks, func(d oxide.Disk) bool { return d.Id == disk.Id }):
		return csierr.New(csierr.DiskFaulted, "the disk %s is %s and still among those of the instance "+
			"%s, so it is not known to be detached; stop the instance, or ask the rack's "+
			"operator", disk.Name, disk.State.State(), instance)
	}
	return nil
}

// explainRefusedDetach finds the reason of a refusal in the state of the disk and the instance. A
// disk that is gone, or attached elsewhere, is detached from this instance.
func (c *Service) explainRefusedDetach(ctx context.Context, id, instanceID oxide.NameOrId,
	why error) (*oxide.Disk, error) {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return nil, c.Rack.CheckProject(ctx)
	case err != nil:
		return nil, err
	case rack.InstanceOf(disk) != string(instanceID):
		return disk, c.confirmDetached(ctx, disk, instanceID)
	case disk.State.State() != oxide.DiskStateStateAttached:
		return nil, diskBusy(disk)
	}
	instance, err := c.Rack.Instance(ctx, instanceID)
	switch {
	case csierr.IsNotFound(err):
		return nil, csierr.New(csierr.InstanceNotFound, "the rack reports that the disk %s is attached "+
			"to the instance %s, and that there is no such instance; the disk is not known to be detached",
			disk.Name, instanceID)
	case err != nil:
		return nil, err
	case instance.BootDiskId == disk.Id:
		return nil, csierr.New(csierr.BootDisk, "the disk %s is the boot disk of the instance %s, "+
			"which the rack does not detach; set another boot disk first",
			disk.Name, instance.Name)
	}
	return nil, instanceRefusal("detach", disk, instance, fmt.Errorf("detach disk: %w", why))
}
