//go:build linux

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// tools puts scripts before programs of the same names in PATH. $real is the path of the program.
func tools(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		real := csitest.Got(exec.LookPath(name))(t)
		script = "#!/bin/sh\nreal=" + real + "\n" + script + "\n"
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func with(t *testing.T, scripts map[string]string, call func() error) error {
	t.Helper()
	before := os.Getenv("PATH")
	tools(t, scripts)
	defer func() { must(t, os.Setenv("PATH", before)) }()
	return call()
}

func (v testVolume) interruptFormat() {
	v.guest.t.Helper()
	const script = `"$real" "$@" && exit 1`
	csitest.Want(v.guest.t, with(v.guest.t, map[string]string{"mke2fs": script, "mkfs.xfs": script,
		"mkfs.btrfs": script}, v.stage), codes.Internal, csierr.NodeToolFailed)
}

func (v testVolume) hasNoRecords(offsets func(sizeBytes int64) []int64) {
	v.guest.t.Helper()
	for _, at := range offsets(v.disk.SizeBytes) {
		if bytes.HasPrefix(v.disk.ReadAt(v.guest.t, at, 512), []byte("oxide-csi format")) {
			v.guest.t.Fatalf("a record is left at %d", at)
		}
	}
}

func (v testVolume) filesystems(t *testing.T) []filesystem.Superblock {
	t.Helper()
	host := v.guest.node().host()
	found := csitest.Got(host.Lookup(v.disk.Serial))(t)
	device := csitest.Got(host.Open(found))(t)
	all, err := filesystem.Find(device)
	must(t, errors.Join(err, device.Close()))
	return all
}

func smallest(fsType string) int64 {
	switch fsType {
	case volume.XFS:
		return 300
	case volume.Btrfs:
		return 128
	}
	return 64
}

func TestStageDoesNotRepeatAFinishedBtrfsFormat(t *testing.T) {
	v := newGuest(t).disk(smallest(volume.Btrfs), volume.Btrfs)
	v.interruptFormat()
	failing := map[string]string{"mkfs.btrfs": "exit 1"}
	unmountable := v
	unmountable.Flags = []string{invalidLabel} // so the mount fails and leaves no trace
	if with(t, failing, unmountable.stage) == nil {
		t.Fatal("it was mounted with an invalid label")
	}
	v.hasNoRecords(filesystem.RecordOffsets)
	if found := v.filesystems(t); len(found) != 1 || !found[0].MaybeFresh {
		t.Fatalf("the disk has %+v, want a btrfs that was never mounted", found)
	}
	failing["btrfs"] = "exit 1"
	must(t, with(t, failing, v.stage))
	v.checkStaged(t)
}

func (v testVolume) checkStaged(t *testing.T) {
	t.Helper()
	v.hasNoRecords(filesystem.RecordOffsets)
	must(t, v.unstage())
	v.check(t)
}

func (v testVolume) check(t *testing.T) {
	t.Helper()
	switch v.FSType {
	case volume.Ext3, volume.Ext4:
		guesttest.Run(t, "e2fsck", "-fn", v.disk.Loop)
	case volume.XFS:
		guesttest.Run(t, "xfs_repair", "-n", v.disk.Loop)
	case volume.Btrfs:
		guesttest.Run(t, "btrfs", "check", "--readonly", v.disk.Loop)
	}
}

// An xfs with small blocks may have a file's bytes where a btrfs has its superblock.
func TestStageSucceedsIfAFileContainsSuperblocks(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS} {
		t.Run(fsType, func(t *testing.T) {
			v := newGuest(t).disk(smallest(fsType), fsType)
			v.Context = map[string]string{volume.CtxMkfsOptions: "fsBlockSize=1024"}
			v.Tag = map[string]string{volume.CtxFilesystemUUID: v.ID} // without a UUID, blkid decides
			must(t, v.stage())
			block := make([]byte, 1024)
			copy(block[0x38:], "\x53\xEF\x00\x00\x00\x00\x00\x00_BHRfS_M")
			var st unix.Statfs_t
			must(t, unix.Statfs(v.staging(), &st))
			content := bytes.Repeat(block, int(st.Bavail)*int(st.Bsize)/len(block)*9/10)
			path := filepath.Join(v.staging(), "superblocks")
			must(t, os.WriteFile(path, content, 0o600))
			must(t, v.unstage())
			must(t, v.stage())
			if b, err := os.ReadFile(path); !bytes.Equal(b, content) {
				t.Errorf("the file has changed (%v)", err)
			}
		})
	}
}

