package filesystem

import (
	"slices"
	"testing"
)

const mib, gib = 1 << 20, 1 << 30

// Record offsets are part of the on-disk format: a later version must find the records.
func TestRecordOffsetsNeverChange(t *testing.T) {
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
