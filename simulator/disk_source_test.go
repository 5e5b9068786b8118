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

func TestA59ADiskCannotBeMadeFromASnapshotThatIsNotCutYet(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 3 << 30})
	r.disk("d")
	must[adminapi.Switches](t)(r.rack.ChangeSwitches(func(s *adminapi.Switches) error {
		s.SnapshotHold = hour
		return nil
	}))
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		_, _ = r.doSnapshot("s", "d")
	}()
	t.Cleanup(func() {
		_ = r.Close() // cuts the hold short
		<-taken
	})
	simtest.Eventually(t, "the snapshot to be creating",
		func() bool { return r.snapshotState("s") == "creating" })
	sn := must[*oxide.Snapshot](t)(r.SnapshotView(t.Context(),
		oxide.SnapshotViewParams{Snapshot: "s", Project: "default"}))
	source := oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: sn.Id}}
	create := func(name string, gib uint64) error {
		_, err := r.DiskCreate(t.Context(), r.from(source, name, gib))
		return err
	}
	internal := refusedAs(500, "Internal", "Internal Server Error")
	internal.check(t, create("new", 1))
	if r.exists("new") {
		t.Error("a disk was left behind")
	}
	internal.check(t, create("new", 1)) // the quota is free again
	refusedAs(400, "ObjectAlreadyExists", `already exists: disk "d"`).check(t, create("d", 1))
	capacity := refusedAs(507, "InsufficientCapacity", "%s",
		"Insufficient capacity: Storage Limit Exceeded: Not enough storage to complete request. "+
			"Either remove unneeded disks and snapshots to free up resources or contact the rack "+
			"operator to request a capacity increase.")
	capacity.check(t, create("new", 2))
}

func TestARestartBringsDisksToTheirSize(t *testing.T) {
	r := newRack(t, engine.Config{})
	d := r.disk("d")
	r.fault(adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{SizeBytes: 2 << 30}})
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	simtest.Eventually(t, "the device", func() bool { return len(r.guestDevices("a")) == 1 })
	r.force("d", store.DiskState{State: store.StateDetached}) // as a detach that got no further
	next := r.again()
	if got := diskSize(t, next, d.Id); got != 1<<30 {
		t.Errorf("the disk has %d bytes, want 1 GiB", got)
	}
}

func TestA60AnInstanceThatDoesNotComeBackFails(t *testing.T) {
	r := newRack(t, engine.Config{InstanceDelay: time.Millisecond})
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

func TestA15WhoMayNotCreateAnInstanceIsNotToldWhatIsWrongWithIt(t *testing.T) {
	for role, want := range map[string]refused{
		adminapi.RoleViewer: refusedAs(403, "Forbidden", "Forbidden"),
		adminapi.RoleNone:   gone("project", "default"),
	} {
		r := newRack(t, engine.Config{Role: role})
		body := r.instanceBody("new")
		body.Ncpus, body.Memory = 0, 1
		_, err := r.doCreate(body)
		want.check(t, err)
	}
}

func diskSize(t *testing.T, r *rack, id string) int64 {
	t.Helper()
	st, err := os.Stat(r.rack.Plane().DiskPath(id))
	simtest.NoError(t, err)
	return st.Size()
}
