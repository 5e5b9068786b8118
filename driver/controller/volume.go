package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
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
		return nil, c.changes.unlessOpen(spec.created(""), err)
	}
	release, err := c.changes.hold(flight.DiskCreated, spec.diskName())
	if err != nil {
		return nil, err
	}
	defer release()
	disk, err := spec.create(ctx)
	if err != nil {
		return nil, c.changes.unlessOpen(spec.created(""), err)
	}
	c.changes.learn(spec.created(disk.Id))
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
	err := remove(ctx, &c.changes, change{event: flight.DiskCreated, id: string(id)}, c.Rack.Disk,
		func(d *oxide.Disk) oxide.Name { return d.Name },
		func() error { return c.confirmDiskGone(ctx, id) }, c.deleteDisk)
	if err != nil {
		return nil, c.changes.unlessOpen(diskDeleted(id), err)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

func volumeIDMissing() error {
	return csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
}

// deleteDisk deletes a disk that was just read, if this driver made it and no instance has it.
func (c *Service) deleteDisk(ctx context.Context, look rack.Look, disk *oxide.Disk) error {
	const doing = "delete disk"
	if err := notOurs("disk", rack.DiskText(disk), rack.ForeignDisk(disk, c.ClusterID),
		"volume the reclaim policy"); err != nil {
		return err
	}
	if rack.InstanceOf(disk) != "" {
		return diskAttached(disk, rack.InstanceOf(disk))
	}
	if disk.State.State() == oxide.DiskStateStateFaulted {
		// The state of a faulted disk names no instance, even if one has it. As the rack attaches no
		// faulted disk, the list of holders is still valid if the next look finds the disk faulted.
		holders, err := c.Rack.Holders(ctx, disk.Id)
		switch {
		case err != nil:
			return err
		case len(holders) > 0:
			return diskAttached(disk, holders[0])
		}
		look = rack.Looking()
		if again, err := c.Rack.Disk(ctx, oxide.NameOrId(disk.Id)); err != nil {
			return err
		} else if again.State.State() != oxide.DiskStateStateFaulted {
			return diskBusy(again)
		}
	}
	id := oxide.NameOrId(disk.Id)
	record, err := c.request(ctx, doing, look, diskDeleted(id), func(ctx context.Context) error {
		return c.Rack.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: id})
	})
	switch {
	case err == nil:
		record.End(nil, flight.Fields{Disk: string(disk.Name)})
		return nil
	case rack.NotFound(err), rack.Refused(err):
		return c.explainRefusedDelete(ctx, id, err)
	}
	return rack.Error(ctx, doing, err)
}

func (c *Service) confirmDiskGone(ctx context.Context, id oxide.NameOrId) error {
	return diskDeleted(id).confirmed(ctx, c.Rack.DiskGone(ctx, id))
}

func (c *Service) explainRefusedDelete(ctx context.Context, id oxide.NameOrId, why error) error {
	disk, err := c.Rack.Disk(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return c.confirmDiskGone(ctx, id) // deleted meanwhile
	case err != nil:
		return err
	case rack.InstanceOf(disk) != "":
		return diskAttached(disk, rack.InstanceOf(disk))
	case disk.State.State() == oxide.DiskStateStateFaulted, errors.Is(why, oxide.ErrConflict):
		return rack.Error(ctx, "delete disk", why)
	}
	return diskBusy(disk)
}

func diskAttached(d *oxide.Disk, instance string) error {
	return csierr.New(csierr.DiskAttached, "the disk %s is %s at the instance "+
		"%s; unpublish the volume first", rack.DiskText(d), d.State.State(), instance)
}

func diskBusy(d *oxide.Disk) error {
	if err := checkImported(d); err != nil {
		return err
	}
	return csierr.New(csierr.DiskBusy, "the rack is busy with the disk %s, which is %s; repeat "+
		"the call later", rack.DiskText(d), d.State.State())
}

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
	look := rack.Looking()
	source, err := v.source(ctx)
	switch {
	case source.gone:
		return v.unlessThere(ctx, err) // the disk may have been made while the source existed
	case err != nil:
		return nil, err
	}
	sizeBytes, err := v.Range.DiskSize(source.floorBytes, v.Parameters.Largest())
	if err != nil {
		return nil, err
	}
	world, err := v.Rack.World(ctx)
	if err != nil {
		return nil, err
	}
	var disk *oxide.Disk
	record, err := v.request(ctx, doing, look, v.created(""), func(ctx context.Context) (err error) {
		disk, err = v.Rack.DiskCreate(ctx, oxide.DiskCreateParams{
			Project: oxide.NameOrId(world.Project),
			Body: &oxide.DiskCreate{
				Name:        oxide.Name(v.diskName()),
				Description: v.tag(source).Description(),
				Size:        oxide.ByteCount(sizeBytes),
				DiskBackend: v.backend(),
			},
		})
		if err != nil {
			return err
		}
		return v.checkAnswer(doing, world, disk, sizeBytes)
	})
	switch {
	case err == nil:
		record.End(nil, flight.Fields{Volume: disk.Id})
		return v.unlessFaulted(ctx, disk)
	case !rack.Definite(err):
		return v.resolveCreate(ctx, err)
	case errors.Is(err, oxide.ErrObjectAlreadyExists),
		errors.Is(err, oxide.ErrInsufficientCapacity):
		// The rack checks the quota before the name, so a repeated create may get either error.
		return v.existing(ctx, err)
	case rack.Refused(err) && v.hasSource():
		return nil, source.explainRefusal(world, rack.Error(ctx, doing, err))
	case rack.NotFound(err) && !v.hasSource():
		return v.unlessThere(ctx, csierr.Coded(codes.NotFound, csierr.ProjectNotFound, "this token "+
			"sees no project with the name or id in OXIDE_PROJECT"))
	}
	return v.unlessThere(ctx, rack.Error(ctx, doing, err))
}

