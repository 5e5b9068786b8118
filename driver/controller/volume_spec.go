package controller

import (
	"cmp"
	"context"
	"fmt"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type volumeSpec struct {
	*Service
	Name       string // from the CO
	Range      volume.CapacityRange
	Parameters volume.Parameters
	SnapshotID oxide.NameOrId // empty for a blank disk, or a disk from an image
	Topology   []*csi.Topology
	Use        string // according to the capabilities
	Claim      string // the PersistentVolumeClaim; only a label
}

func (c *Service) volumeSpec(req *csi.CreateVolumeRequest) (volumeSpec, error) {
	spec := volumeSpec{Service: c, Name: req.GetName(),
		Use: useOf(req.GetVolumeCapabilities()), Claim: volume.Claim(req.GetParameters())}
	if err := volume.CheckName(req.GetName()); err != nil {
		return spec, err
	}
	if err := volume.CheckCapabilities(req.GetVolumeCapabilities()); err != nil {
		return spec, err
	}
	if len(req.GetMutableParameters()) > 0 {
		return spec, csierr.New(csierr.ParameterInvalid, "mutable_parameters are not supported: a disk "+
			"cannot be changed after it is made")
	}
	var err error
	if spec.Parameters, err = volume.ParseParameters(req.GetParameters()); err != nil {
		return spec, err
	}
	if err = spec.checkFilesystemBlocks(); err != nil {
		return spec, err
	}
	if spec.SnapshotID, err = requestedSnapshot(req.GetVolumeContentSource()); err != nil {
		return spec, err
	}
	if spec.SnapshotID != "" && spec.Parameters.ImageID != "" {
		return spec, csierr.New(csierr.SourceIncompatible, "a volume is made from a snapshot or from "+
			"imageId, not from both")
	}
	if spec.SnapshotID != "" && spec.Parameters.DiskType == volume.DiskTypeLocal {
		return spec, csierr.New(csierr.SourceIncompatible, "a snapshot cannot be restored into diskType "+
			"local: local disks are created blank")
	}
	choose := volume.ChooseTopology
	if spec.Parameters.Placement == volume.PlacementInstance {
		choose = volume.ChooseInstance
	}
	if spec.Topology, err = choose(req.GetAccessibilityRequirements(), c.Topology,
		c.TopologyInstance); err != nil {
		return spec, err
	}
	if spec.Range, err = volume.ParseCapacityRange(req.GetCapacityRange()); err != nil {
		return spec, err
	}
	var blankBytes int64
	if !spec.hasSource() {
		if blankBytes, err = spec.Range.DiskSize(0, spec.Parameters.Largest()); err != nil {
			return spec, err
		}
	}
	return spec, spec.Parameters.Fits(req.GetVolumeCapabilities(), blankBytes)
}

func requestedSnapshot(source *csi.VolumeContentSource) (oxide.NameOrId, error) {
	switch {
	case source == nil:
		return "", nil
	case source.GetVolume() != nil:
		return "", csierr.New(csierr.SourceUnsupported, "cloning a volume is not supported; take a "+
			"snapshot of it and restore that")
	case source.GetSnapshot() == nil:
		return "", csierr.New(csierr.SourceUnsupported, "volume_content_source is empty; a volume can "+
			"be made from a snapshot")
	case source.GetSnapshot().GetSnapshotId() == "":
		return "", csierr.New(csierr.FieldMissing, "snapshot_id is missing")
	}
	id, ok := rack.ID(source.GetSnapshot().GetSnapshotId())
	if !ok {
		return "", rack.SnapshotNotFound(source.GetSnapshot().GetSnapshotId())
	}
	return id, nil
}

func (v volumeSpec) diskName() string { return volume.DiskName(v.ClusterID, v.Name) }

func (v volumeSpec) created(id string) change {
	return change{event: flight.DiskCreated, name: v.diskName(), id: id,
		noted: flight.Fields{Disk: v.diskName()}}
}

func (v volumeSpec) hasSource() bool { return v.SnapshotID != "" || v.Parameters.ImageID != "" }

func (v volumeSpec) tag(source volumeSource) volume.Tag {
	m := volume.Tag{Name: v.Name, Cluster: v.ClusterID, MkfsOptions: v.Parameters.MkfsOptions.String(),
		Use: v.Use, Origin: volume.OriginBlank, Claim: v.Claim}
	switch {
	case v.SnapshotID != "":
		m.Origin, m.SourceBytes = volume.OriginSnapshot, source.floorBytes
		m.FilesystemUUID = source.filesystemUUID
	case v.Parameters.ImageID != "":
		m.Origin = volume.OriginImage
	}
	return m
}

func useOf(capabilities []*csi.VolumeCapability) string {
	use := ""
	for _, c := range capabilities {
		one := volume.UseFilesystem
		if c.GetBlock() != nil {
			one = volume.UseBlock
		}
		if use != "" && use != one {
			return volume.UseBoth
		}
		use = one
	}
	return use
}

func (v volumeSpec) blankBlockSize() int {
	return cmp.Or(v.Parameters.BlockSize, volume.DefaultBlockSize)
}

// checkFilesystemBlocks fails if mkfsOptions ask for smaller blocks than the disk's, which mkfs
// refuses. A disk from an image already has a filesystem.
func (v volumeSpec) checkFilesystemBlocks() error {
	n, err := strconv.Atoi(v.Parameters.MkfsOptions.Value("fsBlockSize"))
	if err == nil && v.Parameters.ImageID == "" && n < v.blankBlockSize() {
		return csierr.New(csierr.MkfsOptions, "mkfsOptions: fsBlockSize=%d is less than the disk's "+
			"blocks of %d bytes; set blockSize to 512 or 2048", n, v.blankBlockSize())
	}
	return nil
}

func (v volumeSpec) backend() oxide.DiskBackend {
	if v.Parameters.DiskType == volume.DiskTypeLocal {
		return oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	}
	var source oxide.DiskSource
	switch {
	case v.SnapshotID != "":
		source.Value = &oxide.DiskSourceSnapshot{
			SnapshotId: string(v.SnapshotID), ReadOnly: oxide.NewPointer(false),
		}
	case v.Parameters.ImageID != "":
		source.Value = &oxide.DiskSourceImage{
			ImageId: v.Parameters.ImageID, ReadOnly: oxide.NewPointer(false),
		}
	default:
		source.Value = &oxide.DiskSourceBlank{BlockSize: oxide.BlockSize(v.blankBlockSize())}
	}
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: source}}
}

