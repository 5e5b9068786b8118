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
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// requestTimeout limits each kubectl get, each node's report, and all rack requests together.
const requestTimeout = 30 * time.Second

// The chart's default namespace, and the name of the driver's container in the chart.
const (
	driverNamespace = "oxide-csi"
	driverContainer = "oxide-plugin"
)

// Sources contains the clients with which Gather reads the evidence.
type Sources struct {
	Rack *rack.Client // nil if there is none
	// NoRack is why Rack is nil.
	NoRack    string
	ClusterID string
	Version   string
	Kubectl   func(ctx context.Context, args ...string) ([]byte, error)
	// Timeout replaces requestTimeout if it is not zero.
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

// Gather collects the evidence for a question, and changes nothing. If a file that the options name
// cannot be read, it returns an error. It records all other failures in the evidence.
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
	for _, kind := range []string{kindVolume, kindAttachment, kindContent, kindCSINode, kindNode} {
		g.list(ctx, kind)
	}
	g.list(ctx, kindDriverPod, inNamespace+g.e.Nodes.Namespace)
	q := g.options.Question
	scope := inNamespace + q.Namespace
	switch q.Kind {
	case AskVolume:
		c := volumeChain(&g.e, q.Name)
		if !kube.IsName(c.claimName.Namespace) {
			return nil
		}
		scope = inNamespace + c.claimName.Namespace
	case AskNode, AskCluster:
		scope = allNamespaces
	}
	for _, kind := range []string{kindClaim, kindPod, kindEvent} {
		g.list(ctx, kind, scope)
	}
	if scope != allNamespaces && scope != inNamespace+"default" {
		g.list(ctx, kindEvent, inNamespace+"default") // the events of PersistentVolumes
	}
	return nil
}

const (
	allNamespaces = "--all-namespaces"
	inNamespace   = "--namespace="
)

var resources = map[string]string{kindClaim: "persistentvolumeclaims",
	kindVolume: "persistentvolumes", kindContent: "volumesnapshotcontents",
	kindAttachment: "volumeattachments", kindCSINode: "csinodes", kindNode: "nodes", kindPod: "pods",
	kindEvent: "events", kindDriverPod: "pods,daemonsets,replicasets,deployments"}

func (g *gatherer) list(ctx context.Context, kind string, scope ...string) {
	if g.noKubectl != "" {
		g.e.Cluster.Unseen[kind] = g.noKubectl
		return
	}
	ctx, cancel := g.limit(ctx)
	defer cancel()
	data, err := g.Kubectl(ctx, append([]string{"get", resources[kind], "--output=json"}, scope...)...)
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
		g.ownPods(objects)
	}
	if why != "" {
		g.e.Cluster.Unseen[kind] = why
	}
}

// maxFileBytes is the size of the largest file that is read. The objects of a cluster need less.
const maxFileBytes = 256 << 20

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

// objectsFromFile reads the objects from a file. If the file contains no object of a kind, the kind
// counts as unseen: perhaps kubectl was not asked for that kind.
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
	g.ownPods(objects)
	return nil
}

// prune removes the Kubernetes objects that the user's question does not concern.
func (g *gatherer) prune() {
	used, nodes := map[kube.Reference]bool{}, map[string]bool{}
	for _, c := range resolve(&g.e) {
		nodes[c.node.name] = true
		for _, o := range []*kube.Object{c.claim, c.volume, c.pod} {
			if o != nil {
				used[reference(o)] = true
			}
		}
		for _, o := range slices.Concat(c.attachments, c.pods, c.snapshots()) {
			used[reference(&o)] = true
			nodes[o.Spec.NodeName] = true
		}
	}
	for name := range nodes {
		used[kube.Reference{Kind: kindCSINode, Name: name}] = true
		used[kube.Reference{Kind: kindNode, Name: name}] = true
	}
	g.e.Cluster.Objects = slices.DeleteFunc(g.e.Cluster.Objects, func(o kube.Object) bool {
		return !used[reference(&o)] || o.Kind == kindEvent && !slices.Contains(eventReasons, o.Reason)
	})
	g.e.Nodes.DriverPods = slices.DeleteFunc(g.e.Nodes.DriverPods, func(o kube.Object) bool {
		return o.Metadata.Controller().Kind == kindDaemonSet && !nodes[o.Spec.NodeName]
	})
	// Remove the entries of other drivers from each CSINode.
	for i := range g.e.Cluster.Objects {
		o := &g.e.Cluster.Objects[i]
		o.Spec.Drivers = slices.DeleteFunc(o.Spec.Drivers, func(d kube.NodeDriver) bool {
			return d.Name != volume.DriverName
		})
	}
}

// eventReasons contains the reasons of events about volumes. Other events, such as those about
// images, must not be shown.
var eventReasons = []string{"ProvisioningFailed", "Provisioning", "ProvisioningSucceeded",
	"ExternalProvisioning", "WaitForFirstConsumer", "WaitForPodScheduled", "FailedBinding",
	"FailedMount", "FailedMapVolume", "FailedAttachVolume", "SuccessfulAttachVolume",
	"VolumeFailedDelete", "FailedScheduling"}

