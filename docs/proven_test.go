package docs

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
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

// tools contains the operator's tools: the folder of the main package, a regular expression for the
// tool's own packages, and a function that reports whether a node of the syntax tree changes state.
// If folder equals own, names of functions have no package and no type.
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

// changes matches the names of methods that change the rack or the cluster. It includes methods of
// the tools themselves, so that the test also finds their callers.
var changes = regexp.MustCompile(`^(Patch|Create|Update|UpdateStatus|Delete|Evict|` +
	`patch|create|createOwned|remove|save|` +
	`(Disk|Instance|InstanceDisk|Snapshot)(Create|Delete|Attach|Detach|Start|Stop|Reboot|Update))$`)

// verbs contains kubectl's commands that change the cluster.
var verbs = []string{"annotate", "apply", "attach", "cordon", "create", "delete", "drain", "edit",
	"evict", "exec", "label", "patch", "replace", "rollout", "scale", "taint"}

// openings matches functions that open, change or remove a file, a mount, a device or a process.
// looks matches the exceptions among them, which only read or only use what is already open.
var (
	openings = regexp.MustCompile(
		`^\(?\*?(os|os/exec|plugin|syscall|golang.org/x/sys/unix|io/ioutil)[.)]|` +
			`^(go.etcd.io/bbolt.Open|crypto/tls.LoadX509KeyPair|.*/template.Parse(Files|Glob))$|` +
			`/loopdev.(Attach|Detach\w+|Device\).(Detach|Cut))$|/flakydisk.(Mount|OpenFile|Load)$|` +
			`/dataplane\.(\S+\.)?([rR]emove\w*|makeBacking|forceDetach)$|\.[wW]riteDurably$|` +
			`/oxide\.Client\)\.|/adminapi\.Client\)\.(\w+Fault|Switch)$|` +
			`/csi\.(Controller|Node)Client\)\.|/harness\.(NewNamedRun|\S+\.(StartPlugin|Stop|Close))$|` +
			`/guest\.(RemoveOwn|Sweep|ReadFile)$|/report\.(MakeFolder|Write)$|` +
			`/rules\.\S+\.(RemoveInstance|EndImport)$`)
	looks = regexp.MustCompile(`\.(Get\w+|\w*[eE]nv\w*|Is[A-Z]\w*|[FL]?[sS]tat(fs)?|SameFile|Exit|` +
		`Read[dD]ir|Readlink|TempDir|Major|Minor|Mkdev|ByteSliceToString|Poll|Ioctl(Get|Ret)\w+|` +
		`\w+(View|List|AllPages)|Ping|Close|Read(At)?|Write(At|String)?|Seek|F?[sS]ync|Name|Fd|` +
		`Error)$`)
)

// TestProvenPageListsEveryFunctionThatChangesState compares docs/proven.md with the source.
func TestProvenPageListsEveryFunctionThatChangesState(t *testing.T) {
	page := try(os.ReadFile("proven.md"))(t)
	tests := testNames(t)
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

// changesIn returns the functions that change state, as package.Type.name. It reads only those
// packages of the program whose path matches own.
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

// placeOf returns the name of a declaration; for a method, with its type before it.
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

// isOpening reports whether a node names a function that openings matches and looks does not.
func isOpening(n ast.Node, info types.Info) bool {
	id, ok := n.(*ast.Ident)
	if !ok {
		return false
	}
	f, ok := info.Uses[id].(*types.Func)
	return ok && openings.MatchString(f.FullName()) && !looks.MatchString(f.FullName())
}

// isChange reports whether a node is a call of a method in changes with ctx as its first argument,
// or a call with one of the verbs among its arguments.
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
	if ok && strings.HasSuffix(method.Sel.Name, "Var") { // it defines a flag
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

// testNames returns the names of all tests in the directories of the tools.
func testNames(t *testing.T) []string {
	t.Helper()
	grep := exec.CommandContext(t.Context(), "grep", "-rhoE", `^func Test\w+`, "--include=*_test.go",
		"operate", "keeper", "docs", "proofs", "conformance", "simulator", "loopdev", "cmd")
	grep.Dir = root
	out := try(grep.Output())(t)
	return strings.Fields(strings.ReplaceAll(string(out), "func ", ""))
}
