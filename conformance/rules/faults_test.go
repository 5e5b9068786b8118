//go:build linux

package rules

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

type fault struct {
	// legal means that a healthy rack or the network can cause the fault. Then checks must not fail.
	legal bool
	// noticed means that a check must fail, or report that it could not test its rule. Such checks may
	// leave objects in the rack; with all other faults, no object may be left.
	noticed bool
	// once means that the fault strikes one request of each check instead of every request.
	once bool
	// send answers a request. If send is nil, alters() changes trial.field of the answer.
	send   func(*faulting, *http.Request) (*http.Response, error)
	alters alteration
}

var errorCodes = map[int]string{400: "InvalidRequest", 401: "Unauthorized", 403: "Forbidden",
	404: "ObjectNotFound", 409: "Conflict", 429: "", 500: "Internal", 503: "ServiceNotAvailable",
	507: "InsufficientCapacity"}

func faults() map[string]fault {
	all := map[string]fault{
		"late":            {legal: true, send: (*faulting).late},
		"unanswered-once": {legal: true, once: true, send: (*faulting).cut},
		"never-answered":  {legal: true, noticed: true, send: (*faulting).cut},
		"unsent": {noticed: true, send: func(_ *faulting, req *http.Request) (*http.Response, error) {
			return answer(req, http.StatusNoContent), nil
		}},
	}
	for status := range errorCodes {
		refuse := func(_ *faulting, req *http.Request) (*http.Response, error) {
			return answer(req, status), nil
		}
		// A healthy rack may answer with these statuses at times, but not always.
		passing := slices.Contains([]int{429, 500, 503}, status)
		all[fmt.Sprint(status, "-once")] = fault{legal: passing, noticed: !passing, once: true,
			send: refuse}
		all[fmt.Sprint(status, "-always")] = fault{noticed: true, send: refuse}
	}
	for how, alters := range alterations {
		all[how] = fault{noticed: true, alters: alters}
	}
	for how, alters := range pageChanges {
		all[how] = fault{noticed: true, once: true, alters: alters}
	}
	return all
}

// alteration puts a wrong value into a field of an answer. It returns false if a reader would see
// no change. Each call gets a different n.
type alteration func(object map[string]any, key string, n int64) bool

var alterations = map[string]alteration{
	"absent": func(object map[string]any, key string, _ int64) bool {
		was := object[key]
		delete(object, key)
		return was != nil
	},
	"of another type": func(object map[string]any, key string, _ int64) bool {
		if _, is := object[key].(json.Number); is {
			object[key] = "seven"
		} else {
			object[key] = 7
		}
		return true
	},
	"another": func(object map[string]any, key string, _ int64) bool {
		return replace(object, key, 1)
	},
	"another each time": replace,
}

var pageChanges = map[string]alteration{
	"dropped": onPage(func(items []any, at int) []any { return slices.Delete(items, at, at+1) }),
	"doubled": onPage(func(items []any, at int) []any { return slices.Insert(items, at, items[at]) }),
	"swapped": onPage(func(items []any, at int) []any {
		items[0], items[at] = items[at], items[0]
		return items
	}),
}

func onPage(change func(items []any, at int) []any) alteration {
	return func(page map[string]any, key string, n int64) bool {
		items, _ := page[key].([]any)
		if len(items) == 0 {
			return false
		}
		page[key] = change(slices.Clone(items), int(n)%len(items))
		return !reflect.DeepEqual(page[key], items)
	}
}

// replace changes the value of one field. It returns false for a nested object or list: other calls
// replace the fields in it.
func replace(object map[string]any, key string, n int64) bool {
	id := fmt.Sprintf("11111111-1111-4111-8111-%012d", n)
	switch value := object[key].(type) {
	case json.Number:
		was, _ := value.Int64()
		object[key] = was + n*GiB
	case bool:
		object[key] = !value
	case nil:
		if object[key] = id; strings.HasPrefix(key, "time_") || strings.HasSuffix(key, "_expiration") {
			object[key] = time.Unix(n, 0).UTC()
		}
	case string:
		switch at, err := time.Parse(time.RFC3339Nano, value); {
		case err == nil:
			object[key] = at.Add(time.Duration(n) * time.Second)
		case len(value) == len(id):
			object[key] = id
		default:
			object[key] = fmt.Sprint(value, "x", n)
		}
	default:
		return false
	}
	return true
}

type trial struct {
	operation string
	// field is the field that is altered, or "". Dots separate the names of nested fields.
	field string
	how   string // the name of the fault
	seed  uint64 // chooses the random parts of the trial
}

