package csierr

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"google.golang.org/grpc/codes"
)

// reasonsInSource are the values of all constants of type Reason.
func reasonsInSource(t *testing.T) []string {
	t.Helper()
	var found []string
	file, err := parser.ParseFile(token.NewFileSet(), "reasons.go", nil,
		parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); ok && kind.Name == "Reason" {
			value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, value)
		}
		return true
	})
	if len(found) < 70 {
		t.Fatalf("found %d reasons in the source; is this test reading the right files?", len(found))
	}
	return found
}

// reasonsOnPage are the reasons that the page explains, each with the line of its codes.
func reasonsOnPage(t *testing.T) map[string]string {
	t.Helper()
	page, err := os.ReadFile("../REASONS.md")
	if err != nil {
		t.Fatal(err)
	}
	entry := regexp.MustCompile("(?m)^### `([A-Za-z0-9]+)`\n\n(.+)\n(?:.+\n)+\nDo: .+")
	found := map[string]string{}
	for _, m := range entry.FindAllStringSubmatch(string(page), -1) {
		if _, twice := found[m[1]]; twice {
			t.Errorf("%s is explained twice", m[1])
		}
		found[m[1]] = m[2]
	}
	return found
}

func TestEveryReasonIsExplainedOnOnePage(t *testing.T) {
	source, page := reasonsInSource(t), reasonsOnPage(t)
	for _, reason := range source {
		if page[reason] == "" {
			t.Errorf("REASONS.md does not explain %s: its codes, what it means, and what to do", reason)
		}
	}
	for reason := range page {
		if !slices.Contains(source, reason) {
			t.Errorf("REASONS.md explains %s, which no error of the driver has", reason)
		}
	}
}

func TestThePageNamesTheCodeOfEachReason(t *testing.T) {
	page := reasonsOnPage(t)
	for reason, code := range codeOf {
		if name := "`" + inCapitals(code) + "`"; !strings.Contains(page[string(reason)], name) {
			t.Errorf("REASONS.md says %s for %s, its code is %s", page[string(reason)], reason, name)
		}
	}
}

// inCapitals is a code as CSI writes it.
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
