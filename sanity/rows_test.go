//go:build linux

package sanity

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// citing are the functions whose string argument is the name of a test.
var citing = []string{"It", "FIt", "Entry", "Describe", "DescribeTable", "Context", "Run",
	"describeController", "describeNodes", "describeLost", "wrong"}

// citation is the start of a test's name: one or several IDs, then words. A function has its ID in
// its name, or several in a comment behind its head.
var (
	citation        = regexp.MustCompile(`^((?:[A-Z]{1,3}-\d+ )+)\S`)
	functionID      = regexp.MustCompile(`^Test([A-Z])(\d+)[A-Z]`)
	functionComment = regexp.MustCompile(`^// ([A-Z]{1,3}-\d+(?:, [A-Z]{1,3}-\d+)*)$`)
)

// cited lists the IDs that the names of the module's tests begin with, each with a place.
func cited(root string) (map[string]string, error) {
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && strings.HasPrefix(name, ".") && path != root:
			return fs.SkipDir
		case strings.HasSuffix(name, "_test.go"):
			return citedIn(path, found)
		}
		return nil
	})
	return found, err
}

func citedIn(path string, found map[string]string) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution|parser.ParseComments)
	if err != nil {
		return fmt.Errorf("read the names of the tests: %w", err)
	}
	heads := map[int]bool{} // the lines on which a test function begins
	for _, declaration := range file.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok || !strings.HasPrefix(function.Name.Name, "Test") {
			continue
		}
		position := files.Position(function.Pos())
		heads[position.Line] = true
		if match := functionID.FindStringSubmatch(function.Name.Name); match != nil {
			found[match[1]+"-"+match[2]] = position.String()
		}
	}
	for _, group := range file.Comments {
		position := files.Position(group.Pos())
		match := functionComment.FindStringSubmatch(group.List[0].Text)
		if match == nil || !heads[position.Line] {
			continue
		}
		for _, id := range strings.Split(match[1], ", ") {
			found[id] = position.String()
		}
	}
	ast.Inspect(file, func(node ast.Node) bool {
		for _, expression := range named(node) {
			text, position := leading(expression)
			if match := citation.FindStringSubmatch(text); match != nil {
				for _, id := range strings.Fields(match[1]) {
					found[id] = files.Position(position).String()
				}
			}
		}
		return true
	})
	return nil
}

// named are the expressions of a node that may name a test: arguments of the functions that run
// one, and elements of a table.
func named(node ast.Node) []ast.Expr {
	switch node := node.(type) {
	case *ast.CallExpr:
		function := node.Fun
		if selector, ok := function.(*ast.SelectorExpr); ok {
			function = selector.Sel
		}
		if name, ok := function.(*ast.Ident); ok && slices.Contains(citing, name.Name) {
			return node.Args
		}
	case *ast.CompositeLit:
		return node.Elts
	case *ast.KeyValueExpr:
		return []ast.Expr{node.Key, node.Value}
	}
	return nil
}

// leading is the string that an expression begins with: itself, or the first of a sum.
func leading(expression ast.Expr) (string, token.Pos) {
	for {
		sum, ok := expression.(*ast.BinaryExpr)
		if !ok {
			break
		}
		expression = sum.X
	}
	literal, ok := expression.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return "", token.NoPos
	}
	text, err := strconv.Unquote(literal.Value)
	if err != nil {
		return "", token.NoPos
	}
	return text, literal.Pos()
}

