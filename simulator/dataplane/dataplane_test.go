//go:build linux

package dataplane

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

const testDiskSize = 64 << 20

func newPlane(t *testing.T) *Plane { return newPlaneIn(t, Config{Dir: t.TempDir()}) }

func newPlaneIn(t *testing.T, c Config) *Plane {
	t.Helper()
	p := openPlane(t, c)
	t.Cleanup(func() {
		// A device stays busy while another process has a copy of its mount in a mount namespace.
		if err := p.Close(); err != nil && !errors.Is(err, loopdev.ErrBusy) {
			t.Error(err)
		}
		looptest.Await(t, "every device is released",
			func() bool { return len(devicesOf(t, p)) == 0 })
	})
	return p
}

func openPlane(t *testing.T, c Config) *Plane {
	t.Helper()
	looptest.NeedRoot(t)
	c.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	return looptest.Got(Open(c))(t)
}

func newPlaneOn(t *testing.T, fsType string) *Plane {
	t.Helper()
	looptest.NeedRoot(t)
	image, dir := filepath.Join(t.TempDir(), "host.img"), t.TempDir()
	looptest.Must(t, os.WriteFile(image, nil, 0o600))
	looptest.Must(t, os.Truncate(image, 1<<30))
	host := looptest.Got(loopdev.Attach(t.Context(),
		loopdev.Config{Path: image, Serial: "host-" + newID()}))(t)
	t.Cleanup(func() {
		looptest.Await(t, "the host's filesystem is released",
			func() bool { return host.Detach(context.Background()) == nil })
	})
	looptest.Command(t, "mkfs."+fsType, "-q", host.Path)
	looptest.Mount(t, host.Path, dir)
	return newPlaneIn(t, Config{Dir: dir})
}

func newID() string { return uuid.NewString() }

func devicesOf(t *testing.T, p *Plane) []loopdev.Device {
	t.Helper()
	return looptest.Got(p.OwnDevices())(t)
}

func newGuest(t *testing.T, p *Plane) string {
	t.Helper()
	id := newID()
	looptest.Must(t, p.AddGuest(Firmware{InstanceID: id, Name: "web-1"}))
	return id
}

func newDisk(t *testing.T, p *Plane, instanceID, name string) Device {
	t.Helper()
	spec := Device{InstanceID: instanceID, DiskID: newID(), DiskName: name,
		SizeBytes: testDiskSize, BlockSize: 512}
	looptest.Must(t, p.CreateDisk(spec.DiskID, spec.SizeBytes))
	return spec
}

func plugDisk(t *testing.T, p *Plane, instanceID, name string) Device {
	t.Helper()
	spec := newDisk(t, p, instanceID, name)
	looptest.Must(t, p.Plug(spec, Fault{}))
	return spec
}

func seen(t *testing.T, p *Plane, instanceID string) []string {
	t.Helper()
	var names []string
	for _, e := range looptest.Got(os.ReadDir(p.view(instanceID).blockDir()))(t) {
		names = append(names, e.Name())
	}
	return names
}

func nodeOf(t *testing.T, p *Plane, instanceID string) string {
	t.Helper()
	names := seen(t, p, instanceID)
	if len(names) != 1 {
		t.Fatalf("the guest sees %v, want one device", names)
	}
	return p.view(instanceID).nodePath(names[0])
}

func TestMkfsSucceedsWhileAnotherDiskWithTheSameSerialIsMounted(t *testing.T) {
	for _, mounted := range []bool{true, false} {
		p := newPlane(t)
		spec := newDisk(t, p, newGuest(t, p), "same")
		spec.SizeBytes = 256 << 20 // mkfs.btrfs refuses smaller disks
		looptest.Must(t, p.Plug(spec, Fault{}))
		node := p.view(spec.InstanceID).nodePath(seen(t, p, spec.InstanceID)[0])
		looptest.Command(t, "mkfs.btrfs", "-q", node)
		if mounted {
			looptest.Mount(t, node, t.TempDir(), "-t", "btrfs")
		}
	}
}

