//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// behind is a volume whose filesystem of 1 GiB lies on a disk of 3 GiB.
func behind(t *testing.T, fsType string) testVolume {
	t.Helper()
	g := newGuest(t)
	small := g.volume(g.Attach(guesttest.Serial, guesttest.GiB), fsType)
	must(t, small.stage())
	must(t, small.unstage())
	g.Unplug(small.disk)
	file := copyDisk(t, small.disk.File)
	must(t, os.Truncate(file, 3*guesttest.GiB))
	return g.volume(g.AttachFile(guesttest.Serial, file), fsType)
}

// restored is the volume on a disk that was restored from a snapshot of that size.
func (v testVolume) restored(sourceBytes int64) testVolume {
	v.Tag = map[string]string{volume.CtxOrigin: volume.OriginSnapshot,
		volume.CtxUse:         volume.UseFilesystem,
		volume.CtxSourceBytes: fmt.Sprint(sourceBytes)}
	return v
}

// tail is a checksum of what lies behind the first GiB, without holes and zeroes.
func (v testVolume) tail(t *testing.T) string {
	t.Helper()
	guesttest.Run(t, "blockdev", "--flushbufs", v.disk.Loop)
	f, err := os.Open(v.disk.File)
	must(t, err)
	defer func() { _ = f.Close() }()
	sum, page := crc32.NewIEEE(), make([]byte, 64<<10)
	for at := int64(guesttest.GiB); ; at += int64(len(page)) {
		at, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return fmt.Sprint(sum.Sum32())
		}
		must(t, err)
		at &^= int64(len(page)) - 1
		_, err = f.ReadAt(page, at)
		must(t, err)
		if len(bytes.Trim(page, "\x00")) > 0 {
			_, _ = fmt.Fprint(sum, at)
			_, _ = sum.Write(page)
		}
	}
}

func (v testVolume) health(t *testing.T) healthEntries {
	t.Helper()
	r, err := v.guest.node().NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{
		VolumeId: v.ID, StagingTargetPath: v.staging()})
	must(t, err)
	return r.GetVolumeHealth().GetHealthStatuses()
}

// isGrown reports whether the staged filesystem has grown, and checks that the health agrees.
func (v testVolume) isGrown(t *testing.T) bool {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(v.staging(), &st))
	size := int64(st.Blocks) * st.Bsize
	entries := v.health(t)
	if grown := size > guesttest.GiB; grown != (len(entries) == 0) {
		t.Fatalf("the filesystem has %d bytes, and its health is %v", size, entries)
	}
	if len(entries) > 0 && entries[0].GetReason() != string(csierr.FilesystemNotGrown) {
		t.Fatalf("the health is %v", entries)
	}
	return size > 2*guesttest.GiB
}

func TestNothingBehindAFilesystemIsOverwritten(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run("data behind a "+fsType+" stays as it is", func(t *testing.T) {
			v := behind(t, fsType)
			for at := int64(guesttest.GiB); at < 3*guesttest.GiB; at += 8 * guesttest.MiB {
				v.disk.WriteAt(t, at, bytes.Repeat([]byte{0xAA}, guesttest.MiB))
			}
			v.disk.WriteAt(t, 3*guesttest.GiB-guesttest.MiB, bytes.Repeat([]byte{0xAA}, guesttest.MiB))
			before := v.tail(t)
			must(t, v.stage())
			if v.isGrown(t) {
				t.Error("it has grown")
			}
			guesttest.Run(t, "dd", "if=/dev/zero", "of="+filepath.Join(v.staging(), "file"), "bs=1M",
				"count=858",
				"conv=fsync", "status=none")
			must(t, v.unstage())
			if v.tail(t) != before {
				t.Error("it was written")
			}
			if said := v.guest.log.String(); !strings.Contains(said, "not grown") ||
				!strings.Contains(said, "offset 1073741824") {
				t.Errorf("the log does not say why: %s", said)
			}
			v.check(t)
		})
		for i, c := range []struct {
			name string
			with func(v testVolume) testVolume
			at   int64 // where a byte is; 0 is nowhere
			want bool
		}{
			{"nothing behind it on a disk of which nothing is known",
				func(v testVolume) testVolume { v.Static = true; return v }, 0, true},
			{"one byte behind it, where no sample is", func(v testVolume) testVolume { return v },
				2*guesttest.GiB + 12345678, false},
			{"nothing behind it on a disk that was restored",
				func(v testVolume) testVolume { return v.restored(guesttest.GiB) }, 0, true},
			{"one byte behind it that the snapshot had",
				func(v testVolume) testVolume { return v.restored(2 * guesttest.GiB) },
				guesttest.GiB + 12345678, false},
			{"one byte where a sample is, which the snapshot had not",
				func(v testVolume) testVolume { return v.restored(guesttest.GiB) }, 3*guesttest.GiB - 1, false},
			{"one byte on a disk that was restored for raw use, too", func(v testVolume) testVolume {
				v = v.restored(guesttest.GiB)
				v.Tag[volume.CtxUse] = volume.UseBoth
				return v
			}, 2*guesttest.GiB + 12345678, false},
		} {
			if fsType != volume.Ext4 && i > 1 {
				continue // what is read depends on the disk alone
			}
			t.Run("a "+fsType+" with "+c.name, func(t *testing.T) {
				v := c.with(behind(t, fsType))
				if c.at > 0 {
					v.disk.WriteAt(t, c.at, []byte{1})
				}
				before := v.tail(t)
				must(t, v.stage())
				if got := v.isGrown(t); got != c.want {
					t.Errorf("grown: %v, want %v", got, c.want)
				}
				must(t, v.unstage())
				if same := v.tail(t) == before; same == c.want {
					t.Errorf("what lies behind is the same: %v", same)
				}
				v.check(t)
			})
		}
	}
}

func TestAGrowthThatHadBegunNeedsNoSecondProof(t *testing.T) {
	for _, fsType := range []string{volume.XFS, volume.Btrfs} {
		for _, own := range []bool{true, false} {
			t.Run(fmt.Sprintf("a %s with marks of a growth, its own: %v", fsType, own),
				func(t *testing.T) {
					v := behind(t, fsType)
					nv, err := parseVolume(v.ID, v.capability(), v.published(), v.Context)
					must(t, err)
					m := filesystem.RecordOf(nv.Volume)
					m.GrowFrom = guesttest.GiB
					if !own {
						m.Volume = "another"
					}
					b, err := m.Encode()
					must(t, err)
					v.disk.WriteAt(t, filesystem.GrowthOffsets(v.disk.SizeBytes)[1], b)
					// The header of a group that the kernel had begun to add.
					v.disk.WriteAt(t, guesttest.GiB+guesttest.GiB/4, bytes.Repeat([]byte{0x55}, 4096))
					must(t, v.stage())
					if got := v.isGrown(t); got != own {
						t.Errorf("grown: %v", got)
					}
					must(t, v.unstage())
					v.check(t)
				})
		}
	}
}
