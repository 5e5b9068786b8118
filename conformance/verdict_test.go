//go:build linux

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestVerdictFollowsFromTheResults(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	const conforms, incomplete, fails = report.Conforms, report.Incomplete, report.DoesNotConform
	statuses := map[rune]report.Status{'p': report.Passed, 'f': report.Failed, 'b': report.Blocked,
		'n': report.NotTested, 'a': report.NotApplicable, 'i': report.Interrupted}
	for name, test := range map[string]struct {
		// results has the initials of the results' statuses. but has words for other events of the run.
		results, but string
		verdict      report.Verdict
		status       int
		says         string
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
		"an interrupted run": {"pi", "over", report.InterruptedRun, ExitInterrupted,
			"interrupted"},
		"interrupted, and something was left": {"p", "over left", report.InterruptedRun,
			ExitInterrupted, ""},
		"interrupted after a failure": {"f", "over", fails, ExitInterrupted, "D0"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, r := t.Context(), &report.Report{Schema: report.SchemaVersion,
				Rack: report.RackFacts{HotPlug: report.HotPlugUnknown}}
			w := &job{report: r}
			for i, letter := range test.results {
				result := report.Result{Group: partData, ID: fmt.Sprint("D", i), Status: statuses[letter],
					Reason: "why"}
				if letter == 'p' {
					result.Reason, result.Extent = "", report.Extent{{What: "ping", Looked: 1}}
				}
				r.Results = append(r.Results, result)
			}
			for but := range strings.FieldsSeq(test.but) {
				switch but {
				case "over":
					ctx = over
				case "left":
					r.Ledger.Left = []string{"disk x"}
				case "witness":
					r.Witness.Findings = []string{"no"}
				case "stopped":
					w.stopped = errors.New("no space")
				case "selected":
					r.Run.Selected = []string{partData, "xfs"}
				}
			}
			status := w.judge(ctx)
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
		got := w.checkData(t.Context(), &data.Bench{}, data.Check{ID: "D14", GiB: gib})
		if got.Status != report.NotTested || !strings.Contains(got.Reason, want) {
			t.Errorf("%s: %s", got.Status, got.Reason)
		}
	}
	if gib := w.room(t.Context()); gib != 12 {
		t.Errorf("there is room for %d GiB, not for 12", gib)
	}
	if all, least := needOf(partNames), leastOf(partNames); least.gib >= all.gib {
		t.Errorf("a run needs at least %s, and has %s", least, all)
	}
}

func TestSpecPassesOnlyIfItCallsTheRPCInItsName(t *testing.T) {
	const (
		passed, failed, panicked = types.SpecStatePassed, types.SpecStateFailed, types.SpecStatePanicked
		timedout, skipped        = types.SpecStateTimedout, types.SpecStateSkipped
		interrupted              = types.SpecStateInterrupted
	)
	spec := func(state types.SpecState, text, message string) types.SpecReport {
		return types.SpecReport{LeafNodeType: types.NodeTypeIt, LeafNodeText: text, State: state,
			ContainerHierarchyTexts: []string{"ext4"}, Failure: types.Failure{Message: message}}
	}
	const create, needsAttach = "CreateVolume", "Node Service should work"
	const expand = "ExpandVolume [Controller Server] should work"
	called := []rpc{{name: "CreateVolume"}}
	for name, test := range map[string]struct {
		spec    types.SpecReport
		calls   []rpc
		hotplug bool
		want    report.Status
	}{
		"passed":                {spec(passed, create, ""), called, true, report.Passed},
		"passed without a call": {spec(passed, create, ""), nil, true, report.Failed},
		"passed with another call": {spec(passed, create, ""), []rpc{{name: "Probe"}}, true,
			report.Failed},
		"passed with a call of a longer name": {spec(passed, "PublishVolume NodePublishVolume", ""),
			[]rpc{{name: "ControllerPublishVolume"}}, true, report.Failed},
		"passed, and names no call": {spec(passed, needsAttach, ""), called, true, report.Passed},
		"failed":                    {spec(failed, create, "no"), called, true, report.Failed},
		"panicked":                  {spec(panicked, create, "no"), called, true, report.Failed},
		"timed out":                 {spec(timedout, create, "no"), called, true, report.Failed},
		"interrupted":               {spec(interrupted, create, "no"), called, true, report.Interrupted},
		"not reached":               {spec(skipped, create, ""), nil, true, report.Interrupted},
		"skipped by its author":     {spec(skipped, create, "not today"), nil, true, report.Failed},
		"a feature that the driver does not offer": {spec(skipped, expand, "no"), nil, true,
			report.NotApplicable},
		"left out without hot-plug": {spec(skipped, needsAttach, ""), nil, false, report.Blocked},
		"left out despite hot-plug": {spec(skipped, needsAttach, ""), nil, true,
			report.Interrupted},
	} {
		got := resultOf("ext4", test.spec, test.calls, test.hotplug)
		if got.Status != test.want || (got.Reason == "") != (got.Status == report.Passed) {
			t.Errorf("%s: %s, %q; want %s", name, got.Status, got.Reason, test.want)
		}
	}
}

func TestWitnessFindsAnAnswerThatTheRackDidNotGive(t *testing.T) {
	log := []adminapi.Request{{RequestID: "1", Operation: "disk_view", Status: 200},
		{RequestID: "2", Status: 400}}
	for name, test := range map[string]struct {
		seen rules.RecordedCall
		says string
	}{
		"the rack's own": {rules.RecordedCall{RequestID: "1", Operation: "disk_view", Status: 200}, ""},
		"the rack's refusal before it knew the operation": {rules.RecordedCall{RequestID: "2",
			Operation: "disk_view", Status: 400}, ""},
		"no answer":      {rules.RecordedCall{Operation: "disk_view"}, ""},
		"not the rack's": {rules.RecordedCall{RequestID: "3", Status: 200}, "did not give"},
		"a proxy's":      {rules.RecordedCall{Status: 429}, ""},
		"another operation": {rules.RecordedCall{RequestID: "1", Operation: "disk_delete",
			Status: 200}, "disk_delete"},
		"another status": {rules.RecordedCall{RequestID: "1", Operation: "disk_view",
			Status: 404}, "HTTP 404"},
	} {
		found := strings.Join(unknownTo(log, []rules.RecordedCall{test.seen}), "\n")
		if (found == "") != (test.says == "") || !strings.Contains(found, test.says) {
			t.Errorf("%s: found %q, want %q", name, found, test.says)
		}
	}
}

func TestWitnessFindsASuccessfulCallWithoutARequest(t *testing.T) {
	began := time.Now()
	at := func(name, object string, code codes.Code) rpc {
		return rpc{name: name, object: object, code: code, began: began, took: time.Second}
	}
	// Requests of the run before and after the call show the order. The clocks may differ.
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

func TestDataCheckNamesTheCallsThatItDidNotMake(t *testing.T) {
	check := data.Check{Calls: []string{"CreateVolume", "disk_create"}}
	for made, want := range map[string]string{"Probe": "CreateVolume", "CreateVolume": ""} {
		if missing := notMade(check, []rpc{{name: made}}); strings.Join(missing, " ") != want {
			t.Errorf("with a call of %s: not made: %q", made, missing)
		}
	}
}

func TestRunPrintsThePathOfItsReport(t *testing.T) {
	// A run that begins in the temporary directory has its report next to its work directory.
	t.Chdir(t.TempDir())
	here := csitest.Got(os.Getwd())(t)
	for name, test := range map[string]struct {
		folder string
		damage func(w *job)
		status int
		says   string
	}{
		"next to the run's directory": {"", func(*job) {}, ExitConforms, ""},
		"in a folder that cannot be written": {"gone", func(w *job) {
			csitest.Must(t, os.WriteFile(w.folder(), nil, 0o600))
		}, ExitUsage, "folder of the report"},
		"a report that does not add up": {"odd", func(w *job) {
			w.report.Results = append(w.report.Results, w.report.Results[0])
		}, ExitUsage, "add up"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			w := &job{Program: &Program{Stdout: &out}, settings: &settings{report: test.folder},
				id: newRunID(), budget: newBudget(amount{1, 1}),
				report: &report.Report{Schema: report.SchemaVersion, Results: []report.Result{{
					Group: partRules, ID: "A01", Name: "x", Status: report.Passed, Tries: 1,
					Extent: report.Extent{{What: "ping", Looked: 1}}}},
					Rack: report.RackFacts{HotPlug: report.HotPlugUnknown}}}
			w.report.Run.ID = w.id
			w.dir = &harness.Run{Dir: filepath.Join(here, workDir(w.id)), Progress: &out}
			csitest.Must(t, os.Mkdir(w.dir.Dir, 0o700))
			csitest.Must(t, w.tryFolder())
			test.damage(w)
			status, err := w.finish(t.Context())
			if status != test.status || (err != nil) != (test.says != "") ||
				err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("ended with %d, %v", status, err)
			}
			_, line, _ := strings.Cut(out.String(), "The report: ")
			page, _, _ := strings.Cut(line, "\n")
			text, err := os.ReadFile(page)
			if err != nil || !strings.Contains(string(text), w.id) {
				t.Errorf("it says that its report is %s: %v", page, err)
			}
		})
	}
}

