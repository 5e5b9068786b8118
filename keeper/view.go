package keeper

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// view contains what one round reads from the cluster.
type view struct {
	Now         time.Time
	Nodes       []*node
	Attachments []*attachment

	// Look is the moment before the first read.
	Look rack.Look
	// records is the ConfigMap from which the nodes' records were read.
	records *corev1.ConfigMap

	// These are read at most once a round, when they are needed; nil means not yet.
	volumes []corev1.PersistentVolume
	claims  map[claim]*corev1.PersistentVolume
	pods    map[string][]corev1.Pod // by node
	budgets []policyv1.PodDisruptionBudget
}

// node is a Node with its record, and what its CSINode says.
type node struct {
	*corev1.Node
	record
	// gone reports whether the Node is gone, and only its record is left.
	gone bool
	// Instance is the node's instance. If it is empty, Unclear is the reason.
	Instance, Unclear string
	// registered is the instance with which the node's driver is registered, or empty.
	registered string
}

// attachment is a VolumeAttachment of the driver.
type attachment struct {
	*storagev1.VolumeAttachment
	// held is the reason why no instance is stopped for it although it waits; "" if one may be
	// stopped.
	held string
}

// newView builds a view from lists of objects, and the records by the UIDs of Nodes.
func newView(now time.Time, nodes []corev1.Node, csiNodes []storagev1.CSINode,
	attachments []storagev1.VolumeAttachment, records map[types.UID]record) *view {
	v := &view{Now: now}
	for i := range nodes {
		n := &node{Node: &nodes[i], record: records[nodes[i].UID]}
		n.NodeName = n.Name
		delete(records, n.UID)
		for _, c := range csiNodes {
			n.registered = cmp.Or(n.registered, registeredInstance(c, n.Node))
		}
		v.Nodes = append(v.Nodes, n)
	}
	for _, uid := range slices.Sorted(maps.Keys(records)) {
		v.Nodes = append(v.Nodes, &node{record: records[uid], gone: true, Node: &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: records[uid].NodeName, UID: uid}}})
	}
	for _, n := range v.Nodes {
		n.Instance, n.Unclear = v.instanceOf(n)
	}
	for i := range attachments {
		if attachments[i].Spec.Attacher == DriverName {
			v.Attachments = append(v.Attachments, &attachment{VolumeAttachment: &attachments[i]})
		}
	}
	return v
}

func (n *node) working() bool { return n.Record != nil }

// registeredInstance returns the instance with which the driver is registered on a node. It ignores
// a CSINode that belongs to an earlier Node of the same name.
func registeredInstance(c storagev1.CSINode, n *corev1.Node) string {
	if c.Name != n.Name || !slices.ContainsFunc(c.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.UID == n.UID
	}) {
		return ""
	}
	for _, d := range c.Spec.Drivers {
		if id, ok := volume.ParseID(d.NodeID); ok && d.Name == DriverName {
			return id
		}
	}
	return ""
}

// proof ranks how certain it is that an instance is the node's: 2 if spec.providerID names it,
// which never changes; 1 if only the CSINode does, which the node's kubelet may write; otherwise 0.
func (n *node) proof(instance string) int {
	provider, has := strings.CutPrefix(n.Spec.ProviderID, "oxide://")
	switch {
	case has && provider == instance:
		return 2
	case !has && n.registered == instance:
		return 1
	}
	return 0
}

// instanceOf returns the instance of a node, or why it is not known. The driver has to be
// registered with the instance, spec.providerID must not name another one, and no other node may
// have as good a proof that the instance is its own.
func (v *view) instanceOf(n *node) (instance, why string) {
	if n.registered == "" {
		return "", "the driver is not registered on this node"
	}
	proof := n.proof(n.registered)
	if proof == 0 {
		return "", fmt.Sprintf("its spec.providerID is %.60s, and its driver is registered with the "+
			"instance %s", n.Spec.ProviderID, n.registered)
	}
	for _, other := range v.Nodes {
		if other != n && other.proof(n.registered) >= proof {
			return "", fmt.Sprintf("the node %s says that it is the same instance", other.Name)
		}
	}
	return n.registered, ""
}

func (v *view) of(n *node) []*attachment {
	return slices.DeleteFunc(slices.Clone(v.Attachments), func(a *attachment) bool {
		return a.Spec.NodeName != n.Name || n.gone
	})
}

