package keeper

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// MovingAnnotation marks a PersistentVolume whose reclaim policy a move has set to Retain. So that
// an interrupted move can continue, an annotation of the CSIDriver object contains the replacement
// (see movingKey). Users who only have rights to claims and Nodes cannot forge that annotation.
const MovingAnnotation = DriverName + "/moving"

func movingKey(name string) string {
	const most = 63 // characters after the slash
	if key := "moving-" + name; len(key) <= most {
		return DriverName + "/" + key
	}
	hash := sha256.Sum224([]byte(name))
	return fmt.Sprintf("%s/moving-%x", DriverName, hash[:20])
}

// Mover moves a volume that is tied to one node to another node. Kubernetes never changes the node
// affinity of a PersistentVolume, so the Mover replaces the PersistentVolume by one with the same
// name and claim. It does not touch the disk. On a rack without hot-plug, the keeper or a person
// has to stop both instances before the disk can be detached and attached.
type Mover struct {
	Kubernetes *Cluster
	Out        io.Writer
	// Pace is how often Move checks whether Kubernetes has deleted or bound the volume.
	Pace time.Duration
}

// Move moves the named volume to another node. An interrupted Move can be repeated or reversed.
func (m *Mover) Move(ctx context.Context, name, to string) error {
	instance, err := m.instance(ctx, to)
	if err != nil {
		return err
	}
	saved, err := m.saved(ctx, name)
	if err != nil {
		return err
	}
	old, claim, err := m.find(ctx, name, saved)
	if err != nil {
		return err
	}
	replacement, err := m.prepare(ctx, old, saved, instance)
	if err != nil {
		return err
	}
	if old != nil && !replaces(old, instance) {
		if err := m.remove(ctx, old); err != nil {
			return err
		}
		m.log("the PersistentVolume %s is replaced by one for the node %s", name, to)
	}
	if err := m.create(ctx, replacement); err != nil {
		return err
	}
	if err := m.bound(ctx, claim, instance); err != nil {
		return err
	}
	if err := m.save(ctx, name, ""); err != nil {
		return err
	}
	if err := m.evict(ctx, claim, to); err != nil {
		return err
	}
	m.log("the volume belongs to the node %s; its pod starts there when the disk is attached. On a "+
		"rack without hot-plug the instances of both nodes have to be stopped for that, which the node "+
		"keeper does where it may; see kubectl get volumeattachments", to)
	return nil
}

// replaces reports whether v is the replacement already. It returns false for a volume that an
// interrupted move has marked or deleted, even if that volume belongs to the instance.
func replaces(v *corev1.PersistentVolume, instance string) bool {
	_, moving := v.Annotations[MovingAnnotation]
	return v.DeletionTimestamp == nil && onInstance(v, instance) && !moving
}

func (m *Mover) log(format string, args ...any) { _, _ = fmt.Fprintf(m.Out, format+"\n", args...) }

func (m *Mover) instance(ctx context.Context, name string) (string, error) {
	nodes, err := m.Kubernetes.Core.Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list Nodes: %w", err)
	}
	csiNodes, err := m.Kubernetes.Storage.CSINodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", fmt.Errorf("list CSINodes: %w", err)
	}
	v := newView(time.Time{}, nodes.Items, csiNodes.Items, nil, nil)
	i := slices.IndexFunc(v.Nodes, func(n *node) bool { return n.Name == name })
	if i < 0 {
		return "", fmt.Errorf("there is no Node %s", name)
	}
	n := v.Nodes[i]
	instance, why := v.instanceOf(n)
	if label := n.Labels[volume.InstanceKey]; why == "" && label != instance {
		why = fmt.Sprintf("its label %s is %q, and not %s", volume.InstanceKey, label, instance)
	}
	if why != "" {
		return "", fmt.Errorf("the instance of the node %s: %s; see that the driver's pod runs there, "+
			"and that the chart's placement of volumes on instances is on", name, why)
	}
	return instance, nil
}

