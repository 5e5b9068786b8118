//go:build linux

package node

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// With small blocks, an xfs may have a file where the superblock of a btrfs is.
func TestASuperblockInAFileIsAFile(t *testing.T) {
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

// snapshotOf is the volume that is restored from a snapshot of a disk, on a disk of that size.
func (v testVolume) snapshotOf(t *testing.T, sizeBytes int64) testVolume {
	t.Helper()
	guesttest.Run(t, "blockdev", "--flushbufs", v.disk.Loop)
	file := copyDisk(t, v.disk.File)
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
	for _, fsType := range volume.Filesystems {
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
	t.Run("but not as another volume", func(t *testing.T) {
		g := newGuest(t)
		origin := g.volume(g.Attach(guesttest.Serial, smallest(volume.Ext4)), volume.Ext4)
		interruptFormat(t, "exit 1", origin.stage)
		v := origin.snapshotOf(t, smallest(volume.Ext4))
		v.Tag[volume.CtxFilesystemUUID] = "0b54dc0e-93a4-4f5f-8f5d-a00000000000"
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
	})
	t.Run("and an ext4 whose growth was cut off grows", func(t *testing.T) {
		origin := grown(t, volume.Ext4)
		interruptGrowth(t, origin)
		v := origin.snapshotOf(t, 2*origin.disk.SizeBytes)
		v.Tag[volume.CtxFilesystemUUID] = v.filesystems(t)[0].UUID.String()
		v.hasGrown(t)
	})
}