func TestOnlyDistributedDisksHaveAWriteCacheAndCanRefuseDiscards(t *testing.T) { // A69
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
		looptest.Must(t, p.Plug(spec, Fault{}))
		node := nodeOf(t, p, id)
		path := filepath.Join(p.view(id).blockDir(), filepath.Base(node), "queue", "write_cache")
		if got, err := os.ReadFile(path); err != nil || string(got) != test.cache {
			t.Errorf("%s is %q (%v), want %q", path, got, err, test.cache)
		}
		looptest.Must(t, writeTo(node, 7))
		_ = exec.Command("blkdiscard", node).Run() // blkdiscard fails if the device refuses discards
		if got := first(t, p, spec); got != test.left {
			t.Errorf("%+v: the first byte after a discard is %d", test, got)
		}
	}
}

func TestPlugRefusesADiskOfAnotherGuest(t *testing.T) {
	p := newPlane(t)
	a, b := newGuest(t, p), newGuest(t, p)
	spec := plugDisk(t, p, a, "single")
	spec.InstanceID = b
	if err := p.Plug(spec, Fault{}); err == nil {
		t.Error("a second guest was given the disk")
	}
	looptest.Must(t, p.Unplug(b, spec.DiskID))
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
		spec := plugDisk(t, p, id, fmt.Sprintf("disk-%d", i))
		inOrder = append(inOrder, p.guests.disk(spec.DiskID).node)
	}
	number := func(name string) (n int) {
		looptest.Got(fmt.Sscanf(name, "nvme%d", &n))(t)
		return n
	}
	if slices.IsSortedFunc(inOrder, func(a, b string) int { return number(a) - number(b) }) {
		t.Errorf("the numbers follow the order of attachment: %v", inOrder)
	}
	if n := len(seen(t, p, id)); n != 11 {
		t.Errorf("the guest sees %d devices, want 11", n)
	}
}

func TestUnplugCutsOffAGuestThatUsesTheDisk(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p := newPlane(t)
			a, b := newGuest(t, p), newGuest(t, p)
			spec := newDisk(t, p, a, "yanked")
			spec.SizeBytes = 320 << 20
			looptest.Must(t, p.RemoveDisk(spec.DiskID))
			looptest.Must(t, p.CreateDisk(spec.DiskID, spec.SizeBytes))
			looptest.Must(t, p.Plug(spec, Fault{}))
			old, dir := nodeOf(t, p, a), t.TempDir()
			looptest.Command(t, "mkfs."+fsType, "-q", old)
			looptest.Mount(t, old, dir)
			looptest.Must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("kept"), 0o600))
			looptest.Command(t, "sync", "-f", dir)
			raw := looptest.Got(os.OpenFile(old, os.O_RDWR, 0))(t)
			defer raw.Close()

			looptest.Must(t, p.Unplug(a, spec.DiskID))
			spec.InstanceID = b
			looptest.Must(t, p.Plug(spec, Fault{}))
			if _, err := raw.WriteAt(make([]byte, 8192), 0); err == nil && raw.Sync() == nil {
				t.Error("the old guest still writes")
			}
			_ = os.WriteFile(filepath.Join(dir, "g"), make([]byte, 1<<20), 0o600)
			_ = exec.Command("sync", "-f", dir).Run()
			raw.Close()
			looptest.Must(t, unix.Unmount(dir, unix.MNT_DETACH))
			looptest.Await(t, "the kernel releases the old device",
				func() bool { return len(devicesOf(t, p)) == 1 })

			looptest.Mount(t, nodeOf(t, p, b), dir)
			got, err := os.ReadFile(filepath.Join(dir, "f"))
			if string(got) != "kept" || exists(filepath.Join(dir, "g")) {
				t.Errorf("the new guest reads %q, %v", got, err)
			}
			looptest.Command(t, "umount", dir)
		})
	}
}

