//go:build linux

package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestARunConformsWithHotPlugAndIsBlockedWithoutIt(t *testing.T) {
	short.Skip(t, 2)
	t.Parallel()
	for name, test := range map[string]struct {
		hotplug adminapi.Hotplug
		exit    int
		verdict report.Verdict
		want    report.HotPlug
	}{
		"on":  {"", ExitConforms, report.Conforms, report.HotPlugYes},
		"off": {adminapi.HotplugNone, ExitBlocked, report.BlockedByRack, report.HotPlugNo},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := harness.RunFor(t)
			run.Plain = name == "off"
			rack := rackIn(t, run, harness.RackOptions{Hotplug: test.hotplug})
			check := balance(t, rack)
			p := prepare(t, rack, nil, "run", "--yes", "--release", "simulated")
			p.Dir = filepath.Join(t.TempDir(), "removed during the run")
			csitest.Must(t, errors.Join(os.Mkdir(p.Dir, 0o700), p.Start(), os.Remove(p.Dir)))
			p.await(t, test.exit)
			r := p.report(t)
			if r.Verdict != test.verdict || r.Rack.HotPlug != test.want || r.Count(report.Failed) != 0 ||
				name == "on" && r.Count(report.NotTested)+r.Count(report.Blocked) != 0 {
				t.Errorf("verdict %s, hot-plug %s, %s", r.Verdict, r.Rack.HotPlug, r.Promises())
			}
			groups := r.Groups()
			if len(groups) != len(partNames) || len(groups[0].Results) != len(rules.All()) ||
				len(groups[5].Results) != len(data.Checks()) {
				t.Fatalf("the report does not have every rule and every check of data: %s", r.Promises())
			}
			for _, access := range groups[1:5] {
				if n := len(access.Results); n != len(groups[1].Results) || n < 100 {
					t.Errorf("%d results over %s, %d over ext4", n, access.Name, len(groups[1].Results))
				}
			}
			for _, result := range r.Results {
				if result.Status == report.Passed && result.Tries == 0 || result.ID == "D11" &&
					result.Status != report.Passed { // D11 needs no hot-plug
					t.Errorf("%s %s is %s after %d tries", result.Group, result.ID, result.Status, result.Tries)
				}
				if result.Status == report.Blocked && !strings.Contains(p.out.String(), result.ID) {
					t.Errorf("%s %s is blocked, and not listed at the end", result.Group, result.ID)
				}
			}
			if passed := groups[0].Count(report.Passed); passed < len(rules.All())-4 {
				t.Errorf("of the rules only %d passed: most need no hot-plug", passed)
			}
			if r.Witness.Source != "the rack's request log" {
				t.Errorf("the witness is %q", r.Witness.Source)
			}
			for _, kind := range []report.Kind{report.API, report.RPC} {
				if !slices.ContainsFunc(r.Calls, func(c report.Calls) bool { return c.Kind == kind }) {
					t.Errorf("the report has no latencies of kind %s", kind)
				}
			}
			_, figures, _ := strings.Cut(p.out.String(), "FIGURE conformance ")
			figures, _, _ = strings.Cut(figures, "\n")
			csitest.Must(t, proof.Print("FIGURE conformance-run hotplug="+name+" "+figures))
			var peak amount
			for word := range strings.FieldsSeq(figures) {
				_, _ = fmt.Sscanf(word, "peak_objects=%d", &peak.objects) // most words have another form
				_, _ = fmt.Sscanf(word, "peak_gib=%d", &peak.gib)
			}
			if most := needOf(partNames, 0); peak.objects == 0 || peak.objects > most.objects ||
				peak.gib > most.gib {
				t.Errorf("the run had %s at one time; a preflight says %s", peak, most)
			}
			check()
			prepare(t, rack, nil, "diff", p.folder, p.folder).exit(t, ExitConforms)
		})
	}
}

