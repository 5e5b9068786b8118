package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// This file contains what the keeper reads and changes in the cluster.

// observe reads what every round needs.
func (k *Keeper) observe(ctx context.Context) (*view, error) {
	all := metav1.ListOptions{}
	look := rack.Looking()
	// Read the records first. If another keeper works on any node after that, our update of them
	// conflicts.
	found, records, err := k.records(ctx)
	if err != nil {
		return nil, err
	}
	attachments, err := k.Kubernetes.Storage.VolumeAttachments().List(ctx, all)
	if err != nil {
		return nil, fmt.Errorf("list VolumeAttachments: %w", err)
	}
	csiNodes, err := k.Kubernetes.Storage.CSINodes().List(ctx, all)
	if err != nil {
		return nil, fmt.Errorf("list CSINodes: %w", err)
	}
	nodes, err := k.Kubernetes.Core.Nodes().List(ctx, all)
	if err != nil {
		return nil, fmt.Errorf("list Nodes: %w", err)
	}
	v := newView(k.now(), nodes.Items, csiNodes.Items, attachments.Items, records)
	v.Look, v.records = look, found
	k.Metrics.observe(v)
	return v, nil
}

// sorted reads the pods of a node. It returns them sorted, and as they were read.
func (k *Keeper) sorted(ctx context.Context, v *view, n *node) (sorted, []corev1.Pod, error) {
	if err := k.readVolumes(ctx, v); err != nil {
		return sorted{}, nil, err
	}
	own, err := k.podsOn(ctx, v, n)
	return sortPods(own, v.claims), own, err
}

func (k *Keeper) readVolumes(ctx context.Context, v *view) error {
	if v.claims != nil {
		return nil
	}
	volumes, err := k.Kubernetes.Core.PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list PersistentVolumes: %w", err)
	}
	claims, err := k.Kubernetes.Core.PersistentVolumeClaims(metav1.NamespaceAll).List(ctx,
		metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list PersistentVolumeClaims: %w", err)
	}
	v.volumes = volumes.Items
	v.claims = claimsOf(v.volumes, claims.Items)
	return nil
}

// pods reads and sorts the pods of a node, and checks whether a PodDisruptionBudget forbids a stop.
func (k *Keeper) pods(ctx context.Context, v *view, n *node) (sorted, error) {
	s, own, err := k.sorted(ctx, v, n)
	if err != nil {
		return s, err
	}
	if v.budgets == nil {
		budgets, err := k.Kubernetes.Policy.PodDisruptionBudgets(metav1.NamespaceAll).List(ctx,
			metav1.ListOptions{})
		if err != nil {
			return s, fmt.Errorf("list PodDisruptionBudgets: %w", err)
		}
		v.budgets = append([]policyv1.PodDisruptionBudget{}, budgets.Items...)
	}
	for i := range v.budgets {
		if err := k.recount(ctx, &v.budgets[i], s.stay); err != nil {
			return s, err
		}
	}
	waiting := waitingPods(own, v.claims, v.waiting(n))
	s.budget = exhausted(v.budgets, s, waiting)
	for _, other := range v.Nodes {
		// Read the pods of other nodes only if a budget is in the way.
		if s.budget == "" || other == n || len(v.waiting(other)) == 0 {
			continue
		}
		pods, err := k.podsOn(ctx, v, other)
		if err != nil {
			return s, err
		}
		waiting = append(waiting, waitingPods(pods, v.claims, v.waiting(other))...)
		s.budget = exhausted(v.budgets, s, waiting)
	}
	return s, nil
}

