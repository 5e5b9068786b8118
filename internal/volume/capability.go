package volume

import (
	"fmt"
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

// CapabilityFault is what is wrong with a volume capability. The zero value means nothing.
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
	// Otherwise the node would refuse them after the volume is made.
	m := c.GetMount()
	if _, err := ParseMountFlags(m.GetFsType(), m.GetMountFlags()); err != nil {
		return csierr.Coded(codes.InvalidArgument, csierr.MountFlags, "%s", err)
	}
	return nil
}
