package docs

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// root is the repository's directory, relative to this package.
const root = ".."

func TestEveryLinkLeadsSomewhere(t *testing.T) {
	pages, err := Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	site, links := Site{Root: root, Pages: pages}, 0
	for _, page := range pages {
		for _, link := range page.Links() {
			links++
			if err := site.Check(page, link); err != nil {
				t.Error(err)
			}
		}
	}
	if len(pages) < 10 || links < 50 {
		t.Errorf("found %d pages with %d links, expected more", len(pages), links)
	}
}

func TestEveryPageOfThisDirectoryIsInItsIndex(t *testing.T) {
	pages, err := Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	index, err := Read(root, "docs/README.md")
	if err != nil {
		t.Fatal(err)
	}
	links := strings.Join(index.Links(), "\n") + "\n"
	for _, page := range pages {
		name, ours := strings.CutPrefix(page.Path, "docs/")
		if ours && name != "README.md" && !strings.Contains(links, name+"\n") {
			t.Errorf("docs/README.md does not list %s", page.Path)
		}
	}
}

func TestALinkThatLeadsNowhereIsFound(t *testing.T) {
	page := Parse("README.md", []byte("# Up & down: `a_b`\n\n## Same\n\n## Same\n\nText.\n"))
	if diff := cmp.Diff([]string{"up--down-a_b", "same", "same-1"}, page.Anchors()); diff != "" {
		t.Errorf("the anchors differ (-want +got):\n%s", diff)
	}
	site := Site{Root: root, Pages: []Page{page}}
	for link, good := range map[string]bool{
		"#same-1": true, "#same-2": false, "go.mod": true, "docs/gone.md": false, "docs/docs.go": true,
		"https://oxide.computer": true, "https://": false, "ftp://oxide.computer": false, "%zz": false,
		"docs/docs.go#same": false,
	} {
		if err := site.Check(page, link); (err == nil) != good {
			t.Errorf("Check(%q) = %v, want success %t", link, err, good)
		}
	}
}
