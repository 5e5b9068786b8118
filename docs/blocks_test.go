package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestEveryBlockOfCodeHasAClass(t *testing.T) {
	pages, err := Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	var onCluster []string
	for _, page := range pages {
		if !page.WithCommands() {
			continue
		}
		blocks, err := page.Blocks()
		if err != nil {
			t.Error(err)
		}
		for _, b := range blocks {
			count[b.Run]++
		}
		if len(RunBy(Cluster, blocks)) > 0 {
			onCluster = append(onCluster, page.Path)
		}
	}
	want := slices.Sorted(slices.Values(slices.Concat(ByHelm, OnCluster, OnColdRack)))
	if diff := cmp.Diff(want, onCluster); diff != "" {
		t.Errorf("the end-to-end suite runs other pages than those with blocks for it "+
			"(-suite +pages):\n%s", diff)
	}
	for _, runner := range []string{Here, Cluster, Rehearsal, RehearsalOn} {
		if count[runner] == 0 {
			t.Errorf("no block is run: %s", runner)
		}
	}
	run := count[Here] + count[Cluster] + count[Rehearsal] + count[RehearsalOn]
	index, err := os.ReadFile(filepath.Join(root, "docs/README.md"))
	share := fmt.Sprintf("%d of the %d blocks", run, run+count[""])
	if err != nil || !strings.Contains(string(index), share) {
		t.Errorf("docs/README.md does not say that tests run %s of code: %v", share, err)
	}
	t.Logf("FIGURE docs here=%d cluster=%d not-run=%d", count[Here], count[Cluster], count[""])
}

func TestABlockWithoutAClassIsFound(t *testing.T) {
	for name, c := range map[string]struct{ page, want string }{
		"none":            {"Text:\n\n    true\n", "docs/p.md:3: the block has no class"},
		"another comment": {"<!-- ran -->\n    true\n", "no class"},
		"no reason":       {"<!-- not run: -->\n    true\n", "no class"},
		"another runner":  {"<!-- run: there -->\n    true\n", "no class"},
		"text between":    {"<!-- run: here -->\n\nText.\n\n    true\n", "no class"},
		"a fence":         {"<!-- run: here -->\n```\ntrue\n```\n", "four spaces"},
		"in a list":       {"1. Do:\n\n       true\n", "no class"},
		"a reason":        {"<!-- not run: it is output -->\n    true\n", ""},
		"here":            {"Text:\n<!-- run: here; prints: a --b -->\n    true\n", ""},
		"here in a list":  {"1. Do:\n   <!-- run: here -->\n\n       true\n", ""},
		"a drawing":       {"<!-- not run: a drawing -->\n```\n──▶\n```\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			blocks, err := Parse("docs/p.md", []byte(c.page)).Blocks()
			switch {
			case c.want == "" && (err != nil || len(blocks) != 1):
				t.Errorf("Blocks() = %v, %v, want a block", blocks, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("Blocks() = %v, %v, want an error with %q", blocks, err, c.want)
			}
		})
	}
}
