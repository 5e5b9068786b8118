//go:build linux

package mount

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

var must = csitest.Must

// formatted attaches a disk with a filesystem.
func formatted(t *testing.T, g *guesttest.Guest, serial, fsType string) *guesttest.Disk {
	t.Helper()
	d := g.Attach(serial, 512*guesttest.MiB)
	guesttest.Run(t, "mkfs."+fsType, "-q", d.Loop)
	return d
}

func opened(t *testing.T, g *guesttest.Guest, serial string) *blockdev.OpenDevice {
	t.Helper()
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(serial)
	must(t, err)
	d, err := host.OpenLocked(t.Context(), found)
	must(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestTheOpenDeviceIsMountedWhateverItsPathLeadsToByNow(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := guesttest.New(t)
			disk := formatted(t, g, guesttest.Serial, fsType)
			device := opened(t, g, guesttest.Serial)
			// The disk is replaced, and the kernel gives its node's name to another one.
			other := formatted(t, g, guesttest.OtherSerial, fsType)
			g.Unplug(disk)
			g.Unplug(other)
			other.Name = disk.Name
			g.Plug(other)
			before := other.Digest(t)
			m, err := New(device, fsType, volume.MountOptions{})
			if fsType == volume.Btrfs { // is known by its path as well
				if !errors.Is(err, ErrBtrfsTwins) {
					t.Errorf("got %v", err)
				}
			} else {
				must(t, err)
				must(t, m.Close())
			}
			if other.Digest(t) != before {
				t.Error("the other disk has changed")
			}
		})
	}
}

func TestAMountShowsItsDeviceAndThatTheDriverMadeIt(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := guesttest.New(t)
			formatted(t, g, guesttest.Serial, fsType)
			device := opened(t, g, guesttest.Serial)
			m, err := New(device, fsType, volume.MountOptions{})
			must(t, err)
			defer func() { _ = m.Close() }()
			path := filepath.Join(g.Dir, "dev")
			must(t, m.Attach(path))
			table, err := ReadTable()
			must(t, err)
			source := table.Top(path).Source // which tune2fs and others look up
			if source != madeOf(device.Path) {
				t.Errorf("its source is %q, not the device's path %q", source, device.Path)
			}
		})
	}
}