func (v testVolume) snapshotOf(t *testing.T, sizeBytes int64) testVolume {
	t.Helper()
	guesttest.Run(t, "blockdev", "--flushbufs", v.disk.Loop)
	file := v.disk.Copy(t)
	source := v.disk.SizeBytes
	v.guest.Unplug(v.disk)
	must(t, os.Truncate(file, sizeBytes))
	restored := v.guest.volume(v.guest.AttachFile("csi-restored00000000", file), v.FSType)
	restored.Tag = map[string]string{volume.CtxOrigin: volume.OriginSnapshot,
		volume.CtxUse: volume.UseFilesystem, volume.CtxSourceBytes: fmt.Sprint(source),
		volume.CtxFilesystemUUID: v.ID}
	return restored
}

func TestASnapshotOfAnUnfinishedFormatCanBeStaged(t *testing.T) {
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		t.Run(fsType+" on a disk three times as large", func(t *testing.T) {
			origin := newGuest(t).disk(smallest(fsType), fsType)
			origin.interruptFormat()
			v := origin.snapshotOf(t, 3*origin.disk.SizeBytes)
			must(t, v.stage())
			must(t, v.unstage())
			id := guesttest.Run(t, "blkid", "-p", "-s", "UUID", v.disk.Loop)
			if !strings.Contains(id, origin.ID) {
				t.Errorf("the filesystem has %s, want the UUID %s", id, origin.ID)
			}
			v.check(t)
		})
	}
	t.Run("an ext4 with an interrupted growth grows", func(t *testing.T) {
		origin := grown(t, volume.Ext4)
		origin.interruptGrowth("exit 1")
		v := origin.snapshotOf(t, 2*origin.disk.SizeBytes)
		v.Tag[volume.CtxFilesystemUUID] = v.filesystems(t)[0].UUID.String()
		v.hasGrown(t)
	})
}

func TestARestoredVolumeIsStagedWhileItsOriginIsStaged(t *testing.T) { // NS-14
	for _, fsType := range []string{volume.Ext4, volume.XFS} {
		g := newGuest(t)
		origin := g.disk(smallest(fsType), fsType)
		must(t, origin.stage())
		must(t, origin.unstage())
		restored := g.volume(g.AttachFile("csi-restored00000000", origin.disk.Copy(t)), fsType)
		must(t, origin.stage())
		must(t, restored.stage())
		must(t, os.WriteFile(filepath.Join(restored.staging(), "who"), []byte("copy"), 0o600))
		absent(t, filepath.Join(origin.staging(), "who"))
		must(t, restored.unstage())
		must(t, origin.unstage())
	}
}

func TestDamageFoundByTheKernelIsReported(t *testing.T) { // NS-11
	v := newGuest(t).disk(smallest(volume.XFS), volume.XFS)
	must(t, v.stage())
	must(t, v.unstage())
	const root = 64 << 10 // the offset of the root directory's inode
	v.disk.WriteAt(t, root+256, []byte("damage"))
	csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged)
}

func TestASecondBtrfsWithTheSameUUIDIsNotStaged(t *testing.T) {
	g := statefulGuest(t)
	origin := g.disk(512, volume.Btrfs)
	restored := g.disk(512, volume.Btrfs, "csi-restored00000000")
	restored.Tag = map[string]string{volume.CtxFilesystemUUID: origin.ID}
	must(t, origin.stage())
	csitest.Want(t, restored.stage(), codes.FailedPrecondition, csierr.BtrfsTwin)
	must(t, origin.unstage())
	must(t, restored.stage())
	must(t, restored.unstage())
}