// csiSanityCases are the names of csi-sanity's cases, from its source.
func csiSanityCases() (string, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}",
		"github.com/kubernetes-csi/csi-test/v5").Output()
	if err != nil {
		return "", fmt.Errorf("ask the go command for csi-sanity's source: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "pkg/sanity/*.go"))
	if err != nil || len(files) == 0 {
		return "", errors.Join(fmt.Errorf("no source of csi-sanity in %s", dir), err)
	}
	var source strings.Builder
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		source.Write(data)
	}
	return source.String(), nil
}

// checkRows compares the rows with the tests, and says what is wrong.
func checkRows(rows []row, found map[string]string, csiSanity string) (own, by, none int,
	faults []string) {
	listed := map[string]bool{}
	for _, row := range rows {
		if listed[row.id] {
			faults = append(faults, row.id+" is listed twice")
		}
		listed[row.id] = true
		place, isCited := found[row.id]
		switch {
		case row.notApplicable != "" && (isCited || row.csiSanity != ""):
			faults = append(faults, fmt.Sprintf(
				"%s (%s) is said not to apply, but is checked: %s", row.id, row.phrase, place))
		case row.notApplicable != "":
			none++
		case row.csiSanity != "" && !strings.Contains(csiSanity, `It("`+row.csiSanity+`"`):
			faults = append(faults, fmt.Sprintf("%s (%s): csi-sanity has no case %q",
				row.id, row.phrase, row.csiSanity))
		case row.csiSanity != "" && !isCited:
			by++
		case isCited:
			own++
		default:
			faults = append(faults, fmt.Sprintf("%s (%s) is checked by no test: give one a name "+
				"that begins with it, or say here why it does not apply", row.id, row.phrase))
		}
	}
	sections := regexp.MustCompile(`^(CAP|OX|OF|GI|GC|PR|CV|DV|CP|CU|VC|LV|VH|CG|CC|CS|DS|LS|EX|` +
		`GV|MV|NS|NU|NP|UP|VS|NH|NE|NC|NI|GR|SM|B|D)-`)
	for id, place := range found {
		if sections.MatchString(id) && !listed[id] {
			faults = append(faults, fmt.Sprintf("%s cites %s, which is no requirement", place, id))
		}
	}
	slices.Sort(faults)
	return own, by, none, faults
}

// checkCarriers demands that the row that carries an older one is checked.
func checkCarriers(carriers []string, rows []row) []string {
	checked := map[string]bool{}
	for _, row := range rows {
		checked[row.id] = row.notApplicable == ""
	}
	var faults []string
	for i, ids := range carriers {
		for _, id := range strings.Fields(ids) {
			if !checked[id] {
				faults = append(faults, fmt.Sprintf("C-%d: its carrier %s is not checked", i+1, id))
			}
		}
	}
	return faults
}

func TestEveryRequirementIsChecked(t *testing.T) {
	found, err := cited("..")
	if err != nil {
		t.Fatal(err)
	}
	cases, err := csiSanityCases()
	if err != nil {
		t.Fatal(err)
	}
	own, by, none, faults := checkRows(rows, found, cases)
	faults = append(faults, checkCarriers(carriers, rows)...)
	if err := proof.Print(proof.Line("requirements", "rows", len(rows), "own", own,
		"csi_sanity", by, "not_applicable", none, "carried", len(carriers))); err != nil {
		t.Error(err)
	}
	for _, fault := range faults {
		t.Error(fault)
	}
}

func TestTheCheckOfRequirements(t *testing.T) {
	const source = `It("should work", func() {`
	for name, tc := range map[string]struct {
		row   row
		found map[string]string
		want  string
	}{
		"a row without a test is found": {
			row: row{id: "CV-1"}, want: "CV-1 () is checked by no test"},
		"a row that is cited is in order": {
			row: row{id: "CV-1"}, found: map[string]string{"CV-1": "here"}},
		"a row of csi-sanity is in order": {
			row: row{id: "CV-1", csiSanity: "should work"}},
		"a case that csi-sanity has no longer is found": {
			row: row{id: "CV-1", csiSanity: "should fly"}, want: `CV-1 (): csi-sanity has no case`},
		"a row that is said not to apply and is cited is found": {
			row:   row{id: "CV-1", notApplicable: "no"},
			found: map[string]string{"CV-1": "here"},
			want:  "CV-1 () is said not to apply, but is checked: here"},
		"a test that cites no row is found": {
			row: row{id: "CV-1", notApplicable: "no"}, found: map[string]string{"CV-99": "here"},
			want: "here cites CV-99, which is no requirement"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, _, faults := checkRows([]row{tc.row}, tc.found, source)
			got := strings.Join(faults, "\n")
			if tc.want == "" && got != "" || !strings.HasPrefix(got, tc.want) {
				t.Fatalf("checkRows found %q, want %q", got, tc.want)
			}
		})
	}
}

func TestWhatTheSourceSays(t *testing.T) {
	t.Run("B-7 B-21 the standard is csi.v1, pinned to one version", func(t *testing.T) {
		mod, err := os.ReadFile("../go.mod")
		if err != nil {
			t.Fatal(err)
		}
		const want = "github.com/container-storage-interface/spec v1.13.0"
		if !strings.Contains(string(mod), want) {
			t.Fatalf("go.mod does not require %s", want)
		}
		for _, service := range csiServices() {
			if service.FullName().Parent() != "csi.v1" {
				t.Errorf("%s is not of csi.v1", service.FullName())
			}
		}
	})
	t.Run("B-24 of the reserved variables only CSI_ENDPOINT is read", func(t *testing.T) {
		reserved := regexp.MustCompile(`"CSI_[A-Z_]+"`)
		for _, pattern := range []string{"../driver/*.go", "../driver/*/*.go",
			"../cmd/oxide-csi-plugin/*.go"} {
			files, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				source, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, variable := range reserved.FindAllString(string(source), -1) {
					if variable != `"CSI_ENDPOINT"` {
						t.Errorf("%s reads %s, a name that belongs to the standard", file, variable)
					}
				}
			}
		}
	})
	t.Run("B-48 csi-sanity runs in every combination", func(t *testing.T) {
		seen := map[string]bool{}
		for _, c := range csisuite.Combinations() {
			config := c.Config()
			if config.TestVolumeSize%harness.GiB != 0 || !config.TestNodeVolumeAttachLimit {
				t.Errorf("%s: size %d, limit tried: %t", c, config.TestVolumeSize,
					config.TestNodeVolumeAttachLimit)
			}
			seen[fmt.Sprintf("%s split=%t", config.TestVolumeAccessType, c.Split)] = true
		}
		for _, want := range []string{"mount split=false", "mount split=true",
			"block split=false", "block split=true"} {
			if !seen[want] {
				t.Errorf("csi-sanity does not run with %s", want)
			}
		}
	})
}