// find returns the volume and its claim. The volume is nil if an interrupted move has deleted it.
func (m *Mover) find(ctx context.Context, name string, saved *corev1.PersistentVolume) (
	*corev1.PersistentVolume, *corev1.PersistentVolumeClaim, error) {
	v, err := m.Kubernetes.Core.PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) && saved != nil:
		claim, err := m.claim(ctx, saved)
		return nil, claim, err
	case err != nil:
		return nil, nil, fmt.Errorf("read the PersistentVolume %s: %w", name, err)
	case v.Spec.CSI == nil || v.Spec.CSI.Driver != DriverName:
		return nil, nil, fmt.Errorf("the PersistentVolume %s is not one of the driver %s", name,
			DriverName)
	case onInstance(v, ""):
		return nil, nil, fmt.Errorf("the PersistentVolume %s does not stay with a node: it has no "+
			"affinity to %s, and goes where its pod goes", name, volume.InstanceKey)
	case v.Spec.ClaimRef == nil || v.Status.Phase != corev1.VolumeBound && v.DeletionTimestamp == nil:
		return nil, nil, fmt.Errorf("the PersistentVolume %s is %s; only a bound one can be moved", name,
			v.Status.Phase)
	}
	claim, err := m.claim(ctx, v)
	if err != nil {
		return nil, nil, err
	}
	if pod := metav1.GetControllerOf(claim); pod != nil && pod.Kind == "Pod" {
		return nil, nil, fmt.Errorf("the claim %s/%s is an ephemeral volume of the pod %s, and is "+
			"deleted with it; there is nothing to move", claim.Namespace, claim.Name, pod.Name)
	}
	return v, claim, nil
}

func (m *Mover) claim(ctx context.Context, v *corev1.PersistentVolume) (
	*corev1.PersistentVolumeClaim, error) {
	ref := v.Spec.ClaimRef
	claim, err := m.Kubernetes.Core.PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Name,
		metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the claim %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	if claim.UID != ref.UID {
		return nil, fmt.Errorf("the PersistentVolume %s is bound to an earlier claim of the name %s/%s",
			v.Name, ref.Namespace, ref.Name)
	}
	return claim, nil
}

func (m *Mover) saved(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	driver, err := m.Kubernetes.Storage.CSIDrivers().Get(ctx, DriverName, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the CSIDriver %s: %w", DriverName, err)
	}
	text, ok := driver.Annotations[movingKey(name)]
	if !ok {
		return nil, nil
	}
	v := &corev1.PersistentVolume{}
	if err := json.Unmarshal([]byte(text), v); err != nil || v.Name != name || v.Spec.ClaimRef == nil {
		return nil, fmt.Errorf("the annotation %s of the CSIDriver %s is not what a move writes; "+
			"see that the PersistentVolume %s is as it should be, then remove the annotation",
			movingKey(name), DriverName, name)
	}
	return v, nil
}

func (m *Mover) save(ctx context.Context, name, value string) error {
	_, err := m.Kubernetes.Storage.CSIDrivers().Patch(ctx, DriverName, types.MergePatchType,
		annotation(movingKey(name), value, "name", DriverName), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("annotate the CSIDriver %s: %w", DriverName, err)
	}
	return nil
}

// prepare saves and returns a volume's replacement, before the caller removes anything. If the
// volume still exists, the replacement is a copy without the changes of an interrupted move.
func (m *Mover) prepare(ctx context.Context, old, saved *corev1.PersistentVolume,
	instance string) (*corev1.PersistentVolume, error) {
	replacement := saved
	if old != nil {
		replacement = &corev1.PersistentVolume{Spec: *old.Spec.DeepCopy(),
			ObjectMeta: metav1.ObjectMeta{Name: old.Name, Labels: old.Labels,
				Annotations: maps.Clone(old.Annotations), Finalizers: old.Finalizers}}
		if _, moving := old.Annotations[MovingAnnotation]; moving && saved != nil {
			delete(replacement.Annotations, MovingAnnotation)
			replacement.Finalizers = saved.Finalizers
			replacement.Spec.PersistentVolumeReclaimPolicy = saved.Spec.PersistentVolumeReclaimPolicy
		}
	}
	for _, e := range instanceTerms(replacement) {
		e.Values = []string{instance}
	}
	text, err := json.Marshal(replacement)
	if err != nil {
		return nil, err
	}
	return replacement, m.save(ctx, replacement.Name, string(text))
}

