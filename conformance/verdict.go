package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// judge sets r.Verdict and r.Why and returns the exit status. The first case that applies decides.
// A run in which nothing passed never conforms.
func judge(ctx context.Context, r *report.Report, stopped error) int {
	failed, passed := r.Count(report.Failed), r.Count(report.Passed)
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
	case ctx.Err() != nil && failed == 0 && stopped != nil:
		return end(ExitInterrupted, report.InterruptedRun, "interrupted after %d results, and: %s",
			len(r.Results), oneLine(stopped.Error()))
	case ctx.Err() != nil && failed == 0:
		return end(ExitInterrupted, report.InterruptedRun, "interrupted after %d results; what the "+
			"run had made was removed", len(r.Results))
	case wrong > 0:
		return end(interruptedOr(ctx, ExitFails), report.DoesNotConform, "%s", whatIsWrong(r, stopped))
	case stopped != nil:
		return end(ExitUsage, report.Incomplete, "%s", oneLine(stopped.Error()))
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

// effects lists, for each RPC, operations of the rack's API. A successful call sends at least one
// of them. If the change was made before, the call may send only a read.
var effects = map[string][]string{
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

// testify compares the calls of the run with the request log of a simulated rack. A real rack's log
// cannot be read. For a real rack, the report names this program's own record as the source: each
// result was compared with that record when its check ended.
func (w *job) testify(ctx context.Context) {
	witness := &w.report.Witness
	if witness.Source = "this program's own record"; w.admin == nil {
		return
	}
	if err := w.contact.lost(); err != nil {
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
			continue // there is no answer, or a proxy answered or removed the ID
		}
		entry, is := known[e.RequestID]
		switch {
		case !is:
			findings = append(findings, fmt.Sprintf("the run has an answer to %s %s (request %q) that "+
				"the rack did not give", e.Method, e.Path, e.RequestID))
		case entry.Status != e.Status, entry.Operation != e.Operation &&
			entry.Operation != "" && e.Operation != "": // a refusal's entry may have no operation
			findings = append(findings, fmt.Sprintf("request %s: the run has seen %s with HTTP %d, the "+
				"rack says %s with HTTP %d", e.RequestID, e.Operation, e.Status, entry.Operation,
				entry.Status))
		}
	}
	return findings
}

// unheard reports each successful call of the driver for which the rack's log has no request. The
// rack's clock may differ, so positions in the log decide: the request must come after the
// exchanges that ended before the call, and before the exchanges that began after the call.
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
		operations := effects[call.name]
		isID := call.object == "" || isUUID(call.object) // calls with other IDs need no request
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

// rpc records one call of the driver and its repetitions.
type rpc struct {
	name   string
	object string // the volume, snapshot or node of the call
	code   codes.Code
	reason string
	tries  int
	began  time.Time
	took   time.Duration
	listed []string // the IDs in the answer of a list
}

func listedIn(reply any) (ids []string) {
	switch reply := reply.(type) {
	case *csi.ListVolumesResponse:
		for _, e := range reply.GetEntries() {
			ids = append(ids, e.GetVolume().GetVolumeId())
		}
	case *csi.ListSnapshotsResponse:
		for _, e := range reply.GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
	}
	return ids
}

// callLog records every call of the driver.
type callLog struct {
	budget  *budget
	contact *contact
	mu      sync.Mutex
	calls   []rpc // mu guards it
}

func (l *callLog) add(call rpc) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, call)
}

func (l *callLog) since(point int) []rpc {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.calls[point:])
}

