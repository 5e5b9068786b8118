// Package doctor explains why a volume does not work. It gathers evidence from Kubernetes, the rack
// and the node, and checks each link of the chain from the claim to the pod's mounts. For the most
// important broken link it reports what is wrong, for how long, what will happen by itself, and
// what to do next. An error of the driver takes precedence over a finding that is only inferred
// (basis). The package only reads.
//
// Gather collects the Evidence, and records what it could not see. Diagnose is a pure function of
// the Evidence.
package doctor

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// Link is a link of the chain from a claim to the pod that uses it.
type Link string

// The links, in the order of the chain.
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
	Idle    State = "idle"    // the object does not exist, and is not needed
	Unseen  State = "unseen"  // it could not be read, so its state is unknown
)

// Diagnosis is the answer to a question.
type Diagnosis struct {
	Question string    `json:"question"`
	At       time.Time `json:"at"`
	Version  string    `json:"version"`
	Chains   []Chain   `json:"chains"`
}

// Chain is the result for one volume, or for another object that the question is about.
type Chain struct {
	Subject string `json:"subject"`
	// Place is where the report about a cluster shows the chain. It is nil for other questions.
	Place *Place `json:"place,omitempty"`
	Links []Step `json:"links"`
	// Finding is the most important finding, or nil if no link is broken. It is the first finding. But
	// if the driver has reported an error, an inferred finding is only used if there is no other.
	Finding *Finding `json:"finding,omitempty"`
}

// Step is the result for one link.
type Step struct {
	Link    Link     `json:"link"`
	State   State    `json:"state"`
	What    string   `json:"what"` // what the link is, or why it could not be read
	Notes   []string `json:"notes,omitempty"`
	Finding *Finding `json:"finding,omitempty"`
}

// Finding describes what is wrong with a link, and what to do about it.
type Finding struct {
	Link   Link          `json:"link"`
	Reason csierr.Reason `json:"reason,omitempty"` // an entry of docs/reasons.md
	Wrong  string        `json:"wrong"`
	Source string        `json:"source"` // where Wrong was seen, such as "the rack"
	Since  time.Time     `json:"since,omitzero"`
	Last   time.Time     `json:"last,omitzero"` // when Wrong was last seen

	ByItself string `json:"byItself"` // what will happen if nobody acts
	Do       string `json:"do"`
	Next     string `json:"next"`

	basis basis
	node  string // the node of the failed call, if it is not the chain's node
}

// basis is the kind of evidence for a finding. A higher value is more certain.
type basis int

const (
	inference basis = iota // phases, times and absent objects, which show no cause
	quote                  // an error of the driver that still counts; see driverErrors
	sight                  // a state that was read from the rack or the node after any recorded error
)

