package keeper

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// pace is how often the keeper looks while it works on a node.
const pace = time.Second

// lateStop is how long after an operation a stop of the instance may still be one that the keeper
// asked for: a request that was on its way when its sender died.
const lateStop = 2 * time.Minute

// staleAfter is the age at which a failed attempt says nothing any more: the attacher does not run,
// and would not use a stopped instance.
const staleAfter = 10 * time.Minute

// coldAttach continues what is in progress; if nothing is, it looks for a node to work on.
func (k *Keeper) coldAttach(ctx context.Context, v *view) (time.Duration, error) {
	busy := slices.DeleteFunc(slices.Clone(v.Nodes), func(n *node) bool { return n.Record == nil })
	// There is one at most, unless somebody copied annotations. Each has to come to its end.
	for _, n := range busy {
		if err := k.advance(ctx, v, n); err != nil {
			return pace, fmt.Errorf("node %s, %s: %w", n.Name, n.Record.Step, err)
		}
	}
	if len(busy) > 0 || !k.Config.ColdAttach {
		return pace, nil
	}
	if restarted, err := k.restartLateStopped(ctx, v); restarted || err != nil {
		return pace, err
	}
	return k.consider(ctx, v)
}

// restartLateStopped starts an instance that stopped right after the keeper had started it.
func (k *Keeper) restartLateStopped(ctx context.Context, v *view) (bool, error) {
	for _, n := range v.Nodes {
		if n.Last == nil || !n.Last.Stopped || n.Last.Late || v.Now.Sub(n.Last.Ended) > lateStop {
			continue
		}
		state, err := k.instanceState(ctx, n.Last.Instance)
		switch {
		case csierr.IsNotFound(err):
			continue
		case err != nil:
			return false, err
		case state != oxide.InstanceStateStopped && state != oxide.InstanceStateStopping:
			continue
		}
		n.Record = &record{Step: starting, Since: v.Now, Started: v.Now, Instance: n.Last.Instance,
			StatefulSets: n.Last.StatefulSets, Late: true, Problem: "the instance stopped after it had been started " +
				"again; a stop that was on its way may have come late"}
		return true, k.write(ctx, n, n.Record.Problem)
	}
	return false, nil
}

// consider begins an operation on the node that waits longest and may be stopped.
func (k *Keeper) consider(ctx context.Context, v *view) (time.Duration, error) {
	candidates := slices.DeleteFunc(slices.Clone(v.Nodes), func(n *node) bool {
		return len(v.waiting(n)) == 0
	})
	slices.SortFunc(candidates, func(a, b *node) int {
		return cmp.Or(v.oldest(a).Compare(v.oldest(b)), strings.Compare(a.Name, b.Name))
	})
	aside := false
	for _, n := range v.Nodes {
		if planned := slices.Contains(candidates, n) && n.allowed(); !planned {
			if err := k.plan(ctx, n, ""); err != nil {
				return pace, err
			}
		}
	}
	for _, n := range candidates {
		if !n.allowed() {
			continue
		}
		why, pods, err := k.hindrance(ctx, v, n)
		if err != nil {
			return pace, err
		}
		aside = aside || why == runsHere
		if why != "" {
			if err := k.plan(ctx, n, why); err != nil {
				return pace, err
			}
			continue
		}
		if k.Config.DryRun {
			if err := k.announce(ctx, v, n, pods, "would stop"); err != nil {
				return pace, err
			}
			continue
		}
		return pace, k.begin(ctx, v, n, pods)
	}
	if aside {
		return pace, ErrStepAside
	}
	return k.Config.Interval, nil
}

// oldest returns since when the first attachment of a node waits.
func (v *view) oldest(n *node) time.Time {
	return slices.MinFunc(v.waiting(n), func(a, b *attachment) int {
		return a.since().Compare(b.since())
	}).since()
}

// newest returns since when the last attachment of a node is wanted.
func (v *view) newest(n *node) time.Time {
	return slices.MaxFunc(v.of(n), func(a, b *attachment) int {
		return a.since().Compare(b.since())
	}).since()
}

// runsHere is why a keeper does not stop its own node.
const runsHere = "waits: the keeper runs here, and another replica has to take over"

