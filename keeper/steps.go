package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// In each round, the function of the recorded step acts, records the next step, or waits.

func (k *Keeper) advance(ctx context.Context, v *view, n *node) error {
	const gone = "somebody deleted the Node"
	switch s := n.Record.Step; {
	case n.gone && (s == draining || s == returning):
		return k.finish(ctx, v, n, gone)
	case n.gone && s != starting:
		return k.giveUp(ctx, v, n, gone)
	case n.cordoned() && !n.Spec.Unschedulable && s != draining:
		// Somebody uncordoned the node. If they cordon it again, finish() must not uncordon it.
		delete(n.Annotations, CordonAnnotation)
		if err := k.Kubernetes.update(ctx, n); err != nil {
			return err
		}
	}
	do := map[step]func(context.Context, *view, *node) error{draining: k.drain, stopping: k.stop,
		attaching: k.attach, starting: k.start, returning: k.awaitReturn}[n.Record.Step]
	if do != nil {
		return do(ctx, v, n)
	}
	return fmt.Errorf("the ConfigMap %s has the step %.40q, which this keeper does not know; see "+
		"that the instance runs, then remove the key %s", RecordsName, n.Record.Step, n.UID)
}

func (n *node) overdue(now time.Time, limit time.Duration) bool {
	return passed(now, n.Record.Since, limit)
}

// maxSkew is how much the clocks of replicas and of the API server may differ.
const maxSkew = time.Minute

// ahead reports whether a noted time is so far in the future that some clock was wrong.
func ahead(now, noted time.Time) bool { return noted.Sub(now) > maxSkew }

// passed reports whether more than d has passed since a time. It also returns true if ahead() does,
// so that a wrong clock delays nothing by more than maxSkew.
func passed(now, since time.Time, d time.Duration) bool {
	return now.Sub(since) > d || ahead(now, since)
}

func (k *Keeper) moveTo(ctx context.Context, v *view, n *node, next step, message string) error {
	was, took := n.Record.Step, v.Now.Sub(n.Record.Since)
	late := next == starting && n.overdue(v.Now, k.Config.AttachTimeout)
	n.Record.Step, n.Record.Since = next, v.Now
	if err := k.write(ctx, v, n, message); err != nil {
		if late && !apierrors.IsConflict(err) {
			// Start the instance even if the step cannot be recorded. A second start does no harm.
			err = errors.Join(err, k.startInstance(ctx, rack.Looking(), n.Record.Instance))
		}
		return err
	}
	k.Metrics.step(was, took)
	return nil
}

// giveUp records the operation's problem, and goes on to Starting.
func (k *Keeper) giveUp(ctx context.Context, v *view, n *node, problem string) error {
	was := n.Record.Step
	n.Record.Problem = cmp.Or(n.Record.Problem, problem)
	return k.failed(was, k.moveTo(ctx, v, n, starting, problem))
}

// failed counts a failed step, unless err shows that the failure was not recorded.
func (k *Keeper) failed(s step, err error) error {
	if err == nil {
		k.Metrics.problems.WithLabelValues(string(s)).Inc()
	}
	return err
}

// finish removes the keeper's cordon, and then records the operation's outcome.
func (k *Keeper) finish(ctx context.Context, v *view, n *node, problem string) error {
	r := n.Record
	r.Problem = cmp.Or(r.Problem, problem)
	message := "done: the instance runs, and the node takes pods again" + r.failures()
	if r.Problem != "" {
		message = "ended without having done everything: " + r.Problem + r.failures()
	}
	if n.cordoned() {
		n.Spec.Unschedulable = false
		delete(n.Annotations, CordonAnnotation)
		delete(n.Annotations, PlanAnnotation)
		if err := k.Kubernetes.update(ctx, n); err != nil {
			return err
		}
	}
	last := outcome{Ended: v.Now, Instance: r.Instance, StoppedWith: map[string]time.Time{},
		Stopped: r.Step != draining, Late: r.Late, Problem: r.Problem, Unlabeled: !n.allowed()}
	earlier := cmp.Or(n.Last, &outcome{})
	maps.Copy(last.StoppedWith, earlier.StoppedWith)
	maps.DeleteFunc(last.StoppedWith, func(_ string, at time.Time) bool {
		return v.Now.Sub(at) >= k.Config.StatefulSetInterval
	})
	if last.Stopped {
		for _, set := range r.StatefulSets {
			last.StoppedWith[set] = v.Now
		}
	}
	last.remember(earlier, r, v.Now, v.again())
	if r.Problem != "" && r.Problem != nothingWaits {
		last.Failures = earlier.Failures + 1
	}
	before := n.record
	n.Record, n.Last = nil, &last
	if err := v.save(ctx, n); err != nil {
		n.record = before
		return err
	}
	k.stops.forget(r.Instance)
	k.Metrics.step(r.Step, v.Now.Sub(r.Since))
	k.Metrics.operation(r.Problem)
	k.report(ctx, n.Node, r, "ColdAttachEnded", message)
	return nil
}

