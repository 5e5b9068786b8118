//go:build linux

package conformance

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// strangers creates disks whose names and descriptions look like those of a run, and attaches one
// of them to instance a. It returns their number.
func strangers(t *testing.T, rack *harness.Rack, run string) int {
	t.Helper()
	descriptions := []string{"made by hand", "", "oxide-conformance", "oxide-conformance-" + run,
		"oxide-conformance " + run, `oxide-conformance {"run":"` + run, `oxide-conformance {"run":"my"}`,
		`my oxide-conformance {"run":"` + run + `"}`, `csi.oxide.computer {"name":"x"}`,
		`csi.oxide.computer {"name":"oxide-conformance-` + run + `","cluster":"c"}`}
	for _, cluster := range []string{"", "-" + run + "0", "-" + run + "-2", "-1A2B3C4D"} {
		descriptions = append(descriptions,
			`csi.oxide.computer {"name":"x","cluster":"oxide-conformance`+cluster+`"}`)
	}
	for i, description := range descriptions {
		name := fmt.Sprintf("conf-%s-%05d", run, i)
		if i == 1 {
			name = "sanity" // which csi-sanity uses, too
		}
		id := made(t, rack, name, description)
		if i > 0 {
			continue
		}
		csitest.Must(t, rack.AttachDisk(t.Context(), id, rack.Instance("a").ID))
	}
	return len(descriptions)
}

// made creates a disk with a description, which may be a run's mark, and returns its ID.
func made(t *testing.T, rack *harness.Rack, name, description string) string {
	t.Helper()
	disk, err := rack.Client.DiskCreate(t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(rack.Project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: description,
			Size: oxide.ByteCount(harness.GiB), DiskBackend: harness.BlankBackend()}})
	csitest.Must(t, err)
	return disk.Id
}

func TestARunCountsAsDeadOnlyIfThisMachineCanKnowIt(t *testing.T) {
	now := time.Now()
	boot, namespace, _ := strings.Cut(bootID(), " ")
	host, err := os.Hostname()
	csitest.Must(t, err)
	const nobody = 1 << 30
	own := os.Getpid()
	for name, test := range map[string]struct {
		boot     string
		pid      int
		start    string
		instance string
		dead     bool
	}{
		"a run whose process is gone":                 {boot + " " + namespace, nobody, "1", "a", true},
		"a run that lives, whatever its file's name":  {bootID(), own, startTime(own), "a", false},
		"a run whose process ID another process has":  {boot + " " + namespace, own, "1", "a", true},
		"a run in a container of this machine":        {boot + " pid:[1]", nobody, "1", "a", false},
		"a run on this machine before its last boot":  {"before " + namespace, nobody, "1", "a", true},
		"a run on another machine with the same name": {"other " + namespace, nobody, "1", "b", false},
	} {
		r := deadRun{id: "11111111", mark: mark{Run: "11111111", Host: host, Boot: test.boot,
			PID: test.pid, Start: test.start, Began: &now, Instances: []string{test.instance, "c"}}}
		if why := r.alive("a"); (why == "") != test.dead {
			t.Errorf("%s: %q", name, why)
		}
	}
}

func TestCleanNamesTheInstancesThatADeadRunLeftInAnotherState(t *testing.T) {
	const running, stopped = oxide.InstanceStateRunning, oxide.InstanceStateStopped
	r := deadRun{mark: mark{Instances: []string{"here", "second", "helper"}, Helper: "helper"}}
	for name, want := range map[string][2]oxide.InstanceState{
		"": {running, stopped}, "second helper": {stopped, running}} {
		notes := r.notAsBefore(inventory{{id: "here", state: string(running)},
			{id: "second", name: "second", state: string(want[0])}, {id: "other", state: string(stopped)},
			{id: "helper", name: "helper", state: string(want[1])}})
		if len(notes) != len(strings.Fields(name)) {
			t.Errorf("expected notes on %q; found %q", name, notes)
		}
	}
}

func TestASecondInterruptEndsARunWhoseRackBlocksTheCleanUp(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	p := prepare(t, run, rack, asOthersHave(rack))
	c := begin(t, run, rack, p, death{how: killed, part: partRules, at: 40})
	<-c.made
	_, err := rack.Admin.AddFault(t.Context(), adminapi.Fault{Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable",
			Message: "Service Unavailable"}})
	csitest.Must(t, errors.Join(err, p.Process.Signal(syscall.SIGINT)))
	csitest.Must(t, harness.Await(t.Context(), runTimeout, func() error {
		faults, err := rack.Admin.Faults(t.Context())
		if err == nil && faults[0].Fired <= 2 {
			err = errors.New("it does not try to sweep")
		}
		return err
	}))
	csitest.Must(t, p.Process.Signal(syscall.SIGINT))
	<-c.ended
	if p.ProcessState.ExitCode() != ExitInterrupted ||
		!strings.Contains(p.errs.String(), "oxide-conformance clean") {
		t.Errorf("%v; it does not say what to do: %s", c.exit, p.errs.String())
	}
	csitest.Must(t, rack.Admin.ClearFaults(t.Context()))
	prepare(t, run, rack, nil, "clean", "--yes").exit(t, ExitConforms)
	check()
}

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
	instance, err := rack.Client.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(helper)})
	csitest.Must(t, err)
	w := jobOn(t, rack)
	csitest.Must(t, w.meet(t.Context(), instance))
	expect := func(instance, says string) {
		t.Helper()
		err := w.mayStop(t.Context(), instance)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("expected %q; found %v", says, err)
		}
	}
	expect(helper, "")
	for description, says := range map[string]string{
		mark{Run: w.id}.description():       "", // its own disk
		mark{Run: "1a2b3c4d"}.description(): "1a2b3c4d",
		driverWord + `{"cluster":"c"}`:      "of a cluster",
		"mine, and new":                     "not the run's",
	} {
		id := made(t, rack, "disk", description)
		csitest.Must(t, rack.AttachDisk(t.Context(), id, helper))
		expect(helper, says)
		csitest.Must(t, rack.DetachDisk(t.Context(), id, helper))
		csitest.Must(t, rack.DeleteDisk(t.Context(), id))
	}
	made(t, rack, "run", mark{Run: "1a2b3c4d", Host: "elsewhere", Began: &now,
		Instances: []string{rack.Instance("b").ID}}.description())
	expect(rack.Instance("b").ID, "1a2b3c4d on elsewhere uses it")
	w.projectName = "other"
	expect(helper, "not in the project")
}

// The helper instance is running, and a disk that the run has made is attached to it.
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
