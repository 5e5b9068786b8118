package volume

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

var must = csitest.Must

func TestD16AccessModes(t *testing.T) {
	fine := map[csi.VolumeCapability_AccessMode_Mode]bool{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: true,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  true,
	}
	for number, name := range csi.VolumeCapability_AccessMode_Mode_name {
		mode := csi.VolumeCapability_AccessMode_Mode(number)
		p := CapabilityProblem(csitest.InMode(mode))
		switch {
		case fine[mode] && p != CapabilityFault{}:
			t.Errorf("%s is refused: %s", name, p.Message)
		case number == 0 && !p.Malformed:
			t.Errorf("%s is not missing", name)
		case number != 0 && !fine[mode] && (!p.Unsupported || !strings.Contains(p.Message, name)):
			t.Errorf("%s: got %+v, want a refusal that names it", name, p)
		}
	}
	if p := CapabilityProblem(csitest.InMode(99)); !p.Unsupported || !strings.Contains(p.Message,
		"99") {
		t.Errorf("a mode of the future: %+v", p)
	}
}

func TestCV4AndCV5Capabilities(t *testing.T) {
	block := csitest.Filesystem("")
	block.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	grouped := csitest.Filesystem("xfs")
	grouped.GetMount().VolumeMountGroup = "1000"
	flagged := func(bytes int) *csi.VolumeCapability {
		c := csitest.Filesystem("xfs")
		c.GetMount().MountFlags = []string{strings.Repeat("tweety", 1000)[:bytes]}
		return c
	}
	typeless := csitest.Filesystem("")
	typeless.AccessType = nil
	for _, test := range []struct {
		name                   string
		c                      *csi.VolumeCapability
		malformed, unsupported bool
	}{
		{"block", block, false, false},
		{"no filesystem named", csitest.Filesystem(""), false, false},
		{"ext4", csitest.Filesystem("ext4"), false, false},
		{"ext3", csitest.Filesystem("ext3"), false, false},
		{"xfs", csitest.Filesystem("xfs"), false, false},
		{"btrfs", csitest.Filesystem("btrfs"), false, false},
		{"ntfs", csitest.Filesystem("ntfs"), false, true},
		{"nothing", nil, true, false},
		{"no access mode", &csi.VolumeCapability{AccessType: block.AccessType}, true, false},
		{"no access type", typeless, true, false},
		{"a mount group", grouped, false, true},
		{"B-2 mount flags of 4096 bytes", flagged(4096), false, false},
		{"B-2 mount flags of 4097 bytes", flagged(4097), true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := CapabilityProblem(test.c)
			if p.Malformed != test.malformed || p.Unsupported != test.unsupported {
				t.Fatalf("got %+v", p)
			}
			if (p.Message == "") != (p == CapabilityFault{}) || strings.Contains(p.Message,
				"tweety") {
				t.Errorf("the message is %q", p.Message)
			}
		})
	}
	csitest.Want(t, CheckCapabilities(nil), codes.InvalidArgument, csierr.FieldMissing)
	csitest.Want(t, CheckCapabilities([]*csi.VolumeCapability{block, csitest.Filesystem("ntfs")}),
		codes.InvalidArgument, csierr.CapabilityUnsupported)
	loop := csitest.Filesystem("ext4")
	loop.GetMount().MountFlags = []string{"noatime", "loop=/tweety"}
	csitest.Want(t, CheckCapabilities([]*csi.VolumeCapability{block, loop}),
		codes.InvalidArgument, csierr.MountFlags)
	csitest.Want(t, CheckCapabilities([]*csi.VolumeCapability{block, nil}),
		codes.InvalidArgument, csierr.CapabilityInvalid)
}