// hindrance returns why an operation on a node may not begin now, or "" with the node's pods.
func (k *Keeper) hindrance(ctx context.Context, v *view, n *node) (string, sorted, error) {
	if why := k.hindranceOfNode(v, n); why != "" {
		return why, sorted{}, nil
	}
	pods, err := k.pods(ctx, v, n)
	if err != nil {
		return "", pods, err
	}
	switch {
	case pods.lost != "":
		return "waits: " + pods.lost + "; move it away, or remove the label " + ColdAttachLabel, pods, nil
	case pods.budget != "":
		return "waits: " + pods.budget, pods, nil
	}
	sets := statefulSets(pods.stay)
	for _, other := range v.Nodes {
		if other == n || other.Last == nil || !other.Last.Stopped ||
			v.Now.Sub(other.Last.Ended) >= k.Config.StatefulSetInterval {
			continue
		}
		for _, set := range sets {
			if slices.Contains(other.Last.StatefulSets, set) {
				return fmt.Sprintf("waits: the StatefulSet %s has pods here, and had some on the node %s, "+
					"which was stopped less than %s ago", set, other.Name,
					k.Config.StatefulSetInterval), pods, nil
			}
		}
	}
	return "", pods, nil
}

// hindranceOfNode is the part of hindrance that needs no further look at the cluster.
func (k *Keeper) hindranceOfNode(v *view, n *node) string {
	ready, _ := n.ready()
	settle := k.Config.Settle
	fresh := slices.ContainsFunc(v.waiting(n), func(a *attachment) bool {
		return v.Now.Sub(a.failure().Time.Time) < staleAfter
	})
	switch {
	case n.Unreadable != nil:
		return "waits: " + n.Unreadable.Error()
	case n.Instance == "":
		return "waits: the driver is not registered on this node"
	case n.Name == k.Config.NodeName:
		return runsHere
	case n.Spec.Unschedulable:
		return "waits: somebody cordoned this node"
	case !ready:
		return "waits: the node is not ready"
	case !fresh:
		return fmt.Sprintf("waits: the attacher has not tried for %s; see its log", staleAfter)
	case n.Last != nil && v.Now.Sub(n.Last.Ended) < k.Config.MinInterval:
		return fmt.Sprintf("waits: the last operation on this node was less than %s ago (--min-interval)",
			k.Config.MinInterval)
	case !k.Config.Window.open(v.Now):
		return fmt.Sprintf("waits for the maintenance window, %s", k.Config.Window)
	case v.Now.Sub(v.newest(n)) < settle && v.Now.Sub(v.oldest(n)) < 5*settle:
		return fmt.Sprintf("waits until nothing new has been asked for in %s (--settle)", settle)
	}
	return ""
}

// begin records the operation and cordons the node, in one update.
func (k *Keeper) begin(ctx context.Context, v *view, n *node, pods sorted) error {
	if err := k.announce(ctx, v, n, pods, "stops"); err != nil {
		return err
	}
	n.Record = &record{Step: draining, Since: v.Now, Started: v.Now, Instance: n.Instance,
		Cordoned: true, StatefulSets: statefulSets(pods.stay)}
	for _, a := range v.waiting(n) {
		n.Record.Waiting = append(n.Record.Waiting, a.Name)
	}
	n.Spec.Unschedulable = true
	return k.write(ctx, n, fmt.Sprintf("cordoned; %d pods are evicted, then the instance %s is stopped",
		len(pods.evict), n.Instance))
}

// advance takes the next step of an operation.
func (k *Keeper) advance(ctx context.Context, v *view, n *node) error {
	switch n.Record.Step {
	case draining:
		return k.drain(ctx, v, n)
	case stopping:
		return k.stop(ctx, v, n)
	case attaching:
		return k.attach(ctx, v, n)
	case starting:
		return k.start(ctx, v, n)
	case returning:
		return k.awaitReturn(ctx, v, n)
	}
	return fmt.Errorf("the annotation %s has the step %.40q, which this keeper does not know; see that "+
		"the instance runs, then remove the annotation", RecordAnnotation, n.Record.Step)
}

// overdue reports whether a step has taken longer than it may.
func (n *node) overdue(now time.Time, limit time.Duration) bool {
	return now.Sub(n.Record.Since) > limit
}

// to records the next step.
func (k *Keeper) to(ctx context.Context, v *view, n *node, next step, said string) error {
	k.Metrics.step(n.Record.Step, v.Now.Sub(n.Record.Since))
	n.Record.Step, n.Record.Since = next, v.Now
	return k.write(ctx, n, said)
}

