package main

import (
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// site is a place in the source, and the mutant for it.
type site struct {
	pkg           *pkg
	id            string
	file          string
	line          int
	kind          string
	start, end    int // offsets in bytes
	before, after string
	// with returns the text that selects between both variants by the switch.
	with func(id string) string
}

// pkg is a package under test.
type pkg struct {
	dir, name string
	text      map[string][]byte // the files, by name
	sites     []site
}

// readPackage finds the places in the package's files.
func readPackage(dir string) (*pkg, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	info, err := build.ImportDir(abs, 0)
	if err != nil {
		return nil, err
	}
	p := &pkg{dir: abs, name: info.Name, text: map[string][]byte{}}
	for _, name := range info.GoFiles {
		text, err := os.ReadFile(filepath.Join(abs, name))
		if err != nil {
			return nil, err
		}
		p.text[name] = text
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, text, 0)
		if err != nil {
			return nil, err
		}
		f := &finder{pkg: p, name: name, text: text, files: set}
		ast.Walk(f, file)
	}
	return p, nil
}

// draw chooses places that do not overlap.
func (p *pkg) draw(n int, seed uint64) []site {
	r := rand.New(rand.NewPCG(seed, seed))
	var chosen []site
	for _, i := range r.Perm(len(p.sites)) {
		s := p.sites[i]
		overlaps := slices.ContainsFunc(chosen, func(c site) bool {
			return c.file == s.file && c.start < s.end && s.start < c.end
		})
		if overlaps {
			continue
		}
		s.pkg, s.id = p, p.name+"."+strconv.Itoa(len(chosen)+1)
		if chosen = append(chosen, s); len(chosen) == n {
			break
		}
	}
	return chosen
}

// finder collects the places of one file.
type finder struct {
	pkg   *pkg
	name  string
	text  []byte
	files *token.FileSet
	// results contains the results of the function that is being visited.
	results *ast.FieldList
}

func (f *finder) Visit(n ast.Node) ast.Visitor {
	switch n := n.(type) {
	case *ast.FuncDecl:
		inner := *f
		inner.results = n.Type.Results
		return &inner
	case *ast.FuncLit:
		inner := *f
		inner.results = n.Type.Results
		return &inner
	case *ast.GenDecl:
		if n.Tok == token.CONST {
			return nil // a constant cannot have a switch
		}
	case *ast.IfStmt:
		f.condition(n.Cond)
	case *ast.ForStmt:
		if n.Cond != nil {
			f.condition(n.Cond)
		}
	case *ast.BinaryExpr:
		f.binary(n)
	case *ast.ReturnStmt:
		f.returned(n)
	}
	return f
}

func (f *finder) source(n ast.Node) string {
	return string(f.text[f.offset(n.Pos()):f.offset(n.End())])
}

func (f *finder) offset(p token.Pos) int { return f.files.Position(p).Offset }

func (f *finder) add(n ast.Node, kind, before, after string, with func(id string) string) {
	f.pkg.sites = append(f.pkg.sites, site{
		file: f.name, line: f.files.Position(n.Pos()).Line, kind: kind,
		start: f.offset(n.Pos()), end: f.offset(n.End()), before: short(before), after: short(after),
		with: with,
	})
}

// condition adds a mutant that negates a condition.
func (f *finder) condition(e ast.Expr) {
	text := f.source(e)
	f.add(e, "condition", text, "!("+text+")", func(id string) string {
		return fmt.Sprintf("(mutant(%q) != (%s))", id, text)
	})
}

var others = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR,
	token.EQL: token.NEQ, token.NEQ: token.EQL, token.LAND: token.LOR, token.LOR: token.LAND,
}

// binary adds mutants of a comparison: one with another operator, or one with another number.
func (f *finder) binary(e *ast.BinaryExpr) {
	other, ok := others[e.Op]
	if !ok {
		return
	}
	x, y := f.source(e.X), f.source(e.Y)
	f.either(e, "comparison", fmt.Sprintf("%s %s %s", x, other, y))
	if n, ok := e.Y.(*ast.BasicLit); ok && n.Kind == token.INT {
		f.either(e, "constant", fmt.Sprintf("%s %s %s+1", x, e.Op, y))
	}
}

func (f *finder) either(e ast.Expr, kind, after string) {
	text := f.source(e)
	f.add(e, kind, text, after, func(id string) string {
		return fmt.Sprintf("(func() bool { if mutant(%q) { return %s }; return %s }())", id, after, text)
	})
}

// returned adds a mutant of a return statement that drops its error.
func (f *finder) returned(n *ast.ReturnStmt) {
	if f.results == nil || len(n.Results) == 0 || len(n.Results) != f.results.NumFields() {
		return
	}
	last := f.results.List[len(f.results.List)-1]
	if kind, ok := last.Type.(*ast.Ident); !ok || kind.Name != "error" {
		return
	}
	failure := n.Results[len(n.Results)-1]
	if name, ok := failure.(*ast.Ident); ok && name.Name == "nil" {
		return
	}
	text := f.source(n)
	after := string(f.text[f.offset(n.Pos()):f.offset(failure.Pos())]) + "nil"
	f.add(n, "error", text, after, func(id string) string {
		return fmt.Sprintf("if mutant(%q) { %s }; %s", id, after, text)
	})
}

func short(text string) string {
	const most = 90
	text = string(spaces.ReplaceAll([]byte(text), []byte(" ")))
	if len(text) > most {
		text = text[:most] + "…"
	}
	return text
}
