package controller

import (
	"context"
	"fmt"
	"strconv"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// volumeOrder is a CreateVolume request that was understood.
type volumeOrder struct {
	Name       string // the CO's
	Cluster    string
	Range      volume.CapacityRange
	Parameters volume.Parameters
	SnapshotID oxide.NameOrId // empty: blank, or the parameters' image
	Topology   []*csi.Topology
	Use        string // what the capabilities are for
}

// volumeOrder checks a request; it asks nobody.
func (c *Service) volumeOrder(req *csi.CreateVolumeRequest) (volumeOrder, error) {
	order := volumeOrder{Name: req.GetName(), Cluster: c.ClusterID,
		Use: useOf(req.GetVolumeCapabilities())}
	if err := volume.CheckName(req.GetName()); err != nil {
		return order, err
	}
	if err := volume.CheckCapabilities(req.GetVolumeCapabilities()); err != nil {
		return order, err
	}
	if len(req.GetMutableParameters()) > 0 {
		return order, csierr.New(csierr.ParameterInvalid, "mutable_parameters are "+
			"not supported: a disk cannot be changed after it is made")
	}
	var err error
	if order.Parameters, err = volume.ParseParameters(req.GetParameters()); err != nil {
		return order, err
	}
	if err = order.Parameters.Fits(req.GetVolumeCapabilities()); err != nil {
		return order, err
	}
	if err = order.checkFilesystemBlocks(); err != nil {
		return order, err
	}
	if order.SnapshotID, err = orderedSnapshot(req.GetVolumeContentSource()); err != nil {
		return order, err
	}
	if order.SnapshotID != "" && order.Parameters.ImageID != "" {
		return order, csierr.New(csierr.SourceIncompatible, "a volume is made "+
			"from a snapshot or from imageId, not from both")
	}
	if order.SnapshotID != "" && order.Parameters.DiskType == volume.DiskTypeLocal {
		return order, csierr.New(csierr.SourceIncompatible, "a snapshot cannot be "+
			"restored into diskType local: local disks begin blank")
	}
	if order.Topology, err = volume.ChooseTopology(req.GetAccessibilityRequirements(),
		c.Topology); err != nil {
		return order, err
	}
	order.Range, err = volume.ParseCapacityRange(req.GetCapacityRange())
	return order, err
}

// orderedSnapshot is the snapshot to restore; empty for a blank volume.
func orderedSnapshot(source *csi.VolumeContentSource) (oxide.NameOrId, error) {
	switch {
	case source == nil:
		return "", nil
	case source.GetVolume() != nil:
		return "", csierr.New(csierr.SourceUnsupported, "cloning a volume is not "+
			"supported; take a snapshot of it and restore that")
	case source.GetSnapshot() == nil:
		return "", csierr.New(csierr.SourceUnsupported, "volume_content_source "+
			"names nothing; a volume can be made from a snapshot")
	case source.GetSnapshot().GetSnapshotId() == "":
		return "", csierr.New(csierr.FieldMissing, "snapshot_id is missing")
	}
	id, ok := rack.ID(source.GetSnapshot().GetSnapshotId())
	if !ok {
		return "", rack.SnapshotNotFound(source.GetSnapshot().GetSnapshotId())
	}
	return id, nil
}

func (o volumeOrder) diskName() string { return volume.DiskName(o.Cluster, o.Name) }

func (o volumeOrder) hasSource() bool { return o.SnapshotID != "" || o.Parameters.ImageID != "" }

// mark is the tag of the disk that is made from source.
func (o volumeOrder) mark(source volumeSource) volume.Tag {
	m := volume.Tag{Name: o.Name, Cluster: o.Cluster, MkfsOptions: o.Parameters.MkfsOptions.String(),
		Use: o.Use, Origin: volume.OriginBlank}
	switch {
	case o.SnapshotID != "":
		m.Origin, m.SourceBytes = volume.OriginSnapshot, source.floorBytes
		m.FilesystemUUID = source.filesystemUUID
	case o.Parameters.ImageID != "":
		m.Origin = volume.OriginImage
	}
	if o.hasSource() {
		m.BlockSize = o.Parameters.BlockSize
	}
	return m
}

// useOf is what a volume with these capabilities is for.
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

// neverHandedOut says whether a disk was made for a volume of the order's name, with other blocks
// than were asked for then. Such a create ends with an error whatever happens, so the disk is
// nobody's.
func (o volumeOrder) neverHandedOut(d *oxide.Disk) bool {
	m, marked := volume.ParseTag(d.Description)
	return marked && m.Name == o.Name && m.Cluster == o.Cluster &&
		m.BlockSize != 0 && m.BlockSize != int(d.BlockSize)
}

func (o volumeOrder) blankBlockSize() int {
	if o.Parameters.BlockSize == 0 {
		return volume.DefaultBlockSize
	}
	return o.Parameters.BlockSize
}

// checkFilesystemBlocks refuses a filesystem that mkfs could not make on the disk, before there is
// one. What comes from an image has its filesystem already.
func (o volumeOrder) checkFilesystemBlocks() error {
	n, err := strconv.Atoi(o.Parameters.MkfsOptions.Value("fsBlockSize"))
	if err == nil && o.Parameters.ImageID == "" && n < o.blankBlockSize() {
		return csierr.New(csierr.MkfsOptions,
			"mkfsOptions: fsBlockSize=%d is less "+
				"than the disk's blocks of %d bytes; set blockSize to 512 or 2048", n,
			o.blankBlockSize())
	}
	return nil
}

func (o volumeOrder) backend() oxide.DiskBackend {
	if o.Parameters.DiskType == volume.DiskTypeLocal {
		return oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	}
	var source oxide.DiskSource
	switch {
	case o.SnapshotID != "":
		source.Value = &oxide.DiskSourceSnapshot{
			SnapshotId: string(o.SnapshotID), ReadOnly: oxide.NewPointer(false),
		}
	case o.Parameters.ImageID != "":
		source.Value = &oxide.DiskSourceImage{
			ImageId: o.Parameters.ImageID, ReadOnly: oxide.NewPointer(false),
		}
	default:
		source.Value = &oxide.DiskSourceBlank{BlockSize: oxide.BlockSize(o.blankBlockSize())}
	}
	return oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: source}}
}

