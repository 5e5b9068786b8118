//go:build linux

package driver

import (
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// nodeVolume is a volume as a node's request describes it.
type nodeVolume struct {
	ID         string
	DiskName   string
	SizeBytes  int64 // of the disk, from the controller; 0 when it did not say
	ReadOnly   bool  // the disk itself can only be read
	Block      bool
	FSType     string
	Mode       csi.VolumeCapability_AccessMode_Mode
	MountFlags mountOptions
	Mkfs       mkfsOptions
	// What the controller read from the disk's ownership tag; all empty for a disk without one.
	Origin, Use    string
	SourceBytes    int64
	FilesystemUUID string // the only filesystem to mount; empty if any will do
}

// madeBlank reports whether the disk was made blank and never shown to a workload as a raw device.
// Then a sample of its bytes can prove that it is still blank; any other disk is read whole.
func (v nodeVolume) madeBlank() bool { return v.Origin == originBlank && v.Use == useFilesystem }

// makeUUID is the UUID that the volume's filesystem is made with: the one that is expected, else
// the volume's id; empty if that is none, as of a static volume with a name of its own.
func (v nodeVolume) makeUUID() string {
	if v.FilesystemUUID != "" {
		return v.FilesystemUUID
	}
	if id, ok := rackID(v.ID); ok {
		return string(id)
	}
	return ""
}

// serial is the serial number of the volume's device.
func (v nodeVolume) serial() string { return diskSerial(v.DiskName) }

// checkNodeCapability answers for a capability that is missing or that volumes do not have.
func checkNodeCapability(c *csi.VolumeCapability) error {
	problem := capabilityProblem(c)
	switch {
	case problem.malformed:
		return fail(codes.InvalidArgument, ReasonCapabilityInvalid, "%s", problem.message)
	case problem.unsupported:
		// Node calls answer 9 for what exceeds the volume, where controller calls answer 3.
		return fail(codes.FailedPrecondition, ReasonCapabilityUnsupported, "%s", problem.message)
	}
	return nil
}

// checkPath answers for a path that no mount can have.
func checkPath(field, path string) error {
	switch {
	case path == "":
		return fail(codes.InvalidArgument, ReasonPathInvalid, "%s is missing", field)
	case !filepath.IsAbs(path):
		return fail(codes.InvalidArgument, ReasonPathInvalid, "%s has to be an absolute path", field)
	case filepath.Clean(path) == "/":
		return fail(codes.InvalidArgument, ReasonPathInvalid, "%s cannot be the root directory", field)
	}
	return checkPathText(field, path)
}

// checkPathText answers for what the kernel takes for no path at all.
func checkPathText(field, path string) error {
	switch {
	case len(path) >= unix.PathMax:
		return fail(codes.InvalidArgument, ReasonPathInvalid, "%s has %d bytes; Linux takes less than %d",
			field, len(path), unix.PathMax)
	case strings.ContainsRune(path, 0):
		return fail(codes.InvalidArgument, ReasonPathInvalid, "%s contains a NUL", field)
	}
	return nil
}

// volumeOf gathers a volume from the parts of a request. publish_context wins over volume_context:
// the controller has just read it from the rack.
func volumeOf(id string, c *csi.VolumeCapability, published, volume map[string]string) (nodeVolume,
	error) {
	v := nodeVolume{ID: id, DiskName: published[ctxDiskName], Mode: c.GetAccessMode().GetMode()}
	if v.DiskName == "" {
		v.DiskName = volume[ctxDiskName]
	}
	if v.DiskName == "" {
		return v, refuse(ReasonDiskNameMissing, "neither publish_context nor volume_context holds "+
			"%s, the name of the disk; a static volume that no controller publishes needs it in "+
			"its volume attributes", ctxDiskName)
	}
	if size := published[ctxSizeBytes]; size != "" {
		n, err := strconv.ParseInt(size, 10, 64)
		if err != nil || n <= 0 {
			return v, fail(codes.InvalidArgument, ReasonDeviceWrongSize,
				"publish_context: %s has to be a positive number", ctxSizeBytes)
		}
		v.SizeBytes = n
	}
	v.ReadOnly = published[ctxReadOnly] == "true"
	v.Origin, v.Use = published[ctxOrigin], published[ctxUse]
	if want := published[ctxFilesystemUUID]; want != "" {
		id, ok := rackID(want)
		if !ok {
			return v, fail(codes.InvalidArgument, ReasonWrongFilesystem,
				"publish_context: %s has to be a UUID", ctxFilesystemUUID)
		}
		v.FilesystemUUID = string(id)
	}
	v.SourceBytes, _ = strconv.ParseInt(published[ctxSourceBytes], 10, 64)
	if c.GetBlock() != nil {
		v.Block = true
		return v, nil
	}
	v.FSType = c.GetMount().GetFsType()
	if v.FSType == "" {
		v.FSType = fsExt4
	}
	var err error
	if v.MountFlags, err = parseMountFlags(c.GetMount().GetMountFlags()); err != nil {
		return v, err
	}
	if v.Mkfs, err = parseMkfsOptions(volume[ctxMkfsOptions]); err != nil {
		return v, err
	}
	return v, v.Mkfs.check(v.FSType)
}

func (n *Node) devices() devices {
	ds := devices{sysfsRoot: n.SysfsRoot, devRoot: n.DevRoot}
	if ds.sysfsRoot == "" {
		ds.sysfsRoot = defaultSysfsRoot
	}
	if ds.devRoot == "" {
		ds.devRoot = defaultDevRoot
	}
	return ds
}

// openVolume opens a device that was found for the volume and compares its size with the disk's.
func (ds devices) openVolume(d device, v nodeVolume) (*heldDevice, error) {
	if v.SizeBytes != 0 && v.SizeBytes != d.SizeBytes {
		return nil, refuse(ReasonDeviceWrongSize, "%s with serial %q has %d bytes, but the disk has %d",
			d.Path, d.Serial, d.SizeBytes, v.SizeBytes)
	}
	h, err := ds.open(d)
	if err == nil {
		h.volume = v.ID
	}
	return h, err
}