// difference returns how a disk differs from the spec, such as "belongs to another cluster", or "".
func (v volumeSpec) difference(d *oxide.Disk) string {
	m, tagged := volume.ParseTag(d.Description)
	wantBlocks := v.Parameters.BlockSize
	if !v.hasSource() {
		wantBlocks = v.blankBlockSize()
	}
	switch {
	case !tagged:
		return "was not made by this driver"
	case m.Cluster != v.ClusterID:
		return "belongs to another cluster"
	case !m.IsOf(v.ClusterID, v.Name):
		return "belongs to a volume of another name"
	case m.Use != "" && m.Use != v.Use:
		return fmt.Sprintf("is for the use %q, not %q", m.Use, v.Use)
	case !v.Range.Contains(int64(d.Size)):
		return fmt.Sprintf("has %s, not what capacity_range asks for", volume.SizeText(int64(d.Size)))
	case wantBlocks != 0 && wantBlocks != int(d.BlockSize):
		return fmt.Sprintf("has blocks of %d bytes, not %d", d.BlockSize, wantBlocks)
	case string(d.DiskType) != string(v.Parameters.DiskType):
		return fmt.Sprintf("is %.40q, not %s", d.DiskType, v.Parameters.DiskType)
	case d.SnapshotId != string(v.SnapshotID):
		return "was made from another source"
	case d.ImageId != v.Parameters.ImageID:
		return "was made from another image"
	case m.MkfsOptions != v.Parameters.MkfsOptions.String():
		return "has other mkfsOptions"
	case rack.ReadOnly(d):
		return "is read-only"
	}
	return ""
}

