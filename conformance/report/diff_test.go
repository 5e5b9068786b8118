package report

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// later returns a second report of the example's rack, after an upgrade. One result is better,
// some are worse, and attaches are slower.
func later() *Report {
	r := example()
	r.Rack.Release, r.Rack.APIVersion = "v22 (August 2026)", "2026073100.0.0"
	r.Results[20].Status, r.Results[20].Reason = Passed, ""
	r.Results[30].Status, r.Results[30].Reason = Failed, "expected OK, found Aborted.\x1b[2J"
	r.Results[31].Status, r.Results[31].Reason = NotTested, "The run's budget was used up."
	r.Results[14].Status, r.Results[14].Reason = Blocked, "Another user took the instance."
	r.Results[60].ID = "D12"
	r.Ledger.Left = nil
	for i := range r.Calls {
		if c := &r.Calls[i]; c.Operation == "instance_disk_attach" {
			for j := range c.Milliseconds {
				c.Milliseconds[j] *= 2.5
			}
		}
	}
	r.Calls = r.Calls[:len(r.Calls)-2]
	return r
}

const wantDiff = `Verdict: does not conform in both
  API version              2026060800.0.0 -> 2026073100.0.0
  release                  v20, in this invented example -> v22 (August 2026)
  objects left             1 -> 0

Results: 61 in A, 61 in B
  60 in both: 56 the same, 2 worse, 1 better, 1 otherwise changed
  1 in A alone, 1 in B alone
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
    data D12 Two volumes of one pod are never confused: passed
  in A alone:
    data D11 Two volumes of one pod are never confused: passed

Latencies: the p50 of 1 of 17 operations changed by a factor of 1.5 or more
  not compared: 0 with fewer than 20 calls in a report, 2 in one report alone
  api instance_disk_attach: slower, p50 1.3 s -> 3.3 s (ratio 2.50; 131 and 127 calls)

B is worse than A.
`

func TestADifferenceListsTheWorsenedResultsFirst(t *testing.T) {
	a, b := example(), later()
	for i := range b.Calls {
		if c := &b.Calls[i]; c.Operation == "instance_disk_attach" {
			c.Count, c.Milliseconds = 127, c.Milliseconds[2:129]
		}
	}
	if err := b.Check(); err != nil {
		t.Fatal(err)
	}
	text, _ := Diff(a, b)
	if diff := cmp.Diff(wantDiff, text); diff != "" {
		t.Errorf("the text differs (-want +got):\n%s", diff)
	}
}

func TestGroupsThatOneRunLeftOutAreCounted(t *testing.T) {
	a, b := example(), example()
	a.Results = slices.DeleteFunc(a.Results, func(r Result) bool { return r.Group == "data" })
	b.Results = slices.DeleteFunc(b.Results, func(r Result) bool { return r.Group == "rules" })
	a.Run.Selected = []string{"rules", "ext4", "block"}
	b.Run.Selected = []string{"ext4", "block", "data"}
	const want = `
Results: 50 in A, 37 in B
  26 in both: 26 the same, 0 worse, 0 better, 0 otherwise changed
  24 in A alone, 11 in B alone
  in B alone:
    all of data: 10
    data D02 What was written is read on the second instance: failed
  in A alone:
    all of rules: 24
`
	if text, _ := Diff(a, b); !strings.Contains(text, want) {
		t.Errorf("got\n%s", text)
	}
}

