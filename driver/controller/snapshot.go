package controller

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// CreateSnapshot takes a snapshot of the volume's disk, or returns the one that an earlier call
// with the same name took. When the rack answers, the content of the snapshot is fixed.
func (c *Service) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (
	*csi.CreateSnapshotResponse, error) {
	spec, err := c.snapshotSpec(req)
	if err != nil {
		return nil, c.changes.unlessOpen(spec.created(""), err)
	}
	release, err := c.changes.hold(flight.SnapshotCreated, spec.rackName())
	if err != nil {
		return nil, err
	}
	defer release()
	snapshot, err := spec.create(ctx)
	if err != nil {
		return nil, c.changes.unlessOpen(spec.created(""), err)
	}
	c.changes.learn(spec.created(snapshot.Id))
	return &csi.CreateSnapshotResponse{Snapshot: snapshotAnswer(snapshot)}, nil
}

// DeleteSnapshot deletes a snapshot that this cluster's driver took. If the snapshot is already
// gone, the call succeeds. Disks made from it remain.
func (c *Service) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (
	*csi.DeleteSnapshotResponse, error) {
	if req.GetSnapshotId() == "" {
		return nil, snapshotIDMissing()
	}
	id, ok := rack.ID(req.GetSnapshotId())
	if !ok {
		return &csi.DeleteSnapshotResponse{}, nil
	}
	err := remove(ctx, &c.changes, change{event: flight.SnapshotCreated, id: string(id)},
		c.Rack.Snapshot, func(s *oxide.Snapshot) oxide.Name { return s.Name },
		func() error { return c.confirmSnapshotGone(ctx, id) }, c.deleteSnapshot)
	if err != nil {
		return nil, c.changes.unlessOpen(snapshotDeleted(id), err)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// ListSnapshots lists all snapshots of the project, except those that the rack is still taking.
func (c *Service) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (
	*csi.ListSnapshotsResponse, error) {
	pages, err := c.Rack.NewPager(ctx, req.GetStartingToken(), req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	answer := &csi.ListSnapshotsResponse{}
	err = matchingSnapshots(ctx, c.Rack, req, pages, func(snapshot *oxide.Snapshot) (enough bool) {
		if !cut(snapshot) {
			return false
		}
		entry := &csi.ListSnapshotsResponse_Entry{Snapshot: snapshotAnswer(snapshot)}
		if pages.Take(snapshot.Id, entry) {
			answer.Entries = append(answer.Entries, entry)
		}
		return pages.Full()
	})
	if err != nil {
		return nil, err
	}
	answer.NextToken = pages.Next
	return answer, nil
}

// GetSnapshot returns one snapshot, even if it is not ready.
func (c *Service) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (
	*csi.GetSnapshotResponse, error) {
	if req.GetSnapshotId() == "" {
		return nil, snapshotIDMissing()
	}
	id, ok := rack.ID(req.GetSnapshotId())
	if !ok {
		return nil, rack.SnapshotNotFound(req.GetSnapshotId())
	}
	snapshot, err := c.Rack.Snapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: snapshotAnswer(snapshot)}, nil
}

func snapshotIDMissing() error {
	return csierr.New(csierr.FieldMissing, "snapshot_id is missing")
}

// create reads the disk first, because the tag records properties of the disk that a restore needs.
func (s snapshotSpec) create(ctx context.Context) (*oxide.Snapshot, error) {
	const doing = "create snapshot"
	look := rack.Looking()
	source, err := s.Rack.Disk(ctx, s.Disk)
	switch {
	case csierr.IsNotFound(err):
		return s.existing(ctx, err)
	case err != nil:
		return nil, err
	}
	// The rack would answer 503 for a disk that is being imported, as a busy rack does (A42).
	if err := checkImported(source); err != nil {
		return nil, err
	}
	var snapshot *oxide.Snapshot
	record, err := s.request(ctx, doing, look, s.created(""), func(ctx context.Context) (err error) {
		snapshot, err = s.Rack.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
			Project: oxide.NameOrId(source.ProjectId),
			Body: &oxide.SnapshotCreate{
				Name:        oxide.Name(s.rackName()),
				Description: s.tag(source).Description(),
				Disk:        s.Disk,
			},
		})
		if err != nil {
			return err
		}
		return s.checkAnswer(doing, source, snapshot)
	})
	switch {
	case err == nil:
		record.End(nil, flight.Fields{Snapshot: snapshot.Id})
		return s.unlessFaulted(ctx, snapshot)
	case !rack.Definite(err):
		return s.resolveCreate(ctx, err)
	}
	// The rack checks the disk, its lock and the space first, and the name last. So an error about the
	// first three does not show whether an earlier call has taken a snapshot of this name.
	return s.existing(ctx, err)
}

