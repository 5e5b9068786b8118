//go:build linux

package filesystem

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// TestEveryMkfsLeavesARecordAndKnownTraces checks what repeating an unfinished format relies
// on: no mkfs of the driver, whatever its options, overwrites all records on a disk, and every byte
// that it wrote is recognized. Otherwise the disk would be refused forever. The long form, with
// PROOF_DURATION set, tries every size and all options in blocks of every size; the whole form
// tries each option in blocks of one size.
func TestEveryMkfsLeavesARecordAndKnownTraces(t *testing.T) {
	long := os.Getenv("PROOF_DURATION") != ""
	sizes := []int64{64 * guesttest.MiB, 300 * guesttest.MiB, guesttest.GiB}
	if long {
		sizes = append(sizes, 128*guesttest.MiB, 1500*guesttest.MiB, 3*guesttest.GiB,
			10*guesttest.GiB, 100*guesttest.GiB, 1023*guesttest.GiB)
	}
	type disk struct {
		size            int64
		block           int
		fsType, options string
	}
	var cases []disk
	for s, size := range sizes {
		for f, fsType := range volume.Filesystems {
			for i, options := range slotOptions(fsType, size) {
				if size >= guesttest.GiB && i > 1 && !long {
					break
				}
				for b, block := range volume.BlockSizes {
					if long || (s+f+i)%len(volume.BlockSizes) == b {
						cases = append(cases, disk{size, block, fsType, options})
					}
				}
			}
		}
	}
	cases = short.Some(t, 8, cases)
	tried := 0
	for _, c := range cases {
		t.Run(fmt.Sprintf("%s of %d MiB in blocks of %d with %q", c.fsType, c.size/guesttest.MiB,
			c.block, c.options), func(t *testing.T) {
			if mkfsAmongRecords(t, c.size, c.block, c.fsType, c.options) {
				tried++
			}
		})
	}
	// Some filesystems cannot be made on such a disk; most can.
	if tried < min(20, len(cases)/4) {
		t.Fatalf("only %d filesystems could be made", tried)
	}
}

// slotOptions returns the extremes of what a StorageClass may ask for. Options with which mkfs
// writes a large part of the disk are left out for huge disks.
func slotOptions(fsType string, size int64) []string {
	switch fsType {
	case volume.Ext3, volume.Ext4:
		few := []string{"", "bytesPerInode=67108864", "fsBlockSize=1024", "fsBlockSize=2048"}
		if (fsType == volume.Ext3 && size > 3*guesttest.GiB) || size > 100*guesttest.GiB {
			return few[:2]
		}
		return append(few, "bytesPerInode=1024", "bytesPerInode=4096,inodeSize=2048,fsBlockSize=4096",
			"inodeSize=1024", "bytesPerInode=2048,fsBlockSize=4096,inodeSize=512", "reservedPercent=50",
			"label=data", "bytesPerInode=1024,inodeSize=256,fsBlockSize=1024")
	case volume.XFS:
		return []string{"", "fsBlockSize=1024", "fsBlockSize=2048", "inodeSize=2048", "reflink=false",
			"inodeSize=1024,fsBlockSize=2048", "label=data"}
	}
	return []string{"", "nodeSize=4096", "nodeSize=32768", "nodeSize=65536", "label=data"}
}

// mkfsAmongRecords runs a mkfs on a disk with records, of which one has to be left, beside bytes
// that are known as mkfs's. It returns false if mkfs refuses the disk.
func mkfsAmongRecords(t *testing.T, size int64, block int, fsType, options string) bool {
	t.Helper()
	g := guesttest.New(t)
	d := g.Attach(guesttest.Serial, size, guesttest.BlockSize(block))
	parsed, err := volume.ParseMkfsOptions(options)
	csitest.Must(t, err)
	v := Volume{ID: zeroVolume, DiskName: "d", SizeBytes: size, FSType: fsType, Mkfs: parsed}
	record, err := RecordOf(v).Encode()
	csitest.Must(t, err)
	for _, slot := range RecordOffsets(size) {
		d.WriteAt(t, slot, record)
	}
	name, args, err := mkfsCommand(v)
	csitest.Must(t, err)
	made, err := runTool(nil, name, append(args, d.Loop)...)
	if csitest.Must(t, err); made.Exit != 0 {
		return false
	}
	wantNewFeatures(t, d.ReadAt(t, 0, btrfsOffset+btrfsBytes), v)
	left := 0
	for _, slot := range RecordOffsets(size) {
		if bytes.Equal(d.ReadAt(t, slot, int64(len(record))), record) {
			left++
			d.WriteAt(t, slot, make([]byte, len(record)))
		}
	}
	if left == 0 {
		t.Error("no record is left")
	}
	if at := firstUnexplained(t, d, 0, expected{Mkfs: true}); at >= 0 {
		t.Errorf("the sector of the byte at %d: %x", at, d.ReadAt(t, at&^(sectorBytes-1), sectorBytes))
	}
	return true
}

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
