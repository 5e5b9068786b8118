package volume

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// A limit allows what is exactly as large, and nothing larger.
func TestWhatIsAsLargeAsALimitIsAllowed(t *testing.T) {
	withFlags := func(n int) *csi.VolumeCapability {
		c := csitest.Filesystem("")
		c.GetMount().MountFlags = []string{strings.Repeat("x", n)}
		return c
	}
	xfs := func(inode string) error {
		o, err := ParseMkfsOptions("fsBlockSize=4096,inodeSize=" + inode)
		csitest.Must(t, err)
		return o.Check(XFS)
	}
	three, err := ParseCapacityRange(csitest.Range(2*GiB, 3*GiB))
	csitest.Must(t, err)
	for name, c := range map[string]struct{ got, want bool }{
		"B-2 a name of 128 bytes":        {CheckName(strings.Repeat("x", 128)) == nil, true},
		"B-2 a name of 129 bytes":        {CheckName(strings.Repeat("x", 129)) == nil, false},
		"B-2 mount flags of 4096 bytes":  {CapabilityProblem(withFlags(4096)).Malformed, false},
		"B-2 mount flags of 4097 bytes":  {CapabilityProblem(withFlags(4097)).Malformed, true},
		"an xfs inode of half a block":   {xfs("2048") == nil, true},
		"a size below the range":         {three.Contains(2*GiB - 1), false},
		"the smallest size of the range": {three.Contains(2 * GiB), true},
		"the largest size of the range":  {three.Contains(3 * GiB), true},
		"a size above the range":         {three.Contains(3*GiB + 1), false},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %v, want %v", name, c.got, c.want)
		}
	}
}

func TestALocalDiskNeedsNoBlockSizeAndHasNoLargestSize(t *testing.T) {
	local, err := ParseParameters(map[string]string{"diskType": "local"})
	csitest.Must(t, err)
	distributed, err := ParseParameters(nil)
	csitest.Must(t, err)
	if local.Largest() <= MaxDistributedBytes || distributed.Largest() != MaxDistributedBytes {
		t.Errorf("the largest disks have %d and %d bytes", local.Largest(), distributed.Largest())
	}
}

func TestTheRefusalOfASourceSaysWhichLimitItExceeds(t *testing.T) {
	for want, c := range map[string]struct {
		r     *csi.CapacityRange
		floor int64
	}{
		"is less than the source's":  {csitest.Range(0, 3*GiB), 4 * GiB},
		"is above limit_bytes":       {csitest.Range(0, 3*GiB+1), 3*GiB + 1},
		"disks have whole GiB, at l": {csitest.Range(GiB+1, GiB+2), 0},
	} {
		if _, err := sizeFor(c.r, c.floor, MaxDistributedBytes); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestNoMountFlagsAreNoneGiven(t *testing.T) {
	for _, flags := range [][]string{nil, {"noatime"}} {
		o, err := ParseMountFlags(flags)
		csitest.Must(t, err)
		if o.Given != (len(flags) > 0) {
			t.Errorf("of %q given is %v", flags, o.Given)
		}
	}
}
