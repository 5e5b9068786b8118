package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

func (k *Keeper) observe(ctx context.Context) (*view, error) {
	all := metav1.ListOptions{}
	look := rack.Looking()
	// Read the records first, so that save() fails if another keeper writes them after this read.
	found, records, err := k.Kubernetes.records(ctx, k.Namespace)
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
	v.Look, v.records, v.cluster = look, found, k.Kubernetes
	k.Metrics.observe(v, k.Config.ColdAttach && !k.Config.DryRun)
	return v, nil
}

func (v *view) sorted(ctx context.Context, n *node) (sorted, []corev1.Pod, error) {
	if err := v.readVolumes(ctx); err != nil {
		return sorted{}, nil, err
	}
	own, err := v.podsOn(ctx, n)
	return sortPods(own, v.claims), own, err
}

func (v *view) readVolumes(ctx context.Context) error {
	if v.claims != nil {
		return nil
	}
	volumes, err := v.cluster.Core.PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list PersistentVolumes: %w", err)
	}
	claims, err := v.cluster.Core.PersistentVolumeClaims(metav1.NamespaceAll).List(ctx,
		metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list PersistentVolumeClaims: %w", err)
	}
	v.volumes = volumes.Items
	v.claims = claimsOf(v.volumes, claims.Items)
	return nil
}

// pods groups the pods on a node, and checks whether a PodDisruptionBudget forbids a stop.
func (v *view) pods(ctx context.Context, n *node) (sorted, error) {
	s, own, err := v.sorted(ctx, n)
	if err != nil {
		return s, err
	}
	if v.budgets == nil {
		budgets, err := v.cluster.Policy.PodDisruptionBudgets(metav1.NamespaceAll).List(ctx,
			metav1.ListOptions{})
		if err != nil {
			return s, fmt.Errorf("list PodDisruptionBudgets: %w", err)
		}
		v.budgets = append([]policyv1.PodDisruptionBudget{}, budgets.Items...)
	}
	for i := range v.budgets {
		if err := v.cluster.recount(ctx, &v.budgets[i], s.stay); err != nil {
			return s, err
		}
	}
	waiting := waitingPods(own, v.claims, v.waiting(n))
	s.budget = exhausted(v.budgets, s, waiting)
	for _, other := range v.Nodes {
		// Waiting pods can only make a budget permit the stop. If none forbids it, skip other nodes.
		if s.budget == "" || other == n || len(v.waiting(other)) == 0 {
			continue
		}
		pods, err := v.podsOn(ctx, other)
		if err != nil {
			return s, err
		}
		waiting = append(waiting, waitingPods(pods, v.claims, v.waiting(other))...)
		s.budget = exhausted(v.budgets, s, waiting)
	}
	return s, nil
}

