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
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type view struct {
	Now         time.Time
	Nodes       []*node
	Attachments []*attachment

	// Look is the time before the first read. A stop based on this view is refused if Look is too old.
	Look    rack.Look
	records *corev1.ConfigMap

	cluster *Cluster
	// These fields are read at most once a round, when they are needed; nil means not read yet.
	volumes  []corev1.PersistentVolume
	claims   map[claim]*corev1.PersistentVolume
	nodePods map[string][]corev1.Pod // by node
	budgets  []policyv1.PodDisruptionBudget
}

type node struct {
	*corev1.Node
	record
	// gone reports whether the Node was deleted and only its record is left.
	gone bool
	// Instance is the node's instance. If it is "", Unclear is the reason.
	Instance, Unclear string
	// registered is the instance with which the node's driver is registered, or "".
	registered string
}

type attachment struct {
	*storagev1.VolumeAttachment
	// held is why the keeper stops no instance for the waiting attachment, or "".
	held string
}

func newView(now time.Time, nodes []corev1.Node, csiNodes []storagev1.CSINode,
	attachments []storagev1.VolumeAttachment, records map[types.UID]record) *view {
	v := &view{Now: now, nodePods: map[string][]corev1.Pod{}}
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

// registeredInstance returns the instance with which the driver is registered on a node. It ignores
// the CSINode of an earlier Node with the same name.
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

// proof ranks the evidence that a node has the instance: 2 if spec.providerID, which never changes,
// names it; 1 if there is no such ID and the CSINode, which kubelets can write, names it; else 0.
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

// instanceOf returns the instance with which the node's driver is registered, or why the node's
// instance is unknown: the driver is not registered, spec.providerID names another instance, or
// another node has evidence for the same instance that is at least as strong.
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
			return "", fmt.Sprintf("the node %s claims the same instance", other.Name)
		}
	}
	return n.registered, ""
}

func (v *view) of(n *node) []*attachment {
	return slices.DeleteFunc(slices.Clone(v.Attachments), func(a *attachment) bool {
		return a.Spec.NodeName != n.Name || n.gone
	})
}

func (v *view) waiting(n *node) []*attachment {
	return slices.DeleteFunc(v.of(n), func(a *attachment) bool { return !a.waits() })
}

// due returns the attachments for which the keeper may stop the node's instance.
func (v *view) due(n *node) []*attachment {
	return slices.DeleteFunc(v.waiting(n), func(a *attachment) bool { return a.held != "" })
}

func (v *view) held(n *node) string {
	for _, a := range v.waiting(n) {
		if a.held != "" {
			return "waits: " + a.held
		}
	}
	return ""
}

