package keeper

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Names in the cluster.
const (
	DriverName = "csi.oxide.computer"

	// ColdAttachLabel allows the keeper to stop a node's instance, if its value is Allowed.
	ColdAttachLabel = DriverName + "/cold-attach"
	Allowed         = "allowed"

	// RecordAnnotation holds the operation in progress on a Node, a record in JSON.
	RecordAnnotation = DriverName + "/cold-attach"
	// LastAnnotation holds how the last operation on a Node ended, an outcome in JSON.
	LastAnnotation = DriverName + "/cold-attach-last"
	// PlanAnnotation says in words what the keeper would do to a Node, or why it does not.
	PlanAnnotation = DriverName + "/cold-attach-plan"
	// recordFinalizer is on a Node with a record: whoever deletes the Node in the middle of an
	// operation does not delete what is known of its stopped instance.
	recordFinalizer = RecordAnnotation

	// WokenAnnotation is on VolumeAttachments: the operation for which the attacher was woken.
	WokenAnnotation = DriverName + "/woken"
)

// step is a step of an operation. The record names the step that is being taken, so whatever the
// step does may have happened already, or not yet.
type step string

const (
	// draining: the node is cordoned, and pods that would not come back to it are evicted.
	draining step = "Draining"
	// stopping: the instance is asked to stop.
	stopping step = "Stopping"
	// attaching: the instance is stopped, and the attacher works.
	attaching step = "Attaching"
	// starting: the instance is asked to start, until it runs.
	starting step = "Starting"
	// returning: the instance runs, and the node is expected to be ready.
	returning step = "Returning"
)

// record is an operation in progress.
type record struct {
	Step    step      `json:"step"`
	Since   time.Time `json:"since"`   // when the step was begun
	Started time.Time `json:"started"` // when the operation was begun; it identifies it
	// Instance is the node's instance on the rack. The node's driver is not registered all the time.
	Instance string `json:"instance"`
	// Cordoned reports whether the keeper cordoned the node, and so has to uncordon it.
	Cordoned bool `json:"cordoned"`
	// Waiting are the VolumeAttachments for which the operation was begun.
	Waiting []string `json:"waiting,omitempty"`
	// Volumes are the PersistentVolumes for which the instance is stopped, by their names.
	Volumes map[string]cause `json:"volumes,omitempty"`
	// StatefulSets are those that have pods on the node that stop with it.
	StatefulSets []string `json:"statefulSets,omitempty"`
	// Heartbeat is the node's last heartbeat before its instance was started again.
	Heartbeat time.Time `json:"heartbeat,omitzero"`
	// Unseen is since when the rack does not show the instance; zero if it does.
	Unseen time.Time `json:"unseen,omitzero"`
	// Late reports whether the operation only starts an instance that a late request stopped.
	Late bool `json:"late,omitempty"`
	// Problem is why the operation ends without having done what it was for; empty so far.
	Problem string `json:"problem,omitempty"`
}

// id names the operation in events and annotations.
func (r *record) id() string { return r.Started.UTC().Format("20060102T150405.000000000Z") }

// outcome is how the last operation on a node ended.
type outcome struct {
	Ended    time.Time `json:"ended"`
	Instance string    `json:"instance"`
	// Stopped reports whether the operation got as far as to ask for the instance's stop.
	Stopped bool `json:"stopped"`
	// StoppedWith is when the StatefulSets that have stopped with the node did so last, by the ends
	// of the operations, as far back as --stateful-set-interval.
	StoppedWith map[string]time.Time `json:"stoppedWith,omitempty"`
	// Failures counts the operations in a row that had a problem.
	Failures int  `json:"failures,omitempty"`
	Late     bool `json:"late,omitempty"`
	// Unlabeled reports whether the label was already gone when the operation ended.
	Unlabeled bool   `json:"unlabeled,omitempty"`
	Problem   string `json:"problem,omitempty"`
	// Node and Volumes are the stops of the node and those for PersistentVolumes, by their names.
	Node    history            `json:"node,omitzero"`
	Volumes map[string]history `json:"volumes,omitempty"`
}

// correct dates as of now what a clock that is ahead has noted, and reports whether there was any.
func (o *outcome) correct(now time.Time) bool {
	wrong := ahead(now, o.Ended)
	if wrong {
		o.Ended = now
	}
	for _, h := range append(slices.Collect(maps.Values(o.Volumes)), o.Node) {
		for i, at := range h.Stops {
			if ahead(now, at) {
				h.Stops[i], wrong = now, true
			}
		}
	}
	for set, at := range o.StoppedWith {
		if ahead(now, at) {
			o.StoppedWith[set], wrong = now, true
		}
	}
	return wrong
}

// fromAnnotation decodes an annotation of a node; false if it has none.
func fromAnnotation(n *corev1.Node, key string, into any) (bool, error) {
	text, ok := n.Annotations[key]
	if !ok {
		return false, nil
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return true, fmt.Errorf("the annotation %s of the node %s is not what a keeper writes (%w); "+
			"see that the node's instance runs, then remove the annotation", key, n.Name, err)
	}
	return true, nil
}

// hold keeps a Node that is deleted until release. To one that is being deleted, the API server
// adds no finalizer.
func (n *node) hold() {
	if n.DeletionTimestamp == nil && !slices.Contains(n.Finalizers, recordFinalizer) {
		n.Finalizers = append(n.Finalizers, recordFinalizer)
	}
}

func (n *node) release() {
	n.Finalizers = slices.DeleteFunc(n.Finalizers, func(f string) bool { return f == recordFinalizer })
}

// setAnnotation encodes a value into an annotation.
func setAnnotation(n *corev1.Node, key string, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // records hold nothing that JSON cannot
	}
	if n.Annotations == nil {
		n.Annotations = map[string]string{}
	}
	n.Annotations[key] = string(text)
}
