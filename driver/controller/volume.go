package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// CreateVolume creates the volume's disk, or finds the one that an earlier call with the same name
// created.
func (c *Service) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (
	*csi.CreateVolumeResponse, error) {
	spec, err := c.volumeSpec(req)
	if err != nil {
		return nil, err
	}
	disk, err := c.createDisk(ctx, spec)
	if err != nil {
		return nil, err
	}
	volume := c.volume(disk)
	volume.ContentSource, volume.AccessibleTopology = req.GetVolumeContentSource(), spec.Topology
	return &csi.CreateVolumeResponse{Volume: volume}, nil
}

// DeleteVolume deletes the volume's disk if this driver made it. A disk that is already gone is a
// success, as CSI demands. Snapshots of the disk remain.
func (c *Service) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (
	*csi.DeleteVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, volumeIDMissing()
	}
	id, ok := rack.ID(req.GetVolumeId())
	if !ok {
		return &csi.DeleteVolumeResponse{}, nil
	}
	if err := c.deleteDisk(ctx, id); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

func volumeIDMissing() error {
	return csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
}

// deleteDisk reads the disk before it deletes it, because a deleted disk cannot be checked any
// more.
func (c *Service) deleteDisk(ctx context.Context, id oxide.NameOrId) error {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return confirmDiskGone(ctx, c.Rack, id)
	case err != nil:
		return err
	}
	if err := checkOwnDisk(disk, c.ClusterID); err != nil {
		return err
	}
	if rack.InstanceOf(disk) != "" {
		return diskAttached(disk)
	}
	change := flight.Begin(ctx, flight.DiskDeleted, flight.Fields{Volume: string(id)})
	err = c.Rack.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
	settle(change, err, flight.Fields{Disk: string(disk.Name)})
	switch {
	case err == nil:
		return nil
	case rack.NotFound(err), rack.Refused(err):
		return explainRefusedDelete(ctx, c.Rack, id, err)
	}
	return rack.Error(ctx, "delete disk", err)
}

// confirmDiskGone verifies that a disk that the rack does not find is deleted.
func confirmDiskGone(ctx context.Context, client *rack.Client, id oxide.NameOrId) error {
	err := client.CheckProject(ctx)
	if err == nil {
		flight.Confirm(ctx, flight.DiskDeleted, flight.Fields{Volume: string(id)}, flight.Fields{})
	}
	return err
}

// settle ends a change of the rack if its outcome is known.
func settle(change *flight.Change, err error, more flight.Fields) {
	if err == nil || rack.Definite(err) {
		change.End(err, more)
	}
}

// explainRefusedDelete finds the reason of a refusal in the disk's state.
func explainRefusedDelete(ctx context.Context, client *rack.Client, id oxide.NameOrId,
	why error) error {
	disk, err := client.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return confirmDiskGone(ctx, client, id) // deleted meanwhile
	case err != nil:
		return err
	case rack.InstanceOf(disk) != "":
		return diskAttached(disk)
	case disk.State.State() == oxide.DiskStateStateFaulted, errors.Is(why, oxide.ErrConflict):
		return rack.Error(ctx, "delete disk", why)
	}
	return diskBusy(disk)
}

func diskAttached(d *oxide.Disk) error {
	return csierr.New(csierr.DiskAttached, "the disk %s is %s at the instance "+
		"%s; unpublish the volume first", d.Name, d.State.State(), rack.InstanceOf(d))
}

func diskBusy(d *oxide.Disk) error {
	return csierr.New(csierr.DiskBusy, "the rack is busy with the disk %s (%s); repeat the call later",
		d.Name, d.State.State())
}

