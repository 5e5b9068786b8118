//go:build linux

package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

var must = csitest.Must

func formatted(t *testing.T, g *guesttest.Guest, serial, fsType string) (*guesttest.Disk,
	*blockdev.OpenDevice) {
	t.Helper()
	disk := g.Attach(serial, 512*guesttest.MiB)
	guesttest.Run(t, "mkfs."+fsType, "-q", disk.Loop)
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found := csitest.Got(host.Lookup(serial))(t)
	d := csitest.Got(host.OpenLocked(t.Context(), found, false))(t)
	t.Cleanup(func() { _ = d.Close() })
	return disk, d
}

func mounts(t *testing.T, d *blockdev.OpenDevice, fsType string) {
	t.Helper()
	m := csitest.Got(New(d, fsType, volume.MountOptions{}))(t)
	must(t, m.Close())
}

func TestTheSourceOfAMountIsTheDevicePathWithTheDriversMark(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := guesttest.New(t)
			_, device := formatted(t, g, guesttest.Serial, fsType)
			m := csitest.Got(New(device, fsType, volume.MountOptions{}))(t)
			defer func() { _ = m.Close() }()
			path := filepath.Join(g.Dir, "dev")
			must(t, m.Attach(path))
			table := csitest.Got(ReadTable())(t)
			source := table.Top(path).Source // which tune2fs and other programs look up
			if source != madeOf(device.Path) {
				t.Errorf("its source is %q, not the device's path %q", source, device.Path)
			}
		})
	}
}