func (g *gatherer) rack(ctx context.Context) {
	r := &g.e.Rack
	r.Cluster = g.ClusterID
	r.Disks, r.Instances = map[string]Found[Disk]{}, map[string]Found[Machine]{}
	r.Neighbours = map[string]Found[[]Disk]{}
	if g.Rack == nil {
		r.Unseen = g.NoRack
		return
	}
	ctx, cancel := g.limit(ctx)
	defer cancel()
	world, err := g.Rack.World(ctx)
	if err != nil {
		r.Unseen, r.Reason = csierr.Message(err), string(csierr.From(err, csierr.RackError).Reason)
		return
	}
	r.Project = world.Project
	switch g.options.Question.Kind {
	case AskRack:
		g.rackItself(ctx)
		return
	case AskCluster:
		g.wholeProject(ctx)
		return
	}
	for _, c := range resolve(&g.e) {
		if c.handle != "" {
			r.Disks[c.handle] = found(ctx, c.handle, csierr.VolumeNotFound, g.Rack.Disk, g.diskOf)
		}
	}
	// Resolve again: where a chain's node was unknown, its disk now shows the instance.
	for _, c := range resolve(&g.e) {
		id := c.node.instance
		if _, asked := r.Instances[id]; asked || id == "" {
			continue
		}
		r.Instances[id] = found(ctx, id, csierr.InstanceNotFound, g.Rack.Instance, machineOf)
		r.Neighbours[id] = found(ctx, id, csierr.InstanceNotFound, g.Rack.InstanceDisks, g.disksOf)
	}
}

// wholeProject collects the cluster's disks and instances with two lists, instead of a request for
// each object. If a list fails, all objects of its kind are unseen.
func (g *gatherer) wholeProject(ctx context.Context) {
	r, listed := &g.e.Rack, map[string]Disk{}
	failed := g.eachDisk(ctx, func(d *oxide.Disk) { listed[d.Id] = g.diskOf(d) })
	nodes := map[string]bool{}
	for _, c := range resolve(&g.e) {
		nodes[c.node.instance] = true
		if c.handle != "" {
			r.Disks[c.handle] = Found[Disk]{Unseen: failed}
		}
	}
	neighbours := map[string][]Disk{}
	for _, id := range sortedKeys(listed) {
		d := listed[id]
		if _, asked := r.Disks[id]; asked || d.Foreign == "" {
			r.Disks[id] = Found[Disk]{Object: &d}
			nodes[d.Instance] = true
		}
		neighbours[d.Instance] = append(neighbours[d.Instance], d)
	}
	delete(nodes, "")
	machines := map[string]Machine{}
	err := g.Rack.EachInstance(ctx, func(i *oxide.Instance) { machines[i.Id] = machineOf(i) })
	for id := range nodes {
		r.Neighbours[id] = foundUnless(failed, neighbours[id])
		r.Instances[id] = Found[Machine]{Unseen: csierr.Message(err)}
		if machine, ok := machines[id]; ok {
			r.Instances[id] = Found[Machine]{Object: &machine}
		}
	}
}

// eachDisk visits the project's disks. unseen is the error if the list fails, and otherwise "".
func (g *gatherer) eachDisk(ctx context.Context, visit func(*oxide.Disk)) (unseen string) {
	return csierr.Message(g.Rack.EachDisk(ctx, &rack.Pager{},
		func(d *oxide.Disk) (enough bool, err error) {
			if err = rack.ValidateDisk("list disks", d); err == nil {
				visit(d)
			}
			return false, err
		}))
}

func found[O, T any](ctx context.Context, id string, notFound csierr.Reason,
	ask func(context.Context, oxide.NameOrId) (O, error), convert func(O) T) Found[T] {
	param, ok := rack.ID(id)
	if !ok {
		return Found[T]{} // no object of the rack has such an id
	}
	answer, err := ask(ctx, param)
	switch {
	case csierr.Has(err, notFound):
		return Found[T]{}
	case err != nil:
		return Found[T]{Unseen: csierr.Message(err)}
	}
	return foundUnless("", convert(answer))
}

func foundUnless[T any](unseen string, object T) Found[T] {
	if unseen != "" {
		return Found[T]{Unseen: unseen}
	}
	return Found[T]{Object: &object}
}

func (g *gatherer) diskOf(d *oxide.Disk) Disk {
	tag, _ := volume.ParseTag(d.Description)
	disk := Disk{ID: d.Id, Name: string(d.Name), State: string(d.State.State()),
		Instance: rack.InstanceOf(d), SizeBytes: int64(d.Size), BlockBytes: int64(d.BlockSize),
		Claim: tag.Claim, Foreign: rack.ForeignDisk(d, g.ClusterID)}
	switch {
	case tag.Use != volume.UseFilesystem:
	case tag.Origin == volume.OriginBlank:
		disk.FilesystemUUID = d.Id
	default:
		disk.FilesystemUUID = strings.ToLower(tag.FilesystemUUID)
	}
	return disk
}

