package keeper

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// sorted contains the pods of a node, sorted by what happens to them when its instance is stopped.
type sorted struct {
	// evict contains pods without volumes of the driver. They run elsewhere in the meantime.
	evict []*corev1.Pod
	// stay contains pods with volumes of the driver, both running and waiting ones. Their disks stay
	// attached, so these pods have to come back to this node; on another node each would cause
	// another stop.
	stay []*corev1.Pod
	// lost explains why a pod would not come back, or must not be stopped. It is empty if there is no
	// such pod.
	lost string
	// budget names the PodDisruptionBudget that stopping the pods in stay would violate, or "".
	budget string
	claims map[claim]*corev1.PersistentVolume
}

type claim struct{ namespace, name string }

// claimsOf returns the claims that are bound to the driver's volumes, with their volumes. It
// compares UIDs, because a volume may still name an earlier claim of the same name.
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

// unfounded returns why no instance is stopped for an attachment, whatever the rack answered: its
// volume has no claim, or no pod on the node wants it. It returns "" if there is no such reason.
// Such an attachment is of no use to anybody, and may be forged. The pod of a detach is gone, and
// often its claim, too.
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

// ended reports whether no container of a pod will run any more.
func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func sortPods(pods []corev1.Pod, claims map[claim]*corev1.PersistentVolume) sorted {
	s := sorted{claims: claims}
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
			// The kubelet starts these again with the node.
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
			// Its Job would count the eviction as a failure, even before the pod runs.
			s.lost = fmt.Sprintf("the pod %s/%s has not ended: it has restartPolicy %s, and an eviction "+
				"may end its work for good", p.Namespace, p.Name, p.Spec.RestartPolicy)
		default:
			s.evict = append(s.evict, p)
		}
	}
	return s
}

// hasRun reports whether a container of a pod runs or has run. The phase is Pending until the init
// containers have ended.
func hasRun(p *corev1.Pod) bool {
	return p.Status.Phase != corev1.PodPending && p.Status.Phase != "" || slices.ContainsFunc(
		slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses),
		func(c corev1.ContainerStatus) bool {
			return c.State.Running != nil || c.State.Terminated != nil || c.RestartCount > 0
		})
}

// ofControlPlane reports whether a pod is a static pod that Kubernetes may need to work. With some
// installers the nodes of the control plane do not have the label.
func ofControlPlane(p *corev1.Pod) bool {
	return p.Namespace == metav1.NamespaceSystem && (p.Labels["tier"] == "control-plane" ||
		p.Labels["component"] == "kube-apiserver" || p.Labels["component"] == "etcd")
}

// volumesOf returns the driver's volumes that a pod uses.
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

// statefulSets returns the StatefulSets of pods, as namespace/name.
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

// waitingPods returns the pods that use a volume that waits.
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

// exhausted returns the budget that allows no eviction, or that stopping the pods in stay would
// violate; "" if there is none. A pod that waits for its volume does not count: it is not healthy
// before the stop, and without the stop it never will be.
func exhausted(budgets []policyv1.PodDisruptionBudget, s sorted, waiting []*corev1.Pod) string {
	for _, b := range budgets {
		if _, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err != nil {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s has no valid selector", b.Namespace, b.Name)
		}
		covered := func(p *corev1.Pod) bool { return covers(&b, p) }
		down, unborn := 0, 0
		for _, p := range s.stay {
			if covered(p) && healthy(p) {
				down++
			}
		}
		for _, p := range waiting {
			if covered(p) && !healthy(p) {
				unborn++
			}
		}
		if b.Status.DisruptionsAllowed == 0 && slices.ContainsFunc(s.evict,
			func(p *corev1.Pod) bool { return covered(p) && healthy(p) }) {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s allows no eviction", b.Namespace, b.Name)
		}
		if down > 0 && b.Status.ObservedGeneration < b.Generation {
			return fmt.Sprintf("the PodDisruptionBudget %s/%s has changed, and nobody has counted its pods "+
				"since", b.Namespace, b.Name)
		}
		need := int(b.Status.DesiredHealthy)
		if b.Spec.MaxUnavailable != nil && need > 0 {
			need = max(1, need-unborn)
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