func TestOpenRefusesANodevFilesystem(t *testing.T) {
	looptest.NeedRoot(t)
	dir := t.TempDir()
	looptest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", "nodev,size=1m")
	_, err := Open(Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "nodev") {
		t.Errorf("openPlane = %v, want an error that says nodev", err)
	}
}

func TestRemoveGuestAndCloseReleaseEveryDevice(t *testing.T) {
	p := newPlane(t)
	id := newGuest(t, p)
	again := func() error { return p.RemoveGuest(id) }
	for _, end := range []func() error{again, again, p.Close} {
		looptest.Must(t, p.AddGuest(Firmware{InstanceID: id, Name: "web-1"}))
		plugDisk(t, p, id, "now")
		looptest.Must(t, p.Plug(newDisk(t, p, id, "later"), Fault{Delay: time.Hour}))
		looptest.Must(t, end())
		left, _ := filepath.Glob(filepath.Join(p.view(id).blockDir(), "*")) // the pattern is valid
		if n := len(devicesOf(t, p)); n != 0 || len(left) != 0 {
			t.Errorf("afterwards there are %d devices, and the guest sees %v", n, left)
		}
	}
	looptest.Must(t, p.RemoveGuest(newID()))
	if err := p.Plug(newDisk(t, p, id, "after"), Fault{}); err == nil {
		t.Error("a closed data plane plugs a disk")
	}
}

func TestPlugAndUnplugDoNotWaitForAnotherGuest(t *testing.T) {
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
			looptest.Must(t, err)
		case <-time.After(30 * time.Second):
			t.Fatalf("%s waits for another guest", what)
		}
	}
}

func TestVirtualMachinesBeyondTheHostsMemoryAreRefused(t *testing.T) {
	const meminfo = "MemTotal:        8388608 kB\nMemFree:  1 kB\nMemAvailable:    2097152 kB\n"
	for name, test := range map[string]struct {
		used, more int64
		fits       bool
	}{
		"the first machine":                            {1 << 30, 1 << 30, true},
		"a machine with more memory than is available": {3 << 30, 3 << 30, false},
		"a machine that reaches the limit":             {6 << 30, 1 << 30, true},
		"a machine beyond the limit":                   {7 << 30, 1 << 30, false},
	} {
		if err := fits(meminfo, test.used, test.more); errors.Is(err, ErrNoMemory) == test.fits {
			t.Errorf("%s: %v", name, err)
		}
	}
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
	return looptest.Got(os.ReadFile(p.Files.DiskPath(d.DiskID)))(t)[0]
}

func TestDiskFaultsSurviveADetachUntilTheDiskIsHealed(t *testing.T) {
	p := newPlaneIn(t, Config{Dir: t.TempDir(), FlakyDisks: true})
	a, b := newGuest(t, p), newGuest(t, p)
	d := plugDisk(t, p, a, "db")
	looptest.Must(t, writeTo(nodeOf(t, p, a), 'a'))
	looptest.Must(t, p.Flaky.Fail(d.DiskID, flakydisk.Fault{On: flakydisk.OnFlush}))
	if err := writeTo(nodeOf(t, p, a), 'b'); !errors.Is(err, unix.EIO) {
		t.Errorf("a flush = %v, want EIO", err)
	}
	looptest.Must(t, p.Unplug(a, d.DiskID))
	d.InstanceID = b
	looptest.Must(t, p.Plug(d, Fault{}))
	if err := writeTo(nodeOf(t, p, b), 'c'); !errors.Is(err, unix.EIO) {
		t.Errorf("a flush in the next guest = %v, want EIO", err)
	}
	faults, err := p.Flaky.Faults(d.DiskID)
	if err != nil || len(faults) != 1 || faults[0].Fired < 2 {
		t.Errorf("the faults are %+v, %v, want one that has fired in both guests", faults, err)
	}
	looptest.Must(t, p.Flaky.Heal(d.DiskID))
	looptest.Must(t, writeTo(nodeOf(t, p, b), 'd'))
	if got := first(t, p, d); got != 'd' {
		t.Errorf("the disk begins with %q, want d", got)
	}
}