func machineOf(i *oxide.Instance) Machine {
	return Machine{ID: i.Id, Name: string(i.Name), State: string(i.RunState)}
}

func (g *gatherer) disksOf(all []oxide.Disk) []Disk {
	disks := []Disk{}
	for i := range all {
		disks = append(disks, g.diskOf(&all[i]))
	}
	return disks
}

func (g *gatherer) rackItself(ctx context.Context) {
	owned := []Disk{}
	failed := g.eachDisk(ctx, func(d *oxide.Disk) {
		if tag, ok := volume.ParseTag(d.Description); ok && tag.Cluster == g.ClusterID {
			owned = append(owned, g.diskOf(d))
		}
	})
	g.e.Rack.Owned = foundUnless(failed, owned)
	use, err := g.Rack.UtilizationView(ctx)
	if err != nil {
		err = rack.Error(ctx, "read utilization", err)
	} else {
		err = rack.ValidateUtilization(use)
	}
	if err != nil {
		g.e.Rack.LeftBytes = Found[int64]{Unseen: csierr.Message(err)}
		return
	}
	left := int64(use.Capacity.Storage - min(use.Capacity.Storage, use.Provisioned.Storage))
	g.e.Rack.LeftBytes = Found[int64]{Object: &left}
}

func (g *gatherer) nodes(ctx context.Context) error {
	g.e.Nodes.Reports = map[string]inspection.Report{}
	for _, path := range g.options.NodeReports {
		data, err := readFile("--node-report", path, inspection.MaxBytes)
		if err != nil {
			return err
		}
		r, err := inspection.Parse(data)
		if err != nil {
			return fmt.Errorf("--node-report: %w", err)
		}
		g.e.Nodes.Reports[r.Instance] = g.trim(r)
	}
	switch {
	case len(g.options.NodeReports) > 0:
		g.e.Nodes.Unseen[""] = "no file of --node-report is of this node"
	case g.options.Objects != "" || !g.options.Kubectl:
		g.e.Nodes.Unseen[""] = "no node was asked; give its report with --node-report"
	default:
		g.askNodes(ctx)
	}
	return nil
}

// trim removes from a node's report the volumes that the user's question does not concern.
func (g *gatherer) trim(r inspection.Report) inspection.Report {
	if g.options.Question.Kind == AskNode {
		return r
	}
	var volumes []inspection.Volume
	chains := resolve(&g.e)
	for _, v := range r.Volumes {
		if slices.ContainsFunc(chains, func(c *chain) bool { return c.handle == v.ID }) {
			volumes = append(volumes, v)
		}
	}
	r.Volumes = volumes
	return r
}

func (g *gatherer) askNodes(ctx context.Context) {
	nodes, volumes := map[string]node{}, map[string][]string{} // keys: names of nodes
	for _, c := range resolve(&g.e) {
		name := c.node.name
		if name == "" {
			continue
		}
		if _, found := nodes[name]; !found {
			nodes[name] = c.node
		}
		if _, ok := volume.ParseID(c.handle); ok {
			asked := "--volume=" + c.handle
			if disk := c.diskName(); commandWord.MatchString(disk) {
				asked += "=" + disk
			}
			volumes[name] = append(volumes[name], asked)
		}
	}
	// Ask nodes concurrently: a cluster may have many, and connecting takes most of the time.
	var mu sync.Mutex
	var asking errgroup.Group
	asking.SetLimit(8)
	for name, n := range nodes {
		asking.Go(func() error {
			r, err := g.askNode(ctx, n, volumes[name])
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				g.e.Nodes.Unseen[n.instance] = csierr.Plain(err.Error())
				return nil
			}
			g.e.Nodes.Reports[n.instance] = r
			return nil
		})
	}
	_ = asking.Wait()
}

func (g *gatherer) askNode(ctx context.Context, n node, volumes []string) (inspection.Report,
	error) {
	pod := n.Nodes.driverPod(n.name)
	if pod == nil {
		return inspection.Report{}, errors.New("the node was not asked: " + cmp.Or(
			g.e.Cluster.Unseen[kindDriverPod], "no pod of the driver is on the node "+n.name))
	}
	ctx, cancel := g.limit(ctx)
	defer cancel()
	args := append([]string{"exec", inNamespace + pod.Metadata.Namespace, pod.Metadata.Name,
		"--container=" + driverContainer, "--", "/oxide-csi-plugin", "inspect"}, volumes...)
	data, err := g.Kubectl(ctx, args...)
	if err != nil {
		return inspection.Report{}, errors.New("kubectl exec: " + known(err.Error()))
	}
	r, err := inspection.Parse(data)
	if err != nil {
		return r, fmt.Errorf("the output of the pod %s %w", pod.Metadata.Name, err)
	}
	return r, nil
}