func TestNoDataCheckFollowsOneThatHangs(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{})
	check := balance(t, rack)
	p := prepare(t, rack, map[string]string{onlyVariable: "D01 D04", timeoutVariable: "1ms",
		pluginVariable: csitest.Got(rack.run.Binary(t.Context(), "oxide-csi-plugin"))(t)},
		"run", "--yes", "--only", partData)
	p.Path = csitest.Got(os.Executable())(t)
	p.exit(t, ExitFails)
	r := p.report(t)
	if len(r.Results) != 1 || !strings.Contains(r.Results[0].Reason, data.ErrHangs.Error()) ||
		!strings.Contains(r.Why, "the checks after D01 were not made") {
		t.Errorf("%s; the results are %+v", r.Why, r.Results)
	}
	check()
}

func refusing(operation string, status int, code, message string) adminapi.Fault {
	return adminapi.Fault{Operation: operation, Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: status, ErrorCode: code, Message: message}}
}

func TestRunReportsHowTheRackHotPlugsDisks(t *testing.T) {
	t.Parallel()
	refused := func(message string) adminapi.Fault {
		return refusing("instance_disk_attach", 400, "InvalidRequest", "cannot attach disk: "+message)
	}
	once := refused("instance is not fully stopped")
	once.Times = 1
	expired := refusing("", 401, "Unauthorized", "credentials missing or invalid")
	expired.Skip = 200
	fails := adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{Fails: true}}
	for name, test := range map[string]struct {
		hotplug adminapi.Hotplug
		fault   adminapi.Fault
		mutant  string
		exit    int            // 0 means ExitFails
		want    report.HotPlug // "" means HotPlugUnknown
		says    string         // | separates texts
	}{
		"not even when it is stopped": {fault: refused("instance is not fully stopped"),
			says: "does not attach a disk to this running instance, and not to a stopped"},
		"never":             {fault: refused("no"), says: "found HTTP 400 InvalidRequest"},
		"at the second try": {fault: once, says: "instance only when it was asked again"},
		"without a device": {mutant: "A54-serial-of-id", want: report.HotPlugYes,
			says: "a device with the serial"},
		"until the token expires": {fault: expired, exit: ExitUsage, want: report.HotPlugYes,
			says: "INCOMPLETE|the rack does not know the token any more"},
		"attach only, refusals as 500": {
			hotplug: adminapi.HotplugAttachOnly.With(adminapi.RefusalsAs500),
			want:    report.HotPlugAttachOnly,
			says: "attach only; a running instance gains a disk, and keeps it until it is stopped|" +
				"cannot detach disk: instance is not fully stopped (request |" +
				"a refused attach is a 500 without a reason"},
		"a record without a device": {hotplug: adminapi.HotplugFull.With(adminapi.RecordFirst),
			fault: fails, says: "an attach that failed stays recorded: the disk|" +
				"the answer was HTTP 500 Internal: Internal Server Error (request "},
		"removal by surprise, refusals as 500": {want: report.HotPlugYes,
			hotplug: adminapi.HotplugFull.With(adminapi.SurpriseRemoval, adminapi.RefusalsAs500),
			says: "a refused attach is a 500 without a reason|" +
				"a detach takes a disk from a program that has it open|which took "},
	} {
		t.Run(name, func(t *testing.T) {
			if test.hotplug != "" {
				short.Skip(t, 1)
			}
			t.Parallel()
			rack := rackOf(t, harness.RackOptions{Hotplug: test.hotplug})
			check := balance(t, rack)
			if test.mutant != "" {
				csitest.Must(t, rack.Admin.Mutate(t.Context(), test.mutant))
			}
			if test.fault.Operation != "" || test.fault.Skip > 0 {
				csitest.Got(rack.Admin.AddFault(t.Context(), test.fault))(t)
			}
			p := prepare(t, rack, nil, "run", "--yes", "--only", partRules)
			p.exit(t, cmp.Or(test.exit, ExitFails))
			r := p.report(t)
			if r.Rack.HotPlug != cmp.Or(test.want, report.HotPlugUnknown) ||
				test.exit == ExitUsage && (r.Count(report.Passed) == 0 || r.Count(report.Failed) > 0) {
				t.Errorf("hot-plug is %q, want %q; %s", r.Rack.HotPlug, test.want, r.Promises())
			}
			for says := range strings.SplitSeq(test.says, "|") {
				if !strings.Contains(p.out.String(), says) {
					t.Errorf("the output lacks %q:\n%s", says, p.out.String())
				}
			}
			if strings.Contains(p.out.String(), "which took 0.0") {
				t.Errorf("a removal by surprise took no time:\n%s", p.out.String())
			}
			csitest.Must(t, rack.Admin.ClearFaults(t.Context()))
			if test.exit == ExitUsage {
				prepare(t, rack, nil, "clean", "--yes").exit(t, ExitConforms)
			}
			if test.hotplug == "" {
				check()
			}
		})
	}
}

