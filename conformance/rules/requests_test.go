//go:build linux

package rules

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// requestFault is a fault of requests.
type requestFault struct {
	// legal means that a rack in order, or the network, may cause the fault. No rule may fail then.
	legal bool
	// noticed means that a rule must fail or must not be tested. A fault that must not be noticed
	// must not leave anything behind either.
	noticed bool
	// once means that the fault strikes one request of each check instead of every request.
	once bool
	send func(*faulting, *http.Request) (*http.Response, error)
}

// errorCodes are the codes of a rack's refusals, by status.
var errorCodes = map[int]string{400: "InvalidRequest", 401: "Unauthorized", 403: "Forbidden",
	404: "ObjectNotFound", 409: "Conflict", 429: "", 500: "Internal", 503: "ServiceNotAvailable",
	507: "InsufficientCapacity"}

// requestFaults lists the faults by their names.
func requestFaults() map[string]requestFault {
	all := map[string]requestFault{
		"late":            {legal: true, send: (*faulting).late},
		"unanswered-once": {legal: true, once: true, send: (*faulting).cut},
		"never-answered":  {legal: true, noticed: true, send: (*faulting).cut},
		"effect-later":    {noticed: true, send: (*faulting).early},
		"effect-never":    {noticed: true, send: (*faulting).early},
	}
	for status := range errorCodes {
		refuse := func(_ *faulting, req *http.Request) (*http.Response, error) {
			return refusing(req, status), nil
		}
		// A rack in order may answer any request like this, but not every time.
		passing := slices.Contains([]int{429, 500, 503}, status)
		all[fmt.Sprint(status, "-once")] = requestFault{legal: passing, noticed: !passing, once: true,
			send: refuse}
		all[fmt.Sprint(status, "-always")] = requestFault{noticed: true, send: refuse}
	}
	return all
}

// faulting is a transport that applies a fault to the requests of one operation.
type faulting struct {
	next http.RoundTripper
	trial
	fault requestFault

	mu sync.Mutex
	// mu guards the fields below. A fault that happens once skips the first requests of the
	// operation.
	skip int
	// struck counts the requests that the fault has struck.
	struck int
	// outdated are the objects whose change is not visible yet.
	outdated []outdated
}

// outdated is an object whose change was answered and is not visible yet.
type outdated struct {
	id, name string
	// was is the object before the change; nil means that it did not exist.
	was map[string]any
}

func (f *faulting) RoundTrip(req *http.Request) (*http.Response, error) {
	if OperationOf(req.Method, PathOf(req)) == f.operation && f.strikes() {
		return f.fault.send(f, req)
	}
	if was, is := f.before(req); is {
		if was == nil {
			return refusing(req, http.StatusNotFound), nil
		}
		body, err := json.Marshal(was)
		return response(req, http.StatusOK, uuid.NewString(), body), err
	}
	return altering{f.next, f.age}.RoundTrip(req)
}

func (f *faulting) strikes() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.skip--
	if f.fault.once && f.skip != -1 {
		return false
	}
	f.struck++
	return true
}

// arm prepares a fault for the next check, and returns the number of requests that it has struck
// so far.
func (f *faulting) arm(skip int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.skip = skip
	return f.struck
}

func (f *faulting) late(req *http.Request) (*http.Response, error) {
	resp, err := f.next.RoundTrip(req)
	backoff := harness.Backoff{Next: 50 * time.Millisecond}
	_ = backoff.Wait(req.Context()) // a caller that has gone does not wait
	return resp, err
}

// cut sends a request to the rack and loses the answer.
func (f *faulting) cut(req *http.Request) (*http.Response, error) {
	resp, err := f.next.RoundTrip(req)
	if err == nil {
		_ = resp.Body.Close()
		err = errors.New("the connection was cut after the effect")
	}
	return nil, err
}

// early answers a change before its effect is visible: to the next read of the object, or to all
// reads.
func (f *faulting) early(req *http.Request) (*http.Response, error) {
	object := PathOf(req)
	var asked struct {
		Disk string `json:"disk"`
	}
	if req.GetBody != nil {
		if body, err := req.GetBody(); err == nil {
			_ = json.NewDecoder(body).Decode(&asked) // the rack refuses a malformed body
		}
	}
	switch {
	case asked.Disk != "" && strings.Contains(object, "/disks/"):
		object = "/v1/disks/" + asked.Disk
	case OperationOf(http.MethodGet, object) == "":
		object = path.Dir(object) // POST …/start
	}
	was, _ := f.read(req, object) // nil if it does not exist
	resp, err := f.next.RoundTrip(req)
	if err != nil || resp.StatusCode >= 300 {
		return resp, err
	}
	body, err := take(resp)
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	shown := was
	if shown == nil {
		if err := json.Unmarshal(body, &shown); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.outdated = append(f.outdated, outdated{fmt.Sprint(shown["id"]), fmt.Sprint(shown["name"]), was})
	return resp, nil
}

// read reads an object with the rights of a request's sender.
func (f *faulting) read(by *http.Request, object string) (was map[string]any, err error) {
	if by.Method == http.MethodPost && OperationOf(http.MethodGet, object+"/x") != "" {
		return nil, nil // a creation
	}
	req := by.Clone(by.Context())
	req.Method, req.Body, req.ContentLength = http.MethodGet, nil, 0
	req.URL.Path, req.URL.Opaque = object, ""
	resp, err := f.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, errors.New(resp.Status)
	}
	decode := json.NewDecoder(resp.Body)
	decode.UseNumber()
	return was, decode.Decode(&was)
}

