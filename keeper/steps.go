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

// progress brings the operation on a node forward. In each round, the method of the recorded step
// acts, records the next step, or waits.
type progress struct {
	k *Keeper
	v *view
	n *node
}

func (p progress) advance(ctx context.Context) error {
	const gone = "somebody deleted the Node"
	n := p.n
	switch s := n.Record.Step; {
	case n.gone && (s == draining || s == returning):
		return p.finish(ctx, gone)
	case n.gone && s != starting:
		return p.giveUp(ctx, gone)
	case n.cordoned() && !n.Spec.Unschedulable && s != draining:
		// Somebody uncordoned the node. If they cordon it again, finish() must not uncordon it.
		delete(n.Annotations, CordonAnnotation)
		if err := p.k.Kubernetes.update(ctx, n); err != nil {
			return err
		}
	}
	do := map[step]func(context.Context) error{draining: p.drain, stopping: p.stop,
		attaching: p.attach, starting: p.start, returning: p.awaitReturn}[n.Record.Step]
	if do != nil {
		return do(ctx)
	}
	return fmt.Errorf("the ConfigMap %s has the step %.40q, which this keeper does not know; see "+
		"that the instance runs, then remove the key %s", RecordsName, n.Record.Step, n.UID)
}

func (p progress) overdue(limit time.Duration) bool {
	return passed(p.v.Now, p.n.Record.Since, limit)
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

func (p progress) moveTo(ctx context.Context, next step, message string) error {
	was, took := p.n.Record.Step, p.v.Now.Sub(p.n.Record.Since)
	late := next == starting && p.overdue(p.k.Config.AttachTimeout)
	p.n.Record.Step, p.n.Record.Since = next, p.v.Now
	if err := p.k.write(ctx, p.v, p.n, message); err != nil {
		if late && !apierrors.IsConflict(err) {
			// After --attach-timeout, start the instance even if the write failed: two starts are harmless.
			err = errors.Join(err, p.k.startInstance(ctx, rack.Looking(), p.n.Record.Instance))
		}
		return err
	}
	p.k.Metrics.step(was, took)
	return nil
}

// giveUp records the operation's problem, and goes on to Starting.
func (p progress) giveUp(ctx context.Context, problem string) error {
	was := p.n.Record.Step
	p.n.Record.Problem = cmp.Or(p.n.Record.Problem, problem)
	return p.k.Metrics.failed(was, p.moveTo(ctx, starting, problem))
}

// finish removes the keeper's cordon, and then records the operation's outcome.
func (p progress) finish(ctx context.Context, problem string) error {
	n, r := p.n, p.n.Record
	r.Problem = cmp.Or(r.Problem, problem)
	message := "done: the instance runs, and the node takes pods again" + r.failures()
	if r.Problem != "" {
		message = "ended without having done everything: " + r.Problem + r.failures()
	}
	if n.cordoned() {
		n.Spec.Unschedulable = false
		delete(n.Annotations, CordonAnnotation)
		delete(n.Annotations, PlanAnnotation)
		if err := p.k.Kubernetes.update(ctx, n); err != nil {
			return err
		}
	}
	last := outcome{Ended: p.v.Now, Instance: r.Instance, StoppedWith: map[string]time.Time{},
		Stopped: r.Step != draining, Late: r.Late, Problem: r.Problem, Unlabeled: !n.allowed()}
	earlier := cmp.Or(n.Last, &outcome{})
	maps.Copy(last.StoppedWith, earlier.StoppedWith)
	maps.DeleteFunc(last.StoppedWith, func(_ string, at time.Time) bool {
		return p.v.Now.Sub(at) >= p.k.Config.StatefulSetInterval
	})
	if last.Stopped {
		for _, set := range r.StatefulSets {
			last.StoppedWith[set] = p.v.Now
		}
	}
	last.remember(earlier, r, p.v.Now, p.v.again())
	if r.Problem != "" && r.Problem != nothingWaits {
		last.Failures = earlier.Failures + 1
	}
	before := n.record
	n.Record, n.Last = nil, &last
	if err := p.v.save(ctx, n); err != nil {
		n.record = before
		return err
	}
	p.k.stops.forget(r.Instance)
	p.k.Metrics.step(r.Step, p.v.Now.Sub(r.Since))
	p.k.Metrics.operation(r.Problem)
	p.k.report(ctx, n.Node, r, "ColdAttachEnded", message)
	return nil
}

// nothingWaits is recorded if an operation is not needed any more. It is not counted as a failure.
const nothingWaits = "nothing waits any more"

// forbidden returns why the instance must not be stopped any more, or "".
func (p progress) forbidden() string {
	n := p.n
	switch {
	case !n.Spec.Unschedulable:
		return "somebody uncordoned the node"
	case !n.cordoned():
		return "somebody else cordoned the node"
	case !n.allowed():
		return "somebody removed the label " + ColdAttachLabel
	case !p.k.Config.ColdAttach, p.k.Config.DryRun:
		return "cold attach was switched off, or --dry-run was set"
	case !p.k.Config.Window.open(p.k.now()):
		return fmt.Sprintf("the maintenance window, %s, was over before the instance could be stopped",
			p.k.Config.Window)
	case n.Unclear != "":
		return n.Unclear
	case n.Record.Instance != n.Instance:
		return fmt.Sprintf("the operation began with the instance %s, and the node's is now %s",
			n.Record.Instance, n.Instance)
	case !p.v.wanted(n):
		return nothingWaits
	}
	return p.v.doubtful(n)
}

func (p progress) drain(ctx context.Context) error {
	n := p.n
	switch {
	case n.Name == p.k.Config.NodeName:
		return p.finish(ctx, "the keeper that continues runs on this node itself")
	case !n.cordoned() && !n.Spec.Unschedulable:
		return p.k.Kubernetes.cordon(ctx, n) // the keeper that began the operation died before the cordon
	case p.forbidden() != "":
		return p.finish(ctx, p.forbidden())
	}
	pods, err := p.v.pods(ctx, n)
	if err != nil {
		return err
	}
	switch {
	case pods.lost != "":
		return p.finish(ctx, pods.lost)
	// Check the limit first: if it passed while no keeper ran, the keeper must not stop the instance.
	case p.overdue(p.k.Config.DrainTimeout):
		problem := cmp.Or(pods.budget, "the attacher has not tried again; see its log")
		if len(pods.evict) > 0 {
			problem = fmt.Sprintf("%d pods were still there after %s, such as %s/%s; see its "+
				"PodDisruptionBudget and its finalizers", len(pods.evict), p.k.Config.DrainTimeout,
				pods.evict[0].Namespace, pods.evict[0].Name)
		}
		return p.k.Metrics.failed(draining, p.finish(ctx, problem))
	case len(pods.evict) > 0:
		return p.k.evict(ctx, pods.evict)
	case pods.budget != "":
		return nil
	}
	// Let the attacher try once more: by now the rack may support hot-plug.
	if still, err := p.stillWaits(ctx); err != nil || !still {
		return err
	}
	n.Record.StatefulSets, n.Record.Volumes = statefulSets(pods.stay), p.v.causes(n)
	if n.Last != nil {
		maps.DeleteFunc(n.Last.Volumes, func(name string, _ history) bool {
			return p.v.persistentVolume(name).Name == "" // the volume no longer exists
		})
	}
	return p.moveTo(ctx, stopping, "drained; the instance "+n.Record.Instance+" is stopped")
}

// stillWaits wakes the attacher for each due attachment that was not tried since the operation
// began. It reports whether an attachment that was tried still waits for a stop.
func (p progress) stillWaits(ctx context.Context) (bool, error) {
	due := p.v.due(p.n)
	untried := slices.DeleteFunc(slices.Clone(due), func(a *attachment) bool {
		return a.triedAgain(p.n.Record)
	})
	return len(untried) < len(due), p.wakeAll(ctx, untried)
}

func (p progress) stop(ctx context.Context) error {
	state, err := p.awaitStopped(ctx)
	switch {
	case p.n.Name == p.k.Config.NodeName:
		return p.giveUp(ctx, "the keeper that continues runs on this node itself")
	case p.overdue(p.k.Config.StopTimeout):
		return p.giveUp(ctx, "the instance was not stopped within "+p.k.Config.StopTimeout.String())
	case err != nil:
		return err
	}
	switch state {
	case oxide.InstanceStateStopped:
		return errors.Join(p.wakeAll(ctx, p.v.unsettled(p.n)),
			p.moveTo(ctx, attaching, "the instance is stopped; the attacher works"))
	case oxide.InstanceStateStopping:
		return nil
	case oxide.InstanceStateFailed:
		return p.giveUp(ctx, "the instance failed while it was being stopped")
	}
	if why := p.forbidden(); why != "" {
		return p.giveUp(ctx, why)
	}
	// Read the pods again: the keeper that recorded this step may have died long ago.
	pods, err := p.v.pods(ctx, p.n)
	if err != nil {
		return err
	}
	if why := cmp.Or(pods.lost, pods.budget); why != "" {
		return p.giveUp(ctx, why)
	}
	p.k.stops.note(p.n.Record.Instance, p.k.now())
	if err := p.k.stopInstance(ctx, p.v.Look, p.n.Record.Instance); err != nil {
		return err
	}
	// Go on in this round, because another program may start the instance before the next round.
	if state, err = p.awaitStopped(ctx); err != nil || state != oxide.InstanceStateStopped {
		return err
	}
	return p.wakeAll(ctx, p.v.unsettled(p.n))
}

func (p progress) attach(ctx context.Context) error {
	state, err := p.k.instanceState(ctx, p.n.Record.Instance)
	left := p.v.unsettled(p.n)
	switch {
	case err != nil, state == oxide.InstanceStateStopped:
	case len(left) == 0:
		return p.restart(ctx, "") // somebody started the instance after the attacher was done
	default:
		return p.restart(ctx, fmt.Sprintf("somebody started the instance; it is %s", state))
	}
	pods, _, err := p.v.sorted(ctx, p.n)
	missing := p.v.unasked(pods)
	switch limit := p.k.Config.AttachTimeout; {
	case err == nil && len(left) == 0 && len(missing) == 0:
		return p.restart(ctx, "")
	case err != nil && !p.overdue(limit):
		return err
	case !p.overdue(limit):
		return p.wakeAll(ctx, left)
	// After --attach-timeout, the cases below start the instance, even if the pods cannot be read.
	case err != nil:
		return p.restart(ctx, fmt.Sprintf("what waits could not be read for %s: %v", limit, err))
	case len(left) == 0:
		return p.restart(ctx, fmt.Sprintf("Kubernetes did not ask for the volume %s of a pod on this "+
			"node within %s", missing[0], limit))
	default:
		return p.restart(ctx, fmt.Sprintf("%d VolumeAttachments were not done within %s, such as "+
			"%s; see its status", len(left), limit, left[0].Name))
	}
}

func (v *view) unsettled(n *node) []*attachment {
	return slices.DeleteFunc(v.of(n), func(a *attachment) bool { return a.settled(n.Record) })
}

func (p progress) restart(ctx context.Context, problem string) error {
	p.v.noteFailures(p.n)
	if problem != "" {
		return p.giveUp(ctx, problem)
	}
	return p.moveTo(ctx, starting, "the attacher is done; the instance is started")
}

// start asks the rack to start the instance until the instance runs. The operation ends without a
// start only if --start-timeout is over and the rack confirms that the instance is gone.
func (p progress) start(ctx context.Context) error {
	n, look := p.n, rack.Looking()
	state, err := p.k.instanceState(ctx, n.Record.Instance)
	_, heartbeat := n.ready()
	switch {
	case err == nil && state == oxide.InstanceStateRunning:
		p.k.stops.forget(n.Record.Instance)
		return p.moveTo(ctx, returning, "the instance runs; the node is expected back")
	case csierr.IsNotFound(err) && p.overdue(p.k.Config.StartTimeout) &&
		p.k.instanceGone(ctx, n.Record.Instance) == nil:
		return p.finish(ctx, "the rack no longer shows the instance "+n.Record.Instance)
	case p.overdue(p.k.Config.StartTimeout):
		// giveUp begins the step Starting again, so the problem is reported after each timeout.
		return p.giveUp(ctx, fmt.Sprintf("the instance does not run %s after its start was "+
			"requested; the keeper goes on trying: see the instance on the rack", p.k.Config.StartTimeout))
	case err != nil:
		return err
	case n.Record.Heartbeat.IsZero() && !heartbeat.IsZero():
		// The kubelet does not run now, so a newer heartbeat means that the node has come back.
		n.Record.Heartbeat = heartbeat
		return p.v.save(ctx, n)
	case state == oxide.InstanceStateStopped || state == oxide.InstanceStateFailed:
		return p.k.startInstance(ctx, look, n.Record.Instance)
	}
	return nil
}

func (p progress) awaitReturn(ctx context.Context) error {
	state, err := p.k.instanceState(ctx, p.n.Record.Instance)
	ready, heartbeat := p.n.ready()
	switch {
	case err == nil && state != oxide.InstanceStateRunning:
		return p.giveUp(ctx, fmt.Sprintf("the instance ran, and then was %s", state))
	case err == nil && ready && !heartbeat.Equal(p.n.Record.Heartbeat):
		return p.finish(ctx, "")
	case p.overdue(p.k.Config.ReturnTimeout):
		return p.k.Metrics.failed(returning, p.finish(ctx, fmt.Sprintf("the node was not ready %s after "+
			"its instance ran; see its kubelet", p.k.Config.ReturnTimeout)))
	}
	return err
}

// Anybody may start a stopped instance at any time; the controller of Cluster API's provider does
// it within ten seconds. So the keeper wakes the attacher as soon as the instance is stopped,
// before it records the step Attaching. The keeper attaches no disk itself: only the driver checks
// whose disk it is.

// pollEvery is the pause between two reads of a stopping instance's state. A round reads the state
// for at most pollFor.
const (
	pollEvery = 100 * time.Millisecond
	pollFor   = 4 * time.Second
)

func (p progress) awaitStopped(ctx context.Context) (oxide.InstanceState, error) {
	for end := time.Now().Add(pollFor); ; {
		state, err := p.k.instanceState(ctx, p.n.Record.Instance)
		if err != nil || state != oxide.InstanceStateStopping || time.Now().After(end) {
			return state, err
		}
		pause(ctx, pollEvery)
	}
}

// wakeAll makes the attacher try these attachments now, not at the end of its backoff: it tries at
// once when an annotation of a VolumeAttachment changes.
func (p progress) wakeAll(ctx context.Context, all []*attachment) error {
	var errs []error
	for _, a := range all {
		if value := a.wakeup(p.n.Record); a.Annotations[WokenAnnotation] != value {
			errs = append(errs, p.k.Kubernetes.annotate(ctx, a, WokenAnnotation, value))
		}
	}
	return errors.Join(errs...)
}
