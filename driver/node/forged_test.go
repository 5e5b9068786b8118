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
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// forge fills the staged volume with a file of records that say of this very volume that a format
// or a growth was cut off, and returns the file's content.
func (v testVolume) forge(t *testing.T, growFrom int64) (path string, content []byte) {
	t.Helper()
	nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
	must(t, err)
	found, err := filesystem.Find(must1(v.guest.node().host().Open(v.device(t)))(t))
	must(t, err)
	r := filesystem.RecordOf(nv.Volume)
	r.GrowFrom, r.Mounted, r.Checked = growFrom, found[0].Mounted, growFrom > 0
	record, err := r.Encode()
	must(t, err)
	var st unix.Statfs_t
	must(t, unix.Statfs(v.staging(), &st))
	record = record[:512] // at every sector, so that a slot holds one whatever the block size is
	content = bytes.Repeat(record, int(st.Bavail)*int(st.Bsize)/len(record)*9/10)
	path = filepath.Join(v.staging(), "records")
	must(t, os.WriteFile(path, content, 0o600))
	return path, content
}

// must1 returns a value and fails the test for its error.
func must1[T any](value T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must(t, err)
		return value
	}
}

func TestAFileFullOfRecordsIsAFile(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		for name, growFrom := range map[string]int64{"format": 0, "growth": 64 * guesttest.MiB} {
			t.Run("a "+fsType+" with the records of a "+name, func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
				must(t, v.stage())
				path, content := v.forge(t, growFrom)
				must(t, v.unstage())
				if !hasRecord(t, v.disk, filesystem.GrowthOffsets(v.disk.SizeBytes)[0]) &&
					recordsOn(t, v.disk) == 0 {
					t.Fatal("no slot of a record holds one")
				}
				tools(t, map[string]string{"e2fsck": `case " $* " in *" -y "*) exit 8;; esac
"$real" "$@"`})
				must(t, v.stage())
				if b, err := os.ReadFile(path); !bytes.Equal(b, content) {
					t.Errorf("the file has changed (%v)", err)
				}
				must(t, v.unstage())
				v.check(t)
			})
		}
	}
	for _, fsType := range volume.Filesystems {
		t.Run("a "+fsType+" whose first MiB was wiped is not formatted because of them",
			func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
				must(t, v.stage())
				v.forge(t, 0)
				must(t, v.unstage())
				v.disk.WriteAt(t, 0, make([]byte, guesttest.MiB))
				before := v.disk.Digest(t)
				csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
				if v.disk.Digest(t) != before {
					t.Error("the disk was written")
				}
			})
	}
}

// With small blocks, an xfs may have a file where the superblock of a btrfs is.
func TestASuperblockInAFileIsAFile(t *testing.T) {
	for _, options := range []string{"", "fsBlockSize=1024", "fsBlockSize=2048"} {
		for _, fsType := range []string{volume.Ext3, volume.Ext4, volume.XFS} {
			t.Run(fsType+" "+options, func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
				v.Context = map[string]string{volume.CtxMkfsOptions: options}
				v = v.expecting(v.ID)
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
				must(t, v.unstage())
				before := v.disk.Digest(t)
				v.Tag = nil // then blkid decides
				if err := v.stage(); err == nil {
					must(t, v.unstage())
				} else if v.disk.Digest(t) != before {
					t.Error("the disk was written")
				}
			})
		}
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
		for _, script := range []string{"exit 1", `"$real" "$@" && exit 1`} {
			for _, larger := range []int64{1, 3} {
				t.Run(fmt.Sprintf("a %s whose mkfs did %q, on a disk %d times as large", fsType, script,
					larger), func(t *testing.T) {
					g := newGuest(t)
					origin := g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
					interruptFormat(t, script, origin.stage)
					v := origin.snapshotOf(t, larger*smallest(fsType))
					must(t, v.stage())
					must(t, v.unstage())
					if id := uuidOf(t, v.disk); !strings.Contains(id, origin.ID) {
						t.Errorf("the filesystem has %s, want the UUID %s", id, origin.ID)
					}
					v.check(t)
				})
			}
		}
	}
	t.Run("a format that was cut off on the disk of another volume is not its", func(t *testing.T) {
		g := newGuest(t)
		origin := g.volume(g.Attach(guesttest.Serial, smallest(volume.Ext4)), volume.Ext4)
		interruptFormat(t, "exit 1", origin.stage)
		v := origin.snapshotOf(t, smallest(volume.Ext4))
		v.Tag[volume.CtxFilesystemUUID] = "0b54dc0e-93a4-4f5f-8f5d-a00000000000"
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
	})
	for _, fsType := range []string{volume.Ext3, volume.Ext4} {
		t.Run("an "+fsType+" whose growth was cut off grows", func(t *testing.T) {
			origin := grown(t, fsType)
			path := os.Getenv("PATH")
			tools(t, map[string]string{"resize2fs": "exit 1"})
			csitest.Want(t, origin.stage(), codes.Internal, csierr.NodeToolFailed)
			must(t, os.Setenv("PATH", path))
			v := origin.snapshotOf(t, 2*origin.disk.SizeBytes)
			v.Tag[volume.CtxFilesystemUUID] = originUUID(t, v)
			v.hasGrown(t)
		})
	}
}

// originUUID is the UUID of the filesystem on a disk.
func originUUID(t *testing.T, v testVolume) string {
	t.Helper()
	found, err := filesystem.Find(must1(v.guest.node().host().Open(v.device(t)))(t))
	must(t, err)
	return found[0].UUID.String()
}
