package filesystem

import (
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

const mib, gib = 1 << 20, 1 << 30

func TestWhatTheRackCreatedBlankBehindASnapshot(t *testing.T) {
	restored := Volume{Origin: volume.OriginSnapshot, Use: volume.UseFilesystem, SourceBytes: gib}
	with := func(change func(*Volume)) Volume {
		v := restored
		change(&v)
		return v
	}
	for name, c := range map[string]struct {
		v    Volume
		want int64
	}{
		"a volume from a snapshot": {restored, gib},
		"one from an image": {with(func(v *Volume) { v.Origin = volume.OriginImage }),
			4 * gib},
		"one without an ownership tag":    {with(func(v *Volume) { v.Origin = "" }), 4 * gib},
		"one that may be a raw device":    {with(func(v *Volume) { v.Use = "" }), 4 * gib},
		"one whose snapshot has no size":  {with(func(v *Volume) { v.SourceBytes = 0 }), 4 * gib},
		"one of a negative size":          {with(func(v *Volume) { v.SourceBytes = -4096 }), 4 * gib},
		"one of half a sector":            {with(func(v *Volume) { v.SourceBytes += 512 }), 4 * gib},
		"a snapshot larger than the disk": {with(func(v *Volume) { v.SourceBytes = 8 * gib }), 4 * gib},
		"a snapshot as large as the disk": {with(func(v *Volume) { v.SourceBytes = 4 * gib }), 4 * gib},
		"a snapshot of a single sector": {with(func(v *Volume) { v.SourceBytes = sectorBytes }),
			sectorBytes},
		"a snapshot of one sector more": {with(func(v *Volume) { v.SourceBytes += sectorBytes }),
			gib + sectorBytes},
	} {
		if got := c.v.blankFrom(4 * gib); got != c.want {
			t.Errorf("%s: blank from %d, want %d", name, got, c.want)
		}
	}
}

func TestOnlyADiskThatWasMadeBlankForFilesystemsIsSampled(t *testing.T) {
	for _, origin := range []string{"", volume.OriginBlank, volume.OriginImage,
		volume.OriginSnapshot} {
		for _, use := range []string{"", volume.UseFilesystem, volume.UseBlock} {
			want := origin == volume.OriginBlank && use == volume.UseFilesystem
			if got := (Volume{Origin: origin, Use: use}).madeBlank(); got != want {
				t.Errorf("origin %q, use %q: sampled is %v", origin, use, got)
			}
		}
	}
}

// The offsets are part of what stands on disks: a later driver has to find them again.
func TestTheOffsetsOfRecordsStayWhatTheyAre(t *testing.T) {
	for size, want := range map[int64][]int64{
		mib - 1:       nil,
		mib:           {160 << 10, 416 << 10, 768 << 10},
		128*mib - 512: {27*mib - 64<<10, 59*mib - 64<<10, 103*mib - 64<<10},
		128 * mib:     {24*mib - 64<<10, 56*mib - 64<<10, 104*mib - 64<<10},
		2*gib - 512:   {440*mib - 64<<10, 952*mib - 64<<10, 1656*mib - 64<<10},
		2 * gib:       {384*mib - 64<<10, 896*mib - 64<<10, 1664*mib - 64<<10},
	} {
		if got := RecordOffsets(size); !slices.Equal(got, want) {
			t.Errorf("of a disk of %d bytes: %d, want %d", size, got, want)
		}
	}
	for size, want := range map[int64][]int64{
		3*mib - 4096: nil,
		3 * mib:      {3*mib - 256<<10, 3*mib - 512<<10, 3*mib - 768<<10},
		gib + 512:    {gib - 256<<10, gib - 512<<10, gib - 768<<10},
	} {
		if got := GrowthOffsets(size); !slices.Equal(got, want) {
			t.Errorf("growth, of a disk of %d bytes: %d, want %d", size, got, want)
		}
	}
}