// unlessFaulted deletes the new snapshot if it is faulted, because the CO never gets its id.
func (s snapshotSpec) unlessFaulted(ctx context.Context, made *oxide.Snapshot) (*oxide.Snapshot,
	error) {
	if made.State != oxide.SnapshotStateFaulted {
		return made, checkTaken(made)
	}
	look := rack.Looking()
	again, err := s.Rack.Snapshot(ctx, oxide.NameOrId(made.Id))
	switch {
	case err != nil:
		return nil, retryLater(err)
	case again.State != oxide.SnapshotStateFaulted:
		return nil, csierr.New(csierr.DiskBusy, "the rack made the snapshot %s faulted, and then shows "+
			"it as %s; repeat the call", rack.SnapshotText(again), again.State)
	}
	if err := s.deleteSnapshot(ctx, look, again); err != nil {
		return nil, retryLater(err)
	}
	return nil, csierr.Coded(codes.Internal, csierr.SnapshotFaulted, "the rack failed to take the "+
		"snapshot %s; it is deleted again: repeat the call", rack.SnapshotText(made))
}

// resolveCreate reads the snapshot by its name to find out whether the rack took it without
// answering. A snapshot of this name that does not match the spec existed before the call.
func (s snapshotSpec) resolveCreate(ctx context.Context, why error) (*oxide.Snapshot, error) {
	snapshot, err := s.existing(ctx, why)
	if csierr.IsAlreadyExists(err) {
		return nil, err
	}
	return snapshot, retryLater(err)
}

// existing returns the snapshot with the spec's name if it matches the spec. If the snapshot cannot
// be read, the error is retryable, because an earlier call may have taken it.
func (s snapshotSpec) existing(ctx context.Context, why error) (*oxide.Snapshot, error) {
	snapshot, err := s.Rack.SnapshotNamed(ctx, s.rackName())
	switch gone := csierr.IsNotFound(err); {
	case gone && (rack.NotFound(why) || csierr.IsNotFound(why)):
		if err := s.Rack.DiskGone(ctx, s.Disk); err != nil {
			return nil, err
		}
		return nil, rack.VolumeNotFound(string(s.Disk))
	case gone && (errors.Is(why, oxide.ErrConflict) || rack.Refused(why)):
		return nil, s.explainRefusal(ctx, why)
	case gone && errors.Is(why, oxide.ErrObjectAlreadyExists):
		return nil, csierr.New(csierr.OperationPending, "the snapshot %s existed and is gone; repeat "+
			"the call", s.rackName())
	case gone:
		return nil, rack.Error(ctx, "create snapshot", why)
	case err != nil:
		return nil, retryLater(err)
	}
	if difference := s.difference(snapshot); difference != "" {
		return nil, csierr.New(csierr.SnapshotExists, "the name belongs to the snapshot %s, %s",
			rack.SnapshotText(snapshot), difference)
	}
	id := oxide.NameOrId(snapshot.Id)
	if deleted, until := s.changes.latest(snapshotDeleted(id)); !until.IsZero() {
		return nil, mayCome(deleted)
	}
	s.created("").confirm(ctx, flight.Fields{Snapshot: snapshot.Id})
	return snapshot, checkTaken(snapshot)
}

