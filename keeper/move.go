package keeper

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// MovingAnnotation is on a claim while its PersistentVolume is replaced, and holds the one that
// replaces it. A move that was interrupted continues from there.
const MovingAnnotation = DriverName + "/moving"

// Mover moves a volume that stays with its node to another node. Kubernetes never changes the node
// affinity of a PersistentVolume, so it is replaced by one of the same name that is bound to the
// same claim. The disk is not touched: on a rack without hot-plug its detach and its attach wait
// for the keeper, or a person, to stop the two instances.
type Mover struct {
	Kubernetes kubernetes.Interface
	Out        io.Writer
	// Pace is how often it looks whether Kubernetes has done its part.
	Pace time.Duration
}

// Move moves a volume to a node. It may be repeated at any time.
func (m *Mover) Move(ctx context.Context, name, to string) error {
	instance, err := m.instance(ctx, to)
	if err != nil {
		return err
	}
	old, claim, err := m.find(ctx, name)
	if err != nil {
		return err
	}
	replacement, err := m.prepare(ctx, old, claim, instance)
	if err != nil {
		return err
	}
	if old != nil && !replaces(old, replacement, instance) {
		if err := m.remove(ctx, old); err != nil {
			return err
		}
		m.say("the PersistentVolume %s is replaced by one for the node %s", name, to)
	}
	if err := m.create(ctx, replacement); err != nil {
		return err
	}
	if err := m.bound(ctx, claim); err != nil {
		return err
	}
	if err := m.annotate(ctx, claim, nil); err != nil {
		return err
	}
	if err := m.evict(ctx, claim, to); err != nil {
		return err
	}
	m.say("the volume belongs to the node %s; its pod starts there when the disk is attached. On a "+
		"rack "+
		"without hot-plug the instances of both nodes have to be stopped for that, which the node "+
		"keeper does where it may; see kubectl get volumeattachments", to)
	return nil
}

// replaces reports whether a volume is the replacement already. One that an interrupted move has
// retained or deleted is not, even if it moves back to the node that it belongs to.
func replaces(v, replacement *corev1.PersistentVolume, instance string) bool {
	return v.DeletionTimestamp == nil && onInstance(v, instance) &&
		v.Spec.PersistentVolumeReclaimPolicy == replacement.Spec.PersistentVolumeReclaimPolicy
}

func (m *Mover) say(format string, args ...any) { _, _ = fmt.Fprintf(m.Out, format+"\n", args...) }

// instance returns the instance of the node that a volume moves to.
func (m *Mover) instance(ctx context.Context, name string) (string, error) {
	n, err := m.Kubernetes.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read the Node %s: %w", name, err)
	}
	csiNode, err := m.Kubernetes.StorageV1().CSINodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read the CSINode %s: %w", name, err)
	}
	instance := registeredInstance(*csiNode, n)
	if instance == "" || n.Labels[volume.InstanceKey] != instance {
		return "", fmt.Errorf("the driver is not registered on the node %s with the topology key %s; "+
			"see that its pod runs there, and that the chart's placement of volumes on instances is on",
			name, volume.InstanceKey)
	}
	return instance, nil
}

// find returns the volume and its claim. A volume whose replacement was interrupted is only in its
// claim's annotation.
func (m *Mover) find(ctx context.Context, name string) (*corev1.PersistentVolume,
	*corev1.PersistentVolumeClaim, error) {
	v, err := m.Kubernetes.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		claim, err := m.interrupted(ctx, name)
		return nil, claim, err
	case err != nil:
		return nil, nil, fmt.Errorf("read the PersistentVolume %s: %w", name, err)
	case v.Spec.CSI == nil || v.Spec.CSI.Driver != DriverName:
		return nil, nil, fmt.Errorf("the PersistentVolume %s is not one of the driver %s", name,
			DriverName)
	case onInstance(v, ""):
		return nil, nil, fmt.Errorf("the PersistentVolume %s stays with no node: it has no affinity "+
			"to %s, "+
			"and goes where its pod goes", name, volume.InstanceKey)
	case v.Spec.ClaimRef == nil || v.Status.Phase != corev1.VolumeBound && v.DeletionTimestamp == nil:
		return nil, nil, fmt.Errorf("the PersistentVolume %s is %s; only a bound one can be moved", name,
			v.Status.Phase)
	}
	ref := v.Spec.ClaimRef
	claim, err := m.Kubernetes.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Name,
		metav1.GetOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("read the claim %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	if claim.UID != ref.UID {
		return nil, nil, fmt.Errorf("the PersistentVolume %s is bound to an earlier claim of the name "+
			"%s/%s", name, ref.Namespace, ref.Name)
	}
	return v, claim, nil
}

