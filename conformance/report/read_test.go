package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

func TestAnInvalidReportIsRefusedWithASentence(t *testing.T) {
	valid := string(must(encode(good().scrub(nil)))(t))
	for _, test := range []struct {
		name, from, to, want string
	}{
		{"an unknown property", `"why":`, `"reason": "", "why":`,
			`at the report: additional properties 'reason' not allowed`},
		{"an unknown property of a nested object", `"host":`, `"port": 1, "host":`,
			`at /rack: additional properties 'port' not allowed`},
		{"a property in another case", `"verdict":`, `"Verdict":`, `at the report:`},
		{"a missing property", `"clean_up":`, `"Clean_up":`, `at the report:`},
		{"an unknown status", `"status": "passed"`, `"status": "ok"`, `at /results/0/status: value must`},
		{"a number for a word", `"mark": "`, `"mark": 1, "x": "`, `at /run`},
		{"an invalid time", `"began": "2026`, `"began": "today`, `at /run/began:`},
		{"another schema", `"schema": 1`, `"schema": 2`, "it was written in schema 2"},
		{"text after the end", "\n}\n", "\n}\n{}", "expected JSON: "},
		{"a truncated report", "\n}\n", "", "expected JSON: "},
		{"results that disagree", `"verdict": "conforms"`, `"verdict": "blocked"`, "does not add up"},
		{"null for a list", `"preflight": [`, `"preflight": null, "x": [`, "at "},
		{"a huge number", `"tries": 1`, `"tries": 1e99`, "at /results/0/tries:"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if !strings.Contains(valid, test.from) {
				t.Fatalf("the report does not have %q", test.from)
			}
			path := filepath.Join(t.TempDir(), "report.json")
			wrong := strings.Replace(valid, test.from, test.to, 1)
			if err := os.WriteFile(path, []byte(wrong), 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := Read(path)
			if err == nil || !strings.Contains(err.Error(), path+" is no report: ") ||
				!strings.Contains(err.Error(), test.want) {
				t.Errorf("Read: %v, expected the path and %q", err, test.want)
			}
		})
	}
}

func TestReadingAFolderWithoutAReportNamesWhatIsExpected(t *testing.T) {
	for _, path := range []string{t.TempDir(), "/nowhere/at/all"} {
		_, err := Read(path)
		if err == nil || !strings.Contains(err.Error(), "expected a folder that oxide-conformance") {
			t.Errorf("Read(%q): %v, expected what to give it", path, err)
		}
	}
}

func FuzzRead(f *testing.F) {
	small := good()
	small.Results, small.Preflight = small.Results[:1], small.Preflight[:1]
	small.Calls = []Calls{NewCalls(RPC, "Probe", 1, []float64{1, 2.5, 300})}
	for _, r := range []*Report{small, minimal()} { // large seeds make a fuzzer slow
		text, err := encode(r.scrub(nil))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"schema": 1e400}`))
	f.Add([]byte(`{"schema": 1, "results": [null]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := decode(text)
		if err != nil {
			if r != nil || err.Error() == "" {
				t.Errorf("decode: %v and %q", r, err)
			}
			return
		}
		if err := r.Check(); err != nil {
			t.Errorf("decode accepts what does not add up: %v", err)
		}
		again, err := decode(must(encode(r.scrub(nil)))(t))
		if err != nil {
			t.Fatalf("what was read cannot be written and read: %v", err)
		}
		if diff := cmp.Diff(r, again, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("what was read and written differs:\n%s", diff)
		}
		if _, err := renderPage(r); err != nil {
			t.Errorf("the page of what was read: %v", err)
		}
		if d := Diff(r, r); d.Worse() || d.String() == "" {
			t.Errorf("a report is worse than itself:\n%s", d)
		}
	})
}

func TestReadReturnsAnyReportThatWasWritten(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		want := drawReport(t)
		if err := Write(dir, want); err != nil {
			t.Fatal(err)
		}
		got, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("what was written differs from what was read (-want +got):\n%s", diff)
		}
	})
}