func TestADeviceCountsAsGoneOnlyIfAReadWithinItsSizeFails(t *testing.T) {
	for size, want := range map[int64]bool{harness.MiB / 4: true, harness.MiB / 2: false} {
		device := bytes.NewReader(make([]byte, size)) // reads beyond the size return EOF
		last, gone := readUntilGone(device, harness.MiB/2, time.Now())
		if gone != want || last == 0 {
			t.Errorf("with %d bytes: gone is %t after %s, want %t", size, gone, last, want)
		}
	}
}

func TestVerdictFollowsFromTheResults(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	const conforms, incomplete, fails = report.Conforms, report.Incomplete, report.DoesNotConform
	const ended = report.InterruptedRun
	statuses := map[rune]report.Status{'p': report.Passed, 'f': report.Failed, 'b': report.Blocked,
		'n': report.NotTested, 'a': report.NotApplicable, 'i': report.Interrupted}
	for name, test := range map[string]struct {
		// results has the initials of the statuses, and events names what else happened in the run.
		results, events string
		verdict         report.Verdict
		status          int
		says            string
	}{
		"all passed":                           {"p", "", conforms, ExitConforms, "all 1"},
		"some are not tested":                  {"pn", "", conforms, ExitConforms, "1 more"},
		"nothing ran":                          {"", "", incomplete, ExitUsage, "nothing"},
		"only results that are not applicable": {"a", "", incomplete, ExitUsage, "nothing"},
		"one failed":                           {"pf", "", fails, ExitFails, "D1"},
		"one failed and one is blocked":        {"bf", "", fails, ExitFails, "D1"},
		"one is blocked":                       {"pb", "", report.BlockedByRack, ExitBlocked, "1 of 2"},
		"something was left":                   {"p", "left", fails, ExitFails, "left behind"},
		"a contradiction of the witness":       {"p", "witness", fails, ExitFails, "witness"},
		"a run that could not continue":        {"p", "stopped", incomplete, ExitUsage, "no space"},
		"a spec that was not reached":          {"pi", "", incomplete, ExitUsage, "1 results"},
		"a part that did not run":              {"p", "selected", incomplete, ExitUsage, "xfs"},
		"an interrupted run":                   {"pi", "over", ended, ExitInterrupted, "interrupted"},
		"interrupted, and something was left":  {"p", "over left", ended, ExitInterrupted, ""},
		"interrupted after a failure":          {"f", "over", fails, ExitInterrupted, "D0"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, r := t.Context(), &report.Report{Schema: report.SchemaVersion,
				Rack: report.RackFacts{HotPlug: report.HotPlugUnknown}}
			var stopped error
			for i, letter := range test.results {
				result := report.Result{Group: partData, ID: fmt.Sprint("D", i), Status: statuses[letter],
					Reason: "why"}
				if letter == 'p' {
					result.Reason, result.Extent = "", report.Extent{{What: "ping", Looked: 1}}
				}
				r.Results = append(r.Results, result)
			}
			for event := range strings.FieldsSeq(test.events) {
				switch event {
				case "over":
					ctx = over
				case "left":
					r.Ledger.Left = []string{"disk x"}
				case "witness":
					r.Witness.Findings = []string{"no"}
				case "stopped":
					stopped = errors.New("no space")
				case "selected":
					r.Run.Selected = []string{partData, "xfs"}
				}
			}
			status := judge(ctx, r, stopped)
			if status != test.status || r.Verdict != test.verdict || !strings.Contains(r.Why, test.says) {
				t.Errorf("%s, status %d: %s", r.Verdict, status, r.Why)
			}
			if err := r.Check(); err != nil {
				t.Errorf("the report does not add up: %v", err)
			}
		})
	}
}

