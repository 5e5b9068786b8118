package csierr

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
)

var update = flag.Bool("update", false, "write docs/reasons.md")

const pageHead = `# Reasons

<!-- written by go test ./internal/csierr -run Page -update -->

Every error of the driver is one line: ` + "`Reason: sentence`" + `. The reason is one word that
does not change between releases, for dashboards, alerts and this page. The sentence is for people:
what was expected, what was found, and what to do. No message contains a token, a secret or a mount
flag.

The first line of an entry is the gRPC code. "Do" says what a person has to do; where the
orchestrator repeats the call by itself, nothing.
`

func TestThePageOfReasonsIsTheTable(t *testing.T) {
	const path = "../../docs/reasons.md"
	var want strings.Builder
	want.WriteString(pageHead)
	for _, s := range sections {
		fmt.Fprintf(&want, "\n## %s\n", s.title)
		if s.intro != "" {
			fmt.Fprintf(&want, "\n%s\n", wrap(s.intro))
		}
		for _, e := range s.reasons {
			fmt.Fprintf(&want, "\n### `%s`\n\n`%s`%s.\n%s\n\n%s\n", e.Reason, inCapitals(e.Code),
				e.Also, wrap(e.Means), wrap("Do: "+e.Do))
		}
	}
	if *update {
		if err := os.WriteFile(path, []byte(want.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.String(), string(got)); diff != "" {
		t.Errorf("docs/reasons.md is not the table; write it with "+
			"go test ./internal/csierr -run Page -update (-table +page):\n%s", diff)
	}
}

func TestEveryReasonHasOneCompleteExplanation(t *testing.T) {
	files, err := filepath.Glob("reasons_*.go")
	if err != nil {
		t.Fatal(err)
	}
	var defined, explained []Reason
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(` Reason += "(\w+)"`).FindAllSubmatch(source, -1) {
			defined = append(defined, Reason(m[1]))
		}
	}
	for _, s := range sections {
		for _, e := range s.reasons {
			explained = append(explained, e.Reason)
			if e.Code == codes.OK || !strings.HasSuffix(e.Means, ".") || e.Do == "" {
				t.Errorf("%s lacks its code, or one of its texts is no sentence: %+v", e.Reason, e)
			}
		}
	}
	slices.Sort(defined)
	slices.Sort(explained)
	if diff := cmp.Diff(defined, explained); diff != "" {
		t.Errorf("the table does not explain every reason once (-constants +table):\n%s", diff)
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
	files, err := filepath.Glob("reasons_*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		constant := regexp.MustCompile(`(\w+) +Reason += "(\w+)"`)
		for _, m := range constant.FindAllStringSubmatch(string(source), -1) {
			named := regexp.MustCompile(`csierr\.` + m[1] + `\b|"` + m[2] + `"`)
			if !named.MatchString(tests.String()) {
				t.Errorf("no test causes %s", m[2])
			}
		}
	}
}

// wrap breaks a text into lines of at most 120 characters.
func wrap(text string) string {
	var lines strings.Builder
	width := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i > 0 && width+1+len(word) > 120:
			lines.WriteByte('\n')
			width = 0
		case i > 0:
			lines.WriteByte(' ')
			width++
		}
		lines.WriteString(word)
		width += len(word)
	}
	return lines.String()
}

// inCapitals returns the name of a code as CSI writes it.
func inCapitals(code codes.Code) string {
	var name strings.Builder
	for i, r := range code.String() {
		if i > 0 && unicode.IsUpper(r) {
			name.WriteByte('_')
		}
		name.WriteRune(unicode.ToUpper(r))
	}
	return name.String()
}
