package keeper

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The bounds of the keeper's stops. What it knows of earlier stops is in the outcome on each Node.

// AgainAnnotation is on a PersistentVolume or a Node: with any new value a person lets the keeper
// forget its earlier stops for the volume or of the node.
const AgainAnnotation = DriverName + "/cold-attach-again"

// HeldAnnotation is on VolumeAttachments that wait: why the keeper stops no instance for them.
const HeldAnnotation = DriverName + "/cold-attach-held"

// day is the time in which stops are counted.
const day = 24 * time.Hour

// cause is a volume for which an instance is stopped, as it was then.
type cause struct {
	// Disk is the volume's disk, and Again the value of its AgainAnnotation.
	Disk  string `json:"disk,omitempty"`
	Again string `json:"again,omitempty"`
	// Detach reports whether the disk is to be detached; otherwise it is to be attached.
	Detach bool `json:"detach,omitempty"`
	// Refused reports whether the driver was refused it in this operation because the instance ran.
	Refused bool `json:"refused,omitempty"`
	// Failed is the attacher's error while the instance was stopped, if another stop would not mend
	// it; otherwise it is empty.
	Failed string `json:"failed,omitempty"`
}

// history is what is known of the stops of a node, or of those for a volume.
type history struct {
	// Stops are the times of the stops within a day.
	Stops []time.Time `json:"stops,omitempty"`
	// Last is the volume at the last stop; of a node it has only Again.
	Last cause `json:"last,omitzero"`
}

// within returns the stops within a day.
func (h history) within(now time.Time) []time.Time {
	return slices.DeleteFunc(slices.Clone(h.Stops), func(at time.Time) bool {
		return now.Sub(at) >= day
	})
}

// stopped adds a stop. What a person has asked to forget is left out.
func (h history) stopped(at time.Time, c cause) history {
	if h.Last.Again != c.Again {
		h.Stops = nil
	}
	return history{Stops: append(h.within(at), at), Last: c}
}

// remember adds an operation in which the instance was stopped to what was known before.
func (o *outcome) remember(before *outcome, r *record, now time.Time, again string) {
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

// forget removes what is known of volumes that are gone.
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

// holdBack finds the attachments for which no instance is stopped, and says so of each once.
func (k *Keeper) holdBack(ctx context.Context, v *view) error {
	held := 0
	var errs []error
	for _, n := range v.Nodes {
		for _, a := range v.waiting(n) {
			volume := &corev1.PersistentVolume{}
			if v.remembers(n, a.volume()) {
				if err := k.readVolumes(ctx, v); err != nil {
					a.held = err.Error() // until they can be read
					errs = append(errs, err)
					continue
				}
				volume = v.persistentVolume(a.volume())
			}
			if a.held = k.bound(v, n, a, volume); a.held != "" {
				held++
			}
		}
	}
	k.Metrics.held(held)
	if !k.Config.ColdAttach || k.Config.DryRun || len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, n := range v.Nodes {
		for _, a := range v.of(n) {
			errs = append(errs, k.sayHeld(ctx, v, n, a))
		}
	}
	return errors.Join(errs...)
}

// remembers reports whether an instance was stopped for a volume, or the node for any.
func (v *view) remembers(n *node, volume string) bool {
	return n.Last != nil && len(n.Last.Node.Stops) > 0 || slices.ContainsFunc(v.Nodes,
		func(o *node) bool {
			return o.Last != nil && (len(o.Last.Volumes[volume].Stops) > 0 ||
				o.Last.Volumes[volume].Last.Failed != "")
		})
}

// bound returns why the node must not be stopped for an attachment, or "".
//
// An attachment that failed while the instance was stopped fails the next time, too, unless its
// volume has changed since: on a running instance the rack always refuses it for the same reason,
// which says nothing new. A failure that may pass (see passes) is tried again, as often as the
// bounds allow.
func (k *Keeper) bound(v *view, n *node, a *attachment, volume *corev1.PersistentVolume) string {
	last := n.Last
	if last == nil {
		last = &outcome{}
	}
	now := cause{Disk: diskOf(volume), Again: volume.Annotations[AgainAnnotation],
		Detach: a.DeletionTimestamp != nil}
	then := last.Volumes[a.volume()].Last
	failed := then.Failed
	then.Failed, then.Refused = "", false
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
	case last.Node.Last.Again == n.Annotations[AgainAnnotation] &&
		len(last.Node.within(v.Now)) >= k.Config.MaxStopsPerNode:
		return fmt.Sprintf("the instance was stopped %d times in 24 hours (--max-stops-per-node); see "+
			"for what, then %s", len(last.Node.within(v.Now)), again("node", n.Name))
	}
	return ""
}

// again is the command by which a person lets the keeper try again.
func again(kind, name string) string {
	return fmt.Sprintf("run kubectl annotate --overwrite %s %s %s=\"$(date)\"", kind, name,
		AgainAnnotation)
}

// sayHeld notes on an attachment why it is held back, and makes events of that when it is new.
func (k *Keeper) sayHeld(ctx context.Context, v *view, n *node, a *attachment) error {
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
	said := "waits, and the keeper does not stop the instance for it: " + a.held
	k.warn(ctx, nodeReference(n.Node), "ColdAttachHeld", said)
	if claim := v.persistentVolume(a.volume()).Spec.ClaimRef; claim != nil {
		k.warn(ctx, *claim, "ColdAttachHeld", said)
	}
	return nil
}

// causes returns the volumes for which an instance is stopped.
func (v *view) causes(n *node) map[string]cause {
	causes := map[string]cause{}
	for _, a := range v.due(n) {
		volume := v.persistentVolume(a.volume())
		causes[a.volume()] = cause{Disk: diskOf(volume), Again: volume.Annotations[AgainAnnotation],
			Detach: a.DeletionTimestamp != nil, Refused: a.triedAgain(n.Record)}
	}
	return causes
}

// noteFailures records which attachments failed while the instance was stopped, for a reason that
// another stop does not mend.
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
func (r *record) failures() string {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(r.Volumes)) {
		if failed := r.Volumes[name].Failed; failed != "" {
			text += fmt.Sprintf("; the volume %s failed while the instance was stopped: %s", name, failed)
		}
	}
	return text
}

// shortened cuts an error that has to fit beside others into an annotation.
func shortened(text string) string {
	const most = 300
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// persistentVolume returns a volume of the driver that was read; an empty one if there is none.
func (v *view) persistentVolume(name string) *corev1.PersistentVolume {
	for i := range v.volumes {
		if v.volumes[i].Name == name {
			return &v.volumes[i]
		}
	}
	return &corev1.PersistentVolume{}
}

func diskOf(v *corev1.PersistentVolume) string {
	if v.Spec.CSI == nil {
		return ""
	}
	return v.Spec.CSI.VolumeHandle
}

// nodeReference names a Node as the kubelet's events do, by its name for a UID, too; kubectl
// describe looks for that.
func nodeReference(n *corev1.Node) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: types.UID(n.Name)}
}
