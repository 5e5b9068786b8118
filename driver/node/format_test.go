//go:build linux

package node

import (
	"bytes"
	"cmp"
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

// tools puts scripts into PATH, by their names, before the machine's programs.
func tools(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		real, err := exec.LookPath(name)
		must(t, err)
		script = "#!/bin/sh\nreal=" + real + "\n" + script + "\n"
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func interruptFormat(t *testing.T, script string, stage func() error) {
	t.Helper()
	before := os.Getenv("PATH")
	tools(t, map[string]string{"mke2fs": script, "mkfs.xfs": script, "mkfs.btrfs": script})
	defer func() { must(t, os.Setenv("PATH", before)) }()
	csitest.Want(t, stage(), codes.Internal, csierr.NodeToolFailed)
}

func hasRecord(t *testing.T, d *guesttest.Disk, offset int64) bool {
	t.Helper()
	return bytes.HasPrefix(d.ReadAt(t, offset, 512), []byte("oxide-csi format"))
}

func (v testVolume) device(t *testing.T) blockdev.Device {
	t.Helper()
	d, err := v.guest.node().host().Lookup(v.disk.Serial)
	must(t, err)
	return d
}

func (v testVolume) filesystems(t *testing.T) []filesystem.Superblock {
	t.Helper()
	device, err := v.guest.node().host().Open(v.device(t))
	must(t, err)
	found, err := filesystem.Find(device)
	must(t, errors.Join(err, device.Close()))
	return found
}

func recordsOn(t *testing.T, d *guesttest.Disk) int {
	t.Helper()
	n := 0
	for _, slot := range filesystem.RecordOffsets(d.SizeBytes) {
		if hasRecord(t, d, slot) {
			n++
		}
	}
	return n
}

func uuidOf(t *testing.T, d *guesttest.Disk) string {
	t.Helper()
	return guesttest.Run(t, "blkid", "-p", "-s", "UUID", "-s", "TYPE", d.Loop)
}

func smallest(fsType string) int64 {
	switch fsType {
	case volume.XFS:
		return 300 * guesttest.MiB
	case volume.Btrfs:
		return 128 * guesttest.MiB
	}
	return 64 * guesttest.MiB
}

func TestAFinishedBtrfsFormatIsKept(t *testing.T) {
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, smallest(volume.Btrfs)), volume.Btrfs)
	interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
	path := os.Getenv("PATH")
	tools(t, map[string]string{"mkfs.btrfs": "exit 1"})
	unmountable := v
	unmountable.Flags = []string{invalidLabel} // so the kernel leaves no trace of a mount
	if unmountable.stage() == nil {
		t.Fatal("it was mounted with an invalid label")
	}
	if n := recordsOn(t, v.disk); n != 0 {
		t.Fatalf("%d records are left on the disk", n)
	}
	found := v.filesystems(t)
	if len(found) != 1 || !found[0].MaybeFresh {
		t.Fatalf("the disk has %+v, want a btrfs that was never mounted", found)
	}
	tools(t, map[string]string{"btrfs": "exit 1"})
	must(t, v.stage())
	must(t, os.Setenv("PATH", path))
	v.checkStaged(t)
}

// checkStaged checks that the volume is staged as it should be, has no record, and keeps its data.
func (v testVolume) checkStaged(t *testing.T) {
	t.Helper()
	if n := recordsOn(t, v.disk); n != 0 {
		t.Fatalf("%d records are left on the disk", n)
	}
	file := filepath.Join(v.staging(), "hello")
	must(t, os.WriteFile(file, []byte("rack"), 0o600))
	must(t, v.unstage())
	id := uuidOf(t, v.disk)
	if !strings.Contains(id, `TYPE="`+v.FSType+`"`) {
		t.Fatalf("the disk is %s, not %s", id, v.FSType)
	}
	must(t, v.stage())
	holds(t, file, "rack")
	must(t, v.unstage())
	if again := uuidOf(t, v.disk); again != id {
		t.Fatalf("%s became %s", id, again)
	}
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

// An xfs with small blocks may have a file at the offset of the superblock of a btrfs.
func TestSuperblocksInAFileDoNotPreventAStage(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS} {
		t.Run(fsType, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
			v.Context = map[string]string{volume.CtxMkfsOptions: "fsBlockSize=1024"}
			v.Tag = map[string]string{volume.CtxFilesystemUUID: v.ID} // else blkid decides
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

// snapshotOf restores a snapshot of the volume's disk to a disk of that size.
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

func TestASnapshotOfAnUnfinishedDiskCanBeRestored(t *testing.T) {
	for _, fsType := range short.Some(t, 2, volume.Filesystems) {
		t.Run("a "+fsType+" on a disk three times as large", func(t *testing.T) {
			g := newGuest(t)
			origin := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
			interruptFormat(t, `"$real" "$@" && exit 1`, origin.stage)
			v := origin.snapshotOf(t, 3*smallest(fsType))
			must(t, v.stage())
			must(t, v.unstage())
			if id := uuidOf(t, v.disk); !strings.Contains(id, origin.ID) {
				t.Errorf("the filesystem has %s, want the UUID %s", id, origin.ID)
			}
			v.check(t)
		})
	}
	t.Run("and an ext4 whose growth was cut off grows", func(t *testing.T) {
		origin := grown(t, volume.Ext4)
		interruptGrowth(t, origin)
		v := origin.snapshotOf(t, 2*origin.disk.SizeBytes)
		v.Tag[volume.CtxFilesystemUUID] = v.filesystems(t)[0].UUID.String()
		v.hasGrown(t)
	})
}

func TestARestoredFilesystemIsMountedNextToItsOrigin(t *testing.T) { // NS-14
	for _, fsType := range []string{volume.Ext4, volume.XFS} {
		g := newGuest(t)
		origin := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
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
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, smallest(volume.XFS)), volume.XFS)
	must(t, v.stage())
	must(t, v.unstage())
	const root = 64 << 10 // its inode
	v.disk.WriteAt(t, root+256, []byte("damage"))
	csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged)
}

func TestASecondBtrfsWithTheSameUUIDIsNotStaged(t *testing.T) {
	g := statefulGuest(t)
	origin := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), volume.Btrfs)
	restored := g.volume(g.Attach("csi-restored00000000", 512*guesttest.MiB), volume.Btrfs)
	restored.Tag = map[string]string{volume.CtxFilesystemUUID: origin.ID}
	must(t, origin.stage())
	csitest.Want(t, restored.stage(), codes.FailedPrecondition, csierr.BtrfsTwin)
	must(t, origin.unstage())
	must(t, restored.stage())
	must(t, restored.unstage())
}

