package simulator

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func TestSituationsOfAttach(t *testing.T) {
	notStopped := refusedAs(400, "InvalidRequest",
		"cannot attach disk: instance is not fully stopped")
	elsewhere := refusedAs(400, "InvalidRequest",
		`cannot attach disk "d": disk is attached to another instance`)
	for _, test := range []struct {
		name     string
		cold     bool
		instance string
		disk     string // the state it is in; "here", "there" are attached to a, b
		run      string // the state the instance is in, when not its own
		want     refused
	}{
		{"A33 already here, hot-plug", false, "a", "here", "", refused{}},
		{"A33 already here, while it runs", true, "a", "here", "", refused{}},
		{"A34 attached elsewhere", false, "a", "there", "", elsewhere},
		{"A34 attached elsewhere, cold", true, "a", "there", "", elsewhere},
		{"A17 running, hot-plug", false, "a", store.StateDetached, "", refused{}},
		{"A17 running", true, "a", store.StateDetached, "", notStopped},
		{"A17 starting", true, "idle", store.StateDetached, store.RunStarting, notStopped},
		{"A17 stopping", true, "idle", store.StateDetached, store.RunStopping, notStopped},
		{"A17 rebooting", true, "idle", store.StateDetached, store.RunRebooting, notStopped},
		{"A17 stopped", true, "idle", store.StateDetached, "", refused{}},
		{"A34 failed", false, "idle", store.StateDetached, store.RunFailed,
			refusedAs(400, "InvalidRequest", "cannot attach disk to instance in failed state")},
		{"A34 maintenance", false, "a", store.StateMaintenance, "",
			refusedAs(400, "InvalidRequest", `cannot attach disk "d": invalid state maintenance`)},
		{"A34 faulted", false, "a", store.StateFaulted, "",
			refusedAs(400, "InvalidRequest", `cannot attach disk "d": invalid state faulted`)},
		{"A34 import_ready", true, "a", store.StateImportReady, "",
			refusedAs(400, "InvalidRequest", `cannot attach disk "d": invalid state import_ready`)},
		{"A30 no such instance, although no such disk", false, "nobody", "none", "",
			gone("instance", "nobody")},
		{"A30 no such disk", false, "a", "none", "", gone("disk", "d")},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := situation(t, test.cold, test.disk, test.instance, test.run)
			d, err := r.doAttach(test.instance, "d")
			test.want.check(t, err)
			if test.want == (refused{}) {
				in, _ := d.State.AsAttached()
				if in == nil || in.Instance != r.instance(test.instance).Id {
					t.Errorf("got state %+v", d.State)
				}
			}
		})
	}
}

func TestSituationsOfDetach(t *testing.T) {
	const notStopped = "cannot detach disk: instance is not fully stopped"
	for _, test := range []struct {
		name     string
		cold     bool
		instance string
		disk     string
		run      string
		want     refused
	}{
		{"A36 already detached", false, "a", store.StateDetached, "", refused{}},
		{"A36 already detached, while it runs", true, "b", store.StateDetached, "", refused{}},
		{"A37 attached elsewhere", false, "a", "there", "", refusedAs(400, "InvalidRequest",
			`cannot detach disk "d": disk is attached to another instance`)},
		{"A17 running, hot-plug", false, "a", "here", "", refused{}},
		{"A17 running", true, "a", "here", "", refusedAs(400, "InvalidRequest", notStopped)},
		{"A37 failed", true, "idle", "idle", store.RunFailed, refused{}},
		{"A37 stopped", true, "idle", "idle", "", refused{}},
		{"A37 destroyed", true, "idle", "idle", "destroyed", refusedAs(400, "InvalidRequest",
			"cannot detach disk from instance in destroyed state")},
		{"A37 other state", false, "a", store.StateFaulted, "", refusedAs(400, "InvalidRequest",
			`cannot detach disk "d": invalid state faulted`)},
		{"A30 no such instance", false, "nobody", "none", "", gone("instance", "nobody")},
		{"A30 no such disk", false, "a", "none", "", gone("disk", "d")},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := situation(t, test.cold, test.disk, test.instance, test.run)
			d, err := r.doDetach(test.instance, "d")
			test.want.check(t, err)
			if test.want == (refused{}) && d.State.State() != "detached" {
				t.Errorf("got state %q", d.State.State())
			}
		})
	}
}

