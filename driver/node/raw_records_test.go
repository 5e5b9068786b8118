//go:build linux

package node

import (
	"bytes"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestWhatAWorkloadWroteToARawDeviceIsNotErasedAsARecord(t *testing.T) {
	for _, grow := range []int64{0, 1 << 20} {
		v := newGuest(t).disk(256, "block")
		must(t, v.stage())
		must(t, v.publish("dev"))
		nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
		must(t, err)
		r := filesystem.RecordOf(nv.Volume)
		r.GrowFrom = grow
		b, err := r.Encode()
		must(t, err)
		// a partition table and, in it, a filesystem with a file that has these bytes
		v.disk.WriteAt(t, 446, []byte{0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0xF0, 7, 0})
		v.disk.WriteAt(t, 510, []byte{0x55, 0xAA})
		v.disk.WriteAt(t, 50*guesttest.MiB, bytes.Repeat([]byte("a guest's filesystem "), 5000))
		slots := filesystem.RecordOffsets(v.disk.SizeBytes)
		if grow > 0 {
			slots = filesystem.GrowthOffsets(v.disk.SizeBytes)
		}
		for _, slot := range slots {
			v.disk.WriteAt(t, slot, b)
		}
		must(t, v.unpublish("dev"))
		must(t, v.unstage())
		same := v.disk.Same(t)
		must(t, v.stage())
		must(t, v.publish("dev"))
		same()
		must(t, v.unpublish("dev"))
		must(t, v.unstage())
	}
}

func TestTheRecordsOfAFormatAreGoneBeforeADeviceIsShownAsOne(t *testing.T) {
	for name, show := range map[string]func(v testVolume) error{
		"staged":              testVolume.stage,
		"published":           func(v testVolume) error { return v.publish("dev") },
		"published read-only": func(v testVolume) error { return v.publishReadOnly("dev") },
	} {
		t.Run(name, func(t *testing.T) {
			v := newGuest(t).disk(64, volume.Ext4)
			v.Whole = true
			interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
			raw := v
			raw.FSType, raw.ID = "block", "the-handle-of-another-cluster"
			must(t, show(raw))
			if n := recordsOn(t, v.disk); n != 0 {
				t.Fatalf("%d records are left", n)
			}
		})
	}
}

func TestABtrfsIsNotGrownOverWhatFollowsACopyOfItsBlock(t *testing.T) {
	v := behind(t, volume.Btrfs)
	v.Tag = map[string]string{volume.CtxUse: volume.UseBoth}
	v.Whole = true
	uuid := v.filesystems(t)[0].MetadataUUID
	head := make([]byte, 64<<10)
	copy(head[32:], uuid[:])
	copy(head[20<<10:], bytes.Repeat([]byte("what a raw workload has written. "), 1300))
	v.disk.WriteAt(t, 2*beforeGrowth, head)
	must(t, v.stage())
	if v.isGrown(t) {
		t.Error("it has grown over data")
	}
	must(t, v.unstage())
}

func TestARecordThatARawWorkloadWroteGrowsNothingOverItsData(t *testing.T) {
	v := behind(t, volume.Ext4)
	v.Tag = map[string]string{volume.CtxUse: volume.UseBoth}
	v.Whole = true
	v.writeGrowthRecord(t, beforeGrowth, v.filesystems(t)[0].Mounted)
	v.disk.WriteAt(t, 2*beforeGrowth+4096, []byte("counter=4711\n"))
	v.disk.WriteAt(t, beforeGrowth, []byte("counter=4711\n"))
	before := v.disk.DigestFrom(t, beforeGrowth)
	must(t, v.stage())
	if v.isGrown(t) {
		t.Error("it has grown over data")
	}
	must(t, v.unstage())
	if v.disk.DigestFrom(t, beforeGrowth) != before {
		t.Error("written")
	}
}

// writeGrowthRecord writes a record that a growth of the ext on the disk was cut off. mountedAt is
// the time of the ext's last mount.
func (v testVolume) writeGrowthRecord(t *testing.T, growFrom int64, mountedAt int64) {
	t.Helper()
	nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
	must(t, err)
	r := filesystem.RecordOf(nv.Volume)
	r.GrowFrom, r.Mounted, r.Checked = growFrom, mountedAt, true
	b, err := r.Encode()
	must(t, err)
	v.disk.WriteAt(t, filesystem.GrowthOffsets(v.disk.SizeBytes)[0], b)
}
