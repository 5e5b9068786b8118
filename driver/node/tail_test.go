//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// behind is a volume whose filesystem of 1 GiB lies on a disk of 3 GiB.
func behind(t *testing.T, fsType string) testVolume {
	t.Helper()
	g := statefulGuest(t)
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
			{"one byte behind it that the snapshot had not",
				func(v testVolume) testVolume { return v.restored(guesttest.GiB) },
				2*guesttest.GiB + 12345678, false},
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
				if v.tail(t) != before && !c.want {
					t.Error("what lies behind was written")
				}
				v.check(t)
			})
		}
	}
}

// cutOff is a volume whose filesystem of 1 GiB lies on a disk of 3 GiB, behind which is all that
// the growth to this disk writes there. An ext has the records of its growth.
func cutOff(t *testing.T, fsType string) testVolume {
	t.Helper()
	v := behind(t, fsType)
	grown := v
	grown.disk = v.guest.AttachFile("csi-grown00000000000", copyDisk(t, v.disk.File))
	grown.Name = grown.disk.Serial
	v.guest.Unplug(v.disk) // a btrfs is on one disk of a machine at a time
	if fsType == volume.Ext3 || fsType == volume.Ext4 {
		path := os.Getenv("PATH")
		tools(t, map[string]string{"resize2fs": "exit 1"})
		v.disk = v.guest.AttachFile(guesttest.Serial, v.disk.File)
		csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		must(t, os.Setenv("PATH", path))
		v.guest.Unplug(v.disk)
	}
	must(t, grown.stage())
	if !grown.isGrown(t) {
		t.Fatal("nothing behind the filesystem keeps it from growing, but it has not grown")
	}
	must(t, grown.unstage())
	guesttest.Run(t, "blockdev", "--flushbufs", grown.disk.Loop)
	v.guest.Unplug(grown.disk)
	// The last MiB is the records'.
	guesttest.Run(t, "dd", "if="+grown.disk.File, "of="+v.disk.File, "bs=1M", "skip=1024",
		"seek=1024", "count=2047", "conv=notrunc,sparse", "status=none")
	v.disk = v.guest.AttachFile(guesttest.Serial, v.disk.File)
	return v
}

func TestAGrowthThatWasCutOffGoesOnOverNothingButItsOwnTraces(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run("a "+fsType+" whose growth was cut off grows", func(t *testing.T) {
			v := cutOff(t, fsType)
			must(t, v.stage())
			if !v.isGrown(t) {
				t.Error("it has not grown")
			}
			must(t, v.unstage())
			v.check(t)
		})
		foreign := map[string][]byte{"foreign data": []byte("what somebody else has written")}
		switch fsType { // their blocks have the UUID of their filesystem
		case volume.XFS:
			foreign["another xfs"] = append([]byte("XFSB"), make([]byte, 508)...)
		case volume.Btrfs:
			foreign["another btrfs"] = slices.Concat(make([]byte, 48), []byte("\x00\x00\x50\x00\x00\x00\x00"+
				"\x00\x01\x00\x00\x00\x00\x00\x00\x01"))
		}
		for name, data := range foreign {
			t.Run("a "+fsType+" whose growth was cut off is not grown over "+name, func(t *testing.T) {
				v := cutOff(t, fsType)
				v.disk.WriteAt(t, 2*guesttest.GiB+20480, data)
				before := v.tail(t)
				err := v.stage()
				if err == nil {
					if v.isGrown(t) {
						t.Error("it has grown")
					}
					must(t, v.unstage())
				}
				if v.tail(t) != before {
					t.Error("what lies behind it was written")
				}
			})
		}
	}
}

func TestARawVolumeIsNotGrownOverBecauseAGrowthHadBegun(t *testing.T) {
	for _, static := range []bool{false, true} {
		for _, fsType := range volume.Filesystems {
			t.Run(fmt.Sprintf("a %s, static: %v", fsType, static), func(t *testing.T) {
				v := behind(t, fsType)
				v.Static, v.Tag = static, map[string]string{volume.CtxUse: volume.UseBoth,
					volume.CtxOrigin: volume.OriginSnapshot, volume.CtxSourceBytes: fmt.Sprint(guesttest.GiB)}
				path := os.Getenv("PATH")
				tools(t, map[string]string{"resize2fs": "exit 1"})
				if err := v.stage(); err == nil { // xfs and btrfs have grown; their disk is made anew
					must(t, v.unstage())
					v = behind(t, fsType)
					v.Static, v.Tag = static, map[string]string{volume.CtxUse: volume.UseBoth}
				}
				must(t, os.Setenv("PATH", path))
				raw := v
				raw.FSType = "block"
				if static {
					raw.ID = "the-handle-of-another-cluster"
				}
				must(t, raw.stage())
				must(t, raw.publish("dev"))
				for _, slot := range filesystem.GrowthOffsets(v.disk.SizeBytes) {
					if hasRecord(t, v.disk, slot) {
						t.Errorf("a record is left at %d", slot)
					}
				}
				v.disk.WriteAt(t, 2*guesttest.GiB, []byte("what a workload has written"))
				must(t, raw.unpublish("dev"))
				must(t, raw.unstage())
				before := v.tail(t)
				must(t, v.stage())
				if v.isGrown(t) {
					t.Error("it has grown")
				}
				must(t, v.unstage())
				if v.tail(t) != before {
					t.Error("what the workload wrote is not there any more")
				}
			})
		}
	}
}