// concerns reports whether the trial may alter the answer to a request with this path or query.
// Pages are altered only in lists that checks compare: those with an order or a page token.
func (t trial) concerns(path string) bool {
	return t.field != "items" || strings.Contains(path, "sort_by=") ||
		strings.Contains(path, "page_token=")
}

type faulting struct {
	trial
	fault
	next http.RoundTripper
	skip atomic.Int64 // with once, the number of requests to let pass
	// count gives a number to each value that is to be altered. struck counts the requests that send
	// answered or, if send is nil, the values that were altered.
	count, struck atomic.Int64
}

func (f *faulting) RoundTrip(req *http.Request) (*http.Response, error) {
	if OperationOf(req.Method, PathOf(req)) != f.operation || !f.concerns(req.URL.RawQuery) ||
		f.once && f.skip.Add(-1) != -1 {
		return f.next.RoundTrip(req)
	}
	if f.send != nil {
		f.struck.Add(1)
		return f.send(f, req)
	}
	return visited(f.next, req, func(at string, object map[string]any, key string) {
		if at == f.field && f.alters(object, key, f.count.Add(1)) {
			f.struck.Add(1)
		}
	})
}

func (f *faulting) late(req *http.Request) (*http.Response, error) {
	resp, err := f.next.RoundTrip(req)
	backoff := harness.Backoff{Next: 50 * time.Millisecond}
	_ = backoff.Wait(req.Context()) // a caller that has gone does not wait
	return resp, err
}

func (f *faulting) cut(req *http.Request) (*http.Response, error) {
	resp, err := f.next.RoundTrip(req)
	if err == nil {
		_ = resp.Body.Close()
		err = errors.New("the connection was cut after the effect")
	}
	return nil, err
}

func answer(req *http.Request, status int) *http.Response {
	id, body := uuid.NewString(), ""
	if code, is := errorCodes[status]; is {
		body = pretty(id, code, http.StatusText(status))
	}
	return legal.Answer(req, status, body, "X-Request-Id", id, "Content-Type", "application/json")
}

func visited(next http.RoundTripper, req *http.Request,
	visit func(at string, object map[string]any, key string)) (*http.Response, error) {
	resp, err := next.RoundTrip(req)
	return legal.Edit(resp, err, func(at string, object map[string]any) {
		for key := range maps.Clone(object) {
			visit(at+key, object, key)
		}
	})
}

type surveyed struct {
	// asking has the rules whose checks request an operation. Rules that have noticed a fault come
	// first, the latest of them in front. The other rules follow, from quick to slow.
	asking  map[string][]Rule
	results map[string]Result
	fields  map[trial]bool // the fields of the answers
}

func survey(t *testing.T, config Config) surveyed {
	t.Helper()
	s := surveyed{map[string][]Rule{}, map[string]Result{}, map[trial]bool{}}
	var mu sync.Mutex
	// mu guards s.fields, because some checks send two requests at the same time.
	config.Through = func(next http.RoundTripper) http.RoundTripper {
		return legal.RoundTrip(func(req *http.Request) (*http.Response, error) {
			operation := OperationOf(req.Method, PathOf(req))
			return visited(next, req, func(at string, _ map[string]any, _ string) {
				mu.Lock()
				defer mu.Unlock()
				if operation != "" && at != "items" && at != "next_page" {
					s.fields[trial{operation: operation, field: at}] = true
				}
			})
		})
	}
	r := csitest.Got(Open(config))(t)
	for _, rule := range All() {
		result := r.Run(t.Context(), rule)
		s.results[rule.ID] = result
		if result.Status == notTested && r.Admin == nil {
			continue
		}
		if result.Status != passed {
			t.Fatalf("%s without a fault: %s %s", rule.ID, result.Status, result.Reason)
		}
		asked := map[string]bool{"": true}
		for _, e := range result.Exchanges {
			if !asked[e.Operation] {
				s.asking[e.Operation] = append(s.asking[e.Operation], rule)
			}
			asked[e.Operation] = true
		}
	}
	csitest.Must(t, r.Close(t.Context()))
	for _, rules := range s.asking {
		slices.SortStableFunc(rules, func(a, b Rule) int {
			return cmp.Compare(s.results[a.ID].Seconds, s.results[b.ID].Seconds)
		})
	}
	return s
}

