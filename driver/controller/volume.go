package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// CreateVolume makes the volume's disk, or finds the one that an earlier call of the same name
// made.
func (c *Service) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (
	*csi.CreateVolumeResponse, error) {
	order, err := c.volumeOrder(req)
	if err != nil {
		return nil, err
	}
	disk, err := c.createDisk(ctx, order)
	if err != nil {
		return nil, err
	}
	volume := c.volume(disk)
	volume.ContentSource, volume.AccessibleTopology = req.GetVolumeContentSource(), order.Topology
	return &csi.CreateVolumeResponse{Volume: volume}, nil
}

// DeleteVolume deletes the volume's disk, if this driver made it. A disk that is already gone is a
// success, as the spec asks; its snapshots stay.
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

// deleteDisk reads the disk before it deletes it: of what is deleted nothing can be read any more.
func (c *Service) deleteDisk(ctx context.Context, id oxide.NameOrId) error {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return c.Rack.CheckProject(ctx)
	case err != nil:
		return err
	}
	if err := c.checkOwnDisk(disk); err != nil {
		return err
	}
	if rack.Holder(disk) != "" {
		return diskAttached(disk)
	}
	err = c.Rack.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
	switch {
	case err == nil:
		return nil
	case rack.Unknown(err), rack.Refused(err):
		return c.refusedDelete(ctx, id, err)
	}
	return rack.Error(ctx, "delete disk", err)
}

// refusedDelete finds the reason of a refusal in the disk's state.
func (c *Service) refusedDelete(ctx context.Context, id oxide.NameOrId, why error) error {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return c.Rack.CheckProject(ctx) // it went while we asked
	case err != nil:
		return err
	case rack.Holder(disk) != "":
		return diskAttached(disk)
	case disk.State.State() == oxide.DiskStateStateFaulted, errors.Is(why, oxide.ErrConflict):
		return rack.Error(ctx, "delete disk", why)
	}
	return diskBusy(disk)
}

func diskAttached(d *oxide.Disk) error {
	return csierr.New(csierr.DiskAttached, "the disk %s is %s at the instance "+
		"%s; unpublish the volume first", d.Name, d.State.State(), rack.Holder(d))
}

func diskBusy(d *oxide.Disk) error {
	return csierr.New(csierr.DiskBusy, "the rack is at work on the disk %s (%s); repeat "+
		"the call later", d.Name, d.State.State())
}

// createDisk makes the disk of an order. The 201 to our own request is the end of the rack's work,
// although the disk in it still says "creating".
func (c *Service) createDisk(ctx context.Context, order volumeOrder) (*oxide.Disk, error) {
	const doing = "create disk"
	source, err := c.volumeSource(ctx, order)
	switch {
	case source.gone:
		return c.madeBefore(ctx, order, err)
	case err != nil:
		return nil, err
	}
	sizeBytes, err := order.Range.DiskSize(source.floorBytes, order.Parameters.Largest())
	if err != nil {
		return nil, err
	}
	disk, err := c.Rack.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: c.Rack.ProjectParam(),
		Body: &oxide.DiskCreate{
			Name:        oxide.Name(order.diskName()),
			Description: order.mark(source).Description(),
			Size:        oxide.ByteCount(sizeBytes),
			DiskBackend: order.backend(),
		},
	})
	open := rack.Undecided(err)
	if err == nil {
		if err = order.checkAnswer(doing, disk, sizeBytes); err == nil {
			return disk, c.checkMade(ctx, order, disk)
		}
		open = true
	}
	switch {
	case open:
		return c.createdAfterAll(ctx, order, rack.Error(ctx, doing, err))
	case errors.Is(err, oxide.ErrObjectAlreadyExists),
		errors.Is(err, oxide.ErrInsufficientCapacity):
		// The rack counts the quota before it looks at the name: a repeated create may meet either.
		return c.existingDisk(ctx, order, err)
	case rack.Refused(err) && order.hasSource():
		return nil, c.refusedSource(ctx, source, err)
	case rack.Unknown(err) && !order.hasSource():
		return nil, csierr.Coded(codes.NotFound, csierr.ProjectNotFound, "the rack shows this token no "+
			"project of the name or id in OXIDE_PROJECT")
	}
	return nil, rack.Error(ctx, doing, err)
}

// createdAfterAll is for an answer that leaves open whether the disk was made. Its name says so: a
// disk that has it and is not the order's was there before.
func (c *Service) createdAfterAll(ctx context.Context, order volumeOrder, why error) (
	*oxide.Disk, error) {
	disk, err := c.existingDisk(ctx, order, nil)
	switch status.Code(err) {
	case codes.OK, codes.AlreadyExists, codes.InvalidArgument:
		return disk, err
	case codes.NotFound:
		return nil, comeBack(why)
	}
	return nil, comeBack(err)
}

// madeBefore is for a source that is gone: the disk may have been made while it was there, and then
// a repeated create has to find it.
func (c *Service) madeBefore(ctx context.Context, order volumeOrder, sourceErr error) (
	*oxide.Disk, error) {
	disk, err := c.existingDisk(ctx, order, nil)
	if csierr.IsNotFound(err) || csierr.IsAlreadyExists(err) {
		return nil, sourceErr
	}
	return disk, err
}

