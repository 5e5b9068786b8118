package doctor

import (
	"bytes"
	"cmp"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Place is where a chain is in the tree of a cluster: rack, instance, device, disk, claim, pod. A
// field is empty if its object is unknown or does not exist.
type Place struct {
	Node     string `json:"node,omitempty"` // if the chain is the node's own
	Instance string `json:"instance,omitempty"`
	Device   string `json:"device,omitempty"` // as the node's report names it, such as nvme4n1
	Disk     string `json:"disk,omitempty"`
	Volume   string `json:"volume,omitempty"` // the PersistentVolume
	Claim    string `json:"claim,omitempty"`
	Pod      string `json:"pod,omitempty"`
}

// place finds a chain's place. A disk is placed at the instance to which it is attached on the
// rack.
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

// branch is a part of the tree: an instance with its disks, or the disks that no instance has.
type branch struct {
	Title  string
	Own    *Chain // of the node; nil without one
	Leaves []Chain
}

// tree arranges the chains by the instance that has the disk. The instances are in the order of
// their titles; after them come the disks that no instance has, and the volumes without a disk.
func (d Diagnosis) tree() []branch {
	at := map[string]*branch{}
	shelf, lost := &branch{Title: "at no instance"}, &branch{Title: "without a disk"}
	for i, c := range d.Chains {
		b := shelf
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
			b = lost
		}
		b.Leaves = append(b.Leaves, c)
	}
	var all []branch
	for _, key := range sortedKeys(at) {
		all = append(all, *at[key])
	}
	slices.SortStableFunc(all, func(a, b branch) int { return cmp.Compare(a.Title, b.Title) })
	for _, b := range []*branch{shelf, lost} {
		if len(b.Leaves) > 0 {
			all = append(all, *b)
		}
	}
	return all
}

// step returns a link of the chain, which is empty if the chain has none.
func (c Chain) step(link Link) (found Step) {
	for _, s := range c.Links {
		if s.Link == link {
			found = s
		}
	}
	return found
}

// Line is a volume in one line: device, disk, claim and pod.
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

// State is the chain's state in one word: that of its first broken link, or the least certain one.
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

// Wrong is the broken link, or the links that could not be seen, in one line; "" if there are none.
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

// mostFindings is how many findings a report of a cluster explains; the tree marks all of them.
const mostFindings = 10

// treeText is the tree for people, and the findings below it.
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

// page is an HTML page that loads nothing else.
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

// WriteHTML writes the diagnosis as one page that needs nothing else. Of a question that is not
// about the cluster it has the findings alone.
func (d Diagnosis) WriteHTML(w io.Writer) error {
	var b bytes.Buffer
	err := page.Execute(&b, struct {
		Diagnosis
		Branches []branch
		Broken   []Chain
	}{d, d.tree(), d.broken()})
	if err == nil {
		_, err = w.Write(b.Bytes()) // in one piece, so that no secret is split among writes
	}
	return err
}
