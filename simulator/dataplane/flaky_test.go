//go:build linux

package dataplane

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

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
