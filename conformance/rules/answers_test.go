//go:build linux

package rules

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// field is one field of the answers to an operation. Its path joins the names of nested fields
// with dots.
type field struct{ operation, path string }

// workers is the number of racks that are altered at the same time.
const workers = 3

// sampledAnswers is how many alterations are tried outside of the long form.
const sampledAnswers = 80

// ruleTimeout limits a check, which may wait for a value that an altered answer hides.
const ruleTimeout = 10 * time.Second

// alterations are the ways to put a wrong value into a field of an answer; n counts the answers. An
// alteration returns false if a reader would see no change.
var alterations = map[string]func(object map[string]any, key string, n int64) bool{
	"absent": func(object map[string]any, key string, _ int64) bool {
		was := object[key]
		delete(object, key)
		return was != nil
	},
	"null": func(object map[string]any, key string, _ int64) bool {
		was := object[key]
		object[key] = nil
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

// replace replaces a value with another one of its type. It does not replace objects, whose fields
// are replaced one by one.
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

// take reads and closes the body of a response. The caller must replace the body.
func take(resp *http.Response) ([]byte, error) {
	defer func() { _ = resp.Body.Close() }()
	return io.ReadAll(resp.Body)
}

// altering is a transport that calls visit with the objects of each successful answer.
type altering struct {
	next  http.RoundTripper
	visit func(operation string, object map[string]any)
}

func (a altering) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := a.next.RoundTrip(req)
	if err != nil || resp.StatusCode >= 300 {
		return resp, err
	}
	body, err := take(resp)
	if err != nil {
		return nil, err
	}
	var object map[string]any
	decode := json.NewDecoder(bytes.NewReader(body))
	decode.UseNumber()
	if decode.Decode(&object) == nil {
		objects := []any{object}
		if items, is := object["items"].([]any); is {
			objects = items
		}
		for _, o := range objects {
			if o, is := o.(map[string]any); is {
				a.visit(OperationOf(req.Method, PathOf(req)), o)
			}
		}
		if body, err = json.Marshal(object); err != nil {
			return nil, err
		}
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	resp.Header.Del("Content-Length")
	return resp, nil
}

// eachField visits the fields of an object and of the objects in it.
func eachField(below string, object map[string]any, visit func(string, map[string]any, string)) {
	for key, value := range maps.Clone(object) {
		if inner, is := value.(map[string]any); is {
			eachField(below+key+".", inner, visit)
		}
		visit(below+key, object, key)
	}
}

func openAltered(rack *harness.Rack, visit func(string, map[string]any)) (*TestedRack, error) {
	config := configOf(rack, true)
	config.Through = func(next http.RoundTripper) http.RoundTripper { return altering{next, visit} }
	return Open(config)
}

// answers returns the fields of a rack's answers in a run, and for each operation the rules that
// call it, the quickest first.
func answers(t *testing.T, rack *harness.Rack) (fields []field, asking map[string][]Rule) {
	t.Helper()
	var mu sync.Mutex
	// mu guards seen, because some checks send two requests at the same time.
	seen := map[field]bool{}
	r, err := openAltered(rack, func(operation string, object map[string]any) {
		mu.Lock()
		defer mu.Unlock()
		eachField("", object, func(at string, _ map[string]any, _ string) {
			if operation != "" {
				seen[field{operation, at}] = true
			}
		})
	})
	csitest.Must(t, err)
	asking, _ = survey(t, r)
	return slices.SortedFunc(maps.Keys(seen), func(a, b field) int {
		return strings.Compare(a.operation+" "+a.path, b.operation+" "+b.path)
	}), asking
}

// survey checks the rules on a rack in order. It returns the results, and for each operation the
// passed rules that call it, the quickest first.
func survey(t *testing.T, r *TestedRack) (asking map[string][]Rule, results map[string]Result) {
	t.Helper()
	asking, results = map[string][]Rule{}, map[string]Result{}
	for _, rule := range All() {
		result := r.Run(t.Context(), rule)
		results[rule.ID] = result
		if result.Status == NotTested && r.Admin == nil {
			continue
		}
		if result.Status != Passed {
			t.Fatalf("%s without an alteration: %s %s", rule.ID, result.Status, result.Reason)
		}
		asked := map[string]bool{}
		for _, e := range result.Exchanges {
			asked[e.Operation] = true
		}
		for operation := range asked {
			asking[operation] = append(asking[operation], rule)
		}
	}
	csitest.Must(t, r.Close(t.Context()))
	for _, rules := range asking {
		slices.SortStableFunc(rules, func(a, b Rule) int {
			return int(results[a.ID].Took - results[b.ID].Took)
		})
	}
	return asking, results
}

// notice returns the rule that notices an alteration, or "", and whether the alteration changed
// anything.
func notice(ctx context.Context, rack *harness.Rack, tried trial, rules []Rule) (by string,
	changed bool, err error) {
	var count, changes atomic.Int64
	r, err := openAltered(rack, func(operation string, object map[string]any) {
		if operation != tried.operation {
			return
		}
		eachField("", object, func(at string, parent map[string]any, key string) {
			if at == tried.path && alterations[tried.how](parent, key, count.Add(1)) {
				changes.Add(1)
			}
		})
	})
	if err != nil {
		return "", false, err
	}
	for _, rule := range rules {
		limited, cancel := context.WithTimeout(ctx, ruleTimeout)
		result := r.Run(limited, rule)
		cancel()
		if result.Status == Failed {
			by = rule.ID
			break
		}
	}
	// Objects that an altered answer has hidden are left behind.
	limited, cancel := context.WithTimeout(ctx, ruleTimeout)
	defer cancel()
	_ = r.Close(limited)
	return by, changes.Load() > 0, nil
}

// disregard names fields of operations, with the reason why nobody relies on them.
type disregard struct{ operations, fields, reason string }

var irrelevant = []disregard{
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

// covers reports whether d names the field.
func (d disregard) covers(f field) bool {
	return slices.Contains(strings.Fields(d.operations), f.operation) &&
		slices.ContainsFunc(strings.Fields(d.fields), func(pattern string) bool {
			is, err := path.Match(pattern, f.path)
			return err == nil && is
		})
}

// trial is one alteration of one field.
type trial struct {
	field
	how string
	// seed chooses the random parts of the alteration.
	seed uint64
}

// mutationTest tries alterations on several racks at the same time.
type mutationTest struct {
	p *proof.Proof
	// try returns the rule that notices an alteration, or "", and whether the alteration changed
	// anything.
	try func(context.Context, *harness.Rack, trial, []Rule) (by string, changed bool, err error)
	mu  sync.Mutex
	// mu guards the fields below.
	trials []trial
	// asking has the rules of each operation. Rules that have noticed an alteration come first.
	asking map[string][]Rule
	// same counts the alterations that changed nothing.
	tried, noticed, same int
	missed               []trial
}

// next returns a trial and the rules that may notice it. It returns false if no trial or no time is
// left.
func (h *mutationTest) next() (trial, []Rule, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.trials) == 0 || h.p.Over() {
		return trial{}, nil, false
	}
	next := h.trials[0]
	h.trials = h.trials[1:]
	return next, slices.Clone(h.asking[next.operation]), true
}

// ended counts a trial.
func (h *mutationTest) ended(tried trial, by string, changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tried++
	switch rules := h.asking[tried.operation]; {
	case by != "":
		h.noticed++
		i := slices.IndexFunc(rules, func(r Rule) bool { return r.ID == by })
		rule := rules[i]
		h.asking[tried.operation] = slices.Insert(slices.Delete(rules, i, i+1), 0, rule)
	case !changed:
		h.same++
	default:
		h.missed = append(h.missed, tried)
	}
	if h.tried%50 == 0 {
		h.p.Say("%d tried, %d noticed, %d to go", h.tried, h.noticed, len(h.trials))
	}
}

// run tries all alterations on several racks at once. Outside of the long form it tries one of each
// operation and some others. It returns how many there are.
func (h *mutationTest) run(t *testing.T, sampled int) (all int) {
	t.Helper()
	all = len(h.trials)
	h.p.Rand().Shuffle(all, func(i, j int) { h.trials[i], h.trials[j] = h.trials[j], h.trials[i] })
	if !h.p.Long() {
		seen := map[string]bool{}
		var first, rest []trial
		for _, tried := range h.trials {
			if !seen[tried.operation] {
				first = append(first, tried)
			} else {
				rest = append(rest, tried)
			}
			seen[tried.operation] = true
		}
		h.trials = short.Some(t, sampled/4,
			slices.Concat(first, rest)[:min(all, max(sampled, len(first)))])
	}
	var group errgroup.Group
	for range workers {
		rack := startRack(t, harness.RackOptions{})
		group.Go(func() error { return h.work(t.Context(), rack) })
	}
	csitest.Must(t, group.Wait())
	for _, missed := range h.missed {
		t.Errorf("%s %s of %s: no rule's check notices; hold it against a rule, or add it to those that "+
			"no rule has to notice", missed.path, missed.how, missed.operation)
	}
	return all
}

// work tries alterations on one rack until none is left.
func (h *mutationTest) work(ctx context.Context, rack *harness.Rack) error {
	for {
		next, rules, more := h.next()
		if !more {
			return nil
		}
		by, changed, err := h.try(ctx, rack, next, rules)
		if err != nil {
			return err
		}
		h.ended(next, by, changed)
	}
}

func TestEveryFieldThatSomebodyReliesOnIsCheckedByARule(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "answer-mutations")
	fields, asking := answers(t, startRack(t, harness.RackOptions{}))
	h := &mutationTest{p: p, asking: asking, try: notice}
	operations, ignored := map[string]bool{}, 0
	for _, f := range fields {
		operations[f.operation] = true
		if slices.ContainsFunc(irrelevant, func(d disregard) bool { return d.covers(f) }) {
			ignored++
			continue
		}
		for _, how := range slices.Sorted(maps.Keys(alterations)) {
			h.trials = append(h.trials, trial{field: f, how: how})
		}
	}
	for _, d := range irrelevant {
		if !slices.ContainsFunc(fields, d.covers) || d.reason == "" {
			t.Errorf("%s of %s: no answer has such a field, or no reason is given; remove the entry",
				d.fields, d.operations)
		}
	}
	all := h.run(t, sampledAnswers)
	p.Figure("operations", len(operations), "fields", len(fields), "irrelevant", ignored, "of", all,
		"tried", h.tried, "noticed", h.noticed, "same", h.same, "missed", len(h.missed))
}