// interrupted finds the claim whose volume is being replaced.
func (m *Mover) interrupted(ctx context.Context, name string) (*corev1.PersistentVolumeClaim,
	error) {
	list, err := m.Kubernetes.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List(ctx,
		metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	for i := range list.Items {
		if c := &list.Items[i]; c.Spec.VolumeName == name && c.Annotations[MovingAnnotation] != "" {
			return c, nil
		}
	}
	return nil, fmt.Errorf("there is no PersistentVolume %s, and no claim that is waiting for "+
		"one", name)
}

// prepare writes the replacement into the claim's annotation before anything is removed, and
// returns it.
func (m *Mover) prepare(ctx context.Context, old *corev1.PersistentVolume,
	claim *corev1.PersistentVolumeClaim, instance string) (*corev1.PersistentVolume, error) {
	replacement := &corev1.PersistentVolume{}
	text, begun := claim.Annotations[MovingAnnotation]
	switch {
	case begun:
		if err := json.Unmarshal([]byte(text), replacement); err != nil {
			return nil, fmt.Errorf("the annotation %s of the claim %s/%s is not what a move writes: %w",
				MovingAnnotation, claim.Namespace, claim.Name, err)
		}
	default:
		replacement.ObjectMeta = metav1.ObjectMeta{Name: old.Name, Labels: old.Labels,
			Annotations: old.Annotations, Finalizers: old.Finalizers}
		replacement.Spec = *old.Spec.DeepCopy()
	}
	setInstance(replacement, instance)
	saved, err := json.Marshal(replacement)
	if err != nil {
		return nil, err
	}
	return replacement, m.annotate(ctx, claim, string(saved))
}

// annotate sets the annotation of a claim; nil removes it.
func (m *Mover) annotate(ctx context.Context, claim *corev1.PersistentVolumeClaim,
	value any) error {
	patch, err := annotationPatch(MovingAnnotation, value)
	if err != nil {
		return err
	}
	_, err = m.Kubernetes.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name,
		types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("annotate the claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// remove deletes a PersistentVolume and leaves its disk alone: nobody deletes the disk of one that
// is retained.
func (m *Mover) remove(ctx context.Context, v *corev1.PersistentVolume) error {
	volumes := m.Kubernetes.CoreV1().PersistentVolumes()
	now, err := volumes.Patch(ctx, v.Name, types.MergePatchType, fmt.Appendf(nil,
		`{"metadata":{"uid":%q},"spec":{"persistentVolumeReclaimPolicy":%q}}`, v.UID,
		corev1.PersistentVolumeReclaimRetain), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("retain the PersistentVolume %s: %w; repeat the command", v.Name, err)
	}
	if now.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
		return fmt.Errorf("the PersistentVolume %s is still to be deleted with its disk, though the "+
			"reclaim policy Retain was accepted; nothing has been removed", v.Name)
	}
	err = volumes.Delete(ctx, v.Name, metav1.DeleteOptions{
		Preconditions: metav1.NewUIDPreconditions(string(v.UID))})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the PersistentVolume %s: %w", v.Name, err)
	}
	// The finalizers keep a volume that is in use, as this one is, and goes on being.
	for {
		now, err := volumes.Get(ctx, v.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return fmt.Errorf("read the PersistentVolume %s: %w", v.Name, err)
		case now.UID != v.UID:
			return nil
		}
		_, err = volumes.Patch(ctx, v.Name, types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"uid":%q,"finalizers":null}}`, v.UID), metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("release the PersistentVolume %s: %w", v.Name, err)
		}
		if err := m.pause(ctx); err != nil {
			return fmt.Errorf("the PersistentVolume %s is not gone yet: %w; repeat the command", v.Name, err)
		}
	}
}

func (m *Mover) create(ctx context.Context, v *corev1.PersistentVolume) error {
	_, err := m.Kubernetes.CoreV1().PersistentVolumes().Create(ctx, v, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create the PersistentVolume %s: %w; repeat the command", v.Name, err)
	}
	return nil
}

// bound waits until Kubernetes has bound the claim to the new volume.
func (m *Mover) bound(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	for {
		now, err := m.Kubernetes.CoreV1().PersistentVolumeClaims(claim.Namespace).Get(ctx, claim.Name,
			metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("read the claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		v, err := m.Kubernetes.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName,
			metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("read the PersistentVolume %s: %w", claim.Spec.VolumeName, err)
		}
		if err == nil && v.Status.Phase == corev1.VolumeBound && now.Status.Phase == corev1.ClaimBound {
			return nil
		}
		if err := m.pause(ctx); err != nil {
			return fmt.Errorf("the claim %s/%s is not bound again: %w; repeat the command", claim.Namespace,
				claim.Name, err)
		}
	}
}

// evict asks the pods of the claim to go from any other node.
func (m *Mover) evict(ctx context.Context, claim *corev1.PersistentVolumeClaim, to string) error {
	pods, err := m.Kubernetes.CoreV1().Pods(claim.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list Pods: %w", err)
	}
	for _, p := range pods.Items {
		uses := slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim.Name
		})
		if !uses || p.Spec.NodeName == "" || p.Spec.NodeName == to || p.DeletionTimestamp != nil {
			continue
		}
		err := m.Kubernetes.PolicyV1().Evictions(p.Namespace).Evict(ctx, &policyv1.Eviction{
			ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}})
		switch {
		case apierrors.IsTooManyRequests(err):
			return fmt.Errorf("the pod %s/%s may not be evicted from %s now, says its PodDisruptionBudget; "+
				"repeat the command later", p.Namespace, p.Name, p.Spec.NodeName)
		case err != nil && !apierrors.IsNotFound(err):
			return fmt.Errorf("evict the pod %s/%s: %w", p.Namespace, p.Name, err)
		}
		m.say("the pod %s/%s is evicted from the node %s", p.Namespace, p.Name, p.Spec.NodeName)
	}
	return nil
}

func (m *Mover) pause(ctx context.Context) error {
	pause(ctx, m.Pace)
	return ctx.Err()
}

// onInstance reports whether a volume has an affinity to the instance, or, for "", to none.
func onInstance(v *corev1.PersistentVolume, instance string) bool {
	found := ""
	for _, e := range instanceTerms(v) {
		if len(e.Values) == 1 {
			found = e.Values[0]
		}
	}
	return found == instance
}

// instanceTerms returns the expressions of the volume's node affinity that name an instance.
func instanceTerms(v *corev1.PersistentVolume) []*corev1.NodeSelectorRequirement {
	var found []*corev1.NodeSelectorRequirement
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return nil
	}
	for t := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
		expressions := v.Spec.NodeAffinity.Required.NodeSelectorTerms[t].MatchExpressions
		for e := range expressions {
			if expressions[e].Key == volume.InstanceKey {
				found = append(found, &expressions[e])
			}
		}
	}
	return found
}

func setInstance(v *corev1.PersistentVolume, instance string) {
	for _, e := range instanceTerms(v) {
		e.Values = []string{instance}
	}
}
