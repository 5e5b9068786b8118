package main

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

const root = "../.."

func TestTheProjectKeepsItsWalls(t *testing.T) {
	problems, err := run(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}
}

func TestEveryPackageOfTheGoCommandIsRead(t *testing.T) {
	read, err := load(os.DirFS(root))
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command("go", "list", "-tags", "e2e", "./...")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Fields(strings.ReplaceAll(string(out), read.module+"/", ""))
	slices.Sort(want)
	slices.Sort(read.packages)
	if len(want) == 0 || !slices.Equal(read.packages, want) {
		t.Errorf("load found the packages\n%q, want\n%q", read.packages, want)
	}
}

// The test reads from the files what the project imports today, and injects every other import of a
// package or a library.
func TestEveryImportThatTheProjectLacksIsRefused(t *testing.T) {
	tree, err := load(os.DirFS(root))
	if err != nil {
		t.Fatal(err)
	}
	w, err := read(root, tree.module)
	if err != nil {
		t.Fatal(err)
	}
	type edge struct {
		from, to string
		test     bool
	}
	made := map[edge]bool{}
	for _, i := range tree.imports {
		made[edge{i.from, w.target(i.path), i.test}] = true
	}
	paths := slices.Collect(maps.Keys(w.libraries))
	for _, name := range tree.packages {
		paths = append(paths, tree.module+"/"+name)
	}
	paths = append(paths, "example.org/unknown")
	injected := tree
	injected.imports = slices.Clone(tree.imports)
	var want []string
	for _, from := range tree.packages {
		for _, path := range paths {
			for _, test := range []bool{false, true} {
				to := w.target(path)
				free := w.free[to] == anyPackage || test && w.free[to] == anyTest
				if from == to || free || made[edge{from, to, test}] || test && made[edge{from, to, false}] {
					continue
				}
				at := fmt.Sprintf("injected:%d", len(want))
				injected.imports = append(injected.imports, imported{from, path, test, at})
				want = append(want, fmt.Sprintf("%s: %s must not import %s, ", at, from, to))
			}
		}
	}
	got := w.check(injected)
	if len(got) != len(want) || len(want) < 1000 {
		t.Fatalf("%d problems for %d imports: %q", len(got), len(want), got)
	}
	for i, problem := range got {
		if !strings.HasPrefix(problem, want[i]) {
			t.Errorf("got %q, want %q", problem, want[i])
		}
	}
	fmt.Printf("FIGURE walls packages=%d refused=%d\n", len(tree.packages), len(want))
}

const tables = `
| room | its one job |
|---|---|
| ~internal~, ~driver~ | all |

| package | its one job | imports | its tests, too | promise |
|---|---|---|---|---|
| ~internal/rack~ | talk | ~csierr~, http | ~node~ | a rack knows no node |
| ~driver/node~ | work | ~csierr~ | | a node needs no token |
| ~internal/csierr~ | fail | | | it knows nobody |

| package | never links | promise |
|---|---|---|
| ~node~ | http | a node needs no token |

| library | import paths | imported by | what for |
|---|---|---|---|
| http | ~example.org/http~ | | talk |
| uuid | ~example.org/uuid~ | any package | ids |
| cmp | ~example.org/cmp~ | any test | differences |
| testing | ~testing~ | any test | tests |
`