// nothingWaits is the problem of an operation that is no longer needed. It counts as no failure.
const nothingWaits = "nothing waits any more"

// forbidden returns why the instance must not be stopped any more, or "".
func (k *Keeper) forbidden(v *view, n *node) string {
	switch {
	case !n.Spec.Unschedulable:
		return "somebody uncordoned the node"
	case !n.cordoned():
		return "somebody else cordoned the node"
	case !n.allowed():
		return "somebody removed the label " + ColdAttachLabel
	case !k.Config.ColdAttach, k.Config.DryRun:
		return "cold attach was switched off, or --dry-run was set"
	case !k.Config.Window.open(k.now()):
		return fmt.Sprintf("the maintenance window, %s, was over before the instance could be stopped",
			k.Config.Window)
	case n.Unclear != "":
		return n.Unclear
	case n.Record.Instance != n.Instance:
		return fmt.Sprintf("the operation began with the instance %s, and the node's is now %s",
			n.Record.Instance, n.Instance)
	case !v.wanted(n):
		return nothingWaits
	}
	return k.doubtful(v, n)
}

func (k *Keeper) drain(ctx context.Context, v *view, n *node) error {
	switch {
	case n.Name == k.Config.NodeName:
		return k.finish(ctx, v, n, "the keeper that continues runs on this node itself")
	case !n.cordoned() && !n.Spec.Unschedulable:
		return k.Kubernetes.cordon(ctx, n) // the keeper that began the operation died before it did
	case k.forbidden(v, n) != "":
		return k.finish(ctx, v, n, k.forbidden(v, n))
	}
	pods, err := v.pods(ctx, n)
	if err != nil {
		return err
	}
	switch {
	case pods.lost != "":
		return k.finish(ctx, v, n, pods.lost)
	// Check the limit first: if no keeper ran for a long time, the drain must end without a stop.
	case n.overdue(v.Now, k.Config.DrainTimeout):
		problem := cmp.Or(pods.budget, "the attacher has not tried again; see its log")
		if len(pods.evict) > 0 {
			problem = fmt.Sprintf("%d pods were still there after %s, such as %s/%s; see its "+
				"PodDisruptionBudget and its finalizers", len(pods.evict), k.Config.DrainTimeout,
				pods.evict[0].Namespace, pods.evict[0].Name)
		}
		return k.failed(draining, k.finish(ctx, v, n, problem))
	case len(pods.evict) > 0:
		return k.evict(ctx, pods.evict)
	case pods.budget != "":
		return nil
	}
	// The attachments may have failed long ago, and the rack may support hot-plug by now.
	if still, err := k.stillWaits(ctx, v, n); err != nil || !still {
		return err
	}
	n.Record.StatefulSets, n.Record.Volumes = statefulSets(pods.stay), v.causes(n)
	if n.Last != nil {
		maps.DeleteFunc(n.Last.Volumes, func(name string, _ history) bool {
			return v.persistentVolume(name).Name == "" // the volume no longer exists
		})
	}
	return k.moveTo(ctx, v, n, stopping, "drained; the instance "+n.Record.Instance+" is stopped")
}

