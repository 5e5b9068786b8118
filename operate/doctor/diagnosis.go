// Package doctor explains why a volume does not work. It gathers evidence from Kubernetes, the rack
// and the node, and checks each link of the chain from the claim to the mounts of the pod. For the
// most important broken link it reports what is wrong, for how long, what will happen by itself,
// and what to do next. A finding that an error of the driver supports takes precedence over one
// that is only inferred (basis). The package only reads.
//
// Gather collects the Evidence, and records what it could not see. Diagnose is a pure function of
// the Evidence.
//
// Files: evidence.go (the question and the evidence), gather.go (how the evidence is collected),
// sift.go (what of it may be shown, and which pods are the driver's), chain.go (which objects
// belong together), errors.go (the driver's errors that Kubernetes recorded, and the advice for
// each reason), judge_cluster.go, judge_rack.go and judge_node.go (the links), diagnosis.go (the
// result), report.go (the result for people, and for a support case).
package doctor

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// Link is a link of the chain from a claim to the files that a workload sees.
type Link string

// The links of a chain, in their order.
const (
	LinkClaim      Link = "claim"
	LinkVolume     Link = "volume"     // the PersistentVolume
	LinkAttachment Link = "attachment" // the VolumeAttachment
	LinkNode       Link = "node"       // the driver on the node, and its CSINode entry
	LinkRack       Link = "rack"
	LinkInstance   Link = "instance"
	LinkDisk       Link = "disk"
	LinkSerial     Link = "serial"
	LinkDevice     Link = "device"
	LinkFilesystem Link = "filesystem"
	LinkMounts     Link = "mounts"
	LinkPod        Link = "pod"
)

// State is the state of a link.
type State string

// The states of a link.
const (
	OK      State = "ok"
	Broken  State = "broken"
	Waiting State = "waiting" // something is under way, and has not taken long
	Idle    State = "idle"    // nothing is there, and nothing has to be
	Unseen  State = "unseen"  // it could not be seen, so its state is unknown
)

// Diagnosis is the answer to a question.
type Diagnosis struct {
	Question string    `json:"question"`
	At       time.Time `json:"at"`
	Version  string    `json:"version"`
	Chains   []Chain   `json:"chains"`
}

// Chain is the chain of one volume, or the part of it that a question is about.
type Chain struct {
	Subject string `json:"subject"`
	// Place is the chain's place in the tree of a cluster; nil for other questions.
	Place *Place `json:"place,omitempty"`
	Links []Step `json:"links"`
	// Finding is the most important finding, or nil if no link is broken. It is the first one. But if
	// an error of the driver still counts, it is the first one that is not an inference.
	Finding *Finding `json:"finding,omitempty"`
}

// Step is one link, as it was found.
type Step struct {
	Link    Link     `json:"link"`
	State   State    `json:"state"`
	What    string   `json:"what"` // what the link is, or why it could not be seen
	Notes   []string `json:"notes,omitempty"`
	Finding *Finding `json:"finding,omitempty"`
}

// Finding is what is wrong with a link.
type Finding struct {
	Link   Link          `json:"link"`
	Reason csierr.Reason `json:"reason,omitempty"` // of docs/reasons.md
	Wrong  string        `json:"wrong"`
	Source string        `json:"source"` // where that was seen, such as "the rack"
	Since  time.Time     `json:"since,omitzero"`
	Last   time.Time     `json:"last,omitzero"` // when it was last seen

	ByItself string `json:"byItself"` // what will happen without anybody
	Do       string `json:"do"`
	Next     string `json:"next"` // the next command

	basis basis
}

// basis is what a finding is based on, with increasing certainty.
type basis int

const (
	inference basis = iota // phases, times and absent objects, which show no cause
	quote                  // an error of the driver that still counts; see driverErrors
	sight                  // the rack or the node, which were read after any error was recorded
)

// Status returns the exit status: 0 if nothing is broken, 2 if something is broken, and 3 if no
// broken link was found, but some link could not be seen.
func (d Diagnosis) Status() int {
	status := 0
	for _, c := range d.Chains {
		if c.Finding != nil {
			return 2
		}
		if slices.ContainsFunc(c.Links, func(s Step) bool { return s.State == Unseen }) {
			status = 3
		}
	}
	return status
}

// Diagnose makes a diagnosis from the evidence alone.
func Diagnose(e Evidence) Diagnosis {
	d := Diagnosis{Question: e.Question.String(), At: e.At, Version: e.Version, Chains: []Chain{}}
	for _, c := range resolve(&e) {
		d.Chains = append(d.Chains, c.judge())
	}
	return d
}