func TestUnplugMakesHangingWritesFail(t *testing.T) {
	p := newPlaneIn(t, Config{Dir: t.TempDir(), FlakyDisks: true})
	guest := newGuest(t, p)
	d := plugDisk(t, p, guest, "db")
	looptest.Must(t, p.Flaky.Fail(d.DiskID, flakydisk.Fault{On: flakydisk.OnWrite, Hang: true}))
	written := make(chan error, 1)
	go func() { written <- writeTo(nodeOf(t, p, guest), 'h') }()
	looptest.Await(t, "the write hangs", func() bool {
		faults, err := p.Flaky.Faults(d.DiskID)
		return err == nil && faults[0].Fired > 0
	})
	looptest.Must(t, p.Unplug(guest, d.DiskID))
	if err := <-written; err == nil {
		t.Error("a write that hung until the disk was taken away succeeded")
	}
	if got := first(t, p, d); got != 0 {
		t.Errorf("the disk begins with %q, want nothing", got)
	}
}

func TestReconcileReplacesFUSEDevicesOfAKilledSimulator(t *testing.T) {
	dir := t.TempDir()
	p := openPlane(t, Config{Dir: dir, FlakyDisks: true})
	guest := newGuest(t, p)
	d := plugDisk(t, p, guest, "db")
	looptest.Must(t, writeTo(nodeOf(t, p, guest), 'k'))
	// End the FUSE connection, as the kernel does when the process ends.
	looptest.Must(t, unix.Unmount(p.Flaky.dir, unix.MNT_FORCE|unix.MNT_DETACH))
	p.Stop()
	dead := devicesOf(t, p)
	if len(dead) != 1 || !dead[0].Orphaned {
		t.Fatalf("the devices are %+v, want one whose server is gone", dead)
	}

	// Racks with the same configuration have disks with the same IDs.
	same := newPlaneIn(t, Config{Dir: t.TempDir(), FlakyDisks: true})
	looptest.Must(t, same.CreateDisk(d.DiskID, d.SizeBytes))
	if theirs := devicesOf(t, same); len(theirs) != 0 {
		t.Errorf("another rack claims the devices %+v", theirs)
	}
	p = newPlaneIn(t, Config{Dir: dir, FlakyDisks: true})
	looptest.Must(t, p.AddGuest(Firmware{InstanceID: guest, Name: "web-1"}))
	looptest.Must(t, p.Reconcile(t.Context(), []Device{d}, IDs{"disks": {d.DiskID}}))
	if devices := devicesOf(t, p); len(devices) != 1 || devices[0].Sequence == dead[0].Sequence {
		t.Errorf("the devices are %+v, want a new one alone", devices)
	}
	if got := first(t, p, d); got != 'k' {
		t.Errorf("the disk begins with %q, want k", got)
	}
	looptest.Must(t, writeTo(nodeOf(t, p, guest), 'l'))
}

// killed() opens the directory of p again, as after a kill, with the given disks attached.
func killed(t *testing.T, p *Plane, attached ...Device) *Plane {
	t.Helper()
	p.cancel()
	p.working.Wait()
	after, ids := looptest.Got(Open(Config{Dir: p.Dir, Log: p.Log}))(t), IDs{}
	t.Cleanup(func() { _ = after.Close() })
	for _, d := range attached {
		looptest.Must(t, after.AddGuest(Firmware{InstanceID: d.InstanceID, Name: "web-1"}))
		ids["disks"] = append(ids["disks"], d.DiskID)
	}
	looptest.Must(t, after.Reconcile(t.Context(), attached, ids))
	return after
}

