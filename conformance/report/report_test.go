package report

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"html"
	"math"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func reports() map[string]*Report {
	interrupted := example()
	interrupted.Verdict, interrupted.Why = InterruptedRun, "The run was interrupted by SIGINT."
	for i := range interrupted.Results {
		if r := &interrupted.Results[i]; r.Status == Failed {
			r.Status = Interrupted
		}
	}
	return map[string]*Report{"full": good(), "empty": minimal(), "failed": example(),
		"interrupted": interrupted, "hostile": hostile()}
}

func TestWriteWritesAllFilesWithEveryResult(t *testing.T) {
	for name, want := range reports() {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "new", "folder")
			must(t, Write(dir, want))
			for _, path := range []string{dir, filepath.Join(dir, jsonFile)} {
				// Write replaces control characters, so Read returns the scrubbed report.
				got := try(Read(path))(t)
				if diff := cmp.Diff(want.scrub(nil), got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("Read(%q) differs (-want +got):\n%s", path, diff)
				}
			}
			var names []string
			for _, entry := range try(os.ReadDir(dir))(t) {
				names = append(names, entry.Name())
			}
			if want := []string{"index.html", "junit.xml", "report.json"}; !slices.Equal(names, want) {
				t.Errorf("the folder has %q, expected %q", names, want)
			}
			var all testSuites
			err := xml.Unmarshal(try(os.ReadFile(filepath.Join(dir, junitFile)))(t), &all)
			cases := 0
			for _, suite := range all.Suites {
				cases += len(suite.Cases)
			}
			if wanted := len(want.Results) + 1; err != nil || cases != wanted || all.Tests != wanted {
				t.Errorf("%d cases of %d, expected %d with the verdict: %v", cases, all.Tests, wanted, err)
			}
		})
	}
}

func TestAJUnitReportHasEveryStatusAndTheVerdict(t *testing.T) {
	const file = "testdata/junit.xml"
	r := example()
	r.Results = r.Results[7 : 7+len(Statuses())]
	for i, status := range Statuses() {
		result := &r.Results[i]
		if result.Status = status; result.Reason == "" && status != Passed {
			result.Reason = "why it is " + string(status)
		}
	}
	text := try(junit(r))(t)
	if *update {
		must(t, os.WriteFile(file, text, 0o644))
	}
	if diff := cmp.Diff(string(try(os.ReadFile(file))(t)), string(text)); diff != "" {
		t.Errorf("the file differs (-want +got):\n%s", diff)
	}
	for verdict, want := range map[Verdict]Status{Conforms: Passed, BlockedByRack: Blocked,
		Incomplete: Interrupted, InterruptedRun: Interrupted, DoesNotConform: Failed} {
		if got := verdictStatus(verdict); got != want {
			t.Errorf("a run that is %s counts as a spec that is %s, not %s", verdict, got, want)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func try[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must(t, err)
		return value
	}
}

func TestReadSaysWhatIsWrongWithAnInvalidReport(t *testing.T) {
	valid := string(try(encode(good().scrub(nil)))(t))
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
		{"another schema", `"schema": 2`, `"schema": 1`, "it was written in schema 1"},
		{"text after the end", "\n}\n", "\n}\n{}", "expected JSON: "},
		{"a truncated report", "\n}\n", "", "expected JSON: "},
		{"results that disagree", `"verdict": "conforms"`, `"verdict": "blocked"`, "does not add up"},
		{"null for a list", `"preflight": [`, `"preflight": null, "x": [`, "at "},
		{"a huge number", `"tries": 1`, `"tries": 1e99`, "at /results/0/tries:"},
	} {
		_, err := decode([]byte(strings.Replace(valid, test.from, test.to, 1)))
		if !strings.Contains(valid, test.from) || err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%s instead of %q: %v, expected %q", test.name, test.from, err, test.want)
		}
	}
}

// Read must not wait for a writer of the FIFO.
func TestReadRefusesAPathWithoutAReport(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	must(t, exec.CommandContext(t.Context(), "mkfifo", fifo).Run())
	for path, want := range map[string]string{t.TempDir(): "expected a folder that oxide-conformance",
		"/nowhere/at/all": "expected a folder that oxide-conformance",
		fifo:              fifo + " is no report: expected JSON: "} {
		if _, err := Read(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Read(%q): %v, expected %q", path, err, want)
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
	f.Add([]byte(`{"schema": 2, "results": [null]}`))
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
		again, err := decode(try(encode(r.scrub(nil)))(t))
		if err != nil {
			t.Fatalf("what was read cannot be written and read: %v", err)
		}
		if diff := cmp.Diff(r, again, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("what was read and written differs:\n%s", diff)
		}
		if _, err := renderPage(r); err != nil {
			t.Errorf("the page of what was read: %v", err)
		}
		if text, worse := Diff(r, r); worse {
			t.Errorf("a report is worse than itself:\n%s", text)
		}
	})
}

