//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// grown returns a volume with a file in an ext filesystem, on a disk that is twice as large.
func grown(t *testing.T, fsType string) testVolume {
	t.Helper()
	g := newGuest(t)
	small := g.volume(g.Attach(guesttest.Serial, 128*guesttest.MiB), fsType)
	must(t, small.stage())
	must(t, os.WriteFile(filepath.Join(small.staging(), "hello"), []byte("rack"), 0o600))
	must(t, small.unstage())
	g.Unplug(small.disk)
	file := small.disk.Copy(t)
	must(t, os.Truncate(file, 256*guesttest.MiB))
	return g.volume(g.AttachFile(guesttest.Serial, file), fsType)
}

// interruptGrowth stages a volume whose ext is to grow, with a resize2fs that fails at once.
func interruptGrowth(t *testing.T, v testVolume) {
	t.Helper()
	path := os.Getenv("PATH")
	tools(t, map[string]string{"resize2fs": "exit 1"})
	csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
	must(t, os.Setenv("PATH", path))
}

func (v testVolume) hasGrown(t *testing.T) {
	t.Helper()
	must(t, v.stage())
	holds(t, filepath.Join(v.staging(), "hello"), "rack")
	must(t, v.unstage())
	for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
		if hasRecord(t, v.disk, slot) {
			t.Fatalf("a record is left at %d", slot)
		}
	}
	guesttest.Run(t, "e2fsck", "-fn", v.disk.Loop)
	found := v.filesystems(t)
	if len(found) != 1 || found[0].SizeBytes+found[0].UnitBytes <= v.disk.SizeBytes {
		t.Fatalf("it has not grown: %+v", found)
	}
}

func TestAGrowthThatWasCutOffIsDoneAgain(t *testing.T) {
	t.Run("an ext4 whose superblock was being written by the check", func(t *testing.T) {
		v := grown(t, volume.Ext4)
		path := os.Getenv("PATH")
		tools(t, map[string]string{"e2fsck": "exit 8"})
		csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		must(t, os.Setenv("PATH", path))
		v.disk.WriteAt(t, 1024+0x40, []byte{1, 2, 3}) // the time of the last check
		v.hasGrown(t)
	})
	t.Run("no repair with -y overwrites an unreadable block", func(t *testing.T) {
		v := grown(t, volume.Ext4)
		interruptGrowth(t, v)
		path, before := os.Getenv("PATH"), v.disk.Digest(t)
		unread := func(option string, status int) map[string]string {
			return map[string]string{"e2fsck": fmt.Sprintf(`case " $* " in *" %s "*)
echo "Error reading block 9541 (Input/output error).  Ignore error?"
exit %d;;
esac
"$real" "$@"`, option, status)}
		}
		tools(t, unread("-n", 4))
		csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		if v.disk.Digest(t) != before {
			t.Error("the disk was written")
		}
		must(t, os.Setenv("PATH", path))
		// The disk can be read at first, but not during the repair.
		tools(t, unread("-y", 1))
		csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		must(t, os.Setenv("PATH", path))
		v.hasGrown(t)
	})
}

func TestABtrfsWhoseGrowthIsNotCommittedIsNotStaged(t *testing.T) {
	g := newGuest(t)
	dir := smallTmpfs(t, 64*guesttest.MiB)
	file := sparse(t, dir, 256*guesttest.MiB)
	small := g.volume(g.AttachFile(guesttest.Serial, file), volume.Btrfs)
	must(t, small.stage())
	must(t, os.WriteFile(filepath.Join(small.staging(), "hello"), []byte("rack"), 0o600))
	guesttest.Run(t, "fstrim", small.staging())
	must(t, small.unstage())
	g.Unplug(small.disk)
	must(t, os.Truncate(file, 512*guesttest.MiB))
	v := g.volume(g.AttachFile(guesttest.Serial, file), volume.Btrfs)
	for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
		v.disk.WriteAt(t, slot, make([]byte, blockdev.AlignBytes)) // there is room for the records
	}
	rest := filepath.Join(dir, "rest")
	if err := os.WriteFile(rest, make([]byte, 64*guesttest.MiB), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill a tmpfs: %v", err)
	}
	err := v.stage()
	csitest.Want(t, err, codes.Internal, csierr.NodeToolFailed, "could not be committed")
	must(t, os.Remove(rest))
	must(t, v.stage())
	holds(t, filepath.Join(v.staging(), "hello"), "rack")
	var st unix.Statfs_t
	must(t, unix.Statfs(v.staging(), &st))
	if got := int64(st.Blocks) * st.Bsize; got != v.disk.SizeBytes {
		t.Errorf("the filesystem has %d bytes, want %d", got, v.disk.SizeBytes)
	}
	must(t, v.unstage())
}

