//go:build linux

package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestRecordsOfEveryVolumeAreErasedBeforeRawUse(t *testing.T) {
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), volume.Ext4)
	v.Whole = true
	v.Tag = map[string]string{volume.CtxUse: volume.UseBoth}
	interruptFormat(t, "exit 1", v.stage)
	raw := v
	raw.FSType, raw.ID = "block", "the-handle-of-another-cluster"
	must(t, raw.stage())
	must(t, raw.publish("dev"))
	v.disk.WriteAt(t, 0, append(make([]byte, 2048), []byte("counter=4711\n")...))
	v.disk.WriteAt(t, 100*guesttest.MiB, []byte("counter=4711\n"))
	must(t, raw.unpublish("dev"))
	must(t, raw.unstage())
	before := v.disk.Digest(t)
	err := v.stage()
	if err == nil {
		t.Error("a disk with raw data was formatted")
		must(t, v.unstage())
	} else if v.disk.Digest(t) != before {
		t.Error("written")
	}
}

func TestWhatAWorkloadWroteToARawDeviceIsNotErasedAsARecord(t *testing.T) {
	for _, grow := range []int64{0, 1 << 20} {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), "block")
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
		before := v.disk.Digest(t)
		must(t, v.stage())
		must(t, v.publish("dev"))
		if v.disk.Digest(t) != before {
			t.Error("the workload's bytes have changed, grow:", grow)
		}
		must(t, v.unpublish("dev"))
		must(t, v.unstage())
	}
}

func TestAWipedDiskIsNotFormattedBecauseOfAFile(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
			must(t, v.stage())
			must(t, os.WriteFile(filepath.Join(v.staging(), "hello"), []byte("rack"), 0o600))
			path := filepath.Join(v.staging(), "records")
			var st unix.Statfs_t
			must(t, unix.Statfs(v.staging(), &st))
			must(t, os.WriteFile(path, make([]byte, int(st.Bavail)*int(st.Bsize)*9/10), 0o600))
			must(t, v.unstage())
			for _, slot := range filesystem.RecordOffsets(v.disk.SizeBytes) {
				// as if the workload had written it to its file
				if !bytes.Equal(v.disk.ReadAt(t, slot, 4096), make([]byte, 4096)) {
					continue
				}
				v.disk.WriteAt(t, slot, v.formatRecord(t))
			}
			v.disk.WriteAt(t, 0, make([]byte, guesttest.MiB))
			before := v.disk.Digest(t)
			err := v.stage()
			if err == nil {
				t.Error("it was formatted")
				must(t, v.unstage())
			} else if v.disk.Digest(t) != before {
				t.Error("it was written")
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
	v.disk.WriteAt(t, 2*guesttest.GiB, head)
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
	v.writeGrowthRecord(t, guesttest.GiB)
	v.disk.WriteAt(t, 2*guesttest.GiB+4096, []byte("counter=4711\n"))
	v.disk.WriteAt(t, guesttest.GiB, []byte("counter=4711\n"))
	before := v.tail(t)
	must(t, v.stage())
	if v.isGrown(t) {
		t.Error("it has grown over data")
	}
	must(t, v.unstage())
	if v.tail(t) != before {
		t.Error("written")
	}
}

// A raw workload can forge everything on its disk: the records of a growth, a damaged superblock,
// and the copy that a check takes in its place.
func TestForgedRecordsLetNoCheckReachAnotherDisk(t *testing.T) {
	g := newGuest(t)
	d := twoDisks{g.Attach(guesttest.Serial, 256*guesttest.MiB),
		g.Attach(guesttest.OtherSerial, 64*guesttest.MiB)}
	d.tool(t, "mke2fs -q -O journal_dev -b 4096 $2")
	d.tool(t, "mke2fs -q -t ext4 -b 4096 -J device=$2 $1 50000")
	d.cutOff(t, volume.Ext4, "")
	v := g.volume(d.first, volume.Ext4)
	v.Tag, v.Whole = map[string]string{volume.CtxUse: volume.UseBoth}, true
	head := v.disk.ReadAt(t, 0, 4096)
	v.disk.WriteAt(t, 128*guesttest.MiB, head[1024:2048])
	clear(head[1024+0xD0 : 1024+0xE8])
	head[1024+0xE0] = 8   // now the journal is an inode
	head[1024+0x3FC] ^= 1 // and the checksum is wrong
	v.disk.WriteAt(t, 0, head)
	v.writeGrowthRecord(t, 50000*4096)
	before, other := v.disk.Digest(t), d.second.Digest(t)
	err := v.stage()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.FilesystemFeature)
	if v.disk.Digest(t) != before || d.second.Digest(t) != other {
		t.Error("a disk was written")
	}
	for name, b := range map[string][]byte{"no superblock": make([]byte, 1024),
		"damaged, too": head[1024:2048]} {
		v.disk.WriteAt(t, 128*guesttest.MiB, b)
		before = v.disk.Digest(t)
		csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged)
		if v.disk.Digest(t) != before {
			t.Errorf("the copy is %s, and the disk was written", name)
		}
	}
}

func TestForgedRecordsDoNotTellWhoseADiskIs(t *testing.T) {
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), volume.Ext4)
	v.Tag, v.Whole = map[string]string{volume.CtxUse: volume.UseBoth}, true
	guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop, "128M")
	mdMember(v.disk, t)
	v.writeGrowthRecord(t, 128*guesttest.MiB)
	before := v.disk.Digest(t)
	err := v.stage()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
	if !strings.Contains(err.Error(), "blkid finds") || v.disk.Digest(t) != before {
		t.Fatalf("written, or another evidence: %v", err)
	}
}

// writeGrowthRecord writes a record that a growth of the ext on the disk was cut off.
func (v testVolume) writeGrowthRecord(t *testing.T, growFrom int64) {
	t.Helper()
	nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
	must(t, err)
	r := filesystem.RecordOf(nv.Volume)
	r.GrowFrom, r.Mounted, r.Checked = growFrom, v.filesystems(t)[0].Mounted, true
	b, err := r.Encode()
	must(t, err)
	v.disk.WriteAt(t, filesystem.GrowthOffsets(v.disk.SizeBytes)[0], b)
}
