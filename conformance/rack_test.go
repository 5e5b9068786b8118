//go:build linux

package conformance

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestARackWithHotPlugConformsAndEverythingRuns(t *testing.T) {
	short.Skip(t, 1)
	t.Parallel()
	run := harness.RunFor(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	p := prepare(t, run, rack, nil, "run", "--yes", "--release", "simulated")
	p.exit(t, ExitConforms)
	r := p.report(t)
	count := statuses(r)
	if r.Verdict != report.Conforms || r.Rack.HotPlug != report.HotPlugYes ||
		count[report.NotTested]+count[report.Blocked]+count[report.Failed] != 0 {
		t.Errorf("verdict %s, hot-plug %s, %v: expected that all runs and passes", r.Verdict,
			r.Rack.HotPlug, count)
	}
	everythingIsThere(t, r)
	if r.Witness.Source != "the rack's request log" {
		t.Errorf("the witness is %q", r.Witness.Source)
	}
	for _, kind := range []report.Kind{report.API, report.RPC} {
		if !slices.ContainsFunc(r.Calls, func(c report.Calls) bool { return c.Kind == kind }) {
			t.Errorf("the report has no latencies of kind %s", kind)
		}
	}
	staysWithinItsNeed(t, p)
	check()
	runFigure(t, "on", r)
	same := prepare(t, run, nil, nil, "diff", p.folder, p.folder)
	same.exit(t, ExitConforms)
}

func TestARackWithoutHotPlugIsBlockedAndTheNumbersAddUp(t *testing.T) {
	short.Skip(t, 1)
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{Hotplug: adminapi.HotplugNone})
	check := balance(t.Context(), t, rack)

	p := prepare(t, run, rack, nil, "run", "--yes")
	p.exit(t, ExitBlocked)

	r := p.report(t)
	everythingIsThere(t, r)
	all, ofRules := statuses(r), statuses(r, partRules)
	sum := 0
	for _, n := range all {
		sum += n
	}
	if r.Verdict != report.BlockedByRack || r.Rack.HotPlug != report.HotPlugNo ||
		sum != len(r.Results) || all[report.Failed] != 0 {
		t.Errorf("verdict %s, hot-plug %s, %v of %d", r.Verdict, r.Rack.HotPlug, all, len(r.Results))
	}
	if ofRules[report.Passed] < len(rules.All())-4 {
		t.Errorf("of the rules only %v: most need no hot-plug", ofRules)
	}
	if i := slices.IndexFunc(r.Results, func(r report.Result) bool {
		return r.Group == partData && r.ID == "D11"
	}); i < 0 || r.Results[i].Status != report.Passed {
		t.Error("the helper's data were not checked")
	}
	for _, result := range r.Results {
		if result.Status == report.Blocked && result.Reason == "" ||
			result.Status == report.Passed && result.Tries == 0 {
			t.Errorf("%s %s %s is %s after %d tries, for %q", result.Group, result.ID, result.Name,
				result.Status, result.Tries, result.Reason)
		}
		if result.Status == report.Blocked && !strings.Contains(p.out.String(), result.ID) {
			t.Errorf("%s %s is blocked, and not listed at the end", result.Group, result.ID)
		}
	}
	check()
	runFigure(t, "off", r)
}

// everythingIsThere demands a result for every rule, every check of data, and the same specs of
// csi-sanity for each kind of access.
func everythingIsThere(t *testing.T, r *report.Report) {
	t.Helper()
	got := map[string]int{}
	for _, result := range r.Results {
		got[result.Group]++
	}
	if got[partRules] != len(rules.All()) || got[partData] != len(data.Checks()) {
		t.Errorf("%d results of %d rules, %d of %d checks of data", got[partRules],
			len(rules.All()), got[partData], len(data.Checks()))
	}
	for _, access := range []string{"ext4", "xfs", "btrfs", "block"} {
		if got[access] != got["ext4"] || got[access] < 100 {
			t.Errorf("%d results over %s, %d over ext4", got[access], access, got["ext4"])
		}
	}
}

