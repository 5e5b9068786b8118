package report

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"html"
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
			if err := Write(dir, want); err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{dir, filepath.Join(dir, jsonFile)} {
				// Write replaces control characters, so the report that is read is the scrubbed one.
				got := must(Read(path))(t)
				if diff := cmp.Diff(want.scrub(nil), got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("Read(%q) differs (-want +got):\n%s", path, diff)
				}
			}
			var names []string
			for _, entry := range must(os.ReadDir(dir))(t) {
				names = append(names, entry.Name())
			}
			if want := []string{"index.html", "junit.xml", "report.json"}; !slices.Equal(names, want) {
				t.Errorf("the folder has %q, expected %q", names, want)
			}
			var all testSuites
			err := xml.Unmarshal(must(os.ReadFile(filepath.Join(dir, junitFile)))(t), &all)
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

// The test compares a report that has one result of each status with testdata/junit.xml.
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
	text := must(junit(r))(t)
	if *update {
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(must(os.ReadFile(file))(t)), string(text)); diff != "" {
		t.Errorf("the file differs (-want +got):\n%s", diff)
	}
	for verdict, want := range map[Verdict]Status{Conforms: Passed, BlockedByRack: Blocked,
		Incomplete: Interrupted, InterruptedRun: Interrupted, DoesNotConform: Failed} {
		if got := verdictStatus(verdict); got != want {
			t.Errorf("a run that is %s counts as a spec that is %s, not %s", verdict, got, want)
		}
	}
}

func must[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func TestReadNamesTheFaultOfAnInvalidReport(t *testing.T) {
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
		{"another schema", `"schema": 2`, `"schema": 1`, "it was written in schema 1"},
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

// Read must not wait for a writer of the FIFO.
func TestReadRefusesFilesThatAreNoReports(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := exec.CommandContext(t.Context(), "mkfifo", fifo).Run(); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{t.TempDir(): "expected a folder that oxide-conformance",
		"/nowhere/at/all": "expected a folder that oxide-conformance", fifo: "is no report"} {
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
	f.Add([]byte(`{"schema": 1e400}`))
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
		if text, worse := Diff(r, r); worse {
			t.Errorf("a report is worse than itself:\n%s", text)
		}
	})
}

// canary is a secret with characters that every encoding changes.
const canary = `oxide-token-"7f<3a>&9c'/+%=ü e1`

// spellings returns the encodings of the canary that a report may contain. It uses no code of
// Redactor.
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
				texts[file] = string(must(os.ReadFile(filepath.Join(dir, file)))(t))
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
