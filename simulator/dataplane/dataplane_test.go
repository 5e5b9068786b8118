//go:build linux

package dataplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func TestMain(m *testing.M) { namespace.Main(m) }

const testDiskSize = 64 << 20

// newPlane opens a data plane and removes its devices when the test ends.
func newPlane(t *testing.T) *Plane { return newPlaneIn(t, Config{Dir: t.TempDir()}) }

func newPlaneIn(t *testing.T, c Config) *Plane {
	t.Helper()
	p := openPlane(t, c)
	t.Cleanup(func() {
		// A mount namespace that another process creates in the meantime keeps our mounts as long as it
		// lives.
		if err := p.Close(); err != nil && !errors.Is(err, loopdev.ErrBusy) {
			t.Error(err)
		}
		simtest.Eventually(t, "every device is released",
			func() bool { return len(devicesOf(t, p)) == 0 })
	})
	return p
}

func openPlane(t *testing.T, c Config) *Plane {
	t.Helper()
	simtest.NeedRoot(t)
	c.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	p, err := Open(c)
	simtest.NoError(t, err)
	return p
}

func newPlaneOn(t *testing.T, fsType string) *Plane {
	t.Helper()
	simtest.NeedRoot(t)
	image, dir := filepath.Join(t.TempDir(), "host.img"), t.TempDir()
	simtest.NoError(t, os.WriteFile(image, nil, 0o600))
	simtest.NoError(t, os.Truncate(image, 1<<30))
	host, err := loopdev.Attach(t.Context(), loopdev.Config{Path: image, Serial: "host-" + newID()})
	simtest.NoError(t, err)
	t.Cleanup(func() {
		simtest.Eventually(t, "the host's filesystem is released",
			func() bool { return host.Detach(context.Background()) == nil })
	})
	simtest.Command(t, "mkfs."+fsType, "-q", host.Path)
	simtest.Mount(t, host.Path, dir)
	return newPlaneIn(t, Config{Dir: dir})
}

func newID() string { return uuid.NewString() }

func devicesOf(t *testing.T, p *Plane) []loopdev.Device {
	t.Helper()
	devices, err := p.OwnDevices()
	simtest.NoError(t, err)
	return devices
}

func newGuest(t *testing.T, p *Plane) string {
	t.Helper()
	id := newID()
	simtest.NoError(t, p.AddGuest(Firmware{InstanceID: id, Name: "web-1"}))
	return id
}

func newDisk(t *testing.T, p *Plane, instanceID, name string) Device {
	t.Helper()
	spec := Device{InstanceID: instanceID, DiskID: newID(), DiskName: name,
		SizeBytes: testDiskSize, BlockSize: 512}
	simtest.NoError(t, p.CreateDisk(spec.DiskID, spec.SizeBytes))
	return spec
}