// Status returns the exit status: 2 if a link is broken, 3 if no link is broken but one could not
// be seen, and otherwise 0.
func (d Diagnosis) Status() int {
	status := 0
	for _, c := range d.Chains {
		switch c.State() {
		case Broken:
			return 2
		case Unseen:
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
	reported := c.driverErrors()
	reports := func(match func(Finding) bool) bool { return slices.ContainsFunc(reported, match) }
	for _, l := range c.links {
		step := l.judge(c)
		step.Link = l.link
		for _, s := range reported {
			if s.brokenLink() == l.link {
				step = c.apply(step, s)
			}
		}
		if f := step.Finding; f != nil && f.basis == inference &&
			reports(func(s Finding) bool { return s.Link == l.link }) {
			if !reports(func(s Finding) bool { return strings.Contains(f.Wrong, s.Wrong) }) {
				step.Notes = append(step.Notes, f.Wrong)
			}
			step.State, step.Finding = Waiting, nil // the error is about another link
		}
		if f := step.Finding; f != nil {
			// Disks are created and deleted without a node, so f may not be the cause of the reported error.
			if f.Reason == "" && reports(func(s Finding) bool {
				return s.Link == LinkClaim || s.Link == LinkVolume
			}) {
				f.basis = inference
			}
			if reports(func(s Finding) bool { return s.Reason == f.Reason }) {
				f.basis = max(f.basis, quote) // the finding explains the error
			}
			step.State, f.Link = Broken, l.link
			if a, ok := advices[f.Reason]; ok {
				e, _ := csierr.Explain(f.Reason)
				f.ByItself, f.Do, f.Next = cmp.Or(f.ByItself, a.ByItself),
					cmp.Or(f.Do, strings.ReplaceAll(e.Do, "`", "")), cmp.Or(f.Next, a.Next)
			}
			f.Next = c.commandAt(f.node, f.Next)
			if best := result.Finding; best == nil ||
				len(reported) > 0 && best.basis == inference && f.basis > inference {
				result.Finding = f
			}
		}
		result.Links = append(result.Links, plain(step))
	}
	return result
}

// apply adds an error of the driver to a link. The error replaces a finding that is only inferred.
func (c *chain) apply(step Step, s Finding) Step {
	if f := step.Finding; f != nil && f.basis != inference && f.Reason != s.Reason {
		step.Notes = append(step.Notes, s.Source+" says "+string(s.Reason)+": "+s.Wrong)
		return step
	}
	s.basis = quote
	if says := c.Cluster.keeperPlan(cmp.Or(s.node, c.node.name)); says != "" &&
		s.Reason == csierr.InstanceMustBeStopped {
		s.ByItself = says
		s.Do = "Nothing, if that is soon enough; otherwise see what the node keeper waits for."
		s.Next = "kubectl describe node {node}"
	}
	step.Finding = &s
	return step
}

// keeperPlan returns a sentence if the node keeper plans to stop a node, or "". It does not quote
// the annotation with the plan, which others may have written.
func (c Cluster) keeperPlan(node string) string {
	o, _ := c.one(kindNode, named("", node))
	if o == nil || o.Metadata.Annotations.KeeperPlan == "" {
		return ""
	}
	return "The node keeper has a plan for the node, which is in its annotation."
}

func broken(what string, f *Finding) Step { return Step{State: Broken, What: what, Finding: f} }

// commandWord matches names that need no quotes in a shell. People type the command into a shell,
// and anybody may have created an object with a name that the shell would execute.
var commandWord = regexp.MustCompile(`^[A-Za-z0-9][-A-Za-z0-9.]*$`)

var placeholder = regexp.MustCompile(`\{[A-Za-z]+\}`)

// commandAt replaces the placeholders of a command by names of the chain. If node is another node
// than the chain's, {node}, {instance} and {driverPod} become names of that node. If the name for a
// placeholder is unknown or does not match commandWord, the placeholder becomes a word in capitals.
func (c *chain) commandAt(node, text string) string {
	at := c.node
	if node != "" && node != at.name {
		at = findNode(c.Evidence, node, "", "")
	}
	names := c.names(at)
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

// Question names the object that a diagnosis explains.
type Question struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"` // the namespace of a claim or a pod
	Name      string `json:"name,omitempty"`      // name of a claim, a pod or a node; id of a volume
}

// The kinds of questions.
const (
	AskClaim   = "pvc"
	AskPod     = "pod"
	AskVolume  = "volume"
	AskNode    = "node"
	AskRack    = "rack"
	AskCluster = "cluster"
)

var errUsage = errors.New("expected pvc NAMESPACE/NAME, pod NAMESPACE/NAME, volume ID, node " +
	"NAME, cluster, or rack")

// ParseQuestion parses the arguments of the doctor command.
func ParseQuestion(args []string) (q Question, err error) {
	if len(args) == 1 && (args[0] == AskRack || args[0] == AskCluster) {
		return Question{Kind: args[0]}, nil
	}
	if len(args) != 2 {
		return q, errUsage
	}
	q.Kind, q.Name = args[0], args[1]
	switch q.Kind {
	case AskVolume:
		id, ok := volume.ParseID(q.Name)
		if !ok {
			return q, errors.New("volume: has to be a volume handle of this driver, which is a UUID")
		}
		q.Name = id
		return q, nil
	case AskClaim, AskPod:
		q.Namespace, q.Name, _ = strings.Cut(q.Name, "/")
		if !kube.IsName(q.Namespace) || q.Name == "" {
			return q, fmt.Errorf("%s: has to be NAMESPACE/NAME", q.Kind)
		}
	case AskNode:
	default:
		return q, errUsage
	}
	if !kube.IsName(q.Name) {
		return q, fmt.Errorf("%s: %q is not a name of Kubernetes", q.Kind, csierr.Plain(q.Name))
	}
	return q, nil
}

// String returns the question as it was asked.
func (q Question) String() string {
	return strings.TrimSpace(q.Kind + " " + path.Join(q.Namespace, q.Name))
}

// Options are the options of the doctor command.
type Options struct {
	Question    Question
	Objects     string   // a file with objects of Kubernetes, instead of kubectl
	NodeReports []string // files with reports of nodes, instead of kubectl exec
	Namespace   string   // the driver's namespace; empty means the chart's
	Kubectl     bool
	JSON        bool
	Colour      bool   // the report goes to a terminal
	Bundle      string // a file to write; empty for none
	HTML        string // a file to write; empty for none
}

// Flags defines the flags that set the options.
func (o *Options) Flags(flags *flag.FlagSet) {
	flags.BoolVar(&o.Kubectl, "kubectl", true, "ask kubectl's current cluster; --kubectl=false asks "+
		"no cluster and no node")
	flags.StringVar(&o.Namespace, "driver-namespace", driverNamespace, "`NAMESPACE` of the driver: "+
		"only pods of its DaemonSet there are asked")
	flags.StringVar(&o.Objects, "objects", "", "`FILE` with the output of kubectl get -o json, "+
		"instead of kubectl; - is the standard input")
	flags.Func("node-report", "`FILE` with the output of oxide-csi-plugin inspect, instead of asking "+
		"the driver's pod on the node; may be repeated", func(value string) error {
		o.NodeReports = append(o.NodeReports, value)
		return nil
	})
	flags.StringVar(&o.Bundle, "bundle", "", "`FILE` to write with the diagnosis and what it was "+
		"made from, without secrets, as JSON")
	flags.StringVar(&o.HTML, "html", "", "`FILE` to write with the diagnosis as a page")
	flags.Func("output", "`FORMAT` of the report: text (the default) or json",
		func(value string) error {
			o.JSON = value == "json"
			if value != "json" && value != "text" {
				return errors.New("has to be text or json")
			}
			return nil
		})
}

// Evidence contains all objects and reports from which a diagnosis is made. If an object could not
// be read, the Evidence contains the reason, so that the object does not seem to be missing.
type Evidence struct {
	Version  string      `json:"version"` // the version of this program
	At       time.Time   `json:"at"`
	Question Question    `json:"question"`
	Cluster  Cluster     `json:"cluster"`
	Nodes    Nodes       `json:"nodes"`
	Rack     RackObjects `json:"rack"`
}

// Cluster holds the objects of Kubernetes.
type Cluster struct {
	Objects []kube.Object `json:"objects"`
	// Unseen maps each kind that could not be read to the reason.
	Unseen map[string]string `json:"unseen,omitempty"`
}

const (
	kindClaim      = "PersistentVolumeClaim"
	kindVolume     = "PersistentVolume"
	kindAttachment = "VolumeAttachment"
	kindCSINode    = "CSINode"
	kindNode       = "Node"
	kindContent    = "VolumeSnapshotContent"
	kindPod        = "Pod"
	kindDriverPod  = "Pod of the driver"
	kindEvent      = "Event"
	kindDaemonSet  = "DaemonSet"
	kindReplicaSet = "ReplicaSet"
	kindDeployment = "Deployment"
)

// Nodes holds the reports of nodes. The keys of Reports are the ids of instances.
type Nodes struct {
	Reports   map[string]inspection.Report `json:"reports"`
	Namespace string                       `json:"namespace"` // the driver's namespace
	// DriverPods contains the controller's pods and, on the nodes in question, the DaemonSet's pods.
	DriverPods []kube.Object `json:"driverPods,omitempty"`
	// Unseen contains why reports are missing. The keys are the ids of instances. The key "" is for
	// all other instances.
	Unseen map[string]string `json:"unseen,omitempty"`
}

// RackObjects holds objects of the rack. The keys of its maps are ids.
type RackObjects struct {
	Unseen string `json:"unseen,omitempty"` // why the rack could not be asked at all
	// Reason is the csierr.Reason of the error in Unseen, or "".
	Reason    string                    `json:"reason,omitempty"`
	Cluster   string                    `json:"cluster,omitempty"` // OXIDE_CLUSTER_ID
	Project   string                    `json:"project,omitempty"` // the project's id
	Disks     map[string]Found[Disk]    `json:"disks,omitempty"`
	Instances map[string]Found[Machine] `json:"instances,omitempty"`
	// Neighbours contains, for each instance's id, the disks that are attached to the instance.
	Neighbours map[string]Found[[]Disk] `json:"neighbours,omitempty"`
	// Owned contains the disks of this cluster, LeftBytes the unused part of the quota. They are set
	// only if the question is about the rack.
	Owned     Found[[]Disk] `json:"owned,omitzero"`
	LeftBytes Found[int64]  `json:"leftBytes,omitzero"`
}

// Found is the result of a request: an object, or nothing and the reason if it could not be read.
type Found[T any] struct {
	Object *T     `json:"object,omitempty"`
	Unseen string `json:"unseen,omitempty"`
}

// Missing reports whether the request succeeded and found nothing.
func (f Found[T]) Missing() bool { return f.Object == nil && f.Unseen == "" }

// Disk is a disk of the rack.
type Disk struct {
	ID         string `json:"id"`
	Name       string `json:"name"`
	State      string `json:"state"`
	Instance   string `json:"instance,omitempty"`
	SizeBytes  int64  `json:"sizeBytes"`
	BlockBytes int64  `json:"blockBytes"`
	// FilesystemUUID is the UUID that the volume's filesystem must have. "" means that any is right.
	FilesystemUUID string `json:"filesystemUUID,omitempty"`
	// Claim is the claim in the disk's description. The driver made the disk for this claim.
	Claim   string `json:"claim,omitempty"`
	Foreign string `json:"foreign,omitempty"` // why the disk does not belong to this cluster
}

// Machine is an instance of the rack.
type Machine struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State string `json:"state"`
}

// objects returns the objects of a kind that match, or the reason if the kind could not be read.
func (c Cluster) objects(kind string, match func(*kube.Object) bool) ([]kube.Object, string) {
	var found []kube.Object
	for i := range c.Objects {
		if o := &c.Objects[i]; o.Kind == kind && match(o) {
			found = append(found, *o)
		}
	}
	if len(found) > 0 {
		return found, ""
	}
	return nil, c.Unseen[kind]
}

// one() returns the first object of a kind that matches, or nil and why the kind could not be read.
func (c Cluster) one(kind string, match func(*kube.Object) bool) (o *kube.Object, why string) {
	found, why := c.objects(kind, match)
	if len(found) == 0 {
		return nil, why
	}
	return &found[0], ""
}

// reference returns a reference without UID to an object or, for an event, to the event's object.
func reference(o *kube.Object) kube.Reference {
	if o.Kind == kindEvent {
		ref := o.InvolvedObject
		ref.UID = ""
		return ref
	}
	return kube.Reference{Kind: o.Kind, Namespace: o.Metadata.Namespace, Name: o.Metadata.Name}
}

func named(namespace, name string) func(*kube.Object) bool {
	return func(o *kube.Object) bool {
		return o.Metadata.Name == name && o.Metadata.Namespace == namespace
	}
}
