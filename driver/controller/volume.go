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

// CreateVolume creates the volume's disk, or returns the disk that an earlier call with the same
// name created.
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

// DeleteVolume deletes the volume's disk if this cluster's driver made it. If the disk is already
// gone, the call succeeds, as CSI demands. The disk's snapshots remain.
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
		// A faulted disk's state names no instance, even if one has the disk, so search all instances.
		// The rack attaches no faulted disk, so the result holds if the disk is still faulted afterwards.
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

// create creates the disk. A 201 means that the disk is complete, even if its state is "creating".
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

// unlessThere returns the disk if an earlier call has created it, and otherwise the given error.
// The error must not be final while the disk exists, because the CO would then forget the disk.
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

// resolveCreate reads the disk by its name to find out whether the rack created it without
// answering. A disk that has the name but does not match the spec is older than the call.
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

// existing returns the disk with the spec's name if it matches the spec. The parameter why is the
// rack's refusal to create the disk because of its name or the quota, or nil. If the disk cannot be
// read, existing returns a retryable error, because an earlier call may have created the disk.
func (v volumeSpec) existing(ctx context.Context, why error) (*oxide.Disk, error) {
	disk, err := v.Rack.DiskNamed(ctx, v.diskName())
	switch gone := csierr.IsNotFound(err); {
	case gone && why == nil:
		return nil, err
	case gone && errors.Is(why, oxide.ErrInsufficientCapacity):
		return nil, rack.Error(ctx, "create disk", why)
	case gone:
		// The rack has undone another call's create, or somebody has deleted the disk.
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

// unlessFaulted deletes the new disk if it is faulted, because the CO never gets its id.
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
	longestWait = 30 * time.Second
	// A call stops waiting answerMargin before its deadline, so that the caller gets an answer.
	answerMargin = 500 * time.Millisecond
)

// awaitDisk waits until the disk leaves the transitional states, longestWait has passed, or the
// caller's deadline is near. It returns the disk as last read.
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

// volume converts a disk to a CSI volume. It uses nothing from the request, so all calls describe a
// volume alike. CreateVolume replaces the source and the topology with those of its request.
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

// volumeContext includes the disk's id, so that a later call notices another volume's attributes.
func volumeContext(d *oxide.Disk) map[string]string {
	values := map[string]string{
		volume.CtxDiskName:  string(d.Name),
		volume.CtxDiskID:    d.Id,
		volume.CtxBlockSize: strconv.Itoa(int(d.BlockSize)),
	}
	if d.SnapshotId != "" { // "claim" compares it before it releases an earlier disk
		values[volume.CtxSnapshotID] = d.SnapshotId
	}
	if m, ok := volume.ParseTag(d.Description); ok && m.MkfsOptions != "" {
		values[volume.CtxMkfsOptions] = m.MkfsOptions
	}
	return values
}

// publishContext returns what the node has to know about the disk: what the rack shows, and values
// from the ownership tag, whichever cluster wrote it. If the tag lacks the field for the use
// (filesystem, raw block or both), the context allows both, because a node refuses raw publications
// without it. If the tag has no origin, the node reads the whole disk before it formats the disk.
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

// expectedUUID returns the UUID of the filesystem on a disk with this tag. It is "" if the disk is
// from an image or a foreign snapshot, or if workloads use it as a raw device.
func expectedUUID(d *oxide.Disk, m volume.Tag) string {
	switch {
	case m.Use != volume.UseFilesystem:
		return ""
	case m.Origin == volume.OriginBlank:
		return d.Id
	}
	return m.FilesystemUUID
}

// useProblem returns why a disk does not fit these capabilities, or "". A tag of another cluster
// counts too, because a raw device with a workload's bytes may look blank, or like a filesystem, to
// a driver that reads only a sample.
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

// notOurs returns the error for the deletion of an object that this driver did not make, such as a
// boot disk that somebody wrote into a PersistentVolume. If why is "", it returns nil.
func notOurs(kind, text, why, policy string) error {
	if why == "" {
		return nil
	}
	return csierr.New(csierr.DiskNotOurs, "the %s %s %s; the driver deletes only what it made: give "+
		"the %s Retain, and delete the %s by hand on the rack", kind, text, why, policy, kind)
}