// situation makes a rack with disk d in a state and an instance in one.
func situation(t *testing.T, cold bool, disk, instance, run string) *rack {
	t.Helper()
	r := newRack(t, engine.Config{ColdPlug: cold})
	if disk != "none" {
		r.disk("d")
	}
	switch disk {
	case "none", store.StateDetached:
	case "here", "there", "idle":
		owner := map[string]string{"here": "a", "there": "b", "idle": "idle"}[disk]
		r.force("d", store.DiskState{State: store.StateAttached, Instance: r.instance(owner).Id})
	default:
		r.force("d", store.DiskState{State: disk})
	}
	if run != "" {
		r.forceRun(instance, run)
	}
	return r
}

func TestA30DiskAndInstanceBelongToOneProject(t *testing.T) {
	r := newRack(t, engine.Config{Projects: []string{"default", "other"}})
	p := r.blank("d", 1)
	p.Project = "other"
	d := must[*oxide.Disk](t)(r.DiskCreate(t.Context(), p))
	_, err := r.doAttach("a", d.Id)
	refusedAs(400, "InvalidRequest", "disk must be in the same project as the instance").check(t, err)
	_, err = r.doAttach("a", "d")
	gone("disk", "d").check(t, err) // a name is one in the instance's project

	detached := must[*oxide.Disk](t)(r.doDetach("a", d.Id)) // A36, wherever it is
	if detached.State.State() != "detached" {
		t.Errorf("got state %q", detached.State.State())
	}
	body := r.instanceBody("theirs")
	body.Disks = []oxide.InstanceDiskAttachment{attachedDisk("d")}
	must[*oxide.Instance](t)(r.InstanceCreate(t.Context(),
		oxide.InstanceCreateParams{Project: "other", Body: body}))
	_, err = r.doDetach("a", d.Id)
	refusedAs(400, "InvalidRequest",
		`cannot detach disk "d": disk is attached to another instance`).check(t, err)
}

func TestA37TheBootDiskStays(t *testing.T) {
	for run, want := range map[string]refused{
		"": refusedAs(409, "Conflict", "boot disk cannot be detached"),
		store.RunFailed: refusedAs(400, "InvalidRequest", "cannot detach disk from instance in failed "+
			"state"),
	} {
		r := situation(t, true, "idle", "idle", run)
		id := r.instance("idle").Id
		simtest.NoError(t, r.rack.Records().Update(func(tx *store.Tx) error {
			i, _, err := store.Instances.Get(tx, id)
			if err != nil {
				return err
			}
			attached, err := tx.DisksOf(id)
			i.BootDiskID = &attached[0].ID
			return errors.Join(err, store.Instances.Put(tx, i))
		}))
		_, err := r.doDetach("idle", "d")
		want.check(t, err)
	}
}

func TestA16TwelveDisks(t *testing.T) {
	r := newRack(t, engine.Config{})
	for n := range 13 {
		r.disk(fmt.Sprintf("d%02d", n))
		_, err := r.doAttach("idle", fmt.Sprintf("d%02d", n))
		want := refused{}
		if n == 12 {
			want = refusedAs(400, "InvalidRequest", "cannot attach more than 12 disks to instance")
		}
		want.check(t, err)
	}
	attached := must[[]oxide.Disk](t)(r.InstanceDiskListAllPages(t.Context(),
		oxide.InstanceDiskListParams{Instance: "idle", Project: "default"}))
	if len(attached) != 12 || !slices.IsSortedFunc(attached, func(a, b oxide.Disk) int {
		return slices.Compare([]byte(a.Name), []byte(b.Name))
	}) {
		t.Errorf("got %d disks, or not in order", len(attached))
	}
	must[*oxide.Disk](t)(r.doDetach("idle", "d00"))
	must[*oxide.Disk](t)(r.doAttach("idle", "d12"))
}

func TestA35LocalDisksAreNeverHotPlugged(t *testing.T) {
	r := newRack(t, engine.Config{})
	must[*oxide.Disk](t)(r.DiskCreate(t.Context(), r.local("l", 1)))
	_, err := r.doAttach("a", "l")
	refusedAs(409, "Conflict", "cannot attach local storage disk: instance is starting").check(t, err)
	must[*oxide.Disk](t)(r.doAttach("idle", "l"))
	_, err = r.doSnapshot("s", "l")
	refusedAs(400, "InvalidRequest", "can't create a snapshot of a local storage disk").check(t, err)
}

func TestA17HotPlugCanBeSwitchedWhileTheRackServes(t *testing.T) {
	r := newRack(t, engine.Config{})
	r.disk("d")
	flip := func(on bool) {
		must[adminapi.Switches](t)(r.rack.ChangeSwitches(func(s *adminapi.Switches) error {
			s.Hotplug = on
			return nil
		}))
	}
	flip(false)
	_, err := r.doAttach("a", "d")
	refusedAs(400, "InvalidRequest", "cannot attach disk: instance is not fully stopped").check(t, err)
	flip(true)
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
}
