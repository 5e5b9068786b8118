package main

import (
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/modfile"
)

// tree contains the packages of a module, by their directories, and their imports.
type tree struct {
	module   string
	packages []string
	imports  []imported
}

// imported is one import of a package.
type imported struct {
	from string // the directory of the package
	path string
	test bool   // whether the file is a test
	at   string // file and line
}

// load reads the imports of every Go file of the module, whatever its build constraints are.
func load(root fs.FS) (tree, error) {
	text, err := fs.ReadFile(root, "go.mod")
	if err != nil {
		return tree{}, err
	}
	t := tree{module: modfile.ModulePath(text)}
	err = fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name == ".":
			return nil
		case d.IsDir():
			return skip(root, name)
		case path.Ext(name) != ".go":
			return nil
		}
		text, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, text, parser.ImportsOnly)
		if err != nil {
			return err
		}
		dir := path.Dir(name)
		if !slices.Contains(t.packages, dir) {
			t.packages = append(t.packages, dir)
		}
		for _, spec := range file.Imports {
			of, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			t.imports = append(t.imports, imported{dir, of, strings.HasSuffix(name, "_test.go"),
				fmt.Sprintf("%s:%d", name, files.Position(spec.Pos()).Line)})
		}
		return nil
	})
	return t, err
}

// skip skips a directory that the go command ignores, too, or that is a module of its own.
func skip(root fs.FS, dir string) error {
	base := path.Base(dir)
	if base[0] == '.' || base[0] == '_' || base == "testdata" {
		return fs.SkipDir
	}
	_, err := fs.Stat(root, path.Join(dir, "go.mod"))
	if err == nil {
		return fs.SkipDir
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
