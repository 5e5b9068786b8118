package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fixture writes a module with two packages. grade has no tests of its own, and the tests of school
// cover one of its functions.
func fixture(t *testing.T) (grade, school string) {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":         "module example.test/m\n\ngo 1.26\n",
		"grade/grade.go": "package grade\n\nfunc Pass(n int) bool { return n > 4 }\n\nfunc Fail(n int) bool { return n < 2 }\n",
		"school/school_test.go": "package school\n\nimport (\n\t\"testing\"\n\n\t\"example.test/m/grade\"\n)\n\n" +
			"func TestPass(t *testing.T) {\n\tif grade.Pass(4) || !grade.Pass(5) {\n\t\tt.Fatal()\n\t}\n}\n",
		"school/school.go": "package school\n",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(root, "grade"), filepath.Join(root, "school")
}

func TestTheTestsOfAnotherPackageCatchAMutantThatTheyReach(t *testing.T) {
	grade, school := fixture(t)
	results, err := measure(t.Context(), []string{grade}, options{n: 100, seed: 1,
		budget: time.Minute, tests: []string{grade, school}})
	if err != nil {
		t.Fatal(err)
	}
	var caught, survived int
	for _, r := range results {
		inPass := strings.Contains(r.before, "4")
		switch {
		case r.caught != inPass:
			t.Errorf("%s -> %s: caught is %v (%s)", r.before, r.after, r.caught, r.by)
		case r.caught && r.by != "TestPass", !r.caught && r.by != "no test reaches it":
			t.Errorf("%s -> %s: %s", r.before, r.after, r.by)
		}
		if r.caught {
			caught++
		} else {
			survived++
		}
	}
	if caught == 0 || survived == 0 {
		t.Errorf("%d mutants were caught and %d survived, want some of each", caught, survived)
	}
}