type volumeSource struct {
	floorBytes     int64  // the least size of the new disk; 0 if it is blank
	projectID      string // empty for an image of the whole silo
	gone           bool   // the source, or its disk, is gone, but an earlier call may have used it
	filesystemUUID string // from the snapshot's tag; may be empty
}

func (v volumeSpec) source(ctx context.Context) (volumeSource, error) {
	switch {
	case v.SnapshotID != "":
		return v.snapshotSource(ctx)
	case v.Parameters.ImageID != "":
		return v.imageSource(ctx)
	}
	return volumeSource{}, nil
}

func (v volumeSpec) snapshotSource(ctx context.Context) (volumeSource, error) {
	snapshot, err := v.Rack.Snapshot(ctx, v.SnapshotID)
	if err != nil {
		return volumeSource{gone: csierr.IsNotFound(err)}, err
	}
	// When the rack creates a disk from a snapshot, it does not check that the snapshot is complete.
	switch snapshot.State {
	case oxide.SnapshotStateReady:
	case oxide.SnapshotStateFaulted:
		return volumeSource{}, csierr.New(csierr.SnapshotFaulted, "the rack reports the snapshot %s as "+
			"faulted; take another", rack.SnapshotText(snapshot))
	default:
		return volumeSource{}, csierr.New(csierr.SnapshotNotReady, "the snapshot %s is %s; repeat the "+
			"call when it is ready", rack.SnapshotText(snapshot), snapshot.State)
	}
	source := volumeSource{floorBytes: int64(snapshot.Size), projectID: snapshot.ProjectId}
	m, ours := rack.SnapshotTag(snapshot)
	// The new disk inherits the snapshot's block size. The rack does not show that size, so the driver
	// records it in the snapshot's tag.
	want, inherited := v.Parameters.BlockSize, 0
	if ours {
		source.filesystemUUID, inherited = m.FilesystemUUID, m.BlockSize
	}
	if id, ok := rack.ID(snapshot.DiskId); ok && want != 0 && inherited == 0 {
		disk, err := v.Rack.Disk(ctx, id)
		if err == nil {
			inherited = int(disk.BlockSize)
		} else if !csierr.IsNotFound(err) {
			return source, err
		}
	}
	switch {
	case want == 0, want == inherited:
		return source, nil
	case inherited == 0:
		source.gone = true
		return source, csierr.New(csierr.SourceIncompatible, "blockSize is %d, but the disk of the "+
			"snapshot %s is gone, and with it the block size that the volume inherits; leave "+
			"blockSize out", want, rack.SnapshotText(snapshot))
	}
	return source, blockSizeInherited(want, inherited)
}

func (v volumeSpec) imageSource(ctx context.Context) (volumeSource, error) {
	id := oxide.NameOrId(v.Parameters.ImageID)
	image, err := v.Rack.ImageView(ctx, oxide.ImageViewParams{Image: id})
	if err == nil {
		err = rack.ValidateImage(id, image)
	}
	switch want := v.Parameters.BlockSize; {
	case rack.NotFound(err):
		return volumeSource{gone: true}, csierr.New(csierr.ImageNotFound,
			"imageId: the rack has no image %s, or this token may not see it", id)
	case err != nil:
		return volumeSource{}, rack.Error(ctx, "read image", err)
	case want != 0 && want != int(image.BlockSize):
		return volumeSource{}, blockSizeInherited(want, int(image.BlockSize))
	}
	return volumeSource{floorBytes: int64(image.Size), projectID: image.ProjectId}, nil
}

func blockSizeInherited(want, inherited int) error {
	return csierr.New(csierr.SourceIncompatible, "blockSize is %d, but the source "+
		"has blocks of %d bytes, which the volume inherits; leave blockSize out", want, inherited)
}

func (s volumeSource) explainRefusal(world rack.World, why error) error {
	if s.projectID != "" && s.projectID != world.Project {
		return csierr.New(csierr.SourceIncompatible, "the source belongs to another project; the rack "+
			"makes disks from sources of their own project only")
	}
	return why
}