// checkTaken returns an error unless the snapshot is ready. Until then its content may change, and
// the rack may still fail to take the snapshot, and delete it (CS-7). The driver does not return OK
// with ready_to_use false: an orchestrator would keep the id, and might resume a paused workload.
func checkTaken(s *oxide.Snapshot) error {
	switch {
	case !cut(s):
		return csierr.New(csierr.DiskBusy, "the rack is still taking the snapshot %s; repeat the call "+
			"later", rack.SnapshotText(s))
	case s.State == oxide.SnapshotStateFaulted:
		return csierr.Coded(codes.Aborted, csierr.SnapshotFaulted, "the rack failed to take the "+
			"snapshot %s; delete it on the rack", rack.SnapshotText(s))
	}
	return nil
}

func (s snapshotSpec) explainRefusal(ctx context.Context, why error) error {
	disk, err := s.Rack.Disk(ctx, s.Disk)
	if err != nil {
		return err
	}
	const impossible = "the rack takes no snapshots of %s disks such as %s"
	switch state := disk.State.State(); {
	case disk.DiskType == oxide.DiskTypeLocal:
		return csierr.New(csierr.SnapshotImpossible, impossible, "local", rack.DiskText(disk))
	case rack.ReadOnly(disk):
		return csierr.New(csierr.SnapshotImpossible, impossible, "read-only", rack.DiskText(disk))
	case state == oxide.DiskStateStateFaulted:
		return diskFaulted(disk)
	case state != oxide.DiskStateStateDetached && state != oxide.DiskStateStateAttached:
		return diskBusy(disk)
	case errors.Is(why, oxide.ErrConflict):
		return csierr.New(csierr.DiskBusy, "the rack takes another snapshot of the disk %s, or replaces "+
			"a part of it, and takes no snapshot until then; repeat the call later", rack.DiskText(disk))
	}
	return rack.Error(ctx, "create snapshot", why)
}

func (c *Service) deleteSnapshot(ctx context.Context, look rack.Look,
	snapshot *oxide.Snapshot) error {
	const doing = "delete snapshot"
	if err := notOurs("snapshot", rack.SnapshotText(snapshot), rack.ForeignSnapshot(snapshot,
		c.ClusterID), "VolumeSnapshotContent the deletionPolicy"); err != nil {
		return err
	}
	id := oxide.NameOrId(snapshot.Id)
	record, err := c.request(ctx, doing, look, snapshotDeleted(id), func(ctx context.Context) error {
		return c.Rack.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: id})
	})
	switch {
	case err == nil:
		record.End(nil, flight.Fields{Name: string(snapshot.Name), Volume: snapshot.DiskId})
		return nil
	case !rack.NotFound(err) && !rack.Refused(err):
		return rack.Error(ctx, doing, err)
	}
	snapshot, viewErr := c.Rack.Snapshot(ctx, id)
	switch {
	case csierr.IsNotFound(viewErr):
		return c.confirmSnapshotGone(ctx, id)
	case viewErr != nil:
		return viewErr
	case rack.NotFound(err):
		return rack.InvalidResponse(doing, "it lists the snapshot %s, but does not find it for deletion",
			id)
	case snapshot.State == oxide.SnapshotStateCreating:
		return csierr.Coded(codes.Aborted, csierr.SnapshotNotReady, "the rack is still taking the "+
			"snapshot %s; repeat the call later", rack.SnapshotText(snapshot))
	}
	return rack.Error(ctx, doing, err)
}

func (c *Service) confirmSnapshotGone(ctx context.Context, id oxide.NameOrId) error {
	return snapshotDeleted(id).confirmed(ctx, c.Rack.SnapshotGone(ctx, id))
}

