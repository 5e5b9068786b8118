// Package docs contains the documentation. Its code parses the pages, checks their links and runs
// their commands.
//
// The line above each block of code is an HTML comment, invisible to readers of the page. It is the
// block's class:
//
//	<!-- run: here -->             the tests of this package run it
//	<!-- run: cluster -->          the end-to-end suite runs it on its cluster
//	<!-- run: rehearsal -->        proofs/vm runs it on the operator's machine of a simulated rack
//	<!-- run: rehearsal on a -->   proofs/vm runs it in an instance of that rack, a virtual machine
//	<!-- not run: it is output --> nothing runs it; the text is the reason
//
// All blocks that a page has for one runner run in one bash -e, in order, at the repository's root.
// "<!-- run: here; prints: faulted -->" means that the block also has to print "faulted".
package docs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
)

// Page is a Markdown file of the repository.
type Page struct {
	// Path is relative to the repository's root, with slashes.
	Path string

	source []byte
	tree   ast.Node
}

var markdown = goldmark.New(goldmark.WithExtensions(extension.GFM))

// Parse parses the Markdown text of a page.
func Parse(path string, source []byte) Page {
	return Page{Path: path, source: source, tree: markdown.Parser().Parse(text.NewReader(source))}
}

// Read reads and parses a page of the repository at root.
func Read(root, path string) (Page, error) {
	source, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(path)))
	if err != nil {
		return Page{}, fmt.Errorf("read a page: %w", err)
	}
	return Parse(path, source), nil
}

// Pages reads every Markdown file of the repository at root, except those in directories whose
// names begin with a dot, such as .git. It does read those in .github.
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

// WithCommands reports whether every block of the page needs a class.
func (p Page) WithCommands() bool {
	return strings.HasPrefix(p.Path, "docs/") ||
		slices.Contains([]string{"README.md", "deploy/README.md"}, p.Path)
}

func (p Page) at(offset int) string {
	return fmt.Sprintf("%s:%d", p.Path, 1+strings.Count(string(p.source[:offset]), "\n"))
}

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

func (p Page) linesOf(n ast.Node) string {
	return string(n.Lines().Value(p.source))
}

// The runners of blocks.
const (
	Here    = "here"
	Cluster = "cluster"
	// Blocks of Rehearsal run on the operator's machine, those of RehearsalOn in the instance "a".
	Rehearsal   = "rehearsal"
	RehearsalOn = "rehearsal on a"
)

// Block is a block of code in a page.
type Block struct {
	// At is PAGE:LINE of the block.
	At   string
	Text string
	// Run is the block's runner, such as Here. If nothing runs the block, Run is empty, and Reason is
	// the reason.
	Run, Reason string
	// Prints is a text that the block has to print, or empty.
	Prints string
}

var class = regexp.MustCompile(
	`^<!-- (?:run: (here|cluster|rehearsal|rehearsal on a)(?:; prints: (.+))?|not run: (.+)) -->$`)

// Blocks returns the page's blocks of code, and an error for each block without a class.
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

// RunBy returns the blocks with the given runner.
func RunBy(runner string, blocks []Block) []Block {
	var chosen []Block
	for _, b := range blocks {
		if b.Run == runner {
			chosen = append(chosen, b)
		}
	}
	return chosen
}

// These lists contain the pages with blocks for the end-to-end suite. The pages of ByHelm install,
// change and remove the driver, in this order. The pages of OnCluster need the driver installed.
// Those of OnColdRack also switch the rack's hot-plug off and on.
var (
	ByHelm = []string{"docs/howto/install.md", "docs/howto/upgrade.md",
		"docs/howto/node-keeper.md", "docs/howto/uninstall.md"}
	OnCluster = []string{"docs/tutorial.md", "docs/howto/back-up.md", "docs/howto/snapshots.md",
		"docs/howto/grow-a-volume.md", "docs/howto/revert-to-a-snapshot.md",
		"docs/howto/lost-cluster.md", "docs/howto/move-a-volume.md", "docs/howto/volumes-in-use.md",
		"docs/howto/rotate-the-token.md", "docs/troubleshooting.md"}
	OnColdRack = []string{"docs/tutorial-cold-rack.md"}
)

