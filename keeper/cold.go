package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

const pace = time.Second // the pause between two rounds during an operation

// lateStop is how long after an operation a stop of the instance still counts as the keeper's own.
// A keeper that has died may have sent the request for this stop.
const lateStop = 2 * time.Minute

// staleAfter is the time without an attempt after which an attacher counts as not running. The
// keeper stops no instance for an attacher that does not run.
const staleAfter = 10 * time.Minute

func (k *Keeper) coldAttach(ctx context.Context, v *view) (time.Duration, error) {
	if restarted, err := k.restartLateStopped(ctx, v); restarted || err != nil {
		return pace, err
	}
	busy := slices.DeleteFunc(slices.Clone(v.Nodes), func(n *node) bool { return n.Record == nil })
	// More than one node is busy only if somebody edited the records. Bring each operation to its end.
	errs := []error{k.holdBack(ctx, v)}
	for _, n := range busy {
		if err := (progress{k, v, n}).advance(ctx); err != nil {
			errs = append(errs, fmt.Errorf("node %s, %s: %w", n.Name, n.Record.Step, err))
		}
	}
	switch {
	case len(busy) > 0:
		return pace, errors.Join(errs...)
	case !k.Config.ColdAttach:
		return k.Config.Interval, errors.Join(errs...)
	}
	again, err := k.consider(ctx, v)
	return again, errors.Join(append(errs, err)...)
}

// restartLateStopped looks for an instance that stopped within lateStop after its node's last
// operation. It begins an operation that only starts the first such instance, and returns true. It
// does this even if cold attach is off, because the keeper requested the stop. Nodes whose label
// was removed after the operation are skipped. When lateStop has passed, only nodes that are not
// ready are checked, in case no leader ran meanwhile.
func (k *Keeper) restartLateStopped(ctx context.Context, v *view) (bool, error) {
	for _, n := range v.Nodes {
		if n.Record != nil || n.gone || n.Last == nil || !n.Last.Stopped || n.Last.Late ||
			ahead(v.Now, n.Last.Ended) || !n.allowed() && !n.Last.Unlabeled ||
			n.Instance != "" && n.Instance != n.Last.Instance {
			continue
		}
		if ready, _ := n.ready(); ready && v.Now.Sub(n.Last.Ended) > lateStop {
			continue
		}
		instance, err := k.instance(ctx, n.Last.Instance)
		switch {
		case csierr.IsNotFound(err):
			continue
		case err != nil:
			// This error must not delay an operation on another node.
			k.Log.WarnContext(ctx, "not known whether an instance stopped late", "node", n.Name,
				"error", err)
			continue
		case instance.RunState != oxide.InstanceStateStopped &&
			instance.RunState != oxide.InstanceStateStopping,
			instance.TimeRunStateUpdated != nil && instance.TimeRunStateUpdated.Sub(n.Last.Ended) > lateStop:
			continue
		}
		n.Record = &operation{Step: starting, Since: v.Now, Started: v.Now, Instance: n.Last.Instance,
			StatefulSets: slices.Sorted(maps.Keys(n.Last.StoppedWith)), Late: true,
			Problem: "the instance stopped after it had been started again; a stop that was on its way " +
				"may have come late"}
		return true, k.write(ctx, v, n, n.Record.Problem)
	}
	return false, nil
}

// consider begins an operation on the longest-waiting node that may be stopped.
func (k *Keeper) consider(ctx context.Context, v *view) (time.Duration, error) {
	candidates := slices.DeleteFunc(slices.Clone(v.Nodes), func(n *node) bool {
		return !n.allowed() || len(v.due(n)) == 0
	})
	slices.SortFunc(candidates, func(a, b *node) int {
		return cmp.Or(v.oldest(a).Compare(v.oldest(b)), strings.Compare(a.Name, b.Name))
	})
	aside := false
	var errs []error // of all nodes
	for _, n := range v.Nodes {
		switch {
		case !n.allowed():
			errs = append(errs, k.plan(ctx, n, ""))
		case !slices.Contains(candidates, n):
			errs = append(errs, k.plan(ctx, n, v.held(n)))
		}
	}
	for _, c := range k.candidates(ctx, v, candidates) {
		aside = aside || c.why == runsHere
		switch {
		case c.err != nil:
		case c.why != "":
			c.err = k.plan(ctx, c.node, c.why)
		case k.Config.DryRun:
			c.err = k.announce(ctx, v, c.node, c.pods, "would stop")
		default:
			c.err = k.begin(ctx, v, c.node, c.pods)
			if c.Record != nil { // even after an error: the record may have been written
				return pace, errors.Join(append(errs, c.err)...)
			}
		}
		errs = append(errs, c.err)
	}
	if err := errors.Join(errs...); err != nil || !aside {
		return k.Config.Interval, err
	}
	return pace, ErrStepAside
}

