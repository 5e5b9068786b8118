package csierr

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// entry is a reason's entry of the page, and definition its constant.
var (
	entry      = regexp.MustCompile("### `(\\w+)`\n\n`(\\w+)`.*\\.\n[^#]+\\.\n\nDo: ([^#]+)\n")
	definition = regexp.MustCompile(`\t(\w+) +Reason = "(\w+)"`)
)

func TestThePageOfReasonsIsTheTable(t *testing.T) {
	page, err := os.ReadFile("../../docs/reasons.md")
	if err != nil {
		t.Fatal(err)
	}
	var explained []Explanation
	for _, m := range entry.FindAllStringSubmatch(string(page), -1) {
		e := Explanation{Reason: Reason(m[1]), Do: strings.Join(strings.Fields(m[3]), " ")}
		name := strings.Replace(m[2], "CANCELED", "CANCELLED", 1) // as gRPC spells it
		if err := e.Code.UnmarshalJSON([]byte(`"` + name + `"`)); err != nil {
			t.Errorf("%s: %v", e.Reason, err)
		}
		explained = append(explained, e)
	}
	if n := strings.Count(string(page), "\n### "); n != len(explained) {
		t.Errorf("%d of %d entries have a code, a meaning, and what to do", len(explained), n)
	}
	if diff := cmp.Diff(table, explained); diff != "" {
		t.Errorf("docs/reasons.md has other reasons, codes or advice (-table +page):\n%s", diff)
	}
}

func TestEveryReasonIsInTheTableOnce(t *testing.T) {
	source, err := os.ReadFile("reasons.go")
	if err != nil {
		t.Fatal(err)
	}
	var defined, explained []Reason
	for _, m := range definition.FindAllStringSubmatch(string(source), -1) {
		defined = append(defined, Reason(m[2]))
	}
	for _, e := range table {
		explained = append(explained, e.Reason)
	}
	if diff := cmp.Diff(defined, explained); diff != "" {
		t.Errorf("the table is not the constants in their order (-constants +table):\n%s", diff)
	}
}

// TestEveryReasonIsCausedByATest searches the driver's tests and the proof on generated disks. A
// test names a reason by its constant, the proof by its word.
func TestEveryReasonIsCausedByATest(t *testing.T) {
	var tests strings.Builder
	for _, pattern := range []string{"driver/*", "driver/*/*", "internal/rack/*", "internal/volume/*",
		"proofs/corpus/*"} {
		files, err := filepath.Glob("../../" + pattern + "_test.go")
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, err)
		}
		for _, file := range files {
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(source)
		}
	}
	source, err := os.ReadFile("reasons.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range definition.FindAllStringSubmatch(string(source), -1) {
		named := regexp.MustCompile(`csierr\.` + m[1] + `\b|"` + m[2] + `"`)
		if !named.MatchString(tests.String()) {
			t.Errorf("no test causes %s", m[2])
		}
	}
}
