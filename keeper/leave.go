package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// outOfService tells Kubernetes that a node is certainly off. Kubernetes then deletes the node's
// pods and detaches their volumes without waiting for the kubelet.
var outOfService = corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown",
	Effect: corev1.TaintEffectNoExecute}

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
	// Do not fence a node that an operation will bring back, or whose kubelet reports. A node that
	// reports is running, even if the instance in its CSINode is stopped.
	case !n.silent(), n.Instance == "", n.Record != nil, !k.Config.Fence,
		n.tainted(outOfService.Key):
		return nil
	}
	// An instance that is stopped or destroyed can no longer write.
	state, err := k.instanceState(ctx, n.Instance)
	if csierr.IsNotFound(err) {
		state, err = oxide.InstanceStateDestroyed, k.instanceGone(ctx, n.Instance)
	} else if state != oxide.InstanceStateStopped {
		return err
	}
	if err != nil {
		return err
	}
	n.Fenced = n.Instance
	if err := v.save(ctx, n); err != nil {
		return err
	}
	n.Spec.Taints = append(n.Spec.Taints, outOfService)
	if err := k.Kubernetes.update(ctx, n); err != nil {
		return err
	}
	k.Metrics.fences.Inc()
	k.report(ctx, n.Node, nil, "Fenced", "the rack reports the instance "+n.Instance+" as "+
		string(state)+": its pods and volumes are given to other nodes")
	return nil
}

func (n *node) silent() bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
}

// unfence removes the keeper's taint from a node whose instance runs again or whose kubelet
// reports. If somebody else has removed or replaced the taint, unfence only clears Fenced.
func (k *Keeper) unfence(ctx context.Context, v *view, n *node) error {
	instance, ours := n.Fenced, slices.Contains(n.Spec.Taints, outOfService)
	why := "the node's kubelet reports again"
	switch {
	case !ours:
		why = "the node has no taint of the keeper"
	case n.silent():
		state, err := k.instanceState(ctx, instance)
		switch {
		case csierr.IsNotFound(err):
			return nil // it is destroyed; the taint stays until the Node is deleted
		case err != nil:
			return err
		case state != oxide.InstanceStateRunning:
			return nil
		}
		why = "the instance " + instance + " runs again"
	}
	if ours {
		n.removeTaint(outOfService.Key)
		if err := k.Kubernetes.update(ctx, n); err != nil {
			return err
		}
	}
	n.Fenced = ""
	if err := v.save(ctx, n); err != nil {
		return err
	}
	k.report(ctx, n.Node, nil, "Unfenced", why)
	return nil
}

// StartupTaint keeps pods away from a new node until the driver is registered there. Before that,
// pods fail there, and the scheduler does not know the node's limit of volumes.
const StartupTaint = DriverName + "/agent-not-ready"

