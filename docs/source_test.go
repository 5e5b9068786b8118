package docs

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const anID = `[A-Z]{1,3}-\d+`

var (
	// requirementRow matches a row of a page in docs/requirements. The last cell contains test files,
	// which `go test -update` writes there, or one of these texts:
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

// withTests returns the page with the names of the test files in its rows.
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

func TestVersionsInRequirementsAreInTheNamedFiles(t *testing.T) {
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

// tools contains, for each tool, the folder of its main package, a regular expression for its own
// packages, and a function that reports whether a node of the syntax tree changes state. If folder
// and expression are equal, docs/proven.md lists functions without package and type.
var tools = map[string]struct {
	folder, own string
	is          func(ast.Node, types.Info) bool
}{
	"claim":       {"operate/claim", "operate/claim", isChange},
	"audit":       {"operate/audit", "operate/audit", isChange},
	"doctor":      {"operate/doctor", "operate/doctor", isChange},
	"keeper":      {"keeper", "keeper", isChange},
	"conformance": {"cmd/oxide-conformance", "cmd/oxide-conformance|conformance", isOpening},
	"simulator":   {"cmd/oxide-simulator", ".*", isOpening},
}

// changes matches the names of methods that change the rack or the cluster. Some are the tools' own
// helpers, such as createOwned, so the test also finds the helpers' callers.
var changes = regexp.MustCompile(`^(Patch|Create|Update|UpdateStatus|Delete|Evict|` +
	`patch|create|createOwned|remove|save|` +
	`(Disk|Instance|InstanceDisk|Snapshot)(Create|Delete|Attach|Detach|Start|Stop|Reboot|Update))$`)

// verbs contains kubectl's commands that change the cluster.
var verbs = []string{"annotate", "apply", "attach", "cordon", "create", "delete", "drain", "edit",
	"evict", "exec", "label", "patch", "replace", "rollout", "scale", "taint"}

// openings matches packages, such as os, and functions that open, change or remove things. looks
// matches the exceptions: functions that only read, or that use only what is already open.
var (
	openings = regexp.MustCompile(
		`^\(?\*?(os|os/exec|plugin|syscall|golang.org/x/sys/unix|io/ioutil)[.)]|` +
			`^(go.etcd.io/bbolt.Open|crypto/tls.LoadX509KeyPair|.*/template.Parse(Files|Glob))$|` +
			`/loopdev.(Attach|Detach\w+|Device\).(Detach|Cut))$|/flakydisk.(Mount|OpenFile|Load)$|` +
			`/dataplane\.(\S+\.)?([rR]emove\w*|create|forceDetach)$|\.[wW]riteDurably$|` +
			`/oxide\.Client\)\.|/adminapi\.Client\)\.(\w+Fault|Switch)$|` +
			`/csi\.(Controller|Node)Client\)\.|/harness\.(NewNamedRun|\S+\.(StartPlugin|Stop|Close))$|` +
			`/guest\.(RemoveOwn|Sweep|ReadFile)$|/report\.(MakeFolder|Write)$|` +
			`/rules\.\S+\.(RemoveInstance|EndImport)$`)
	looks = regexp.MustCompile(`\.(Get\w+|\w*[eE]nv\w*|Is[A-Z]\w*|[FL]?[sS]tat(fs)?|SameFile|Exit|` +
		`Read[dD]ir|Readlink|TempDir|Major|Minor|Mkdev|ByteSliceToString|Poll|Ioctl(Get|Ret)\w+|` +
		`\w+(View|List|AllPages)|Ping|Close|Read(At)?|Write(At|String)?|Seek|F?[sS]ync|Name|Fd|` +
		`Error)$`)
)

func TestProvenPageListsEveryFunctionThatChangesState(t *testing.T) {
	page := try(os.ReadFile("proven.md"))(t)
	tests := testNames(t, "operate", "keeper", "docs", "proofs", "conformance", "simulator", "loopdev",
		"cmd")
	for name, tool := range tools {
		listed, tested := []string{}, 0
		for line := range strings.Lines(string(page)) {
			cells := strings.Split(strings.TrimSpace(line), " | ")
			if len(cells) != 4 || cells[0] != "| "+name {
				continue
			}
			places := strings.Split(strings.Trim(cells[1], "`"), "`, `")
			listed = append(listed, places...)
			for test := range strings.SplitSeq(strings.Trim(cells[3], "`| "), "`, `") {
				if !slices.Contains(tests, test) {
					t.Errorf("%s: %s names the test %q, which does not exist", name, cells[1], test)
				}
			}
			tested += len(places)
		}
		found := changesIn(t, tool.folder, tool.own, tool.is)
		for _, place := range listed {
			if !slices.Contains(found, place) {
				t.Errorf("docs/proven.md lists %s of the %s, which changes nothing", place, name)
			}
		}
		for _, place := range found {
			if !slices.Contains(listed, place) {
				t.Errorf("docs/proven.md lacks %s of the %s", place, name)
			}
		}
		t.Logf("FIGURE proven tool=%s sites=%d tested=%d", name, len(found), tested)
	}
}

// changesIn returns the functions that change state, as package.Type.name. It reads only packages
// that the program in folder uses and whose path in the repository matches the pattern own.
func changesIn(t *testing.T, folder, own string, is func(ast.Node, types.Info) bool) []string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json", "./"+folder)
	list.Dir, list.Stderr = root, os.Stderr
	out := try(list.Output())(t)
	exports, files, found := map[string]string{}, token.NewFileSet(), map[string]bool{}
	compiled := importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	ours := regexp.MustCompile(`^github.com/oxidecomputer/oxide-csi-plugin/(` + own + `)(/|$)`)
	for packages := json.NewDecoder(bytes.NewReader(out)); packages.More(); {
		var p struct {
			ImportPath, Dir, Export string
			GoFiles                 []string
		}
		must(t, packages.Decode(&p))
		exports[p.ImportPath] = p.Export // go list prints a package after those that it imports
		if !ours.MatchString(p.ImportPath) {
			continue
		}
		var parsed []*ast.File
		for _, name := range p.GoFiles {
			file := try(parser.ParseFile(files, filepath.Join(p.Dir, name), nil, 0))(t)
			parsed = append(parsed, file)
		}
		info, config := types.Info{Uses: map[*ast.Ident]types.Object{}}, types.Config{Importer: compiled}
		if _, err := config.Check(p.ImportPath, files, parsed, &info); err != nil {
			t.Fatal(err)
		}
		for _, file := range parsed {
			for _, d := range file.Decls {
				place := placeOf(d)
				if folder != own {
					place = file.Name.Name + "." + place
				} else {
					place = place[strings.LastIndexByte(place, '.')+1:]
				}
				ast.Inspect(d, func(n ast.Node) bool {
					found[place] = found[place] || is(n, info)
					return true
				})
			}
		}
	}
	maps.DeleteFunc(found, func(_ string, changes bool) bool { return !changes })
	return slices.Collect(maps.Keys(found))
}

// placeOf returns the name of a declaration. The name of a method is TYPE.METHOD.
func placeOf(d ast.Decl) (name string) {
	if f, ok := d.(*ast.FuncDecl); ok {
		if f.Recv != nil {
			name = strings.TrimLeft(types.ExprString(f.Recv.List[0].Type), "*") + "."
		}
		return name + f.Name.Name
	}
	if v, ok := d.(*ast.GenDecl).Specs[0].(*ast.ValueSpec); ok {
		name = v.Names[0].Name
	}
	return name
}

func isOpening(n ast.Node, info types.Info) bool {
	id, ok := n.(*ast.Ident)
	if !ok {
		return false
	}
	f, ok := info.Uses[id].(*types.Func)
	return ok && openings.MatchString(f.FullName()) && !looks.MatchString(f.FullName())
}

// isChange reports whether a node is either a call with one of verbs among its arguments, or a
// method call whose name matches changes and whose first argument is ctx.
func isChange(n ast.Node, _ types.Info) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	method, ok := call.Fun.(*ast.SelectorExpr)
	if ok && changes.MatchString(method.Sel.Name) && len(call.Args) > 1 {
		if first, ok := call.Args[0].(*ast.Ident); ok && first.Name == "ctx" {
			return true
		}
	}
	if ok && strings.HasSuffix(method.Sel.Name, "Var") { // the call defines a flag
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

// "go test -run" with a pattern that matches no test does nothing, and succeeds.
func TestEveryRunPatternMatchesATestOfItsPackage(t *testing.T) {
	commands := ""
	for _, file := range append(try(filepath.Glob("*.md"))(t), "../Makefile", "../CONTRIBUTING.md") {
		commands += string(try(os.ReadFile(file))(t))
	}
	found := regexp.MustCompile(`.* -run '?([\w()?|]+).*`).FindAllStringSubmatch(commands, -1)
	for _, run := range found {
		folder := regexp.MustCompile(`\./[\w/]+`).FindString(run[0])
		if strings.Contains(run[0], "-C tools") {
			folder = filepath.Join("tools", folder)
		}
		if !slices.ContainsFunc(testNames(t, folder), regexp.MustCompile(run[1]).MatchString) {
			t.Errorf("%s: -run %s matches no test in %q", run[0], run[1], folder)
		}
	}
	if len(found) == 0 {
		t.Error("no command with -run was found")
	}
}

func testNames(t *testing.T, folders ...string) []string {
	t.Helper()
	grep := exec.CommandContext(t.Context(), "grep", append([]string{"-rhoE", `^func Test\w+`,
		"--include=*_test.go"}, folders...)...)
	grep.Dir = root
	out := try(grep.Output())(t)
	return strings.Fields(strings.ReplaceAll(string(out), "func ", ""))
}