func TestReconcileAdoptsADeviceWhoseBackingPathNoLongerExists(t *testing.T) {
	before := newPlane(t)
	spec := newDisk(t, before, newGuest(t, before), "elsewhere")
	// Attach the file by a path that does not exist afterwards, as if a container had been removed.
	elsewhere := t.TempDir()
	looptest.Command(t, "mount", "--bind", before.Dir, elsewhere)
	loop := looptest.Got(loopdev.Attach(t.Context(), loopdev.Config{
		Path:   filepath.Join(elsewhere, "disks", spec.DiskID+".img"),
		Serial: spec.loopSerial(), BlockSize: spec.BlockSize, SizeLimit: spec.SizeBytes,
	}))(t)
	looptest.Command(t, "umount", "--lazy", elsewhere)

	p := killed(t, before, spec)
	if got := *p.guests.disk(spec.DiskID).loop; got.Sequence != loop.Sequence {
		t.Errorf("the device is %+v, want the one that was there: %+v", got, loop)
	}
	if n := len(devicesOf(t, p)); n != 1 {
		t.Errorf("there are %d devices, want the one from before", n)
	}
}

func TestReconcileDoesNotReleaseADeviceOfAnotherRack(t *testing.T) {
	for _, name := range []string{"in use", "whose file was removed", "on another filesystem"} {
		t.Run(name, func(t *testing.T) {
			theirs := newPlane(t)
			spec := plugDisk(t, theirs, newGuest(t, theirs), "theirs")
			// Give both racks the same path, as in two containers: mount another directory over theirs.Dir.
			kept := t.TempDir()
			looptest.Command(t, "mount", "--bind", theirs.Dir, kept)
			if name == "on another filesystem" {
				looptest.Command(t, "mount", "-t", "tmpfs", "ours", theirs.Dir)
			} else {
				looptest.Command(t, "mount", "--bind", t.TempDir(), theirs.Dir)
			}
			if name == "whose file was removed" {
				looptest.Must(t, os.Remove(filepath.Join(kept, "disks", spec.DiskID+".img")))
			}
			p := looptest.Got(Open(Config{Dir: theirs.Dir, Log: theirs.Log}))(t)
			looptest.Must(t, p.Reconcile(t.Context(), nil, nil))
			looptest.Must(t, p.Close())
			looptest.Command(t, "umount", theirs.Dir)
			looptest.Command(t, "umount", kept)
			if got := devicesOf(t, theirs); len(got) != 1 || got[0].Releasing {
				t.Errorf("devices = %+v, want the one of the other rack", got)
			}
		})
	}
}

func TestReconcileReplacesDevicesThatDifferFromTheirDisks(t *testing.T) {
	for name, change := range map[string]func(*Device){
		"another size":       func(s *Device) { s.SizeBytes /= 2 },
		"another block size": func(s *Device) { s.BlockSize = 4096 },
		"another serial":     func(s *Device) { s.DiskName = "renamed" },
		"read-only":          func(s *Device) { s.ReadOnly = true },
	} {
		t.Run(name, func(t *testing.T) {
			before := newPlane(t)
			spec := plugDisk(t, before, newGuest(t, before), "changed")
			change(&spec)
			p := killed(t, before, spec)
			devices := devicesOf(t, p)
			if len(devices) != 1 || !p.carries(devices[0], spec) {
				t.Errorf("devices = %+v, want one as in %+v", devices, spec)
			}
			nodeOf(t, p, spec.InstanceID)
		})
	}
}

// A device that is being released disappears at its last close, so no guest may get it.
func TestReconcileDoesNotAdoptADeviceThatIsBeingReleased(t *testing.T) {
	before := newPlane(t)
	spec := plugDisk(t, before, newGuest(t, before), "leaving")
	holder := looptest.Got(os.Open(nodeOf(t, before, spec.InstanceID)))(t)
	defer holder.Close()
	old := *before.guests.disk(spec.DiskID).loop
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := old.Detach(ended); err == nil {
		t.Fatal("the held device was released")
	}
	p := killed(t, before, spec)
	if now := p.guests.disk(spec.DiskID).loop; now.Sequence == old.Sequence {
		t.Error("the device that is being released was adopted")
	}
	holder.Close()
	looptest.Await(t, "the old device goes", func() bool { return len(devicesOf(t, p)) == 1 })
}