func seen(t *testing.T, p *Plane, instanceID string) []string {
	t.Helper()
	var names []string
	entries, err := os.ReadDir(p.view(instanceID).blockDir())
	simtest.NoError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// nodeOf returns the path of the guest's only device node.
func nodeOf(t *testing.T, p *Plane, instanceID string) string {
	t.Helper()
	names := seen(t, p, instanceID)
	if len(names) != 1 {
		t.Fatalf("the guest sees %v, want one device", names)
	}
	return p.view(instanceID).nodePath(names[0])
}

// TestMkfsTellsApartDisksWithOneSerial has two racks whose disks have the same serial number.
func TestMkfsTellsApartDisksWithOneSerial(t *testing.T) {
	for _, mounted := range []bool{true, false} {
		p := newPlane(t)
		spec := newDisk(t, p, newGuest(t, p), "same")
		spec.SizeBytes = 256 << 20 // mkfs.btrfs refuses smaller disks
		simtest.NoError(t, p.Plug(spec, Fault{}))
		node := p.view(spec.InstanceID).nodePath(seen(t, p, spec.InstanceID)[0])
		simtest.Command(t, "mkfs.btrfs", "-q", node)
		if mounted {
			simtest.Mount(t, node, t.TempDir(), "-t", "btrfs")
		}
	}
}

func TestOnlyADistributedDiskHasAWriteCacheAndCanRefuseDiscards(t *testing.T) { // A69
	for _, test := range []struct {
		local, noDiscards bool
		cache             string
		left              byte
	}{{false, true, "write back\n", 7}, {false, false, "write back\n", 0},
		{true, true, "write through\n", 0}} {
		p := newPlane(t)
		p.NoDiscards = test.noDiscards
		id := newGuest(t, p)
		spec := newDisk(t, p, id, "data")
		spec.Local = test.local
		simtest.NoError(t, p.Plug(spec, Fault{}))
		node := nodeOf(t, p, id)
		path := filepath.Join(p.view(id).blockDir(), filepath.Base(node), "queue", "write_cache")
		if got, err := os.ReadFile(path); err != nil || string(got) != test.cache {
			t.Errorf("%s is %q (%v), want %q", path, got, err, test.cache)
		}
		simtest.NoError(t, writeTo(node, 7))
		_ = exec.Command("blkdiscard", node).Run() // which refuses a device that offers no discard
		if got := first(t, p, spec); got != test.left {
			t.Errorf("%+v: the first byte after a discard is %d", test, got)
		}
	}
}

func TestADiskIsInOneGuestOnly(t *testing.T) {
	p := newPlane(t)
	a, b := newGuest(t, p), newGuest(t, p)
	spec := newDisk(t, p, a, "single")
	simtest.NoError(t, p.Plug(spec, Fault{}))
	spec.InstanceID = b
	if err := p.Plug(spec, Fault{}); err == nil {
		t.Error("a second guest was given the disk")
	}
	simtest.NoError(t, p.Unplug(b, spec.DiskID))
	if names := seen(t, p, a); len(names) != 1 {
		t.Errorf("the unplug of B changed what A sees: %v", names)
	}
	if err := p.RemoveDisk(spec.DiskID); err == nil {
		t.Error("a disk that a guest has was removed")
	}
}

func TestDeviceNumbersDoNotFollowTheOrderOfAttachment(t *testing.T) {
	p := newPlane(t)
	p.Seed = 7
	id := newGuest(t, p)
	var inOrder []string
	for i := range 11 {
		spec := newDisk(t, p, id, fmt.Sprintf("disk-%d", i))
		simtest.NoError(t, p.Plug(spec, Fault{}))
		inOrder = append(inOrder, p.guests.disk(spec.DiskID).node)
	}
	number := func(name string) (n int) {
		_, err := fmt.Sscanf(name, "nvme%d", &n)
		simtest.NoError(t, err)
		return n
	}
	if slices.IsSortedFunc(inOrder, func(a, b string) int { return number(a) - number(b) }) {
		t.Errorf("the numbers follow the order of attachment: %v", inOrder)
	}
	if n := len(seen(t, p, id)); n != 11 {
		t.Errorf("the guest sees %d devices, want 11", n)
	}
}

// TestForceDetachCutsTheGuestOffFromTheDisk detaches a mounted disk and attaches it to another
// guest.
func TestForceDetachCutsTheGuestOffFromTheDisk(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p := newPlane(t)
			a, b := newGuest(t, p), newGuest(t, p)
			spec := newDisk(t, p, a, "yanked")
			spec.SizeBytes = 320 << 20
			simtest.NoError(t, p.RemoveDisk(spec.DiskID))
			simtest.NoError(t, p.CreateDisk(spec.DiskID, spec.SizeBytes))
			simtest.NoError(t, p.Plug(spec, Fault{}))
			old, dir := nodeOf(t, p, a), t.TempDir()
			simtest.Command(t, "mkfs."+fsType, "-q", old)
			simtest.Mount(t, old, dir)
			simtest.NoError(t, os.WriteFile(filepath.Join(dir, "f"), []byte("kept"), 0o600))
			simtest.Command(t, "sync", "-f", dir)
			raw, err := os.OpenFile(old, os.O_RDWR, 0)
			simtest.NoError(t, err)
			defer raw.Close()

			simtest.NoError(t, p.Unplug(a, spec.DiskID))
			spec.InstanceID = b
			simtest.NoError(t, p.Plug(spec, Fault{}))
			if _, err := raw.WriteAt(make([]byte, 8192), 0); err == nil && raw.Sync() == nil {
				t.Error("the old guest still writes")
			}
			_ = os.WriteFile(filepath.Join(dir, "g"), make([]byte, 1<<20), 0o600)
			_ = exec.Command("sync", "-f", dir).Run()
			raw.Close()
			simtest.NoError(t, unix.Unmount(dir, unix.MNT_DETACH))
			simtest.Eventually(t, "the kernel releases the old device",
				func() bool { return len(devicesOf(t, p)) == 1 })

			simtest.Mount(t, nodeOf(t, p, b), dir)
			got, err := os.ReadFile(filepath.Join(dir, "f"))
			if string(got) != "kept" || exists(filepath.Join(dir, "g")) {
				t.Errorf("the new guest reads %q, %v", got, err)
			}
			simtest.Command(t, "umount", dir)
		})
	}
}

