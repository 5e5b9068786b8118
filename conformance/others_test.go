//go:build linux

package conformance

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// jobOn returns the job of a run on a rack, before its preflight.
func jobOn(t *testing.T, rack *harness.Rack) *job {
	t.Helper()
	w, err := openJob(&Program{Stdout: io.Discard}, &settings{host: rack.URL, token: rack.Token,
		project: rack.Project, caFile: rack.CA, budget: amount{20, 40}})
	csitest.Must(t, err)
	return w
}

func TestAnInstanceIsStoppedOnlyIfNobodyElseUsesIt(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, plainRun(t), harness.RackOptions{Hotplug: adminapi.HotplugNone})
	now, helper := time.Now(), rack.Instance("helper").ID
	other := mark{Run: "1a2b3c4d", Host: "elsewhere", Began: &now,
		Instances: []string{rack.Instance("b").ID}}
	attach := func(name, description string) func(*testing.T) string {
		return func(t *testing.T) string {
			id := made(t, rack, name, description)
			csitest.Must(t, rack.AttachDisk(t.Context(), id, helper))
			return id
		}
	}
	instance, err := rack.Client.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(helper)})
	csitest.Must(t, err)
	w := jobOn(t, rack)
	csitest.Must(t, w.meet(t.Context(), instance))
	for name, test := range map[string]struct {
		instance string
		make     func(*testing.T) string
		says     string
	}{
		"nobody":             {helper, nil, ""},
		"its own disk":       {helper, attach("own", mark{Run: w.id}.description()), ""},
		"another run's disk": {helper, attach("one", mark{Run: "1a2b3c4d"}.description()), "1a2b3c4d"},
		"a cluster's volume": {helper, attach("two", driverWord+`{"cluster":"c"}`), "of a cluster"},
		"a disk that is new": {helper, attach("three", "mine"), "not the run's"},
		"where another works": {rack.Instance("b").ID, func(t *testing.T) string {
			return made(t, rack, "run", other.description())
		}, "1a2b3c4d on elsewhere uses it"},
		"another project's": {helper, func(*testing.T) string {
			w.projectName = "other"
			return ""
		}, "not in the project"},
	} {
		t.Run(name, func(t *testing.T) {
			w.projectName = oxide.NameOrId(rack.Project)
			id := ""
			if test.make != nil {
				id = test.make(t)
			}
			err := w.mayStop(t.Context(), test.instance)
			if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("expected %q; found %v", test.says, err)
			}
			if id != "" {
				_ = rack.DetachDisk(t.Context(), id, test.instance) // some are not attached
				csitest.Must(t, rack.DeleteDisk(t.Context(), id))
			}
		})
	}
}

// The helper runs, and has a disk of a run.
func TestADetachStopsOnlyTheHelperThatTheRunStarted(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, plainRun(t), harness.RackOptions{Hotplug: adminapi.HotplugNone})
	helper := rack.Instance("helper").ID
	w := jobOn(t, rack)
	disk := made(t, rack, "own", mark{Run: w.id}.description())
	csitest.Must(t, rack.AttachDisk(t.Context(), disk, helper))
	csitest.Must(t, rack.StartInstance(t.Context(), helper))
	run := deadRun{id: w.id, mark: mark{Helper: helper, Instances: []string{helper}}}
	remove := func() error {
		now, err := w.look(t.Context(), disk)
		csitest.Must(t, err)
		return w.removeDisk(t.Context(), run, *now)
	}
	w.started = &data.Helper{InstanceID: helper, Started: true}
	_, err := rack.Admin.AddFault(t.Context(), adminapi.Fault{Operation: "instance_disk_detach",
		Phase: adminapi.Instead, Times: 1, Response: &adminapi.Response{Status: 400,
			ErrorCode: "InvalidRequest", Message: "no"}})
	csitest.Must(t, err)
	refused := remove()
	w.started = nil
	unknown := remove()
	run.id, w.dead = "1a2b3c4d", map[string]bool{w.id: true}
	unnamed := remove()
	instance, err := rack.Client.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(helper)})
	csitest.Must(t, err)
	if refused == nil || unknown == nil || unnamed == nil ||
		instance.RunState != oxide.InstanceStateRunning {
		t.Fatalf("expected three refusals and a running helper; found %v, %v, %v, %s", refused, unknown,
			unnamed, instance.RunState)
	}
	w.settings.helper = "helper"
	csitest.Must(t, remove())
}
