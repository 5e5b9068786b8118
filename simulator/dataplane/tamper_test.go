//go:build linux

package dataplane

import (
	"os"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func TestATamperIsFoundByItsName(t *testing.T) {
	for _, want := range Tampers() {
		got, err := FindTamper(want.Name)
		if err != nil || got.Name != want.Name || got.Says == "" {
			t.Errorf("FindTamper(%q) = %q, %q, %v", want.Name, got.Name, got.Says, err)
		}
	}
	_, err := FindTamper("none")
	if err == nil || !strings.Contains(err.Error(), "use lost-write, ") {
		t.Errorf("FindTamper of an unknown one = %v", err)
	}
}

func TestADeviceThatWasLeftGoesWithItsTamper(t *testing.T) {
	p := newPlane(t)
	spec := newDisk(t, p, newGuest(t, p), "left")
	left, err := FindTamper("device-left")
	simtest.NoError(t, err)
	simtest.NoError(t, p.Tamper(left))
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

func TestATamperThatIsSwitchedOffLeavesNoFiles(t *testing.T) {
	p := newPlane(t)
	spec := newDisk(t, p, newGuest(t, p), "kept")
	stale, err := FindTamper("stale-read")
	simtest.NoError(t, err)
	simtest.NoError(t, p.Tamper(stale))
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
