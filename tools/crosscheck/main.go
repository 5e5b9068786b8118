// Crosscheck type-checks all packages and their tests for other operating systems.
//
//	go run -C tools ./crosscheck -tags e2e .. darwin illumos
//
// It compiles nothing. GOOS=darwin go vet ./... finds the same type errors, but compiles
// Kubernetes' libraries for each system first, which takes minutes when Go's cache is empty.
package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/tools/go/packages"
)

func main() {
	tags := flag.String("tags", "", "build tags, separated by commas")
	flag.Parse()
	if flag.NArg() < 2 {
		fmt.Fprintln(os.Stderr, "crosscheck: name the directory of the project and operating systems")
		os.Exit(2)
	}
	var problems []string
	for _, system := range flag.Args()[1:] {
		found, err := check(flag.Arg(0), system, *tags)
		if err != nil {
			fmt.Fprintf(os.Stderr, "crosscheck: %s: %v\n", system, err)
			os.Exit(1)
		}
		problems = append(problems, found...)
	}
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, problem)
	}
	if len(problems) > 0 {
		os.Exit(1)
	}
}

// check returns the errors in the module at root when it is built for system.
func check(root, system, tags string) ([]string, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	loaded, err := packages.Load(&packages.Config{
		// With the syntax of all dependencies, packages uses no compiled code.
		Mode: packages.NeedName | packages.NeedImports | packages.NeedDeps |
			packages.NeedCompiledGoFiles | packages.NeedTypes | packages.NeedSyntax,
		Dir: root, Tests: true, BuildFlags: []string{"-tags=" + tags},
		Env: append(os.Environ(), "GOOS="+system, "CGO_ENABLED=0"),
		ParseFile: func(set *token.FileSet, name string, src []byte) (*ast.File, error) {
			file, err := parser.ParseFile(set, name, src, parser.SkipObjectResolution)
			if file != nil && !strings.HasPrefix(name, root+string(filepath.Separator)) {
				emptyFunctions(file)
			}
			return file, err
		},
	}, "./...")
	if err != nil {
		return nil, fmt.Errorf("load the packages: %w", err)
	}
	var problems []string
	for _, p := range loaded {
		if strings.HasSuffix(p.PkgPath, ".test") { // the program that go test writes for a package
			continue
		}
		for _, e := range p.Errors {
			problems = append(problems, system+": "+e.Error())
		}
	}
	return problems, nil
}

// emptyFunctions removes the bodies of functions. Those of other modules take most of the time, and
// are not what is checked.
func emptyFunctions(file *ast.File) {
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
			f.Body.List = nil
		}
	}
}