// irrelevant lists fields of answers, with the reason why nobody relies on them.
var irrelevant = []struct{ operations, fields, reason string }{
	{"ping", "*", "the answer itself is the news"},
	{"current_user_view", "*", "the driver does not ask, and oxide-conformance prints it"},
	{"instance_start instance_stop instance_reboot", "*", "who changes the state of an instance " +
		"reads it afterwards; A45 to A47 hold the state in the answer against what a rack does"},
	{"instance_external_ip_list instance_network_interface_list", "*",
		"the driver makes no instance and asks for no network; A52 and A65 are for the simulator"},
	{"utilization_view", "*.cpus *.memory", "the driver reports the storage"},
	{"project_view", "description time_*", "the driver compares the project's name and ID"},
	{"project_list", "name description time_*", "the driver lists no projects"},
	{"disk_create snapshot_create instance_create", "time_modified", "nobody reads it"},
	{"instance_create", "run_state time_run_state_updated",
		"an instance starts after its creation by itself"},
}

const (
	// sampledAsking is the number of rules that are checked with each legal fault. If PROOF_DURATION
	// is set, all rules are checked, except with the fault never-answered.
	sampledAsking = 3
	// sampledTrials is the number of trials without PROOF_DURATION. pageTrials is the number of trials
	// for each list and each change of a page.
	sampledTrials, pageTrials = 230, 25
	// ruleTimeout limits a check, which may wait for a value that an altered answer hides.
	ruleTimeout = 10 * time.Second
)

type faultTest struct {
	p      *proof.Proof
	faults map[string]fault
	// try uses altered for faults that alter values, and real, without admin listener, for others.
	altered, real surveyed
	trials        []trial

	mu sync.Mutex
	// mu guards the fields below, and the order of rules in asking. alarms are failures of checks
	// under legal faults. same is the number of faults that changed nothing.
	tried, noticed, same, legal int
	alarms, missed              []string
}