func TestAReportThatProvesLessIsWorse(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(a, b *Report)
		want   bool
	}{
		{"nothing", func(_, _ *Report) {}, false},
		{"a result that failed", func(_, b *Report) { verdict(DoesNotConform, Failed)(b) }, true},
		{"a result that is blocked", func(_, b *Report) { verdict(BlockedByRack, Blocked)(b) }, true},
		{"a result that was not tested", func(_, b *Report) { status(NotTested)(b) }, true},
		{"an extent that shrank", func(a, b *Report) {
			a.Results[0].Extent[0].Of, b.Results[0].Extent[0].Of = 2, 2
			b.Results[0].Extent[0].Looked = 0
		}, true},
		{"an extent that grew", func(a, b *Report) {
			a.Results[0].Extent[0].Of, b.Results[0].Extent[0].Of = 2, 2
			a.Results[0].Extent[0].Looked = 1
		}, false},
		{"fewer kinds of answers", func(_, b *Report) { b.Results[0].Extent[0].Looked = 1 }, false},
		{"a measure that vanished", func(a, b *Report) {
			a.Results[0].Extent[0].Of, b.Results[0].Extent[0].What = 2, "x"
		}, true},
		{"a smaller share", func(a, b *Report) {
			a.Results[0].Extent[0].Of, b.Results[0].Extent[0].Of = 2, 9
		}, true},
		{"a share that hardly changed", func(a, b *Report) {
			a.Results[0].Extent[0] = Measure{What: "x", Looked: 100, Of: 200}
			b.Results[0].Extent[0] = Measure{What: "x", Looked: 99, Of: 200}
		}, false},
		{"a result that is gone", func(_, b *Report) { b.Results = b.Results[1:] }, true},
		{"a group that is gone", func(_, b *Report) { b.Results = nil }, true},
		{"a group that was not to run", func(_, b *Report) {
			b.Results, b.Run.Selected = nil, nil
		}, false},
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

func TestALatencyIsComparedOnlyIfThereAreEnoughCalls(t *testing.T) {
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

// drawReport draws some results and calls of the example, with other statuses, words and latencies.
func drawReport(t *rapid.T) *Report {
	r, word := example(), rapid.String()
	drop := func() bool { return rapid.IntRange(0, 3).Draw(t, "drop") == 0 }
	r.Rack.Release, r.Run.Machine = word.Draw(t, "release"), word.Draw(t, "machine")
	r.Run.Selected = rapid.SliceOfN(rapid.SampledFrom(groups), 0, 4).Draw(t, "selected")
	without := rapid.SampledFrom([]string{"", "rules", "ext4"}).Draw(t, "without")
	r.Results = slices.DeleteFunc(r.Results[18:30], func(result Result) bool { // rules, and ext4
		return result.Group == without || drop()
	})
	for i := range r.Results {
		result := &r.Results[i]
		result.Status = rapid.SampledFrom(Statuses()).Draw(t, "status")
		result.Name, result.Reason = word.Draw(t, "name"), word.Draw(t, "reason")
	}
	r.Calls = slices.DeleteFunc(r.Calls[:4], func(Calls) bool { return drop() })
	for i, c := range r.Calls {
		r.Calls[i] = NewCalls(c.Kind, c.Operation, 0,
			rapid.SliceOfN(rapid.Float64Range(0, 1e300), 0, 50).Draw(t, "samples"))
	}
	return r
}

func TestTheNumbersOfADifferenceAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawReport(t), drawReport(t)
		text, _ := Diff(a, b)
		back, _ := Diff(b, a)
		none, worse := Diff(a, a)
		if n := len(a.Results); worse || strings.Contains(none, " -> ") ||
			!strings.Contains(none, fmt.Sprintf("  %d in both: %d the same, 0 worse", n, n)) {
			t.Fatalf("a report differs from itself:\n%s", none)
		}
		// The numbers are those of each section: all in both, the same, and so on.
		var n, m [7]int
		for text, n := range map[string]*[7]int{text: &n, back: &m} {
			_, numbers, _ := strings.Cut(text, " in B\n")
			_, _ = fmt.Sscanf(numbers, "  %d in both: %d the same, %d worse, %d better, %d otherwise "+
				"changed\n  %d in A alone, %d in B alone", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6])
		}
		if n[0] != n[1]+n[2]+n[3]+n[4] || n[0]+n[5] != len(a.Results) || n[0]+n[6] != len(b.Results) {
			t.Fatalf("the results do not add up to %d and %d:\n%s", len(a.Results), len(b.Results), text)
		}
		if n[1] != m[1] || n[5] != m[6] ||
			strings.Count(text, "(ratio") != strings.Count(back, "(ratio") {
			t.Fatalf("there and back differ:\n%s\n%s", text, back)
		}
		if strings.ContainsFunc(strings.ReplaceAll(text, "\n", ""), func(c rune) bool {
			return c < ' ' || c == 0x7f
		}) {
			t.Fatalf("the text has control characters: %q", text)
		}
	})
}