func TestADirectoryWithoutDeviceNodesIsRefused(t *testing.T) {
	simtest.NeedRoot(t)
	dir := t.TempDir()
	simtest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", "nodev,size=1m")
	_, err := Open(Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "nodev") {
		t.Errorf("openPlane = %v, want an error that says nodev", err)
	}
}

func TestCloseAndRemoveGuestReleaseEveryDevice(t *testing.T) {
	p := newPlane(t)
	id := newGuest(t, p)
	again := func() error { return p.RemoveGuest(id) }
	for _, end := range []func() error{again, again, p.Close} {
		simtest.NoError(t, p.AddGuest(Firmware{InstanceID: id, Name: "web-1"}))
		simtest.NoError(t, p.Plug(newDisk(t, p, id, "now"), Fault{}))
		simtest.NoError(t, p.Plug(newDisk(t, p, id, "later"), Fault{Delay: time.Hour}))
		simtest.NoError(t, end())
		left, _ := filepath.Glob(filepath.Join(p.view(id).blockDir(), "*")) // a valid pattern
		if n := len(devicesOf(t, p)); n != 0 || len(left) != 0 {
			t.Errorf("afterwards there are %d devices, and the guest sees %v", n, left)
		}
	}
	simtest.NoError(t, p.RemoveGuest(newID()))
	if err := p.Plug(newDisk(t, p, id, "after"), Fault{}); err == nil {
		t.Error("a closed data plane plugs a disk")
	}
}

func TestGuestsDoNotWaitForEachOther(t *testing.T) {
	p := newPlane(t)
	busy, other := newGuest(t, p), newGuest(t, p)
	spec := newDisk(t, p, other, "data")
	held := p.guests.lock(busy)
	defer held.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		done <- p.Plug(spec, Fault{})
		done <- p.Unplug(other, spec.DiskID)
	}()
	for _, what := range []string{"plug", "unplug"} {
		select {
		case err := <-done:
			simtest.NoError(t, err)
		case <-time.After(30 * time.Second):
			t.Fatalf("%s waits for another guest", what)
		}
	}
}

