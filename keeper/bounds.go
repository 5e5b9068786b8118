package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// This file limits how often the keeper stops instances. The outcome of each node's last operation
// records the earlier stops.

// AgainAnnotation is an annotation that a person sets to a new value to make the keeper forget
// earlier stops: on a PersistentVolume those for the volume, and on the ConfigMap of records those
// of all nodes.
const AgainAnnotation = DriverName + "/cold-attach-again"

// HeldAnnotation is an annotation of a VolumeAttachment that waits. It contains the reason why the
// keeper stops no instance for it.
const HeldAnnotation = DriverName + "/cold-attach-held"

// day is the period in which stops are counted.
const day = 24 * time.Hour

// cause describes a volume for which an instance is stopped, as it was at that time.
type cause struct {
	// Disk is the volume's disk, and Again the value of its AgainAnnotation.
	Disk  string `json:"disk,omitempty"`
	Again string `json:"again,omitempty"`
	// Detach reports whether the disk is to be detached; otherwise it is to be attached.
	Detach bool `json:"detach,omitempty"`
	// Failed is the error that the attacher got while the instance was stopped, if another stop would
	// not help. Otherwise it is empty.
	Failed string `json:"failed,omitempty"`
}

// history records the stops of one node, or the stops for one volume.
type history struct {
	// Stops contains the times of the stops within the last day.
	Stops []time.Time `json:"stops,omitempty"`
	// Last describes the volume at the last stop. In the history of a node only Again is set.
	Last cause `json:"last,omitzero"`
}

// within returns the stops within the day before now.
func (h history) within(now time.Time) []time.Time {
	return slices.DeleteFunc(slices.Clone(h.Stops), func(at time.Time) bool {
		return now.Sub(at) >= day
	})
}

// stopped adds a stop. It drops the earlier stops if a person has asked the keeper to forget them.
func (h history) stopped(at time.Time, c cause) history {
	if h.Last.Again != c.Again {
		h.Stops = nil
	}
	return history{Stops: append(h.within(at), at), Last: c}
}

// remember takes over the history of the outcome before, and adds this operation if it stopped the
// instance.
func (o *outcome) remember(before *outcome, r *operation, now time.Time, again string) {
	o.Volumes = map[string]history{}
	if before != nil {
		o.Node = before.Node
		maps.Copy(o.Volumes, before.Volumes)
	}
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

// forget removes the history of volumes that no longer exist.
func (o *outcome) forget(volumes []corev1.PersistentVolume) {
	if o == nil {
		return
	}
	maps.DeleteFunc(o.Volumes, func(name string, _ history) bool {
		return !slices.ContainsFunc(volumes, func(v corev1.PersistentVolume) bool {
			return v.Name == name
		})
	})
}

// holdBack finds the attachments for which the keeper stops no instance, and reports each once.
func (k *Keeper) holdBack(ctx context.Context, v *view) error {
	held := 0
	var errs []error
	for _, n := range v.Nodes {
		for _, a := range v.waiting(n) {
			if !k.Config.ColdAttach {
				continue // no instance is stopped
			}
			pods, err := k.podsOn(ctx, v, n)
			if err = errors.Join(err, k.readVolumes(ctx, v)); err != nil {
				a.held = err.Error() // until pods and volumes can be read
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

// bound returns why the node must not be stopped for an attachment, or "".
//
// An attachment that failed while the instance was stopped will fail again unless its volume has
// changed since. The error that the rack returns while the instance runs proves nothing: it is
// always the same. The keeper repeats an attempt whose failure may pass (see passes) as often as
// the limits allow.
func (k *Keeper) bound(v *view, n *node, a *attachment) string {
	last := n.Last
	if last == nil {
		last = &outcome{}
	}
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
	case last.Node.Last.Again == v.again() &&
		len(last.Node.within(v.Now)) >= k.Config.MaxStopsPerNode:
		return fmt.Sprintf("the instance was stopped %d times in 24 hours (--max-stops-per-node); see "+
			"for what, then %s", len(last.Node.within(v.Now)), again("--namespace "+k.Namespace+
			" configmap", RecordsName))
	}
	return ""
}

// again returns the command with which a person makes the keeper try again.
func again(kind, name string) string {
	return fmt.Sprintf("run kubectl annotate --overwrite %s %s %s=\"$(date)\"", kind, name,
		AgainAnnotation)
}

// again returns what a person has written on the ConfigMap of records.
func (v *view) again() string { return v.records.Annotations[AgainAnnotation] }

// reportHeld writes on an attachment why it is held back. If the reason is new, it also creates
// events.
func (k *Keeper) reportHeld(ctx context.Context, v *view, n *node, a *attachment) error {
	if a.Annotations[HeldAnnotation] == a.held || n.working() || !n.allowed() {
		return nil
	}
	var value any
	if a.held != "" {
		value = a.held
	}
	if err := k.annotate(ctx, a, HeldAnnotation, value); err != nil || a.held == "" {
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

// cause describes the volume of an attachment as it is now.
func (v *view) cause(a *attachment) cause {
	c, volume := cause{Detach: a.DeletionTimestamp != nil}, v.persistentVolume(a.volume())
	if c.Again = volume.Annotations[AgainAnnotation]; volume.Spec.CSI != nil {
		c.Disk = volume.Spec.CSI.VolumeHandle
	}
	return c
}

// noteFailures records which attachments failed while the instance was stopped, for a reason that
// another stop would not remove.
func (v *view) noteFailures(n *node) {
	for _, a := range v.of(n) {
		c, caused := n.Record.Volumes[a.volume()]
		if caused && a.open() && a.settled(n.Record) && c.Detach == (a.DeletionTimestamp != nil) {
			c.Failed = shortened(a.failure().Message)
			n.Record.Volumes[a.volume()] = c
		}
	}
}

// failures returns what went wrong with the volumes of an operation, or "".
func (r *operation) failures() string {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(r.Volumes)) {
		if failed := r.Volumes[name].Failed; failed != "" {
			text += fmt.Sprintf("; the volume %s failed while the instance was stopped: %s", name, failed)
		}
	}
	return text
}

// shortened cuts an error so that it fits into an annotation together with others.
func shortened(text string) string {
	const most = 300
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// persistentVolume returns a volume from those that were read, or an empty one if it is not among
// them.
func (v *view) persistentVolume(name string) *corev1.PersistentVolume {
	for i := range v.volumes {
		if v.volumes[i].Name == name {
			return &v.volumes[i]
		}
	}
	return &corev1.PersistentVolume{}
}

// nodeReference refers to a Node as the events of the kubelet do: the UID is the node's name.
// kubectl describe looks for events with that UID.
func nodeReference(n *corev1.Node) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: types.UID(n.Name)}
}