// stillWaits wakes the attacher for each due attachment that was not tried since the operation
// began. It reports whether an attachment that was tried still waits for a stop.
func (k *Keeper) stillWaits(ctx context.Context, v *view, n *node) (bool, error) {
	due := v.due(n)
	untried := slices.DeleteFunc(slices.Clone(due), func(a *attachment) bool {
		return a.triedAgain(n.Record)
	})
	return len(untried) < len(due), k.Kubernetes.wakeAll(ctx, n.Record, untried)
}

func (k *Keeper) stop(ctx context.Context, v *view, n *node) error {
	state, err := k.awaitStopped(ctx, n.Record.Instance)
	switch {
	case n.Name == k.Config.NodeName:
		return k.giveUp(ctx, v, n, "the keeper that continues runs on this node itself")
	case n.overdue(v.Now, k.Config.StopTimeout):
		return k.giveUp(ctx, v, n, fmt.Sprintf("the instance was not stopped within %s",
			k.Config.StopTimeout))
	case err != nil:
		return err
	}
	switch state {
	case oxide.InstanceStateStopped:
		return errors.Join(k.Kubernetes.wakeAll(ctx, n.Record, v.unsettled(n)),
			k.moveTo(ctx, v, n, attaching, "the instance is stopped; the attacher works"))
	case oxide.InstanceStateStopping:
		return nil
	case oxide.InstanceStateFailed:
		return k.giveUp(ctx, v, n, "the instance failed while it was being stopped")
	}
	if why := k.forbidden(v, n); why != "" {
		return k.giveUp(ctx, v, n, why)
	}
	// Read the pods again: the keeper that recorded this step may have died long ago.
	pods, err := v.pods(ctx, n)
	if err != nil {
		return err
	}
	if why := cmp.Or(pods.lost, pods.budget); why != "" {
		return k.giveUp(ctx, v, n, why)
	}
	k.stops.note(n.Record.Instance, k.now())
	if err := k.stopInstance(ctx, v.Look, n.Record.Instance); err != nil {
		return err
	}
	// Do not wait for the next round: another program may start the instance before it.
	if state, err = k.awaitStopped(ctx, n.Record.Instance); err != nil ||
		state != oxide.InstanceStateStopped {
		return err
	}
	return k.Kubernetes.wakeAll(ctx, n.Record, v.unsettled(n))
}

func (k *Keeper) attach(ctx context.Context, v *view, n *node) error {
	state, err := k.instanceState(ctx, n.Record.Instance)
	left := v.unsettled(n)
	switch {
	case err != nil, state == oxide.InstanceStateStopped:
	case len(left) == 0:
		return k.restart(ctx, v, n, "") // somebody started the instance after the attacher was done
	default:
		return k.restart(ctx, v, n, fmt.Sprintf("somebody started the instance; it is %s", state))
	}
	pods, _, err := v.sorted(ctx, n)
	missing := v.unasked(pods)
	switch {
	case err == nil && len(left) == 0 && len(missing) == 0:
		return k.restart(ctx, v, n, "")
	// After --attach-timeout, the cases below start the instance, even if the pods cannot be read.
	case err != nil && n.overdue(v.Now, k.Config.AttachTimeout):
		return k.restart(ctx, v, n, fmt.Sprintf("what waits could not be read for %s: %v",
			k.Config.AttachTimeout, err))
	case err != nil:
		return err
	case len(left) == 0 && n.overdue(v.Now, k.Config.AttachTimeout):
		return k.restart(ctx, v, n, fmt.Sprintf("Kubernetes did not ask for the volume %s of a pod on "+
			"this node within %s", missing[0], k.Config.AttachTimeout))
	case n.overdue(v.Now, k.Config.AttachTimeout):
		return k.restart(ctx, v, n, fmt.Sprintf("%d VolumeAttachments were not done within %s, such "+
			"as %s; see its status", len(left), k.Config.AttachTimeout, left[0].Name))
	}
	return k.Kubernetes.wakeAll(ctx, n.Record, left)
}

func (v *view) unsettled(n *node) []*attachment {
	return slices.DeleteFunc(v.of(n), func(a *attachment) bool { return a.settled(n.Record) })
}

