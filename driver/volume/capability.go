package volume

import (
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// The filesystems a volume may have, as the kernel names them; ext4 when the request names none.
const (
	Ext3  = "ext3"
	Ext4  = "ext4"
	XFS   = "xfs"
	Btrfs = "btrfs"
)

// IsFilesystem reports whether volumes may have filesystems of that type.
func IsFilesystem(fsType string) bool { return slices.Contains(Filesystems, fsType) }

// Filesystems are those a volume may have, the default first.
var Filesystems = []string{Ext4, Ext3, XFS, Btrfs}

// supportedModes: a disk is attached to one instance at a time, for reading and writing (RFD 595).
// How many workloads of that one node share it is the node's affair.
var supportedModes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
}

// CapabilityFault says what is wrong with a volume capability. The zero value is a fine one.
type CapabilityFault struct {
	Malformed   bool // INVALID_ARGUMENT everywhere
	Unsupported bool // INVALID_ARGUMENT of the controller, FAILED_PRECONDITION of the node
	Message     string
}

// CapabilityProblem finds what is wrong with a volume capability.
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
	const mostFlagBytes = 4 << 10
	total := 0
	for _, f := range m.GetMountFlags() {
		total += len(f)
	}
	fsType := m.GetFsType()
	switch {
	case fsType != "" && !IsFilesystem(fsType):
		return unsupported("fs_type %.40q is not supported; it is one of %s", fsType,
			strings.Join(Filesystems, ", "))
	case total > mostFlagBytes:
		return malformed("mount_flags have %d bytes; CSI allows %d", total, mostFlagBytes)
	case m.GetVolumeMountGroup() != "":
		return unsupported("volume_mount_group is not supported; let the CO set the group of the " +
			"files (Kubernetes: fsGroup)")
	}
	return CapabilityFault{}
}

func malformed(message string, args ...any) CapabilityFault {
	return CapabilityFault{Malformed: true, Message: fmt.Sprintf(message, args...)}
}

func unsupported(message string, args ...any) CapabilityFault {
	return CapabilityFault{Unsupported: true, Message: fmt.Sprintf(message, args...)}
}

// CheckCapabilities answers for the capabilities of a controller's request, all of which have to be
// ones that volumes have.
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

// CheckCapability answers for one capability of a controller's request.
func CheckCapability(c *csi.VolumeCapability) error {
	switch p := CapabilityProblem(c); {
	case p.Malformed:
		return csierr.New(csierr.CapabilityInvalid, "%s", p.Message)
	case p.Unsupported:
		return csierr.New(csierr.CapabilityUnsupported, "%s", p.Message)
	}
	// A node would refuse them when the volume is there.
	if _, err := ParseMountFlags(c.GetMount().GetMountFlags()); err != nil {
		return csierr.Coded(codes.InvalidArgument, csierr.MountFlags, "%s", err)
	}
	return nil
}
