package doctor

import (
	"errors"
	"flag"
	"fmt"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
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
	switch q.Kind {
	case AskClaim, AskPod:
		return q.Kind + " " + q.Namespace + "/" + q.Name
	case AskRack, AskCluster:
		return q.Kind
	}
	return q.Kind + " " + q.Name
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