// unasked returns those volumes of a node's pods for which there is no VolumeAttachment yet: a pod
// that replaces a deleted pod gets its VolumeAttachment only after the earlier one is removed.
func (v *view) unasked(pods sorted) []string {
	var missing []string
	for _, p := range pods.stay {
		for _, volume := range volumesOf(p, v.claims) {
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

// wanted reports whether any attachment of n that is not held still needs the operation: such an
// attachment waits for a stop now, or waited for one when the operation began and is not done yet.
func (v *view) wanted(n *node) bool {
	return slices.ContainsFunc(v.of(n), func(a *attachment) bool {
		return a.held == "" && (a.waits() || a.open() && slices.Contains(n.Record.Waiting, a.Name))
	})
}

// failure returns the error of the last attach or, for an attachment that is being deleted, of the
// last detach. It returns nil if there is none, or if the attachment is done.
func (a *attachment) failure() *storagev1.VolumeError {
	switch {
	case a.DeletionTimestamp != nil:
		return a.Status.DetachError
	case !a.Status.Attached:
		return a.Status.AttachError
	}
	return nil
}

func (a *attachment) open() bool { return a.DeletionTimestamp != nil || !a.Status.Attached }

// waits reports whether the rack refuses the attach or detach until the instance is stopped.
func (a *attachment) waits() bool {
	failed := a.failure()
	return failed != nil && strings.Contains(failed.Message, string(csierr.InstanceMustBeStopped)+":")
}

// wakeup returns the value of WokenAnnotation that wakes the attacher in operation r. It contains
// the time of the last failure, so that triedAgain sees whether the attacher has tried since.
func (a *attachment) wakeup(r *operation) string {
	value := r.id()
	if failed := a.failure(); failed != nil {
		value += " after the failure of " + failed.Time.UTC().Format(time.RFC3339)
	}
	return value
}

// settled reports whether operation r need not wait for the attachment. Either the attachment has
// succeeded, or the attacher has tried again since the keeper woke it in r, and failed for a reason
// that neither a stopped instance nor another attempt removes.
func (a *attachment) settled(r *operation) bool {
	return !a.open() || a.failure() != nil && !a.waits() && !a.passes() && a.triedAgain(r)
}

// passes reports whether the attempt failed with a gRPC code after which a retry may succeed.
func (a *attachment) passes() bool {
	failed := a.failure()
	return failed != nil && slices.ContainsFunc([]codes.Code{codes.Unavailable, codes.Aborted,
		codes.DeadlineExceeded}, func(c codes.Code) bool {
		return strings.Contains(failed.Message, "code = "+c.String()+" ")
	})
}

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

func (n *node) ready() (ready bool, heartbeat time.Time) {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue, c.LastHeartbeatTime.Time
		}
	}
	return false, time.Time{}
}

func (n *node) allowed() bool { return n.Labels[ColdAttachLabel] == Allowed }

// sorted contains a node's pods, by what happens to them when its instance is stopped.
type sorted struct {
	// evict contains pods without volumes of the driver. They run on other nodes in the meantime.
	evict []*corev1.Pod
	// stay contains pods with volumes of the driver, both running and waiting ones. Their disks stay
	// attached, so the pods have to come back to this node. Moving a pod causes another stop.
	stay []*corev1.Pod
	// lost names a pod because of which the instance must not be stopped, and the reason, or is "".
	lost string
	// budget describes the PodDisruptionBudget that forbids the evictions or the stop, or is "".
	budget string
}

type claim struct{ namespace, name string }

// claimsOf returns the driver's bound volumes. The keys are their claims. It compares UIDs, because
// a volume may still name an earlier claim of the same name.
func claimsOf(volumes []corev1.PersistentVolume,
	all []corev1.PersistentVolumeClaim) map[claim]*corev1.PersistentVolume {
	of := map[claim]*corev1.PersistentVolumeClaim{}
	for i := range all {
		of[claim{all[i].Namespace, all[i].Name}] = &all[i]
	}
	claims := map[claim]*corev1.PersistentVolume{}
	for i := range volumes {
		v := &volumes[i]
		if v.Spec.ClaimRef == nil || !ofDriver(v) {
			continue
		}
		key := claim{v.Spec.ClaimRef.Namespace, v.Spec.ClaimRef.Name}
		if c := of[key]; c != nil && c.UID == v.Spec.ClaimRef.UID && c.Spec.VolumeName == v.Name {
			claims[key] = v
		}
	}
	return claims
}

func ofDriver(v *corev1.PersistentVolume) bool {
	return v.Spec.CSI != nil && v.Spec.CSI.Driver == DriverName
}

// unfounded returns why an attachment may be forged, or "". The keeper stops no instance for an
// attachment whose volume is not the driver's, has no claim, or is used by no pod on the node. A
// detach needs no pod, because the pod and often the claim are deleted before it.
func (v *view) unfounded(a *attachment, pods []corev1.Pod) string {
	volume := v.persistentVolume(a.volume())
	switch {
	case !ofDriver(volume):
		return fmt.Sprintf("there is no PersistentVolume %.60q of the driver", a.volume())
	case volume.Spec.ClaimRef == nil || volume.Spec.ClaimRef.UID == "":
		return fmt.Sprintf("the volume %s is bound to no claim", volume.Name)
	case a.DeletionTimestamp != nil:
		return ""
	}
	for i := range pods {
		if p := &pods[i]; p.DeletionTimestamp == nil && !ended(p) &&
			slices.Contains(volumesOf(p, v.claims), volume) {
			return ""
		}
	}
	return fmt.Sprintf("no pod on this node uses the volume %s by its claim", volume.Name)
}

func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func sortPods(pods []corev1.Pod, claims map[claim]*corev1.PersistentVolume) sorted {
	var s sorted
	for i := range pods {
		p := &pods[i]
		owner := metav1.GetControllerOf(p)
		_, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]
		volumes := len(volumesOf(p, claims)) > 0
		switch {
		case ended(p):
		case mirror && ofControlPlane(p):
			s.lost = fmt.Sprintf("the pod %s/%s is of the control plane, whose nodes the keeper does not "+
				"stop", p.Namespace, p.Name)
		case mirror, owner != nil && owner.Kind == "DaemonSet":
			// The kubelet starts static pods and pods of DaemonSets again when the node returns.
		case volumes:
			s.stay = append(s.stay, p)
			if p.Spec.RestartPolicy == corev1.RestartPolicyNever && hasRun(p) {
				s.lost = fmt.Sprintf("the pod %s/%s would not come back: it has restartPolicy Never",
					p.Namespace, p.Name)
			}
		case owner == nil:
			s.lost = fmt.Sprintf("the pod %s/%s would not come back: it has no controller that makes "+
				"another", p.Namespace, p.Name)
		case p.Spec.RestartPolicy == corev1.RestartPolicyNever,
			p.Spec.RestartPolicy == corev1.RestartPolicyOnFailure:
			// The pod's Job counts the eviction as a failure, even before the pod runs.
			s.lost = fmt.Sprintf("the pod %s/%s has not ended: it has restartPolicy %s, and an eviction "+
				"may end its work for good", p.Namespace, p.Name, p.Spec.RestartPolicy)
		default:
			s.evict = append(s.evict, p)
		}
	}
	return s
}