// existingDisk is the disk that has the order's name already, if it is what is asked for. why is
// the rack's refusal to make it, nil when it was not asked.
func (c *Service) existingDisk(ctx context.Context, order volumeOrder, why error) (
	*oxide.Disk, error) {
	disk, err := c.Rack.DiskView(ctx, oxide.DiskViewParams{
		Disk: oxide.NameOrId(order.diskName()), Project: c.Rack.ProjectParam(),
	})
	switch {
	case rack.Unknown(err) && why == nil:
		return nil, rack.VolumeNotFound(order.diskName())
	case rack.Unknown(err) && errors.Is(why, oxide.ErrInsufficientCapacity):
		return nil, rack.Error(ctx, "create disk", why)
	case rack.Unknown(err):
		// The rack undid a create that was at work, or somebody deleted the disk.
		return nil, csierr.New(csierr.DiskBusy, "the disk %s was there and is gone; "+
			"repeat the call", order.diskName())
	case err != nil:
		return nil, rack.Error(ctx, "read disk", err)
	}
	if err := rack.ValidateDisk("read disk", disk); err != nil {
		return nil, err
	}
	if string(disk.Name) != order.diskName() {
		return nil, rack.InvalidResponse("read disk", "asked for %s and got %.80q", order.diskName(),
			disk.Name)
	}
	if order.neverHandedOut(disk) {
		// An earlier call could not undo it.
		return nil, c.undoInherited(ctx, order, disk)
	}
	if difference := order.difference(disk); difference != "" {
		return nil, csierr.New(csierr.VolumeExists, "the name is taken by the disk "+
			"%s (%s), which %s", disk.Name, disk.Id, difference)
	}
	return c.readyDisk(ctx, disk)
}

// readyDisk waits while another request makes the disk.
func (c *Service) readyDisk(ctx context.Context, disk *oxide.Disk) (*oxide.Disk, error) {
	disk, err := c.await(ctx, disk, oxide.DiskStateStateCreating)
	switch {
	case csierr.IsNotFound(err):
		return nil, csierr.New(csierr.DiskBusy, "the rack has undone the making of the "+
			"disk; repeat the call")
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

// newDiskFaulted is for a disk that the call itself has made.
func newDiskFaulted(d *oxide.Disk) error {
	return csierr.Coded(codes.Internal, csierr.DiskFaulted, "%s", faultText(d))
}

func faultText(d *oxide.Disk) string {
	return fmt.Sprintf("the rack reports the disk %s (%s) as faulted; delete the volume, or ask the "+
		"rack's operator", d.Name, d.Id)
}

// statesWhenMade are those of a disk in the answer to its own create.
var statesWhenMade = []oxide.DiskStateState{
	oxide.DiskStateStateCreating, oxide.DiskStateStateDetached, oxide.DiskStateStateFaulted,
}

// checkAnswer compares the rack's answer to a create with the order.
func (o volumeOrder) checkAnswer(doing string, d *oxide.Disk, sizeBytes int64) error {
	if err := rack.ValidateDisk(doing, d); err != nil {
		return err
	}
	expected := o
	if o.hasSource() {
		expected.Parameters.BlockSize = 0 // inherited, and looked at last
	}
	switch state := d.State.State(); {
	case string(d.Name) != o.diskName():
		return rack.InvalidResponse(doing, "asked for %s and got %.80q", o.diskName(), d.Name)
	case int64(d.Size) != sizeBytes:
		return rack.InvalidResponse(doing, "asked for %d bytes and got %d", sizeBytes, d.Size)
	case !slices.Contains(statesWhenMade, state):
		return rack.InvalidResponse(doing, "the new disk is %s", state)
	}
	if difference := expected.difference(d); difference != "" {
		return rack.InvalidResponse(doing, "the new disk %s", difference)
	}
	return nil
}

// checkMade refuses a faulted disk, and undoes one whose source has other blocks than were asked
// for. Only now can that be known: a snapshot does not show its block size, and its disk was gone.
func (c *Service) checkMade(ctx context.Context, order volumeOrder, d *oxide.Disk) error {
	if d.State.State() == oxide.DiskStateStateFaulted {
		return newDiskFaulted(d)
	}
	want := order.Parameters.BlockSize
	if !order.hasSource() || want == 0 || want == int(d.BlockSize) {
		return nil
	}
	return c.undoInherited(ctx, order, d)
}

// undoInherited deletes a disk that was never handed out, and says what the order has to change, if
// it is still the order that the disk was made for. Without a sure end the caller has to come back:
// the next call finds the disk by its mark.
func (c *Service) undoInherited(ctx context.Context, order volumeOrder, d *oxide.Disk) error {
	err := c.deleteDisk(ctx, oxide.NameOrId(d.Id))
	switch {
	case err == nil:
	case csierr.Retryable(err):
		return err
	default:
		return csierr.New(csierr.DiskBusy, "the disk %s (%s) inherited other blocks than "+
			"were asked for, and cannot be deleted now; repeat the call: %s", d.Name, d.Id,
			csierr.Message(err))
	}
	if want := order.Parameters.BlockSize; want != 0 && want != int(d.BlockSize) {
		return blockSizeInherited(want, int(d.BlockSize))
	}
	return csierr.New(csierr.DiskBusy, "the disk %s (%s) was left by an earlier call that "+
		"asked for other blocks, and is deleted; repeat the call", d.Name, d.Id)
}
