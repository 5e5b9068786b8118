package report

import (
	"math"
	"strings"
	"testing"
)

func TestAnInconsistentReportIsAnError(t *testing.T) {
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
		{"an end before the beginning", func(r *Report) {
			r.Run.Ended = r.Run.Began.Add(-1)
		}, "before it began"},
		{"neither id nor name", func(r *Report) {
			r.Results[0].ID, r.Results[0].Name = "", ""
		}, "needs an id"},
		{"the same result twice", func(r *Report) { r.Results[1].ID = "A01" }, "is there twice"},
		{"a success with a reason", func(r *Report) { r.Results[0].Reason = "x" }, "has a reason"},
		{"a success that does not say how far it looked", func(r *Report) {
			r.Results[0].Extent = nil
		}, "does not state how far it looked"},
		{"more than there was", func(r *Report) { r.Results[0].Extent[0].Of = 1 }, "looked at 2 of 1"},
		{"calls twice", func(r *Report) { r.Calls[1].Operation = "disk_create" }, "are there twice"},
		{"more failures than calls", func(r *Report) { r.Calls[0].Failed = 215 }, "215 of 214 failed"},
		{"a call too many", func(r *Report) { r.Calls[0].Count++ }, "214 latencies for 215 calls"},
		{"unsorted calls", func(r *Report) { r.Calls[0].Milliseconds[0] = 1e6 }, "not sorted"},

		{"a failure that conforms", status(Failed), `"conforms", but 60 results passed, 1 failed`},
		{"a blocked result that conforms", status(Blocked), "1 blocked"},
		{"an interrupted result that conforms", status(Interrupted), "1 were interrupted"},
		{"a result that was not tested and conforms", status(NotTested), ""},
		{"no result that conforms", func(r *Report) { r.Results = nil }, "0 results passed"},
		{"a left object that conforms", func(r *Report) { r.Ledger.Left = []string{"x"} }, "1 objects"},
		{"a contradiction that conforms", func(r *Report) {
			r.Witness.Findings = []string{"x"}
		}, "1 findings"},
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
		t.Run(test.name, func(t *testing.T) {
			r := good()
			test.change(r)
			err := r.Check()
			if test.want == "" && err != nil {
				t.Errorf("Check: %v, expected nil", err)
			}
			if test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("Check: %v, expected %q in it", err, test.want)
			}
		})
	}
}

// status returns a change that gives one result of a report the status.
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

func TestAnErrorNamesAtMostTenFaults(t *testing.T) {
	r := good()
	for i := range r.Results {
		r.Results[i].Status = Failed
	}
	err := r.Check()
	if err == nil || strings.Count(err.Error(), "\n") != 10 ||
		!strings.HasSuffix(err.Error(), "and 52 more") {
		t.Errorf("Check: %v, expected ten lines and how many more there are", err)
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

func TestAReportStatesHowFarTheTestsLooked(t *testing.T) {
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
	text := string(must(junit(r))(t))
	for _, want := range []string{promises, "kept, as far as " + partly, "disk_create: 2 kinds of"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if !strings.Contains(text, partly) {
		t.Errorf("the JUnit report lacks %q", partly)
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
