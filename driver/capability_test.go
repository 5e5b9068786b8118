package driver

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// mountable is a capability for a filesystem.
func mountable(fsType string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{
			Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		},
		AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fsType},
		},
	}
}

func inMode(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	c := mountable("ext4")
	c.AccessMode.Mode = mode
	return c
}

func TestD16EveryAccessModeIsJudged(t *testing.T) {
	fine := map[csi.VolumeCapability_AccessMode_Mode]bool{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  true,
	}
	for number, name := range csi.VolumeCapability_AccessMode_Mode_name {
		mode := csi.VolumeCapability_AccessMode_Mode(number)
		p := capabilityProblem(inMode(mode))
		switch {
		case fine[mode] && p != capabilityFault{}:
			t.Errorf("%s is refused: %s", name, p.message)
		case number == 0 && !p.malformed:
			t.Errorf("%s is not missing", name)
		case number != 0 && !fine[mode] && (!p.unsupported || !strings.Contains(p.message, name)):
			t.Errorf("%s: got %+v, want a refusal that names it", name, p)
		}
	}
	if p := capabilityProblem(inMode(99)); !p.unsupported || !strings.Contains(p.message, "99") {
		t.Errorf("a mode of the future: %+v", p)
	}
}

func TestCV4AndCV5CapabilitiesAreJudged(t *testing.T) {
	block := mountable("")
	block.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	grouped := mountable("xfs")
	grouped.GetMount().VolumeMountGroup = "1000"
	flagged := mountable("xfs")
	flagged.GetMount().MountFlags = []string{strings.Repeat("tweety", 1000)}
	typeless := mountable("")
	typeless.AccessType = nil
	for _, test := range []struct {
		name                   string
		c                      *csi.VolumeCapability
		malformed, unsupported bool
	}{
		{"block", block, false, false},
		{"no filesystem named", mountable(""), false, false},
		{"ext4", mountable("ext4"), false, false},
		{"ext3", mountable("ext3"), false, false},
		{"xfs", mountable("xfs"), false, false},
		{"btrfs", mountable("btrfs"), false, false},
		{"ntfs", mountable("ntfs"), false, true},
		{"nothing", nil, true, false},
		{"no access mode", &csi.VolumeCapability{AccessType: block.AccessType}, true, false},
		{"no access type", typeless, true, false},
		{"a mount group", grouped, false, true},
		{"too many mount flags", flagged, true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := capabilityProblem(test.c)
			if p.malformed != test.malformed || p.unsupported != test.unsupported {
				t.Fatalf("got %+v", p)
			}
			if (p.message == "") != (p == capabilityFault{}) || strings.Contains(p.message,
				"tweety") {
				t.Errorf("the message is %q", p.message)
			}
		})
	}
	wantFailure(t, checkCapabilities(nil), codes.InvalidArgument, csierr.FieldMissing)
	wantFailure(t, checkCapabilities([]*csi.VolumeCapability{block, mountable("ntfs")}),
		codes.InvalidArgument, csierr.CapabilityUnsupported)
	loop := mountable("ext4")
	loop.GetMount().MountFlags = []string{"noatime", "loop=/tweety"}
	wantFailure(t, checkCapabilities([]*csi.VolumeCapability{block, loop}),
		codes.InvalidArgument, csierr.MountFlags)
	wantFailure(t, checkCapabilities([]*csi.VolumeCapability{block, nil}),
		codes.InvalidArgument, csierr.CapabilityInvalid)
}
