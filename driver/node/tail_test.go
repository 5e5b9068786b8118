//go:build linux

package node

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// beforeGrowth is the size of a filesystem that lies on a disk three times as large.
const beforeGrowth = 320 * guesttest.MiB

// behind is a volume whose filesystem lies at the start of its disk.
func behind(t *testing.T, fsType string) testVolume {
	t.Helper()
	g := statefulGuest(t)
	small := g.volume(g.Attach(guesttest.Serial, beforeGrowth), fsType)
	must(t, small.stage())
	must(t, small.unstage())
	g.Unplug(small.disk)
	file := small.disk.Copy(t)
	must(t, os.Truncate(file, 3*beforeGrowth))
	return g.volume(g.AttachFile(guesttest.Serial, file), fsType)
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
	if grown := size > beforeGrowth; grown != (len(entries) == 0) {
		t.Fatalf("the filesystem has %d bytes, and its health is %v", size, entries)
	}
	if len(entries) > 0 && entries[0].GetReason() != string(csierr.FilesystemNotGrown) {
		t.Fatalf("the health is %v", entries)
	}
	return size > 2*beforeGrowth
}

// cutOff returns a volume whose filesystem has behind it all that the growth to its disk writes
// there. An ext has the records of its growth.
func cutOff(t *testing.T, fsType string) testVolume {
	t.Helper()
	v := behind(t, fsType)
	grown := v
	grown.disk = v.guest.AttachFile("csi-grown00000000000", v.disk.Copy(t))
	grown.Name = grown.disk.Serial
	v.guest.Unplug(v.disk) // a btrfs is on one disk of a machine at a time
	if fsType == volume.Ext3 || fsType == volume.Ext4 {
		v.disk = v.guest.AttachFile(guesttest.Serial, v.disk.File)
		interruptGrowth(t, v)
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
	guesttest.Run(t, "dd", "if="+grown.disk.File, "of="+v.disk.File, "bs=1M", "skip=320",
		"seek=320", "count=639", "conv=notrunc,sparse", "status=none")
	v.disk = v.guest.AttachFile(guesttest.Serial, v.disk.File)
	return v
}

func TestAGrowthThatWasCutOffGoesOnOverNothingButItsOwnTraces(t *testing.T) {
	foreign := map[string][]byte{"": nil, "foreign data": []byte("what somebody else has written"),
		// Their blocks have the UUID of their filesystem.
		"another xfs": append([]byte("XFSB"), make([]byte, 508)...),
		"another btrfs": slices.Concat(make([]byte, 48), []byte("\x00\x00\x50\x00\x00\x00\x00"+
			"\x00\x01\x00\x00\x00\x00\x00\x00\x01"))}
	type kind struct{ fsType, behind string }
	var kinds []kind
	for _, fsType := range volume.Filesystems {
		for _, name := range []string{"", "foreign data", "another " + fsType} {
			if _, known := foreign[name]; known {
				kinds = append(kinds, kind{fsType, name})
			}
		}
	}
	for _, c := range short.Some(t, 3, kinds) {
		t.Run(fmt.Sprintf("a %s with %q behind it", c.fsType, c.behind), func(t *testing.T) {
			v := cutOff(t, c.fsType)
			v.disk.WriteAt(t, 2*beforeGrowth+20480, foreign[c.behind])
			before := v.disk.DigestFrom(t, beforeGrowth)
			err := v.stage()
			if err == nil {
				if v.isGrown(t) != (c.behind == "") {
					t.Error("it has grown over it, or has not grown")
				}
				must(t, v.unstage())
			}
			if c.behind == "" {
				must(t, err)
				v.check(t)
			} else if said := v.guest.log.String(); v.disk.DigestFrom(t, beforeGrowth) != before ||
				err == nil && !(strings.Contains(said, "not grown") && strings.Contains(said, "offset ")) {
				t.Errorf("what lies behind it was written, or the log does not say why: %s", said)
			}
		})
	}
}

func TestARawVolumeIsNotGrownOverBecauseAGrowthHadBegun(t *testing.T) {
	for _, static := range []bool{false, true} {
		t.Run(fmt.Sprint("static: ", static), func(t *testing.T) {
			v := behind(t, volume.Ext4)
			v.Static, v.Tag = static, map[string]string{volume.CtxUse: volume.UseBoth,
				volume.CtxOrigin: volume.OriginSnapshot, volume.CtxSourceBytes: fmt.Sprint(beforeGrowth)}
			interruptGrowth(t, v)
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
			v.disk.WriteAt(t, 2*beforeGrowth, []byte("what a workload has written"))
			must(t, raw.unpublish("dev"))
			must(t, raw.unstage())
			before := v.disk.DigestFrom(t, beforeGrowth)
			must(t, v.stage())
			if v.isGrown(t) {
				t.Error("it has grown")
			}
			must(t, v.unstage())
			if v.disk.DigestFrom(t, beforeGrowth) != before {
				t.Error("what the workload wrote is not there any more")
			}
		})
	}
}
