//go:build linux

package dataplane

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// killed opens the directory of a data plane again that was not closed, as after a kill.
func killed(t *testing.T, p *Plane, guests ...string) *Plane {
	t.Helper()
	p.cancel()
	p.working.Wait()
	after, err := Open(Config{Dir: p.Dir, Log: p.Log})
	simtest.NoError(t, err)
	for _, id := range guests {
		simtest.NoError(t, after.AddGuest(Firmware{InstanceID: id, Name: "web-1"}))
	}
	t.Cleanup(func() { _ = after.Close() })
	return after
}

func TestReconcileAdoptsADeviceOfAnotherMountNamespace(t *testing.T) {
	before := newPlane(t)
	spec := newDisk(t, before, newGuest(t, before), "elsewhere")
	// The path of the file no longer exists, like the path of a file in a removed container.
	elsewhere := t.TempDir()
	simtest.Command(t, "mount", "--bind", before.Dir, elsewhere)
	loop, err := loopdev.Attach(t.Context(), loopdev.Config{
		Path:   filepath.Join(elsewhere, "disks", spec.DiskID+".img"),
		Serial: spec.loopSerial(), BlockSize: spec.BlockSize, SizeLimit: spec.SizeBytes,
	})
	simtest.NoError(t, err)
	simtest.Command(t, "umount", "--lazy", elsewhere)

	p := killed(t, before, spec.InstanceID)
	simtest.NoError(t, p.Reconcile(t.Context(), []Device{spec}, IDs{"disks": {spec.DiskID}}))
	if got := *p.guests.disk(spec.DiskID).loop; got.Sequence != loop.Sequence {
		t.Errorf("the device is %+v, want the one that was there: %+v", got, loop)
	}
	if n := len(devicesOf(t, p)); n != 1 {
		t.Errorf("there are %d devices, want the one from before", n)
	}
}

func TestReconcileKeepsTheDevicesOfAnotherRack(t *testing.T) {
	for _, name := range []string{"in use", "whose file was removed", "on another filesystem"} {
		t.Run(name, func(t *testing.T) {
			theirs := newPlane(t)
			spec := newDisk(t, theirs, newGuest(t, theirs), "theirs")
			simtest.NoError(t, theirs.Plug(spec, Fault{}))
			// In two containers both directories have the same path.
			kept := t.TempDir()
			simtest.Command(t, "mount", "--bind", theirs.Dir, kept)
			if name == "on another filesystem" {
				simtest.Command(t, "mount", "-t", "tmpfs", "ours", theirs.Dir)
			} else {
				simtest.Command(t, "mount", "--bind", t.TempDir(), theirs.Dir)
			}
			if name == "whose file was removed" {
				simtest.NoError(t, os.Remove(filepath.Join(kept, "disks", spec.DiskID+".img")))
			}
			p, err := Open(Config{Dir: theirs.Dir, Log: theirs.Log})
			simtest.NoError(t, err)
			simtest.NoError(t, p.Reconcile(t.Context(), nil, nil))
			simtest.NoError(t, p.Close())
			simtest.Command(t, "umount", theirs.Dir)
			simtest.Command(t, "umount", kept)
			if got := devicesOf(t, theirs); len(got) != 1 || got[0].Releasing {
				t.Errorf("devices = %+v, want the one of the other rack", got)
			}
		})
	}
}

func TestReconcileReplacesDevicesThatDoNotMatch(t *testing.T) {
	for name, change := range map[string]func(*Device){
		"another size":       func(s *Device) { s.SizeBytes /= 2 },
		"another block size": func(s *Device) { s.BlockSize = 4096 },
		"another serial":     func(s *Device) { s.DiskName = "renamed" },
		"read-only":          func(s *Device) { s.ReadOnly = true },
	} {
		t.Run(name, func(t *testing.T) {
			before := newPlane(t)
			id := newGuest(t, before)
			spec := newDisk(t, before, id, "changed")
			simtest.NoError(t, before.Plug(spec, Fault{}))
			change(&spec)
			p := killed(t, before, id)
			simtest.NoError(t, p.Reconcile(t.Context(), []Device{spec}, IDs{"disks": {spec.DiskID}}))
			devices := devicesOf(t, p)
			if len(devices) != 1 || !p.carries(devices[0], spec) {
				t.Errorf("devices = %+v, want one as in %+v", devices, spec)
			}
			nodeOf(t, p, id)
		})
	}
}

// Such a device would disappear after its adoption.
func TestReconcileDoesNotAdoptADeviceThatIsBeingReleased(t *testing.T) {
	before := newPlane(t)
	id := newGuest(t, before)
	spec := newDisk(t, before, id, "leaving")
	simtest.NoError(t, before.Plug(spec, Fault{}))
	holder, err := os.Open(nodeOf(t, before, id))
	simtest.NoError(t, err)
	defer holder.Close()
	old := *before.guests.disk(spec.DiskID).loop
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := old.Detach(ended); err == nil {
		t.Fatal("the held device was released")
	}
	p := killed(t, before, id)
	simtest.NoError(t, p.Reconcile(t.Context(), []Device{spec}, IDs{"disks": {spec.DiskID}}))
	if now := p.guests.disk(spec.DiskID).loop; now.Sequence == old.Sequence {
		t.Error("the device that is being released was adopted")
	}
	holder.Close()
	simtest.Eventually(t, "the old device goes", func() bool { return len(devicesOf(t, p)) == 1 })
}

