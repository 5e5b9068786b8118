package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// requestTimeout is how long the requests to the rack, to a node, or for the objects of one kind
// may take.
const requestTimeout = 30 * time.Second

// What the chart installs: its namespace unless another is chosen, and the driver's container.
const (
	driverNamespace = "oxide-csi"
	driverContainer = "oxide-plugin"
)

// Sources are where evidence comes from.
type Sources struct {
	Rack *rack.Client // nil if there is none
	// NoRack is the reason why there is no rack.
	NoRack    string
	ClusterID string
	Version   string
	// Kubectl runs kubectl.
	Kubectl func(ctx context.Context, args ...string) ([]byte, error)
	// Timeout replaces requestTimeout, unless it is zero.
	Timeout time.Duration
}

type gatherer struct {
	Sources
	options Options
	e       Evidence
	// noKubectl is why kubectl is not run again: it is not installed, or its cluster does not answer.
	noKubectl string
}

func (g *gatherer) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, cmp.Or(g.Timeout, requestTimeout))
}

// Gather collects the evidence for a question. It changes nothing. It returns an error only about
// the files that the options name.
func Gather(ctx context.Context, s Sources, o Options) (Evidence, error) {
	g := &gatherer{Sources: s, options: o, e: Evidence{Version: s.Version, At: time.Now().UTC(),
		Question: o.Question}}
	g.e.Cluster.Unseen, g.e.Nodes.Unseen = map[string]string{}, map[string]string{}
	g.e.Nodes.Namespace = cmp.Or(o.Namespace, driverNamespace)
	if err := g.cluster(ctx); err != nil {
		return Evidence{}, err
	}
	g.sift()
	g.prune()
	g.rack(ctx)
	if err := g.nodes(ctx); err != nil {
		return Evidence{}, err
	}
	return g.e, nil
}

// cluster collects the objects of Kubernetes, from a file or from kubectl.
func (g *gatherer) cluster(ctx context.Context) error {
	switch {
	case g.options.Question.Kind == AskRack:
		return nil
	case g.options.Objects != "":
		return g.objectsFromFile()
	case !g.options.Kubectl:
		for kind := range resources {
			g.e.Cluster.Unseen[kind] = "kubectl was not asked (--kubectl=false)"
		}
		return nil
	}
	q, namespaces := g.options.Question, []string{}
	g.list(ctx, kindVolume, "")
	g.list(ctx, kindAttachment, "")
	g.list(ctx, kindContent, "")
	g.list(ctx, kindCSINode, "")
	g.list(ctx, kindNode, "")
	g.list(ctx, kindDriverPod, g.e.Nodes.Namespace)
	switch q.Kind {
	case AskClaim, AskPod:
		namespaces = []string{q.Namespace}
	case AskVolume:
		if c := volumeChain(&g.e, q.Name); kube.IsName(c.claimName.Namespace) {
			namespaces = []string{c.claimName.Namespace}
		}
	case AskNode, AskCluster:
		namespaces = []string{allNamespaces}
	}
	for _, namespace := range namespaces {
		g.list(ctx, kindClaim, namespace)
		g.list(ctx, kindPod, namespace)
		g.list(ctx, kindEvent, namespace)
		if namespace != allNamespaces && namespace != "default" {
			g.list(ctx, kindEvent, "default") // the events of PersistentVolumes
		}
	}
	return nil
}

const allNamespaces = "*"

// resources are the names by which kubectl knows the kinds.
var resources = map[string]string{kindClaim: "persistentvolumeclaims",
	kindVolume: "persistentvolumes", kindContent: "volumesnapshotcontents",
	kindAttachment: "volumeattachments", kindCSINode: "csinodes",
	kindNode: "nodes", kindPod: "pods", kindEvent: "events",
	kindDriverPod: "pods,daemonsets,replicasets,deployments"}

// list lists the objects of a kind.
func (g *gatherer) list(ctx context.Context, kind, namespace string) {
	if g.noKubectl != "" {
		g.e.Cluster.Unseen[kind] = g.noKubectl
		return
	}
	ctx, cancel := g.limit(ctx)
	defer cancel()
	args := []string{"get", resources[kind], "--output=json"}
	switch namespace {
	case "":
	case allNamespaces:
		args = append(args, "--all-namespaces")
	default:
		args = append(args, "--namespace="+namespace)
	}
	data, err := g.Kubectl(ctx, args...)
	var objects []kube.Object
	why := ""
	if err != nil {
		why = "kubectl get: " + known(err.Error())
		if ctx.Err() != nil || errors.Is(err, exec.ErrNotFound) {
			g.noKubectl = why
		}
	} else if objects, err = kube.Parse(data); err != nil {
		why = "the output of kubectl " + err.Error()
	}
	if kind != kindDriverPod {
		g.e.Cluster.Objects = append(g.e.Cluster.Objects, objects...)
	} else if why == "" {
		why = g.ownPods(objects)
	}
	if why != "" {
		g.e.Cluster.Unseen[kind] = why
	}
}