func (k *Keeper) restart(ctx context.Context, v *view, n *node, problem string) error {
	v.noteFailures(n)
	if problem != "" {
		return k.giveUp(ctx, v, n, problem)
	}
	return k.moveTo(ctx, v, n, starting, "the attacher is done; the instance is started")
}

// start asks the rack to start the instance until the instance runs. The operation ends without a
// start only if --start-timeout is over and the rack confirms that the instance is gone.
func (k *Keeper) start(ctx context.Context, v *view, n *node) error {
	look := rack.Looking()
	state, err := k.instanceState(ctx, n.Record.Instance)
	_, heartbeat := n.ready()
	switch {
	case err == nil && state == oxide.InstanceStateRunning:
		k.stops.forget(n.Record.Instance)
		return k.moveTo(ctx, v, n, returning, "the instance runs; the node is expected back")
	case csierr.IsNotFound(err) && n.overdue(v.Now, k.Config.StartTimeout) &&
		k.instanceGone(ctx, n.Record.Instance) == nil:
		return k.finish(ctx, v, n, "the rack no longer shows the instance "+n.Record.Instance)
	case n.overdue(v.Now, k.Config.StartTimeout):
		// giveUp begins the step Starting again, so the problem is reported after each timeout.
		return k.giveUp(ctx, v, n, fmt.Sprintf("the instance does not run %s after its start was "+
			"requested; the keeper goes on trying: see the instance on the rack", k.Config.StartTimeout))
	case err != nil:
		return err
	case n.Record.Heartbeat.IsZero() && !heartbeat.IsZero():
		// The kubelet does not run now, so a newer heartbeat means that the node has come back.
		n.Record.Heartbeat = heartbeat
		return v.save(ctx, n)
	case state == oxide.InstanceStateStopped || state == oxide.InstanceStateFailed:
		return k.startInstance(ctx, look, n.Record.Instance)
	}
	return nil
}

func (k *Keeper) awaitReturn(ctx context.Context, v *view, n *node) error {
	state, err := k.instanceState(ctx, n.Record.Instance)
	ready, heartbeat := n.ready()
	switch {
	case err == nil && state != oxide.InstanceStateRunning:
		return k.giveUp(ctx, v, n, fmt.Sprintf("the instance ran, and then was %s", state))
	case err == nil && ready && !heartbeat.Equal(n.Record.Heartbeat):
		return k.finish(ctx, v, n, "")
	case n.overdue(v.Now, k.Config.ReturnTimeout):
		return k.failed(returning, k.finish(ctx, v, n, fmt.Sprintf("the node was not ready %s after "+
			"its instance ran; see its kubelet", k.Config.ReturnTimeout)))
	}
	return err
}

// Anybody may start a stopped instance at any time; the controller of Cluster API's provider does
// it within ten seconds. So the keeper wakes the attacher as soon as the instance is stopped,
// before it records the step Attaching. The keeper attaches no disk itself: only the driver checks
// whose disk it is.

// pollEvery is how often the keeper reads the state of a stopping instance. After the time pollFor,
// the next round continues.
const (
	pollEvery = 100 * time.Millisecond
	pollFor   = 4 * time.Second
)

func (k *Keeper) awaitStopped(ctx context.Context, instance string) (oxide.InstanceState, error) {
	for end := time.Now().Add(pollFor); ; {
		state, err := k.instanceState(ctx, instance)
		if err != nil || state != oxide.InstanceStateStopping || time.Now().After(end) {
			return state, err
		}
		pause(ctx, pollEvery)
	}
}

// wakeAll makes the attacher try these attachments now, not at the end of its backoff: it tries at
// once when an annotation of a VolumeAttachment changes.
func (c *Cluster) wakeAll(ctx context.Context, r *operation, all []*attachment) error {
	var errs []error
	for _, a := range all {
		if value := a.wakeup(r); a.Annotations[WokenAnnotation] != value {
			errs = append(errs, c.annotate(ctx, a, WokenAnnotation, value))
		}
	}
	return errors.Join(errs...)
}
