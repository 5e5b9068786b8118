package volume

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The filesystems of volumes, as the kernel names them; ext4 is the default.
const (
	Ext3  = "ext3"
	Ext4  = "ext4"
	XFS   = "xfs"
	Btrfs = "btrfs"
)

// IsFilesystem reports whether volumes may have a filesystem of that type.
func IsFilesystem(fsType string) bool { return slices.Contains(Filesystems, fsType) }

// Filesystems are the filesystems of volumes, the default first.
var Filesystems = []string{Ext4, Ext3, XFS, Btrfs}

// supportedModes are the access modes of a disk that is attached to one instance at a time, for
// reading and writing (RFD 595). The node decides how many of its workloads share the disk.
var supportedModes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
}

// CapabilityFault describes what is wrong with a volume capability. The zero value means that it is
// valid.
type CapabilityFault struct {
	Malformed   bool // INVALID_ARGUMENT everywhere
	Unsupported bool // INVALID_ARGUMENT on the controller, FAILED_PRECONDITION on the node
	Message     string
}

// CapabilityProblem returns what is wrong with a volume capability.
func CapabilityProblem(c *csi.VolumeCapability) CapabilityFault {
	mode := c.GetAccessMode().GetMode()
	known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]
	switch {
	case c == nil:
		return malformed("volume_capability is missing")
	case c.GetAccessMode() == nil || mode == csi.VolumeCapability_AccessMode_UNKNOWN:
		return malformed("volume_capability: access_mode is missing")
	case c.GetBlock() == nil && c.GetMount() == nil:
		return malformed("volume_capability: access_type is missing; it is block or mount")
	case !slices.Contains(supportedModes, mode):
		if known == "" {
			known = fmt.Sprintf("number %d", mode)
		}
		return unsupported("access mode %s is not supported: a disk can be attached to one "+
			"instance, for writing; use ReadWriteOnce or ReadWriteOncePod (SINGLE_NODE_WRITER)",
			known)
	}
	return mountProblem(c.GetMount())
}

func mountProblem(m *csi.VolumeCapability_MountVolume) CapabilityFault {
	const maxFlagBytes = 4 << 10
	total := 0
	for _, f := range m.GetMountFlags() {
		total += len(f)
	}
	fsType := m.GetFsType()
	switch {
	case fsType != "" && !IsFilesystem(fsType):
		return unsupported("fs_type %.40q is not supported; it is one of %s", fsType,
			strings.Join(Filesystems, ", "))
	case total > maxFlagBytes:
		return malformed("mount_flags have %d bytes; CSI allows %d", total, maxFlagBytes)
	case m.GetVolumeMountGroup() != "":
		return unsupported("volume_mount_group is not supported; let the orchestrator set the group of " +
			"the files (Kubernetes: fsGroup)")
	}
	return CapabilityFault{}
}

func malformed(message string, args ...any) CapabilityFault {
	return CapabilityFault{Malformed: true, Message: fmt.Sprintf(message, args...)}
}

func unsupported(message string, args ...any) CapabilityFault {
	return CapabilityFault{Unsupported: true, Message: fmt.Sprintf(message, args...)}
}

// CheckCapabilities checks the capabilities of a controller's request, all of which have to be
// supported.
func CheckCapabilities(capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return csierr.New(csierr.FieldMissing, "volume_capabilities is missing")
	}
	for _, c := range capabilities {
		if err := CheckCapability(c); err != nil {
			return err
		}
	}
	return nil
}

// CheckCapability checks one capability of a controller's request.
func CheckCapability(c *csi.VolumeCapability) error {
	switch p := CapabilityProblem(c); {
	case p.Malformed:
		return csierr.New(csierr.CapabilityInvalid, "%s", p.Message)
	case p.Unsupported:
		return csierr.New(csierr.CapabilityUnsupported, "%s", p.Message)
	}
	// Otherwise the node would refuse the flags after the volume is made.
	m := c.GetMount()
	if _, err := ParseMountFlags(m.GetFsType(), m.GetMountFlags()); err != nil {
		return csierr.Coded(codes.InvalidArgument, csierr.MountFlags, "%s", err)
	}
	return nil
}

const (
	// GiB is the unit of a disk's size.
	GiB = 1 << 30
	// defaultSizeBytes is the size of a volume without a requested size.
	defaultSizeBytes = 10 * GiB
	// MaxDistributedBytes is the size of a rack's largest distributed disk. Only the rack knows the
	// largest local disk.
	MaxDistributedBytes = 1023 * GiB
)

// CapacityRange is a requested range in bytes; max is MaxInt64 if there is no limit.
type CapacityRange struct {
	given    bool
	min, max int64
}

// ParseCapacityRange parses a capacity range in bytes; nil sets no limit.
func ParseCapacityRange(r *csi.CapacityRange) (CapacityRange, error) {
	if r == nil {
		return CapacityRange{max: math.MaxInt64}, nil
	}
	out := CapacityRange{given: true, min: r.GetRequiredBytes(), max: r.GetLimitBytes()}
	switch {
	case out.min < 0 || out.max < 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range is negative")
	case out.min == 0 && out.max == 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range sets neither required_bytes nor "+
			"limit_bytes; leave it out for a volume of %s",
			SizeText(defaultSizeBytes))
	case out.max == 0:
		out.max = math.MaxInt64
	case out.max < out.min:
		return out, csierr.New(csierr.CapacityOutOfRange, "limit_bytes is %s, less than "+
			"required_bytes, which is %s", SizeText(out.max), SizeText(out.min))
	}
	return out, nil
}

// Contains reports whether a size in bytes is in the range.
func (r CapacityRange) Contains(sizeBytes int64) bool {
	return r.min <= sizeBytes && sizeBytes <= r.max
}

// DiskSize returns the size of the disk to create: whole GiB, as the rack requires, within the
// range. floor is the size of the source, 0 for a blank disk; ceiling is the size of the rack's
// largest disk.
func (r CapacityRange) DiskSize(floor, ceiling int64) (int64, error) {
	// Without a requested size use the source's size, or the default.
	size := r.min
	if size == 0 && floor == 0 {
		size = min(defaultSizeBytes, max(r.max-r.max%GiB, GiB))
	}
	size = max(size, floor, GiB)
	if size > ceiling {
		return 0, csierr.New(csierr.CapacityOutOfRange, "%s are more than the largest disk, %s",
			SizeText(size), SizeText(ceiling))
	}
	size = roundUp(size)
	if size > r.max {
		if floor > r.max {
			return 0, csierr.New(csierr.CapacityOutOfRange, "limit_bytes is %s, less than the source, "+
				"which has %s", SizeText(r.max), SizeText(floor))
		}
		return 0, csierr.New(csierr.CapacityOutOfRange, "disks have whole GiB, at least one, and the "+
			"next size, %s, is above limit_bytes, which is %s", SizeText(size), SizeText(r.max))
	}
	return size, nil
}

// roundUp rounds to whole GiB; near the end of int64 it rounds to the last whole one.
func roundUp(sizeBytes int64) int64 {
	if sizeBytes > math.MaxInt64-GiB {
		return math.MaxInt64 / GiB * GiB
	}
	return (sizeBytes + GiB - 1) / GiB * GiB
}