func (c *chain) judge() Chain {
	result := Chain{Subject: csierr.Plain(c.subject)}
	if c.Question.Kind == AskCluster {
		result.Place = c.place()
	}
	c.reported = c.driverErrors()
	for _, l := range c.links {
		step := l.judge(c)
		step.Link = l.link
		for _, s := range c.reported {
			if s.link() == l.link {
				step = c.apply(step, s)
			}
		}
		if f := step.Finding; f != nil && f.basis == inference &&
			slices.ContainsFunc(c.reported, func(s driverError) bool { return s.at == l.link }) {
			if !slices.ContainsFunc(c.reported, func(s driverError) bool {
				return strings.Contains(f.Wrong, s.Sentence)
			}) {
				step.Notes = append(step.Notes, f.Wrong)
			}
			step.State, step.Finding = Waiting, nil // the error is about another link
		}
		if f := step.Finding; f != nil {
			if f.Reason == "" && slices.ContainsFunc(c.reported, ofNoNode) {
				f.basis = inference // the call that failed needs no node
			}
			if slices.ContainsFunc(c.reported, func(s driverError) bool { return s.Reason == f.Reason }) {
				f.basis = max(f.basis, quote) // the finding explains the error
			}
			step.State, f.Link = Broken, l.link
			c.advise(f)
			if best := result.Finding; best == nil ||
				len(c.reported) > 0 && best.basis == inference && f.basis > inference {
				result.Finding = f
			}
		}
		result.Links = append(result.Links, plain(step))
	}
	return result
}

// ofNoNode reports whether an error is of a call that makes or deletes the disk.
func ofNoNode(s driverError) bool { return s.at == LinkClaim || s.at == LinkVolume }

// apply adds an error of the driver to a link. Its text is more precise than what the objects show.
func (c *chain) apply(step Step, s driverError) Step {
	if f := step.Finding; f == nil || f.basis == inference || f.Reason == s.Reason {
		step.Finding = &Finding{Reason: s.Reason, Wrong: s.Sentence, Source: s.Source, Since: s.First,
			Last: s.Last, Next: c.commandAt(s.node, advices[s.Reason].Next), basis: quote}
		if says := c.keeperPlan(cmp.Or(s.node, c.nodeName)); says != "" &&
			s.Reason == csierr.InstanceMustBeStopped {
			step.Finding.ByItself = says
			step.Finding.Do = "Nothing, if that is soon enough; otherwise see what the node keeper " +
				"waits for."
			step.Finding.Next = c.commandAt(s.node, "kubectl describe node {node}")
		}
		return step
	}
	step.Notes = append(step.Notes, s.Source+" says "+string(s.Reason)+": "+s.Sentence)
	return step
}

// keeperPlan returns a sentence if the node keeper plans to stop a node, or "". It does not quote
// the plan, because others may write that annotation, too.
func (e *Evidence) keeperPlan(node string) string {
	o, _ := e.Cluster.one(kindNode, named("", node))
	if o == nil || o.Metadata.Annotations.KeeperPlan == "" {
		return ""
	}
	return "The node keeper has a plan for the node, which is in its annotation."
}

func broken(what string, f Finding) Step { return Step{State: Broken, What: what, Finding: &f} }

// advise adds the advice for a finding's reason, and puts names into its command.
func (c *chain) advise(f *Finding) {
	if a, ok := advices[f.Reason]; ok {
		e, _ := csierr.Explain(f.Reason)
		f.ByItself, f.Do, f.Next = cmp.Or(f.ByItself, a.ByItself),
			cmp.Or(f.Do, strings.ReplaceAll(e.Do, "`", "")), cmp.Or(f.Next, a.Next)
	}
	f.Next = c.commandAt("", f.Next)
}

// commandWord matches names that may be put into a command without quotes. They come from objects
// that anybody may have written, and the command is typed into a shell.
var commandWord = regexp.MustCompile(`^[A-Za-z0-9][-A-Za-z0-9.]*$`)

// placeholder matches the words of a command that stand for names.
var placeholder = regexp.MustCompile(`\{[A-Za-z]+\}`)

// commandAt replaces the placeholders of a command by the chain's names, or for "node", "instance"
// and "driverPod" by those of another node if one is given. A placeholder whose name is unknown, or
// not safe to type, becomes a word in capitals.
func (c *chain) commandAt(node, text string) string {
	names := c.names()
	if node != "" && node != c.nodeName {
		other := &chain{Evidence: c.Evidence, nodeName: node}
		other.findNode()
		for _, word := range []string{"node", "instance", "driverPod"} {
			names[word] = other.names()[word]
		}
	}
	return placeholder.ReplaceAllStringFunc(text, func(word string) string {
		word = strings.Trim(word, "{}")
		if name := names[word]; commandWord.MatchString(name) {
			return name
		}
		return strings.ToUpper(word)
	})
}

func plain(s Step) Step {
	s.What = csierr.Plain(s.What)
	for i, note := range s.Notes {
		s.Notes[i] = csierr.Plain(note)
	}
	if f := s.Finding; f != nil {
		f.Wrong, f.Source = csierr.Plain(f.Wrong), csierr.Plain(f.Source)
	}
	return s
}