// Anchors returns the anchors that GitHub gives the page's headings: in lower case, without
// punctuation, with hyphens for spaces. A repeated anchor gets a number.
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

// plain returns the text of a node without markup.
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

// Links returns the destinations of the page's links and images.
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

// Site contains all pages of a repository, for links between them.
type Site struct {
	Root  string
	Pages []Page
}

// Check returns an error if the target of a link in a page does not exist. It does not open web
// sites: it checks only the form of their URLs.
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

// Session runs the commands of a page.
type Session struct {
	// Root is the directory of the repository, in which the commands run.
	Root string
	// Dir is the TMPDIR of the commands. Run also writes the script and the commands' output there.
	Dir string
	// Env is the complete environment of the commands.
	Env []string
	// User runs the commands, and has to be able to write to Dir. Nil means the current user.
	User *syscall.Credential
}

// endGrace is how long the remaining processes of a page may take to end after a signal.
const endGrace = 30 * time.Second

// Run runs blocks in one bash -e. It returns an error if a block fails, if the output of a block
// lacks the text in Prints, or if a process still runs at the end.
func (s Session) Run(ctx context.Context, blocks []Block) (err error) {
	log, err := os.Create(filepath.Join(s.Dir, "session.log"))
	if err != nil {
		return fmt.Errorf("keep the output of the commands: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	script := filepath.Join(s.Dir, "session.sh")
	if err := os.WriteFile(script, []byte(s.script(blocks)), 0o644); err != nil {
		return fmt.Errorf("write the commands: %w", err)
	}
	bash := exec.CommandContext(ctx, "bash", "-e", "-o", "pipefail", script)
	bash.Dir, bash.Stdout, bash.Stderr = s.Root, log, log
	bash.Env = slices.Concat(s.Env, []string{"TMPDIR=" + s.Dir})
	// The process group also contains the commands' background processes.
	bash.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: s.User}
	bash.Cancel = func() error { return syscall.Kill(-bash.Process.Pid, syscall.SIGTERM) }
	bash.WaitDelay = endGrace
	if err := bash.Start(); err != nil {
		return fmt.Errorf("run the commands: %w", err)
	}
	failed := bash.Wait()
	left := endGroup(bash.Process.Pid)
	if failed != nil {
		return fmt.Errorf("%w; the end of the session:\n%s", failed, s.end(blocks))
	}
	return errors.Join(left, s.printed(blocks))
}

func (s Session) script(blocks []Block) string {
	var script strings.Builder
	for i, b := range blocks {
		fmt.Fprintf(&script, "echo '== %s' >&2\n{\n%s\n} >'%s'\n", b.At, b.Text, s.output(i))
	}
	return script.String()
}

func (s Session) output(block int) string {
	return filepath.Join(s.Dir, fmt.Sprintf("block-%d.out", block))
}

func (s Session) printed(blocks []Block) error {
	var errs []error
	for i, b := range blocks {
		out, err := os.ReadFile(s.output(i))
		if err == nil && !strings.Contains(string(out), b.Prints) {
			err = fmt.Errorf("%s: expected the block to print %q, and it printed:\n%s", b.At, b.Prints,
				out)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// end returns the end of the log, followed by the end of the output of the last block that ran.
func (s Session) end(blocks []Block) string {
	log, err := os.ReadFile(filepath.Join(s.Dir, "session.log"))
	if err != nil {
		return err.Error()
	}
	for i := range blocks {
		out, err := os.ReadFile(s.output(len(blocks) - 1 - i))
		if err == nil {
			return lastBytes(log) + "and it had printed:\n" + lastBytes(out)
		}
	}
	return lastBytes(log)
}

func lastBytes(data []byte) string { return string(data[max(0, len(data)-4<<10):]) }

func endGroup(group int) error {
	gone := func() bool { return errors.Is(syscall.Kill(-group, 0), syscall.ESRCH) }
	if gone() {
		return nil
	}
	err := errors.New("the page leaves processes behind: its last block has to end them")
	_ = syscall.Kill(-group, syscall.SIGTERM)
	for start := time.Now(); !gone(); {
		if time.Since(start) > endGrace {
			return errors.Join(err, syscall.Kill(-group, syscall.SIGKILL))
		}
		<-time.After(10 * time.Millisecond)
	}
	return err
}