func TestReconcileKeepsAHiddenDeviceHidden(t *testing.T) {
	before := newPlane(t)
	id := newGuest(t, before)
	first := newDisk(t, before, id, "pvc-6fa1d3ac-1234-4aaa")
	second := newDisk(t, before, id, "pvc-6fa1d3ac-1234-4abb")
	simtest.NoError(t, before.Plug(first, Fault{}))
	simtest.NoError(t, before.Plug(second, Fault{}))
	visible := nodeOf(t, before, id)
	p := killed(t, before, id)
	simtest.NoError(t, p.Reconcile(t.Context(), []Device{second, first},
		IDs{"disks": {first.DiskID, second.DiskID}}))
	if got := nodeOf(t, p, id); got != visible || p.guests.disk(second.DiskID).node != "" {
		t.Errorf("the guest sees %s, saw %s", got, visible)
	}
	simtest.NoError(t, p.Unplug(id, first.DiskID))
	if names := seen(t, p, id); len(names) != 0 {
		t.Errorf("after the first went, the guest sees %v, want none", names)
	}
	// A restart of the guest removes every device and adds it again.
	simtest.NoError(t, p.Unplug(id, second.DiskID))
	simtest.NoError(t, p.Plug(second, Fault{}))
	nodeOf(t, p, id)
}

func TestReconcileRemovesLeftovers(t *testing.T) {
	p := newPlane(t)
	kept, snapshot, guest := newID(), newID(), newGuest(t, p)
	simtest.NoError(t, p.CreateDisk(kept, testDiskSize))
	simtest.NoError(t, p.SnapshotDisk(t.Context(), snapshot, kept))
	simtest.NoError(t, p.ImportImage(t.Context(), kept, "", testDiskSize))
	gone := newID()
	orphans := []string{
		p.DiskPath(gone), p.DiskPath(kept) + unfinished, p.SnapshotPath(gone),
		p.SnapshotPath(snapshot) + unfinished, p.ImagePath(gone), p.ImagePath(kept) + unfinished,
		p.GuestDir(gone), filepath.Join(p.view(guest).blockDir(), "nvme3n1"),
		p.view(guest).nodePath("nvme4n1"),
	}
	// No record ever had these IDs, or the rack makes no such names.
	others := []string{p.DiskPath(newID()), p.SnapshotPath(newID()) + unfinished, p.GuestDir(newID()),
		p.view(guest).nodePath("console"), p.DiskPath(gone) + ".bak", p.DiskPath(kept) + "~",
		filepath.Join(p.Dir, "images", "thesis.img"), filepath.Join(p.Dir, "fuse-notes")}
	for _, path := range append(others, orphans...) {
		simtest.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	simtest.NoError(t, p.Flaky.open(p.Dir, false))
	simtest.NoError(t, p.Reconcile(t.Context(), nil, IDs{"disks": {kept},
		"snapshots": {snapshot}, "images": {kept}, Left: {gone, "", "../disks"}}))
	for _, path := range orphans {
		if exists(path) {
			t.Errorf("%s is left", path)
		}
	}
	for _, path := range append(others,
		p.DiskPath(kept), p.SnapshotPath(snapshot), p.ImagePath(kept), p.GuestDir(guest),
	) {
		if !exists(path) {
			t.Errorf("%s is gone", path)
		}
	}
}

// TestForeignMountsInTheDirectoryStay mounts a foreign directory wherever a plane removes one.
func TestForeignMountsInTheDirectoryStay(t *testing.T) {
	p := newPlane(t)
	theirs := filepath.Join(t.TempDir(), "theirs")
	simtest.NoError(t, os.WriteFile(theirs, []byte("theirs"), 0o600))
	guest, orphan := newGuest(t, p), newID()
	reconcile := func() error { return p.Reconcile(t.Context(), nil, IDs{Left: {orphan}}) }
	for _, test := range []struct {
		at     string
		remove func() error
	}{
		{p.view(guest).nodePath("nvme7n1"), reconcile}, // while the guest is there
		{filepath.Join(p.GuestDir(guest), "work"), func() error { return p.RemoveGuest(guest) }},
		{filepath.Join(p.GuestDir(orphan), "work"), reconcile},
		{p.tampering.path("work"), func() error { return p.Tamper(Tamper{}) }},
		{filepath.Join(p.Dir, "fuse-7"), func() error { return p.Flaky.open(p.Dir, false) }},
	} {
		at, remove := test.at, test.remove
		simtest.NoError(t, os.MkdirAll(at, 0o755))
		simtest.Command(t, "mount", "--bind", filepath.Dir(theirs), at)
		err := remove()
		simtest.Command(t, "umount", at)
		if text, _ := os.ReadFile(theirs); err == nil || string(text) != "theirs" {
			t.Errorf("%s: %v, and the foreign file has %q", at, err, text)
		}
		simtest.NoError(t, remove())
		if exists(at) {
			t.Errorf("%s is left", at)
		}
	}
	disk := newID()
	simtest.NoError(t, os.Symlink(theirs, p.DiskPath(disk)+unfinished))
	simtest.NoError(t, p.CreateDisk(disk, testDiskSize))
	if text, err := os.ReadFile(theirs); string(text) != "theirs" {
		t.Errorf("the target of a link became a disk: it has %d bytes (%v)", len(text), err)
	}
}

func TestADiskWithoutBytesDoesNotStopTheOthers(t *testing.T) {
	p := newPlane(t)
	id := newGuest(t, p)
	lost, whole := newDisk(t, p, id, "lost"), newDisk(t, p, id, "whole")
	simtest.NoError(t, os.Remove(p.DiskPath(lost.DiskID)))
	simtest.NoError(t, p.Reconcile(t.Context(), []Device{lost, whole},
		IDs{"disks": {lost.DiskID, whole.DiskID}}))
	nodeOf(t, p, id)
}
