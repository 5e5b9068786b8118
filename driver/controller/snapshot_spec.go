package controller

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// snapshotSpec is a parsed CreateSnapshot request.
type snapshotSpec struct {
	*Service
	Name  string // the CO's
	Disk  oxide.NameOrId
	Claim string // the VolumeSnapshot; no part of its identity
}

// snapshotSpec parses a request. It makes no call.
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

// created is the change that takes the snapshot, whose id may not be known yet.
func (s snapshotSpec) created(id string) change {
	return change{event: flight.SnapshotCreated, name: s.rackName(), id: id,
		noted: flight.Fields{Name: s.rackName()}}
}

// tag returns the snapshot's ownership tag. The UUID of the filesystem is known for a disk that
// this driver made, and with it that of a volume restored from the snapshot.
func (s snapshotSpec) tag(source *oxide.Disk) volume.Tag {
	m := volume.Tag{Name: s.Name, Cluster: s.ClusterID, Claim: s.Claim,
		BlockSize: int(source.BlockSize)}
	if tag, ok := rack.DiskTag(source); ok {
		m.FilesystemUUID = expectedUUID(source, tag)
	}
	return m
}

// checkAnswer compares the rack's response to a create with the spec.
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

// difference returns in what a snapshot differs from the spec, or "". The text continues "the
// snapshot, …".
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
