package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const wantDiff = `Verdict: does not conform in both
  API version              2026060800.0.0 -> 2026073100.0.0
  release                  v20, in this invented example -> v22 (August 2026)
  groups                   rules, ext4, xfs, data -> rules, ext4, block, data
  objects left             1 -> 0

Results: 49 in A, 61 in B
  47 in both: 43 the same, 2 worse, 1 better, 1 otherwise changed
  2 in A alone, 14 in B alone
  worse:
    ext4 E07 ControllerUnpublishVolume is idempotent: passed -> failed
      expected OK, found Aborted. [2J
    ext4 E08 ListVolumes pages through more volumes than fit into one answer: passed -> not tested
      The run's budget was used up.
  better:
    rules A21 A detached disk detaches again without an error: failed -> passed
  otherwise changed:
    rules A15 An object that may not be read does not exist: not tested -> blocked
      Another user took the instance.
  in B alone:
    all of block: 12
    block B01 The rack does in example B01 what the driver expects: failed
    data D12 Two volumes of one pod are never confused: passed
  in A alone:
    all of xfs: 1
    data D11 Two volumes of one pod are never confused: passed

Latencies: the p50 of 1 of 7 operations changed by a factor of 1.5 or more
  not compared: 0 with fewer than 20 calls in a report, 2 in one report alone
  api instance_disk_attach: slower, p50 1.4 s -> 3.4 s (ratio 2.50; 131 and 127 calls)

B is worse than A.
`

// A is the report of a run without raw block. B is that of a run after an upgrade, without xfs: one
// result is better, some are worse, and attaches are slower.
func TestDiffListsWorseResultsFirst(t *testing.T) {
	a, b := example(), example()
	a.Run.Selected = []string{"rules", "ext4", "xfs", "data"}
	a.Results = append(slices.DeleteFunc(a.Results, func(r Result) bool { return r.Group == "block" }),
		Result{Group: "xfs", ID: "X01", Status: Passed})
	b.Rack.Release, b.Rack.APIVersion = "v22 (August 2026)", "2026073100.0.0"
	for i, r := range map[int]Result{20: {Status: Passed},
		14: {Status: Blocked, Reason: "Another user took the instance."},
		30: {Status: Failed, Reason: "expected OK, found Aborted.\x1b[2J"},
		31: {Status: NotTested, Reason: "The run's budget was used up."},
		37: {Status: Failed, Reason: "no"}} {
		b.Results[i].Status, b.Results[i].Reason = r.Status, r.Reason
	}
	b.Results[60].ID = "D12"
	b.Ledger.Left = nil
	b.Calls = b.Calls[:len(b.Calls)-2]
	c := &b.Calls[2]
	for i := range c.Milliseconds {
		c.Milliseconds[i] *= 2.5
	}
	c.Count, c.Milliseconds = 127, c.Milliseconds[2:129]
	if err := b.Check(); err != nil {
		t.Fatal(err)
	}
	text, _ := Diff(a, b)
	if diff := cmp.Diff(wantDiff, text); diff != "" {
		t.Errorf("the text differs (-want +got):\n%s", diff)
	}
	none, worse := Diff(a, a)
	if worse || strings.Contains(none, " -> ") ||
		!strings.Contains(none, "  49 in both: 49 the same, 0 worse") {
		t.Errorf("a report differs from itself:\n%s", none)
	}
}

