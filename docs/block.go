package docs

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/yuin/goldmark/ast"
)

// The runners of a block.
const (
	Here    = "here"
	Cluster = "cluster"
	// The rehearsal runs these on the operator's machine, and in the instance a of a rack.
	Rehearsal   = "rehearsal"
	RehearsalOn = "rehearsal on a"
)

// Block is a block of code of a page.
type Block struct {
	// At is the block's place, PAGE:LINE.
	At string
	// Text is the content of the block.
	Text string
	// Run is the block's runner, such as Here. It is empty if nothing runs the block; then Reason is
	// the reason.
	Run, Reason string
	// Prints is a text that the commands have to print, or empty.
	Prints string
}

var class = regexp.MustCompile(
	`^<!-- (?:run: (here|cluster|rehearsal|rehearsal on a)(?:; prints: (.+))?|not run: (.+)) -->$`)

// Blocks returns the page's blocks of code. Every block needs a class.
func (p Page) Blocks() ([]Block, error) {
	var blocks []Block
	var errs []error
	for _, n := range p.nodes() {
		fenced := n.Kind() == ast.KindFencedCodeBlock
		if (n.Kind() != ast.KindCodeBlock && !fenced) || n.Lines().Len() == 0 {
			continue
		}
		block := Block{At: p.at(n.Lines().At(0).Start), Text: p.linesOf(n)}
		var found []string
		if above, ok := n.PreviousSibling().(*ast.HTMLBlock); ok {
			found = class.FindStringSubmatch(strings.TrimSpace(p.linesOf(above)))
		}
		if found == nil {
			errs = append(errs, fmt.Errorf("%s: the block has no class: write <!-- run: here -->, "+
				"<!-- run: cluster --> or <!-- not run: REASON --> on the line above it", block.At))
			continue
		}
		block.Run, block.Prints, block.Reason = found[1], found[2], found[3]
		if fenced && block.Reason != drawing {
			errs = append(errs, fmt.Errorf("%s: the block has a fence, which is for drawings "+
				"(<!-- not run: %s -->): indent it by four spaces instead", block.At, drawing))
		}
		blocks = append(blocks, block)
	}
	return blocks, errors.Join(errs...)
}

const drawing = "a drawing"

// RunBy returns the blocks of one runner.
func RunBy(runner string, blocks []Block) []Block {
	var chosen []Block
	for _, b := range blocks {
		if b.Run == runner {
			chosen = append(chosen, b)
		}
	}
	return chosen
}

// These lists contain the pages with blocks of the class Cluster. The pages of ByHelm install,
// change and remove the driver, in this order. Those of OnCluster need it installed. Those of
// OnColdRack also switch the rack's hot-plug off and on again.
var (
	ByHelm = []string{"docs/howto/install.md", "docs/howto/upgrade.md",
		"docs/howto/node-keeper.md", "docs/howto/uninstall.md"}
	OnCluster = []string{"docs/tutorial.md", "docs/howto/back-up.md", "docs/howto/snapshots.md",
		"docs/howto/grow-a-volume.md", "docs/howto/revert-to-a-snapshot.md",
		"docs/howto/lost-cluster.md", "docs/howto/move-a-volume.md", "docs/howto/volumes-in-use.md",
		"docs/howto/rotate-the-token.md", "docs/troubleshooting.md"}
	OnColdRack = []string{"docs/tutorial-cold-rack.md"}
)