// recount corrects how many healthy pods a budget counts. Its controller counts late: it may still
// count a pod that somebody has just evicted or deleted.
func (k *Keeper) recount(ctx context.Context, b *policyv1.PodDisruptionBudget,
	stay []*corev1.Pod) error {
	if !slices.ContainsFunc(stay, func(p *corev1.Pod) bool { return healthy(p) && covers(b, p) }) {
		return nil
	}
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return fmt.Errorf("the PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	pods, err := k.Kubernetes.Core.Pods(b.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: selector.String()})
	if err != nil {
		return fmt.Errorf("list the Pods of the PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	there := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return !healthy(&p) })
	b.Status.CurrentHealthy = min(b.Status.CurrentHealthy, int32(len(there)))
	return nil
}

// podsOn reads the pods of a node, once a round.
func (k *Keeper) podsOn(ctx context.Context, v *view, n *node) ([]corev1.Pod, error) {
	if pods, known := v.pods[n.Name]; known {
		return pods, nil
	}
	pods, err := k.Kubernetes.Core.Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", n.Name).String()})
	if err != nil {
		return nil, fmt.Errorf("list Pods: %w", err)
	}
	if v.pods == nil {
		v.pods = map[string][]corev1.Pod{}
	}
	v.pods[n.Name] = pods.Items
	return pods.Items, nil
}

// write records an operation's step, and reports it in an event and the log.
func (k *Keeper) write(ctx context.Context, v *view, n *node, message string) error {
	if err := k.save(ctx, v, n); err != nil {
		return err
	}
	k.report(ctx, n.Node, n.Record, "ColdAttach"+string(n.Record.Step), message)
	return nil
}

// update writes back a node that was read and changed. If somebody else has changed it in between,
// the write fails with a conflict, and the next round reads it again.
func (k *Keeper) update(ctx context.Context, n *node) error {
	updated, err := k.Kubernetes.Core.Nodes().Update(ctx, n.Node, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("update the Node: %w", err)
	}
	n.Node = updated
	return nil
}

// plan sets the annotation that describes what is going to happen to a node; an empty text removes
// it.
func (k *Keeper) plan(ctx context.Context, n *node, text string) error {
	if n.Annotations[PlanAnnotation] == text {
		return nil
	}
	var value any
	if text != "" {
		value = text
		k.Log.InfoContext(ctx, "cold attach", "node", n.Name, "plan", text)
	}
	// Send the version that was read, because the plan was decided on it.
	updated, err := k.Kubernetes.Core.Nodes().Patch(ctx, n.Name, types.MergePatchType,
		annotation(PlanAnnotation, value, "resourceVersion", n.ResourceVersion), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("annotate the Node %s: %w", n.Name, err)
	}
	n.Node = updated
	return nil
}

// annotate sets an annotation of an attachment; nil removes it.
func (k *Keeper) annotate(ctx context.Context, a *attachment, key string, value any) error {
	// Do not annotate an attachment of the same name that was created since.
	_, err := k.Kubernetes.Storage.VolumeAttachments().Patch(ctx, a.Name, types.MergePatchType,
		annotation(key, value, "uid", string(a.UID)), metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("annotate the VolumeAttachment %s: %w", a.Name, err)
	}
	return nil
}

// annotation returns the patch that sets an annotation, or removes it if the value is nil. It
// applies only to an object whose metadata has the value in the given field.
func annotation(key string, value any, field, has string) []byte {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{field: has,
		"annotations": map[string]any{key: value}}})
	if err != nil {
		panic(err) // JSON can encode every annotation
	}
	return patch
}

// evict requests the eviction of pods. A PodDisruptionBudget may refuse it for now.
func (k *Keeper) evict(ctx context.Context, pods []*corev1.Pod) error {
	var errs []error
	for _, p := range pods {
		if p.DeletionTimestamp != nil {
			continue
		}
		done, err := k.Kubernetes.evict(ctx, p)
		switch {
		case apierrors.IsTooManyRequests(err):
			k.Metrics.eviction("refused")
		case done:
			k.Metrics.eviction("accepted")
			k.Log.InfoContext(ctx, "evicted", "pod", p.Namespace+"/"+p.Name, "node", p.Spec.NodeName)
		default:
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// evict requests the eviction of a pod, but not of a pod of the same name that was created since.
// done reports whether the request was accepted. A pod that is gone is no error.
func (c *Cluster) evict(ctx context.Context, p *corev1.Pod) (done bool, err error) {
	err = c.Policy.Evictions(p.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(p.UID))}})
	switch {
	case err == nil:
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return false, nil
	}
	return false, fmt.Errorf("evict the pod %s/%s: %w", p.Namespace, p.Name, err)
}