// createDisk creates the requested disk. When the rack responds 201 the disk is complete, although
// its state in the response is still "creating".
func (c *Service) createDisk(ctx context.Context, spec volumeSpec) (*oxide.Disk, error) {
	const doing = "create disk"
	source, err := spec.source(ctx, c.Rack)
	switch {
	case source.gone:
		return c.existingWithoutSource(ctx, spec, err)
	case err != nil:
		return nil, err
	}
	sizeBytes, err := spec.Range.DiskSize(source.floorBytes, spec.Parameters.Largest())
	if err != nil {
		return nil, err
	}
	change := flight.Begin(ctx, flight.DiskCreated, flight.Fields{Disk: spec.diskName()})
	disk, err := c.Rack.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: c.Rack.ProjectParam(),
		Body: &oxide.DiskCreate{
			Name:        oxide.Name(spec.diskName()),
			Description: spec.tag(source).Description(),
			Size:        oxide.ByteCount(sizeBytes),
			DiskBackend: spec.backend(),
		},
	})
	open := rack.MaybeApplied(err)
	if err == nil {
		if err = spec.checkAnswer(doing, disk, sizeBytes); err == nil {
			change.End(nil, flight.Fields{Volume: disk.Id})
			return disk, c.checkCreated(ctx, spec, disk)
		}
		open = true
	} else {
		settle(change, err, flight.Fields{})
	}
	switch {
	case open:
		return c.resolveCreate(ctx, spec, rack.Error(ctx, doing, err))
	case errors.Is(err, oxide.ErrObjectAlreadyExists),
		errors.Is(err, oxide.ErrInsufficientCapacity):
		// The rack checks the quota before the name, so a repeated create may get either error.
		return c.existingDisk(ctx, spec, err)
	case rack.Refused(err) && spec.hasSource():
		return nil, source.explainRefusal(ctx, c.Rack, err)
	case rack.NotFound(err) && !spec.hasSource():
		return nil, csierr.Coded(codes.NotFound, csierr.ProjectNotFound, "this token sees no project "+
			"with the name or id in OXIDE_PROJECT")
	}
	return nil, rack.Error(ctx, doing, err)
}

// resolveCreate reads the disk by its name to find out whether a create without a clear response
// was done. A disk with the name that does not match the spec existed before.
func (c *Service) resolveCreate(ctx context.Context, spec volumeSpec, why error) (
	*oxide.Disk, error) {
	disk, err := c.existingDisk(ctx, spec, nil)
	switch status.Code(err) {
	case codes.OK, codes.AlreadyExists, codes.InvalidArgument:
		return disk, err
	case codes.NotFound:
		return nil, retryLater(why)
	}
	return nil, retryLater(err)
}

// existingWithoutSource handles a source that is gone: the disk may have been created before, and
// then a repeated create has to find it.
func (c *Service) existingWithoutSource(ctx context.Context, spec volumeSpec, sourceErr error) (
	*oxide.Disk, error) {
	disk, err := c.existingDisk(ctx, spec, nil)
	if csierr.IsNotFound(err) || csierr.IsAlreadyExists(err) {
		return nil, sourceErr
	}
	return disk, err
}

// existingDisk returns the disk that already has the spec's name, if it matches the spec. why is
// the rack's refusal to create it, nil if the driver has not tried.
func (c *Service) existingDisk(ctx context.Context, spec volumeSpec, why error) (
	*oxide.Disk, error) {
	disk, err := c.Rack.DiskView(ctx, oxide.DiskViewParams{
		Disk: oxide.NameOrId(spec.diskName()), Project: c.Rack.ProjectParam(),
	})
	switch {
	case rack.NotFound(err) && why == nil:
		return nil, rack.VolumeNotFound(spec.diskName())
	case rack.NotFound(err) && errors.Is(why, oxide.ErrInsufficientCapacity):
		return nil, rack.Error(ctx, "create disk", why)
	case rack.NotFound(err):
		// The rack undid another create, or somebody deleted the disk.
		return nil, csierr.New(csierr.DiskBusy, "the disk %s existed and is gone; repeat the call",
			spec.diskName())
	case err != nil:
		return nil, rack.Error(ctx, "read disk", err)
	}
	if err := rack.ValidateDisk("read disk", disk); err != nil {
		return nil, err
	}
	if string(disk.Name) != spec.diskName() {
		return nil, rack.InvalidResponse("read disk", "asked for %s and got %.80q", spec.diskName(),
			disk.Name)
	}
	if spec.neverReturned(disk) {
		// An earlier call could not undo it.
		return nil, c.deleteInherited(ctx, spec, disk)
	}
	if difference := spec.difference(disk); difference != "" {
		return nil, csierr.New(csierr.VolumeExists, "the name belongs to the disk %s (%s), which "+
			"%s", disk.Name, disk.Id, difference)
	}
	flight.Confirm(ctx, flight.DiskCreated, flight.Fields{Disk: spec.diskName()},
		flight.Fields{Volume: disk.Id})
	return readyDisk(ctx, c.Rack, disk)
}

