package docs

import (
	"fmt"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/yuin/goldmark/ast"
)

// Anchors returns the anchors that GitHub gives the page's headings: in lower case, without
// punctuation, with hyphens for spaces, and numbered if several are the same.
func (p Page) Anchors() []string {
	var anchors []string
	seen := map[string]int{}
	for _, n := range p.nodes() {
		if n.Kind() != ast.KindHeading {
			continue
		}
		anchor := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.Pc):
				return unicode.ToLower(r)
			}
			return -1
		}, p.plain(n))
		if before := seen[anchor]; before > 0 {
			anchors = append(anchors, fmt.Sprintf("%s-%d", anchor, before))
		} else {
			anchors = append(anchors, anchor)
		}
		seen[anchor]++
	}
	return anchors
}

// plain returns the text of a node without its markup.
func (p Page) plain(n ast.Node) string {
	var words strings.Builder
	for child := n.FirstChild(); child != nil; child = child.NextSibling() {
		if t, ok := child.(*ast.Text); ok {
			words.Write(t.Value(p.source))
		} else {
			words.WriteString(p.plain(child))
		}
	}
	return words.String()
}

// Links returns the destinations of the page's links and pictures.
func (p Page) Links() []string {
	var links []string
	for _, n := range p.nodes() {
		switch n := n.(type) {
		case *ast.Link:
			links = append(links, string(n.Destination))
		case *ast.Image:
			links = append(links, string(n.Destination))
		case *ast.AutoLink:
			links = append(links, string(n.URL(p.source)))
		}
	}
	return links
}

// Site contains all pages of a repository.
type Site struct {
	Root  string
	Pages []Page
}

// Check returns an error if a link of a page leads nowhere. For a link to another site it checks
// only the form.
func (s Site) Check(from Page, link string) error {
	u, err := url.Parse(link)
	if err != nil {
		return fmt.Errorf("%s links to %s, which is no URL: %w", from.Path, link, err)
	}
	if u.IsAbs() {
		if (u.Scheme != "https" && u.Scheme != "http") || u.Host == "" {
			return fmt.Errorf("%s links to %s: expected https://HOST/…", from.Path, link)
		}
		return nil
	}
	to := from.Path
	if u.Path != "" {
		to = path.Join(path.Dir(from.Path), u.Path)
	}
	if _, err := os.Stat(filepath.Join(s.Root, filepath.FromSlash(to))); err != nil {
		return fmt.Errorf("%s links to %s, and there is no %s", from.Path, link, to)
	}
	if u.Fragment == "" {
		return nil
	}
	i := slices.IndexFunc(s.Pages, func(p Page) bool { return p.Path == to })
	if i < 0 || !slices.Contains(s.Pages[i].Anchors(), u.Fragment) {
		return fmt.Errorf("%s links to %s, and %s has no heading with that anchor", from.Path, link,
			to)
	}
	return nil
}
