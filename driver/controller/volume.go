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
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// CreateVolume creates the volume's disk, or finds the one that an earlier call with the same name
// created.
func (c *Service) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (
	*csi.CreateVolumeResponse, error) {
	spec, err := c.volumeSpec(req)
	if err != nil {
		return nil, err
	}
	disk, err := spec.create(ctx)
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
	if err := deleteDisk(ctx, c.Rack, c.ClusterID, id); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

func volumeIDMissing() error {
	return csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
}

// deleteDisk reads the disk before it deletes it, because a deleted disk cannot be checked any
// more.
func deleteDisk(ctx context.Context, client *rack.Client, cluster string,
	id oxide.NameOrId) error {
	disk, err := client.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return confirmDiskGone(ctx, client, id)
	case err != nil:
		return err
	}
	if err := checkOwnDisk(disk, cluster); err != nil {
		return err
	}
	if rack.InstanceOf(disk) != "" {
		return diskAttached(disk)
	}
	change := flight.Of(ctx).Begin(flight.DiskDeleted, flight.Fields{Volume: string(id)})
	err = client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
	settle(change, err, flight.Fields{Disk: string(disk.Name)})
	switch {
	case err == nil:
		return nil
	case rack.NotFound(err), rack.Refused(err):
		return explainRefusedDelete(ctx, client, id, err)
	}
	return rack.Error(ctx, "delete disk", err)
}

// confirmDiskGone verifies that a disk that the rack does not find is deleted.
func confirmDiskGone(ctx context.Context, client *rack.Client, id oxide.NameOrId) error {
	err := client.CheckProject(ctx)
	if err == nil {
		flight.Of(ctx).Confirm(flight.DiskDeleted, flight.Fields{Volume: string(id)}, flight.Fields{})
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
		"%s; unpublish the volume first", rack.DiskText(d), d.State.State(), rack.InstanceOf(d))
}

// diskBusy returns the error for a disk in a state that ends by itself, or in one of an import.
func diskBusy(d *oxide.Disk) error {
	if err := checkImported(d); err != nil {
		return err
	}
	return csierr.New(csierr.DiskBusy, "the rack is busy with the disk %s, which is %s; repeat "+
		"the call later", rack.DiskText(d), d.State.State())
}

// checkImported returns an error if the disk waits for its content or for the end of its import.
func checkImported(d *oxide.Disk) error {
	if problem := rack.ImportProblem(string(d.Name), d.State.State()); problem != "" {
		return csierr.New(csierr.DiskImporting, "%s", problem)
	}
	return nil
}

// create creates the requested disk. When the rack responds 201 the disk is complete, although
// its state in the response is still "creating".
func (v volumeSpec) create(ctx context.Context) (*oxide.Disk, error) {
	const doing = "create disk"
	source, err := v.source(ctx)
	switch {
	case source.gone:
		return v.existingWithoutSource(ctx, err)
	case err != nil:
		return nil, err
	}
	sizeBytes, err := v.Range.DiskSize(source.floorBytes, v.Parameters.Largest())
	if err != nil {
		return nil, err
	}
	change := flight.Of(ctx).Begin(flight.DiskCreated, flight.Fields{Disk: v.diskName()})
	disk, err := v.rack.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: v.rack.ProjectParam(),
		Body: &oxide.DiskCreate{
			Name:        oxide.Name(v.diskName()),
			Description: v.tag(source).Description(),
			Size:        oxide.ByteCount(sizeBytes),
			DiskBackend: v.backend(),
		},
	})
	open := rack.MaybeApplied(err)
	if err == nil {
		if err = v.checkAnswer(doing, disk, sizeBytes); err == nil {
			change.End(nil, flight.Fields{Volume: disk.Id})
			return disk, v.checkCreated(ctx, disk)
		}
		open = true
	} else {
		settle(change, err, flight.Fields{})
	}
	switch {
	case open:
		return v.resolveCreate(ctx, rack.Error(ctx, doing, err))
	case errors.Is(err, oxide.ErrObjectAlreadyExists),
		errors.Is(err, oxide.ErrInsufficientCapacity):
		// The rack checks the quota before the name, so a repeated create may get either error.
		return v.existing(ctx, err)
	case rack.Refused(err) && v.hasSource():
		return nil, source.explainRefusal(ctx, v.rack, err)
	case rack.NotFound(err) && !v.hasSource():
		return nil, csierr.Coded(codes.NotFound, csierr.ProjectNotFound, "this token sees no project "+
			"with the name or id in OXIDE_PROJECT")
	}
	return nil, rack.Error(ctx, doing, err)
}