// recount lowers a budget's currentHealthy to the number of healthy pods that exist, if the budget
// covers a healthy pod in stay. Kubernetes may still count a pod that was just evicted or deleted.
func (c *Cluster) recount(ctx context.Context, b *policyv1.PodDisruptionBudget,
	stay []*corev1.Pod) error {
	if !slices.ContainsFunc(stay, func(p *corev1.Pod) bool { return healthy(p) && covers(b, p) }) {
		return nil
	}
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return fmt.Errorf("the PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	pods, err := c.Core.Pods(b.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: selector.String()})
	if err != nil {
		return fmt.Errorf("list the Pods of the PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	there := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return !healthy(&p) })
	b.Status.CurrentHealthy = min(b.Status.CurrentHealthy, int32(len(there)))
	return nil
}

func (v *view) podsOn(ctx context.Context, n *node) ([]corev1.Pod, error) {
	if pods, known := v.nodePods[n.Name]; known {
		return pods, nil
	}
	pods, err := v.cluster.Core.Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", n.Name).String()})
	if err != nil {
		return nil, fmt.Errorf("list Pods: %w", err)
	}
	v.nodePods[n.Name] = pods.Items
	return pods.Items, nil
}

func (k *Keeper) write(ctx context.Context, v *view, n *node, message string) error {
	if err := v.save(ctx, n); err != nil {
		return err
	}
	k.report(ctx, n.Node, n.Record, "ColdAttach"+string(n.Record.Step), message)
	return nil
}

// update writes a changed Node. If somebody else has changed it since it was read, the write fails
// with a conflict, and the next round reads the Node again.
func (c *Cluster) update(ctx context.Context, n *node) error {
	updated, err := c.Core.Nodes().Update(ctx, n.Node, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("update the Node: %w", err)
	}
	n.Node = updated
	return nil
}

// plan sets a Node's PlanAnnotation, or removes it if the text is "".
func (k *Keeper) plan(ctx context.Context, n *node, text string) error {
	if n.Annotations[PlanAnnotation] == text {
		return nil
	}
	if text != "" {
		k.Log.InfoContext(ctx, "cold attach", "node", n.Name, "plan", text)
	}
	// With resourceVersion, the patch fails if the Node has changed since the plan was made.
	updated, err := k.Kubernetes.Core.Nodes().Patch(ctx, n.Name, types.MergePatchType,
		annotation(PlanAnnotation, text, "resourceVersion", n.ResourceVersion), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("annotate the Node %s: %w", n.Name, err)
	}
	n.Node = updated
	return nil
}

// annotate sets a VolumeAttachment's annotation, or removes it if the value is "".
func (c *Cluster) annotate(ctx context.Context, a *attachment, key, value string) error {
	// With the UID, the API server does not annotate a later VolumeAttachment of the same name.
	_, err := c.Storage.VolumeAttachments().Patch(ctx, a.Name, types.MergePatchType,
		annotation(key, value, "uid", string(a.UID)), metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("annotate the VolumeAttachment %s: %w", a.Name, err)
	}
	return nil
}

// annotation returns the merge patch that sets an annotation, or removes it if the value is "". The
// API server refuses the patch unless the object's metadata.<field> equals the parameter "has".
func annotation(key, value, field, has string) []byte {
	set := &value
	if value == "" {
		set = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{field: has,
		"annotations": map[string]any{key: set}}})
	if err != nil {
		panic(err) // JSON can encode every annotation
	}
	return patch
}

// evict requests the eviction of pods. A budget's refusal is counted, but is no error.
func (k *Keeper) evict(ctx context.Context, pods []*corev1.Pod) error {
	var errs []error
	for _, p := range pods {
		if p.DeletionTimestamp != nil {
			continue
		}
		done, err := k.Kubernetes.evict(ctx, p)
		switch {
		case apierrors.IsTooManyRequests(err):
			k.Metrics.evictions.WithLabelValues("refused").Inc()
		case done:
			k.Metrics.evictions.WithLabelValues("accepted").Inc()
			k.Log.InfoContext(ctx, "evicted", "pod", p.Namespace+"/"+p.Name, "node", p.Spec.NodeName)
		default:
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// evict requests the eviction of a pod, but not of a later pod of the same name, which has another
// UID. If the pod is gone, evict returns false and no error.
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

// These are the keeper's labels and annotations, and the name of its ConfigMap of records. Nodes do
// not contain the records, because a kubelet has the right to change its Node's annotations.
const (
	DriverName = "csi.oxide.computer"

	// ColdAttachLabel with the value Allowed allows the keeper to stop a node's instance.
	ColdAttachLabel = DriverName + "/cold-attach"
	Allowed         = "allowed"

	// CordonAnnotation on a Node contains the id of the operation that cordoned it.
	CordonAnnotation = DriverName + "/cold-attach"
	// PlanAnnotation on a Node tells what the keeper plans for the node, or why it plans nothing.
	PlanAnnotation = DriverName + "/cold-attach-plan"

	// WokenAnnotation makes the attacher try a VolumeAttachment at once. wakeup() returns its value.
	WokenAnnotation = DriverName + "/woken"

	// RecordsName is the name of the ConfigMap of records. A key is the UID of a Node, and the value
	// is the node's record in JSON.
	RecordsName = component
)

type record struct {
	NodeName string `json:"node"`
	// Record is the operation in progress, or nil. Last is the outcome of the previous operation.
	Record *operation `json:"operation,omitempty"`
	Last   *outcome   `json:"last,omitempty"`
	// Fenced is the instance for which the keeper set the node's out-of-service taint.
	Fenced string `json:"fenced,omitempty"`
}

// step is a step of an operation. The keeper first records a step and then takes it, so after a
// crash it is unknown whether the step had its effect.
type step string

const (
	// draining: the keeper cordons the node, and evicts the pods without volumes of the driver.
	draining step = "Draining"
	// stopping: the keeper asks the rack to stop the instance, and waits until it is stopped.
	stopping step = "Stopping"
	// attaching: the instance is stopped, and the attacher attaches and detaches disks.
	attaching step = "Attaching"
	// starting: the keeper asks the rack to start the instance until it runs.
	starting step = "Starting"
	// returning: the instance runs, and the keeper waits until the node is ready.
	returning step = "Returning"
)

type operation struct {
	Step    step      `json:"step"`
	Since   time.Time `json:"since"`   // when the step began
	Started time.Time `json:"started"` // when the operation began; it is the operation's id
	// Instance is the node's instance. It is recorded because the CSINode contains it only while the
	// driver is registered.
	Instance string `json:"instance"`
	// Waiting names the VolumeAttachments that needed the stop when the operation began.
	Waiting []string `json:"waiting,omitempty"`
	// Volumes describes the PersistentVolumes for which the instance is stopped, by name.
	Volumes      map[string]cause `json:"volumes,omitempty"`
	StatefulSets []string         `json:"statefulSets,omitempty"` // with pods that stop with the node
	// Heartbeat is the node's last heartbeat before the start. The step Returning awaits a new one.
	Heartbeat time.Time `json:"heartbeat,omitzero"`
	// Late reports that the instance stopped after the previous operation, so this one only starts it.
	Late bool `json:"late,omitempty"`
	// Problem says why the operation failed or, if Late is set, why it was necessary.
	Problem string `json:"problem,omitempty"`
}

func (r *operation) id() string { return r.Started.UTC().Format("20060102T150405.000000000Z") }

type outcome struct {
	Ended    time.Time `json:"ended"`
	Instance string    `json:"instance"`
	Stopped  bool      `json:"stopped"` // whether the operation requested the stop
	// StoppedWith maps each StatefulSet whose pods stopped with the node to the time when the
	// operation that stopped them ended. Entries older than --stateful-set-interval are dropped.
	StoppedWith map[string]time.Time `json:"stoppedWith,omitempty"`
	// Failures counts the consecutive operations that had a problem.
	Failures int  `json:"failures,omitempty"`
	Late     bool `json:"late,omitempty"`
	// Unlabeled: the node had no label when the operation ended. restartLateStopped needs none then.
	Unlabeled bool   `json:"unlabeled,omitempty"`
	Problem   string `json:"problem,omitempty"`
	// Node is the history of the node's stops. Volumes has the histories of volumes, by name.
	Node    history            `json:"node,omitzero"`
	Volumes map[string]history `json:"volumes,omitempty"`
}

// records returns the ConfigMap of records, and the records by the UIDs of their Nodes. If the
// ConfigMap does not exist yet, both are empty.
func (c *Cluster) records(ctx context.Context, namespace string) (*corev1.ConfigMap,
	map[types.UID]record, error) {
	found, err := c.Core.ConfigMaps(namespace).Get(ctx, RecordsName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		found = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: RecordsName}}
	case err != nil:
		return nil, nil, fmt.Errorf("read the ConfigMap %s: %w", RecordsName, err)
	}
	all := map[types.UID]record{}
	for uid, text := range found.Data {
		var r record
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return found, nil, fmt.Errorf("the value of %s in the ConfigMap %s is not what a keeper writes "+
				"(%w); see that the node's instance runs and that the Node has no cordon and no "+
				"out-of-service taint of the keeper, then remove the key", uid, RecordsName, err)
		}
		all[types.UID(uid)] = r
	}
	return found, all, nil
}

// save writes the records of all nodes. It fails with a conflict if another keeper has written them
// since they were read. The record of a deleted Node is kept until a day after its last operation.
func (v *view) save(ctx context.Context, n *node) error {
	next := v.records.DeepCopy()
	next.Data = map[string]string{}
	for _, n := range v.Nodes {
		if n.record == (record{NodeName: n.Name}) || n.gone && n.Record == nil &&
			(n.Last == nil || v.Now.Sub(n.Last.Ended) >= day) {
			continue
		}
		text, err := json.Marshal(n.record)
		if err != nil {
			panic(err) // JSON can encode every record
		}
		next.Data[string(n.UID)] = string(text)
	}
	var err error
	if maps := v.cluster.Core.ConfigMaps(next.Namespace); next.ResourceVersion == "" {
		next, err = maps.Create(ctx, next, metav1.CreateOptions{})
	} else {
		next, err = maps.Update(ctx, next, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("record in the ConfigMap %s what is done to the node %s: %w", RecordsName,
			n.Name, err)
	}
	v.records = next
	return nil
}

// cordoned reports whether the operation in progress has cordoned the node. Somebody may have
// uncordoned it since.
func (n *node) cordoned() bool {
	return n.Record != nil && n.Annotations[CordonAnnotation] == n.Record.id()
}

// The functions below send requests to the rack. A stop halts the guest without a shutdown. The
// rack answers a stop and a start with 202 before they are done (see ASSUMPTIONS.md in
// conformance/rules).

// instance reads an instance of the project. It first reads the IDs of rack and project, which
// instanceGone compares. For an instance that the rack does not know, the error is NOT_FOUND.
func (k *Keeper) instance(ctx context.Context, id string) (*oxide.Instance, error) {
	world, err := k.Rack.World(ctx)
	if err != nil {
		return nil, err
	}
	instance, err := k.Rack.Instance(ctx, oxide.NameOrId(id))
	if err == nil && instance.ProjectId != world.Project {
		return nil, fmt.Errorf("the instance %s is in the project %s, and OXIDE_PROJECT is %s; the "+
			"keeper leaves it alone", id, instance.ProjectId, world.Project)
	}
	return instance, err
}

func (k *Keeper) instanceState(ctx context.Context, id string) (oxide.InstanceState, error) {
	instance, err := k.instance(ctx, id)
	if err != nil {
		return "", err
	}
	return instance.RunState, nil
}

func (k *Keeper) instanceGone(ctx context.Context, id string) error {
	return k.Rack.Gone(ctx, func() error {
		_, err := k.Rack.Instance(ctx, oxide.NameOrId(id))
		return err
	})
}

func (k *Keeper) stopInstance(ctx context.Context, look rack.Look, id string) error {
	return k.request(ctx, "stop instance", id, look, func(ctx context.Context) error {
		_, err := k.Rack.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
		return err
	})
}

func (k *Keeper) startInstance(ctx context.Context, look rack.Look, id string) error {
	return k.request(ctx, "start instance", id, look, func(ctx context.Context) error {
		_, err := k.Rack.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
		return err
	})
}

func (k *Keeper) request(ctx context.Context, doing, id string, look rack.Look,
	do func(context.Context) error) error {
	k.Log.InfoContext(ctx, doing, "instance", id)
	if _, err := k.Rack.Request(ctx, doing, look, do); err != nil {
		return rack.Error(ctx, doing, err)
	}
	return nil
}

// patience is the time limit for one answer of the API server. outage is how long the server has to
// be silent before the keeper starts the instances that it has stopped.
const (
	patience = 2 * time.Second
	outage   = 10 * time.Second
)

// stops are the instances that this process has asked the rack to stop and has to start again.
type stops struct {
	mu sync.Mutex
	// mu guards these fields. asked has the times of the stop requests, by instance. silent is when
	// the API server first failed to answer StartStopped, or zero if it has answered since.
	asked  map[string]time.Time
	silent time.Time
}

func (s *stops) note(instance string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asked == nil {
		s.asked = map[string]time.Time{}
	}
	if _, has := s.asked[instance]; !has {
		s.asked[instance] = now
	}
}

func (s *stops) forget(instance string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.asked, instance)
}

// all returns a copy of asked.
func (s *stops) all() map[string]time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.asked)
}

