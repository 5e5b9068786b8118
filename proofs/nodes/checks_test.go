//go:build linux

package nodes

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// This file checks the keeper's promises at each request of a keeper. It computes the expected
// values itself, and takes from the keeper only the names of labels and annotations and the format
// of the record.

type recorded struct {
	Step     string `json:"step"`
	Instance string `json:"instance"`
	Late     bool   `json:"late"`
	// Volumes are the volumes for which the instance is stopped.
	Volumes map[string]any `json:"volumes"`
}

// recordsIn returns the operations in progress that a ConfigMap records, by node. If a Node was
// deleted and created again, an operation of the new Node takes precedence.
func (w *testCluster) recordsIn(m *corev1.ConfigMap) map[string]*recorded {
	all := map[string]*recorded{}
	if m == nil {
		return all
	}
	for uid, text := range m.Data {
		var r struct {
			Node      string    `json:"node"`
			Operation *recorded `json:"operation"`
		}
		if json.Unmarshal([]byte(text), &r) != nil || r.Operation == nil {
			continue
		}
		if string(w.node(r.Node).UID) == uid || all[r.Node] == nil {
			all[r.Node] = r.Operation
		}
	}
	return all
}

func (w *testCluster) records() map[string]*recorded {
	m, _ := keepertest.Get[*corev1.ConfigMap](w.api, namespaceOfRecords, keeper.RecordsName)
	return w.recordsIn(m)
}

const namespaceOfRecords = "oxide"

type operation struct {
	// began is when an operation last began, ended when one last ended, with or without a stop.
	began, ended time.Time
	// asked is set if a keeper has requested the instance's stop. sets contains the StatefulSets whose
	// pods this stop ends.
	asked   bool
	sets    []string
	stopper *replica
	// stopped is when an operation with a stop last ended. stoppedSets are the sets of that operation.
	stopped     time.Time
	stoppedSets []string
}

// late is how long after an operation a keeper's delayed stop request can still take effect. If the
// instance stops within this time, a keeper is allowed to start it.
const late = 2 * time.Minute

func (w *testCluster) checkRackRequest(k *replica, r *http.Request) {
	asked := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	i := slices.IndexFunc(names, func(name string) bool {
		return strings.Contains(r.URL.Path, w.rack.Instance(name).ID)
	})
	w.log("%s asks the rack: %s %s", k.node, asked, names[i])
	switch asked {
	case "start":
	case "stop":
		w.stops++
		w.checkStop(k, names[i])
	default:
		w.breaks("a keeper asks the rack for %s %s", r.Method, r.URL.Path)
	}
}

func (w *testCluster) checkStop(k *replica, name string) {
	n, o := w.node(name), w.operations[name]
	switch {
	case name == k.node:
		w.breaks("the keeper on %s stops its own instance", name)
	case !k.Config.ColdAttach || k.Config.DryRun:
		w.breaks("the instance of %s is stopped by a keeper that is to stop none", name)
	}
	o.stopper = k
	w.checkJobs(name)
	if k.Config.Window != nil && w.clock.Minute() >= int(windowLength.Minutes()) {
		w.breaks("the instance of %s is stopped outside the window", name)
	}
	if w.stale || w.raced {
		return // the state may have changed since the keeper read it
	}
	r := w.records()[name]
	if !o.asked {
		w.countStop(k, name, r)
	}
	o.asked = true
	if r == nil || r.Step != "Stopping" || !n.Spec.Unschedulable {
		w.breaks("the instance of %s is stopped without a record of it: %v, unschedulable %v", name,
			r, n.Spec.Unschedulable)
	}
	if n.Labels[keeper.ColdAttachLabel] != keeper.Allowed {
		w.breaks("the instance of %s is stopped, and nobody allows it", name)
	}
	if !w.hotplug.IsZero() && w.hotplug.Before(o.began) {
		w.breaks("the instance of %s is stopped on a rack with hot-plug", name)
	}
	if !w.hotAttach.IsZero() && w.hotAttach.Before(o.began) && !slices.ContainsFunc(
		keepertest.List[*storagev1.VolumeAttachment](w.api, ""),
		func(a *storagev1.VolumeAttachment) bool {
			return a.Spec.NodeName == name && (a.DeletionTimestamp != nil ||
				w.refused[*a.Spec.Source.PersistentVolumeName] != "")
		}) {
		w.breaks("the instance of %s is stopped for no detach, on a rack that attaches to it while it "+
			"runs", name)
	}
	if w.registered(name) != w.rack.Instance(name).ID {
		w.breaks("the instance of %s is stopped, and its driver is registered with %q", name,
			w.registered(name))
	}
	for other, state := range w.states() {
		if other == name {
			continue
		}
		if state != oxide.InstanceStateRunning && w.byPeople[other].IsZero() {
			w.breaks("the instance of %s is stopped while that of %s is %s", name, other, state)
		}
		if w.registered(other) == w.rack.Instance(name).ID {
			w.breaks("the instance of %s is stopped, and %s says that it is the same", name, other)
		}
		if node := w.node(other); node.UID != "" && ready(node).Status != corev1.ConditionTrue &&
			node.Labels[keeper.ColdAttachLabel] == keeper.Allowed {
			w.breaks("the instance of %s is stopped while the node %s is not ready", name, other)
		}
	}
}