// staysWithinItsNeed demands that a run never had more objects than a preflight prints.
func staysWithinItsNeed(t *testing.T, p *program) {
	t.Helper()
	var peak amount
	_, figures, _ := strings.Cut(p.out.String(), "FIGURE conformance ")
	for word := range strings.FieldsSeq(figures) {
		_, _ = fmt.Sscanf(word, "peak_objects=%d", &peak.objects) // most words have another form
		_, _ = fmt.Sscanf(word, "peak_gib=%d", &peak.gib)
	}
	if most := needOf(parts); peak.objects == 0 || peak.objects > most.objects || peak.gib > most.gib {
		t.Errorf("the run had %s at one time; a preflight says %s", peak, most)
	}
}

func runFigure(t *testing.T, hotplug string, r *report.Report) {
	t.Helper()
	count, seconds := statuses(r), r.Run.Ended.Sub(r.Run.Began).Seconds()
	figure(t, "conformance-run", "hotplug", hotplug, "verdict", fmt.Sprintf("%q", r.Verdict),
		"results", len(r.Results), "passed", count[report.Passed], "failed", count[report.Failed],
		"blocked", count[report.Blocked], "not_tested", count[report.NotTested], "not_applicable",
		count[report.NotApplicable], "seconds", fmt.Sprintf("%.1f", seconds))
}

func figure(t *testing.T, name string, pairs ...any) {
	t.Helper()
	csitest.Must(t, proof.Print(proof.Line(name, pairs...)))
}

func TestARackThatRefusesEveryAttachDoesNotConform(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	for refusal, times := range map[string]int{"instance is not fully stopped": 0, "no": 0,
		"instance is not fully stopped, once": 1} {
		if _, err := rack.Admin.AddFault(t.Context(), adminapi.Fault{
			Operation: "instance_disk_attach", Phase: adminapi.Instead, Times: times,
			Response: &adminapi.Response{Status: 400, ErrorCode: "InvalidRequest",
				Message: "cannot attach disk: " + refusal}}); err != nil {
			t.Fatal(err)
		}
		p := prepare(t, run, rack, nil, "run", "--yes")
		p.exit(t, ExitFails)
		if r := p.report(t); r.Verdict != report.DoesNotConform || !strings.Contains(r.Why, "attach") {
			t.Errorf("after %q the verdict is %s: %s", refusal, r.Verdict, r.Why)
		}
		csitest.Must(t, rack.Admin.ClearFaults(t.Context()))
		check()
	}
}

func TestARackThatShowsNoDevicesDoesNotConform(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	csitest.Must(t, rack.Admin.Mutate(t.Context(), "A54-serial-of-id"))
	p := prepare(t, run, rack, nil, "run", "--yes")
	p.exit(t, ExitFails)
	if r := p.report(t); len(r.Results) != 1 ||
		!strings.Contains(r.Results[0].Reason, "a device with the serial") {
		t.Errorf("the results are %+v", r.Results)
	}
	check()
}

func TestARunWhoseTokenExpiresReportsThatAndFailsNoResult(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	fault, err := rack.Admin.AddFault(t.Context(), adminapi.Fault{Phase: adminapi.Instead, Skip: 200,
		Response: &adminapi.Response{Status: 401, ErrorCode: "Unauthorized",
			Message: "credentials missing or invalid"}})
	csitest.Must(t, err)
	check := balance(t.Context(), t, rack)
	p := prepare(t, run, rack, nil, "run", "--yes", "--only", partRules)
	p.exit(t, ExitUsage)
	r := p.report(t)
	if count := statuses(r); r.Verdict != report.Incomplete || !strings.Contains(r.Why, "token") ||
		count[report.Passed] == 0 || count[report.Failed] > 0 {
		t.Errorf("the verdict is %s: %s; %v", r.Verdict, r.Why, count)
	}
	csitest.Must(t, rack.Admin.RemoveFault(t.Context(), fault))
	prepare(t, run, rack, nil, "clean", "--yes").exit(t, ExitConforms)
	check()
}

