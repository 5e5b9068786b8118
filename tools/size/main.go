// Size prints how large each package of the project is, without its tests: lines, files, and the
// identifiers that it exports.
//
//	go run -C tools ./size ..
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

type size struct{ lines, files, exported int }

func main() {
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "size: name the directory of the project")
		os.Exit(2)
	}
	sizes, err := measure(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "size:", err)
		os.Exit(1)
	}
	names := make([]string, 0, len(sizes))
	for name := range sizes {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		s := sizes[name]
		fmt.Printf("FIGURE size package=%s lines=%d files=%d exported=%d\n", name, s.lines, s.files,
			s.exported)
	}
}

// measure returns the sizes by the package's directory. Test files count under "tests" below it.
func measure(root string) (map[string]size, error) {
	sizes := map[string]size{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		isTest := strings.HasSuffix(path, "_test.go")
		if isTest {
			name = filepath.Join(name, "tests")
		}
		s := sizes[name]
		s.files++
		s.lines += bytes.Count(text, []byte("\n"))
		if !isTest {
			file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			s.exported += exported(file)
		}
		sizes[name] = s
		return nil
	})
	return sizes, err
}

// exported counts the exported declarations of a file, methods of exported types among them.
func exported(file *ast.File) (n int) {
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Name.IsExported() && (d.Recv == nil || receiverIsExported(d.Recv.List[0].Type)) {
				n++
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					if spec.Name.IsExported() {
						n++
					}
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						if name.IsExported() {
							n++
						}
					}
				}
			}
		}
	}
	return n
}

func receiverIsExported(t ast.Expr) bool {
	if pointer, ok := t.(*ast.StarExpr); ok {
		t = pointer.X
	}
	if generic, ok := t.(*ast.IndexExpr); ok {
		t = generic.X
	}
	name, ok := t.(*ast.Ident)
	return ok && name.IsExported()
}