// unlessThere returns a final error only if the project has no disk of the name. An earlier call,
// of whatever process, may have made one, and the CO forgets it after a final error.
func (v volumeSpec) unlessThere(ctx context.Context, why error) (*oxide.Disk, error) {
	if _, err := v.Rack.LookAtWorld(ctx); err != nil {
		return nil, retryLater(why)
	}
	disk, err := v.existing(ctx, nil)
	if csierr.IsNotFound(err) || csierr.IsAlreadyExists(err) {
		return nil, why
	}
	return disk, err
}

// resolveCreate reads the disk by its name to find out whether a create that the rack has not
// answered was done. A disk with the name that does not match the spec existed before.
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

// existing returns the disk that already has the spec's name, if it is what the spec asks for. why
// is the rack's refusal to create it, nil if the driver has not tried. As there may be a disk that
// an earlier call has made, only an error that says whose disk has the name is final.
func (v volumeSpec) existing(ctx context.Context, why error) (*oxide.Disk, error) {
	disk, err := v.Rack.DiskNamed(ctx, v.diskName())
	switch gone := csierr.IsNotFound(err); {
	case gone && why == nil:
		return nil, err
	case gone && errors.Is(why, oxide.ErrInsufficientCapacity):
		return nil, rack.Error(ctx, "create disk", why)
	case gone:
		// The rack undid another create, or somebody deleted the disk.
		return nil, csierr.New(csierr.DiskBusy, "the disk %s existed and is gone; repeat the call",
			v.diskName())
	case err != nil:
		return nil, retryLater(err)
	}
	if difference := v.difference(disk); difference != "" {
		return nil, csierr.New(csierr.VolumeExists, "the name belongs to the disk %s, which "+
			"%s", rack.DiskText(disk), difference)
	}
	if deleted, until := v.changes.latest(diskDeleted(oxide.NameOrId(disk.Id))); !until.IsZero() {
		return nil, mayCome(deleted)
	}
	v.created("").confirm(ctx, flight.Fields{Volume: disk.Id})
	return readyDisk(ctx, v.Rack, disk)
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
		return nil, csierr.Coded(codes.Aborted, csierr.DiskFaulted, "the rack reports the disk %s as "+
			"faulted, and no CO has its id; delete it on the rack", rack.DiskText(disk))
	}
	return disk, nil
}

func diskFaulted(d *oxide.Disk) error {
	return csierr.New(csierr.DiskFaulted, "the rack reports the disk %s as faulted; delete the "+
		"volume, or ask the rack's operator", rack.DiskText(d))
}

func (v volumeSpec) checkAnswer(doing string, world rack.World, d *oxide.Disk,
	sizeBytes int64) error {
	if err := rack.ValidateDisk(doing, d); err != nil {
		return err
	}
	// These are the states that a disk may have in the response to its own create.
	states := []oxide.DiskStateState{oxide.DiskStateStateCreating, oxide.DiskStateStateDetached,
		oxide.DiskStateStateFaulted}
	switch state := d.State.State(); {
	case d.ProjectId != world.Project:
		return rack.InvalidResponse(doing, "the new disk is in the project %.80q", d.ProjectId)
	case string(d.Name) != v.diskName():
		return rack.InvalidResponse(doing, "asked for %s and got %.80q", v.diskName(), d.Name)
	case int64(d.Size) != sizeBytes:
		return rack.InvalidResponse(doing, "asked for %s and got %s",
			volume.SizeText(sizeBytes), volume.SizeText(int64(d.Size)))
	case !slices.Contains(states, state):
		return rack.InvalidResponse(doing, "the new disk is %s", state)
	}
	if difference := v.difference(d); difference != "" {
		return rack.InvalidResponse(doing, "the new disk %s", difference)
	}
	return nil
}

// unlessFaulted returns a disk that this call has made. It deletes a faulted disk, because the CO
// does not get its id.
func (v volumeSpec) unlessFaulted(ctx context.Context, d *oxide.Disk) (*oxide.Disk, error) {
	if d.State.State() != oxide.DiskStateStateFaulted {
		return d, nil
	}
	if err := v.deleteDisk(ctx, rack.Looking(), d); err != nil {
		return nil, retryLater(err)
	}
	return nil, csierr.Coded(codes.Internal, csierr.DiskFaulted, "the rack made the disk %s faulted; "+
		"it is deleted again: repeat the call, or ask the rack's operator", rack.DiskText(d))
}