func TestACopyOfABtrfsIsUnstagedWhileItsOriginIsMounted(t *testing.T) {
	for name, lost := range map[string]func(t *testing.T, g *testGuest, alias string){
		"the kernel has recorded another path": func(*testing.T, *testGuest, string) {},
		"the kernel has recorded a path that is gone": func(t *testing.T, _ *testGuest, alias string) {
			must(t, os.Remove(alias))
		},
		"there is no record": func(t *testing.T, g *testGuest, _ string) {
			must(t, os.RemoveAll(g.state))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := statefulGuest(t)
			origin := g.disk(512, volume.Btrfs)
			must(t, origin.stage())
			must(t, origin.unstage())
			restored := g.volume(g.AttachFile("csi-restored00000000", origin.disk.Copy(t)), volume.Btrfs)
			must(t, origin.stage())
			restored.up("pod")
			// The mounted copy has a temporary UUID. A scan by another path gives it the origin's UUID.
			must(t, os.WriteFile(filepath.Join(restored.staging(), "who"), []byte("copy"), 0o600))
			guesttest.Run(t, "sync", "--file-system", restored.staging())
			alias := filepath.Join(t.TempDir(), "alias")
			guesttest.Run(t, "cp", "-a", restored.disk.Loop, alias)
			scanBtrfs(t, alias)
			lost(t, g, alias)

			must(t, restored.stage())
			must(t, restored.unpublish("pod"))
			must(t, restored.publish("pod"))
			must(t, origin.unpublish("pod"))
			restored.down("pod")
			must(t, restored.exclusive())
			if _, err := os.Stat(filepath.Join(origin.staging(), "who")); !os.IsNotExist(err) {
				t.Fatalf("the origin's staging path shows the copy, or nothing: %v", err)
			}
			must(t, origin.unstage())
			must(t, origin.exclusive())
		})
	}
}

func scanBtrfs(t *testing.T, path string) {
	t.Helper()
	control := csitest.Got(os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0))(t)
	defer func() { _ = control.Close() }()
	const scanDevice = 0x50009404 // BTRFS_IOC_SCAN_DEV of include/uapi/linux/btrfs.h
	var arg [4096]byte            // fd, name
	copy(arg[8:], path)
	must(t, blockdev.Ioctl(int(control.Fd()), scanDevice, unsafe.Pointer(&arg)))
}

func TestUnstageEndsTheReadThatProvesTheDiskBlank(t *testing.T) {
	before := goleak.IgnoreCurrent()
	v := newGuest(t).disk(64<<10, volume.Ext4)
	v.Whole = true
	n := v.guest.node()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	csitest.Want(t, csitest.Call(ctx, n, v.stageRequest()), codes.Aborted, csierr.DiskProofPending)
	must(t, csitest.Call(t.Context(), n, v.unstageRequest()))
	goleak.VerifyNone(t, before)
}

func TestStageReturnsNotFoundIfTheDiskIsDetachedWhileItIsRead(t *testing.T) {
	v := newGuest(t).disk(64, volume.Ext4)
	v.Whole = true
	goOn := stopOnce(t, "blkid", v.stage)
	v.guest.Unplug(v.disk)
	must(t, os.Truncate(v.disk.File, 0))
	guesttest.Run(t, "losetup", "--set-capacity", v.disk.Loop)
	csitest.Want(t, goOn(), codes.NotFound, csierr.DeviceNotFound)
}