// candidate is a node with volumes that wait for a stop. Its field why is the obstacle, or "".
type candidate struct {
	*node
	pods sorted
	why  string
	err  error
	// next reports whether the only obstacle is a recent stop of another node with pods of the same
	// StatefulSet. Then turnOfAnother can let this node go first.
	next bool
}

func (k *Keeper) candidates(ctx context.Context, v *view, nodes []*node) []*candidate {
	var all []*candidate
	for _, n := range nodes {
		c := &candidate{node: n}
		if c.why, c.pods, c.err = k.hindrance(ctx, v, n); c.why == "" && c.err == nil {
			c.why = k.stoppedElsewhere(v, n, c.pods)
			c.next = c.why != ""
		}
		all = append(all, c)
	}
	for _, c := range all {
		if c.why == "" && c.err == nil {
			c.why = c.turnOfAnother(v, all)
		}
		// Check last whether the keeper runs on the node: if this is the only obstacle, another replica
		// can lead. In a dry run, any replica can report what would be done.
		if c.why == "" && c.err == nil && c.Name == k.Config.NodeName && !k.Config.DryRun {
			c.why = runsHere
		}
	}
	return all
}

// stoppedElsewhere returns an obstacle if another node with pods of the same StatefulSet was
// stopped less than --stateful-set-interval ago, otherwise "".
func (k *Keeper) stoppedElsewhere(v *view, n *node, pods sorted) string {
	for _, other := range v.Nodes {
		if other == n || other.Last == nil {
			continue
		}
		for _, set := range statefulSets(pods.stay) {
			if !passed(v.Now, other.Last.StoppedWith[set], k.Config.StatefulSetInterval-1) {
				return fmt.Sprintf("waits: the StatefulSet %s has pods here, and had some on the node %s, "+
					"which was stopped less than %s ago", set, other.Name, k.Config.StatefulSetInterval)
			}
		}
	}
	return ""
}

// turnOfAnother returns why c must wait for another node, or "". It must if both nodes have pods of
// the same StatefulSet, and the other node has waited since before c's last stop. A second stop of
// c would restart the StatefulSet's interval, and the other node would wait even longer.
func (c *candidate) turnOfAnother(v *view, all []*candidate) string {
	sets := statefulSets(c.pods.stay)
	for _, other := range all {
		if !other.next || c.Last == nil || !v.oldest(other.node).Before(c.Last.Ended) {
			continue
		}
		for _, set := range statefulSets(other.pods.stay) {
			if slices.Contains(sets, set) {
				return fmt.Sprintf("waits: the node %s is next: it has pods of the StatefulSet %s, too, and "+
					"has waited since before this node's last stop", other.Name, set)
			}
		}
	}
	return ""
}

func (v *view) oldest(n *node) time.Time {
	return slices.MinFunc(v.due(n), bySince).since()
}

func (v *view) newest(n *node) time.Time {
	return slices.MaxFunc(v.of(n), bySince).since()
}

func bySince(a, b *attachment) int { return a.since().Compare(b.since()) }

const runsHere = "waits: the keeper runs here, and another replica has to take over"

// hindrance returns why no operation can begin on a node now, or "" and the node's pods. It does
// not check for recent stops of other nodes, because stoppedElsewhere does.
func (k *Keeper) hindrance(ctx context.Context, v *view, n *node) (string, sorted, error) {
	if why := k.hindranceOfNode(v, n); why != "" {
		return why, sorted{}, nil
	}
	pods, err := v.pods(ctx, n)
	switch {
	case err != nil:
		return "", pods, err
	case pods.lost != "":
		return "waits: " + pods.lost + "; move it away, or remove the label " + ColdAttachLabel, pods, nil
	case pods.budget != "":
		return "waits: " + pods.budget, pods, nil
	}
	return "", pods, nil
}