// giveUp goes on to the end of an operation that has not reached its aim.
func (k *Keeper) giveUp(ctx context.Context, v *view, n *node, next step, problem string) error {
	k.Metrics.problem(n.Record.Step)
	n.Record.Problem = cmp.Or(n.Record.Problem, problem)
	return k.to(ctx, v, n, next, problem)
}

// finish ends an operation: it removes the record and the cordon in one update.
func (k *Keeper) finish(ctx context.Context, v *view, n *node, problem string) error {
	r := n.Record
	r.Problem = cmp.Or(r.Problem, problem)
	said := "done: the instance runs, and the node takes pods again"
	if r.Problem != "" {
		said = "ended without having done everything: " + r.Problem
	}
	if r.Cordoned {
		n.Spec.Unschedulable = false
	}
	delete(n.Annotations, RecordAnnotation)
	delete(n.Annotations, PlanAnnotation)
	setAnnotation(n.Node, LastAnnotation, outcome{Ended: v.Now, Instance: r.Instance,
		StatefulSets: r.StatefulSets, Stopped: r.Step != draining, Late: r.Late,
		Problem: r.Problem})
	if err := k.update(ctx, n); err != nil {
		return err
	}
	k.Metrics.operation(r.Problem)
	k.say(ctx, n.Node, r, "ColdAttachEnded", said)
	return nil
}

// drain evicts what would not come back to the node.
func (k *Keeper) drain(ctx context.Context, v *view, n *node) error {
	switch {
	case n.Name == k.Config.NodeName:
		return k.finish(ctx, v, n, "the keeper that continues runs on this node itself")
	case !n.Spec.Unschedulable:
		return k.finish(ctx, v, n, "somebody uncordoned the node")
	case !n.allowed():
		return k.finish(ctx, v, n, "somebody removed the label "+ColdAttachLabel)
	case !k.Config.ColdAttach, k.Config.DryRun:
		return k.finish(ctx, v, n, "the keeper was told to stop no instances any more")
	case len(v.waiting(n)) == 0:
		return k.finish(ctx, v, n, "nothing waits any more")
	}
	pods, err := k.pods(ctx, v, n)
	if err != nil {
		return err
	}
	switch {
	case pods.lost != "":
		return k.finish(ctx, v, n, pods.lost)
	case len(pods.evict) == 0 && pods.budget == "":
		n.Record.StatefulSets = statefulSets(pods.stay)
		return k.to(ctx, v, n, stopping, "drained; the instance "+n.Record.Instance+" is stopped")
	case n.overdue(v.Now, k.Config.DrainTimeout):
		k.Metrics.problem(draining)
		if len(pods.evict) == 0 {
			return k.finish(ctx, v, n, pods.budget)
		}
		return k.finish(ctx, v, n, fmt.Sprintf("%d pods were still there after %s, such as %s/%s; see its "+
			"PodDisruptionBudget and its finalizers", len(pods.evict), k.Config.DrainTimeout,
			pods.evict[0].Namespace, pods.evict[0].Name))
	}
	return k.evict(ctx, pods.evict)
}

// stop stops the instance.
func (k *Keeper) stop(ctx context.Context, v *view, n *node) error {
	state, err := k.instanceState(ctx, n.Record.Instance)
	switch {
	case n.Name == k.Config.NodeName:
		return k.giveUp(ctx, v, n, starting, "the keeper that continues runs on this node itself")
	case n.overdue(v.Now, k.Config.StopTimeout):
		return k.giveUp(ctx, v, n, starting, fmt.Sprintf("the instance was not stopped within %s",
			k.Config.StopTimeout))
	case err != nil:
		return err
	}
	switch state {
	case oxide.InstanceStateStopped:
		return k.to(ctx, v, n, attaching, "the instance is stopped; the attacher works")
	case oxide.InstanceStateStopping:
		return nil
	case oxide.InstanceStateFailed:
		return k.giveUp(ctx, v, n, starting, "the instance failed while it was being stopped")
	}
	return k.stopInstance(ctx, n.Record.Instance)
}