// A discard does not change a real rack's disk, but it zeroes the disks that other tests use. So
// the disk of this test refuses discards.
func TestStageWorksOnADiskThatRefusesDiscards(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs} {
		t.Run(fsType, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB, guesttest.NoDiscards), fsType)
			v.disk.WriteAt(t, 0, bytes.Repeat([]byte("foreign"), guesttest.MiB))
			if exec.Command("blkdiscard", "--force", v.disk.Loop).Run() == nil {
				t.Fatal("the disk takes discards")
			}
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
			guesttest.Run(t, "blkdiscard", "--zeroout", v.disk.Loop)
			must(t, v.stage())
			hello := filepath.Join(v.staging(), "hello")
			must(t, os.WriteFile(hello, []byte("rack"), 0o600))
			if exec.Command("fstrim", v.staging()).Run() == nil {
				t.Error("the filesystem takes discards")
			}
			must(t, v.unstage())
			must(t, v.stage())
			holds(t, hello, "rack")
			must(t, v.unstage())
		})
	}
}

// grown returns a volume whose disk is twice as large as its ext filesystem, which has a file.
func grown(t *testing.T, fsType string) testVolume {
	t.Helper()
	v := newGuest(t).disk(128, fsType)
	must(t, v.stage())
	must(t, os.WriteFile(filepath.Join(v.staging(), "hello"), []byte("rack"), 0o600))
	must(t, v.unstage())
	v.guest.Unplug(v.disk)
	file := v.disk.Copy(t)
	must(t, os.Truncate(file, 256*guesttest.MiB))
	return v.guest.volume(v.guest.AttachFile(guesttest.Serial, file), fsType)
}

func (v testVolume) interruptGrowth(resize2fs string) {
	v.guest.t.Helper()
	csitest.Want(v.guest.t, with(v.guest.t, map[string]string{"resize2fs": resize2fs}, v.stage),
		codes.Internal, csierr.NodeToolFailed)
}

func (v testVolume) hasGrown(t *testing.T) {
	t.Helper()
	must(t, v.stage())
	holds(t, filepath.Join(v.staging(), "hello"), "rack")
	must(t, v.unstage())
	v.hasNoRecords(filesystem.GrowthOffsets)
	guesttest.Run(t, "e2fsck", "-fn", v.disk.Loop)
	found := v.filesystems(t)
	if len(found) != 1 || found[0].SizeBytes+found[0].UnitBytes <= v.disk.SizeBytes {
		t.Fatalf("it has not grown: %+v", found)
	}
}

func TestAGrowthFailsIfE2fsckCannotReadABlock(t *testing.T) {
	v := grown(t, volume.Ext4)
	v.interruptGrowth("kill -9 $$")
	unread := func(option string, status int) error {
		return with(t, map[string]string{"e2fsck": fmt.Sprintf(`case " $* " in *" %s "*)
echo "Error reading block 9541 (Input/output error).  Ignore error?"
exit %d;;
esac
"$real" "$@"`, option, status)}, v.stage)
	}
	same := v.disk.Same(t)
	csitest.Want(t, unread("-n", 4), codes.Internal, csierr.NodeToolFailed)
	same()
	// The check (-n) can read the disk, but the repair (-y) cannot.
	csitest.Want(t, unread("-y", 1), codes.Internal, csierr.NodeToolFailed)
	v.hasGrown(t)
}

func TestAGrowthNeedsOneUndamagedSuperblock(t *testing.T) {
	v := grown(t, volume.Ext4)
	v.interruptGrowth("exit 1")
	sb := v.filesystems(t)[0]
	second := sb.CopyBlock * sb.BlockBytes
	whole := v.disk.ReadAt(t, second, 1024)
	for _, at := range []int64{1024, second} {
		v.disk.WriteAt(t, at+0x3FC, []byte("harm")) // break the checksum
	}
	same := v.disk.Same(t)
	csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged, "so is its first copy")
	same()
	v.disk.WriteAt(t, second, whole)
	v.hasGrown(t)
}

