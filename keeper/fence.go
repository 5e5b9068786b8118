package keeper

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// outOfService asserts that a node is off for certain, so that Kubernetes deletes its pods and
// detaches their volumes without waiting for its kubelet.
var outOfService = corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown",
	Effect: corev1.TaintEffectNoExecute}

// fence sets the taint on nodes whose instances the rack reports as stopped or destroyed, and
// removes it when the instance runs again.
func (k *Keeper) fence(ctx context.Context, v *view) error {
	var errs []error
	for _, n := range v.Nodes {
		if err := k.fenceNode(ctx, v, n); err != nil && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("node %s, out-of-service taint: %w", n.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (k *Keeper) fenceNode(ctx context.Context, v *view, n *node) error {
	switch {
	case n.gone:
		return nil
	case n.Fenced != "":
		return k.unfence(ctx, v, n)
	// A node that the keeper has stopped, or may have stopped, comes back with its pods. A node whose
	// kubelet reports is not off, whatever instance its driver was registered with.
	case !n.silent(), n.Instance == "", n.working(), !k.Config.Fence,
		n.tainted(outOfService.Key):
		return nil
	}
	off, why, err := k.off(ctx, n)
	if err != nil || !off {
		return err
	}
	n.Fenced = n.Instance
	if err := k.save(ctx, v, n); err != nil {
		return err
	}
	n.Spec.Taints = append(n.Spec.Taints, outOfService)
	if err := k.update(ctx, n); err != nil {
		return err
	}
	k.Metrics.fences.Inc()
	k.report(ctx, n.Node, nil, "Fenced", "the rack reports the instance "+n.Instance+" as "+why+
		": its pods and volumes are given to other nodes")
	return nil
}

// silent reports whether Kubernetes no longer hears from the node's kubelet.
func (n *node) silent() bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
}

// unfence removes the keeper's taint from a node whose instance runs again. A node whose kubelet
// reports is running, whatever its instance is now. If somebody has removed the taint, a taint that
// is there now is not the keeper's.
func (k *Keeper) unfence(ctx context.Context, v *view, n *node) error {
	instance, ours := n.Fenced, slices.Contains(n.Spec.Taints, outOfService)
	if n.silent() && ours {
		state, err := k.instanceState(ctx, instance)
		switch {
		case csierr.IsNotFound(err):
			return nil // it stays off; the taint goes with the Node
		case err != nil:
			return err
		case state != oxide.InstanceStateRunning:
			return nil
		}
	}
	if ours {
		n.removeTaint(outOfService.Key)
		if err := k.update(ctx, n); err != nil {
			return err
		}
	}
	n.Fenced = ""
	if err := k.save(ctx, v, n); err != nil {
		return err
	}
	k.report(ctx, n.Node, nil, "Unfenced", "the instance "+instance+" runs again")
	return nil
}

// off asks the rack whether a node's instance can no longer write because it is stopped or
// destroyed.
func (k *Keeper) off(ctx context.Context, n *node) (off bool, why string, err error) {
	state, err := k.instanceState(ctx, n.Instance)
	if csierr.IsNotFound(err) {
		err = k.instanceGone(ctx, n.Instance)
		return err == nil, "destroyed", err
	}
	return err == nil && state == oxide.InstanceStateStopped, string(state), err
}

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