func TestWriteReportReplacesNoFile(t *testing.T) {
	there := func(path string) error { return os.Mkdir(path, 0o700) }
	for name, create := range map[string]func(path string) error{
		"a folder": there,
		"a site": func(path string) error {
			return errors.Join(there(path), os.WriteFile(filepath.Join(path, "index.html"), nil, 0o600))
		},
		"a file":            func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"a FIFO":            func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a link to nothing": func(path string) error { return os.Symlink(path+"-target", path) },
	} {
		w := &job{settings: &settings{report: filepath.Join(t.TempDir(), "report")},
			report: &report.Report{}}
		csitest.Must(t, w.tryFolder())
		csitest.Must(t, create(w.folder()))
		if err := w.tryFolder(); err == nil || !strings.Contains(err.Error(), "--report") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := w.writeReport(); !errors.Is(err, report.ErrNotWritten) {
			t.Errorf("%s at the end of a run: %v", name, err)
		}
		if made, err := filepath.Glob(filepath.Join(filepath.Dir(w.folder()), "*", "*")); err != nil ||
			len(made) > 1 {
			t.Errorf("%s: there are %q, %v", name, made, err)
		}
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

func TestRunSucceedsIfItsWorkingDirectoryIsRemoved(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{})
	check := balance(t, rack)
	p := prepare(t, rack, asOthersHave(rack))
	p.Dir = filepath.Join(t.TempDir(), "here")
	csitest.Must(t, os.Mkdir(p.Dir, 0o700))
	c := begin(t, rack, p, death{how: killedLater, part: "ext4", at: 2})
	<-c.made // its first disk
	csitest.Must(t, os.Remove(p.Dir))
	if <-c.ended; c.exit != nil {
		t.Error(c.exit)
	}
	check()
}