// before reports whether a request reads an object whose change is not visible yet, and returns the
// object as it was.
func (f *faulting) before(req *http.Request) (was map[string]any, is bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if req.Method != http.MethodGet {
		return nil, false
	}
	return f.reveal(path.Base(PathOf(req)))
}

// reveal finds an object by its ID or name, and returns it as it was before its change. The caller
// holds mu.
func (f *faulting) reveal(which string) (was map[string]any, is bool) {
	i := slices.IndexFunc(f.outdated, func(o outdated) bool {
		return o.id == which || o.name == which
	})
	if i < 0 {
		return nil, false
	}
	was = f.outdated[i].was
	if f.how == "effect-later" {
		f.outdated = slices.Delete(f.outdated, i, i+1)
	}
	return was, true
}

// age replaces an object of a list with the object as it was before its change.
func (f *faulting) age(_ string, object map[string]any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, _ := object["id"].(string)
	if was, is := f.reveal(id); is && id != "" {
		clear(object)
		maps.Copy(object, was)
	}
}

func refusing(req *http.Request, status int) *http.Response {
	if req.Body != nil {
		_ = req.Body.Close()
	}
	id := uuid.NewString()
	return response(req, status, id, []byte(pretty(id, errorCodes[status], http.StatusText(status))))
}

func response(req *http.Request, status int, id string, body []byte) *http.Response {
	return &http.Response{Status: fmt.Sprint(status, " ", http.StatusText(status)),
		StatusCode: status, Request: req, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"X-Request-Id": {id}, "Content-Type": {"application/json"}},
		Body:   io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body))}
}

// unnoticeable names the faults that no rule can notice, with the reason.
var unnoticeable = []disregard{
	{"rack_list silo_utilization_list", "403-*", "the answer to everybody but fleet viewers (A21)"},
	{"instance_reboot", "effect-*", "an instance runs before its reboot and after it"},
}

// sampledFaults is the number of faults that are tried outside of the long form. sampledAsking is
// the number of rules that are then checked with a legal fault, and always with requests that are
// never answered.
const sampledFaults, sampledAsking = 50, 3

type faulted struct {
	mutationTest
	faults map[string]requestFault
	// results are the results of the rules on a rack without a fault.
	results map[string]Result
	// legal counts the legal faults. alarms are the failures with which checks blamed the rack for
	// them. The mutex of mutationTest guards both.
	legal  int
	alarms []string
}

// realConfig returns a configuration that checks a simulated rack like a real one, without an
// admin listener.
func realConfig(rack *harness.Rack) Config {
	config := configOf(rack, true)
	config.Admin, config.Restart = nil, nil
	return config
}

