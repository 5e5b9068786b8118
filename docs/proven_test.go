package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// tools are the folders of the operator's tools.
var tools = map[string]string{"claim": "operate/claim", "audit": "operate/audit",
	"doctor": "operate/doctor", "keeper": "keeper"}

// changes is how the tools call what changes the rack or the cluster. Their own functions of that
// kind are listed like those of the libraries, so that each decision is a place.
var changes = regexp.MustCompile(`^(Patch|Create|Update|UpdateStatus|Delete|Evict|` +
	`patch|create|createOwned|remove|save|` +
	`(Disk|Instance|InstanceDisk|Snapshot)(Create|Delete|Attach|Detach|Start|Stop|Reboot|Update))$`)

// verbs are kubectl's words for a change.
var verbs = []string{"annotate", "apply", "attach", "cordon", "create", "delete", "drain", "edit",
	"evict", "exec", "label", "patch", "replace", "rollout", "scale", "taint"}

// TestEveryPlaceThatChangesSomethingIsListedWithItsProof compares docs/proven.md with the calls.
func TestEveryPlaceThatChangesSomethingIsListedWithItsProof(t *testing.T) {
	page, err := os.ReadFile("proven.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t)
	for tool, folder := range tools {
		listed, tested := []string{}, 0
		for line := range strings.Lines(string(page)) {
			cells := strings.Split(strings.TrimSpace(line), " | ")
			if len(cells) != 4 || cells[0] != "| "+tool {
				continue
			}
			listed = append(listed, strings.Trim(cells[1], "`"))
			name := strings.Trim(strings.TrimSuffix(cells[3], " |"), "`")
			if tested++; !slices.Contains(tests, name) {
				t.Errorf("%s: %s names the test %q, which does not exist", tool, cells[1], name)
			}
		}
		found := changesIn(t, filepath.Join(root, folder))
		slices.Sort(listed)
		if !slices.Equal(found, listed) {
			t.Errorf("%s changes something in\n%q\nand docs/proven.md lists\n%q", folder, found, listed)
		}
		t.Logf("FIGURE proven tool=%s sites=%d tested=%d", tool, len(found), tested)
	}
}

// changesIn returns the functions of a package that call what changes something.
func changesIn(t *testing.T, folder string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("found no Go files in %s: %v", folder, err)
	}
	found := []string{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			place := "the table of steps"
			if f, ok := d.(*ast.FuncDecl); ok {
				place = f.Name.Name
			}
			ast.Inspect(d, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && isChange(call) && !slices.Contains(found, place) {
					found = append(found, place)
				}
				return true
			})
		}
	}
	slices.Sort(found)
	return found
}

// isChange reports whether a call changes something: a method of one of those names with a context,
// or a verb of kubectl among the arguments.
func isChange(call *ast.CallExpr) bool {
	method, ok := call.Fun.(*ast.SelectorExpr)
	if ok && changes.MatchString(method.Sel.Name) && len(call.Args) > 1 {
		if first, ok := call.Args[0].(*ast.Ident); ok && first.Name == "ctx" {
			return true
		}
	}
	if ok && strings.HasSuffix(method.Sel.Name, "Var") { // the name of a flag
		return false
	}
	is := false
	for _, arg := range call.Args {
		ast.Inspect(arg, func(n ast.Node) bool {
			if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING {
				word, _ := strconv.Unquote(text.Value)
				is = is || slices.Contains(verbs, word)
			}
			return true
		})
	}
	return is
}

// testNames returns the names of all tests.
func testNames(t *testing.T) (names []string) {
	t.Helper()
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, folder := range []string{"operate", "keeper", "docs", "proofs", "conformance",
		"simulator"} {
		err := filepath.WalkDir(filepath.Join(root, folder), func(path string, _ os.DirEntry,
			err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range declared.FindAllSubmatch(text, -1) {
				names = append(names, string(m[1]))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return names
}