// attach wakes the attacher until it has nothing more to do on the node.
func (k *Keeper) attach(ctx context.Context, v *view, n *node) error {
	state, err := k.instanceState(ctx, n.Record.Instance)
	switch {
	case err == nil && state != oxide.InstanceStateStopped:
		return k.restart(ctx, v, n, fmt.Sprintf("somebody started the instance; it is %s", state))
	}
	left := slices.DeleteFunc(v.of(n), func(a *attachment) bool { return a.settled(n.Record) })
	switch {
	case len(left) == 0:
		return k.restart(ctx, v, n, "")
	case n.overdue(v.Now, k.Config.AttachTimeout):
		return k.restart(ctx, v, n, fmt.Sprintf("%d VolumeAttachments were not done within %s, such as %s; "+
			"see its status", len(left), k.Config.AttachTimeout, left[0].Name))
	}
	for _, a := range left {
		if err := k.wake(ctx, a, n.Record); err != nil {
			return err
		}
	}
	return nil
}

// restart goes on to the instance's start.
func (k *Keeper) restart(ctx context.Context, v *view, n *node, problem string) error {
	if problem != "" {
		return k.giveUp(ctx, v, n, starting, problem)
	}
	return k.to(ctx, v, n, starting, "the attacher is done; the instance is started")
}

// start starts the instance. It does not give up, except for an instance that the rack has not shown
// for as long as a start may take.
func (k *Keeper) start(ctx context.Context, v *view, n *node) error {
	state, err := k.instanceState(ctx, n.Record.Instance)
	switch {
	case err == nil && state == oxide.InstanceStateRunning:
		return k.to(ctx, v, n, returning, "the instance runs; the node is expected back")
	case n.overdue(v.Now, k.Config.StartTimeout) && csierr.IsNotFound(err):
		return k.finish(ctx, v, n, "the rack no longer shows the instance "+n.Record.Instance)
	case n.overdue(v.Now, k.Config.StartTimeout):
		// The step begins anew, so that people hear of it again.
		return k.giveUp(ctx, v, n, starting, fmt.Sprintf("the instance does not run %s after its start was "+
			"asked for; the keeper goes on trying: see the instance on the rack", k.Config.StartTimeout))
	case err != nil:
		return err
	case n.Record.Heartbeat.IsZero():
		// No kubelet runs there now, so the next heartbeat is that of the node that has come back.
		_, n.Record.Heartbeat = n.ready()
		setAnnotation(n.Node, RecordAnnotation, n.Record)
		return k.update(ctx, n)
	case state == oxide.InstanceStateStopped || state == oxide.InstanceStateFailed:
		return k.startInstance(ctx, n.Record.Instance)
	}
	return nil
}

// awaitReturn waits for the node.
func (k *Keeper) awaitReturn(ctx context.Context, v *view, n *node) error {
	state, err := k.instanceState(ctx, n.Record.Instance)
	ready, heartbeat := n.ready()
	switch {
	case err == nil && state != oxide.InstanceStateRunning:
		return k.giveUp(ctx, v, n, starting, fmt.Sprintf("the instance ran, and then was %s", state))
	case err == nil && ready && !heartbeat.Equal(n.Record.Heartbeat):
		return k.finish(ctx, v, n, "")
	case n.overdue(v.Now, k.Config.ReturnTimeout):
		k.Metrics.problem(returning)
		return k.finish(ctx, v, n, fmt.Sprintf("the node was not ready %s after its instance ran; see its "+
			"kubelet", k.Config.ReturnTimeout))
	}
	return err
}

// announce says on the node, the claims and the pods what is going to happen, and why.
func (k *Keeper) announce(ctx context.Context, v *view, n *node, pods sorted, verb string) error {
	waiting := v.waiting(n)
	text := fmt.Sprintf("%s the instance %s for %d volumes that wait (%s); %d pods are evicted, %d stay "+
		"and stop with it", verb, n.Instance, len(waiting), volumesText(waiting), len(pods.evict),
		len(pods.stay))
	if n.Annotations[PlanAnnotation] == text {
		return nil
	}
	if err := k.plan(ctx, n, text); err != nil {
		return err
	}
	k.say(ctx, n.Node, nil, "ColdAttachPlanned", text)
	k.sayToUsers(ctx, v, n, pods, "the node keeper "+text)
	return nil
}

// volumesText names the first of the volumes.
func volumesText(all []*attachment) string {
	names := []string{}
	for _, a := range all {
		names = append(names, a.volume())
	}
	slices.Sort(names)
	if len(names) > 3 {
		return strings.Join(names[:3], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}
