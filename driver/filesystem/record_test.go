//go:build linux

package filesystem

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The records of an unfinished format go before a device is published as one, but not from a disk
// that is in use or may not be written.
func TestRecordsAreDroppedOnlyFromADiskThatIsFree(t *testing.T) {
	own := Volume{ID: "v", DiskName: "d", SizeBytes: 64 * guesttest.MiB, FSType: volume.Ext4}
	for name, c := range map[string]struct {
		change  func(v *Volume)
		mounted bool
		left    int
	}{
		"of a disk that is free":      {func(*Volume) {}, false, 0},
		"of a disk that is mounted":   {func(*Volume) {}, true, 3},
		"of a disk that is read-only": {func(v *Volume) { v.ReadOnly = true }, false, 3},
		"of another volume's format":  {func(v *Volume) { v.ID = "w" }, false, 0},
		"of another disk's format":    {func(v *Volume) { v.DiskName = "e" }, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			device := openDisk(t, own.SizeBytes)
			csitest.Must(t, disk{device}.writeRecords(RecordOf(own), RecordOffsets(own.SizeBytes)))
			v := own
			c.change(&v)
			csitest.Must(t, (&Preparation{Device: device, Volume: v}).DropRecord(c.mounted))
			left := 0
			for _, at := range RecordOffsets(own.SizeBytes) {
				b, err := device.Read(at, sectorBytes)
				csitest.Must(t, err)
				if _, err := ParseRecord(b); err == nil {
					left++
				}
			}
			if left != c.left {
				t.Errorf("%d records are left, want %d", left, c.left)
			}
		})
	}
}
