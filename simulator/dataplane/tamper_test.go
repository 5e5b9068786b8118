//go:build linux

package dataplane

import (
	"os"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// tamper returns the tamper with a name.
func tamper(t *testing.T, name string) Tamper {
	t.Helper()
	all := Tampers()
	i := slices.IndexFunc(all, func(t Tamper) bool { return t.Name == name })
	if i < 0 {
		t.Fatalf("there is no tamper %s", name)
	}
	return all[i]
}

func TestADeviceThatATamperLeftIsRemovedWithTheTamper(t *testing.T) {
	p := newPlane(t)
	spec := newDisk(t, p, newGuest(t, p), "left")
	simtest.NoError(t, p.Tamper(tamper(t, "device-left")))
	simtest.NoError(t, p.Plug(spec, Fault{}))
	simtest.NoError(t, p.Unplug(spec.InstanceID, spec.DiskID))
	if got := seen(t, p, spec.InstanceID); len(got) != 1 {
		t.Errorf("the guest sees %q, not the device that is left", got)
	}
	simtest.NoError(t, p.Tamper(Tamper{}))
	if got := seen(t, p, spec.InstanceID); len(got) != 0 {
		t.Errorf("the guest still sees %q", got)
	}
	if devices := devicesOf(t, p); len(devices) != 0 {
		t.Errorf("the loop devices %v are left", devices)
	}
}

func TestAnEndedTamperLeavesNoFiles(t *testing.T) {
	p := newPlane(t)
	spec := newDisk(t, p, newGuest(t, p), "kept")
	simtest.NoError(t, p.Tamper(tamper(t, "stale-read")))
	simtest.NoError(t, p.Plug(spec, Fault{}))
	simtest.NoError(t, p.Unplug(spec.InstanceID, spec.DiskID))
	if _, err := os.Stat(p.tamperPath(spec.DiskID)); err != nil {
		t.Error(err)
	}
	simtest.NoError(t, p.Tamper(Tamper{}))
	if exists(p.tamperPath("")) {
		t.Error("the tamper's directory is left")
	}
}

func TestATamperShowsADeviceToOtherGuestsUntilItsDiskIsUnplugged(t *testing.T) {
	p := newPlane(t)
	spec, other := newDisk(t, p, newGuest(t, p), "shown"), newGuest(t, p)
	simtest.NoError(t, p.Tamper(tamper(t, "device-elsewhere")))
	for range 2 {
		simtest.NoError(t, p.Plug(spec, Fault{}))
		if got := seen(t, p, other); len(got) != 1 {
			t.Errorf("the other guest sees %q, not the device", got)
		}
		simtest.NoError(t, p.Unplug(spec.InstanceID, spec.DiskID))
		if got := seen(t, p, other); len(got) != 0 {
			t.Errorf("the other guest still sees %q", got)
		}
	}
	simtest.NoError(t, p.Plug(spec, Fault{}))
	simtest.NoError(t, p.Tamper(Tamper{}))
	if got := seen(t, p, other); len(got) != 0 {
		t.Errorf("the other guest sees %q without the tamper", got)
	}
}