func TestTheDisksOfAnInstanceCountAgainstTheBudget(t *testing.T) {
	for name, test := range map[string]struct {
		limit amount
		sent  bool
	}{"enough": {amount{3, 4}, true}, "too few": {amount{2, 4}, false}, "too small": {amount{3, 3},
		false}} {
		answered := false
		b := budgeted{budget: newBudget(test.limit), next: roundTrip(
			func(*http.Request) (*http.Response, error) {
				answered = true
				return &http.Response{StatusCode: http.StatusCreated, Body: http.NoBody}, nil
			})}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
			"https://rack/v1/instances?project=p", strings.NewReader(`{"name":"i","size":1,
			"boot_disk":{"type":"create","name":"b","size":2147483648},"disks":[
			{"type":"create","name":"c","size":1073741824},{"type":"attach","name":"d"},
			{"type":"create","name":"e","size":1073741824}]}`)) // without a run no mark is demanded
		csitest.Must(t, err)
		answer, err := b.RoundTrip(req)
		if answer != nil {
			_ = answer.Body.Close() // it is empty
		}
		if answered != test.sent || errors.Is(err, rules.ErrNotSent) == test.sent {
			t.Errorf("%s: sent: %v, error %v", name, answered, err)
		}
		if !test.sent {
			continue
		}
		if now := b.budget.now(); now != (amount{3, 4}) {
			t.Errorf("%s: the budget has %s", name, now)
		}
		b.budget.deleted("b")
		if now := b.budget.now(); now != (amount{2, 2}) {
			t.Errorf("%s: without the boot disk the budget has %s", name, now)
		}
	}
}

// roundTrip is a transport that calls a function.
type roundTrip func(*http.Request) (*http.Response, error)

// RoundTrip calls the function.
func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func TestAPreflightRefusesASiloWithoutRoomForTheRules(t *testing.T) {
	run := plainRun(t)
	for gib, want := range map[int64]int{14: ExitUsage, 15: ExitConforms} {
		rack := rackOf(t, run, harness.RackOptions{QuotaBytes: gib*harness.GiB + 1<<20})
		p := prepare(t, run, rack, nil, "preflight", "--only", partRules)
		p.exit(t, want)
		if !strings.Contains(p.out.String(), "the run has at most 15 GiB at one time") {
			t.Errorf("with %d GiB: %s", gib, p.out.String())
		}
	}
}

func TestADeletedObjectLeavesTheBudget(t *testing.T) {
	const id = "9a1c43ee-2c7c-4a4b-8d4d-6f6f1c3d2b10"
	for name, test := range map[string]struct {
		path   string
		status int
		// early means that the deletion ends before the creation is answered. unmade means that the
		// creation is refused.
		early, unmade bool
		left          int
	}{
		"by its ID":                    {path: id, status: http.StatusNoContent},
		"by its name":                  {path: "made", status: http.StatusNoContent},
		"again, after a lost answer":   {path: id, status: http.StatusNotFound},
		"by its ID, before the answer": {path: id, status: http.StatusNoContent, early: true},
		"by its name, before the answer": {path: "made", status: http.StatusNoContent,
			early: true},
		"never made":    {path: "other", status: http.StatusNotFound, unmade: true},
		"another one":   {path: "other", status: http.StatusNoContent, left: 1},
		"refused":       {path: id, status: http.StatusBadRequest, left: 1},
		"a busy rack's": {path: id, status: http.StatusServiceUnavailable, left: 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := budgeted{budget: newBudget(amount{1, 1})}
			send := func(method, path, body string) {
				t.Helper()
				req, err := http.NewRequestWithContext(t.Context(), method, "https://rack/v1"+path,
					strings.NewReader(body))
				csitest.Must(t, err)
				answer, err := b.RoundTrip(req)
				csitest.Must(t, err)
				_ = answer.Body.Close()
			}
			remove := func() { send(http.MethodDelete, "/snapshots/"+test.path, "") }
			b.next = roundTrip(func(req *http.Request) (*http.Response, error) {
				if req.Method == http.MethodDelete {
					return &http.Response{StatusCode: test.status, Body: http.NoBody}, nil
				}
				if test.early {
					remove()
				}
				if test.unmade {
					return &http.Response{StatusCode: http.StatusBadRequest, Body: http.NoBody}, nil
				}
				return &http.Response{StatusCode: http.StatusCreated,
					Body: io.NopCloser(strings.NewReader(`{"id":"` + id + `"}`))}, nil
			})
			send(http.MethodPost, "/snapshots", `{"name":"made"}`)
			if !test.early {
				remove()
			}
			if now := b.budget.now().objects; now != test.left {
				t.Errorf("the budget has %d objects, not %d", now, test.left)
			}
		})
	}
}

