package node

import (
	"cmp"
	"context"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// request is a volume as a node's request describes it.
type request struct {
	filesystem.Volume
	BlockBytes int64 // of the disk, from the controller; 0 when it did not say
	Block      bool
	Mode       csi.VolumeCapability_AccessMode_Mode
	MountFlags volume.MountOptions
}

// serial is the serial number of the volume's device.
func (v request) serial() string { return volume.Serial(v.DiskName) }

// checkNodeCapability answers for a capability that is missing or that volumes do not have.
func checkNodeCapability(c *csi.VolumeCapability) error {
	problem := volume.CapabilityProblem(c)
	switch {
	case problem.Malformed:
		return csierr.New(csierr.CapabilityInvalid, "%s", problem.Message)
	case problem.Unsupported:
		// Service calls answer 9 for what exceeds the volume, where controller calls answer 3.
		return csierr.Coded(codes.FailedPrecondition, csierr.CapabilityUnsupported, "%s", problem.Message)
	}
	return nil
}

// checkPath answers for a path that no mount can have.
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

// checkPathText answers for what the kernel takes for no path at all.
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

// volumeOf gathers a volume from the parts of a request. publish_context wins over volume_context:
// the controller has just read it from the rack.
func volumeOf(id string, c *csi.VolumeCapability, published, vol map[string]string) (request,
	error) {
	v := request{Mode: c.GetAccessMode().GetMode()}
	v.ID, v.DiskName = id, published[volume.CtxDiskName]
	if v.DiskName == "" {
		v.DiskName = vol[volume.CtxDiskName]
	}
	if v.DiskName == "" {
		return v, csierr.New(csierr.DiskNameMissing, "neither publish_context nor volume_context holds "+
			"%s, the name of the disk; a static volume that no controller publishes needs it in "+
			"its volume attributes", volume.CtxDiskName)
	}
	if size := published[volume.CtxSizeBytes]; size != "" {
		n, err := strconv.ParseInt(size, 10, 64)
		if err != nil || n <= 0 {
			return v, csierr.New(csierr.FieldInvalid,
				"publish_context: %s has to be a positive number", volume.CtxSizeBytes)
		}
		v.SizeBytes = n
	}
	var err error
	if v.BlockBytes, err = checkContexts(id, published, vol); err != nil {
		return v, err
	}
	v.ReadOnly = published[volume.CtxReadOnly] == "true"
	v.Origin, v.Use = published[volume.CtxOrigin], published[volume.CtxUse]
	if want := published[volume.CtxFilesystemUUID]; want != "" {
		id, ok := volume.ParseID(want)
		if !ok {
			return v, csierr.New(csierr.FieldInvalid,
				"publish_context: %s has to be a UUID", volume.CtxFilesystemUUID)
		}
		v.FilesystemUUID = id
	}
	v.SourceBytes, _ = strconv.ParseInt(published[volume.CtxSourceBytes], 10, 64)
	if c.GetBlock() != nil {
		v.Block = true
		return v, v.checkUse()
	}
	v.FSType = c.GetMount().GetFsType()
	if v.FSType == "" {
		v.FSType = volume.Ext4
	}
	if v.MountFlags, err = volume.ParseMountFlags(c.GetMount().GetMountFlags()); err != nil {
		return v, err
	}
	if v.Mkfs, err = volume.ParseMkfsOptions(vol[volume.CtxMkfsOptions]); err != nil {
		return v, err
	}
	if err := v.Mkfs.Check(v.FSType); err != nil {
		return v, err
	}
	return v, v.checkUse()
}

// checkContexts refuses what cannot be of one volume: an orchestrator, or a person, has put the
// contexts of two together. It returns the size of the disk's blocks, 0 if neither says.
func checkContexts(id string, published, vol map[string]string) (blockBytes int64, err error) {
	for _, key := range []string{volume.CtxDiskName, volume.CtxDiskID, volume.CtxBlockSize} {
		if a, b := published[key], vol[key]; a != "" && b != "" && !strings.EqualFold(a, b) {
			return 0, csierr.New(csierr.FieldInvalid, "publish_context and volume_context "+
				"are not of one volume: %s is %.80q in the first and %.80q in the second", key, a, b)
		}
	}
	disk := cmp.Or(published[volume.CtxDiskID], vol[volume.CtxDiskID])
	if disk != "" && !strings.EqualFold(disk, id) {
		return 0, csierr.New(csierr.FieldInvalid, "the contexts are of the disk %.80q, "+
			"but the volume is %.80q", disk, id)
	}
	text := cmp.Or(published[volume.CtxBlockSize], vol[volume.CtxBlockSize])
	if text == "" {
		return 0, nil
	}
	blockBytes, err = strconv.ParseInt(text, 10, 64)
	if err != nil || blockBytes <= 0 {
		return 0, csierr.New(csierr.FieldInvalid, "%s has to be a positive number, not "+
			"%.40q", volume.CtxBlockSize, text)
	}
	return blockBytes, nil
}

// checkUse refuses to show the volume in a way that it was not created for. What a workload writes
// to a raw device may look blank where it is sampled, or like one of the driver's filesystems.
func (v request) checkUse() error {
	switch {
	case v.Use == volume.UseFilesystem && v.Block:
		return csierr.New(csierr.UseDiffers, "the volume was created for filesystems, but the request "+
			"is for a raw block device; create a volume for that")
	case v.Use == volume.UseBlock && !v.Block:
		return csierr.New(csierr.UseDiffers, "the volume was created as a raw block device, but the "+
			"request is for a filesystem; create a volume for that")
	}
	return nil
}

func (n *Service) devices() blockdev.Host {
	ds := blockdev.Host{Sysfs: n.SysfsRoot, Dev: n.DevRoot}
	if ds.Sysfs == "" {
		ds.Sysfs = DefaultSysfsRoot
	}
	if ds.Dev == "" {
		ds.Dev = DefaultDevRoot
	}
	return ds
}

// openVolume opens and locks a device that was found for the volume, and compares it with what the
// controller says of the disk. That the rack calls a disk read-only is not compared: a guest's NVMe
// need not show it, and a disk that is writable for the rack and not here is refused when it is
// written (makeWritable).
func openVolume(ctx context.Context, ds blockdev.Host, d blockdev.Device,
	v request) (*blockdev.OpenDevice, error) {
	if v.SizeBytes != 0 && v.SizeBytes != d.SizeBytes {
		return nil, csierr.New(csierr.DeviceWrongSize, "%s with serial %q has %d bytes, but the disk "+
			"has %d",
			d.Path, d.Serial, d.SizeBytes, v.SizeBytes)
	}
	h, err := ds.OpenLocked(ctx, d)
	if err != nil {
		return nil, err
	}
	if err := h.CheckBlockSize(v.BlockBytes); err != nil {
		_ = h.Close()
		return nil, err
	}
	return h, nil
}
