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

func TestARackWithHotPlugConformsAndOneWithoutIsBlocked(t *testing.T) {
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
			p.exit(t, test.exit)
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
			if most := needOf(partNames); peak.objects == 0 || peak.objects > most.objects ||
				peak.gib > most.gib {
				t.Errorf("the run had %s at one time; a preflight says %s", peak, most)
			}
			check()
			prepare(t, rack, nil, "diff", p.folder, p.folder).exit(t, ExitConforms)
		})
	}
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
	var none adminapi.Fault
	fails := adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{Fails: true}}
	const fail, usage, unknown = ExitFails, ExitUsage, report.HotPlugUnknown
	for name, test := range map[string]struct {
		hotplug adminapi.Hotplug
		fault   adminapi.Fault
		mutant  string
		exit    int
		want    report.HotPlug
		says    []string
	}{
		"not even when it is stopped": {"", refused("instance is not fully stopped"), "", fail, unknown,
			[]string{"does not attach a disk to this running instance, and not to a stopped"}},
		"never": {"", refused("no"), "", fail, unknown, []string{"found HTTP 400 InvalidRequest"}},
		"at the second try": {"", once, "", fail, unknown,
			[]string{"instance only when it was asked again"}},
		"without a device": {"", none, "A54-serial-of-id", fail, report.HotPlugYes,
			[]string{"a device with the serial"}},
		"until the token expires": {"", expired, "", usage, report.HotPlugYes,
			[]string{"INCOMPLETE", "the rack does not know the token any more"}},
		"attach only, refusals as 500": {adminapi.HotplugAttachOnly.With(adminapi.RefusalsAs500),
			none, "", fail, report.HotPlugAttachOnly, []string{
				"attach only; a running instance gains a disk, and keeps it until it is stopped",
				"cannot detach disk: instance is not fully stopped (request ",
				"a refused attach is a 500 without a reason"}},
		"a record without a device": {adminapi.HotplugFull.With(adminapi.RecordFirst), fails, "", fail,
			unknown, []string{"an attach that failed stays recorded: the disk",
				"the answer was HTTP 500 Internal: Internal Server Error (request "}},
		"removal by surprise, refusals as 500": {
			adminapi.HotplugFull.With(adminapi.SurpriseRemoval, adminapi.RefusalsAs500), none, "",
			fail, report.HotPlugYes, []string{"a refused attach is a 500 without a reason",
				"a detach takes a disk from a program that has it open", "which took "}},
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
			p.exit(t, test.exit)
			r := p.report(t)
			if r.Rack.HotPlug != test.want ||
				test.exit == usage && (r.Count(report.Passed) == 0 || r.Count(report.Failed) > 0) {
				t.Errorf("hot-plug is %q, want %q; %s", r.Rack.HotPlug, test.want, r.Promises())
			}
			for _, says := range test.says {
				if !strings.Contains(p.out.String(), says) {
					t.Errorf("the output lacks %q:\n%s", says, p.out.String())
				}
			}
			if strings.Contains(p.out.String(), "which took 0.0") {
				t.Errorf("a removal by surprise took no time:\n%s", p.out.String())
			}
			csitest.Must(t, rack.Admin.ClearFaults(t.Context()))
			if test.exit == usage {
				prepare(t, rack, nil, "clean", "--yes").exit(t, ExitConforms)
			}
			if test.hotplug == "" {
				check()
			}
		})
	}
}

// shortLived is a device whose reads succeed a few times and then return EOF.
type shortLived struct{ reads int }

func (d *shortLived) ReadAt(p []byte, _ int64) (int, error) {
	if d.reads--; d.reads < 0 {
		return 0, io.EOF
	}
	return len(p), nil
}

func TestADeviceThatWasReadToItsEndIsNotCountedAsGone(t *testing.T) {
	for reads, want := range map[int]bool{1: true, 2: false} {
		last, gone := readUntilGone(&shortLived{reads}, harness.MiB/2, time.Now())
		if gone != want || last == 0 {
			t.Errorf("after %d of 2 reads: gone is %t after %s, want %t", reads, gone, last, want)
		}
	}
}

type answering func(*http.Request) (status int, body string)

func (a answering) RoundTrip(req *http.Request) (*http.Response, error) {
	status, body := a(req)
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body))}, nil
}