// waiting returns the attachments of a node that wait until its instance is stopped.
func (v *view) waiting(n *node) []*attachment {
	return slices.DeleteFunc(v.of(n), func(a *attachment) bool { return !a.waits() })
}

// due returns the attachments of a node for which its instance may be stopped.
func (v *view) due(n *node) []*attachment {
	return slices.DeleteFunc(v.waiting(n), func(a *attachment) bool { return a.held != "" })
}

// held returns why the first of a node's attachments that is held back is held back, or "".
func (v *view) held(n *node) string {
	for _, a := range v.waiting(n) {
		if a.held != "" {
			return "waits: " + a.held
		}
	}
	return ""
}

// unasked returns the volumes of pods on a node that have no VolumeAttachment. While the
// VolumeAttachment of a deleted pod is being removed, the pod that replaces it has none yet.
func (v *view) unasked(pods sorted) []string {
	var missing []string
	for _, p := range pods.stay {
		for _, volume := range volumesOf(p, pods.claims) {
			asked := slices.ContainsFunc(v.Attachments, func(a *attachment) bool {
				return a.volume() == volume.Name
			})
			if !asked && p.DeletionTimestamp == nil {
				missing = append(missing, volume.Name)
			}
		}
	}
	return missing
}

// wanted reports whether the operation still has a purpose: an attachment waits, or one for which
// it began is not done. It does not matter whether the attacher's last attempt failed for another
// reason.
func (v *view) wanted(n *node) bool {
	return slices.ContainsFunc(v.of(n), func(a *attachment) bool {
		return a.held == "" && (a.waits() || a.open() && slices.Contains(n.Record.Waiting, a.Name))
	})
}

// failure returns the error of the attachment's current direction, attach or detach. It returns nil
// if there is none, or if the attachment is done.
func (a *attachment) failure() *storagev1.VolumeError {
	switch {
	case a.DeletionTimestamp != nil:
		return a.Status.DetachError
	case !a.Status.Attached:
		return a.Status.AttachError
	}
	return nil
}

// open reports whether the attacher still has to attach or detach.
func (a *attachment) open() bool { return a.DeletionTimestamp != nil || !a.Status.Attached }

// waits reports whether the rack refuses the attach or detach until the instance is stopped.
func (a *attachment) waits() bool {
	failed := a.failure()
	return failed != nil && strings.Contains(failed.Message, string(csierr.InstanceMustBeStopped)+":")
}

// wakeup returns the value of WokenAnnotation that wakes the attacher in an operation. The value
// changes with each attempt, so it also shows whether the attacher has tried since.
func (a *attachment) wakeup(r *operation) string {
	value := r.id()
	if failed := a.failure(); failed != nil {
		value += " after the failure of " + failed.Time.UTC().Format(time.RFC3339)
	}
	return value
}

// settled reports whether the attacher will do nothing more in an operation. Either it is done, or
// it was woken, has tried, and failed for a reason that neither a stopped instance nor another
// attempt removes.
func (a *attachment) settled(r *operation) bool {
	return !a.open() || a.failure() != nil && !a.waits() && !a.passes() && a.triedAgain(r)
}

// passes reports whether the attempt failed with a gRPC code after which a later attempt may
// succeed.
func (a *attachment) passes() bool {
	failed := a.failure()
	return failed != nil && slices.ContainsFunc([]codes.Code{codes.Unavailable, codes.Aborted,
		codes.DeadlineExceeded}, func(c codes.Code) bool {
		return strings.Contains(failed.Message, "code = "+c.String()+" ")
	})
}

// triedAgain reports whether the attacher has tried since it was woken in an operation.
func (a *attachment) triedAgain(r *operation) bool {
	woken := a.Annotations[WokenAnnotation]
	return strings.HasPrefix(woken, r.id()) && woken != a.wakeup(r)
}

func (a *attachment) since() time.Time {
	if a.DeletionTimestamp != nil {
		return a.DeletionTimestamp.Time
	}
	return a.CreationTimestamp.Time
}

func (a *attachment) volume() string {
	if a.Spec.Source.PersistentVolumeName == nil {
		return ""
	}
	return *a.Spec.Source.PersistentVolumeName
}

// ready returns whether the node is ready, and its kubelet's last heartbeat.
func (n *node) ready() (ready bool, heartbeat time.Time) {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue, c.LastHeartbeatTime.Time
		}
	}
	return false, time.Time{}
}

func (n *node) allowed() bool { return n.Labels[ColdAttachLabel] == Allowed }
