//go:build linux

package mount

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

var must = csitest.Must

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
	d, err := host.OpenLocked(t.Context(), found, false)
	must(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestTheOpenDeviceIsMountedAndNotItsPath(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run(fsType, func(t *testing.T) {
			g := guesttest.New(t)
			disk := formatted(t, g, guesttest.Serial, fsType)
			device := opened(t, g, guesttest.Serial)
			// The disk is replaced, and the kernel gives its name to another disk.
			other := formatted(t, g, guesttest.OtherSerial, fsType)
			g.Unplug(disk)
			g.Unplug(other)
			other.Name = disk.Name
			g.Plug(other)
			same := other.Same(t)
			m, err := New(device, fsType, volume.MountOptions{})
			must(t, err)
			must(t, m.Close())
			same()
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
			source := table.Top(path).Source // which tune2fs and other programs look up
			if source != madeOf(device.Path) {
				t.Errorf("its source is %q, not the device's path %q", source, device.Path)
			}
		})
	}
}

func TestStageABtrfsDuringADeviceScan(t *testing.T) {
	g := guesttest.New(t)
	disk := formatted(t, g, guesttest.Serial, volume.Btrfs)
	device := opened(t, g, guesttest.Serial)
	ctx, stop := context.WithCancel(t.Context())
	scans := async.Start(func() (struct{}, error) {
		control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0)
		if err != nil {
			return struct{}{}, err
		}
		defer func() { _ = control.Close() }()
		const scan = 0x50009404 // _IOW(0x94, 4, struct btrfs_ioctl_vol_args)
		var arg [4096]byte
		copy(arg[8:], disk.Loop)
		for ctx.Err() == nil {
			if err := blockdev.Ioctl(int(control.Fd()), scan, unsafe.Pointer(&arg)); err != nil {
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
	_, err := scans()
	must(t, err)
}

func TestStageBtrfsAfterAFailedMount(t *testing.T) {
	for _, origin := range []string{"failed", "mounted"} {
		t.Run("its origin has "+origin, func(t *testing.T) {
			g := guesttest.New(t)
			disk := formatted(t, g, guesttest.Serial, volume.Btrfs)
			other := formatted(t, g, guesttest.OtherSerial, volume.Btrfs)
			device, otherDevice := opened(t, g, disk.Serial), opened(t, g, other.Serial)
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
				m, err := New(device, volume.Btrfs, volume.MountOptions{})
				must(t, err)
				defer func() { _ = m.Close() }()
			} else {
				busy(disk.Loop, device)
			}
			busy(other.Loop, otherDevice)
			// The other disk is removed, and its number is given to a copy of the first disk.
			guesttest.Run(t, "dd", "if="+disk.Loop, "of="+other.Loop, "bs=1M", "conv=fsync")
			m, err := New(otherDevice, volume.Btrfs, volume.MountOptions{})
			must(t, err)
			must(t, m.Close())
		})
	}
}

func TestNoMountLeavesTheProcessWithAnotherRoot(t *testing.T) {
	g := guesttest.New(t)
	formatted(t, g, guesttest.Serial, volume.Ext4)
	device := opened(t, g, guesttest.Serial)
	for range 20 {
		m, err := New(device, volume.Ext4, volume.MountOptions{})
		must(t, err)
		must(t, m.Close())
	}
	// Other processes see the root of the first thread as the process's.
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