func (k *Keeper) hindranceOfNode(v *view, n *node) string {
	ready, _ := n.ready()
	settle := k.Config.Settle
	fresh := slices.ContainsFunc(v.due(n), func(a *attachment) bool {
		return v.Now.Sub(a.failure().Time.Time) < staleAfter
	})
	switch {
	case n.Instance == "":
		return "waits: " + n.Unclear
	case v.doubtful(n) != "":
		return "waits: " + v.doubtful(n)
	case n.Spec.Unschedulable:
		return "waits: somebody cordoned this node"
	case !ready:
		return "waits: the node is not ready"
	case !fresh:
		return fmt.Sprintf("waits: the attacher has not tried for %s; see its log", staleAfter)
	case n.Last != nil && !passed(v.Now, n.Last.Ended, k.Config.pauseAfter(n.Last)-1):
		return fmt.Sprintf("waits: the last operation on this node was less than %s ago "+
			"(--min-interval, twice as long after each failure)", k.Config.pauseAfter(n.Last))
	case !k.Config.Window.open(v.Now):
		return fmt.Sprintf("waits for the maintenance window, %s", k.Config.Window)
	case !passed(v.Now, v.newest(n), settle) && !passed(v.Now, v.oldest(n), 5*settle):
		return fmt.Sprintf("waits until no further volume has begun to wait within %s (--settle)", settle)
	}
	return ""
}

// controlPlane is the label of nodes that run the API server. The keeper stops none of them,
// because it needs that server to read its records.
const controlPlane = "node-role.kubernetes.io/control-plane"

// doubtful returns why the cluster may need the node's instance to run now, or "".
func (v *view) doubtful(n *node) string {
	if n.DeletionTimestamp != nil {
		return "the Node is being deleted"
	}
	if _, control := n.Labels[controlPlane]; control {
		return "the keeper stops no node of the control plane"
	}
	for _, other := range v.Nodes {
		ready, _ := other.ready()
		switch {
		case other == n:
		case other.Record != nil:
			return fmt.Sprintf("an operation is in progress on the node %s, too", other.Name)
		case !ready && other.allowed():
			return fmt.Sprintf("the node %s, which may be stopped, too, is not ready", other.Name)
		}
	}
	return ""
}

// pauseAfter returns the pause between two operations on a node. Each of the first four failures in
// a row doubles the pause, so that the keeper does not cordon the node again and again.
func (c *Config) pauseAfter(last *outcome) time.Duration {
	return c.MinInterval << max(0, min(last.Failures, 4))
}

func (k *Keeper) begin(ctx context.Context, v *view, n *node, pods sorted) error {
	if err := k.announce(ctx, v, n, pods, "stops"); err != nil {
		return err
	}
	n.Record = &operation{Step: draining, Since: v.Now, Started: v.Now, Instance: n.Instance,
		StatefulSets: statefulSets(pods.stay)}
	for _, a := range v.due(n) {
		n.Record.Waiting = append(n.Record.Waiting, a.Name)
	}
	err := k.write(ctx, v, n, fmt.Sprintf("the node is cordoned and %d pods are evicted, then the "+
		"instance %s is stopped", len(pods.evict), n.Instance))
	if err != nil {
		return err
	}
	return k.Kubernetes.cordon(ctx, n)
}

// cordon fails with a conflict if somebody has changed the Node since it was read.
func (c *Cluster) cordon(ctx context.Context, n *node) error {
	n.Spec.Unschedulable = true
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, CordonAnnotation, n.Record.id())
	return c.update(ctx, n)
}

func (k *Keeper) announce(ctx context.Context, v *view, n *node, pods sorted, verb string) error {
	waiting := v.due(n)
	text := planText(n, waiting, waiting, pods, verb)
	if n.Annotations[PlanAnnotation] == text {
		return nil
	}
	if err := k.plan(ctx, n, text); err != nil {
		return err
	}
	k.report(ctx, n.Node, nil, "ColdAttachPlanned", text)
	k.reportToUsers(ctx, v, n, pods, verb)
	return nil
}