// remove deletes a PersistentVolume. It sets Retain first, so that Kubernetes keeps the disk.
func (m *Mover) remove(ctx context.Context, v *corev1.PersistentVolume) error {
	volumes := m.Kubernetes.Core.PersistentVolumes()
	now, err := volumes.Patch(ctx, v.Name, types.MergePatchType, fmt.Appendf(nil,
		`{"metadata":{"uid":%q,"annotations":{%q:""}},"spec":{"persistentVolumeReclaimPolicy":%q}}`,
		v.UID, MovingAnnotation, corev1.PersistentVolumeReclaimRetain), metav1.PatchOptions{})
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
	// Remove the finalizers, because with them Kubernetes keeps a volume that is in use.
	for {
		now, err := volumes.Get(ctx, v.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && now.UID != v.UID:
			return nil
		case err != nil:
			return fmt.Errorf("read the PersistentVolume %s: %w", v.Name, err)
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
	_, err := m.Kubernetes.Core.PersistentVolumes().Create(ctx, v, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create the PersistentVolume %s: %w; repeat the command", v.Name, err)
	}
	return nil // bound() checks a volume that exists already
}

func (m *Mover) bound(ctx context.Context, claim *corev1.PersistentVolumeClaim,
	instance string) error {
	for {
		now, err := m.Kubernetes.Core.PersistentVolumeClaims(claim.Namespace).Get(ctx, claim.Name,
			metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("read the claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		v, err := m.Kubernetes.Core.PersistentVolumes().Get(ctx, claim.Spec.VolumeName,
			metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("read the PersistentVolume %s: %w", claim.Spec.VolumeName, err)
		}
		if err == nil && !replaces(v, instance) {
			return fmt.Errorf("another command has moved the PersistentVolume %s in between; see to which "+
				"node it belongs, and repeat the command", v.Name)
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

func (m *Mover) evict(ctx context.Context, claim *corev1.PersistentVolumeClaim, to string) error {
	pods, err := m.Kubernetes.Core.Pods(claim.Namespace).List(ctx, metav1.ListOptions{})
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
		done, err := m.Kubernetes.evict(ctx, &p)
		switch {
		case apierrors.IsTooManyRequests(err):
			return fmt.Errorf("the PodDisruptionBudget of the pod %s/%s does not allow its eviction from "+
				"%s now; repeat the command later", p.Namespace, p.Name, p.Spec.NodeName)
		case err != nil:
			return err
		case done:
			m.log("the pod %s/%s is evicted from the node %s", p.Namespace, p.Name, p.Spec.NodeName)
		}
	}
	return nil
}

func (m *Mover) pause(ctx context.Context) error {
	pause(ctx, m.Pace)
	return ctx.Err()
}

// onInstance reports whether a volume is tied to the instance or, if instance is "", to none.
func onInstance(v *corev1.PersistentVolume, instance string) bool {
	found := ""
	for _, e := range instanceTerms(v) {
		if len(e.Values) == 1 {
			found = e.Values[0]
		}
	}
	return found == instance
}

func instanceTerms(v *corev1.PersistentVolume) []*corev1.NodeSelectorRequirement {
	var found []*corev1.NodeSelectorRequirement
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return nil
	}
	for _, t := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for e := range t.MatchExpressions {
			if t.MatchExpressions[e].Key == volume.InstanceKey {
				found = append(found, &t.MatchExpressions[e])
			}
		}
	}
	return found
}