func TestNamesThatAreMissingInTheTablesAreReported(t *testing.T) {
	files := map[string]string{
		"go.mod":                        "module example.org/m\n",
		"internal/rack/rack.go":         goFile("example.org/m/internal/csierr", "example.org/http/v2", "os"),
		"internal/rack/rack_test.go":    goFile("example.org/m/driver/node", "testing"),
		"driver/node/node.go":           goFile("example.org/m/internal/csierr", "example.org/uuid"),
		"internal/csierr/csierr.go":     goFile("strings"),
		"internal/csierr/some_test.go":  goFile("example.org/m/internal/csierr", "example.org/cmp"),
		"internal/rack/testdata/bad.go": goFile("example.org/unknown"),
		"tools/go.mod":                  "module example.org/m/tools\n",
		"tools/tool.go":                 goFile("example.org/unknown"),
	}
	for _, tt := range []struct{ name, file, text, was, is, want string }{
		{name: "nothing is wrong"},
		{name: "a forbidden import", file: "driver/node/token.go",
			text: goFile("example.org/m/internal/rack"),
			want: "driver/node/token.go:3: driver/node must not import internal/rack, which its row in " +
				"docs/walls.md does not name (a node needs no token). Do without, or add it to the row " +
				"if the promise still holds"},
		{name: "a forbidden import for another system", file: "driver/node/node_plan9.go",
			text: "//go:build never\n\n" + goFile("example.org/m/internal/rack"),
			want: "driver/node must not import internal/rack"},
		{name: "a library without a row", file: "driver/node/more.go", text: goFile("example.org/httpd"),
			want: "driver/node must not import example.org/httpd"},
		{name: "a package without a row", file: "driver/new/new.go", text: goFile("fmt"),
			want: "driver/new has no row in docs/walls.md, so it may import nothing: add one"},
		{name: "an import of a package without a row", file: "driver/new/new.go",
			text: goFile("example.org/m/internal/csierr"), want: "driver/new has no row"},
		{name: "a row without a package", was: "| ~internal/csierr~",
			is:   "| ~gone~ | | | | none |\n| ~internal/csierr~",
			want: "the row of gone is about no package"},
		{name: "a name that is not imported", was: "| work | ~csierr~", is: "| work | ~csierr~, http",
			want: "the row of driver/node need not name http"},
		{name: "a name for tests that is not needed", was: "| ~node~ | a rack",
			is:   "| ~node~, http | a rack",
			want: "the row of internal/rack need not name http for tests"},
		{name: "a library that nobody imports", was: "| cmp |",
			is:   "| gone | ~example.org/gone~ | | |\n| cmp |",
			want: "no package imports the library gone"},
		{name: "a name of two packages", file: "other/node/node.go", text: goFile(),
			was: "| ~internal/csierr~", is: "| ~other/node~ | | | | none |\n| ~internal/csierr~",
			want: `"node" names ["driver/node" "other/node"], want one package or library`},
		{name: "a name of nothing", was: "| work | ~csierr~", is: "| work | ~csi~",
			want: `"csi" names [], want one package or library`},
		{name: "a row twice", was: "| ~internal/csierr~",
			is:   "| ~driver/node~ | | | | |\n| ~internal/csierr~",
			want: "two rows are about driver/node"},
		{name: "a row without a promise", was: "| it knows nobody |", is: "| |",
			want: "the row of internal/csierr gives no promise"},
		{name: "a row with a cell too few", was: "| talk | ~csierr~, http |", is: "| ~csierr~, http |",
			want: "has 4 cells, want 5"},
		{name: "an import of a room above", was: "| ~internal~, ~driver~ | all |",
			is:   "| ~internal~ | all |\n| ~driver~ | all |",
			want: "driver/node must not import internal/csierr, whose room is above"},
		{name: "a package in no room", file: "other/other.go", text: goFile(),
			was: "| ~internal/csierr~", is: "| ~other~ | | | | none |\n| ~internal/csierr~",
			want: "other is in no room"},
		{name: "a table without its header", was: "| never links |", is: "| links |",
			want: `no table has the columns ["package" "never links" "promise"]`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			project := fstest.MapFS{}
			for name, text := range files {
				project[name] = &fstest.MapFile{Data: []byte(text)}
			}
			if tt.file != "" {
				project[tt.file] = &fstest.MapFile{Data: []byte(tt.text)}
			}
			read, err := load(project)
			if err != nil {
				t.Fatal(err)
			}
			var problems []string
			document := strings.Replace(tables, tt.was, tt.is, 1)
			w, err := parse(strings.ReplaceAll(document, "~", "`"), read.module)
			if err != nil {
				problems = []string{err.Error()}
			} else {
				problems = w.check(read)
			}
			if tt.want == "" && len(problems) == 0 {
				return
			}
			if len(problems) != 1 || tt.want == "" || !strings.Contains(problems[0], tt.want) {
				t.Errorf("the problems are %q, want one with %q", problems, tt.want)
			}
		})
	}
}

func TestAPackageDoesNotLinkALibraryThroughAnother(t *testing.T) {
	w, err := parse(strings.ReplaceAll(tables, "~", "`"), "example.org/m")
	if err != nil {
		t.Fatal(err)
	}
	got := w.linked(w.never[0], []string{"os", "example.org/m/internal/csierr", "example.org/http/v2"})
	want := "docs/walls.md: driver/node links http (example.org/http/v2), which it never may: " +
		"a node needs no token"
	if len(got) != 1 || got[0] != want {
		t.Errorf("the problems are %q, want %q", got, want)
	}
}

// goFile returns a file of a package that has these imports from the third line on.
func goFile(paths ...string) string {
	text := "package p\n\n"
	for _, path := range paths {
		text += fmt.Sprintf("import %q\n", path)
	}
	return text
}