func TestDataCheckBeyondTheBudgetIsReportedAsNotTested(t *testing.T) {
	rack := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"capacity":{"storage":21474836480},"provisioned":{"storage":0}}`))
	}))
	defer rack.Close()
	client := csitest.Got(oxide.NewClient(oxide.WithHost(rack.URL), oxide.WithToken("x")))(t)
	w := &job{client: client, budget: newBudget(amount{9, 12})}
	for gib, want := range map[int64]string{17: "needs 5 GiB more", 23: "needs 11 GiB more"} {
		got, _ := w.checkData(t.Context(), &data.Bench{}, data.Check{ID: "D14", GiB: gib})
		if got.Status != report.NotTested || !strings.Contains(got.Reason, want) {
			t.Errorf("%s: %s", got.Status, got.Reason)
		}
	}
	if gib := w.room(t.Context()); gib != 12 {
		t.Errorf("there is room for %d GiB, not for 12", gib)
	}
	if all, least := needOf(partNames, 0), needOf(partNames, optional); least.gib >= all.gib {
		t.Errorf("a run needs at least %s, and has %s", least, all)
	}
}

func TestSpecPassesOnlyIfItCallsTheRPCInItsName(t *testing.T) {
	const (
		passed, failed, panicked = types.SpecStatePassed, types.SpecStateFailed, types.SpecStatePanicked
		timedout, skipped        = types.SpecStateTimedout, types.SpecStateSkipped
		interrupted              = types.SpecStateInterrupted
	)
	const create, needsAttach = "CreateVolume", "Node Service should work"
	const expand = "ExpandVolume [Controller Server] should work"
	for name, test := range map[string]struct {
		state         types.SpecState
		text, message string
		call          string // "" means none
		hotplug       bool
		want          report.Status
	}{
		"passed":                   {passed, create, "", create, true, report.Passed},
		"passed without a call":    {passed, create, "", "", true, report.Failed},
		"passed with another call": {passed, create, "", "Probe", true, report.Failed},
		"passed with a call of a longer name": {passed, "PublishVolume NodePublishVolume", "",
			"ControllerPublishVolume", true, report.Failed},
		"passed, and names no call": {passed, needsAttach, "", create, true, report.Passed},
		"failed":                    {failed, create, "no", create, true, report.Failed},
		"panicked":                  {panicked, create, "no", create, true, report.Failed},
		"timed out":                 {timedout, create, "no", create, true, report.Failed},
		"interrupted":               {interrupted, create, "no", create, true, report.Interrupted},
		"not reached":               {skipped, create, "", "", true, report.Interrupted},
		"skipped by its author":     {skipped, create, "not today", "", true, report.Failed},
		"a feature not offered":     {skipped, expand, "no", "", true, report.NotApplicable},
		"left out without hot-plug": {skipped, needsAttach, "", "", false, report.Blocked},
		"left out despite hot-plug": {skipped, needsAttach, "", "", true, report.Interrupted},
	} {
		spec := types.SpecReport{LeafNodeType: types.NodeTypeIt, LeafNodeText: test.text,
			State: test.state, ContainerHierarchyTexts: []string{"ext4"},
			Failure: types.Failure{Message: test.message}}
		var calls []rpc
		if test.call != "" {
			calls = append(calls, rpc{name: test.call})
		}
		got := resultOf(spec, calls, test.hotplug)
		if got.Status != test.want || (got.Reason == "") != (got.Status == report.Passed) {
			t.Errorf("%s: %s, %q; want %s", name, got.Status, got.Reason, test.want)
		}
	}
}

func TestOnlyForeignChangesThatCanMisleadASpecAreReported(t *testing.T) {
	const gone = "00000000-0000-4000-8000-000000000001" // a deleted disk of the run
	w := &job{id: "1a2b3c4d", budget: newBudget(amount{20, 40}), here: &oxide.Instance{Id: "here"}}
	w.budget.deleted(gone)
	own := mark{Run: w.id}.description()
	disk := func(id, description, instance string) item {
		one := item{kind: "disk", id: id, description: description, state: "detached",
			disk: &oxide.Disk{}}
		if instance != "" {
			one.state = "attached"
			one.disk.State.Value = &oxide.DiskStateAttached{Instance: instance}
		}
		return one
	}
	snapshot := func(id, state string) item { return item{kind: "snapshot", id: id, state: state} }
	volumes := func(ids ...string) []rpc { return []rpc{{name: "ListVolumes", listed: ids}} }
	snapshots := func(ids ...string) []rpc { return []rpc{{name: "ListSnapshots", listed: ids}} }
	publish := []rpc{{name: "ControllerPublishVolume", object: "o"}}
	// The driver lists neither the boot disk nor the detached disk.
	before := inventory{disk("detached", "", ""), disk("boot", "", "here"), disk("a", "mine", "b"),
		snapshot("s", "ready"), snapshot("slow", "creating"), snapshot("bad", "faulted"),
		disk("o", own, "")}
	selects := snapshots("s", "x")
	selects[0].object = "s"
	with := func(more ...item) inventory { return append(more, before...) }
	without := func(ids string) inventory {
		return slices.DeleteFunc(slices.Clone(before), func(i item) bool { return i.id == ids })
	}
	for name, test := range map[string]struct {
		after  inventory
		calls  []rpc
		misled bool
	}{
		"lists of what did not change": {before, append(volumes("a", "o"), snapshots("s", "bad")...),
			false},
		"a list lacks a foreign disk": {before, volumes(), false},
		"the run's own objects": {with(disk("p", own, "here")),
			append(volumes("a", "p", gone), publish...), false},
		"others make a disk, and the spec lists none": {with(disk("x", "", "")), publish, false},
		"others make a snapshot, and the spec lists none": {with(snapshot("x", "ready")), volumes("a"),
			false},
		"others make a snapshot, and the spec selects one": {with(snapshot("x", "ready")), selects,
			false},
		"others make a disk":              {with(disk("x", "", "")), volumes("a"), true},
		"others delete a disk":            {without("detached"), volumes("a"), true},
		"others make and delete a disk":   {before, volumes("a", "x"), true},
		"others attach and detach a disk": {before, volumes("a", "detached"), true},
		"others detach a disk": {append(without("a"), disk("a", "", "")),
			volumes("a"), true},
		"others make a snapshot":            {with(snapshot("x", "ready")), snapshots("s"), true},
		"others make and delete a snapshot": {before, snapshots("s", "x"), true},
		"a foreign snapshot becomes ready": {append(without("slow"), snapshot("slow", "ready")),
			snapshots("s"), true},
		"others attach a disk to this instance":    {with(disk("x", "", "here")), publish, true},
		"others attach a disk to another instance": {with(disk("x", "", "b")), publish, false},
	} {
		s := &specs{job: w, before: before}
		if err := s.othersChanged(test.after, test.calls); (err != nil) != test.misled {
			t.Errorf("%s: expected %v; found %v", name, test.misled, err)
		}
	}
}

func TestACallIsRepeatedForALimitedTimeUnlessItsErrorIsFinal(t *testing.T) {
	for name, test := range map[string]struct {
		code   codes.Code
		reason string
		until  time.Duration
		ok     bool
		within time.Duration
	}{
		"a change that is late for as long as the driver waits": {codes.Unavailable, "EffectUnknown",
			70 * time.Second, true, 75 * time.Second},
		"a change that stays unknown": {codes.Unavailable, "EffectUnknown", time.Hour, false,
			3 * time.Minute},
		"a rack that stays busy": {codes.Unavailable, "RackUnavailable", time.Hour, false,
			15 * time.Second},
		"a final error": {codes.AlreadyExists, "VolumeExists", time.Hour, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				client := csitest.Got(oxide.NewClient(oxide.WithHost("http://rack"), oxide.WithToken("x"),
					oxide.WithHTTPClient(&http.Client{Transport: legal.RoundTrip(
						func(r *http.Request) (*http.Response, error) {
							return legal.Answer(r, http.StatusNotFound, "{}"), nil
						})})))(t)
				calls := callLog{budget: newBudget(amount{20, 40}), contact: &contact{client: client}}
				err := calls.intercept(t.Context(), "/csi.v1.Controller/DeleteVolume", nil, nil, nil,
					func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
						if time.Since(began) < test.until {
							return status.Error(test.code, test.reason+": no")
						}
						return nil
					})
				if took := time.Since(began); (err == nil) != test.ok || took > test.within {
					t.Errorf("after %s: %v", took, err)
				}
			})
		})
	}
}

func TestRequestLogComparisonFindsAnAnswerThatTheRackDidNotGive(t *testing.T) {
	log := []adminapi.Request{{RequestID: "1", Operation: "disk_view", Status: 200},
		{RequestID: "2", Status: 400}}
	for name, test := range map[string]struct {
		id, operation string
		status        int
		says          string
	}{
		"the rack's own": {"1", "disk_view", 200, ""},
		"the rack's refusal before it knew the operation": {"2", "disk_view", 400, ""},
		"no answer":         {"", "disk_view", 0, ""},
		"not the rack's":    {"3", "", 200, "did not give"},
		"a proxy's":         {"", "", 429, ""},
		"another operation": {"1", "disk_delete", 200, "disk_delete"},
		"another status":    {"1", "disk_view", 404, "HTTP 404"},
	} {
		found := strings.Join(unknownTo(log, []rules.RecordedCall{{RequestID: test.id,
			Operation: test.operation, Status: test.status}}), "\n")
		if (found == "") != (test.says == "") || !strings.Contains(found, test.says) {
			t.Errorf("%s: found %q, want %q", name, found, test.says)
		}
	}
}

func TestRequestLogComparisonFindsASuccessfulCallWithoutARequest(t *testing.T) {
	began := time.Now()
	at := func(name, object string, code codes.Code) rpc {
		return rpc{name: name, object: object, code: code, began: began, took: time.Second}
	}
	// Clocks may differ, so the run's requests before and after a call show its place in the log.
	own := []rules.RecordedCall{{RequestID: "before", Began: began.Add(-time.Second)},
		{RequestID: "after", Began: began.Add(2 * time.Second)}}
	id, create := uuid.NewString(), at("CreateVolume", "", codes.OK)
	later := create
	later.began = began.Add(1100 * time.Millisecond)
	for name, test := range map[string]struct {
		calls []rpc
		log   string
		found int
	}{
		"a request during the call": {[]rpc{create}, "before disk_create after", 0},
		"a request of another kind": {[]rpc{create}, "before disk_list after", 1},
		"a request before the call": {[]rpc{create}, "disk_create before after", 1},
		"a request after the call":  {[]rpc{create}, "before after disk_create", 1},
		"two calls, two requests":   {[]rpc{later, create}, "before disk_create disk_create after", 0},
		"two calls, one request":    {[]rpc{later, create}, "before disk_create after", 1},
		"equal calls, one request":  {[]rpc{create, create}, "before disk_create after", 0},
		"a refused call":            {[]rpc{at("CreateVolume", "", codes.NotFound)}, "before after", 0},
		"a call that needs no rack": {[]rpc{at("NodeGetInfo", "", codes.OK)}, "before after", 0},
		"an impossible object":      {[]rpc{at("DeleteVolume", "invalid", codes.OK)}, "before after", 0},
		"a possible object":         {[]rpc{at("DeleteVolume", id, codes.OK)}, "before after", 1},
	} {
		var log []adminapi.Request
		for word := range strings.FieldsSeq(test.log) {
			log = append(log, adminapi.Request{RequestID: word, Operation: word})
		}
		if found := unheard(log, own, test.calls); len(found) != test.found {
			t.Errorf("%s: found %q", name, found)
		}
	}
}

func TestRequiredRPCsThatADataCheckDidNotMakeAreFound(t *testing.T) {
	check := data.Check{Calls: []string{"CreateVolume", "disk_create"}}
	for made, want := range map[string]string{"Probe": "CreateVolume", "CreateVolume": ""} {
		if missing := notMade(check, []rpc{{name: made}}); strings.Join(missing, " ") != want {
			t.Errorf("with a call of %s: not made: %q", made, missing)
		}
	}
}

func TestTheReportOfARunReplacesNoFile(t *testing.T) {
	// By default the report's folder is in the current directory, next to the run's work directory.
	t.Chdir(t.TempDir())
	here := csitest.Got(os.Getwd())(t)
	const taken = "name one that does not exist with --report"
	for name, test := range map[string]struct {
		folder, says string
		change       func(w *job, folder string) error // made during the run
	}{
		"next to the run's directory": {"", "", func(*job, string) error { return nil }},
		"a report that does not add up": {"odd", "add up", func(w *job, _ string) error {
			w.report.Results = append(w.report.Results, w.report.Results[0])
			return nil
		}},
		"a folder": {"gone", taken, func(_ *job, folder string) error { return os.Mkdir(folder, 0o700) }},
		"a site": {"site", taken, func(_ *job, folder string) error {
			return errors.Join(os.Mkdir(folder, 0o700),
				os.WriteFile(filepath.Join(folder, "index.html"), nil, 0o600))
		}},
		"a file": {"file", taken, func(_ *job, folder string) error {
			return os.WriteFile(folder, nil, 0o600)
		}},
		"a FIFO": {"fifo", taken, func(_ *job, folder string) error {
			return unix.Mkfifo(folder, 0o600)
		}},
		"a link to nothing": {"link", taken, func(_ *job, folder string) error {
			return os.Symlink(folder+"-target", folder)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			w := &job{Program: &Program{Stdout: &out}, settings: &settings{report: test.folder},
				id: newRunID(), budget: newBudget(amount{1, 1}), contact: &contact{},
				report: &report.Report{Schema: report.SchemaVersion, Results: []report.Result{{
					Group: partRules, ID: "A01", Name: "x", Status: report.Passed, Tries: 1,
					Extent: report.Extent{{What: "ping", Looked: 1}}}},
					Rack: report.RackFacts{HotPlug: report.HotPlugUnknown}}}
			w.report.Run.ID = w.id
			w.dir = &harness.Run{Dir: filepath.Join(here, workDir(w.id)), Progress: &out}
			csitest.Must(t, errors.Join(os.Mkdir(w.dir.Dir, 0o700), tryFolder(w.folder()),
				test.change(w, w.folder())))
			if err := tryFolder(w.folder()); (err == nil) != (test.says != taken) {
				t.Errorf("before the run: %v", err)
			}
			status, err := w.finish(t.Context())
			if (status == ExitConforms) != (test.says == "") || (err == nil) != (test.says == "") ||
				err != nil && (status != ExitUsage || !strings.Contains(err.Error(), test.says)) ||
				errors.Is(err, report.ErrNotWritten) != (test.says == taken) {
				t.Errorf("ended with %d, %v", status, err)
			}
			_, line, _ := strings.Cut(out.String(), "The report: ")
			page, _, _ := strings.Cut(line, "\n")
			text, err := os.ReadFile(page)
			if err != nil || !strings.Contains(string(text), w.id) {
				t.Errorf("it says that its report is %s: %v", page, err)
			}
			made, err := filepath.Glob(w.folder() + "/*")
			if err != nil || test.says == taken && len(made) > 1 {
				t.Errorf("there are %q, %v", made, err)
			}
		})
	}
}

// In this test the rack repeats the token in every error, the disks of other users have
// descriptions, and the command that reaches the second instance has a password.
func TestReportContainsNoCredentialsAndNoForeignDescriptions(t *testing.T) {
	rack := vars{"OXIDE_HOST": "x", "OXIDE_TOKEN": "x", "OXIDE_PROJECT": "x"}
	settings, err := parseSettings("run", []string{"--second-shell", "ssh -p " + canary, "--yes",
		"--release=" + canary}, func(name string) string { return rack[name] })
	csitest.Must(t, err)
	if got := strings.Join(settings.command[1:], " "); got != "run --release --second-shell --yes" {
		t.Errorf("of the command line it has %q", got)
	}
	own := mark{Run: "1a2b3c4d"}
	text := csitest.Got(json.MarshalIndent(map[string]string{"description": own.description()}, "",
		" "))(t)
	for answer, want := range map[string]string{
		`{"description": "my \"` + canary + `", "name":"x"}`: `{"description":"(not kept)", "name":"x"}`,
		`{"description":"` + canary:                          `{"description":"(not kept)`,
		string(text):                                         string(text),
	} {
		for operation, want := range map[string]string{"disk_view": want, "disk_list": ""} {
			got := answers([]rules.RecordedCall{{Operation: operation, Status: 200, Answer: answer}})
			if got[0].Answer != want {
				t.Errorf("of the answer %s to %s it has %s", answer, operation, got[0].Answer)
			}
		}
	}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = fmt.Fprintf(w, `{"message":"no %s","request_id":"1"}`, r.Header.Get("Authorization"))
	}))
	defer front.Close()
	for _, host := range []string{front.URL, strings.Replace(front.URL, "//", "//me:"+canary+"@", 1),
		"https://me:%zz" + canary + "@rack"} {
		var out strings.Builder
		p := Program{Args: []string{"preflight"}, Stdout: &out, Stderr: &out,
			Getenv: func(name string) string {
				return vars{"OXIDE_HOST": host, "OXIDE_TOKEN": canary, "OXIDE_PROJECT": "p"}[name]
			}}
		if status := p.Main(t.Context()); status != ExitUsage || strings.Contains(out.String(), canary) {
			t.Errorf("with the host %s: %d, %s", host, status, out.String())
		}
	}
}

func TestMarkedNamesAreShortEnoughAndUnique(t *testing.T) {
	long := strings.Repeat("n", maxNameLength)
	one, other := markedName("mark", long), markedName("mark", long[1:]+"o")
	if markedName("mark", "") != "" || markedName("mark", "sanity") != "mark-sanity" ||
		len(one) != maxNameLength || len(other) != maxNameLength || one == other {
		t.Errorf("the names are %q, %q, %q and %q", markedName("mark", ""), markedName("mark", "sanity"),
			one, other)
	}
}

// heldController keeps a caller in CreateVolume until letGo is closed.
type heldController struct {
	csi.ControllerClient
	entered, letGo chan struct{}
}

func (c heldController) CreateVolume(context.Context, *csi.CreateVolumeRequest,
	...grpc.CallOption) (*csi.CreateVolumeResponse, error) {
	close(c.entered)
	<-c.letGo
	return nil, errors.New("there is no volume")
}

func TestRunContinuesOnlyAfterAnInterruptedSpecHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := heldController{entered: make(chan struct{}), letGo: make(chan struct{})}
		go func() { _, _ = (&sanity.Resources{ControllerClient: c}).CreateVolume(t.Context(), nil) }()
		<-c.entered
		waited := make(chan error, 1)
		go func() { waited <- awaitFunction(t.Context()) }()
		synctest.Wait()
		if len(waited) > 0 {
			t.Error("the run goes on while a function of csi-sanity waits for the driver")
		}
		close(c.letGo)
		csitest.Must(t, <-waited)
	})
}

func TestAnInterruptedRunCreatesNothing(t *testing.T) {
	run, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	mark := withMark(run, "mark")
	for _, want := range []string{"mark-v mark-s v", "v"} {
		var sent []string
		send := func(_ context.Context, _ string, req, _ any, _ *grpc.ClientConn,
			_ ...grpc.CallOption) error {
			switch req := req.(type) {
			case *csi.DeleteVolumeRequest:
				sent = append(sent, req.GetVolumeId())
			case interface{ GetName() string }:
				sent = append(sent, req.GetName())
			}
			return nil
		}
		for _, req := range []any{&csi.CreateVolumeRequest{Name: "v"},
			&csi.CreateSnapshotRequest{Name: "s"}, &csi.DeleteVolumeRequest{VolumeId: "v"}} {
			_ = mark(t.Context(), "", req, nil, nil, send)
		}
		if got := strings.Join(sent, " "); got != want {
			t.Errorf("the requests are %q, want %q", got, want)
		}
		interrupt()
	}
}