func TestStageFailsIfABtrfsGrowthCannotBeCommitted(t *testing.T) {
	g := newGuest(t)
	dir := smallTmpfs(t, 64*guesttest.MiB)
	file := filepath.Join(dir, "disk.img")
	must(t, errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, 256*guesttest.MiB)))
	small := g.volume(g.AttachFile(guesttest.Serial, file), volume.Btrfs)
	must(t, small.stage())
	must(t, os.WriteFile(filepath.Join(small.staging(), "hello"), []byte("rack"), 0o600))
	guesttest.Run(t, "fstrim", small.staging())
	must(t, small.unstage())
	g.Unplug(small.disk)
	must(t, os.Truncate(file, 512*guesttest.MiB))
	v := g.volume(g.AttachFile(guesttest.Serial, file), volume.Btrfs)
	for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
		v.disk.WriteAt(t, slot, make([]byte, blockdev.AlignBytes)) // allocate space for the records
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
		if older { // as if an older driver had started to grow it
			r := v.record(t, 128*guesttest.MiB)
			r.Mounted, r.Checked = v.filesystems(t)[0].Mounted, true
			b := csitest.Got(r.Encode())(t)
			v.disk.WriteAt(t, filesystem.GrowthOffsets(v.disk.SizeBytes)[0], b)
		}
		must(t, v.stage())
		must(t, v.unstage())
		v.check(t)
		v.hasNoRecords(filesystem.GrowthOffsets)
		if sb := v.filesystems(t)[0]; sb.SizeBytes != 128*guesttest.MiB {
			t.Fatalf("it has %d bytes", sb.SizeBytes)
		}
	}
}

func TestHealthReportsAFilesystemThatIsNotGrown(t *testing.T) { // NS-13
	v := grown(t, volume.Ext4)
	v.Whole, v.guest.state = true, filepath.Join(v.guest.Dir, "state") // so the size is recorded
	v.disk.WriteAt(t, 200*guesttest.MiB, []byte("what somebody else has written"))
	must(t, v.stage())
	got := csitest.Got(v.guest.node().NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{
		VolumeId: v.ID, StagingTargetPath: v.staging()}))(t)
	entries, said := got.GetVolumeHealth().GetHealthStatuses(), v.guest.log.String()
	if len(entries) != 1 || entries[0].GetReason() != string(csierr.FilesystemNotGrown) ||
		!strings.Contains(said, "not grown") || !strings.Contains(said, "offset ") {
		t.Errorf("the health is %v, and the log %s", entries, said)
	}
}

func TestPublishKeepsWorkloadDataThatLooksLikeADriversRecord(t *testing.T) {
	for _, grow := range []int64{0, 1 << 20} {
		v := newGuest(t).disk(256, "block")
		v.up("dev")
		b := csitest.Got(v.record(t, grow).Encode())(t)
		// The workload has made a partition, in which a file contains the bytes of the driver's record.
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
		v.down("dev")
		same := v.disk.Same(t)
		v.up("dev")
		same()
		v.down("dev")
	}
}

func TestStagingOrPublishingABlockVolumeErasesGrowthRecords(t *testing.T) {
	for name, show := range map[string]func(v testVolume) error{
		"staged":              testVolume.stage,
		"published":           func(v testVolume) error { return v.publish("dev") },
		"published read-only": func(v testVolume) error { return v.publishReadOnly("dev") },
	} {
		t.Run(name, func(t *testing.T) {
			v := grown(t, volume.Ext4)
			v.Tag = map[string]string{volume.CtxUse: volume.UseBoth,
				volume.CtxOrigin: volume.OriginSnapshot, volume.CtxSourceBytes: fmt.Sprint(128 << 20)}
			v.interruptGrowth("exit 1")
			v.FSType, v.ID, v.Static = "block", "the-handle-of-another-cluster", name == "published"
			must(t, show(v))
			v.hasNoRecords(filesystem.GrowthOffsets)
		})
	}
}

func (v testVolume) record(t *testing.T, growFrom int64) filesystem.Record {
	t.Helper()
	nv := csitest.Got(parseVolume(v.ID, v.capability(), v.published(), v.Context))(t)
	r := filesystem.RecordOf(nv.Volume)
	r.GrowFrom = growFrom
	return r
}