func TestUnstageABtrfsBesideItsTwin(t *testing.T) {
	for name, lost := range map[string]func(t *testing.T, g *testGuest, alias string){
		"the kernel has another path": func(*testing.T, *testGuest, string) {},
		"the kernel has a path that is gone": func(t *testing.T, _ *testGuest, alias string) {
			must(t, os.Remove(alias))
		},
		"there is no record": func(t *testing.T, g *testGuest, _ string) {
			must(t, os.RemoveAll(g.state))
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := statefulGuest(t)
			origin := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), volume.Btrfs)
			must(t, origin.stage())
			must(t, origin.unstage())
			restored := g.volume(g.AttachFile("csi-restored00000000", origin.disk.Copy(t)), volume.Btrfs)
			must(t, origin.stage())
			must(t, restored.stage())
			must(t, restored.publish("pod"))
			// After a commit, a scan of the copy by another path makes the kernel give it the twin's UUID.
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
			must(t, restored.unpublish("pod"))
			must(t, restored.unstage())
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
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0)
	must(t, err)
	defer func() { _ = control.Close() }()
	const scanDevice = 0x50009404 // BTRFS_IOC_SCAN_DEV of include/uapi/linux/btrfs.h
	var arg [4096]byte            // fd, name
	copy(arg[8:], path)
	must(t, blockdev.Ioctl(int(control.Fd()), scanDevice, unsafe.Pointer(&arg)))
}

func TestAnUnstageEndsTheReadOfTheVolumesDisk(t *testing.T) {
	before := goleak.IgnoreCurrent()
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.GiB), volume.Ext4)
	v.Whole = true
	n := g.node()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	csitest.Want(t, csitest.Call(ctx, n, v.stageRequest()), codes.Aborted, csierr.DiskProofPending)
	must(t, csitest.Call(t.Context(), n, v.unstageRequest()))
	goleak.VerifyNone(t, before)
}

// The read of a disk fails if the disk is detached meanwhile. That is not a fault of the disk.
func TestADiskThatIsDetachedWhileItIsReadIsNotFound(t *testing.T) {
	v := newGuest(t).disk(64, volume.Ext4)
	v.Whole = true
	goOn := stopOnce(t, "blkid", v.stage)
	v.guest.Unplug(v.disk)
	must(t, os.Truncate(v.disk.File, 0))
	guesttest.Run(t, "losetup", "--set-capacity", v.disk.Loop)
	csitest.Want(t, goOn(), codes.NotFound, csierr.DeviceNotFound)
}

// A discard leaves the bytes of a rack's disk as they are. On other disks it makes them zero.
func TestStageDoesNotDependOnTheEffectOfDiscards(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs} {
		for zeroed, option := range map[bool]guesttest.Option{false: guesttest.NoDiscards,
			true: guesttest.BlockSize(512)} {
			t.Run(fmt.Sprint(fsType, " zeroed ", zeroed), func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB, option), fsType)
				v.disk.WriteAt(t, 0, bytes.Repeat([]byte("foreign"), guesttest.MiB))
				out, err := exec.Command("blkdiscard", "--force", v.disk.Loop).CombinedOutput()
				if (err == nil) != zeroed {
					t.Fatalf("blkdiscard: %v %s", err, out)
				}
				if !zeroed {
					csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
					guesttest.Run(t, "blkdiscard", "--zeroout", v.disk.Loop)
				}
				must(t, v.stage())
				hello := filepath.Join(v.staging(), "hello")
				must(t, os.WriteFile(hello, []byte("rack"), 0o600))
				if err := exec.Command("fstrim", v.staging()).Run(); (err == nil) != zeroed {
					t.Errorf("fstrim: %v", err)
				}
				must(t, v.unstage())
				must(t, v.stage())
				holds(t, hello, "rack")
				must(t, v.unstage())
				force := map[string]string{volume.Ext4: "-F"}[fsType]
				guesttest.Run(t, "mkfs."+fsType, cmp.Or(force, "-f"), v.disk.Loop) // it discards first
				must(t, v.stage())
				must(t, v.unstage())
			})
		}
	}
}
