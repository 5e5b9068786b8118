// Package docs contains the documentation, and code that reads its pages, their links and their
// commands.
//
// Every block of code in a page has a class, in an HTML comment on the line above it, which no
// reader sees:
//
//	<!-- run: here -->             the tests of this package run it
//	<!-- run: cluster -->          the end-to-end suite runs it on its cluster
//	<!-- run: rehearsal -->        proofs/vm runs it on the operator's machine of a simulated rack
//	<!-- run: rehearsal on a -->   proofs/vm runs it in an instance of that rack, a virtual machine
//	<!-- not run: it is output --> nothing runs it, for this reason
//
// The blocks of a page that are run are one session of bash -e, in their order, at the root of the
// repository. "<!-- run: here; prints: faulted -->" also demands that a block prints this text.
package docs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
)

// Page is a Markdown file of the repository.
type Page struct {
	// Path is the path below the repository's root, with slashes.
	Path string

	source []byte
	tree   ast.Node
}

var markdown = goldmark.New(goldmark.WithExtensions(extension.GFM))

// Parse reads a page.
func Parse(path string, source []byte) Page {
	return Page{Path: path, source: source, tree: markdown.Parser().Parse(text.NewReader(source))}
}

// Read reads a page of the repository at root.
func Read(root, path string) (Page, error) {
	source, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(path)))
	if err != nil {
		return Page{}, fmt.Errorf("read a page: %w", err)
	}
	return Parse(path, source), nil
}

// Pages reads every page of the repository at root. It skips directories whose names begin with a
// dot, except .github.
func Pages(root string) ([]Page, error) {
	var pages []Page
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && len(name) > 1 && name[0] == '.' && name != ".github" {
			return fs.SkipDir
		}
		if entry.IsDir() || filepath.Ext(name) != ".md" {
			return nil
		}
		page, err := Read(root, path)
		pages = append(pages, page)
		return err
	})
	return pages, err
}

// WithCommands reports whether the blocks of a page need a class: those of this directory do, and
// those of the two pages with which people begin.
func (p Page) WithCommands() bool {
	return strings.HasPrefix(p.Path, "docs/") ||
		slices.Contains([]string{"README.md", "deploy/README.md"}, p.Path)
}

// at returns the place of an offset in the page, for a message.
func (p Page) at(offset int) string {
	return fmt.Sprintf("%s:%d", p.Path, 1+strings.Count(string(p.source[:offset]), "\n"))
}

// nodes returns the page's nodes, in order.
func (p Page) nodes() []ast.Node {
	var all []ast.Node
	// The function passed to Walk never returns an error.
	_ = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if entering {
			all = append(all, n)
		}
		return ast.WalkContinue, nil
	})
	return all
}

// linesOf returns the text of a block.
func (p Page) linesOf(n ast.Node) string {
	return string(n.Lines().Value(p.source))
}
