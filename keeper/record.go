package keeper

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// The labels and annotations of the keeper.
const (
	DriverName = "csi.oxide.computer"

	// ColdAttachLabel on a node allows the keeper to stop its instance if the value is Allowed.
	ColdAttachLabel = DriverName + "/cold-attach"
	Allowed         = "allowed"

	// RecordAnnotation on a Node contains the operation in progress: a record in JSON.
	RecordAnnotation = DriverName + "/cold-attach"
	// LastAnnotation on a Node contains the outcome of its last operation, in JSON.
	LastAnnotation = DriverName + "/cold-attach-last"
	// PlanAnnotation on a Node describes what the keeper would do to it, or why it does nothing.
	PlanAnnotation = DriverName + "/cold-attach-plan"
	// recordFinalizer is a finalizer of a Node that has a record. If somebody deletes the Node during
	// an operation, the record stays until the stopped instance runs again.
	recordFinalizer = RecordAnnotation

	// WokenAnnotation on a VolumeAttachment names the operation for which the attacher was woken.
	WokenAnnotation = DriverName + "/woken"
)

// step is a step of an operation. The record names the current step: its effect may have happened
// already or not.
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

// operation is an operation in progress, as the annotation of a Node holds it.
type operation struct {
	Step    step      `json:"step"`
	Since   time.Time `json:"since"`   // when the step began
	Started time.Time `json:"started"` // when the operation began; it is the operation's id
	// Instance is the node's instance on the rack. CSINode cannot replace it: the driver is not
	// always registered.
	Instance string `json:"instance"`
	// Cordoned reports whether the keeper cordoned the node and therefore has to uncordon it.
	Cordoned bool `json:"cordoned"`
	// Waiting contains the names of the VolumeAttachments for which the operation began.
	Waiting []string `json:"waiting,omitempty"`
	// Volumes contains the PersistentVolumes for which the instance is stopped, by name.
	Volumes map[string]cause `json:"volumes,omitempty"`
	// StatefulSets contains those whose pods stop with the node.
	StatefulSets []string `json:"statefulSets,omitempty"`
	// Heartbeat is the node's last heartbeat before its instance was started again.
	Heartbeat time.Time `json:"heartbeat,omitzero"`
	// Late reports whether the operation only starts an instance that a late request stopped.
	Late bool `json:"late,omitempty"`
	// Problem is the reason why the operation did not reach its aim; empty if there is none so far.
	Problem string `json:"problem,omitempty"`
}

// id identifies the operation in events and annotations.
func (r *operation) id() string { return r.Started.UTC().Format("20060102T150405.000000000Z") }

// outcome describes how the last operation on a node ended.
type outcome struct {
	Ended    time.Time `json:"ended"`
	Instance string    `json:"instance"`
	// Stopped reports whether the operation requested the instance's stop.
	Stopped bool `json:"stopped"`
	// StoppedWith contains the StatefulSets that stopped with the node, each with the end of the
	// operation that last stopped it. Entries older than --stateful-set-interval are dropped.
	StoppedWith map[string]time.Time `json:"stoppedWith,omitempty"`
	// Failures counts the operations in a row that had a problem.
	Failures int  `json:"failures,omitempty"`
	Late     bool `json:"late,omitempty"`
	// Unlabeled reports whether the label was already gone when the operation ended.
	Unlabeled bool   `json:"unlabeled,omitempty"`
	Problem   string `json:"problem,omitempty"`
	// Node is the history of the node, and Volumes contains the histories of PersistentVolumes, by
	// name.
	Node    history            `json:"node,omitzero"`
	Volumes map[string]history `json:"volumes,omitempty"`
}

// correct replaces times that are too far in the future by now, and reports whether there were any.
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

// fromAnnotation decodes an annotation of a node. It returns false if the node does not have it.
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

// hold adds the finalizer that keeps a deleted Node until release. The API server adds no finalizer
// to a Node that is already being deleted.
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
		panic(err) // JSON can encode every record
	}
	if n.Annotations == nil {
		n.Annotations = map[string]string{}
	}
	n.Annotations[key] = string(text)
}