func TestADeviceWithADuplicateSerialStaysHiddenAfterReconcile(t *testing.T) {
	before := newPlane(t)
	id := newGuest(t, before)
	first := plugDisk(t, before, id, "pvc-6fa1d3ac-1234-4aaa")
	second := plugDisk(t, before, id, "pvc-6fa1d3ac-1234-4abb")
	visible := nodeOf(t, before, id)
	p := killed(t, before, second, first)
	if got := nodeOf(t, p, id); got != visible || p.guests.disk(second.DiskID).node != "" {
		t.Errorf("the guest sees %s, saw %s", got, visible)
	}
	looptest.Must(t, p.Unplug(id, first.DiskID))
	if names := seen(t, p, id); len(names) != 0 {
		t.Errorf("after the first went, the guest sees %v, want none", names)
	}
	// Plug the disk in again, as a restart of the guest does.
	looptest.Must(t, p.Unplug(id, second.DiskID))
	looptest.Must(t, p.Plug(second, Fault{}))
	nodeOf(t, p, id)
}

func TestReconcileRemovesOrphanedFilesAndKeepsForeignFiles(t *testing.T) {
	p := newPlane(t)
	kept, snapshot, guest := newID(), newID(), newGuest(t, p)
	looptest.Must(t, p.CreateDisk(kept, testDiskSize))
	looptest.Must(t, p.SnapshotDisk(t.Context(), snapshot, kept))
	looptest.Must(t, p.ImportImage(t.Context(), kept, "", testDiskSize))
	gone := newID()
	f := p.Files
	orphans := []string{
		f.DiskPath(gone), f.DiskPath(kept) + unfinished, f.SnapshotPath(gone),
		f.SnapshotPath(snapshot) + unfinished, f.ImagePath(gone), f.ImagePath(kept) + unfinished,
		p.GuestDir(gone), filepath.Join(p.view(guest).blockDir(), "nvme3n1"),
		p.view(guest).nodePath("nvme4n1"),
	}
	// These files stay, because either no record ever had their IDs, or no rack uses such names.
	others := []string{f.DiskPath(newID()), f.SnapshotPath(newID()) + unfinished, p.GuestDir(newID()),
		p.view(guest).nodePath("console"), f.DiskPath(gone) + ".bak", f.DiskPath(kept) + "~",
		filepath.Join(p.Dir, "images", "thesis.img"), filepath.Join(p.Dir, "fuse-notes")}
	for _, path := range append(others, orphans...) {
		looptest.Must(t, os.WriteFile(path, nil, 0o600))
	}
	looptest.Must(t, p.Flaky.open(p.Dir, false))
	looptest.Must(t, p.Reconcile(t.Context(), nil, IDs{"disks": {kept},
		"snapshots": {snapshot}, "images": {kept}, Left: {gone, "", "../disks"}}))
	for _, path := range orphans {
		if exists(path) {
			t.Errorf("%s is left", path)
		}
	}
	for _, path := range append(others,
		f.DiskPath(kept), f.SnapshotPath(snapshot), f.ImagePath(kept), p.GuestDir(guest)) {
		if !exists(path) {
			t.Errorf("%s is gone", path)
		}
	}
}