// strike applies a fault to the requests of checks. It returns the first rule that notices the
// fault, and whether the fault could be noticed.
func (h *faulted) strike(ctx context.Context, rack *harness.Rack, tried trial, rules []Rule,
) (by string, struck bool, err error) {
	f := &faulting{trial: tried, fault: h.faults[tried.how]}
	config := realConfig(rack)
	plain, err := Open(config)
	if err != nil {
		return "", false, err
	}
	config.Through = func(next http.RoundTripper) http.RoundTripper { f.next = next; return f }
	r, err := Open(config)
	if err != nil {
		return "", false, err
	}
	if f.fault.noticed {
		// The fault lasts, so waiting would not help.
		r.recorder.patience, r.cleaning = 500*time.Millisecond, 2*time.Second
	}
	random := rand.New(rand.NewPCG(h.p.Seed, tried.seed))
	if f.fault.legal && (f.fault.noticed || !h.p.Long()) {
		random.Shuffle(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
		rules = rules[:min(len(rules), sampledAsking)]
	}
	limit := ruleTimeout
	if f.fault.legal {
		limit = stateTimeout // an interrupted check fails
	}
	var alarms []string
	for _, rule := range rules {
		before := f.arm(placeOf(h.results[rule.ID].Exchanges, tried.operation, random))
		limited, cancel := context.WithTimeout(ctx, limit)
		result := r.Run(limited, rule)
		cancel()
		if result.Status != Passed && f.arm(0) > before && f.fault.noticed {
			by = cmp.Or(by, rule.ID)
		}
		if result.Status == Failed || result.Status == Blocked || result.Reason == "" &&
			result.Status == NotTested {
			alarms = append(alarms, fmt.Sprintf("%s %s: %s", rule.ID, result.Status, result.Reason))
		}
		if by != "" && !f.fault.legal {
			break
		}
	}
	closing, cancel := context.WithTimeout(ctx, ruleTimeout)
	defer cancel()
	if err := r.Close(closing); err != nil && !f.fault.noticed {
		alarms = append(alarms, err.Error())
	}
	left, err := sweep(ctx, plain)
	if len(left) > 0 && !f.fault.noticed {
		alarms = append(alarms, "left behind: "+strings.Join(left, ", "))
	}
	if !f.fault.legal {
		alarms = nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, alarm := range alarms {
		h.alarms = append(h.alarms, fmt.Sprintf("%s %s: %s", tried.operation, tried.how, alarm))
	}
	if f.fault.legal {
		h.legal++
	}
	return by, f.arm(0) > 0 && f.fault.noticed, err
}

// placeOf chooses one request of an operation that succeeded in a check without a fault, and
// returns how many of the operation's requests come before it.
func placeOf(exchanges []RecordedCall, operation string, random *rand.Rand) int {
	var places []int
	n := 0
	for _, e := range exchanges {
		if e.Operation != operation {
			continue
		}
		if e.Status < 300 {
			places = append(places, n)
		}
		n++
	}
	if len(places) == 0 {
		return 0
	}
	return places[random.IntN(len(places))]
}

// sweep removes everything that the checks of a run have left, and returns its names.
func sweep(ctx context.Context, r *TestedRack) (left []string, err error) {
	prefix := "conf-" + r.Mark + "-"
	remove := func(kind string, name oxide.Name, do func() error) {
		if strings.HasPrefix(string(name), prefix) {
			left = append(left, fmt.Sprint(kind, " ", name))
			err = errors.Join(err, do())
		}
	}
	instances, errInstances := r.Client.InstanceListAllPages(ctx,
		oxide.InstanceListParams{Project: r.project()})
	for _, i := range instances {
		remove("instance", i.Name, func() error { return r.RemoveInstance(ctx, i.Id) })
	}
	snapshots, errSnapshots := r.Client.SnapshotListAllPages(ctx,
		oxide.SnapshotListParams{Project: r.project()})
	for _, s := range snapshots {
		remove("snapshot", s.Name, func() error {
			return r.Client.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(s.Id)})
		})
	}
	images, errImages := r.Client.ImageListAllPages(ctx, oxide.ImageListParams{Project: r.project()})
	for _, i := range images {
		remove("image", i.Name, func() error {
			return r.Client.ImageDelete(ctx, oxide.ImageDeleteParams{Image: oxide.NameOrId(i.Id)})
		})
	}
	disks, errDisks := r.Client.DiskListAllPages(ctx, oxide.DiskListParams{Project: r.project()})
	for _, d := range disks {
		remove("disk", d.Name, func() error { return r.removeDisk(ctx, d.Id) })
	}
	return left, errors.Join(err, errInstances, errSnapshots, errImages, errDisks)
}

func TestEveryFaultOfARequestIsToleratedOrNoticed(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "request-faults")
	r, err := Open(realConfig(startRack(t, harness.RackOptions{})))
	csitest.Must(t, err)
	h := &faulted{faults: requestFaults()}
	h.p, h.try = p, h.strike
	h.asking, h.results = survey(t, r)
	delete(h.asking, "")
	names, ignored := slices.Sorted(maps.Keys(h.faults)), map[field]int{}
	for _, operation := range slices.Sorted(maps.Keys(h.asking)) {
		for _, how := range names {
			i := slices.IndexFunc(unnoticeable, func(d disregard) bool {
				return d.covers(field{operation, how})
			})
			switch {
			case i >= 0:
				ignored[field{operation, how}] = i
			case !strings.HasPrefix(how, "effect-") || !isRead(operation): // a read has no effect
				h.trials = append(h.trials, trial{field{operation, ""}, how, uint64(len(h.trials))})
			}
		}
	}
	for i, d := range unnoticeable {
		if !slices.Contains(slices.Collect(maps.Values(ignored)), i) || d.reason == "" {
			t.Errorf("%s of %s: no run has such a fault, or no reason is given; remove the entry",
				d.fields, d.operations)
		}
	}
	all := h.run(t, sampledFaults)
	for _, alarm := range h.alarms {
		t.Error(alarm)
	}
	p.Figure("operations", len(h.asking), "faults", len(h.faults), "of", all, "tried", h.tried,
		"legal", h.legal, "false_alarms", len(h.alarms), "noticed", h.noticed, "irrelevant", len(ignored),
		"missed", len(h.missed))
}

// isRead reports whether an operation has no effect.
func isRead(name string) bool {
	return slices.ContainsFunc(operations, func(o operation) bool {
		return o.name == name && o.method == http.MethodGet
	})
}
