package controller

import (
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// snapshotOrder is a CreateSnapshot request that was understood.
type snapshotOrder struct {
	Name    string // the CO's
	Cluster string
	Disk    oxide.NameOrId
}

// snapshotOrder checks a request; it asks nobody.
func (c *Service) snapshotOrder(req *csi.CreateSnapshotRequest) (snapshotOrder, error) {
	order := snapshotOrder{Name: req.GetName(), Cluster: c.ClusterID}
	if err := volume.CheckName(req.GetName()); err != nil {
		return order, err
	}
	if req.GetSourceVolumeId() == "" {
		return order, csierr.New(csierr.FieldMissing, "source_volume_id is missing")
	}
	for key := range req.GetParameters() {
		if !volume.ForeignKey(key) {
			return order, csierr.New(csierr.ParameterInvalid, "the parameter %.80q "+
				"is unknown; snapshots have none", key)
		}
	}
	if req.GetAccessibilityRequirements() != nil {
		return order, csierr.New(csierr.TopologyInvalid, "accessibility_requirements "+
			"are not supported for snapshots; a snapshot is where its volume is")
	}
	var ok bool
	if order.Disk, ok = rack.ID(req.GetSourceVolumeId()); !ok {
		return order, rack.VolumeNotFound(req.GetSourceVolumeId())
	}
	return order, nil
}

func (o snapshotOrder) rackName() string { return volume.SnapshotName(o.Cluster, o.Name) }

// mark is the tag of the snapshot. Of a disk that this driver made for this cluster it is known
// which filesystem it holds, and so which one a volume has that is restored from the snapshot.
func (o snapshotOrder) mark(source *oxide.Disk) volume.Tag {
	m := volume.Tag{Name: o.Name, Cluster: o.Cluster}
	if rack.ForeignDisk(source, o.Cluster) == "" {
		tag, _ := volume.ParseTag(source.Description)
		m.FilesystemUUID = expectedUUID(source, tag)
	}
	return m
}

func (o snapshotOrder) checkName(doing string, s *oxide.Snapshot) error {
	if err := rack.ValidateSnapshot(doing, s); err != nil {
		return err
	}
	if string(s.Name) != o.rackName() {
		return rack.InvalidResponse(doing, "asked for %s and got %.80q", o.rackName(), s.Name)
	}
	return nil
}

// checkAnswer compares the rack's answer to a create with the order.
func (o snapshotOrder) checkAnswer(doing string, s *oxide.Snapshot) error {
	if err := o.checkName(doing, s); err != nil {
		return err
	}
	if s.DiskId != string(o.Disk) {
		return rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", o.Disk, s.DiskId)
	}
	return nil
}

// difference says in what a snapshot is not the ordered one, or "". It reads as the end of "the
// snapshot, …".
func (o snapshotOrder) difference(s *oxide.Snapshot) string {
	m, marked := volume.ParseTag(s.Description)
	switch {
	case !marked || m.Name != o.Name || m.Cluster != o.Cluster:
		return "which is not of this cluster's making or has another name there"
	case s.DiskId != string(o.Disk):
		return fmt.Sprintf("of the volume %.80s", s.DiskId)
	}
	return ""
}