func TestAnExtWithBigallocIsMountedWithoutGrowing(t *testing.T) {
	v := newGuest(t).disk(512, volume.Ext4)
	guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", "-b", "4096", "-O", "bigalloc", v.disk.Loop, "128M")
	for _, older := range []bool{false, true} {
		if older { // an older driver has started to grow it
			v.writeGrowthRecord(t, 128*guesttest.MiB, v.filesystems(t)[0].Mounted)
		}
		must(t, v.stage())
		must(t, v.unstage())
		v.check(t)
		if hasRecord(t, v.disk, filesystem.GrowthOffsets(v.disk.SizeBytes)[0]) {
			t.Fatal("a record is left")
		}
		if sb := v.filesystems(t)[0]; sb.SizeBytes != 128*guesttest.MiB {
			t.Fatalf("it has %d bytes", sb.SizeBytes)
		}
	}
}

func TestTheHealthReportsAFilesystemThatIsNotGrown(t *testing.T) { // NS-13
	v := grown(t, volume.Ext4)
	v.Whole, v.guest.state = true, filepath.Join(v.guest.Dir, "state") // it records the size
	v.disk.WriteAt(t, 200*guesttest.MiB, []byte("what somebody else has written"))
	must(t, v.stage())
	got, err := v.guest.node().NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{
		VolumeId: v.ID, StagingTargetPath: v.staging()})
	must(t, err)
	entries, said := got.GetVolumeHealth().GetHealthStatuses(), v.guest.log.String()
	if len(entries) != 1 || entries[0].GetReason() != string(csierr.FilesystemNotGrown) ||
		!strings.Contains(said, "not grown") || !strings.Contains(said, "offset ") {
		t.Errorf("the health is %v, and the log %s", entries, said)
	}
}

func TestAForgedRecordIsNotErased(t *testing.T) {
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
		// The workload has a partition with a filesystem, in which a file has a record's bytes.
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

func TestRecordsAreErasedBeforeARawPublish(t *testing.T) {
	unfinished := map[string]func(t *testing.T) (testVolume, []int64){
		"of a format": func(t *testing.T) (testVolume, []int64) {
			v := newGuest(t).disk(64, volume.Ext4)
			v.Whole = true
			interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
			return v, filesystem.RecordOffsets(v.disk.SizeBytes)
		},
		"of a growth": func(t *testing.T) (testVolume, []int64) {
			v := grown(t, volume.Ext4)
			v.Tag = map[string]string{volume.CtxUse: volume.UseBoth,
				volume.CtxOrigin: volume.OriginSnapshot, volume.CtxSourceBytes: fmt.Sprint(128 << 20)}
			interruptGrowth(t, v)
			return v, filesystem.GrowthOffsets(v.disk.SizeBytes)
		},
	}
	for name, show := range map[string]func(v testVolume) error{
		"staged":              testVolume.stage,
		"published":           func(v testVolume) error { return v.publish("dev") },
		"published read-only": func(v testVolume) error { return v.publishReadOnly("dev") },
	} {
		for of, begin := range unfinished {
			t.Run(of+", "+name, func(t *testing.T) {
				v, slots := begin(t)
				v.FSType, v.ID, v.Static = "block", "the-handle-of-another-cluster", name == "published"
				must(t, show(v))
				for _, slot := range slots {
					if hasRecord(t, v.disk, slot) {
						t.Errorf("a record is left at %d", slot)
					}
				}
			})
		}
	}
}

// writeGrowthRecord writes the record of an interrupted growth of the ext on the disk. mountedAt is
// the time of the last mount of the ext.
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