// planText describes what the keeper does, or would do, to a node. It counts the attachments in the
// parameter waiting, but names only the volumes in named, which its readers are allowed to see.
func planText(n *node, waiting, named []*attachment, pods sorted, verb string) string {
	names := ""
	if len(named) > 0 {
		names = " (" + volumesText(named) + ")"
	}
	return fmt.Sprintf("%s the instance %s for %d volumes that wait%s; %d pods are evicted, %d stay "+
		"and stop with it", verb, n.Instance, len(waiting), names, len(pods.evict), len(pods.stay))
}

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

// The rest of the file limits how often the keeper stops instances. The earlier stops of a node and
// of its volumes are in outcome.Node and outcome.Volumes.

// AgainAnnotation makes the keeper forget earlier stops when a person changes its value: on a
// PersistentVolume, the stops for that volume; on the ConfigMap of records, the stops of all nodes.
const AgainAnnotation = DriverName + "/cold-attach-again"

// HeldAnnotation on a VolumeAttachment is the reason why the keeper stops no instance for it.
const HeldAnnotation = DriverName + "/cold-attach-held"

const day = 24 * time.Hour

// cause describes a volume, at the time when an instance was stopped for it.
type cause struct {
	// Disk is the volume's disk. Again is the value of the PersistentVolume's AgainAnnotation.
	Disk   string `json:"disk,omitempty"`
	Again  string `json:"again,omitempty"`
	Detach bool   `json:"detach,omitempty"`
	// Failed is the attacher's error while the instance was stopped. If it is not empty, bound()
	// forbids another stop until the volume changes.
	Failed string `json:"failed,omitempty"`
}

type history struct {
	Stops []time.Time `json:"stops,omitempty"`
	// Last describes the volume at the last stop. In a node's history only Again is set.
	Last cause `json:"last,omitzero"`
}

func (h history) within(now time.Time) []time.Time {
	return slices.DeleteFunc(slices.Clone(h.Stops), func(at time.Time) bool {
		return now.Sub(at) >= day
	})
}

// stopped returns h with one more stop. If AgainAnnotation has changed, it drops the earlier stops.
func (h history) stopped(at time.Time, c cause) history {
	if h.Last.Again != c.Again {
		h.Stops = nil
	}
	return history{Stops: append(h.within(at), at), Last: c}
}

func (o *outcome) remember(before *outcome, r *operation, now time.Time, again string) {
	o.Node, o.Volumes = before.Node, map[string]history{}
	maps.Copy(o.Volumes, before.Volumes)
	if o.Stopped && !r.Late {
		o.Node = o.Node.stopped(now, cause{Again: again})
		for name, c := range r.Volumes {
			o.Volumes[name] = o.Volumes[name].stopped(now, c)
		}
	}
	maps.DeleteFunc(o.Volumes, func(_ string, h history) bool {
		return h.Last.Failed == "" && len(h.within(now)) == 0
	})
}

// holdBack sets the field held of each waiting attachment, and reports the values that changed.
func (k *Keeper) holdBack(ctx context.Context, v *view) error {
	held := 0
	var errs []error
	for _, n := range v.Nodes {
		for _, a := range v.waiting(n) {
			if !k.Config.ColdAttach {
				continue // the keeper stops no instances
			}
			pods, err := v.podsOn(ctx, n)
			if err = errors.Join(err, v.readVolumes(ctx)); err != nil {
				a.held = err.Error() // until a round can read the pods and the volumes
				errs = append(errs, err)
				continue
			}
			if a.held = cmp.Or(v.unfounded(a, pods), k.bound(v, n, a)); a.held != "" {
				held++
			}
		}
	}
	k.Metrics.holds.Set(float64(held))
	if !k.Config.ColdAttach || k.Config.DryRun || len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, n := range v.Nodes {
		for _, a := range v.of(n) {
			errs = append(errs, k.reportHeld(ctx, v, n, a))
		}
	}
	return errors.Join(errs...)
}