func TestDiffCountsAReportThatProvesLessAsWorse(t *testing.T) {
	of := func(r *Report) *Measure { return &r.Results[0].Extent[0] }
	for _, test := range []struct {
		name   string
		change func(a, b *Report)
		want   bool
	}{
		{"nothing", func(_, _ *Report) {}, false},
		{"a result that failed", func(_, b *Report) { verdict(DoesNotConform, Failed)(b) }, true},
		{"a result that is blocked", func(_, b *Report) { verdict(BlockedByRack, Blocked)(b) }, true},
		{"a result that was not tested", func(_, b *Report) { status(NotTested)(b) }, true},
		{"a lesser extent", func(a, b *Report) { of(a).Of, of(b).Of, of(b).Looked = 2, 2, 0 }, true},
		{"an extent that grew", func(a, b *Report) { of(a).Of, of(b).Of, of(a).Looked = 2, 2, 1 }, false},
		{"fewer kinds of answers", func(_, b *Report) { of(b).Looked = 1 }, false},
		{"a measure that vanished", func(a, b *Report) { of(a).Of, of(b).What = 2, "x" }, true},
		{"a smaller share", func(a, b *Report) { of(a).Of, of(b).Of = 2, 9 }, true},
		{"a share that hardly changed", func(a, b *Report) {
			*of(a) = Measure{What: "x", Looked: 100, Of: 200}
			*of(b) = Measure{What: "x", Looked: 99, Of: 200}
		}, false},
		{"a result that is gone", func(_, b *Report) { b.Results = b.Results[1:] }, true},
		{"a group that is gone", func(_, b *Report) { b.Results = nil }, true},
		{"a group not selected", func(_, b *Report) { b.Results, b.Run.Selected = nil, nil }, false},
		{"a result that is gone and had not passed", func(a, b *Report) {
			status(NotTested)(a)
			b.Results = slices.DeleteFunc(slices.Clone(b.Results), func(r Result) bool {
				return slices.ContainsFunc(a.Results, func(then Result) bool {
					return then.key() == r.key() && then.Status == NotTested
				})
			})
		}, false},
		{"a new result that passed", func(a, _ *Report) { a.Results = a.Results[1:] }, false},
		{"a new result that failed", func(a, b *Report) {
			verdict(DoesNotConform, Failed)(a)
			verdict(DoesNotConform, Failed)(b)
			b.Results = append(b.Results, Result{Group: "new", ID: "1", Status: Failed, Reason: "x"})
		}, true},
		{"a result that passes now", func(a, _ *Report) { verdict(DoesNotConform, Failed)(a) }, false},
		{"the verdict alone", func(_, b *Report) { b.Verdict = InterruptedRun }, true},
		{"something left", func(_, b *Report) { b.Ledger.Left = []string{"x"} }, true},
		{"a contradiction", func(_, b *Report) { b.Witness.Findings = []string{"x"} }, true},
		{"a failure that was interrupted", func(a, b *Report) {
			verdict(DoesNotConform, Failed)(a)
			verdict(InterruptedRun, Interrupted)(b)
		}, false},
		{"a slower call", func(_, b *Report) {
			b.Calls[0] = NewCalls(API, "disk_create", 0, make([]float64, 50))
		}, false},
	} {
		a, b := good(), good()
		test.change(a, b)
		text, worse := Diff(a, b)
		if worse != test.want || strings.HasSuffix(text, "\nB is worse than A.\n") != test.want {
			t.Errorf("%s: it is worse: %v, expected %v:\n%s", test.name, worse, test.want, text)
		}
	}
}