// resolveCreate reads the disk by its name to find out whether a create without a clear response
// was done. A disk with the name that does not match the spec existed before.
func (v volumeSpec) resolveCreate(ctx context.Context, why error) (*oxide.Disk, error) {
	disk, err := v.existing(ctx, nil)
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
func (v volumeSpec) existingWithoutSource(ctx context.Context, sourceErr error) (*oxide.Disk,
	error) {
	disk, err := v.existing(ctx, nil)
	if csierr.IsNotFound(err) || csierr.IsAlreadyExists(err) {
		return nil, sourceErr
	}
	return disk, err
}

// existing returns the disk that already has the spec's name, if it is what the spec asks for. why
// is the rack's refusal to create it, nil if the driver has not tried.
func (v volumeSpec) existing(ctx context.Context, why error) (*oxide.Disk, error) {
	disk, err := v.rack.DiskView(ctx, oxide.DiskViewParams{
		Disk: oxide.NameOrId(v.diskName()), Project: v.rack.ProjectParam(),
	})
	switch {
	case rack.NotFound(err) && why == nil:
		return nil, rack.VolumeNotFound(v.diskName())
	case rack.NotFound(err) && errors.Is(why, oxide.ErrInsufficientCapacity):
		return nil, rack.Error(ctx, "create disk", why)
	case rack.NotFound(err):
		// The rack undid another create, or somebody deleted the disk.
		return nil, csierr.New(csierr.DiskBusy, "the disk %s existed and is gone; repeat the call",
			v.diskName())
	case err != nil:
		return nil, rack.Error(ctx, "read disk", err)
	}
	if err := rack.ValidateDisk("read disk", disk); err != nil {
		return nil, err
	}
	if string(disk.Name) != v.diskName() {
		return nil, rack.InvalidResponse("read disk", "asked for %s and got %.80q", v.diskName(),
			disk.Name)
	}
	if v.neverReturned(disk) {
		// An earlier call could not undo it.
		return nil, v.deleteInherited(ctx, disk)
	}
	if difference := v.difference(disk); difference != "" {
		return nil, csierr.New(csierr.VolumeExists, "the name belongs to the disk %s, which "+
			"%s", rack.DiskText(disk), difference)
	}
	flight.Of(ctx).Confirm(flight.DiskCreated, flight.Fields{Disk: v.diskName()},
		flight.Fields{Volume: disk.Id})
	return readyDisk(ctx, v.rack, disk)
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
	return fmt.Sprintf("the rack reports the disk %s as faulted; delete the volume, or ask the "+
		"rack's operator", rack.DiskText(d))
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
		return rack.InvalidResponse(doing, "asked for %s and got %s",
			volume.SizeText(sizeBytes), volume.SizeText(int64(d.Size)))
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
func (v volumeSpec) checkCreated(ctx context.Context, d *oxide.Disk) error {
	if d.State.State() == oxide.DiskStateStateFaulted {
		return newDiskFaulted(d)
	}
	want := v.Parameters.BlockSize
	if !v.hasSource() || want == 0 || want == int(d.BlockSize) {
		return nil
	}
	return v.deleteInherited(ctx, d)
}

// deleteInherited deletes a disk that was never returned to a CO. Its error names the block size to
// request, if the spec is still the one that the disk was made for. If the deletion may have failed
// the error is retryable: the next call finds the disk by its ownership tag.
func (v volumeSpec) deleteInherited(ctx context.Context, d *oxide.Disk) error {
	err := deleteDisk(ctx, v.rack, v.Cluster, oxide.NameOrId(d.Id))
	switch {
	case err == nil:
	case csierr.Retryable(err):
		return err
	default:
		return csierr.New(csierr.DiskBusy, "the disk %s inherited a block size other than the "+
			"requested one, and cannot be deleted now; repeat the call: %s", rack.DiskText(d),
			csierr.Message(err))
	}
	if want := v.Parameters.BlockSize; want != 0 && want != int(d.BlockSize) {
		return blockSizeInherited(want, int(d.BlockSize))
	}
	return csierr.New(csierr.DiskBusy, "the disk %s, left by an earlier call with another block "+
		"size, is deleted; repeat the call", rack.DiskText(d))
}
