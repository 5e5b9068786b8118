package keeper

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// component is the keeper's name in events, leases and elsewhere.
const component = "oxide-node-keeper"

// report logs what was done to a node, and creates an event for it.
func (k *Keeper) report(ctx context.Context, n *corev1.Node, r *operation, reason, message string) {
	k.Log.InfoContext(ctx, message, "node", n.Name, "event", reason)
	of := ""
	if r != nil {
		of = r.id() + r.Since.String() // a step that begins again is reported again
	}
	k.event(ctx, nodeReference(n), corev1.EventTypeNormal, of, reason, message)
}

// warn creates an event for something that a person has to look at.
func (k *Keeper) warn(ctx context.Context, about corev1.ObjectReference, reason, message string) {
	k.Log.WarnContext(ctx, message, "kind", about.Kind, "name", about.Name, "event", reason)
	k.event(ctx, about, corev1.EventTypeWarning, "", reason, message)
}

// reportToUsers creates events for what is going to happen: on the pods that stop with the node,
// and on the claims whose volumes wait. Each event names only volumes of its own namespace, whose
// users may read it.
func (k *Keeper) reportToUsers(ctx context.Context, v *view, n *node, pods sorted, verb string) {
	waiting := v.due(n)
	claims := map[string]*corev1.ObjectReference{} // by volume
	for _, volume := range pods.claims {
		claims[volume.Name] = volume.Spec.ClaimRef
	}
	tell := func(about corev1.ObjectReference) {
		own := slices.DeleteFunc(slices.Clone(waiting), func(a *attachment) bool {
			claim := claims[a.volume()]
			return claim == nil || claim.Namespace != about.Namespace
		})
		k.event(ctx, about, corev1.EventTypeNormal, "", "ColdAttachPlanned",
			fmt.Sprintf("the node keeper %s (node %s)", planText(n, waiting, own, pods, verb), n.Name))
	}
	for _, p := range pods.stay {
		tell(corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name,
			UID: p.UID})
	}
	for _, a := range waiting {
		if claim := claims[a.volume()]; claim != nil {
			tell(*claim)
		}
	}
}

// event creates an event, but only once: its name is a hash of its content. A failure is only
// logged, because a missing event is no reason to leave an instance stopped.
func (k *Keeper) event(ctx context.Context, about corev1.ObjectReference, kind, of, reason,
	message string) {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, about.UID, of, reason, message)
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	now := metav1.NewTime(k.now())
	_, err := k.Kubernetes.Core.Events(namespace).Create(ctx, &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
			Name: fmt.Sprintf("%s.%016x", about.Name, h.Sum64())},
		InvolvedObject: about, Reason: reason, Message: message, Type: kind, Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source:              corev1.EventSource{Component: component, Host: k.Config.NodeName},
		ReportingController: component,
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		k.Log.WarnContext(ctx, "no event made", "reason", reason, "about", about.Name, "error", err)
	}
}