func TestDiffComparesLatenciesOnlyWithEnoughCalls(t *testing.T) {
	calls := func(n int, ms float64) []Calls {
		samples := make([]float64, n)
		for i := range samples {
			samples[i] = ms
		}
		return []Calls{NewCalls(RPC, "Probe", 0, samples)}
	}
	for _, test := range []struct {
		a, b                    []Calls
		compared, few, oneSided int
		ratio                   string
	}{
		{calls(20, 10), calls(20, 15), 1, 0, 0, "slower, p50 10 ms -> 15 ms (ratio 1.50;"},
		{calls(20, 30), calls(20, 15), 1, 0, 0, "faster, p50 30 ms -> 15 ms (ratio 0.50;"},
		{calls(20, 10), calls(20, 14), 1, 0, 0, ""},
		{calls(20, 0.1), calls(20, 0.9), 1, 0, 0, ""},
		{calls(20, 0), calls(20, 9), 1, 0, 0, "(ratio +Inf;"},
		{calls(19, 10), calls(20, 90), 0, 1, 0, ""},
		{calls(20, 10), nil, 0, 0, 1, ""},
		{nil, calls(20, 10), 0, 0, 1, ""},
	} {
		a, b := minimal(), minimal()
		a.Calls, b.Calls = test.a, test.b
		text, _ := Diff(a, b)
		want := fmt.Sprintf("of %s changed by a factor of 1.5 or more\n  not compared: %d with fewer "+
			"than 20 calls in a report, %d in one report alone\n", plural(test.compared, "operation"),
			test.few, test.oneSided)
		if !strings.Contains(text, want) || !strings.Contains(text, test.ratio) ||
			strings.Contains(text, "(ratio") != (test.ratio != "") {
			t.Errorf("expected %q and %q in\n%s", want, test.ratio, text)
		}
	}
}

func TestCheckReturnsAnErrorForAnInconsistentReport(t *testing.T) {
	for name, r := range reports() {
		if err := r.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, test := range []struct {
		name   string
		change func(*Report)
		// want is a part of the error; if it is empty, the change is allowed.
		want string
	}{
		{"an early end", func(r *Report) { r.Run.Ended = r.Run.Began.Add(-1) }, "before it began"},
		{"no name", func(r *Report) { r.Results[0].ID, r.Results[0].Name = "", "" }, "needs an id"},
		{"the same result twice", func(r *Report) { r.Results[1].ID = "A01" }, "is there twice"},
		{"a success with a reason", func(r *Report) { r.Results[0].Reason = "x" }, "has a reason"},
		{"no extent", func(r *Report) { r.Results[0].Extent = nil }, "does not state how far it looked"},
		{"more than there was", func(r *Report) { r.Results[0].Extent[0].Of = 1 }, "looked at 2 of 1"},
		{"calls twice", func(r *Report) { r.Calls[1].Operation = "disk_create" }, "are there twice"},
		{"more failures than calls", func(r *Report) { r.Calls[0].Failed = 215 }, "215 of 214 failed"},
		{"a call too many", func(r *Report) { r.Calls[0].Count++ }, "214 latencies for 215 calls"},
		{"more faults than ten", func(r *Report) {
			for i := range r.Results {
				r.Results[i].Status = Failed
			}
		}, "and 52 more"},
		{"unsorted calls", func(r *Report) { r.Calls[0].Milliseconds[0] = 1e6 }, "not sorted"},

		{"a failure that conforms", status(Failed), `"conforms", but 60 results passed, 1 failed`},
		{"a blocked result that conforms", status(Blocked), "1 blocked"},
		{"an interrupted result that conforms", status(Interrupted), "1 were interrupted"},
		{"a result that was not tested and conforms", status(NotTested), ""},
		{"no result that conforms", func(r *Report) { r.Results = nil }, "0 results passed"},
		{"a left object that conforms", func(r *Report) { r.Ledger.Left = []string{"x"} }, "1 objects"},
		{"a contradiction", func(r *Report) { r.Witness.Findings = []string{"x"} }, "1 findings"},
		{"nothing failed, and it does not conform", verdict(DoesNotConform, Passed), "0 failed"},
		{"nothing is blocked, and it is blocked", verdict(BlockedByRack, Passed), "0 blocked"},
		{"a failure is blocked", verdict(BlockedByRack, Failed), "1 failed"},
		{"a failure is interrupted", verdict(InterruptedRun, Failed), "1 failed"},
		{"a failure is incomplete", verdict(Incomplete, Failed), "1 failed"},
		{"a failure does not conform", verdict(DoesNotConform, Failed), ""},
		{"a blocked result is blocked", verdict(BlockedByRack, Blocked), ""},
		{"an interrupted result is interrupted", verdict(InterruptedRun, Interrupted), ""},
		{"an interrupted result is incomplete", verdict(Incomplete, Interrupted), ""},
	} {
		r := good()
		test.change(r)
		err := r.Check()
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: Check: %v, expected %q in it", test.name, err, test.want)
		}
	}
}

