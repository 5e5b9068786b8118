package keeper

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The labels and annotations of the keeper. What it relies on is in the ConfigMap of its namespace:
// a kubelet may annotate its own Node.
const (
	DriverName = "csi.oxide.computer"

	// ColdAttachLabel on a node allows the keeper to stop its instance if the value is Allowed.
	ColdAttachLabel = DriverName + "/cold-attach"
	Allowed         = "allowed"

	// CordonAnnotation on a Node contains the id of the operation that has cordoned it.
	CordonAnnotation = DriverName + "/cold-attach"
	// PlanAnnotation on a Node describes what the keeper would do to it, or why it does nothing.
	PlanAnnotation = DriverName + "/cold-attach-plan"

	// WokenAnnotation on a VolumeAttachment names the operation for which the attacher was woken.
	WokenAnnotation = DriverName + "/woken"

	// RecordsName is the name of the ConfigMap. Its data has a record in JSON for each node, by the
	// UID of the Node.
	RecordsName = component
)

// record is what the keeper does and has done to a node.
type record struct {
	NodeName string `json:"node"`
	// Record is the operation in progress, and Last the outcome of the last one.
	Record *operation `json:"operation,omitempty"`
	Last   *outcome   `json:"last,omitempty"`
	// Fenced is the instance for which the keeper set the node's out-of-service taint.
	Fenced string `json:"fenced,omitempty"`
}

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

type operation struct {
	Step    step      `json:"step"`
	Since   time.Time `json:"since"`   // when the step began
	Started time.Time `json:"started"` // when the operation began; it is the operation's id
	// Instance is the node's instance on the rack. CSINode cannot replace it: the driver is not
	// always registered.
	Instance string `json:"instance"`
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

// records reads the ConfigMap. Without it, nothing is recorded.
func (k *Keeper) records(ctx context.Context) (*corev1.ConfigMap, map[types.UID]record, error) {
	found, err := k.Kubernetes.Core.ConfigMaps(k.Namespace).Get(ctx, RecordsName,
		metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		found = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace,
			Name: RecordsName}}
	case err != nil:
		return nil, nil, fmt.Errorf("read the ConfigMap %s: %w", RecordsName, err)
	}
	all := map[types.UID]record{}
	for uid, text := range found.Data {
		var r record
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			return found, nil, fmt.Errorf("the value of %s in the ConfigMap %s is not what a keeper writes "+
				"(%w); see that the node's instance runs, then remove the key", uid, RecordsName, err)
		}
		all[types.UID(uid)] = r
	}
	return found, all, nil
}

// save writes a node's record. If another keeper has written one since the view was read, even of
// another node, the write fails with a conflict. A record of a Node that is gone is kept for a day.
func (k *Keeper) save(ctx context.Context, v *view, n *node) error {
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
	var written *corev1.ConfigMap
	var err error
	if maps := k.Kubernetes.Core.ConfigMaps(k.Namespace); next.ResourceVersion == "" {
		written, err = maps.Create(ctx, next, metav1.CreateOptions{})
	} else {
		written, err = maps.Update(ctx, next, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("record in the ConfigMap %s what is done to the node %s: %w", RecordsName,
			n.Name, err)
	}
	v.records = written
	return nil
}

// cordoned reports whether the operation in progress has cordoned the node. Somebody may have
// uncordoned it since.
func (n *node) cordoned() bool {
	return n.Record != nil && n.Annotations[CordonAnnotation] == n.Record.id()
}
