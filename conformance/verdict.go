package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// judge sets the verdict and returns the exit status. Failures decide first, then the reasons that
// stopped the run, and then the parts that the rack blocked. A run in which nothing passed never
// conforms.
func (w *job) judge(ctx context.Context) int {
	r := w.report
	failed, passed := r.Count(report.Failed), r.Count(report.Passed)
	if err := w.lost(); err != nil {
		w.stopped = errors.Join(err, w.stopped)
	}
	if ctx.Err() != nil {
		r.Ledger.Left = nil // there was no time to delete the objects
	}
	notRun := slices.DeleteFunc(slices.Clone(r.Run.Selected), func(part string) bool {
		return slices.ContainsFunc(r.Results, func(result report.Result) bool {
			return result.Group == part
		})
	})
	end := func(status int, verdict report.Verdict, why string, args ...any) int {
		r.Verdict, r.Why = verdict, fmt.Sprintf(why, args...)
		return status
	}
	switch wrong := failed + len(r.Ledger.Left) + len(r.Witness.Findings); {
	case ctx.Err() != nil && failed == 0 && w.stopped != nil:
		return end(ExitInterrupted, report.InterruptedRun, "interrupted after %d results, and: %s",
			len(r.Results), oneLine(w.stopped.Error()))
	case ctx.Err() != nil && failed == 0:
		return end(ExitInterrupted, report.InterruptedRun, "interrupted after %d results; what the "+
			"run had made was removed", len(r.Results))
	case ctx.Err() != nil:
		return end(ExitInterrupted, report.DoesNotConform, "%s", whatIsWrong(r, w.stopped))
	case wrong > 0:
		return end(ExitFails, report.DoesNotConform, "%s", whatIsWrong(r, w.stopped))
	case w.stopped != nil:
		return end(ExitUsage, report.Incomplete, "%s", oneLine(w.stopped.Error()))
	case passed == 0:
		return end(ExitUsage, report.Incomplete, "nothing was passed, so nothing is shown")
	case r.Count(report.Interrupted) > 0 || len(notRun) > 0:
		return end(ExitUsage, report.Incomplete, "%d results were interrupted; without any result: %s",
			r.Count(report.Interrupted), cmp.Or(strings.Join(notRun, ", "), "no part"))
	case r.Count(report.Blocked) > 0:
		return end(ExitBlocked, report.BlockedByRack, "the rack attaches or detaches disks of stopped "+
			"instances only: %d of %d could not be run; the %d that could have passed",
			r.Count(report.Blocked), len(r.Results)-r.Count(report.NotApplicable), passed)
	}
	r.Verdict, r.Why = report.Conforms, fmt.Sprintf("all %d passed", passed)
	if n := r.Count(report.NotTested); n > 0 {
		r.Why += fmt.Sprintf("; %d more could not be brought about here, and say why", n)
	}
	return ExitConforms
}

func whatIsWrong(r *report.Report, stopped error) string {
	var names, parts []string
	for _, result := range r.Results {
		if result.Status == report.Failed {
			names = append(names, cmp.Or(result.ID, result.Group+" "+result.Name))
		}
	}
	if failed := len(names); failed > 0 {
		if failed > 3 {
			names = append(names[:3], "…")
		}
		parts = append(parts, fmt.Sprintf("%d of %d failed: %s", failed, len(r.Results),
			strings.Join(names, ", ")))
	}
	if n := len(r.Ledger.Left); n > 0 {
		parts = append(parts, fmt.Sprintf("%d objects were left behind", n))
	}
	if n := len(r.Witness.Findings); n > 0 {
		parts = append(parts, fmt.Sprintf("the witness contradicts %d times", n))
	}
	if stopped != nil {
		parts = append(parts, oneLine(stopped.Error()))
	}
	return strings.Join(parts, "; ")
}

func oneLine(text string) string {
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' })
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(line), " ")
	}
	return strings.Join(lines, "; ")
}

func (w *job) note(exchanges []rules.RecordedCall) {
	w.exchanges = append(w.exchanges, exchanges...)
}

// leaves lists operations of the rack's API for each RPC. A successful call sends at least one of
// them: the change, or a read which shows that the change was made before.
var leaves = map[string][]string{
	"CreateVolume":              {"disk_create"},
	"DeleteVolume":              {"disk_view", "disk_delete"},
	"ControllerPublishVolume":   {"instance_disk_attach", "instance_disk_list", "disk_view"},
	"ControllerUnpublishVolume": {"instance_disk_detach", "disk_view"},
	"CreateSnapshot":            {"snapshot_create"},
	"DeleteSnapshot":            {"snapshot_view", "snapshot_delete"},
	"ListVolumes":               {"disk_list"},
	"ListSnapshots":             {"snapshot_list", "snapshot_view"},
	"GetCapacity":               {"utilization_view", "silo_quotas_view"},
}

