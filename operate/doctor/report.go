package doctor

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Write writes the diagnosis, for people or as JSON.
func (d Diagnosis) Write(w io.Writer, o Options) error {
	var text []byte
	var err error
	switch {
	case o.JSON:
		text, err = indented(d)
	case o.Question.Kind == AskCluster:
		text = d.treeText(o.Colour)
	default:
		text = d.text()
	}
	if err == nil {
		_, err = w.Write(text) // a single write, because the writer replaces secrets in each write
	}
	if err != nil {
		return fmt.Errorf("write the diagnosis: %w", err)
	}
	return nil
}

func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(v)
	return b.Bytes(), err
}

func (d Diagnosis) text() []byte {
	var b bytes.Buffer
	for _, c := range d.Chains {
		fmt.Fprintf(&b, "%s\n\n", c.Subject)
		for _, s := range c.Links {
			fmt.Fprintf(&b, "  %-11s %-8s %s\n", s.Link, s.State, s.What)
			for _, note := range s.Notes {
				fmt.Fprintf(&b, "  %-11s %-8s   %s\n", "", "", note)
			}
		}
		b.WriteByte('\n')
		c.writeFinding(&b)
		b.WriteByte('\n')
	}
	d.writeFigure(&b)
	return b.Bytes()
}

func (d Diagnosis) writeFigure(b *bytes.Buffer) {
	fmt.Fprintf(b, "FIGURE doctor chains=%d broken=%d unseen=%d status=%d\n", len(d.Chains),
		d.count(Broken), d.count(Unseen), d.Status())
}

func (d Diagnosis) count(state State) (n int) {
	for _, c := range d.Chains {
		for _, s := range c.Links {
			if s.State == state {
				n++
			}
		}
	}
	return n
}

func (c Chain) unseen() string {
	var unseen []string
	for _, s := range c.Links {
		if s.State == Unseen {
			unseen = append(unseen, string(s.Link))
		}
	}
	return strings.Join(unseen, ", ")
}

func (c Chain) writeFinding(b *bytes.Buffer) {
	f := c.Finding
	if f == nil {
		but := ""
		if unseen := c.unseen(); unseen != "" {
			but = ", but these links could not be seen: " + unseen
		}
		fmt.Fprintf(b, "  Nothing broken was found%s.\n", but)
		return
	}
	fmt.Fprintf(b, "  BROKEN LINK: %s\n", f.Link)
	line := func(word, text string) {
		if text != "" {
			fmt.Fprintf(b, "  %-11s %s\n", word, text)
		}
	}
	line("wrong", f.Wrong)
	if f.Reason != "" {
		line("reason", string(f.Reason)+" (docs/reasons.md)")
	}
	line("says", f.Source)
	if !f.Since.IsZero() {
		line("since", f.Since.UTC().Format(timeFormat))
	}
	if f.Last.After(f.Since) {
		line("last", f.Last.UTC().Format(timeFormat))
	}
	line("by itself", f.ByItself)
	line("do", f.Do)
	line("next", f.Next)
}

// bundle is a file for a support case. Its evidence was sifted (sift.go), so it contains no Secret,
// environment, mount option or token. From other programs it contains only texts of a known form.
type bundle struct {
	Format    int       `json:"format"`
	Version   string    `json:"version"`
	Diagnosis Diagnosis `json:"diagnosis"`
	Evidence  Evidence  `json:"evidence"`
}

const bundleFormat = 1

