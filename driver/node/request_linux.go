package node

import (
	"cmp"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type nodeVolume struct {
	filesystem.Volume
	BlockBytes int64 // of the disk, from the controller; 0 if unknown
	Block      bool
	Mode       csi.VolumeCapability_AccessMode_Mode
	MountFlags volume.MountOptions
	Staging    string

	// NodePublishVolume has these, too.
	Target          string
	PublishReadOnly bool // for the workload; the disk itself may be writable

	// Every call that works on the volume locks it and then opens its device.
	heldVolume
	device *blockdev.OpenDevice
}

func (v nodeVolume) serial() string { return volume.Serial(v.DiskName) }

func checkIDAndPath(volumeID, field, path string) error {
	if volumeID == "" {
		return csierr.New(csierr.VolumeIDMissing, "volume_id is missing")
	}
	return checkPath(field, path)
}

func parseStage(req *csi.NodeStageVolumeRequest) (nodeVolume, error) {
	err := checkIDAndPath(req.GetVolumeId(), "staging_target_path", req.GetStagingTargetPath())
	if err != nil {
		return nodeVolume{}, err
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return nodeVolume{}, err
	}
	v, err := parseVolume(req.GetVolumeId(), req.GetVolumeCapability(), req.GetPublishContext(),
		req.GetVolumeContext())
	v.Staging = req.GetStagingTargetPath()
	return v, err
}

func parsePublish(req *csi.NodePublishVolumeRequest) (nodeVolume, error) {
	err := checkIDAndPath(req.GetVolumeId(), "target_path", req.GetTargetPath())
	if err != nil {
		return nodeVolume{}, err
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return nodeVolume{}, err
	}
	if req.GetStagingTargetPath() == "" {
		return nodeVolume{}, csierr.New(csierr.NotStaged, "staging_target_path is missing: the volume "+
			"has to be staged first")
	}
	if err := checkPath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nodeVolume{}, err
	}
	v, err := parseVolume(req.GetVolumeId(), req.GetVolumeCapability(), req.GetPublishContext(),
		req.GetVolumeContext())
	v.Staging, v.Target = req.GetStagingTargetPath(), req.GetTargetPath()
	v.PublishReadOnly = req.GetReadonly() || v.MountFlags.ReadOnly()
	return v, err
}

func checkCapability(c *csi.VolumeCapability) error {
	problem := volume.CapabilityProblem(c)
	switch {
	case problem.Malformed:
		return csierr.New(csierr.CapabilityInvalid, "%s", problem.Message)
	case problem.Unsupported:
		// For such a capability CSI wants FAILED_PRECONDITION from a node, and INVALID_ARGUMENT from a
		// controller.
		return csierr.Coded(codes.FailedPrecondition, csierr.CapabilityUnsupported, "%s", problem.Message)
	}
	return nil
}

func checkPath(field, path string) error {
	switch {
	case path == "":
		return csierr.New(csierr.PathInvalid, "%s is missing", field)
	case !filepath.IsAbs(path):
		return csierr.New(csierr.PathInvalid, "%s has to be an absolute path", field)
	case filepath.Clean(path) == "/":
		return csierr.New(csierr.PathInvalid, "%s cannot be the root directory", field)
	}
	return checkPathText(field, path)
}

func checkPathText(field, path string) error {
	switch {
	case len(path) >= unix.PathMax:
		return csierr.New(csierr.PathInvalid, "%s has %d bytes; Linux takes less than %d",
			field, len(path), unix.PathMax)
	case strings.ContainsRune(path, 0):
		return csierr.New(csierr.PathInvalid, "%s contains a NUL", field)
	}
	return nil
}

