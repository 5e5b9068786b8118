package docs

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const anID = `[A-Z]{1,3}-\d+`

var (
	// requirementRow matches a row of a page in docs/requirements. The last cell contains test files,
	// which the test below writes there, or one of these texts:
	//
	//	csi-sanity: the name of its test
	//	see CV-12, OF-7                  their tests cover this requirement, too
	//	none: why no test can
	requirementRow = regexp.MustCompile(
		`(?m)^(\| (` + anID + `) \|[^|\n]+\|[^|\n]+\|) ?([^|\n]*?) ?\|$`)
	requirementID = regexp.MustCompile(`\b` + anID + `\b`)
	// namedByIDs matches IDs at the beginning or end of a subtest's name, or behind a test's func
	// line. namedByID matches an ID in the name of a test function.
	namedByIDs = regexp.MustCompile("[\"`](?:" + anID + " )+[^ ]|" +
		`\(` + anID + `(?:, ` + anID + ")*\\)[\"`]|" +
		`^func Test\w+\(.*// ` + anID + `(?:, ` + anID + `)*\n`)
	namedByID = regexp.MustCompile(`^func Test([A-Z])(\d+)[A-Z]\w`)
)

// filesByID maps the ID of a requirement to files.
type filesByID map[string][]string

func (f filesByID) add(file string, ids ...string) {
	for _, id := range ids {
		if !slices.Contains(f[id], file) {
			f[id] = append(f[id], file)
		}
	}
}

