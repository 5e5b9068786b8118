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
	var b bytes.Buffer
	var err error
	switch {
	case o.JSON:
		err = encode(&b, d)
	case o.Question.Kind == AskCluster:
		d.writeTree(&b, o.Colour)
	default:
		d.writeLinks(&b)
	}
	if err == nil {
		_, err = w.Write(b.Bytes()) // a single write, because the writer replaces secrets in each write
	}
	if err != nil {
		return fmt.Errorf("write the diagnosis: %w", err)
	}
	return nil
}

func encode(b *bytes.Buffer, v any) error {
	encoder := json.NewEncoder(b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(v)
}

func (d Diagnosis) writeLinks(b *bytes.Buffer) {
	for _, c := range d.Chains {
		fmt.Fprintf(b, "%s\n\n", c.Subject)
		for _, s := range c.Links {
			fmt.Fprintf(b, "  %-11s %-8s %s\n", s.Link, s.State, s.What)
			for _, note := range s.Notes {
				fmt.Fprintf(b, "  %-11s %-8s   %s\n", "", "", note)
			}
		}
		b.WriteByte('\n')
		c.writeFinding(b)
	}
	d.writeFigure(b)
}

func (d Diagnosis) writeFigure(b *bytes.Buffer) {
	broken, unseen := 0, 0
	for _, c := range d.Chains {
		broken, unseen = broken+len(c.linksIn(Broken)), unseen+len(c.linksIn(Unseen))
	}
	fmt.Fprintf(b, "FIGURE doctor chains=%d broken=%d unseen=%d status=%d\n", len(d.Chains), broken,
		unseen, d.Status())
}

func (c Chain) linksIn(state State) (links []string) {
	for _, s := range c.Links {
		if s.State == state {
			links = append(links, string(s.Link))
		}
	}
	return links
}

func (c Chain) writeFinding(b *bytes.Buffer) {
	f := c.Finding
	if f == nil {
		but := ""
		if unseen := c.linksIn(Unseen); unseen != nil {
			but = ", but these links could not be seen: " + strings.Join(unseen, ", ")
		}
		fmt.Fprintf(b, "  Nothing broken was found%s.\n\n", but)
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
	b.WriteByte('\n')
}

// WriteBundle writes a file for a support case: the diagnosis and its evidence, as JSON. The
// evidence was sifted (sift.go), so it contains no Secret, environment, mount option or token. From
// other programs it contains only texts of a known form.
func WriteBundle(w io.Writer, d Diagnosis, e Evidence) error {
	var b bytes.Buffer
	err := encode(&b, struct {
		Format    int       `json:"format"`
		Version   string    `json:"version"`
		Diagnosis Diagnosis `json:"diagnosis"`
		Evidence  Evidence  `json:"evidence"`
	}{1, e.Version, d, e})
	if err == nil {
		_, err = w.Write(b.Bytes())
	}
	return err
}

const timeFormat = time.RFC3339

func firstOf(words []string) string {
	const most = 8
	if len(words) <= most {
		return strings.Join(words, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:most], ", "), len(words)-most)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Place is the place of a chain in the tree of a cluster. The levels of the tree are the rack, an
// instance, a device, a disk, a claim and a pod. A field is empty if its object is unknown or does
// not exist.
type Place struct {
	Node     string `json:"node,omitempty"` // only in the chain of a node
	Instance string `json:"instance,omitempty"`
	Device   string `json:"device,omitempty"` // as the node's report names it, such as nvme4n1
	Disk     string `json:"disk,omitempty"`
	Volume   string `json:"volume,omitempty"` // the PersistentVolume
	Claim    string `json:"claim,omitempty"`
	Pod      string `json:"pod,omitempty"`
}

// place returns the chain's place in the tree. A disk is shown at the instance to which the rack
// has attached it, not at the instance of the chain.
func (c *chain) place() *Place {
	if c.volume == nil && c.handle == "" && c.claimName.Name == "" {
		return &Place{Node: c.node.name, Instance: c.node.instance}
	}
	p := &Place{Volume: cmp.Or(c.volume, &none).Metadata.Name,
		Pod: cmp.Or(c.pod, &none).Metadata.Name}
	if d := c.Rack.Disks[c.handle].Object; d != nil {
		p.Instance = d.Instance
		p.Disk = fmt.Sprintf("%s (%s), %d GiB, %s", d.Name, d.ID, d.SizeBytes/volume.GiB, d.State)
	}
	if c.claimName.Name != "" {
		p.Claim = c.claimName.Namespace + "/" + c.claimName.Name
	}
	if v, _ := c.reported(); v != nil && len(v.Devices) == 1 && p.Instance == c.node.instance {
		p.Device = v.Devices[0].Name
	}
	for _, text := range []*string{&p.Instance, &p.Device, &p.Disk, &p.Volume, &p.Claim, &p.Pod} {
		*text = csierr.Plain(*text)
	}
	return p
}

// branch has the volumes of one instance, all volumes at no instance, or all without a disk.
type branch struct {
	rank   int // 0: an instance; 1: disks at no instance; 2: volumes without a disk
	Title  string
	Own    *Chain // the chain of the node, or nil
	Leaves []Chain
}

// Tree groups the chains by the instance to which their disk is attached. The instances are sorted
// by title. After them come the disks at no instance, and the volumes without a disk.
func (d Diagnosis) Tree() []branch {
	at := map[string]*branch{}
	for i, c := range d.Chains {
		p, b := c.Place, branch{rank: 1, Title: "at no instance"}
		switch {
		case p == nil, i == 0:
			continue // the question is not about a cluster, or this is the chain of the rack
		case p.Instance != "" || p.Node != "":
			b = branch{Title: "instance " + p.Instance}
		case p.Disk == "":
			b = branch{rank: 2, Title: "without a disk"}
		}
		key := fmt.Sprint(b.rank, cmp.Or(p.Instance, "node "+p.Node))
		if at[key] == nil {
			at[key] = &b
		}
		if p.Node != "" {
			at[key].Own = &d.Chains[i]
			at[key].Title = cmp.Or(c.step(LinkInstance).What, "instance") + ", node " + p.Node
			continue
		}
		at[key].Leaves = append(at[key].Leaves, c)
	}
	var all []branch
	for _, key := range sortedKeys(at) {
		all = append(all, *at[key])
	}
	slices.SortStableFunc(all, func(a, b branch) int {
		return cmp.Or(a.rank-b.rank, cmp.Compare(a.Title, b.Title))
	})
	return all
}

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
	if p.Claim != "" {
		words = append(words, "claim "+p.Claim)
	}
	if p.Pod != "" {
		words = append(words, "pod "+p.Pod)
	}
	return strings.Join(words, " → ")
}

// State returns the state of the chain's worst link: broken, unseen, waiting or OK.
func (c Chain) State() State {
	if c.Finding != nil {
		return Broken
	}
	for _, state := range []State{Unseen, Waiting} {
		if c.linksIn(state) != nil {
			return state
		}
	}
	return OK
}

// Wrong describes the finding in a line. Without a finding, it names the links that were not seen.
func (c Chain) Wrong() string {
	if f := c.Finding; f != nil {
		return strings.TrimSpace(string(f.Link) + ": " + string(f.Reason) + " " + f.Wrong)
	}
	if unseen := c.linksIn(Unseen); unseen != nil {
		return "not seen: " + strings.Join(unseen, ", ")
	}
	return ""
}

var colours = map[State]string{OK: "32", Waiting: "33", Unseen: "36", Broken: "1;31"}

// mostFindings is how many findings a cluster's report explains. The tree marks all broken chains.
const mostFindings = 10

func (d Diagnosis) writeTree(b *bytes.Buffer, colour bool) {
	line := func(indent string, c Chain, text string) {
		word := fmt.Sprintf("%-8s", c.State())
		if code := colours[c.State()]; colour && code != "" {
			word = "\x1b[" + code + "m" + word + "\x1b[0m"
		}
		fmt.Fprintf(b, "%s %s%s\n", word, indent, text)
		if wrong := c.Wrong(); wrong != "" {
			fmt.Fprintf(b, "%9s%s   ↳ %s\n", "", indent, wrong)
		}
	}
	if len(d.Chains) > 0 {
		line("", d.Chains[0], d.Chains[0].step(LinkRack).What)
	}
	for _, branch := range d.Tree() {
		if branch.Own != nil {
			line("  ", *branch.Own, branch.Title)
		} else {
			fmt.Fprintf(b, "%9s  %s\n", "", branch.Title)
		}
		for _, leaf := range branch.Leaves {
			line("    ", leaf, leaf.Line())
		}
	}
	b.WriteByte('\n')
	for i, c := range d.Broken() {
		if i == mostFindings {
			fmt.Fprintf(b, "%d more are broken; ask about one of them, such as doctor volume ID\n\n",
				len(d.Broken())-i)
			break
		}
		fmt.Fprintf(b, "%s\n\n", c.Subject)
		c.writeFinding(b)
	}
	d.writeFigure(b)
}

// Broken returns the chains with a finding.
func (d Diagnosis) Broken() []Chain {
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
{{range .Tree}}<section>
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

// WriteHTML writes the diagnosis as an HTML page, with a tree for a question about the cluster.
func (d Diagnosis) WriteHTML(w io.Writer) error {
	var b bytes.Buffer
	err := page.Execute(&b, d)
	if err == nil {
		_, err = w.Write(b.Bytes()) // a single write; see Write
	}
	return err
}