// canary is a secret with characters that every encoding changes.
const canary = `oxide-token-"7f<3a>&9c'/+%=ü e1`

// spellings returns encodings of the canary. It shares no code with Redactor.
func spellings() map[string]string {
	basic := base64.StdEncoding.EncodeToString
	return map[string]string{
		"as it is": canary,
		"query":    url.QueryEscape(canary),
		"path":     url.PathEscape(canary),
		"lower-case escapes": regexp.MustCompile(`%..`).ReplaceAllStringFunc(
			url.QueryEscape(canary), strings.ToLower),
		"HTML":             html.EscapeString(canary),
		"JSON":             strings.Trim(fmt.Sprintf("%q", canary), `"`) + "x",
		"hexadecimal":      hex.EncodeToString([]byte(canary)),
		"base64":           basic([]byte(canary)),
		"URL-safe base64":  base64.RawURLEncoding.EncodeToString([]byte(canary)),
		"base64, one on":   basic([]byte("u" + canary + "tail")),
		"base64, two on":   basic([]byte("u:" + canary)),
		"base64, three on": basic([]byte("me:" + canary + "\n")),
		"with a line end":  canary + "\n",
	}
}

func TestWriteRedactsSecretsInFilesAndErrors(t *testing.T) {
	leaks := []string{canary, "\x1b", `\u001b`, "\u202e", `\u202e`, "\x07"}
	for _, spelling := range spellings() {
		leaks = append(leaks, spelling[8:len(spelling)-8]) // its ends may depend on the text around it
	}
	for name, spelling := range spellings() {
		t.Run(name, func(t *testing.T) {
			planted := 0
			spoiled := copyOf(reflect.ValueOf(*example()), func(v reflect.Value) string {
				planted++
				return v.String() + " " + spelling + " \x1b]0;\x07\u202e"
			}).Interface().(Report)
			r := &spoiled
			r.Rack.Simulated = true
			if planted < 1000 {
				t.Fatalf("%d strings got the secret, expected all of the example", planted)
			}
			dir := filepath.Join(t.TempDir(), "report")
			err := Write(dir, r, canary+"\n")
			if err == nil || !strings.Contains(r.Why, spelling) {
				t.Fatalf("a report whose every word is changed adds up, or Write changed it: %q", r.Why)
			}
			texts := map[string]string{"the error": err.Error()}
			for _, file := range []string{jsonFile, junitFile, pageFile} {
				texts[file] = string(try(os.ReadFile(filepath.Join(dir, file)))(t))
				if !strings.Contains(texts[file], redacted) {
					t.Errorf("%s has no %s", file, redacted)
				}
			}
			for file, text := range texts {
				for _, leak := range leaks {
					if at := strings.Index(text, leak); at >= 0 {
						t.Fatalf("%s contains %q: …%.120s…", file, leak, text[max(0, at-40):])
					}
				}
			}
		})
	}
}

func TestRedactorKeepsTextThatIsNoSecret(t *testing.T) {
	const text = "a disk of 2 GiB, Y2FuYXJ5, %2F and &amp;"
	for _, secrets := range [][]string{nil, {""}, {" "}, {" \n"}, {canary}} {
		if got := Redactor(secrets...).Replace(text); got != text {
			t.Errorf("Redactor(%q) changes %q to %q", secrets, text, got)
		}
	}
}

func TestPlainWriterReplacesControlCharacters(t *testing.T) {
	for text, want := range map[string]string{
		"two\nlines\tand a tab, é, 漢, 🙂": "two\nlines\tand a tab, é, 漢, 🙂",
		"\x1b[2Jgone\r\x07":              "\uFFFD[2Jgone\uFFFD\uFFFD",
		"\u009b2J":                       "\uFFFD2J",
		"a\u202eb\u2066c\u200fd\ufeff":   "a\uFFFDb\uFFFDc\uFFFDd\uFFFD",
		"\u2028\xff":                     "\uFFFD\uFFFD",
	} {
		var out strings.Builder
		if n, err := (PlainWriter{To: &out}).Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("%q: wrote %d bytes, %v", text, n, err)
		}
		if out.String() != want {
			t.Errorf("%q is written as %q, want %q", text, out.String(), want)
		}
	}
}