// citations returns the files that cite each ID, and the files with a test of that ID.
func citations(t *testing.T) (cited, tested filesByID) {
	t.Helper()
	cited, tested = filesByID{}, filesByID{}
	if err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name[0] == '.' && path != root && name != ".github":
			return fs.SkipDir
		case entry.IsDir(), !slices.Contains([]string{".go", ".md", ".sh", ".yaml", "Makefile"},
			cmp.Or(filepath.Ext(name), name)):
			return nil
		}
		content, err := os.ReadFile(path)
		file := filepath.ToSlash(path[len(root)+1:])
		for line := range strings.Lines(string(content)) {
			cited.add(file, requirementID.FindAllString(line, -1)...)
			if !strings.HasSuffix(name, "_test.go") {
				continue
			}
			names := strings.Join(namedByIDs.FindAllString(line, -1), " ")
			tested.add(file, requirementID.FindAllString(names, -1)...)
			if m := namedByID.FindStringSubmatch(line); m != nil {
				tested.add(file, m[1]+"-"+m[2])
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return cited, tested
}

// withTests writes the names of the test files into the rows of a page.
func withTests(page string, tested filesByID) string {
	return requirementRow.ReplaceAllStringFunc(page, func(line string) string {
		row := requirementRow.FindStringSubmatch(line)
		switch files := tested[row[2]]; {
		case len(files) > 0:
			return row[1] + " `" + strings.Join(files, "`, `") + "` |"
		case strings.HasPrefix(row[3], "`"):
			return row[1] + " |"
		}
		return line
	})
}

// faultsOfRows returns the errors in the rows of all pages.
func faultsOfRows(rows [][]string, cited filesByID, csiSanity string) (faults []string) {
	cells, sections := map[string]string{}, map[string]bool{}
	section := func(id string) string { return strings.Split(id, "-")[0] }
	for _, row := range rows {
		if _, twice := cells[row[2]]; twice {
			faults = append(faults, row[2]+" has two rows")
		}
		cells[row[2]], sections[section(row[2])] = row[3], true
	}
	carried := func(id string) bool {
		name, isCase := strings.CutPrefix(cells[id], "csi-sanity: ")
		return strings.HasPrefix(cells[id], "`") || isCase && strings.Contains(csiSanity, `It("`+name+`"`)
	}
	for id, cell := range cells {
		carriers := requirementID.FindAllString(cell, -1)
		seesNone := slices.ContainsFunc(carriers, func(id string) bool { return !carried(id) })
		switch {
		case carried(id), strings.HasPrefix(cell, "none: "):
		case !strings.HasPrefix(cell, "see "), len(carriers) == 0, seesNone:
			faults = append(faults, fmt.Sprintf("no test carries %s (%s): add it to a test, as // %[1]s "+
				"behind the func line, or write the reason into its row in docs/requirements", id, cell))
		}
	}
	for id, files := range cited {
		if _, known := cells[id]; !known && sections[section(id)] {
			faults = append(faults, fmt.Sprintf("%s cites %s, which has no row in docs/requirements",
				files[0], id))
		}
	}
	slices.Sort(faults)
	return faults
}

func TestEveryRequirementHasATestOrAReason(t *testing.T) {
	cited, tested := citations(t)
	csiSanity, err := exec.CommandContext(t.Context(), "sh", "-c", "cat $(go list -m -f '{{.Dir}}' "+
		"github.com/kubernetes-csi/csi-test/v5)/pkg/sanity/*.go").Output()
	if err != nil {
		t.Fatalf("read the source of csi-sanity: %v", err)
	}
	paths := try(filepath.Glob("requirements/*.md"))(t)
	var rows [][]string
	for _, path := range paths {
		page := try(os.ReadFile(path))(t)
		want := withTests(string(page), tested)
		rows = append(rows, requirementRow.FindAllStringSubmatch(want, -1)...)
		if *update {
			err = os.WriteFile(path, []byte(want), 0o644)
		} else if want != string(page) {
			err = errors.New("the page does not list the tests of the tree: " +
				"go test ./docs -run Requirement -update writes them")
		}
		if err != nil {
			t.Errorf("docs/%s: %v", path, err)
		}
	}
	for _, fault := range faultsOfRows(rows, cited, string(csiSanity)) {
		t.Error(fault)
	}
	all := len(rows)
	rows = slices.DeleteFunc(rows, func(row []string) bool { return !strings.HasPrefix(row[3], "`") })
	t.Logf("FIGURE requirements rows=%d tested=%d", all, len(rows))
}

func TestARequirementWithoutATestOrAReasonIsReported(t *testing.T) {
	const page = "| Q-1 | one | MUST | %s |\n| Q-2 | two | MUST | csi-sanity: should work |\n" +
		"| Q-3 | three | MUST | none: it cannot happen |\n"
	for _, test := range []struct{ cell, cited, want string }{
		{cell: "none: it cannot happen"},
		{cell: "csi-sanity: should work"},
		{cell: "see Q-2"},
		{cell: "see Q-2, Q-3", want: "no test carries Q-1"},
		{cell: "see above", want: "no test carries Q-1"},
		{cell: "csi-sanity: should fly", want: "no test carries Q-1"},
		{cell: "`gone_test.go`", want: "no test carries Q-1 ()"},
		{cell: "later", want: "no test carries Q-1 (later)"},
		{cell: "see Q-2", cited: "Q-4", want: "a.go cites Q-4, which has no row"},
		{cell: "see Q-2 |\n| Q-2 | two | MUST | see Q-1", want: "Q-2 has two rows"},
	} {
		rows := requirementRow.FindAllStringSubmatch(withTests(fmt.Sprintf(page, test.cell), nil), -1)
		got := strings.Join(faultsOfRows(rows, filesByID{test.cited: {"a.go"}}, `It("should work"`), "\n")
		if !strings.Contains(got, test.want) || test.want == "" && got != "" {
			t.Errorf("%q, %q: got %q, want %q", test.cell, test.cited, got, test.want)
		}
	}
	if got := withTests("| Q-1 | one | MUST | none: no |", filesByID{"Q-1": {"a", "b"}}); got !=
		"| Q-1 | one | MUST | `a`, `b` |" {
		t.Errorf("the test files are not in the row: %s", got)
	}
}

var (
	versionRow = regexp.MustCompile("(?m)^\\|[^|\n]*\\| ([^|\n]*[0-9][^|\n]*) \\| `([^`\n]+)`")
	version    = regexp.MustCompile(`[a-z0-9-]*[0-9]+\.[0-9.]*[0-9]`)
)

func TestVersionsInRequirementsMatchTheirFiles(t *testing.T) {
	page := try(os.ReadFile("requirements.md"))(t)
	rows := versionRow.FindAllStringSubmatch(string(page), -1)
	if len(rows) < 14 {
		t.Fatalf("found %d rows with versions, expected more", len(rows))
	}
	for _, row := range rows {
		file, err := os.ReadFile(filepath.Join(root, row[2]))
		if err != nil {
			t.Error(err)
		}
		versions := version.FindAllString(row[1], -1)
		if len(versions) == 0 {
			t.Errorf("docs/requirements.md: %q has no version", row[0])
		}
		for _, v := range versions {
			if !strings.Contains(string(file), v) {
				t.Errorf("docs/requirements.md says %s of %s, which does not contain it", v, row[2])
			}
		}
	}
	// The page has to list every version of Kubernetes that the end-to-end suite runs on.
	workflow := try(os.ReadFile(filepath.Join(root, ".github/workflows/e2e.yaml")))(t)
	matrix := regexp.MustCompile(`kubernetes: \[(.+)\]`).FindSubmatch(workflow)
	if matrix == nil {
		t.Fatal("the workflow e2e.yaml has no matrix of Kubernetes' versions")
	}
	if !strings.Contains(string(page), "| "+string(matrix[1])+" |") {
		t.Errorf("the suite runs on %s, and docs/requirements.md does not say so", matrix[1])
	}
}