// status returns a function that gives one result of a report this status.
func status(s Status) func(*Report) {
	return func(r *Report) {
		r.Results[3].Status = s
		if s != Passed {
			r.Results[3].Reason = "x"
		}
	}
}

func verdict(v Verdict, s Status) func(*Report) {
	return func(r *Report) {
		r.Verdict = v
		status(s)(r)
	}
}

func TestLatenciesAreSortedAndLimitedInNumber(t *testing.T) {
	samples := make([]float64, 5003)
	for i := range samples {
		samples[i] = float64(len(samples) - i)
	}
	c := NewCalls(API, "disk_view", 3, samples)
	r := minimal()
	r.Calls = []Calls{c, NewCalls(RPC, "Probe", 0, nil), NewCalls(RPC, "One", 0, []float64{7})}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
	if c.Count != 5003 || len(c.Milliseconds) != 1000 || samples[0] != 5003 {
		t.Errorf("%d of %d samples were kept, of which the first given is now %v",
			len(c.Milliseconds), c.Count, samples[0])
	}
	for q, want := range map[float64]float64{0: 1, 0.5: 2500, 0.95: 4750, 1: 5003} {
		if got := c.Quantile(q); math.Abs(got-want) > 5 || (q == 1 || q == 0) && got != want {
			t.Errorf("Quantile(%v) = %v, expected about %v", q, got, want)
		}
	}
	if r.Calls[1].Quantile(0.5) != 0 || r.Calls[2].Quantile(0.95) != 7 || r.Calls[2].Quantile(0) != 7 {
		t.Error("the quantiles of no call and of one are wrong")
	}
}

func TestReportStatesHowMuchTheTestsLookedAt(t *testing.T) {
	r := example()
	r.Results[0].Extent.Look(Measure{What: "a blank disk of 17 GiB", Looked: 3 << 30, Of: 17 << 30,
		Unit: "bytes", Words: "as far as 20 s allow"})
	const partly = "a blank disk of 17 GiB: 3 GiB of 17 GiB (as far as 20 s allow)"
	if got := r.Results[0].Kept(); got != "kept, as far as "+partly {
		t.Errorf("got %q", got)
	}
	const promises = "53 promises kept, 1 of them as far as the test looked (A01); " +
		"3 broken (A08, A21, D02); 5 not tested (A15, A16, A24, D06, D10)"
	if got := r.Promises(); got != promises {
		t.Errorf("got  %s\nwant %s", got, promises)
	}
	page := string(must(renderPage(r.scrub(nil)))(t))
	for _, want := range []string{promises, "kept, as far as " + partly, "disk_create: 2 kinds of"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}

func TestAnExtentCountsEachKindOfAnswerOnce(t *testing.T) {
	var e Extent
	for _, kind := range []string{"201", "400 InvalidRequest", "201"} {
		e.Answer("disk_create", kind)
	}
	e.Look(Measure{What: "disks", Looked: 2, Of: 3, Unit: "objects"})
	e.Look(Measure{What: "disks", Looked: 3, Of: 3, Unit: "objects"})
	e.Look(Measure{What: "an image", Of: 1, Unit: "names", Words: "needs 1 GiB more"})
	got := ""
	for _, m := range e {
		got += m.String() + "\n"
	}
	if want := "disk_create: 2 kinds of answers (201; 400 InvalidRequest)\ndisks: 5 of 6 objects\n" +
		"an image: not tested (needs 1 GiB more)\n"; got != want || len(e.Partly()) != 2 {
		t.Errorf("got %s, of which %d partly", got, len(e.Partly()))
	}
}