// send sends a request through the budget, and reports whether the budget let it pass.
func (b budgeted) send(t *testing.T, method, path, body string) bool {
	t.Helper()
	answer, err := b.RoundTrip(csitest.Got(http.NewRequestWithContext(t.Context(), method,
		"https://rack/v1/"+path, strings.NewReader(body)))(t))
	if err != nil && !errors.Is(err, rules.ErrNotSent) {
		t.Fatal(err)
	}
	if err == nil {
		_ = answer.Body.Close()
	}
	return err == nil
}

func TestTheDisksOfAnInstanceCountAgainstTheBudget(t *testing.T) {
	for limit, want := range map[amount]bool{{3, 4}: true, {2, 4}: false, {3, 3}: false} {
		b := budgeted{budget: newBudget(limit), next: answering(
			func(*http.Request) (int, string) { return http.StatusCreated, "" })}
		sent := b.send(t, http.MethodPost, "instances?project=p", `{"name":"i","size":1,
			"boot_disk":{"type":"create","name":"b","size":2147483648},"disks":[
			{"type":"create","name":"c","size":1073741824},{"type":"attach","name":"d"},
			{"type":"create","name":"e","size":1073741824}]}`) // without a run no mark is demanded
		if now, _ := b.budget.held(); sent != want || sent && now != limit {
			t.Errorf("%s: sent: %v, the budget has %s", limit, sent, now)
		}
		b.budget.deleted("b")
		if now, _ := b.budget.held(); sent && now != (amount{2, 2}) {
			t.Errorf("without the boot disk the budget has %s", now)
		}
	}
}

func TestDeletionReleasesRoomInTheBudget(t *testing.T) {
	const id = "9a1c43ee-2c7c-4a4b-8d4d-6f6f1c3d2b10"
	for name, test := range map[string]struct {
		path   string
		status int
		// created is the status that answers the creation. If early is set, the deletion ends first.
		created int
		early   bool
		left    int
	}{
		"by its ID":                      {id, 204, 201, false, 0},
		"by its name":                    {"made", 204, 201, false, 0},
		"again, after a lost answer":     {id, 404, 201, false, 0},
		"by its ID, before the answer":   {id, 204, 201, true, 0},
		"by its name, before the answer": {"made", 204, 201, true, 0},
		"never made":                     {"other", 404, 400, false, 0},
		"another one":                    {"other", 204, 201, false, 1},
		"refused":                        {id, 400, 201, false, 1},
		"a busy rack's":                  {id, 503, 201, false, 1},
	} {
		b := budgeted{budget: newBudget(amount{1, 1})}
		b.next = answering(func(req *http.Request) (int, string) {
			if req.Method == http.MethodDelete {
				return test.status, ""
			}
			if test.early {
				b.send(t, http.MethodDelete, "snapshots/"+test.path, "")
			}
			return test.created, `{"id":"` + id + `"}`
		})
		b.send(t, http.MethodPost, "snapshots", `{"name":"made"}`)
		if !test.early {
			b.send(t, http.MethodDelete, "snapshots/"+test.path, "")
		}
		if now, _ := b.budget.held(); now.objects != test.left {
			t.Errorf("%s: the budget has %s, not %d objects", name, now, test.left)
		}
	}
}

func TestNothingIsCreatedWithoutTheMarkOfTheRun(t *testing.T) {
	const ours, others = "1a2b3c4d", "5e6f7a8b"
	text := func(run string) string { return fmt.Sprintf("%q", mark{Run: run}.description()) }
	for path, test := range map[string]string{
		"disks":     `{"name":"d","description":%s,"size":-1}`,
		"snapshots": `{"name":"d","description":%s}`,
		"images":    `{"name":"d","description":%s,"os":1} and more`,
		"instances": `{"name":"d","description":%s,"disks":[{"type":"create","name":"x",` +
			`"description":` + text(ours) + `}]}`,
		"instances?with=disk": `{"name":"d","description":` + text(ours) + `,"disks":[{"type":"create",` +
			`"name":"x","description":%s}]}`,
	} {
		for description, want := range map[string]bool{text(ours): true, text(others): false,
			`"made by hand"`: false, `null`: false,
			strings.Replace(text(ours), "}", `,\"pad\":\"ééé\"}`, 1): true,
			strings.Replace(text(ours), "}", "}ééé", 1):              false} {
			b := budgeted{budget: newBudget(amount{9, 9}), run: ours, next: answering(
				func(*http.Request) (int, string) { return http.StatusBadRequest, "" })}
			sent := b.send(t, http.MethodPost, path, fmt.Sprintf(test, description))
			if sent != want {
				t.Errorf("%s with the description %s: sent: %t", path, description, sent)
			}
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