// difference says in what a disk is not the ordered one, or "". It reads as the end of "the disk
// …".
func (o volumeOrder) difference(d *oxide.Disk) string {
	m, marked := volume.ParseTag(d.Description)
	wantBlocks := o.Parameters.BlockSize
	if !o.hasSource() {
		wantBlocks = o.blankBlockSize()
	}
	switch {
	case !marked:
		return "this driver did not make"
	case m.Name != o.Name:
		return "belongs to a volume of another name"
	case m.Cluster != o.Cluster:
		return "belongs to another cluster"
	case m.Use != "" && m.Use != o.Use:
		return fmt.Sprintf("is for the use %q, not %q", m.Use, o.Use)
	case !o.Range.Contains(int64(d.Size)):
		return fmt.Sprintf("has %d bytes, not what capacity_range asks for", d.Size)
	case wantBlocks != 0 && wantBlocks != int(d.BlockSize):
		return fmt.Sprintf("has blocks of %d bytes, not %d", d.BlockSize, wantBlocks)
	case string(d.DiskType) != string(o.Parameters.DiskType):
		return fmt.Sprintf("is %.40q, not %s", d.DiskType, o.Parameters.DiskType)
	case d.SnapshotId != string(o.SnapshotID):
		return "was made from another source"
	case d.ImageId != o.Parameters.ImageID:
		return "was made from another image"
	case m.MkfsOptions != o.Parameters.MkfsOptions.String():
		return "has other mkfsOptions"
	case rack.ReadOnly(d):
		return "is read-only"
	}
	return ""
}

// volumeSource is what is known of the source before the disk is made.
type volumeSource struct {
	floorBytes int64  // 0 for a blank disk
	projectID  string // empty for an image of the whole silo
	gone       bool   // beside an error: the rack does not know it (any more)
	// filesystemUUID is that of the filesystem in a snapshot of this cluster's, if it is known.
	filesystemUUID string
}

// volumeSource reads the snapshot or image of an order. A blank disk needs no call.
func (c *Service) volumeSource(ctx context.Context, order volumeOrder) (volumeSource, error) {
	switch {
	case order.SnapshotID != "":
		return c.snapshotSource(ctx, order)
	case order.Parameters.ImageID != "":
		return c.imageSource(ctx, order)
	}
	return volumeSource{}, nil
}

func (c *Service) snapshotSource(ctx context.Context, order volumeOrder) (volumeSource, error) {
	snapshot, err := c.Rack.Snapshot(ctx, order.SnapshotID)
	if err != nil {
		return volumeSource{gone: csierr.IsNotFound(err)}, err
	}
	// The rack does not look whether the snapshot is complete.
	switch snapshot.State {
	case oxide.SnapshotStateReady:
	case oxide.SnapshotStateFaulted:
		return volumeSource{}, csierr.New(csierr.SnapshotFaulted, "the rack "+
			"reports the snapshot %s as faulted; take another", snapshot.Id)
	default:
		return volumeSource{}, csierr.New(csierr.SnapshotNotReady, "the "+
			"snapshot %s is %s; repeat the call when it is ready", snapshot.Id, snapshot.State)
	}
	source := volumeSource{floorBytes: int64(snapshot.Size), projectID: snapshot.ProjectId}
	if rack.ForeignSnapshot(snapshot, c.ClusterID) == "" {
		m, _ := volume.ParseTag(snapshot.Description)
		source.filesystemUUID = m.FilesystemUUID
	}
	want := order.Parameters.BlockSize
	if id, ok := rack.ID(snapshot.DiskId); ok && want != 0 {
		// Its disk shows the block size that the new one inherits, unless it is gone.
		disk, err := c.Rack.Disk(ctx, id)
		switch {
		case csierr.IsNotFound(err):
		case err != nil:
			return source, err
		case int(disk.BlockSize) != want:
			return source, blockSizeInherited(want, int(disk.BlockSize))
		}
	}
	return source, nil
}

func (c *Service) imageSource(ctx context.Context, order volumeOrder) (volumeSource, error) {
	id := oxide.NameOrId(order.Parameters.ImageID)
	image, err := c.Rack.ImageView(ctx, oxide.ImageViewParams{Image: id})
	if err == nil {
		err = rack.ValidateImage(id, image)
	}
	switch want := order.Parameters.BlockSize; {
	case rack.Unknown(err):
		return volumeSource{gone: true}, csierr.New(csierr.ImageNotFound,
			"imageId: the rack has no image %s, or shows this token none", id)
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

// refusedSource says why the rack does not make a disk from this snapshot.
func (c *Service) refusedSource(ctx context.Context, source volumeSource, why error) error {
	project, err := c.Rack.ReadProject(ctx)
	switch {
	case err != nil:
		return rack.Error(ctx, "read project", err)
	case source.projectID != "" && source.projectID != project.Id:
		return csierr.New(csierr.SourceIncompatible, "the source belongs to "+
			"another project; the rack makes disks from sources of their own project only")
	}
	return rack.Error(ctx, "create disk", why)
}