func TestAMachineStartsOnlyIfThereIsMemoryForIt(t *testing.T) {
	const meminfo = "MemTotal:        8388608 kB\nMemFree:  1 kB\nMemAvailable:    2097152 kB\n"
	for name, test := range map[string]struct {
		used, more int64
		fits       bool
	}{
		"the first":                           {1 << 30, 1 << 30, true},
		"more than is available":              {3 << 30, 3 << 30, false},
		"the last that its machines may take": {6 << 30, 1 << 30, true},
		"beyond what its machines may take":   {7 << 30, 1 << 30, false},
	} {
		if err := fits(meminfo, test.used, test.more); errors.Is(err, ErrNoMemory) == test.fits {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func newFlakyPlane(t *testing.T, dir string) *Plane {
	t.Helper()
	return newPlaneIn(t, Config{Dir: dir, FlakyDisks: true})
}

func writeTo(path string, fill byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(bytes.Repeat([]byte{fill}, 4096), 0)
	return errors.Join(err, f.Sync(), f.Close())
}

func first(t *testing.T, p *Plane, d Device) byte {
	t.Helper()
	content, err := os.ReadFile(p.DiskPath(d.DiskID))
	simtest.NoError(t, err)
	return content[0]
}

func TestADiskFailsInEachGuestUntilItIsHealed(t *testing.T) {
	p := newFlakyPlane(t, t.TempDir())
	a, b := newGuest(t, p), newGuest(t, p)
	d := newDisk(t, p, a, "db")
	simtest.NoError(t, p.Plug(d, Fault{}))
	simtest.NoError(t, writeTo(nodeOf(t, p, a), 'a'))
	simtest.NoError(t, p.Flaky.Fail(d.DiskID, flakydisk.Fault{On: flakydisk.OnFlush}))
	if err := writeTo(nodeOf(t, p, a), 'b'); !errors.Is(err, unix.EIO) {
		t.Errorf("a flush = %v, want EIO", err)
	}
	simtest.NoError(t, p.Unplug(a, d.DiskID))
	d.InstanceID = b
	simtest.NoError(t, p.Plug(d, Fault{}))
	if err := writeTo(nodeOf(t, p, b), 'c'); !errors.Is(err, unix.EIO) {
		t.Errorf("a flush in the next guest = %v, want EIO", err)
	}
	faults, err := p.Flaky.Faults(d.DiskID)
	if err != nil || len(faults) != 1 || faults[0].Fired < 2 {
		t.Errorf("the faults are %+v, %v, want one that has fired in both guests", faults, err)
	}
	simtest.NoError(t, p.Flaky.Heal(d.DiskID))
	simtest.NoError(t, writeTo(nodeOf(t, p, b), 'd'))
	if got := first(t, p, d); got != 'd' {
		t.Errorf("the disk begins with %q, want d", got)
	}
}

func TestAHangingDiskCanBeDetachedFromItsGuest(t *testing.T) {
	p := newFlakyPlane(t, t.TempDir())
	guest := newGuest(t, p)
	d := newDisk(t, p, guest, "db")
	simtest.NoError(t, p.Plug(d, Fault{}))
	simtest.NoError(t, p.Flaky.Fail(d.DiskID, flakydisk.Fault{On: flakydisk.OnWrite, Hang: true}))
	written := make(chan error, 1)
	go func() { written <- writeTo(nodeOf(t, p, guest), 'h') }()
	simtest.Eventually(t, "the write hangs", func() bool {
		faults, err := p.Flaky.Faults(d.DiskID)
		return err == nil && faults[0].Fired > 0
	})
	simtest.NoError(t, p.Unplug(guest, d.DiskID))
	if err := <-written; err == nil {
		t.Error("a write that hung until the disk was taken away succeeded")
	}
	if got := first(t, p, d); got != 0 {
		t.Errorf("the disk begins with %q, want nothing", got)
	}
}

func TestTheDisksOfAKilledSimulatorAreCreatedAgain(t *testing.T) {
	dir := t.TempDir()
	p := openPlane(t, Config{Dir: dir, FlakyDisks: true})
	guest := newGuest(t, p)
	d := newDisk(t, p, guest, "db")
	simtest.NoError(t, p.Plug(d, Fault{}))
	simtest.NoError(t, writeTo(nodeOf(t, p, guest), 'k'))
	// The connection to the kernel ends, as at the end of a process.
	simtest.NoError(t, unix.Unmount(p.Flaky.dir, unix.MNT_FORCE|unix.MNT_DETACH))
	p.Stop()
	dead := devicesOf(t, p)
	if len(dead) != 1 || !dead[0].Orphaned {
		t.Fatalf("the devices are %+v, want one whose server is gone", dead)
	}

	same := newFlakyPlane(t, t.TempDir()) // another rack with the same disk, from the same seed
	simtest.NoError(t, same.CreateDisk(d.DiskID, d.SizeBytes))
	if theirs := devicesOf(t, same); len(theirs) != 0 {
		t.Errorf("another rack claims the devices %+v", theirs)
	}
	p = newFlakyPlane(t, dir)
	simtest.NoError(t, p.AddGuest(Firmware{InstanceID: guest, Name: "web-1"}))
	simtest.NoError(t, p.Reconcile(t.Context(), []Device{d}, IDs{"disks": {d.DiskID}}))
	if devices := devicesOf(t, p); len(devices) != 1 || devices[0].Sequence == dead[0].Sequence {
		t.Errorf("the devices are %+v, want a new one alone", devices)
	}
	if got := first(t, p, d); got != 'k' {
		t.Errorf("the disk begins with %q, want k", got)
	}
	simtest.NoError(t, writeTo(nodeOf(t, p, guest), 'l'))
}