// bound returns why the node must not be stopped again for an attachment, or "".
//
// If an attachment failed while the instance was stopped, bound forbids another stop until the
// volume changes. If passes() is true for the failure, only the limits on stops per day apply.
func (k *Keeper) bound(v *view, n *node, a *attachment) string {
	last := cmp.Or(n.Last, &outcome{})
	now, then := v.cause(a), last.Volumes[a.volume()].Last
	failed := then.Failed
	then.Failed = ""
	if failed != "" && then == now && last.Instance == n.Instance {
		return fmt.Sprintf("the volume %s failed while the instance was stopped, and nothing about it "+
			"has changed since: %s; mend that, then %s", a.volume(), failed, again("pv", a.volume()))
	}
	stops := 0
	for _, o := range v.Nodes {
		if o.Last != nil && o.Last.Volumes[a.volume()].Last.Again == now.Again {
			stops += len(o.Last.Volumes[a.volume()].within(v.Now))
		}
	}
	switch {
	case stops >= k.Config.MaxStopsPerVolume:
		return fmt.Sprintf("instances were stopped %d times in 24 hours for the volume %s "+
			"(--max-stops-per-volume); see why it is not done, then %s", stops, a.volume(),
			again("pv", a.volume()))
	case last.Node.Last.Again == v.again() && len(last.Node.within(v.Now)) >= k.Config.MaxStopsPerNode:
		return fmt.Sprintf("the instance was stopped %d times in 24 hours (--max-stops-per-node); see "+
			"for what, then %s", len(last.Node.within(v.Now)), again("--namespace "+k.Namespace+
			" configmap", RecordsName))
	}
	return ""
}

func again(kind, name string) string {
	return fmt.Sprintf("run kubectl annotate --overwrite %s %s %s=\"$(date)\"", kind, name,
		AgainAnnotation)
}

func (v *view) again() string { return v.records.Annotations[AgainAnnotation] }

// reportHeld writes a.held to HeldAnnotation if it has changed, and creates events unless it is "".
func (k *Keeper) reportHeld(ctx context.Context, v *view, n *node, a *attachment) error {
	if a.Annotations[HeldAnnotation] == a.held || n.Record != nil || !n.allowed() {
		return nil
	}
	if err := k.Kubernetes.annotate(ctx, a, HeldAnnotation, a.held); err != nil || a.held == "" {
		return err
	}
	message := "waits, and the keeper does not stop the instance for it: " + a.held
	k.warn(ctx, nodeReference(n.Node), "ColdAttachHeld", message)
	for _, volume := range v.claims {
		if volume.Name == a.volume() {
			k.warn(ctx, *volume.Spec.ClaimRef, "ColdAttachHeld", message)
		}
	}
	return nil
}

func (v *view) causes(n *node) map[string]cause {
	causes := map[string]cause{}
	for _, a := range v.due(n) {
		causes[a.volume()] = v.cause(a)
	}
	return causes
}

func (v *view) cause(a *attachment) cause {
	c, volume := cause{Detach: a.DeletionTimestamp != nil}, v.persistentVolume(a.volume())
	if c.Again = volume.Annotations[AgainAnnotation]; volume.Spec.CSI != nil {
		c.Disk = volume.Spec.CSI.VolumeHandle
	}
	return c
}

// noteFailures records the errors of attachments that failed while the instance was stopped, if
// another stop would not help.
func (v *view) noteFailures(n *node) {
	for _, a := range v.of(n) {
		c, caused := n.Record.Volumes[a.volume()]
		if caused && a.open() && a.settled(n.Record) && c.Detach == (a.DeletionTimestamp != nil) {
			c.Failed = shortened(a.failure().Message)
			n.Record.Volumes[a.volume()] = c
		}
	}
}

func (r *operation) failures() string {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(r.Volumes)) {
		if failed := r.Volumes[name].Failed; failed != "" {
			text += fmt.Sprintf("; the volume %s failed while the instance was stopped: %s", name, failed)
		}
	}
	return text
}

func shortened(text string) string {
	const most = 300
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

func (v *view) persistentVolume(name string) *corev1.PersistentVolume {
	for i := range v.volumes {
		if v.volumes[i].Name == name {
			return &v.volumes[i]
		}
	}
	return &corev1.PersistentVolume{}
}

// nodeReference refers to a Node as the kubelet's events do: the UID is the node's name. kubectl
// describe looks for events with that UID.
func nodeReference(n *corev1.Node) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: types.UID(n.Name)}
}