// testify compares the calls of the run with the request log of a simulated rack. The log of a real
// rack cannot be read: there the witness is the program's own record, with which each result was
// compared when its check ended.
func (w *job) testify(ctx context.Context) {
	witness := &w.report.Witness
	if witness.Source = "this program's own record"; w.admin == nil {
		return
	}
	if err := w.lost(); err != nil {
		witness.Source = "none: " + err.Error()
		return
	}
	witness.Source = "the rack's request log"
	log, err := w.admin.Requests(ctx, 0)
	if err != nil {
		witness.Findings = append(witness.Findings,
			fmt.Sprintf("the rack's request log cannot be read: %s", err))
		return
	}
	witness.Findings = append(witness.Findings,
		slices.Concat(unknownTo(log, w.exchanges), unheard(log, w.exchanges, w.calls.since(0)))...)
}

func unknownTo(log []adminapi.Request, exchanges []rules.RecordedCall) (findings []string) {
	known := map[string]adminapi.Request{}
	for _, entry := range log {
		known[entry.RequestID] = entry
	}
	for _, e := range exchanges {
		if e.Status == 0 || e.RequestID == "" {
			continue // no answer, or the answer of a proxy, or a proxy removed the ID
		}
		entry, is := known[e.RequestID]
		switch {
		case !is:
			findings = append(findings, fmt.Sprintf("the run has an answer to %s %s (request %q) that "+
				"the rack did not give", e.Method, e.Path, e.RequestID))
		case entry.Status != e.Status, entry.Operation != e.Operation &&
			entry.Operation != "" && e.Operation != "": // the entry of a refusal may have none
			findings = append(findings, fmt.Sprintf("request %s: the run has seen %s with HTTP %d, the "+
				"rack says %s with HTTP %d", e.RequestID, e.Operation, e.Status, entry.Operation,
				entry.Status))
		}
	}
	return findings
}

// unheard lists the driver's successful calls without a request in the rack's log. The rack's clock
// may differ, so positions in the log decide: the request must come after those of calls that ended
// before this call began, and before those of calls that began after it ended.
func unheard(log []adminapi.Request, exchanges []rules.RecordedCall, calls []rpc) (
	findings []string) {
	place := map[string]int{}
	for i, entry := range log {
		place[entry.RequestID] = i
	}
	type known struct {
		began, ended time.Time
		place        int // in the log
	}
	var all []known
	for _, e := range exchanges {
		if i, is := place[e.RequestID]; is {
			all = append(all, known{e.Began, e.Began.Add(e.Took), i})
		}
	}
	slices.SortStableFunc(calls, func(a, b rpc) int { return a.began.Compare(b.began) })
	for _, call := range calls {
		operations := leaves[call.name]
		isID := call.object == "" || isUUID(call.object) // other IDs need no request
		if call.code != codes.OK || operations == nil || !isID {
			continue
		}
		first, end, ended := 0, len(log), call.began.Add(call.took)
		for _, k := range all {
			if k.ended.Before(call.began) {
				first = max(first, k.place+1)
			} else if k.began.After(ended) {
				end = min(end, k.place)
			}
		}
		first = min(first, end)
		i := slices.IndexFunc(log[first:end], func(entry adminapi.Request) bool {
			return slices.Contains(operations, entry.Operation)
		})
		if i >= 0 {
			all = append(all, known{call.began, ended, first + i})
		} else {
			findings = append(findings, fmt.Sprintf("%s of %q at %s succeeded, and the rack heard none "+
				"of %v", call.name, call.object, call.began.UTC().Format(time.StampMilli), operations))
		}
	}
	return findings
}

func (w *job) latencies() []report.Calls {
	type key struct {
		kind report.Kind
		name string
	}
	times, failed := map[key][]float64{}, map[key]int{}
	add := func(kind report.Kind, name string, took time.Duration, failure bool) {
		k := key{kind, name}
		times[k] = append(times[k], milliseconds(took))
		if failure {
			failed[k]++
		}
	}
	for _, e := range w.exchanges {
		add(report.API, e.Operation, e.Took, e.Status == 0 || e.Status >= 400)
	}
	for _, c := range w.calls.since(0) {
		add(report.RPC, c.name, c.took, c.code != codes.OK)
	}
	delete(times, key{report.API, ""}) // of an unknown path
	var all []report.Calls
	for k, samples := range times {
		all = append(all, report.NewCalls(k.kind, k.name, failed[k], samples))
	}
	return all
}