func TestForeignMountsInTheDataPlanesDirectoryAreKept(t *testing.T) {
	p := newPlane(t)
	theirs := filepath.Join(t.TempDir(), "theirs")
	looptest.Must(t, os.WriteFile(theirs, []byte("theirs"), 0o600))
	guest, orphan := newGuest(t, p), newID()
	reconcile := func() error { return p.Reconcile(t.Context(), nil, IDs{Left: {orphan}}) }
	for _, test := range []struct {
		at     string
		remove func() error
	}{
		{p.view(guest).nodePath("nvme7n1"), reconcile}, // in the view of a guest
		{filepath.Join(p.GuestDir(guest), "work"), func() error { return p.RemoveGuest(guest) }},
		{filepath.Join(p.GuestDir(orphan), "work"), reconcile},
		{p.tampering.path("work"), func() error { return p.Tamper(Tamper{}) }},
		{filepath.Join(p.Dir, "fuse-7"), func() error { return p.Flaky.open(p.Dir, false) }},
	} {
		at, remove := test.at, test.remove
		looptest.Must(t, os.MkdirAll(at, 0o755))
		looptest.Command(t, "mount", "--bind", filepath.Dir(theirs), at)
		err := remove()
		looptest.Command(t, "umount", at)
		if text, _ := os.ReadFile(theirs); err == nil || string(text) != "theirs" {
			t.Errorf("%s: %v, and the foreign file has %q", at, err, text)
		}
		looptest.Must(t, remove())
		if exists(at) {
			t.Errorf("%s is left", at)
		}
	}
	disk := newID()
	looptest.Must(t, os.Symlink(theirs, p.Files.DiskPath(disk)+unfinished))
	looptest.Must(t, p.CreateDisk(disk, testDiskSize))
	if text, err := os.ReadFile(theirs); string(text) != "theirs" {
		t.Errorf("the target of a link became a disk: it has %d bytes (%v)", len(text), err)
	}
}

func TestReconcileContinuesAfterADiskWithoutAFile(t *testing.T) {
	p := newPlane(t)
	id := newGuest(t, p)
	lost, whole := newDisk(t, p, id, "lost"), newDisk(t, p, id, "whole")
	looptest.Must(t, os.Remove(p.Files.DiskPath(lost.DiskID)))
	looptest.Must(t, p.Reconcile(t.Context(), []Device{lost, whole},
		IDs{"disks": {lost.DiskID, whole.DiskID}}))
	nodeOf(t, p, id)
}

func TestNextNonZeroFindsWrittenBlocks(t *testing.T) {
	f := looptest.Got(os.Create(filepath.Join(t.TempDir(), "disk")))(t)
	defer f.Close()
	const block = 64 << 10
	for _, at := range []int64{block, 2*block + 5, 9*block - 1} {
		looptest.Got(f.WriteAt([]byte{1}, at))(t)
	}
	for _, c := range []struct {
		size int64
		want [][2]int64
	}{{10*block + 7, [][2]int64{{block, 2 * block}, {2 * block, 3 * block}, {8 * block, 9 * block}}},
		{9 * block, [][2]int64{{block, 2 * block}, {2 * block, 3 * block}, {8 * block, 9 * block}}},
		{2*block + 10, [][2]int64{{block, 2 * block}, {2 * block, 2*block + 10}}}, {block, nil},
		{0, nil}} {
		looptest.Must(t, f.Truncate(c.size))
		var got [][2]int64
		for at := int64(0); ; at = got[len(got)-1][1] {
			start, end, err := nextNonZero(f, at)
			if errors.Is(err, errNoData) {
				break
			}
			looptest.Must(t, err)
			got = append(got, [2]int64{start, end})
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("in a file of %d bytes the data are %v, want %v", c.size, got, c.want)
		}
	}
}

func TestCloneDiskCopiesBytesAndPreservesHoles(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p, id := newPlaneOn(t, fsType), newID()
			source := filepath.Join(t.TempDir(), "image.raw") // the source is on another filesystem
			f := looptest.Got(os.Create(source))(t)
			defer f.Close()
			want := bytes.Repeat([]byte("oxide"), 50_000)
			for _, at := range []int64{0, 40 << 20, 200<<20 - int64(len(want))} {
				looptest.Got(f.WriteAt(want, at))(t)
			}
			const size = 200 << 20
			looptest.Must(t, p.ImportImage(t.Context(), id, source, size))
			looptest.Must(t, p.CloneDisk(t.Context(), id, p.Files.ImagePath(id), 2*size))
			clone := looptest.Got(os.ReadFile(p.Files.DiskPath(id)))(t)
			original := looptest.Got(os.ReadFile(source))(t)
			if !bytes.Equal(clone[:size], original) || len(clone) != 2*size {
				t.Errorf("the clone of %d bytes differs from its source", len(clone))
			}
			if n := looptest.Got(p.Files.Allocated(id))(t); n > 4<<20 {
				t.Errorf("the clone takes %d bytes: its holes were filled", n)
			}
		})
	}
}