// maxFileBytes is more than a file of one cluster's objects and less than a machine's memory.
const maxFileBytes = 256 << 20

// readFile reads a file that a flag names; "-" is the standard input.
func readFile(flag, path string, most int64) ([]byte, error) {
	f := os.Stdin
	if path != "-" {
		var err error
		if f, err = os.Open(path); err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		defer func() { _ = f.Close() }()
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("has more than %d bytes", most)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return data, nil
}

// objectsFromFile reads the objects from a file. A kind without objects in the file counts as
// unseen, because the file may be of a request for other kinds.
func (g *gatherer) objectsFromFile() error {
	data, err := readFile("--objects", g.options.Objects, maxFileBytes)
	if err != nil {
		return err
	}
	objects, err := kube.Parse(data)
	if err != nil {
		return fmt.Errorf("--objects: %w", err)
	}
	for kind := range resources {
		g.e.Cluster.Unseen[kind] = "the file of --objects holds none"
	}
	for _, o := range objects {
		delete(g.e.Cluster.Unseen, o.Kind)
	}
	g.e.Cluster.Objects = objects
	delete(g.e.Cluster.Unseen, kindDriverPod)
	if why := g.ownPods(objects); why != "" {
		g.e.Cluster.Unseen[kindDriverPod] = why
	}
	return nil
}

func (g *gatherer) prune() {
	type key struct{ kind, namespace, name string }
	used := map[key]bool{}
	use := func(o *kube.Object) {
		if o != nil {
			used[key{o.Kind, o.Metadata.Namespace, o.Metadata.Name}] = true
		}
	}
	nodes := map[string]bool{}
	for _, c := range resolve(&g.e) {
		for _, o := range []*kube.Object{c.claim, c.volume, c.csiNode, c.pod} {
			use(o)
		}
		for _, o := range slices.Concat(c.attachments, c.pods, c.snapshots()) {
			use(&o)
			nodes[o.Spec.NodeName] = true
			used[key{kindCSINode, "", o.Spec.NodeName}] = true
			used[key{kindNode, "", o.Spec.NodeName}] = true
		}
		nodes[c.nodeName] = true
		used[key{kindNode, "", c.nodeName}] = true
	}
	g.e.Cluster.Objects = slices.DeleteFunc(g.e.Cluster.Objects, func(o kube.Object) bool {
		about := o.InvolvedObject
		if o.Kind == kindEvent {
			return !used[key{about.Kind, about.Namespace, about.Name}] || !relevant(o)
		}
		return !used[key{o.Kind, o.Metadata.Namespace, o.Metadata.Name}]
	})
	g.e.Nodes.DriverPods = slices.DeleteFunc(g.e.Nodes.DriverPods, func(o kube.Object) bool {
		return o.Metadata.Controller().Kind == kindDaemonSet && !nodes[o.Spec.NodeName]
	})
	// A node has the entries of other drivers, too.
	for i := range g.e.Cluster.Objects {
		o := &g.e.Cluster.Objects[i]
		o.Spec.Drivers = slices.DeleteFunc(o.Spec.Drivers, func(d kube.NodeDriver) bool {
			return d.Name != volume.DriverName
		})
	}
}

// eventReasons contains the reasons of the events that are about volumes. The texts of others, such
// as why an image was not pulled, must not be shown.
var eventReasons = []string{"ProvisioningFailed", "Provisioning", "ProvisioningSucceeded",
	"ExternalProvisioning", "WaitForFirstConsumer", "WaitForPodScheduled", "FailedBinding",
	"FailedMount", "FailedMapVolume", "FailedAttachVolume", "SuccessfulAttachVolume",
	"VolumeFailedDelete", "FailedScheduling"}

func relevant(event kube.Object) bool { return slices.Contains(eventReasons, event.Reason) }

var errNoNode = errors.New("the node was not asked")