func (k *Keeper) removeStartupTaints(ctx context.Context, v *view) error {
	var errs []error
	for _, n := range v.Nodes {
		if n.Instance == "" || !n.tainted(StartupTaint) {
			continue
		}
		n.removeTaint(StartupTaint)
		switch err := k.Kubernetes.update(ctx, n); {
		case apierrors.IsConflict(err), apierrors.IsNotFound(err): // the next round tries again
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

// Leaver keeps a node's driver running until the node's volumes are detached. The driver must
// outlive the pods whose volumes it unmounts, but it does not use the Kubernetes API. So its
// preStop hook connects to the Leaver's socket and waits until the connection is closed.
type Leaver struct {
	Kubernetes *Cluster
	NodeName   string
	Socket     string
	Log        *slog.Logger
	// Limit is the longest wait for the volumes. The pod's grace period should be longer.
	Limit time.Duration
}

const leavingPace = time.Second

// refusedLimit is how long the API server may refuse the Leaver's requests before the Leaver gives
// up. When Helm or kubectl removes the driver, the Leaver's rights disappear first.
const refusedLimit = 5 * time.Second

// Run accepts the driver's connections. After ctx ends, Run keeps them for at most Limit, while the
// node is leaving and has VolumeAttachments of the driver.
func (l *Leaver) Run(ctx context.Context) error {
	if err := os.Remove(l.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier process: %w", err)
	}
	listener, err := net.Listen("unix", l.Socket)
	if err != nil {
		return fmt.Errorf("the socket that the driver waits at: %w", err)
	}
	var held []net.Conn
	var accepting async.Group
	accepting.Go(func() {
		for connection, err := listener.Accept(); err == nil; connection, err = listener.Accept() {
			held = append(held, connection)
		}
	})
	<-ctx.Done()
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.Limit)
	defer cancel()
	err = l.await(wait)
	_ = listener.Close()
	accepting.Wait()
	for _, connection := range held {
		_ = connection.Close()
	}
	return err
}

// await returns when the node has no volumes any more, or is not leaving. It repeats a failed read.
// It gives up when the API server has refused every read for refusedLimit: a server that is
// starting refuses reads, too, but not for so long.
func (l *Leaver) await(ctx context.Context) error {
	var refused time.Time // when the API server began to refuse
	for logged := -1; ; {
		why, left, err := l.look(ctx)
		if !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
			refused = time.Time{}
		} else if refused.IsZero() {
			refused = time.Now()
		}
		switch {
		case !refused.IsZero() && time.Since(refused) >= refusedLimit:
			return fmt.Errorf("not known whether the node %s is leaving: the driver is being removed with "+
				"its rights, or its service account lacks some: %w", l.NodeName, err)
		case err == nil && why == "":
			l.Log.Info("the node stays, so the driver does not wait", "node", l.NodeName)
			return nil
		case err == nil && left == 0:
			l.Log.Info("every volume is detached", "node", l.NodeName)
			return nil
		case err == nil && left != logged:
			logged = left
			l.Log.Info("the driver waits until the node's volumes are detached", "node", l.NodeName,
				"because", why, "left", left)
		}
		pause(ctx, leavingPace)
		switch {
		case ctx.Err() == nil:
		case logged < 0:
			return fmt.Errorf("whether the node %s is leaving could not be read within %s: %w",
				l.NodeName, l.Limit, err)
		default:
			return fmt.Errorf("the node %s is leaving, and %d of its volumes were not detached within %s; "+
				"see the VolumeAttachments, and give the node more time to shut down", l.NodeName, logged,
				l.Limit)
		}
	}
}

func (l *Leaver) look(ctx context.Context) (why string, left int, err error) {
	node, err := l.Kubernetes.Core.Nodes().Get(ctx, l.NodeName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		why = "there is no such Node any more"
	case err != nil:
		return "", 0, fmt.Errorf("read the Node %s: %w", l.NodeName, err)
	default:
		why = leaves(node)
	}
	if why == "" {
		return "", 0, nil
	}
	list, err := l.Kubernetes.Storage.VolumeAttachments().List(ctx, metav1.ListOptions{})
	if err != nil {
		return why, 0, fmt.Errorf("list VolumeAttachments: %w", err)
	}
	for _, a := range list.Items {
		if a.Spec.Attacher == DriverName && a.Spec.NodeName == l.NodeName {
			left++
		}
	}
	return why, left, nil
}

// leavingTaints are the taints with which programs announce that they remove a node.
var leavingTaints = []string{corev1.TaintNodeOutOfService, "ToBeDeletedByClusterAutoscaler",
	"karpenter.sh/disrupted", "node.cloudprovider.kubernetes.io/shutdown"}

// leaves returns why a node leaves, or "" if it stays. A node leaves if somebody drains or removes
// it, or if its kubelet shuts down. A node that the keeper stops keeps its volumes, so it stays.
func leaves(n *corev1.Node) string {
	_, keeper := n.Annotations[CordonAnnotation]
	switch {
	case keeper:
		return ""
	case n.DeletionTimestamp != nil:
		return "the Node is being deleted"
	case n.Spec.Unschedulable:
		return "the node is cordoned"
	}
	for _, t := range n.Spec.Taints {
		if slices.Contains(leavingTaints, t.Key) {
			return "the node has the taint " + t.Key
		}
	}
	for _, c := range n.Status.Conditions {
		// The kubelet sets this message during a graceful shutdown.
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue &&
			strings.Contains(c.Message, "node is shutting down") {
			return c.Message
		}
	}
	return ""
}