func TestPipesAsImagesAndImagesLargerThanTheDiskAreRefused(t *testing.T) {
	p, id := newPlane(t), newID()
	looptest.Must(t, p.ImportImage(t.Context(), id, "", 1<<20))
	if err := p.CloneDisk(t.Context(), id, p.Files.ImagePath(id), 1<<19); err == nil {
		t.Error("a clone smaller than its source was made")
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	looptest.Must(t, unix.Mkfifo(pipe, 0o600))
	if err := p.ImportImage(t.Context(), newID(), pipe, 1<<20); err == nil {
		t.Error("an image was made of a pipe")
	}
}

// A writer writes 1, 2, 3 and so on durably, each number to the first block of a disk and then to
// the last block. In a snapshot the first block may be ahead of the last block by one. No block may
// be behind the number that was in both blocks before the snapshot.
func TestASnapshotOfADiskInUseIsCrashConsistent(t *testing.T) {
	places := []int64{0, testDiskSize - 4096}
	for _, host := range []string{"xfs", "btrfs", "ext4"} {
		t.Run(host, func(t *testing.T) {
			p := newPlaneOn(t, host)
			spec := plugDisk(t, p, newGuest(t, p), "busy")
			disk := looptest.Got(os.OpenFile(nodeOf(t, p, spec.InstanceID), os.O_WRONLY|unix.O_DSYNC, 0))(t)
			defer disk.Close()
			// These bytes make the copy last longer, so that writes happen meanwhile.
			looptest.Got(disk.WriteAt(bytes.Repeat([]byte("x"), testDiskSize/2), 4096))(t)
			ctx, cancel := context.WithCancel(t.Context())
			var synced atomic.Uint64
			var writer sync.WaitGroup
			writer.Go(func() {
				for n := uint64(1); ctx.Err() == nil; n++ {
					if host == "ext4" && n%20 == 0 {
						_ = pause(ctx, time.Second) // without reflinks, the copy needs a time without writes
					}
					for _, at := range places {
						if _, err := disk.WriteAt(binary.LittleEndian.AppendUint64(nil, n), at); err != nil {
							t.Error(err)
							return
						}
					}
					synced.Store(n)
				}
			})
			defer writer.Wait()
			defer cancel()
			for range 3 {
				snapshot, before := newID(), synced.Load()
				looptest.Must(t, p.SnapshotDisk(t.Context(), snapshot, spec.DiskID))
				content := looptest.Got(os.ReadFile(p.Files.SnapshotPath(snapshot)))(t)
				first := binary.LittleEndian.Uint64(content[places[0]:])
				last := binary.LittleEndian.Uint64(content[places[1]:])
				if first != last && first != last+1 || last < before {
					t.Errorf("the snapshot holds %d and %d, after %d was synced: no point in time", first,
						last, before)
				}
			}
		})
	}
}

func TestASnapshotFailsIfTheKernelDoesNotCountWrites(t *testing.T) {
	p := newPlaneOn(t, "ext4")
	spec, snapshot := plugDisk(t, p, newGuest(t, p), "uncounted"), newID()
	loop := p.guests.disk(spec.DiskID).loop
	counters := fmt.Sprintf("/sys/block/loop%d/queue/iostats", loop.Number)
	looptest.Must(t, os.WriteFile(counters, []byte("0"), 0))
	// Make the kernel count writes again, because later users of the device need the counters.
	defer func() { looptest.Must(t, os.WriteFile(counters, []byte("1"), 0)) }()
	err := p.SnapshotDisk(t.Context(), snapshot, spec.DiskID)
	if !errors.Is(err, ErrWrittenMeanwhile) || exists(p.Files.SnapshotPath(snapshot)) {
		t.Errorf("snapshotDisk = %v, want ErrWrittenMeanwhile and no snapshot", err)
	}
}
