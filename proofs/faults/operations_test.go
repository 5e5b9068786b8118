package faults_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// background is an operation that the controller uses for a metric, and that no call uses.
const background = "current_user_access_token_list"

// driverOperations returns the operations that the driver's source uses, with the API's names:
// every method of Oxide's client that the source mentions.
func driverOperations(t *testing.T) []string {
	t.Helper()
	methods := map[string]bool{}
	client := reflect.TypeFor[*oxide.Client]()
	for i := range client.NumMethod() {
		methods[client.Method(i).Name] = true
	}
	var files []string
	for _, pattern := range []string{"driver/*.go", "driver/*/*.go", "internal/*/*.go",
		"operate/*/*.go"} {
		found, err := filepath.Glob("../../" + pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	asked := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && methods[s.Sel.Name] && s.Sel.Name != "Host" {
				asked[operationOf(s.Sel.Name)] = true
			}
			return true
		})
	}
	var names []string
	for name := range asked {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// operationOf returns the API's name of the operation for a method of the client.
func operationOf(method string) string {
	var b strings.Builder
	for i, r := range strings.TrimSuffix(method, "AllPages") {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

func TestDriverOperationsFindsKnownOperations(t *testing.T) {
	got := driverOperations(t)
	for _, known := range []string{"disk_create", "instance_disk_list", "project_view"} {
		if !slices.Contains(got, known) {
			t.Errorf("%s is missing in %q", known, got)
		}
	}
	if slices.Contains(got, "make_request") {
		t.Error("the driver calls MakeRequest, whose operation this proof cannot read from the source")
	}
}
