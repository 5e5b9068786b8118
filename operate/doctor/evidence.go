package doctor

import (
	"errors"
	"flag"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// Question is what a diagnosis is about.
type Question struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"` // of a claim or a pod
	Name      string `json:"name,omitempty"`      // of a claim, a pod or a node; the id of a volume
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

// ParseQuestion parses the arguments of a doctor.
func ParseQuestion(args []string) (Question, error) {
	q := Question{}
	if len(args) > 0 {
		q.Kind = args[0]
	}
	switch {
	case q.alone() && len(args) == 1:
		return q, nil
	case q.alone(), len(args) != 2:
		return q, errUsage
	}
	q.Name = args[1]
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

// alone reports whether the question names no object.
func (q Question) alone() bool { return q.Kind == AskRack || q.Kind == AskCluster }

// String returns the question as it was asked.
func (q Question) String() string {
	return strings.TrimSpace(q.Kind + " " + path.Join(q.Namespace, q.Name))
}

// Options are the options of a doctor.
type Options struct {
	Question    Question
	Objects     string   // a file with objects of Kubernetes, instead of kubectl
	NodeReports []string // files with reports of nodes, instead of kubectl exec
	Namespace   string   // of the driver; empty means the chart's
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

// Evidence is all that a diagnosis is made from. For everything that could not be seen it contains
// the reason, so that it is not taken for absent.
type Evidence struct {
	Version  string      `json:"version"` // of this program
	At       time.Time   `json:"at"`
	Question Question    `json:"question"`
	Cluster  Cluster     `json:"cluster"`
	Nodes    Nodes       `json:"nodes"`
	Rack     RackObjects `json:"rack"`
}

// Cluster holds the objects of Kubernetes.
type Cluster struct {
	Objects []kube.Object `json:"objects"`
	// Unseen contains the kinds whose objects could not be seen, with the reasons.
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

// Nodes holds the reports of nodes, by the id of the instance.
type Nodes struct {
	Reports   map[string]inspection.Report `json:"reports"`
	Namespace string                       `json:"namespace"` // of the driver
	// DriverPods contains the driver's pods. It may be incomplete if there are reports of all nodes.
	DriverPods []kube.Object `json:"driverPods,omitempty"`
	// Unseen contains the reasons for missing reports, by the id of the instance. The key "" is for
	// all other instances.
	Unseen map[string]string `json:"unseen,omitempty"`
}

// RackObjects holds the objects of the rack, by id.
type RackObjects struct {
	Unseen string `json:"unseen,omitempty"` // why the rack could not be asked at all
	// Reason is the reason of the error in Unseen, if it has one.
	Reason    string                    `json:"reason,omitempty"`
	Cluster   string                    `json:"cluster,omitempty"` // OXIDE_CLUSTER_ID
	Project   string                    `json:"project,omitempty"` // its id
	Disks     map[string]Found[Disk]    `json:"disks,omitempty"`
	Instances map[string]Found[Machine] `json:"instances,omitempty"`
	// Neighbours are the disks of an instance.
	Neighbours map[string]Found[[]Disk] `json:"neighbours,omitempty"`
	// Boot contains the ids of the boot disks of the project's instances, if the question is about the
	// cluster.
	Boot map[string]bool `json:"boot,omitempty"`
	// Owned contains the disks of this cluster, and LeftBytes what is left of the quota, if the
	// question is about the rack.
	Owned     *Found[[]Disk] `json:"owned,omitempty"`
	LeftBytes *Found[int64]  `json:"leftBytes,omitempty"`
}

// Found is the result of a request: an object, its absence, or the reason why it could not be seen.
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
	Type       string `json:"type"`
	// FilesystemUUID is the UUID that the volume's filesystem has to have, or empty if any will do.
	FilesystemUUID string `json:"filesystemUUID,omitempty"`
	CSIName        string `json:"csiName,omitempty"`
	// Claim is the claim that the disk was made for, as its description says.
	Claim   string `json:"claim,omitempty"`
	Foreign string `json:"foreign,omitempty"` // why the disk is not this cluster's
}

// Machine is an instance of the rack.
type Machine struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	State string `json:"state"`
}

// objects returns the objects of a kind that match, or why the kind could not be seen.
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

// one returns the only object of a kind that matches, or nil, and why the kind could not be seen.
func (c Cluster) one(kind string, match func(*kube.Object) bool) (o *kube.Object, why string) {
	found, why := c.objects(kind, match)
	if len(found) == 0 {
		return nil, why
	}
	return &found[0], ""
}

func named(namespace, name string) func(*kube.Object) bool {
	return func(o *kube.Object) bool {
		return o.Metadata.Name == name && o.Metadata.Namespace == namespace
	}
}