// isOutage reports whether the API server has been silent for longer than outage. answers is true
// if the server has just answered.
func (s *stops) isOutage(answers bool, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case answers:
		s.silent = time.Time{}
		return false
	case s.silent.IsZero():
		s.silent = now
	}
	return passed(now, s.silent, outage)
}

// StartStopped starts the instances that this process has stopped, if the API server is
// unreachable: then the attacher does not work, and no leader starts the instances.
func (k *Keeper) StartStopped(ctx context.Context) error {
	asked := k.stops.all()
	if len(asked) == 0 || !k.stops.isOutage(k.clusterAnswers(ctx, asked), k.now()) {
		return nil
	}
	var errs []error
	for instance, at := range asked {
		errs = append(errs, k.startStopped(ctx, instance, at))
	}
	return errors.Join(errs...)
}

// clusterAnswers reports whether the API server answers. If it does, instances without a recorded
// operation are removed from k.stops: another keeper has started them.
func (k *Keeper) clusterAnswers(ctx context.Context, asked map[string]time.Time) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	found, records, err := k.Kubernetes.records(ctx, k.Namespace)
	if err != nil {
		return found != nil
	}
	for instance := range asked {
		if !slices.ContainsFunc(slices.Collect(maps.Values(records)), func(r record) bool {
			return r.Record != nil && r.Record.Instance == instance
		}) {
			k.stops.forget(instance)
		}
	}
	return true
}

func (k *Keeper) startStopped(ctx context.Context, instance string, asked time.Time) error {
	look := rack.Looking()
	state, err := k.instanceState(ctx, instance)
	switch {
	case err != nil:
		return err
	case state == oxide.InstanceStateRunning && passed(k.now(), asked, k.Config.AttachTimeout):
		k.stops.forget(instance) // by now no request to stop it can be on its way
		return nil
	case state != oxide.InstanceStateStopped && state != oxide.InstanceStateFailed:
		return nil
	}
	k.Log.WarnContext(ctx, "the API server does not answer; the instance is started without it",
		"instance", instance)
	return k.startInstance(ctx, look, instance)
}