const (
	// longestWait is how long a call waits for a disk to leave a transitional state.
	longestWait = 30 * time.Second
	// answerMargin is the part of the caller's time that is reserved for the answer.
	answerMargin = 500 * time.Millisecond
)

// awaitDisk reads a disk again while it is in a transitional state, until the caller's time is
// nearly up, and returns the disk as it was read last.
func awaitDisk(ctx context.Context, client *rack.Client, disk *oxide.Disk,
	transitional ...oxide.DiskStateState) (*oxide.Disk, error) {
	end := time.Now().Add(longestWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerMargin).Before(end) {
		end = deadline.Add(-answerMargin)
	}
	backoff := async.Backoff{Pause: 100 * time.Millisecond, Max: 2 * time.Second, End: end}
	for slices.Contains(transitional, disk.State.State()) {
		again, err := backoff.Wait(ctx)
		switch {
		case err != nil:
			return nil, rack.Error(ctx, "wait for disk", err)
		case !again:
			return disk, nil
		}
		if disk, err = client.Disk(ctx, oxide.NameOrId(disk.Id)); err != nil {
			return nil, err
		}
	}
	return disk, nil
}

// volume converts a disk to CSI. Everything comes from the disk, so that every call describes a
// volume alike. Only CreateVolume names an instance, because no disk shows its placement.
func (c *Service) volume(d *oxide.Disk) *csi.Volume {
	v := &csi.Volume{
		VolumeId:           d.Id,
		CapacityBytes:      int64(d.Size),
		VolumeContext:      volumeContext(d),
		AccessibleTopology: volume.AccessibleTopologies(c.Topology, nil),
	}
	if d.SnapshotId != "" {
		v.ContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: d.SnapshotId},
		}}
	}
	return v
}

// volumeContext includes the id as well as the name, so that attributes that were copied to another
// volume are detected.
func volumeContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
	}
	if d.SnapshotId != "" { // oxide-csi-plugin claim compares it before it lets an earlier disk go
		values[volume.CtxSnapshotID] = d.SnapshotId
	}
	if m, ok := volume.ParseTag(d.Description); ok && m.MkfsOptions != "" {
		values[volume.CtxMkfsOptions] = m.MkfsOptions
	}
	return values
}

// publishContext passes to the node what the rack shows of the disk, and the disk's history from
// the ownership tag, whichever cluster's it is. The context always contains a use, because without
// one the node publishes no raw device. A disk whose tag has no use may be used in both ways. It
// has no origin in the context either, so the node reads it whole before it formats it.
func publishContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
		volume.CtxSizeBytes: strconv.FormatInt(int64(d.Size), 10),
		volume.CtxReadOnly:  strconv.FormatBool(rack.ReadOnly(d)),
		volume.CtxUse:       volume.UseBoth,
	}
	m, ok := rack.DiskTag(d)
	if !ok {
		return values
	}
	for key, value := range map[string]string{
		volume.CtxOrigin: m.Origin, volume.CtxUse: m.Use, volume.CtxFilesystemUUID: expectedUUID(d, m),
	} {
		if value != "" {
			values[key] = value
		}
	}
	if m.SourceBytes > 0 {
		values[volume.CtxSourceBytes] = strconv.FormatInt(m.SourceBytes, 10)
	}
	return values
}

// expectedUUID returns the UUID of the filesystem on a disk with that tag. It is empty if
// it is unknown: for a disk from an image or a foreign snapshot, or one that workloads write as a
// device.
func expectedUUID(d *oxide.Disk, m volume.Tag) string {
	switch {
	case m.Use != volume.UseFilesystem:
		return ""
	case m.Origin == volume.OriginBlank:
		return d.Id
	}
	return m.FilesystemUUID
}

// useProblem returns why a disk does not fit these capabilities, or "". A disk that workloads write
// as a raw device could later look blank, or like one of the driver's filesystems. So the use of a
// disk binds every cluster: the one that made the disk may format it after reading only a sample.
func useProblem(d *oxide.Disk, wanted ...*csi.VolumeCapability) string {
	m, ok := rack.DiskTag(d)
	if use := useOf(wanted); !ok || m.Use == "" || m.Use == volume.UseBoth || m.Use == use {
		return ""
	}
	words := map[string]string{volume.UseFilesystem: "filesystems (mount)", volume.UseBlock: "raw " +
		"access (block)"}
	return fmt.Sprintf("the volume of the disk %s was created for %s only; create one with the "+
		"access type that the workload needs, and copy the data", rack.DiskText(d), words[m.Use])
}

// notOurs refuses an object that this driver did not make, such as a boot disk that somebody wrote
// into a PersistentVolume. why is empty for the driver's own.
func notOurs(kind, text, why, policy string) error {
	if why == "" {
		return nil
	}
	return csierr.New(csierr.DiskNotOurs, "the %s %s %s; the driver deletes only what it made: give "+
		"the %s Retain, and delete the %s by hand on the rack", kind, text, why, policy, kind)
}
