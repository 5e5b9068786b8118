package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
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
