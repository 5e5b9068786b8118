package filesystem

import (
	"encoding/binary"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
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

func TestARecordFitsIntoOneSector(t *testing.T) {
	const most = recordBytes - recordTextAt
	r := Record{Volume: "v", Filesystem: volume.Ext4}
	r.Disk = strings.Repeat("d", most-len(csitest.Got(json.Marshal(r))(t)))
	b := csitest.Got(r.Encode())(t)
	if got, err := ParseRecord(b); err != nil || got != r {
		t.Fatalf("the longest record is %+v, %v", got, err)
	}
	binary.LittleEndian.PutUint32(b[recordLengthAt:], most+1)
	binary.LittleEndian.PutUint32(b[recordChecksumAt:], recordChecksum(b))
	if got, err := ParseRecord(b); err == nil {
		t.Errorf("a longer record is %+v", got)
	}
}

func TestARecordOmitsAFilesystemUUIDThatEqualsTheVolumesID(t *testing.T) {
	const id, another = "0b54dc0e-93a4-4f5f-8f5d-000000000001", "0b54dc0e-93a4-4f5f-8f5d-000000000002"
	own, copied := RecordOf(Volume{ID: id}), RecordOf(Volume{ID: id, FilesystemUUID: another})
	if own.UUID != "" || copied.UUID != another {
		t.Errorf("the records are %+v and %+v", own, copied)
	}
}