func TestARunSaysHowARackTreatsTheDisksOfRunningInstances(t *testing.T) {
	short.Skip(t, 3)
	t.Parallel()
	fails := adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{Fails: true}}
	for name, test := range map[string]struct {
		hotplug adminapi.Hotplug
		fault   *adminapi.Fault
		exit    int
		want    report.HotPlug
		says    []string
	}{
		"attach only, refusals as 500": {adminapi.HotplugAttachOnly.With(adminapi.RefusalsAs500), nil,
			ExitFails, report.HotPlugAttachOnly, []string{
				"attach only; a running instance gains a disk, and keeps it until it is stopped",
				"cannot detach disk: instance is not fully stopped (request ",
				"a refused attach is a 500 without a reason"}},
		"a record without a device": {adminapi.HotplugFull.With(adminapi.RecordFirst), &fails,
			ExitFails, report.HotPlugUnknown, []string{"an attach that failed stays recorded: the disk",
				"the answer was HTTP 500 Internal: Internal Server Error (request "}},
		"removal by surprise, refusals as 500": {
			adminapi.HotplugFull.With(adminapi.SurpriseRemoval, adminapi.RefusalsAs500), nil,
			ExitFails, report.HotPlugYes, []string{"a refused attach is a 500 without a reason",
				"a detach takes a disk from a program that has it open", "which took "}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := plainRun(t)
			rack := rackOf(t, run, harness.RackOptions{Hotplug: test.hotplug})
			if test.fault != nil {
				if _, err := rack.Admin.AddFault(t.Context(), *test.fault); err != nil {
					t.Fatal(err)
				}
			}
			p := prepare(t, run, rack, nil, "run", "--yes", "--only", partRules)
			p.exit(t, test.exit)
			r := p.report(t)
			if r.Rack.HotPlug != test.want {
				t.Errorf("hot-plug is %q, want %q", r.Rack.HotPlug, test.want)
			}
			for _, says := range test.says {
				if !strings.Contains(p.out.String(), says) {
					t.Errorf("the output lacks %q:\n%s", says, p.out.String())
				}
			}
			if strings.Contains(p.out.String(), "which took 0.0") {
				t.Errorf("a removal by surprise took no time:\n%s", p.out.String())
			}
		})
	}
}

// shortLived is a device that can be read a few times before it has no bytes any more.
type shortLived struct{ reads int }

func (d *shortLived) ReadAt(p []byte, _ int64) (int, error) {
	if d.reads--; d.reads < 0 {
		return 0, io.EOF
	}
	return len(p), nil
}

func TestADeviceThatWasReadToItsEndIsNotGone(t *testing.T) {
	for reads, want := range map[int]bool{1: true, 2: false} {
		last, gone := readUntilGone(&shortLived{reads}, harness.MiB/2, time.Now())
		if gone != want || last == 0 {
			t.Errorf("after %d of 2 reads: gone is %t after %s, want %t", reads, gone, last, want)
		}
	}
}