// checkJobs checks that no stop ends a running pod whose restart policy is Never, such as a Job's.
func (w *testCluster) checkJobs(name string) {
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		if p.Spec.NodeName == name && p.Spec.RestartPolicy == corev1.RestartPolicyNever &&
			len(p.Status.InitContainerStatuses) > 0 && p.Status.Phase != corev1.PodSucceeded &&
			!w.stale && !w.raced {
			w.breaks("%s is stopped with the instance of %s, and does not come back", p.Name, name)
		}
	}
}

// countStop counts the stop of an instance for each volume that caused it, and checks the limit.
func (w *testCluster) countStop(k *replica, name string, r *recorded) {
	if r == nil {
		return
	}
	for volume := range r.Volumes {
		stops := slices.DeleteFunc(w.causes[volume], func(s stop) bool {
			return w.clock.Sub(s.at) >= 24*time.Hour
		})
		w.causes[volume] = append(stops, stop{w.clock, name})
		w.mostStops = max(w.mostStops, len(w.causes[volume]))
		if len(w.causes[volume]) > k.Config.MaxStopsPerVolume {
			w.breaks("instances were stopped for %s at %v", volume, w.causes[volume])
		}
	}
	if len(r.Volumes) == 0 {
		w.breaks("the instance of %s is stopped for no volume", name)
	}
}

// registered returns the instance with which a node's driver is registered, or "".
func (w *testCluster) registered(name string) string {
	c, ok := keepertest.Get[*storagev1.CSINode](w.api, "", name)
	if !ok || len(c.Spec.Drivers) == 0 || c.OwnerReferences[0].UID != w.node(name).UID {
		return ""
	}
	return c.Spec.Drivers[0].NodeID
}

// ready returns the Node's first condition, or an empty condition.
func ready(n *corev1.Node) corev1.NodeCondition {
	if len(n.Status.Conditions) == 0 {
		return corev1.NodeCondition{}
	}
	return n.Status.Conditions[0]
}

// checkClusterRequest checks a change that a keeper requests in the cluster. The caller must call
// made() after the change.
func (w *testCluster) checkClusterRequest(k *replica, r keepertest.KubeRequest) (made func()) {
	if r.Subresource == "eviction" {
		p, ok := keepertest.Get[*corev1.Pod](w.api, r.Namespace, r.Name)
		if ok && p.Spec.RestartPolicy == corev1.RestartPolicyNever {
			w.breaks("the pod %s of a Job is evicted", r.Name)
		}
	}
	allowed := []string{"update nodes", "patch nodes", "patch volumeattachments",
		"create pods/eviction", "create configmaps", "update configmaps"}
	resource := strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
	if !slices.Contains(allowed, r.Verb+" "+resource) {
		w.breaks("a keeper does what it must not: %s", r)
	}
	w.log("%s", r)
	switch r.Verb + " " + resource {
	case "update nodes":
		var next corev1.Node
		old := w.node(r.Name)
		if json.Unmarshal(r.Body, &next) == nil && next.ResourceVersion == old.ResourceVersion {
			w.checkTaints(k, old, &next)
		}
	case "create configmaps", "update configmaps":
		return w.checkRecords(k, r)
	}
	return func() {}
}

func (w *testCluster) checkRecords(k *replica, r keepertest.KubeRequest) (made func()) {
	made = func() {}
	var next corev1.ConfigMap
	old, _ := keepertest.Get[*corev1.ConfigMap](w.api, r.Namespace, r.Name)
	if json.Unmarshal(r.Body, &next) != nil ||
		old != nil && next.ResourceVersion != old.ResourceVersion {
		return made // the request is refused
	}
	before, after := w.recordsIn(old), w.recordsIn(&next)
	for _, name := range names {
		switch was, is := before[name], after[name]; {
		case was == nil && is != nil:
			made = w.checkBegin(k, w.node(name), name, is)
		case was != nil && is == nil:
			made = w.checkEnd(name, was)
		case was != nil && was.Step == "Draining" && is.Step == "Stopping":
			w.operations[name].sets = w.statefulSets(name)
			w.checkBudgets(name)
		}
	}
	return made
}