// intercept refuses a call that exceeds the budget, and records every other call of the driver. It
// repeats a call whose error asks an orchestrator to retry.
func (l *callLog) intercept(ctx context.Context, method string, req, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	call := rpc{name: method[strings.LastIndex(method, "/")+1:], object: objectOf(req),
		began: time.Now()}
	end, err := l.budget.charge(req)
	if err != nil {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	backoff := harness.Backoff{Next: 100 * time.Millisecond, Max: 2 * time.Second}
	for busy := 0; ; {
		call.tries++
		if lost := l.contact.lost(); lost != nil {
			err = status.Error(codes.Unavailable, lost.Error())
			break
		}
		err = invoke(ctx, method, req, reply, conn, options...)
		if reasonOf(err) != "EffectUnknown" || time.Since(call.began) > lateTimeout {
			busy++
		}
		if !asksAgain(err) || busy == callTries || backoff.Wait(ctx) != nil ||
			call.tries > callTries/2 && l.contact.ask(ctx) != nil {
			break
		}
	}
	call.took, call.code, call.reason = time.Since(call.began), status.Code(err), reasonOf(err)
	if err == nil {
		call.listed = listedIn(reply)
	}
	end(reply, err)
	l.add(call)
	return err
}

func (l *callLog) observe(method string, request any, began time.Time, err error) {
	l.add(rpc{name: method[strings.LastIndex(method, "/")+1:], object: objectOf(request),
		code: status.Code(err), reason: reasonOf(err), tries: 1, began: began, took: time.Since(began)})
}

// callTries limits how often intercept() tries a call. Several tries give a busy rack the time that
// it needs. Until lateTimeout has passed, tries that fail with EffectUnknown do not count: the
// driver returns this reason until OXIDE_LATE_LIMIT (a minute) after an unanswered change.
const callTries, lateTimeout = 8, 2 * time.Minute

func asksAgain(err error) bool {
	switch reason := reasonOf(err); status.Code(err) {
	case codes.Unavailable:
		return reason != ""
	case codes.Aborted:
		return reason != "" && reason != "StartingTokenInvalid" // the caller has to begin the list anew
	}
	return false
}

func reasonOf(err error) string { return harness.ReasonOf(status.Convert(err)) }

// charge reserves budget for the object that an RPC creates. Pass the result of the RPC to end().
func (b *budget) charge(req any) (end func(reply any, err error), err error) {
	var bytes int64
	switch asked := req.(type) {
	case *csi.CreateVolumeRequest:
		bytes = max(asked.GetCapacityRange().GetRequiredBytes(), harness.GiB)
	case *csi.CreateSnapshotRequest:
		bytes = harness.GiB
	case *csi.DeleteVolumeRequest, *csi.DeleteSnapshotRequest:
		return func(_ any, err error) {
			if err == nil {
				b.deleted(objectOf(asked))
			}
		}, nil
	default:
		return func(any, error) {}, nil
	}
	done, err := b.begin(&object{gib: (bytes + harness.GiB - 1) / harness.GiB})
	if err != nil {
		return nil, err
	}
	return func(reply any, err error) {
		var id string
		switch made := reply.(type) {
		case *csi.CreateVolumeResponse:
			id = made.GetVolume().GetVolumeId()
		case *csi.CreateSnapshotResponse:
			id = made.GetSnapshot().GetSnapshotId()
		}
		done(err == nil && id != "", id)
	}, nil
}

func objectOf(req any) string {
	switch req := req.(type) {
	case *csi.ListSnapshotsRequest:
		return cmp.Or(req.GetSnapshotId(), req.GetSourceVolumeId())
	case interface{ GetVolumeId() string }:
		return req.GetVolumeId()
	case interface{ GetSnapshotId() string }:
		return req.GetSnapshotId()
	case interface{ GetSourceVolumeId() string }:
		return req.GetSourceVolumeId()
	}
	return ""
}

func evidence(calls []rpc) []report.LoggedCall {
	var all []report.LoggedCall
	for _, c := range calls {
		e := report.LoggedCall{Kind: report.RPC, Operation: c.name, Code: c.code.String(),
			ErrorCode: c.reason, Milliseconds: milliseconds(c.took)}
		if c.tries > 1 {
			e.Answer = fmt.Sprintf("after %d tries", c.tries)
		}
		all = append(all, e)
	}
	return all
}

// anyDescription matches the description in an answer of the rack, even if the answer is cut off.
var anyDescription = regexp.MustCompile(`"description"\s*:\s*"(?:[^"\\]|\\.)*`)

// answers converts recorded calls for the report. It removes descriptions that no run has written.
func answers(exchanges []rules.RecordedCall) []report.LoggedCall {
	var all []report.LoggedCall
	for _, e := range exchanges {
		if strings.HasSuffix(e.Operation, "_list") && e.Status < 300 {
			e.Answer = "" // it contains objects of others
		}
		e.Answer = anyDescription.ReplaceAllStringFunc(e.Answer, func(description string) string {
			if strings.Contains(description, markWord) || strings.Contains(description, prefix) {
				return description
			}
			return `"description":"(not kept)`
		})
		all = append(all, report.LoggedCall{Kind: report.API, Operation: e.Operation, Method: e.Method,
			Path: e.Path, Status: e.Status, ErrorCode: e.ErrorCode, RequestID: e.RequestID,
			Milliseconds: milliseconds(e.Took), Answer: e.Answer})
	}
	return all
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// patient is a transport that repeats a request while the rack is busy. It also repeats a change
// that the rack does not answer. Use it only for requests that may be sent twice.
type patient struct{ next http.RoundTripper }

// busyTimeout limits how long patient repeats a request.
const busyTimeout = time.Minute

func (p patient) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithTimeout(req.Context(), busyTimeout)
	defer cancel()
	for backoff := (harness.Backoff{Next: 100 * time.Millisecond, Max: 2 * time.Second}); ; {
		resp, err := p.next.RoundTrip(req)
		again := err == nil && rules.MeansBusy(resp.StatusCode) ||
			err != nil && req.Method != http.MethodGet && !errors.Is(err, rules.ErrNotSent)
		if !again || req.Body != nil && req.GetBody == nil || backoff.Wait(ctx) != nil {
			return resp, err
		}
		if err == nil {
			_ = resp.Body.Close()
		}
		if req.GetBody != nil {
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// budgeted is a transport that limits which objects a run creates (see RoundTrip).
type budgeted struct {
	next   http.RoundTripper
	budget *budget
	run    string // every object needs this run's mark
}

// RoundTrip refuses a request for objects that exceed the budget, or that lack the mark by which
// the command "clean" finds a run's objects. It does not rely on the rack to refuse.
func (b budgeted) RoundTrip(req *http.Request) (*http.Response, error) {
	objects, together, err := created(req, b.run)
	if err != nil {
		return nil, err
	}
	end, err := b.budget.begin(objects...)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", rules.ErrNotSent, err)
	}
	resp, err := b.next.RoundTrip(req)
	var ids []string
	made := err == nil && resp.StatusCode == http.StatusCreated
	if made && len(objects) > 0 && !together {
		ids = append(ids, idOf(resp))
	}
	end(made, ids...)
	// If a creation was not answered, take the object's ID from the next read by name.
	if err == nil && req.Method == http.MethodGet && resp.StatusCode == http.StatusOK {
		b.budget.identify(path.Base(rules.PathOf(req)), func() string { return idOf(resp) })
	}
	// 404 means that an earlier deletion took effect, but its answer was lost.
	if err == nil && req.Method == http.MethodDelete &&
		(resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotFound) {
		b.budget.deleted(path.Base(rules.PathOf(req)))
	}
	return resp, err
}

// created() returns the disks and snapshots that a request creates, or an error if one of them
// lacks the run's mark. The result "together" is true if the request creates an instance with its
// disks: then the answer lacks the disks' IDs.
func created(req *http.Request, run string) (objects []*object, together bool, err error) {
	operation := rules.OperationOf(req.Method, rules.PathOf(req))
	if req.Body == nil ||
		!slices.Contains([]string{"disk_create", "snapshot_create", "image_create",
			"instance_create"}, operation) {
		return nil, false, nil
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, false, fmt.Errorf("read the request's body: %w", err)
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	type disk struct {
		Type        string `json:"type"`
		Name        string `json:"name"`
		Description string `json:"description"`
		Size        int64  `json:"size"`
	}
	var asked struct {
		disk
		BootDisk disk   `json:"boot_disk"`
		Disks    []disk `json:"disks"`
	}
	// Read only the first JSON object, as the rack does. Ignore errors: the rack reports them.
	_ = json.NewDecoder(bytes.NewReader(body)).Decode(&asked)
	asked.Type, together = "create", operation == "instance_create"
	all := slices.Concat(asked.Disks, []disk{asked.BootDisk, asked.disk})
	for i, d := range all {
		if d.Type != "create" {
			continue
		}
		if d.Name != "" && runOf(d.Description) != run {
			return nil, false, fmt.Errorf("%w: %s would be made without the mark of run %s",
				rules.ErrNotSent, d.Name, run)
		}
		if together != (i == len(all)-1) && operation != "image_create" {
			objects = append(objects, &object{name: d.Name, gib: gibOf(d.Size)})
		}
	}
	return objects, together, nil
}

// gibOf returns a size in GiB, but 1 if the size is below 1 GiB or above absurdGiB.
func gibOf(bytes int64) int64 {
	if gib := bytes / harness.GiB; gib >= 1 && gib <= absurdGiB {
		return gib
	}
	return 1
}

// absurdGiB exceeds the size of every disk of the checks, except in requests that must be refused.
const absurdGiB = 64

func idOf(resp *http.Response) string {
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(body))
	var made struct {
		ID string `json:"id"`
	}
	if err != nil || json.Unmarshal(body, &made) != nil {
		return ""
	}
	return made.ID
}
