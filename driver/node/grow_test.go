//go:build linux

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// grown is a volume with an ext filesystem of a file in it, on a disk that is twice as large.
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

// interruptGrowth stages a volume whose ext is to grow, and resize2fs fails before it begins.
func interruptGrowth(t *testing.T, v testVolume) {
	t.Helper()
	path := os.Getenv("PATH")
	tools(t, map[string]string{"resize2fs": "exit 1"})
	csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
	must(t, os.Setenv("PATH", path))
}

// damage makes what e2fsck -p does not repair.
func (v testVolume) damage(t *testing.T) {
	t.Helper()
	guesttest.Run(t, "debugfs", "-w", "-R", "clri <2>", v.disk.Loop)
	guesttest.Run(t, "debugfs", "-w", "-R", "ssv state 2", v.disk.Loop)
}

func (v testVolume) hasGrown(t *testing.T) {
	t.Helper()
	must(t, v.stage())
	holds(t, filepath.Join(v.staging(), "hello"), "rack")
	must(t, v.unstage())
	for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
		if hasRecord(t, v.disk, slot) {
			t.Fatalf("a mark is left at %d", slot)
		}
	}
	guesttest.Run(t, "e2fsck", "-fn", v.disk.Loop)
	found := v.filesystems(t)
	if len(found) != 1 || found[0].SizeBytes+found[0].UnitBytes <= v.disk.SizeBytes {
		t.Fatalf("it has not grown: %+v", found)
	}
}

func TestAGrowthThatWasCutOffIsDoneAgain(t *testing.T) {
	t.Run("an ext4 whose superblock the check before was writing", func(t *testing.T) {
		v := grown(t, volume.Ext4)
		path := os.Getenv("PATH")
		tools(t, map[string]string{"e2fsck": "exit 8"})
		csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		must(t, os.Setenv("PATH", path))
		v.disk.WriteAt(t, 1024+0x40, []byte{1, 2, 3}) // the time of the last check
		v.hasGrown(t)
	})
	t.Run("what is no growth of this volume gets no such repair", func(t *testing.T) {
		v := grown(t, volume.Ext4)
		interruptGrowth(t, v)
		v.ID = "0b54dc0e-93a4-4f5f-8f5d-another00000"
		v.damage(t)
		csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged)
	})
	t.Run("a mark of a growth is worth nothing after a mount, and stays", func(t *testing.T) {
		v := grown(t, volume.Ext4)
		must(t, v.stage())
		must(t, v.unstage())
		v.writeGrowthRecord(t, 128*guesttest.MiB, 1)
		v.damage(t)
		csitest.Want(t, v.stage(), codes.Internal, csierr.FilesystemDamaged)
		if !hasRecord(t, v.disk, filesystem.GrowthOffsets(v.disk.SizeBytes)[0]) {
			t.Fatal("it was erased")
		}
	})
	for _, said := range []string{"Error reading block 9541 (Input/output error).",
		"Error flushing writes to storage device: Input/output error"} {
		t.Run("a check that says nothing of the filesystem: "+said, func(t *testing.T) {
			v := grown(t, volume.Ext4)
			tools(t, map[string]string{"e2fsck": `echo "` + said + `" >&2; exit 4`})
			csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		})
	}
	t.Run("no repair that answers yes overwrites what the disk does not give", func(t *testing.T) {
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
		// It can be read at first, and not during the repair.
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

func TestABigallocIsMountedAsItIsAndABegunGrowthIsGivenUp(t *testing.T) {
	v := newGuest(t).disk(512, volume.Ext4)
	guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", "-b", "4096", "-O", "bigalloc", v.disk.Loop, "128M")
	for _, older := range []bool{false, true} {
		if older { // an older driver has begun to grow it
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
