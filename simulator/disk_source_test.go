package simulator

import (
	"os"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func TestARestartRestoresTheSizesOfDisks(t *testing.T) {
	r := serveRack(t, engine.Config{})
	d := r.disk("d")
	r.fault(adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{SizeBytes: 2 << 30}})
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	simtest.Eventually(t, "the device", func() bool { return len(r.guestDevices("a")) == 1 })
	r.force("d", store.DiskState{State: store.StateDetached}) // a detach that ended halfway
	next := r.again()
	if got := diskSize(t, next, d.Id); got != 1<<30 {
		t.Errorf("the disk has %d bytes, want 1 GiB", got)
	}
}

func TestA60AnInstanceWhoseRebootFailsIsFailed(t *testing.T) {
	r := serveRack(t, engine.Config{InstanceDelay: time.Millisecond})
	lost := r.disk("lost")
	r.disk("data")
	for _, name := range []string{"data", "lost"} {
		must[*oxide.Disk](t)(r.doAttach("a", name))
	}
	simtest.Eventually(t, "both devices", func() bool { return len(r.guestDevices("a")) == 2 })
	path := r.rack.Plane().DiskPath(lost.Id)
	aside := path + ".aside"
	simtest.NoError(t, os.Rename(path, aside))
	i := must[*oxide.Instance](t)(r.change("reboot", "a"))
	if i.RunState != "rebooting" {
		t.Errorf("the answer says %s", i.RunState)
	}
	r.awaitState("a", "failed")
	if names, devices := r.guestDevices("a"), r.ownDevices(); len(names)+len(devices) != 0 {
		t.Errorf("the guest sees %v of %v", names, devices)
	}
	if got := r.state("data") + " " + r.state("lost"); got != "attached attached" {
		t.Errorf("the disks are %s", got)
	}
	simtest.NoError(t, os.Rename(aside, path))
	must[*oxide.Instance](t)(r.change("start", "a"))
	r.awaitState("a", "running")
	simtest.Eventually(t, "both devices again", func() bool { return len(r.guestDevices("a")) == 2 })
}

func diskSize(t *testing.T, r *rackServer, id string) int64 {
	t.Helper()
	st, err := os.Stat(r.rack.Plane().DiskPath(id))
	simtest.NoError(t, err)
	return st.Size()
}