// readyDisk waits while another request creates the disk.
func readyDisk(ctx context.Context, client *rack.Client, disk *oxide.Disk) (*oxide.Disk, error) {
	disk, err := awaitDisk(ctx, client, disk, oxide.DiskStateStateCreating)
	switch {
	case csierr.IsNotFound(err):
		return nil, csierr.New(csierr.DiskBusy, "the rack did not complete the disk; repeat the call")
	case err != nil:
		return nil, err
	}
	switch disk.State.State() {
	case oxide.DiskStateStateCreating, oxide.DiskStateStateDestroyed:
		return nil, diskBusy(disk)
	case oxide.DiskStateStateFaulted:
		return nil, newDiskFaulted(disk)
	}
	return disk, nil
}

func diskFaulted(d *oxide.Disk) error {
	return csierr.New(csierr.DiskFaulted, "%s", faultText(d))
}

// newDiskFaulted is the error for a disk that the call itself has created.
func newDiskFaulted(d *oxide.Disk) error {
	return csierr.Coded(codes.Internal, csierr.DiskFaulted, "%s", faultText(d))
}

func faultText(d *oxide.Disk) string {
	return fmt.Sprintf("the rack reports the disk %s (%s) as faulted; delete the volume, or ask the "+
		"rack's operator", d.Name, d.Id)
}

// statesOfNewDisk are the states that a disk may have in the response to its own create.
var statesOfNewDisk = []oxide.DiskStateState{
	oxide.DiskStateStateCreating, oxide.DiskStateStateDetached, oxide.DiskStateStateFaulted,
}

// checkAnswer compares the rack's response to a create with the spec.
func (v volumeSpec) checkAnswer(doing string, d *oxide.Disk, sizeBytes int64) error {
	if err := rack.ValidateDisk(doing, d); err != nil {
		return err
	}
	expected := v
	if v.hasSource() {
		expected.Parameters.BlockSize = 0 // inherited; checkCreated checks it
	}
	switch state := d.State.State(); {
	case string(d.Name) != v.diskName():
		return rack.InvalidResponse(doing, "asked for %s and got %.80q", v.diskName(), d.Name)
	case int64(d.Size) != sizeBytes:
		return rack.InvalidResponse(doing, "asked for %d bytes and got %d", sizeBytes, d.Size)
	case !slices.Contains(statesOfNewDisk, state):
		return rack.InvalidResponse(doing, "the new disk is %s", state)
	}
	if difference := expected.difference(d); difference != "" {
		return rack.InvalidResponse(doing, "the new disk %s", difference)
	}
	return nil
}

// checkCreated refuses a faulted disk, and deletes one that inherited a block size other than the
// requested one. Only now is that known: a snapshot does not show its block size, and its disk was
// gone.
func (c *Service) checkCreated(ctx context.Context, spec volumeSpec, d *oxide.Disk) error {
	if d.State.State() == oxide.DiskStateStateFaulted {
		return newDiskFaulted(d)
	}
	want := spec.Parameters.BlockSize
	if !spec.hasSource() || want == 0 || want == int(d.BlockSize) {
		return nil
	}
	return c.deleteInherited(ctx, spec, d)
}

// deleteInherited deletes a disk that was never returned to a CO. Its error names the block size to
// request, if the spec is still the one that the disk was made for. If the deletion may have failed
// the error is retryable: the next call finds the disk by its ownership tag.
func (c *Service) deleteInherited(ctx context.Context, spec volumeSpec, d *oxide.Disk) error {
	err := c.deleteDisk(ctx, oxide.NameOrId(d.Id))
	switch {
	case err == nil:
	case csierr.Retryable(err):
		return err
	default:
		return csierr.New(csierr.DiskBusy, "the disk %s (%s) inherited a block size other than the "+
			"requested one, and cannot be deleted now; repeat the call: %s", d.Name, d.Id,
			csierr.Message(err))
	}
	if want := spec.Parameters.BlockSize; want != 0 && want != int(d.BlockSize) {
		return blockSizeInherited(want, int(d.BlockSize))
	}
	return csierr.New(csierr.DiskBusy, "the disk %s (%s), left by an earlier call with another block "+
		"size, is deleted; repeat the call", d.Name, d.Id)
}