// drawReport draws a random consistent report.
func drawReport(t *rapid.T) *Report {
	word := rapid.Map(rapid.String(), Plain)
	words := rapid.SliceOfN(word, 0, 3)
	at := rapid.Map(rapid.Int64Range(0, 4e18), func(n int64) time.Time {
		return time.Unix(0, n).UTC()
	})
	counts := rapid.MapOfN(word, rapid.IntRange(0, 1e6), 0, 4)
	began := at.Draw(t, "began")
	r := &Report{
		Schema: SchemaVersion, Why: "because " + word.Draw(t, "why"),
		Run: Run{ID: word.Draw(t, "id"), Mark: word.Draw(t, "mark"), Began: began,
			Ended:   began.Add(time.Duration(rapid.Int64Range(0, 1e15).Draw(t, "took"))),
			Machine: word.Draw(t, "machine"), Second: word.Draw(t, "second"),
			Command: words.Draw(t, "command"), Selected: words.Draw(t, "selected")},
		Rack: Rack{Host: word.Draw(t, "host"), HotPlug: rapid.SampledFrom(
			[]HotPlug{HotPlugYes, HotPlugNo, HotPlugUnknown}).Draw(t, "hot-plug"),
			Simulated: rapid.Bool().Draw(t, "simulated")},
		Versions: Versions{Tools: rapid.MapOfN(word, word, 0, 3).Draw(t, "tools")},
		Preflight: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Line {
			return Line{Name: word.Draw(t, "name"), Found: word.Draw(t, "found"),
				Status: rapid.SampledFrom([]LineStatus{Pass, Warn, Fail, Skip}).Draw(t, "status")}
		}), 0, 3).Draw(t, "preflight"),
		Results: drawResults(t), Calls: drawCalls(t),
		Ledger: Ledger{Before: counts.Draw(t, "before"), After: counts.Draw(t, "after"),
			Left: words.Draw(t, "left")},
		Witness: Witness{Source: word.Draw(t, "source"), Findings: words.Draw(t, "findings")},
		CleanUp: word.Draw(t, "clean up"),
	}
	switch {
	case r.Count(Failed)+len(r.Ledger.Left)+len(r.Witness.Findings) > 0:
		r.Verdict = DoesNotConform
	case r.Count(Interrupted) > 0:
		r.Verdict = InterruptedRun
	case r.Count(Blocked) > 0:
		r.Verdict = BlockedByRack
	case r.Count(Passed) > 0:
		r.Verdict = Conforms
	default:
		r.Verdict = Incomplete
	}
	return r
}

func drawResults(t *rapid.T) []Result {
	word := rapid.Map(rapid.String(), Plain)
	amount := rapid.Float64Range(0, 1e9)
	exchange := rapid.Custom(func(t *rapid.T) Exchange {
		return Exchange{Kind: rapid.SampledFrom([]Kind{API, RPC}).Draw(t, "kind"),
			Operation: word.Draw(t, "operation"), Path: word.Draw(t, "path"),
			Status: rapid.IntRange(0, 599).Draw(t, "status"), Answer: word.Draw(t, "answer"),
			Milliseconds: amount.Draw(t, "milliseconds")}
	})
	return rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) Result {
		r := Result{Group: rapid.SampledFrom([]string{"rules", "data", "ext4"}).Draw(t, "group"),
			ID: rapid.StringMatching(`[A-Z][0-9]{2}`).Draw(t, "id"), Name: word.Draw(t, "name"),
			Status:  rapid.SampledFrom(Statuses()).Draw(t, "status"),
			Seconds: amount.Draw(t, "seconds"), Tries: rapid.IntRange(0, 9).Draw(t, "tries"),
			Evidence: rapid.SliceOfN(exchange, 0, 2).Draw(t, "evidence")}
		if r.Status != Passed {
			r.Reason = "reason " + word.Draw(t, "reason")
		}
		return r
	}), 0, 8, Result.key).Draw(t, "results")
}

func drawCalls(t *rapid.T) []Calls {
	return rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) Calls {
		samples := rapid.SliceOfN(rapid.Float64Range(0, 1e300), 0, 50).Draw(t, "samples")
		return NewCalls(rapid.SampledFrom([]Kind{API, RPC}).Draw(t, "kind"),
			rapid.Map(rapid.String(), Plain).Draw(t, "operation"),
			rapid.IntRange(0, len(samples)).Draw(t, "failed"), samples)
	}), 0, 4, func(c Calls) string { return string(c.Kind) + " " + c.Operation }).Draw(t, "calls")
}
