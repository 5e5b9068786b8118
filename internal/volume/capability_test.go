package volume

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

var (
	must         = csitest.Must
	fails, coded = csitest.Fails, csitest.Coded
)

func TestAccessModes(t *testing.T) { // D-16
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

func TestCapabilities(t *testing.T) { // CV-4, CV-5
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
		{"mount flags of 4096 bytes (B-2)", flagged(4096), false, false},
		{"mount flags of 4097 bytes (B-2)", flagged(4097), true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := CapabilityProblem(test.c)
			if p.Malformed != test.malformed || p.Unsupported != test.unsupported {
				t.Fatalf("got %+v", p)
			}
			if (p.Message == "") != (p == CapabilityFault{}) || strings.Contains(p.Message, "tweety") {
				t.Errorf("the message is %q", p.Message)
			}
		})
	}
	loop := csitest.Filesystem("ext4")
	loop.GetMount().MountFlags = []string{"noatime", "loop=/tweety"}
	fails(csierr.FieldMissing)(t, CheckCapabilities(nil))
	for _, c := range []struct {
		bad  *csi.VolumeCapability
		ends func(*testing.T, error)
	}{
		{csitest.Filesystem("ntfs"), fails(csierr.CapabilityUnsupported)},
		{loop, coded(codes.InvalidArgument, csierr.MountFlags)},
		{nil, fails(csierr.CapabilityInvalid)},
	} {
		c.ends(t, CheckCapabilities([]*csi.VolumeCapability{block, c.bad}))
	}
}

func TestDiskSize(t *testing.T) { // CV-11, CV-12
	const bytes, half = 1, int64(GiB / 2)
	tooLarge, invalid := fails(csierr.CapacityOutOfRange), fails(csierr.CapacityInvalid)
	for _, test := range []struct {
		name  string
		r     *csi.CapacityRange
		floor int64
		want  int64                   // in GiB
		ends  func(*testing.T, error) // nil means success
	}{
		{"nothing asked", nil, 0, 10, nil},
		{"one byte is one GiB", csitest.Range(bytes, 0), 0, 1, nil},
		{"whole GiB stay", csitest.Range(5*GiB, 0), 0, 5, nil},
		{"one and a half become two (D-22)", csitest.Range(GiB+half, 0), 0, 2, nil},
		{"an exact size", csitest.Range(3*GiB, 3*GiB), 0, 3, nil},
		{"only a limit above the default", csitest.Range(0, 100*GiB), 0, 10, nil},
		{"only a limit below it", csitest.Range(0, 3*GiB+half), 0, 3, nil},
		{"the largest", csitest.Range(1023*GiB, 0), 0, 1023, nil},
		{"limit below required (E-25)", csitest.Range(3*GiB, 2*GiB), 0, 0, tooLarge},
		{"a range that is empty", csitest.Range(0, 0), 0, 0, invalid},
		{"negative required", csitest.Range(-1, 0), 0, 0, invalid},
		{"a source without a range (CV-17)", nil, 4 * GiB, 4, nil},
		{"a source in a larger volume (CV-17)", csitest.Range(6*GiB, 0), 4 * GiB, 6, nil},
		{"a source above required and below the limit (E-25)", csitest.Range(GiB, 9*GiB), 4 * GiB, 4,
			nil},
		{"a source with only a limit", csitest.Range(0, 90*GiB), 4 * GiB, 4, nil},
		{"an image that is no whole GiB", nil, GiB + 512, 2, nil},
		{"a limit below the source", csitest.Range(0, 3*GiB), 4 * GiB, 0,
			fails(csierr.CapacityOutOfRange, "less than the source, which")},
		{"a limit between source and whole GiB", csitest.Range(0, 3*GiB+1), 3*GiB + 1, 0,
			fails(csierr.CapacityOutOfRange, "is above limit_bytes")},
		{"a range between whole GiB", csitest.Range(GiB+1, GiB+2), 0, 0,
			fails(csierr.CapacityOutOfRange, "disks have whole GiB, at l")},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := ParseCapacityRange(test.r)
			var got int64
			if err == nil {
				got, err = r.DiskSize(test.floor, MaxDistributedBytes)
			}
			if test.ends != nil {
				test.ends(t, err)
			} else if err != nil || got != test.want*GiB {
				t.Errorf("got %d, %v; want %d GiB", got, err, test.want)
			}
		})
	}
	r := csitest.Got(ParseCapacityRange(csitest.Range(2*GiB, 3*GiB)))(t)
	for size, want := range map[int64]bool{2*GiB - 1: false, 2 * GiB: true, 3 * GiB: true,
		3*GiB + 1: false} {
		if got := r.Contains(size); got != want {
			t.Errorf("%d bytes are in it: %v, want %v", size, got, want)
		}
	}
}