// WriteBundle writes the diagnosis and its evidence as JSON.
func WriteBundle(w io.Writer, d Diagnosis, e Evidence) error {
	text, err := indented(bundle{Format: bundleFormat, Version: e.Version, Diagnosis: d, Evidence: e})
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

const timeFormat = time.RFC3339

// firstOf joins the first eight words, and adds the number of the others.
func firstOf(words []string) string {
	const most = 8
	if len(words) <= most {
		return strings.Join(words, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:most], ", "), len(words)-most)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Place is where the tree of a cluster shows a chain. From the root to the leaf, the tree has the
// rack, an instance, a device, a disk, a claim and a pod. The field of an object that is unknown or
// does not exist is empty.
type Place struct {
	Node     string `json:"node,omitempty"` // only in the chain of a node
	Instance string `json:"instance,omitempty"`
	Device   string `json:"device,omitempty"` // as the node's report names it, such as nvme4n1
	Disk     string `json:"disk,omitempty"`
	Volume   string `json:"volume,omitempty"` // the PersistentVolume
	Claim    string `json:"claim,omitempty"`
	Pod      string `json:"pod,omitempty"`
}

// place returns a chain's place. A disk is shown at the instance to which the rack has attached it.
func (c *chain) place() *Place {
	p := &Place{}
	if c.volume == nil && c.handle == "" && c.claimName.Name == "" {
		p.Node, p.Instance = c.nodeName, c.instance
		return p
	}
	if d := c.Rack.Disks[c.handle].Object; d != nil {
		p.Instance = d.Instance
		p.Disk = fmt.Sprintf("%s (%s), %d GiB, %s", d.Name, d.ID, d.SizeBytes/volume.GiB, d.State)
	}
	if c.volume != nil {
		p.Volume = c.volume.Metadata.Name
	}
	if c.claimName.Name != "" {
		p.Claim = c.claimName.Namespace + "/" + c.claimName.Name
	}
	if c.pod != nil {
		p.Pod = c.pod.Metadata.Name
	}
	if _, v, _ := c.report(); v != nil && len(v.Devices) == 1 && p.Instance == c.instance {
		p.Device = v.Devices[0].Name
	}
	for _, text := range []*string{&p.Instance, &p.Device, &p.Disk, &p.Volume, &p.Claim, &p.Pod} {
		*text = csierr.Plain(*text)
	}
	return p
}

// branch is an instance with its volumes, or the volumes without an instance or without a disk.
type branch struct {
	Title  string
	Own    *Chain // the chain of the node, or nil
	Leaves []Chain
}

// tree groups the chains by the instance to which the disk is attached. The instances are sorted by
// title. After them come the disks at no instance, and the volumes without a disk.
func (d Diagnosis) tree() []branch {
	at := map[string]*branch{}
	detached, diskless := &branch{Title: "at no instance"}, &branch{Title: "without a disk"}
	for i, c := range d.Chains {
		b := detached
		switch p := c.Place; {
		case p == nil, i == 0:
			continue // the rack, or a question about something else
		case p.Instance != "" || p.Node != "":
			key := cmp.Or(p.Instance, "node "+p.Node)
			if at[key] == nil {
				at[key] = &branch{Title: "instance " + p.Instance}
			}
			b = at[key]
			if p.Node != "" {
				b.Own, b.Title = &d.Chains[i], cmp.Or(c.step(LinkInstance).What, "instance")+", node "+p.Node
				continue
			}
		case p.Disk == "":
			b = diskless
		}
		b.Leaves = append(b.Leaves, c)
	}
	var all []branch
	for _, key := range sortedKeys(at) {
		all = append(all, *at[key])
	}
	slices.SortStableFunc(all, func(a, b branch) int { return cmp.Compare(a.Title, b.Title) })
	for _, b := range []*branch{detached, diskless} {
		if len(b.Leaves) > 0 {
			all = append(all, *b)
		}
	}
	return all
}

// step returns the step of a link. If the chain does not have the link, it returns an empty step.
func (c Chain) step(link Link) (found Step) {
	for _, s := range c.Links {
		if s.Link == link {
			found = s
		}
	}
	return found
}

// Line describes a volume in one line: device, disk, claim and pod.
func (c Chain) Line() string {
	p := c.Place
	words := []string{cmp.Or(p.Disk, c.Subject)}
	if p.Device != "" {
		words[0] = p.Device + ": " + words[0]
	}
	if p.Volume == "" && p.Claim == "" && c.step(LinkVolume).State == Idle {
		words = append(words, "no PersistentVolume (see oxide-csi-plugin audit)")
	}
	for _, word := range []struct{ kind, name string }{{"claim ", p.Claim}, {"pod ", p.Pod}} {
		if word.name != "" {
			words = append(words, word.kind+word.name)
		}
	}
	return strings.Join(words, " → ")
}

// State returns the state of the chain's worst link: broken, unseen, waiting or OK.
func (c Chain) State() State {
	if c.Finding != nil {
		return Broken
	}
	for _, state := range []State{Unseen, Waiting} {
		if slices.ContainsFunc(c.Links, func(s Step) bool { return s.State == state }) {
			return state
		}
	}
	return OK
}

// Wrong returns one line about what is wrong, or about which links could not be seen. It returns ""
// if no link is broken or unseen.
func (c Chain) Wrong() string {
	if f := c.Finding; f != nil {
		return strings.TrimSpace(string(f.Link) + ": " + string(f.Reason) + " " + f.Wrong)
	}
	if unseen := c.unseen(); unseen != "" {
		return "not seen: " + unseen
	}
	return ""
}

// colours are the escape sequences of the states on a terminal.
var colours = map[State]string{OK: "32", Waiting: "33", Unseen: "36", Broken: "1;31"}

// mostFindings is how many findings a cluster's report explains. The tree marks all broken chains.
const mostFindings = 10

// treeText returns the tree, and below it the findings, as text for people.
func (d Diagnosis) treeText(colour bool) []byte {
	var b bytes.Buffer
	mark := func(c Chain) string {
		word := fmt.Sprintf("%-8s", c.State())
		if code := colours[c.State()]; colour && code != "" {
			word = "\x1b[" + code + "m" + word + "\x1b[0m"
		}
		return word
	}
	line := func(indent string, c Chain, text string) {
		fmt.Fprintf(&b, "%s %s%s\n", mark(c), indent, text)
		if wrong := c.Wrong(); wrong != "" {
			fmt.Fprintf(&b, "%9s%s   ↳ %s\n", "", indent, wrong)
		}
	}
	if len(d.Chains) > 0 {
		line("", d.Chains[0], d.Chains[0].step(LinkRack).What)
	}
	for _, branch := range d.tree() {
		if branch.Own != nil {
			line("  ", *branch.Own, branch.Title)
		} else {
			fmt.Fprintf(&b, "%9s  %s\n", "", branch.Title)
		}
		for _, leaf := range branch.Leaves {
			line("    ", leaf, leaf.Line())
		}
	}
	b.WriteByte('\n')
	for i, c := range d.broken() {
		if i == mostFindings {
			fmt.Fprintf(&b, "%d more are broken; ask about one of them, such as doctor volume ID\n\n",
				len(d.broken())-i)
			break
		}
		fmt.Fprintf(&b, "%s\n\n", c.Subject)
		c.writeFinding(&b)
		b.WriteByte('\n')
	}
	d.writeFigure(&b)
	return b.Bytes()
}

func (d Diagnosis) broken() []Chain {
	return slices.DeleteFunc(slices.Clone(d.Chains), func(c Chain) bool { return c.Finding == nil })
}

// page is the template of an HTML page. The page loads no other file.
var page = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>oxide-csi-plugin doctor {{.Question}}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
:root{color-scheme:light dark;--line:light-dark(#ccc,#444);--ok:light-dark(#176b3a,#5fd38d);
--waiting:light-dark(#8a5a00,#f0b429);--unseen:light-dark(#345e9c,#8ab4f8);
--broken:light-dark(#b3261e,#ff8a80)}
body{font:16px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}
section{border:1px solid var(--line);border-radius:.4rem;padding:.5rem 1rem;margin:1rem 0}
h2{font-size:1.1rem;margin:.2rem 0}ul{list-style:none;padding:0;margin:0}li{padding:.15rem 0}
.state{display:inline-block;min-width:5rem;font-weight:600}.ok{color:var(--ok)}
.waiting{color:var(--waiting)}.unseen{color:var(--unseen)}.broken{color:var(--broken)}
small{display:block;margin-left:5rem}dl{display:grid;grid-template-columns:7rem 1fr;margin:.5rem 0}
dd{margin:0;overflow-wrap:anywhere}
</style>
<h1>doctor {{.Question}}</h1>
<p>{{.At.UTC.Format "2006-01-02 15:04:05"}} UTC, version {{.Version}}</p>
{{define "chain"}}<span class="state {{.State}}">{{.State}}</span>{{end}}
{{define "wrong"}}{{with .Wrong}}<small>{{.}}</small>{{end}}{{end}}
{{range .Branches}}<section>
<h2>{{with .Own}}{{template "chain" .}} {{end}}{{.Title}}</h2>
{{with .Own}}{{template "wrong" .}}{{end}}
<ul>{{range .Leaves}}<li>{{template "chain" .}} {{.Line}}{{template "wrong" .}}</li>{{end}}</ul>
</section>{{end}}
{{range .Broken}}{{$subject := .Subject}}{{with .Finding}}<section><h2>{{$subject}}: {{.Link}}</h2>
<dl><dt>wrong</dt><dd>{{.Wrong}}</dd>{{with .Reason}}<dt>reason</dt><dd>{{.}}</dd>{{end}}
<dt>says</dt><dd>{{.Source}}</dd><dt>by itself</dt><dd>{{.ByItself}}</dd><dt>do</dt><dd>{{.Do}}</dd>
<dt>next</dt><dd><code>{{.Next}}</code></dd></dl></section>{{end}}{{end}}
</html>
`))

// WriteHTML writes the diagnosis as an HTML page. The page contains a tree only if the question is
// about the cluster.
func (d Diagnosis) WriteHTML(w io.Writer) error {
	var b bytes.Buffer
	err := page.Execute(&b, struct {
		Diagnosis
		Branches []branch
		Broken   []Chain
	}{d, d.tree(), d.broken()})
	if err == nil {
		_, err = w.Write(b.Bytes()) // a single write; see Write
	}
	return err
}