// parseVolume gathers a volume from the parts of a request. publish_context wins over
// volume_context, because the controller has just read it from the rack.
func parseVolume(id string, c *csi.VolumeCapability, published, vol map[string]string) (nodeVolume,
	error) {
	v := nodeVolume{Mode: c.GetAccessMode().GetMode()}
	v.ID, v.DiskName = id, cmp.Or(published[volume.CtxDiskName], vol[volume.CtxDiskName])
	if v.DiskName == "" {
		return v, csierr.New(csierr.DiskNameMissing, "neither publish_context nor volume_context holds "+
			"%s, the name of the disk; a static volume that no controller publishes needs it in "+
			"its volume attributes", volume.CtxDiskName)
	}
	err := checkContexts(id, published, vol)
	if err != nil {
		return v, err
	}
	if v.SizeBytes, err = positive("publish_context: "+volume.CtxSizeBytes,
		published[volume.CtxSizeBytes]); err != nil {
		return v, err
	}
	if v.BlockBytes, err = positive(volume.CtxBlockSize,
		cmp.Or(published[volume.CtxBlockSize], vol[volume.CtxBlockSize])); err != nil {
		return v, err
	}
	v.ReadOnly = published[volume.CtxReadOnly] == "true"
	v.Origin, v.Use = published[volume.CtxOrigin], published[volume.CtxUse]
	v.SourceBytes, _ = strconv.ParseInt(published[volume.CtxSourceBytes], 10, 64)
	if want := published[volume.CtxFilesystemUUID]; want != "" {
		uuid, ok := volume.ParseID(want)
		if !ok {
			return v, csierr.New(csierr.FieldInvalid,
				"publish_context: %s has to be a UUID", volume.CtxFilesystemUUID)
		}
		v.FilesystemUUID = uuid
	}
	if v.Block = c.GetBlock() != nil; v.Block {
		return v, v.checkUse()
	}
	v.FSType = cmp.Or(c.GetMount().GetFsType(), volume.Ext4)
	v.MountFlags, err = volume.ParseMountFlags(v.FSType, c.GetMount().GetMountFlags())
	if err != nil {
		return v, err
	}
	if v.Mkfs, err = volume.ParseMkfsOptions(vol[volume.CtxMkfsOptions]); err != nil {
		return v, err
	}
	if err := v.Mkfs.Check(v.FSType, 0); err != nil { // mke2fs itself refuses what does not fit
		return v, err
	}
	return v, v.checkUse()
}

// positive parses a number of bytes; an empty text is 0, for what is not known.
func positive(field, text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		return 0, csierr.New(csierr.FieldInvalid, "%s has to be a positive number, not %.40q", field,
			text)
	}
	return n, nil
}

// checkContexts refuses contexts that cannot belong to one volume: an orchestrator, or a person,
// has combined the contexts of two.
func checkContexts(id string, published, vol map[string]string) error {
	for _, key := range []string{volume.CtxDiskName, volume.CtxDiskID, volume.CtxBlockSize} {
		if a, b := published[key], vol[key]; a != "" && b != "" && !strings.EqualFold(a, b) {
			return csierr.New(csierr.FieldInvalid, "publish_context and volume_context "+
				"are not of one volume: %s is %.80q in the first and %.80q in the second", key, a, b)
		}
	}
	disk := cmp.Or(published[volume.CtxDiskID], vol[volume.CtxDiskID])
	if disk != "" && !strings.EqualFold(disk, id) {
		return csierr.New(csierr.FieldInvalid, "the contexts are of the disk %.80q, but the volume is "+
			"%.80q", disk, id)
	}
	return nil
}

// checkUse refuses to show the volume in a way that it was not created for. Data that a workload
// has written to a raw device may look like a blank disk in a sample, or like one of the driver's
// filesystems.
func (v nodeVolume) checkUse() error {
	switch {
	case v.Use == volume.UseFilesystem && v.Block:
		return csierr.New(csierr.UseDiffers, "the volume was created for filesystems, but the request "+
			"is for a raw block device; create a volume for that")
	case v.Use == volume.UseBlock && !v.Block:
		return csierr.New(csierr.UseDiffers, "the volume was created as a raw block device, but the "+
			"request is for a filesystem; create a volume for that")
	case v.Block && v.Use != volume.UseBlock && v.Use != volume.UseBoth:
		return csierr.New(csierr.UseUnknown, "publish_context does not allow raw use (%s), so the disk "+
			"may be one for filesystems; let a controller of this release publish the volume", volume.CtxUse)
	}
	return nil
}