// hasRun reports whether a container of the pod runs or has run. The phase does not suffice: it is
// Pending until the init containers have ended.
func hasRun(p *corev1.Pod) bool {
	return p.Status.Phase != corev1.PodPending && p.Status.Phase != "" || slices.ContainsFunc(
		slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses),
		func(c corev1.ContainerStatus) bool {
			return c.State.Running != nil || c.State.Terminated != nil || c.RestartCount > 0
		})
}

// ofControlPlane reports whether a static pod belongs to the control plane. It does not use the
// label controlPlane, which some installers do not set on nodes.
func ofControlPlane(p *corev1.Pod) bool {
	return p.Namespace == metav1.NamespaceSystem && (p.Labels["tier"] == "control-plane" ||
		p.Labels["component"] == "kube-apiserver" || p.Labels["component"] == "etcd")
}

func volumesOf(p *corev1.Pod,
	claims map[claim]*corev1.PersistentVolume) []*corev1.PersistentVolume {
	var volumes []*corev1.PersistentVolume
	for _, v := range p.Spec.Volumes {
		name := ""
		switch {
		case v.PersistentVolumeClaim != nil:
			name = v.PersistentVolumeClaim.ClaimName
		case v.Ephemeral != nil:
			name = p.Name + "-" + v.Name // Kubernetes' name for an ephemeral volume's claim
		}
		if volume, ok := claims[claim{p.Namespace, name}]; ok {
			volumes = append(volumes, volume)
		}
	}
	return volumes
}

func statefulSets(pods []*corev1.Pod) []string {
	var sets []string
	for _, p := range pods {
		if o := metav1.GetControllerOf(p); o != nil && o.Kind == "StatefulSet" {
			sets = append(sets, p.Namespace+"/"+o.Name)
		}
	}
	slices.Sort(sets)
	return slices.Compact(sets)
}

func waitingPods(pods []corev1.Pod, claims map[claim]*corev1.PersistentVolume,
	waiting []*attachment) []*corev1.Pod {
	var found []*corev1.Pod
	for i := range pods {
		if slices.ContainsFunc(volumesOf(&pods[i], claims), func(v *corev1.PersistentVolume) bool {
			return slices.ContainsFunc(waiting, func(a *attachment) bool { return a.volume() == v.Name })
		}) {
			found = append(found, &pods[i])
		}
	}
	return found
}

// exhausted describes a budget that forbids an operation, or returns "". A budget may forbid the
// eviction of the pods in s.evict, or a stop of those in s.stay. The unhealthy pods in the list
// waiting need the stop to become healthy, so they do not count against a maxUnavailable.
func exhausted(budgets []policyv1.PodDisruptionBudget, s sorted, waiting []*corev1.Pod) string {
	for _, b := range budgets {
		if _, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err != nil {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s has no valid selector", b.Namespace, b.Name)
		}
		count := func(pods []*corev1.Pod, well bool) (n int) {
			for _, p := range pods {
				if covers(&b, p) && healthy(p) == well {
					n++
				}
			}
			return n
		}
		down, pending := count(s.stay, true), count(waiting, false)
		if b.Status.DisruptionsAllowed == 0 && count(s.evict, true) > 0 {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s allows no eviction", b.Namespace, b.Name)
		}
		if down > 0 && b.Status.ObservedGeneration < b.Generation {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s has changed, and its controller has not "+
				"counted its pods since", b.Namespace, b.Name)
		}
		need := int(b.Status.DesiredHealthy)
		if b.Spec.MaxUnavailable != nil && need > 0 {
			need = max(1, need-pending)
		}
		if left := int(b.Status.CurrentHealthy) - down; down > 0 && left < need {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s wants %d healthy pods, and a stop would "+
				"leave %d", b.Namespace, b.Name, need, left)
		}
	}
	return ""
}

func covers(b *policyv1.PodDisruptionBudget, p *corev1.Pod) bool {
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	return err == nil && p.Namespace == b.Namespace && selector.Matches(labels.Set(p.Labels))
}

func healthy(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions,
		func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
}
