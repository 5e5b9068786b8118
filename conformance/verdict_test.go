//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestTheVerdictFollowsFromWhatRan(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	const conforms, incomplete, fails = report.Conforms, report.Incomplete, report.DoesNotConform
	statuses := map[rune]report.Status{'p': report.Passed, 'f': report.Failed, 'b': report.Blocked,
		'n': report.NotTested, 'a': report.NotApplicable, 'i': report.Interrupted}
	for name, test := range map[string]struct {
		// results has a letter for each result. but says what happened apart from them.
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

func TestACheckWithoutRoomIsNotTested(t *testing.T) {
	rack := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"capacity":{"storage":21474836480},"provisioned":{"storage":0}}`))
	}))
	defer rack.Close()
	client, err := oxide.NewClient(oxide.WithHost(rack.URL), oxide.WithToken("x"))
	csitest.Must(t, err)
	w := &job{operator: operator{client: client}, budget: newBudget(amount{9, 12})}
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

func TestNothingThatDidNotRunCountsAsPassed(t *testing.T) {
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
		"failed":                {spec(failed, create, "no"), called, true, report.Failed},
		"panicked":              {spec(panicked, create, "no"), called, true, report.Failed},
		"timed out":             {spec(timedout, create, "no"), called, true, report.Failed},
		"interrupted":           {spec(interrupted, create, "no"), called, true, report.Interrupted},
		"not reached":           {spec(skipped, create, ""), nil, true, report.Interrupted},
		"skipped by itself":     {spec(skipped, create, "not today"), nil, true, report.Failed},
		"a feature that the driver does not offer": {spec(skipped, expand, "no"), nil, true,
			report.NotApplicable},
		"held back for want of hot-plug": {spec(skipped, needsAttach, ""), nil, false,
			report.Blocked},
		"the same on a rack with hot-plug": {spec(skipped, needsAttach, ""), nil, true,
			report.Interrupted},
	} {
		got := resultOf("ext4", test.spec, test.calls, test.hotplug)
		if got.Status != test.want ||
			(got.Reason == "") != (got.Status == report.Passed) {
			t.Errorf("%s: %s, %q; want %s", name, got.Status, got.Reason, test.want)
		}
	}
}

func TestTheWitnessFindsAnAnswerThatTheRackDidNotGive(t *testing.T) {
	log := []adminapi.Request{{RequestID: "1", Operation: "disk_view", Status: 200},
		{RequestID: "2", Status: 400}}
	for name, test := range map[string]struct {
		seen rules.RecordedCall
		says string
	}{
		"the rack gave it": {rules.RecordedCall{RequestID: "1", Operation: "disk_view", Status: 200}, ""},
		"the rack refused it before it knew what it was": {rules.RecordedCall{RequestID: "2",
			Operation: "disk_view", Status: 400}, ""},
		"no answer came":  {rules.RecordedCall{Operation: "disk_view"}, ""},
		"another gave it": {rules.RecordedCall{RequestID: "3", Status: 200}, "did not give"},
		"a proxy gave it": {rules.RecordedCall{Status: 429}, ""},
		"it was another one": {rules.RecordedCall{RequestID: "1", Operation: "disk_delete",
			Status: 200}, "disk_delete"},
		"it was another code": {rules.RecordedCall{RequestID: "1", Operation: "disk_view",
			Status: 404}, "HTTP 404"},
	} {
		found := strings.Join(unknownTo(log, []rules.RecordedCall{test.seen}), "\n")
		if (found == "") != (test.says == "") || !strings.Contains(found, test.says) {
			t.Errorf("%s: found %q, want %q", name, found, test.says)
		}
	}
}

func TestTheWitnessFindsACallThatSucceededWithoutTheRack(t *testing.T) {
	began := time.Now()
	at := func(name, object string, code codes.Code) rpc {
		return rpc{name: name, object: object, code: code, began: began, took: time.Second}
	}
	// The run's own requests show the order. The rack's clock is of another day.
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
		"it was heard":               {[]rpc{create}, "before disk_create after", 0},
		"another was heard":          {[]rpc{create}, "before disk_list after", 1},
		"it was heard before":        {[]rpc{create}, "disk_create before after", 1},
		"it was heard after":         {[]rpc{create}, "before after disk_create", 1},
		"two were heard":             {[]rpc{later, create}, "before disk_create disk_create after", 0},
		"one of two was heard":       {[]rpc{later, create}, "before disk_create after", 1},
		"two at a time, one request": {[]rpc{create, create}, "before disk_create after", 0},
		"it was refused":             {[]rpc{at("CreateVolume", "", codes.NotFound)}, "before after", 0},
		"it needs no rack":           {[]rpc{at("NodeGetInfo", "", codes.OK)}, "before after", 0},
		"no such object can be":      {[]rpc{at("DeleteVolume", "invalid", codes.OK)}, "before after", 0},
		"the object could be there":  {[]rpc{at("DeleteVolume", id, codes.OK)}, "before after", 1},
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

func TestASpecWithoutTheCallThatItIsAboutDoesNotPass(t *testing.T) {
	create, probe := rpc{name: "CreateVolume"}, rpc{name: "Probe"}
	for name, test := range map[string]struct {
		spec  string
		calls []rpc
		ok    bool
	}{
		"it called":     {"Controller Service CreateVolume should work", []rpc{create, probe}, true},
		"nothing":       {"Controller Service CreateVolume should work", nil, false},
		"another":       {"Controller Service CreateVolume should work", []rpc{probe}, false},
		"it names none": {"Node Service should work", []rpc{probe}, true},
		"a longer name's": {"ControllerPublishVolume should fail",
			[]rpc{{name: "NodePublishVolume"}}, false},
	} {
		if fault := aboutItself(test.spec, test.calls); (fault == "") != test.ok {
			t.Errorf("%s: %q", name, fault)
		}
	}
	check := data.Check{Calls: []string{"CreateVolume", "disk_create"}}
	if missing := notMade(check, []rpc{probe}); strings.Join(missing, " ") != "CreateVolume" {
		t.Errorf("not made: %q", missing)
	}
	if missing := notMade(check, []rpc{create}); missing != nil {
		t.Errorf("not made: %q", missing)
	}
}