func (w *testCluster) checkBegin(k *replica, n *corev1.Node, name string,
	r *recorded) (made func()) {
	o, byPeople := w.operations[name], w.byPeople[name]
	if r.Late {
		if !byPeople.IsZero() && byPeople.Sub(o.ended) > late {
			w.breaks("the keeper starts the instance of %s, which somebody stopped", n.Name)
		}
		return func() {
			w.count("started, stopped late")
			o.began, o.asked, o.sets = w.clock, true, o.stoppedSets
		}
	}
	switch since := w.clock.Sub(o.ended); {
	case !k.Config.ColdAttach, k.Config.DryRun, n.Name == k.node, n.Spec.Unschedulable,
		n.Labels[keeper.ColdAttachLabel] != keeper.Allowed:
		w.breaks("the keeper on %s begins with the node %s, which it must not", k.node, n.Name)
	case w.stale || w.raced:
	case since < k.Config.MinInterval:
		w.breaks("the last operation on %s ended %s ago", n.Name, since)
	case k.Config.Window != nil && w.clock.Minute() >= int(windowLength.Minutes()):
		w.breaks("an operation on %s begins outside the window", n.Name)
	}
	for other, last := range w.operations {
		since := w.clock.Sub(last.stopped)
		if other == n.Name || w.stale || w.raced || since >= k.Config.StatefulSetInterval ||
			w.node(other).UID == "" {
			continue // when a Node is deleted, the record of its last operation is lost with it
		}
		for _, set := range w.statefulSets(n.Name) {
			if slices.Contains(last.stoppedSets, set) {
				w.breaks("pods of %s stopped with %s %s ago, and there are some on %s", set, other, since,
					n.Name)
			}
		}
	}
	return func() { o.began, o.asked, o.sets, o.stopper = w.clock, false, nil, nil }
}

// checkEnd checks that the instance runs at the end of an operation, unless a person has stopped
// it.
func (w *testCluster) checkEnd(name string, r *recorded) (made func()) {
	o := w.operations[name]
	if state := w.states()[name]; r.Step != "Draining" && state != oxide.InstanceStateRunning &&
		w.byPeople[name].IsZero() && !w.stale && !w.raced {
		w.breaks("the operation on %s ends, and its instance is %s", name, state)
	}
	return func() {
		o.ended = w.clock
		if o.asked {
			o.stopped, o.stoppedSets = w.clock, o.sets
		}
		o.asked = false
	}
}

func (w *testCluster) statefulSets(name string) []string {
	var sets []string
	for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
		owner := metav1.GetControllerOf(p)
		if p.Spec.NodeName == name && len(p.Spec.Volumes) > 0 && owner != nil &&
			owner.Kind == "StatefulSet" {
			sets = append(sets, owner.Name)
		}
	}
	return sets
}

// checkBudgets checks that the stop of a node violates no disruption budget. A pod that waits for
// its volume has never run on its node, so it does not count as unavailable.
func (w *testCluster) checkBudgets(name string) {
	if w.stale || w.raced {
		return
	}
	waits := map[string]bool{}
	for _, a := range keepertest.List[*storagev1.VolumeAttachment](w.api, "") {
		failed := a.Status.AttachError
		if a.DeletionTimestamp != nil {
			failed = a.Status.DetachError
		}
		waits[*a.Spec.Source.PersistentVolumeName+"@"+a.Spec.NodeName] = failed != nil &&
			strings.Contains(failed.Message, "InstanceMustBeStopped")
	}
	for _, app := range apps {
		away, stop := 0, 0
		for _, p := range keepertest.List[*corev1.Pod](w.api, "default") {
			unborn := slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
				return waits[v.PersistentVolumeClaim.ClaimName+"@"+p.Spec.NodeName]
			})
			switch {
			case p.Labels["app"] != app:
			case !healthy(p) && !unborn:
				away++
			case healthy(p) && len(p.Spec.Volumes) > 0 && p.Spec.NodeName == name:
				stop++
			}
		}
		if most := w.most(app); stop > 0 && away+stop > most {
			w.breaks("with %s, %d pods of %s stop, %d are away, and its budget allows %d", name, stop, app,
				away, most)
		}
	}
}

func (w *testCluster) checkTaints(k *replica, old, next *corev1.Node) {
	name, state := old.Name, w.states()[old.Name]
	silent := ready(old).Status == corev1.ConditionUnknown
	switch was, is := tainted(old, corev1.TaintNodeOutOfService),
		tainted(next, corev1.TaintNodeOutOfService); {
	case is && !was:
		w.count("fenced")
		if !k.Config.Fence || w.records()[name] != nil || !silent ||
			state != oxide.InstanceStateStopped && !w.raced {
			w.breaks("%s is fenced: its instance is %s, its kubelet %s, it has %v", name, state,
				ready(old).Status, old.Annotations)
		}
	case was && !is:
		w.count("unfenced")
		if silent && state != oxide.InstanceStateRunning && !w.raced {
			w.breaks("%s is no longer fenced, and its instance is %s", name, state)
		}
	}
	if tainted(old, keeper.StartupTaint) && !tainted(next, keeper.StartupTaint) {
		w.count("freed")
		if !w.raced && w.registered(name) == "" {
			w.breaks("the startup taint of %s is gone, and its driver is not registered", name)
		}
	}
}

func tainted(n *corev1.Node, key string) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == key })
}

func healthy(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions,
		func(c corev1.PodCondition) bool { return c.Status == corev1.ConditionTrue })
}
