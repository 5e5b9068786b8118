//go:build linux

package node

import (
	"bytes"
	"fmt"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// interruptedDisk is a volume whose disk has the records of an interrupted format, and all that
// mkfs makes. If whole is set, the disk was not made blank.
func interruptedDisk(t *testing.T, whole bool) testVolume {
	t.Helper()
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), volume.Ext4)
	v.Whole = whole
	interruptFormat(t, `"$real" "$@" && exit 1`, v.stage)
	return v
}

func TestAMarkMakesNobodyElsesBytesTheDriversOwn(t *testing.T) {
	foreign := bytes.Repeat([]byte("what a workload has written. "), 40000)
	for _, c := range []struct {
		name  string
		whole bool
		at    int64
		bytes []byte
	}{
		{"at the start, over all that mkfs made", false, 0, foreign},
		{"in the boot block", false, 0, []byte{1}},
		{"in the boot block of a disk that is read whole", true, 0, []byte{1}},
		{"behind the first MiB of a disk that is read whole", true, 5*guesttest.MiB + 512, foreign[:512]},
		{"in the midst of a disk that is read whole", true, 100 * guesttest.MiB, foreign[:512]},
		{"at the end of a disk that is read whole", true, 256*guesttest.MiB - 512, foreign[:512]},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := interruptedDisk(t, c.whole)
			v.disk.WriteAt(t, c.at, c.bytes)
			before := v.disk.Digest(t)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
			if v.disk.Digest(t) != before {
				t.Fatal("the disk was written")
			}
		})
	}
	for _, whole := range []bool{false, true} {
		t.Run(fmt.Sprint("without them the format is done again, read whole: ", whole),
			func(t *testing.T) {
				v := interruptedDisk(t, whole)
				must(t, v.stage())
				v.checkStaged(t)
			})
	}
}

func TestTheMarksAreGoneBeforeADeviceIsShownAsOne(t *testing.T) {
	for name, show := range map[string]func(v testVolume) error{
		"staged":              func(v testVolume) error { return v.stage() },
		"published":           func(v testVolume) error { return v.publish("dev") },
		"published read-only": func(v testVolume) error { return v.publishReadOnly("dev") },
	} {
		for _, script := range []string{"exit 1", `"$real" "$@" && exit 1`} {
			t.Run(fmt.Sprintf("%s, after a mkfs of %q", name, script), func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, 256*guesttest.MiB), volume.Ext4)
				v.Whole = true
				interruptFormat(t, script, v.stage)
				if recordsOn(t, v.disk) == 0 {
					t.Fatal("no mark is on the disk")
				}
				raw := v
				raw.FSType = "block"
				must(t, show(raw))
				if n := recordsOn(t, v.disk); n != 0 {
					t.Fatalf("%d marks are left", n)
				}
			})
		}
	}
	t.Run("and what was written to it then is not formatted", func(t *testing.T) {
		v := interruptedDisk(t, true)
		raw := v
		raw.FSType = "block"
		must(t, raw.stage())
		must(t, raw.publish("dev"))
		v.disk.WriteAt(t, 0, bytes.Repeat([]byte("raw "), 16*guesttest.MiB))
		must(t, raw.unpublish("dev"))
		must(t, raw.unstage())
		before := v.disk.Digest(t)
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
		if v.disk.Digest(t) != before {
			t.Fatal("the disk was written")
		}
	})
	t.Run("but a file that holds one keeps its bytes", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		v.Whole = true
		v.Context = map[string]string{volume.CtxMkfsOptions: "fsBlockSize=4096"}
		must(t, v.stage())
		fill(t, filepath.Join(v.staging(), "marks"), v.formatRecord(t))
		must(t, v.unstage())
		before := v.disk.Digest(t)
		raw := v
		raw.FSType = "block"
		must(t, raw.publish("dev"))
		must(t, raw.unpublish("dev"))
		if v.disk.Digest(t) != before {
			t.Fatal("the disk was written")
		}
	})
}