func TestTheHeadlineNamesTheGroupsOfAPartialRun(t *testing.T) {
	r := good()
	r.Run.Selected = []string{"data"}
	page, err := renderPage(r)
	if want := "<h1>Conforms (only data)</h1>"; err != nil || !strings.Contains(string(page), want) {
		t.Errorf("the page lacks %s (%v)", want, err)
	}
	for _, selected := range [][]string{nil, groups} {
		if r.Run.Selected = selected; r.Headline() != "Conforms" {
			t.Errorf("of %q: %s", selected, r.Headline())
		}
	}
}

const wantDiff = `Verdict: does not conform in both
  API version              2026060800.0.0 -> 2026073100.0.0
  release                  v20, in this invented example -> v22 (August 2026)
  groups                   rules, ext4, xfs, data -> rules, ext4, block, data
  objects left             1 -> 0

Results: 49 in A, 61 in B
  47 in both: 43 the same, 2 worse, 1 better, 1 otherwise changed
  2 in A alone, 14 in B alone
  worse:
    ext4 E07 The rack does in example E07 what the driver expects: passed -> failed
      expected OK, found Aborted. [2J
    ext4 E08 The rack does in example E08 what the driver expects: passed -> not tested
      The run's budget was used up.
  better:
    rules A21 A detached disk detaches again without an error: failed -> passed
  otherwise changed:
    rules A15 The rack does in example A15 what the driver expects: not tested -> blocked
      Another user took the instance.
  in B alone:
    all of block: 12
    block B01 The rack does in example B01 what the driver expects: failed
    data D12 The rack does in example D11 what the driver expects: passed
  in A alone:
    all of xfs: 1
    data D11 The rack does in example D11 what the driver expects: passed

Latencies: the p50 of 1 of 4 operations changed by a factor of 1.5 or more
  not compared: 0 with fewer than 20 calls in a report, 2 in one report alone
  api instance_disk_attach: slower, p50 1.4 s -> 3.4 s (ratio 2.50; 131 and 127 calls)

B is worse than A.
`

// A is the report of a run without raw block. B is the report after an upgrade, without xfs. In B
// one result is better, some are worse, and attaches are slower.
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
	must(t, b.Check())
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

func TestDiffSaysWhetherTheLaterReportIsWorse(t *testing.T) {
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
			*of(a), *of(b) = Measure{Looked: 100, Of: 200}, Measure{Looked: 99, Of: 200}
		}, false},
		{"a result that is gone", func(_, b *Report) { b.Results = b.Results[1:] }, true},
		{"a group that is gone", func(_, b *Report) { b.Results = nil }, true},
		{"a group not selected", func(_, b *Report) { b.Results, b.Run.Selected = nil, nil }, false},
		{"a result that is gone and had not passed", func(a, b *Report) {
			status(NotTested)(a)
			b.Results = slices.Delete(b.Results, 3, 4) // the result that status() has changed
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
		return []Calls{NewCalls(RPC, "Probe", 0, slices.Repeat([]float64{ms}, n))}
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
		want   string
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
		{"no result that conforms", func(r *Report) { r.Results = nil }, "0 results passed"},
		{"a left object that conforms", func(r *Report) { r.Ledger.Left = []string{"x"} }, "1 objects"},
		{"a contradiction", func(r *Report) { r.Witness.Findings = []string{"x"} }, "1 findings"},
		{"nothing failed, and it does not conform", verdict(DoesNotConform, Passed), "0 failed"},
		{"nothing is blocked, and it is blocked", verdict(BlockedByRack, Passed), "0 blocked"},
		{"a failure is blocked", verdict(BlockedByRack, Failed), "1 failed"},
		{"a failure is interrupted", verdict(InterruptedRun, Failed), "1 failed"},
		{"a failure is incomplete", verdict(Incomplete, Failed), "1 failed"},
	} {
		r := good()
		test.change(r)
		if err := r.Check(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: Check: %v, expected %q in it", test.name, err, test.want)
		}
	}
}

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
	page := string(try(renderPage(r))(t))
	if !strings.Contains(page, "Probe: no call") || !strings.Contains(page, `data-label="max">–<`) {
		t.Errorf("the page does not show that there was no call:\n%s", page)
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
	page := string(try(renderPage(r.scrub(nil)))(t))
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