func (h *faultTest) try(ctx context.Context, rack *harness.Rack, tried trial) error {
	f := &faulting{trial: tried, fault: h.faults[tried.how]}
	f.count.Store(int64(tried.seed))
	config, seen := configOf(rack, true), h.altered
	if f.alters == nil {
		config.Admin, seen = nil, h.real
	}
	config.Through = func(next http.RoundTripper) http.RoundTripper { f.next = next; return f }
	r, err := Open(config)
	if err != nil {
		return err
	}
	limit := ruleTimeout
	if f.noticed {
		// The check is not expected to pass, so do not repeat its requests for long.
		r.recorder.patience, r.cleaning = 500*time.Millisecond, 2*time.Second
	}
	h.mu.Lock()
	rules := slices.Clone(seen.asking[tried.operation])
	h.mu.Unlock()
	random := rand.New(rand.NewPCG(h.p.Seed, tried.seed))
	if f.legal {
		limit = stateTimeout // a check that was only slow must not fail
		if f.noticed || !h.p.Long() {
			random.Shuffle(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
			rules = rules[:min(len(rules), sampledAsking)]
		}
	}
	if f.field == "items" { // only A09 and A10 compare pages
		rules = slices.DeleteFunc(rules, func(r Rule) bool { return r.ID != "A09" && r.ID != "A10" })
	}
	var by string
	var alarms []string
	for _, rule := range rules {
		before := f.struck.Load()
		f.skip.Store(placeOf(seen.results[rule.ID].Exchanges, tried, random))
		limited, cancel := context.WithTimeout(ctx, limit)
		result := r.Run(limited, rule)
		cancel()
		if result.Status == failed || result.Status == blocked || result.Status == notTested &&
			result.Reason == "" {
			alarms = append(alarms, fmt.Sprintf("%s %s: %s", rule.ID, result.Status, result.Reason))
		}
		if f.noticed && f.struck.Load() > before && (result.Status == failed || result.Undecided ||
			result.Status != passed && f.alters == nil) {
			by = cmp.Or(by, rule.ID)
		}
		if by != "" && !f.legal {
			break
		}
	}
	f.skip.Store(0)
	closing, cancel := context.WithTimeout(ctx, ruleTimeout)
	defer cancel()
	if err := r.Close(closing); err != nil && !f.noticed {
		alarms = append(alarms, err.Error())
	}
	left, err := sweep(ctx, rack, config.Mark)
	if len(left) > 0 && !f.noticed {
		alarms = append(alarms, "left behind: "+strings.Join(left, ", "))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	what := strings.TrimSpace(f.field+" "+f.how) + " of " + f.operation
	h.tried++
	switch asking := seen.asking[f.operation]; {
	case by != "": // move the rule to the front
		h.noticed++
		i := slices.IndexFunc(asking, func(r Rule) bool { return r.ID == by })
		rule := asking[i]
		copy(asking[1:], asking[:i])
		asking[0] = rule
	case f.struck.Load() == 0:
		h.same++
	case f.noticed:
		h.missed = append(h.missed, what)
	}
	if f.legal {
		h.legal++
		for _, alarm := range alarms {
			h.alarms = append(h.alarms, what+": "+alarm)
		}
	}
	if h.tried%50 == 0 {
		h.p.Say("%d of %d tried, %d noticed", h.tried, len(h.trials), h.noticed)
	}
	return err
}

// placeOf chooses a successful request that the trial concerns. It returns how many requests that
// the trial concerns precede the chosen one.
func placeOf(exchanges []RecordedCall, tried trial, random *rand.Rand) int64 {
	before, places := int64(0), []int64{}
	for _, e := range exchanges {
		if e.Operation == tried.operation && tried.concerns(e.Path) {
			if before++; e.Status < 300 {
				places = append(places, before-1)
			}
		}
	}
	if len(places) == 0 {
		return 0
	}
	return places[random.IntN(len(places))]
}

func sweep(ctx context.Context, rack *harness.Rack, mark string) (left []string, err error) {
	state, err := rack.Admin.State(ctx)
	text, errText := json.Marshal(state)
	left = regexp.MustCompile("conf-"+mark+`-[^"]*`).FindAllString(string(text), -1)
	if err = errors.Join(err, errText); left != nil {
		err = errors.Join(err, rack.Admin.Reset(ctx))
	}
	return left, err
}

// draw fills h.trials. It skips the fields that irrelevant lists, and returns their number.
func (h *faultTest) draw(t *testing.T) (ignored int) {
	t.Helper()
	add := func(operation, field, how string) {
		h.trials = append(h.trials, trial{operation: operation, field: field, how: how})
	}
	for operation := range h.real.asking {
		for how, fault := range h.faults {
			unsent := how == "unsent" && !strings.HasSuffix(operation, "_delete")
			usual := strings.HasPrefix(how, "403-") && (operation == "rack_list" ||
				operation == "silo_utilization_list") // A21: all but fleet viewers get 403
			if fault.alters == nil && !unsent && !usual {
				add(operation, "", how)
			}
		}
	}
	used := map[string]bool{}
	for f := range h.altered.fields {
		before := ignored
		for _, d := range irrelevant {
			for _, pattern := range strings.Fields(d.fields) {
				is := csitest.Got(path.Match(pattern, f.field))(t)
				if is && slices.Contains(strings.Fields(d.operations), f.operation) {
					ignored, used[d.reason] = before+1, true
				}
			}
		}
		for how := range alterations {
			if ignored == before {
				add(f.operation, f.field, how)
			}
		}
	}
	for _, d := range irrelevant {
		if !used[d.reason] {
			t.Errorf("%s of %s: no answer has such a field; remove the entry", d.fields, d.operations)
		}
	}
	for _, list := range []string{"disk_list", "snapshot_list", "instance_list", "image_list",
		"project_list", "instance_disk_list"} {
		for how := range pageChanges {
			for range pageTrials {
				add(list, "items", how)
			}
		}
	}
	slices.SortFunc(h.trials, func(a, b trial) int {
		return strings.Compare(a.operation+" "+a.field+" "+a.how, b.operation+" "+b.field+" "+b.how)
	})
	for i := range h.trials {
		h.trials[i].seed = uint64(i)
	}
	return ignored
}

// Tests set creation to 0, because a simulated rack lists an object right after its creation.
func init() { creation = 0 }

func TestRuleChecksTolerateLegalFaultsAndNoticeAllOthers(t *testing.T) {
	t.Parallel()
	h := &faultTest{p: proof.New(t, "faults-of-racks"), faults: faults()}
	config := configOf(startRack(t, harness.RackOptions{}), true)
	h.altered = survey(t, config)
	config.Admin = nil
	h.real = survey(t, config)
	ignored := h.draw(t)
	all := len(h.trials)
	h.p.Rand().Shuffle(all, func(i, j int) { h.trials[i], h.trials[j] = h.trials[j], h.trials[i] })
	if !h.p.Long() {
		h.trials = short.Some(t, 40, h.trials[:sampledTrials])
	}
	onRacks(t, h.trials, func(rack *harness.Rack, tried trial) error {
		if h.p.Over() {
			return nil
		}
		return h.try(t.Context(), rack, tried)
	})
	for _, alarm := range h.alarms {
		t.Error(alarm)
	}
	for _, missed := range h.missed {
		t.Errorf("%s: no rule's check notices; hold it against a rule, or add it to those that no rule "+
			"has to notice", missed)
	}
	h.p.Figure("operations", len(h.real.asking), "fields", len(h.altered.fields), "irrelevant",
		ignored, "faults", len(h.faults), "of", all, "tried", h.tried, "noticed", h.noticed, "same",
		h.same, "legal", h.legal, "false_alarms", len(h.alarms), "missed", len(h.missed))
}