// matchingSnapshots calls visit() for each snapshot that req selects. An unknown id is no error.
func matchingSnapshots(ctx context.Context, client *rack.Client, req *csi.ListSnapshotsRequest,
	pages *rack.Pager, visit func(*oxide.Snapshot) (enough bool)) error {
	source, isDisk := rack.ID(req.GetSourceVolumeId())
	id, isSnapshot := rack.ID(req.GetSnapshotId())
	if (req.GetSourceVolumeId() != "" && !isDisk) || (req.GetSnapshotId() != "" && !isSnapshot) {
		return nil
	}
	matching := func(s *oxide.Snapshot) bool {
		return (!isDisk || s.DiskId == string(source)) && visit(s)
	}
	if !isSnapshot {
		return client.EachSnapshot(ctx, pages, func(s *oxide.Snapshot) (enough bool, err error) {
			if err := rack.ValidateSnapshot("list snapshots", s); err != nil {
				return false, err
			}
			return matching(s), nil
		})
	}
	snapshot, err := client.Snapshot(ctx, id)
	switch {
	case csierr.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	matching(snapshot)
	return nil
}

// cut reports whether the rack has either taken the snapshot or failed to take it.
func cut(s *oxide.Snapshot) bool {
	return s.State == oxide.SnapshotStateReady || s.State == oxide.SnapshotStateFaulted
}

func snapshotAnswer(s *oxide.Snapshot) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId:     s.Id,
		SourceVolumeId: s.DiskId,
		SizeBytes:      int64(s.Size),
		CreationTime:   timestamppb.New(*s.TimeCreated), // set in every valid snapshot
		ReadyToUse:     s.State == oxide.SnapshotStateReady,
	}
}

type snapshotSpec struct {
	*Service
	Name  string // from the CO
	Disk  oxide.NameOrId
	Claim string // the VolumeSnapshot; only a label
}

func (c *Service) snapshotSpec(req *csi.CreateSnapshotRequest) (snapshotSpec, error) {
	spec := snapshotSpec{Service: c, Name: req.GetName(), Claim: volume.Claim(req.GetParameters())}
	if err := volume.CheckName(req.GetName()); err != nil {
		return spec, err
	}
	if req.GetSourceVolumeId() == "" {
		return spec, csierr.New(csierr.FieldMissing, "source_volume_id is missing")
	}
	for key := range req.GetParameters() {
		if !volume.ForeignKey(key) {
			return spec, volume.UnknownParameter(key)
		}
	}
	if req.GetAccessibilityRequirements() != nil {
		return spec, csierr.New(csierr.TopologyInvalid, "accessibility_requirements are not supported "+
			"for snapshots; a snapshot is where its volume is")
	}
	var ok bool
	if spec.Disk, ok = rack.ID(req.GetSourceVolumeId()); !ok {
		return spec, rack.VolumeNotFound(req.GetSourceVolumeId())
	}
	return spec, nil
}

func (s snapshotSpec) rackName() string { return volume.SnapshotName(s.ClusterID, s.Name) }

func (s snapshotSpec) created(id string) change {
	return change{event: flight.SnapshotCreated, name: s.rackName(), id: id,
		noted: flight.Fields{Name: s.rackName()}}
}

// tag returns the snapshot's ownership tag. If the driver made the disk, the tag contains the UUID
// of the disk's filesystem, which a restored volume inherits.
func (s snapshotSpec) tag(source *oxide.Disk) volume.Tag {
	m := volume.Tag{Name: s.Name, Cluster: s.ClusterID, Claim: s.Claim,
		BlockSize: int(source.BlockSize)}
	if tag, ok := rack.DiskTag(source); ok {
		m.FilesystemUUID = expectedUUID(source, tag)
	}
	return m
}

func (s snapshotSpec) checkAnswer(doing string, source *oxide.Disk, got *oxide.Snapshot) error {
	if err := rack.ValidateSnapshot(doing, got); err != nil {
		return err
	}
	switch {
	case string(got.Name) != s.rackName():
		return rack.InvalidResponse(doing, "asked for %s and got %.80q", s.rackName(), got.Name)
	case got.DiskId != string(s.Disk):
		return rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", s.Disk, got.DiskId)
	case got.ProjectId != source.ProjectId:
		return rack.InvalidResponse(doing, "the new snapshot is in the project %.80q", got.ProjectId)
	}
	return nil
}

// difference describes, for an error, how a snapshot differs from the spec, or returns "".
func (s snapshotSpec) difference(got *oxide.Snapshot) string {
	m, tagged := volume.ParseTag(got.Description)
	switch {
	case !tagged || !m.IsOf(s.ClusterID, s.Name):
		return "which was not made for this cluster and name"
	case got.DiskId != string(s.Disk):
		return fmt.Sprintf("of the volume %.80s", got.DiskId)
	}
	return ""
}
