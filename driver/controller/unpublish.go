package controller

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
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
	a := attachment{Service: c, Disk: disk, Instance: instance}
	for {
		if err := a.lookAndDetach(ctx); err != nil {
			return nil, c.changes.unlessOpen(a.detached(), err)
		}
		late, err := a.changes.await(ctx, a.attached())
		if err != nil {
			return nil, err
		}
		if !late {
			return &csi.ControllerUnpublishVolumeResponse{}, nil
		}
	}
}

// lookAndDetach reads the disk and detaches it if the attachment's instance has it or, if the
// attachment names no instance, from whichever has it. It requests no detach from an instance that
// does not have the disk. A rack ignores such a request (A37), but a faulty one could take the disk
// away from a running workload of another instance. If the disk moves between the read and the
// detach, only the rack can refuse.
func (a attachment) lookAndDetach(ctx context.Context) error {
	look := rack.Looking()
	disk, err := a.Rack.Disk(ctx, a.Disk)
	switch {
	case csierr.IsNotFound(err):
		return a.Rack.DiskGone(ctx, a.Disk)
	case err != nil:
		return err
	case a.Instance == "":
		actual := a
		actual.Instance = oxide.NameOrId(rack.InstanceOf(disk))
		return actual.detachEverywhere(ctx, look, disk)
	case !a.has(disk):
		return a.confirmDetached(ctx, disk)
	}
	_, err = a.detach(ctx, look, nil)
	return err
}

// detachEverywhere detaches a disk from the attachment's instance, which is the one that has it, or
// empty if none has it, and verifies that no instance has it then.
func (a attachment) detachEverywhere(ctx context.Context, look rack.Look, disk *oxide.Disk) error {
	var err error
	if a.Instance != "" {
		disk, err = a.detach(ctx, look, nil)
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

// detach detaches the disk and verifies that the instance does not have it any more. It returns
// the disk as it was read last, nil if it is gone. refused is as in requestAttach.
func (a attachment) detach(ctx context.Context, look rack.Look, refused error) (disk *oxide.Disk,
	err error) {
	const doing = "detach disk"
	record, err := a.request(ctx, doing, look, a.detached(), func(ctx context.Context) (err error) {
		disk, err = a.Rack.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: a.Instance,
			Body:     &oxide.DiskPath{Disk: a.Disk},
		})
		switch {
		case err != nil:
			return err
		case disk.Id != string(a.Disk):
			return rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", a.Disk, disk.Id)
		case a.has(disk) && disk.State.State() != oxide.DiskStateStateDetaching:
			return rack.InvalidResponse(doing, "the disk %s is still %s", rack.DiskText(disk),
				disk.State.State())
		}
		return rack.ValidateDisk(doing, disk)
	})
	switch {
	case rack.NotFound(err), rack.Refused(err):
		look = rack.Looking()
		disk, err = a.explainRefusedDetach(ctx, err)
		if csierr.Has(err, csierr.InstanceMustBeStopped) && refused == nil {
			return a.detach(ctx, look, err)
		}
		return disk, err
	case err != nil:
		return nil, rack.Error(ctx, doing, err)
	}
	disk, err = awaitDisk(ctx, a.Rack, disk, oxide.DiskStateStateDetaching)
	switch {
	case csierr.IsNotFound(err):
		return nil, a.Rack.DiskGone(ctx, a.Disk)
	case err != nil:
		return nil, err
	case disk.State.State() == oxide.DiskStateStateDetaching:
		return nil, csierr.New(csierr.DeadlineExceeded, "the rack is still detaching the disk %s; "+
			"repeat the call", rack.DiskText(disk))
	case a.has(disk):
		return nil, rack.InvalidResponse(doing, "the disk %s is still %s", rack.DiskText(disk),
			disk.State.State())
	}
	if err = a.checkDetached(ctx, disk); err == nil {
		record.End(nil, flight.Fields{Disk: string(disk.Name)})
	}
	return disk, err
}

// confirmDetached verifies that an instance does not have a disk, and notes a detach of which the
// outcome was unknown.
func (a attachment) confirmDetached(ctx context.Context, disk *oxide.Disk) error {
	err := a.checkDetached(ctx, disk)
	if err == nil {
		a.detached().confirm(ctx, flight.Fields{Disk: string(disk.Name)})
	}
	return err
}

// statesWithoutInstance are the states in which no instance has the disk: the rack enters them only
// from detached, or before the first attach.
var statesWithoutInstance = []oxide.DiskStateState{
	oxide.DiskStateStateDetached, oxide.DiskStateStateCreating, oxide.DiskStateStateMaintenance,
	oxide.DiskStateStateImportReady, oxide.DiskStateStateImportingFromUrl,
	oxide.DiskStateStateImportingFromBulkWrites, oxide.DiskStateStateFinalizing,
	oxide.DiskStateStateDestroyed,
}

// checkDetached verifies that an instance does not have a disk whose state names no instance. A
// state such as faulted proves nothing, so the instance's own list of disks decides.
func (a attachment) checkDetached(ctx context.Context, disk *oxide.Disk) error {
	if rack.InstanceOf(disk) != "" || slices.Contains(statesWithoutInstance, disk.State.State()) {
		return nil
	}
	disks, err := a.Rack.InstanceDisks(ctx, a.Instance)
	switch {
	case csierr.IsNotFound(err):
		// The instance is deleted, or this token may not see the project.
		return a.Rack.Gone(ctx, func() error {
			_, err := a.Rack.InstanceDisks(ctx, a.Instance)
			return err
		})
	case err != nil:
		return err
	case slices.ContainsFunc(disks, func(d oxide.Disk) bool { return d.Id == disk.Id }):
		return csierr.New(csierr.DiskFaulted, "the disk %s is %s and still among those of the instance "+
			"%s, so it is not known to be detached; stop the instance, or ask the rack's "+
			"operator", rack.DiskText(disk), disk.State.State(), a.Instance)
	}
	return nil
}

// explainRefusedDetach finds the reason of a refusal in the state of the disk and the instance. A
// disk that is gone, or attached elsewhere, is detached from this instance.
func (a attachment) explainRefusedDetach(ctx context.Context, why error) (*oxide.Disk, error) {
	disk, err := a.Rack.Disk(ctx, a.Disk)
	switch {
	case csierr.IsNotFound(err):
		return nil, a.Rack.DiskGone(ctx, a.Disk)
	case err != nil:
		return nil, err
	case !a.has(disk):
		return disk, a.confirmDetached(ctx, disk)
	case disk.State.State() != oxide.DiskStateStateAttached:
		return nil, diskBusy(disk)
	}
	instance, err := a.Rack.Instance(ctx, a.Instance)
	switch {
	case csierr.IsNotFound(err):
		return nil, csierr.New(csierr.InstanceNotFound, "the rack reports that the disk %s is attached "+
			"to the instance %s, and that there is no such instance; the disk is not known to be detached",
			rack.DiskText(disk), a.Instance)
	case err != nil:
		return nil, err
	case instance.BootDiskId == disk.Id:
		return nil, csierr.New(csierr.BootDisk, "the disk %s is the boot disk of the instance %s, "+
			"which the rack does not detach; set another boot disk first",
			rack.DiskText(disk), rack.InstanceText(instance))
	}
	return nil, instanceRefusal("detach", disk, instance, fmt.Errorf("detach disk: %w", why))
}
