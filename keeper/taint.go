package keeper

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// StartupTaint keeps pods away from a node that has just joined until the driver is registered
// there. Without it, pods would fail, and the scheduler would not know the node's limit of volumes.
const StartupTaint = DriverName + "/agent-not-ready"

// removeStartupTaints removes the startup taint of nodes on which the driver is registered.
func (k *Keeper) removeStartupTaints(ctx context.Context, v *view) error {
	var errs []error
	for _, n := range v.Nodes {
		if n.Instance == "" || !n.tainted(StartupTaint) {
			continue
		}
		n.removeTaint(StartupTaint)
		switch err := k.update(ctx, n); {
		case apierrors.IsConflict(err), apierrors.IsNotFound(err): // the next round looks again
		case err != nil:
			errs = append(errs, fmt.Errorf("node %s, startup taint: %w", n.Name, err))
		default:
			k.Log.InfoContext(ctx, "startup taint removed", "node", n.Name)
		}
	}
	return errors.Join(errs...)
}

func (n *node) tainted(key string) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == key })
}

func (n *node) removeTaint(key string) {
	n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == key })
}