func TestABtrfsIsMountedDuringDeviceScans(t *testing.T) {
	disk, device := formatted(t, guesttest.New(t), guesttest.Serial, volume.Btrfs)
	ctx, stop := context.WithCancel(t.Context())
	scans := async.Start(func() (struct{}, error) {
		for ctx.Err() == nil {
			if err := callControl("/dev/btrfs-control", btrfsScan, disk.Loop); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	for range 50 {
		m, err := New(device, volume.Btrfs, volume.MountOptions{})
		if err != nil {
			t.Error(err)
			break
		}
		must(t, m.Close())
	}
	stop()
	must(t, csitest.Err(scans()))
}

func TestABtrfsIsMountedAfterAFailedMountOfItsDevice(t *testing.T) {
	for _, origin := range []string{"failed", "mounted"} {
		t.Run(origin+" origin", func(t *testing.T) {
			g := guesttest.New(t)
			disk, device := formatted(t, g, guesttest.Serial, volume.Btrfs)
			other, otherDevice := formatted(t, g, guesttest.OtherSerial, volume.Btrfs)
			busy := func(loop string, device *blockdev.OpenDevice) {
				f, err := os.OpenFile(loop, os.O_RDWR|os.O_EXCL, 0)
				must(t, err)
				defer func() { _ = f.Close() }()
				_, err = New(device, volume.Btrfs, volume.MountOptions{})
				if !errors.Is(err, unix.EBUSY) {
					t.Fatalf("a mount of an exclusively used device: got %v, want EBUSY", err)
				}
			}
			if origin == "mounted" {
				m := csitest.Got(New(device, volume.Btrfs, volume.MountOptions{}))(t)
				defer func() { _ = m.Close() }()
			} else {
				busy(disk.Loop, device)
			}
			busy(other.Loop, otherDevice)
			// Overwrite the other disk, as if a copy of the first disk had got the other's device number.
			guesttest.Run(t, "dd", "if="+disk.Loop, "of="+other.Loop, "bs=1M", "conv=fsync")
			mounts(t, otherDevice, volume.Btrfs)
		})
	}
}

func TestMountingDoesNotChangeTheRootOfTheProcess(t *testing.T) {
	_, device := formatted(t, guesttest.New(t), guesttest.Serial, volume.Ext4)
	for range 20 {
		mounts(t, device, volume.Ext4)
	}
	// /proc shows the root directory of the first thread as that of the process.
	for _, of := range []string{"self", "thread-self"} {
		if root, err := os.Readlink("/proc/" + of + "/root"); err != nil || root != "/" {
			t.Errorf("the root is %q: %v", root, err)
		}
		if entries, err := os.ReadDir("/proc/" + of + "/root/proc"); err != nil || len(entries) == 0 {
			t.Errorf("%s: the root has no /proc: %v", of, err)
		}
	}
}

func TestMain(m *testing.M) { namespace.Main(m) }

func TestAParsedMountTableShowsEachMountsFlagsAndCondition(t *testing.T) {
	table, err := parseTable([]byte(strings.Join([]string{
		`21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw`,
		`40 21 259:3 / /a\040b\011c\012d\134e rw,noatime shared:2 master:1 - ext4 /dev/nvme3n1 rw,sync`,
		`52 41 259:3 /sub /other ro,relatime - ext4 /dev/nvme3n1 rw`,
		`51 40 0:52 / /a\040b\011c\012d\134e rw - tmpfs none rw`,
	}, "\n") + "\n"))
	csitest.Must(t, err)
	const path = "/a b\tc\nd\\e"
	layers := table.At(path)
	if len(layers) != 2 || layers[1].ID != 51 || table.Top(path).FSType != "tmpfs" {
		t.Fatalf("layers: %+v", layers)
	}
	if got := Flags(layers[0]); !slices.Equal(got, []string{"noatime", "sync"}) {
		t.Fatalf("flags: %q", got)
	}
	if got := table.Of(blockdev.Device{Path: "/dev/nvme3n1", Major: 259, Minor: 3}); len(got) != 2 {
		t.Fatalf("mounts of the device: %q", got.Paths())
	}
	if err := table.OnlyAt(path, layers[0]); !csierr.Has(err, csierr.StillMounted) ||
		!strings.Contains(err.Error(), `"/other"`) {
		t.Fatalf("other mounts of the filesystem: %v", err)
	}
	for line, want := range map[string]Condition{
		"rw - ext4 /dev/nvme4n1 rw":               Healthy,
		"ro - ext4 /dev/nvme4n1 rw":               Healthy,
		"ro - ext4 /dev/nvme4n1 ro":               Healthy,
		"rw - xfs /dev/nvme4n1 ro":                ReadOnlyAfterErrors,
		"rw - ext4 /dev/nvme4n1 rw,emergency_ro":  ReadOnlyAfterErrors,
		"ro - ext4 /dev/nvme4n1 ro,emergency_ro":  ReadOnlyAfterErrors,
		"rw,noatime - ext4 /dev/nvme4n1 shutdown": Dead,
	} {
		table := csitest.Got(parseTable([]byte("41 21 259:4 / / " + line + "\n")))(t)
		if got := ConditionOf(table[0]); got != want {
			t.Errorf("the condition of %q is %q, want %q", line, got, want)
		}
	}
	if table.Top("/a") != nil {
		t.Fatal("Top returns a mount for a prefix of its path")
	}
}

// Any user can make very long lines by mounting deep directories in a user namespace.
func TestMountTableLinesOfAnyLengthAreParsed(t *testing.T) {
	deep := strings.Repeat("/a-directory", 10_000)
	table, err := parseTable([]byte("21 1 254:0 / / rw - ext4 /dev/root rw\n" +
		"40 21 0:52 " + deep + " " + deep + ` rw master:1 - tmpfs  rw,opt=a b` + "\n" +
		"41 21 259:3 / /volume rw - ext4 /dev/nvme3n1 rw\n"))
	csitest.Must(t, err)
	if len(table) != 3 || table[1].Mountpoint != deep || table[1].Source != "" ||
		table[1].VFSOptions != "rw,opt=a b" || table.Top("/volume") == nil {
		t.Errorf("got %d mounts", len(table))
	}
	for _, line := range []string{"40 21 0:52 / / rw tmpfs none rw",
		"x 21 0:52 / / rw - tmpfs none rw", "40 21 0 / / rw - tmpfs none rw",
		"40 21 0:52 / / rw - tmpfs"} {
		if _, err := parseTable([]byte(line)); err == nil {
			t.Errorf("%q is taken for a mount", line)
		}
	}
}

func TestReceiversOfMountEventsAreFoundThroughALongChainOfPeerGroups(t *testing.T) {
	const groups = 50_000
	var table Table
	for i := range groups { // in reverse, the worst order for repeated scans of the table
		table = append(table, &mountinfo.Info{Optional: fmt.Sprintf("shared:%d master:%d", groups-i,
			groups-i-1)})
	}
	if got := len(Views{newView(0, table, false)}.receivers("0")); got != groups+1 {
		t.Errorf("%d of %d groups receive", got, groups+1)
	}
}

func FuzzMountTable(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		table, err := parseTable(b)
		if err != nil {
			return
		}
		layers, count := table.At(path), 0
		for _, m := range table {
			if m.Mountpoint == path {
				count++
			}
		}
		if len(layers) != count {
			t.Fatalf("%d mounts at %q, found %d", count, path, len(layers))
		}
		var free []int // the IDs of the layers that no other layer covers
		for _, m := range layers {
			if m.Mountpoint != path {
				t.Fatalf("At(%q) has a mount at %q", path, m.Mountpoint)
			}
			covered := false
			for _, other := range layers {
				covered = covered || other.Parent == m.ID && other.ID != m.ID
			}
			if !covered {
				free = append(free, m.ID)
			}
		}
		top := table.Top(path)
		if (top == nil) != (count == 0) {
			t.Fatalf("Top(%q) = %v of %d mounts", path, top, count)
		}
		if len(free) > 0 && !slices.Contains(free, top.ID) {
			t.Fatalf("another mount covers Top(%q)", path)
		}
	})
}

func FuzzAnAddedMountHidesNoOtherMount(f *testing.F) {
	f.Fuzz(func(t *testing.T, b, line []byte, major, minor uint32) {
		before, err := parseTable(b)
		if err != nil {
			return
		}
		after, err := parseTable(slices.Concat(b, []byte("\n"), line, []byte("\n")))
		if err != nil || len(after) < len(before) {
			return // line describes no mount
		}
		d := blockdev.Device{Path: "/nowhere/nvme9n1", Major: major, Minor: minor}
		if was, is := len(before.Of(d)), len(after.Of(d)); is < was {
			t.Fatalf("with %q the device has %d mounts, not %d", line, is, was)
		}
		for _, m := range before {
			if after.Top(m.Mountpoint) == nil {
				t.Fatalf("with %q nothing is mounted at %q", line, m.Mountpoint)
			}
			if before.OnlyAt(m.Mountpoint, m) != nil && after.OnlyAt(m.Mountpoint, m) == nil {
				t.Fatalf("%q hides another mount at %q", line, m.Mountpoint)
			}
		}
	})
}
