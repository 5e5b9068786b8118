package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// driverError is an error of the driver that Kubernetes recorded, or that is in the node's report.
type driverError struct {
	Reason   csierr.Reason
	Sentence string
	Source   string
	First    time.Time
	Last     time.Time
	at       Link   // where it was recorded
	node     string // the node of the call, if it is not the chain's
}

// link returns the link that the error is about.
func (s driverError) link() Link {
	switch a := advices[s.Reason]; {
	case a.Link == "", a.Link == LinkClaim && s.at != "":
		// With such a reason every call refuses the values of its own request.
		return s.at
	default:
		return a.Link
	}
}

// driverErrors returns the driver's errors that still count: of each call the last one, unless the
// call has succeeded since.
func (c *chain) driverErrors() []driverError {
	var all []driverError
	if c.claim != nil && c.claim.Status.Phase != phaseBound && c.claim.Status.Phase != phaseLost {
		all = c.latest(c.claim, LinkClaim, nil, "ProvisioningFailed", "ProvisioningSucceeded")
	}
	// The provisioner deletes only what is released, and has the policy Delete.
	if o := c.volume; o != nil && o.Spec.ReclaimPolicy != "Retain" &&
		slices.Contains([]string{phaseReleased, phaseFailed, ""}, o.Status.Phase) {
		all = append(all, c.latest(o, LinkVolume, nil, "VolumeFailedDelete")...)
		if len(all) == 0 {
			all = quoted(all, driverError{at: LinkVolume, Source: "PersistentVolume " + o.Metadata.Name},
				o.Status.Message)
		}
	}
	if c.pod != nil && c.volume != nil && !containersMade(c.pod) {
		ofVolume := func(message string) bool {
			return strings.Contains(message, `"`+c.volume.Metadata.Name+`"`)
		}
		if !c.attachedInKubernetes() {
			all = append(all, c.latest(c.pod, LinkAttachment, ofVolume, "FailedAttachVolume",
				"SuccessfulAttachVolume")...)
		}
		all = append(all, c.latest(c.pod, LinkMounts, ofVolume, "FailedMount", "FailedMapVolume")...)
	}
	if _, v, _ := c.report(); v != nil {
		for _, p := range v.Problems {
			if _, known := advices[p.Reason]; known {
				all = append(all, driverError{Reason: p.Reason, Sentence: p.Says, Source: theReport,
					at: LinkDevice})
			}
		}
		all = append(all, failedUnmounts(v)...)
	}
	for _, a := range c.attachments {
		all = addFailure(all, &a)
	}
	// A volume works whatever becomes of its snapshots; a claim waits for the one it is made from.
	if len(all) == 0 && c.claim != nil && c.claim.Status.Phase != phaseBound {
		for _, o := range c.snapshots() {
			if f := o.Status.Error; f != nil {
				all = quoted(all, driverError{Source: o.Kind + " " + o.Metadata.Name, First: f.Time,
					Last: f.Time, at: LinkVolume}, f.Message)
			}
		}
	}
	return all
}

// quoted adds an error if its message is one of the driver's.
func quoted(all []driverError, s driverError, message string) []driverError {
	var ok bool
	if s.Reason, s.Sentence, ok = csierr.ParseMessage(message); !ok {
		return all
	}
	return append(all, s)
}

// failedUnmounts returns the unmounts that failed and have not succeeded since. Kubernetes does not
// show them: the kubelet creates events only for failed mounts.
func failedUnmounts(v *inspection.Volume) []driverError {
	failed := map[string]driverError{} // by path
	for _, e := range v.Flight {
		s, again := failed[e.Path]
		_, known := advices[csierr.Reason(e.Reason)]
		switch {
		case e.Outcome == flight.Done && e.Event == flight.Published:
			clear(failed) // workloads have the volume again
		case e.Outcome == flight.Done:
			delete(failed, e.Path)
		case e.Outcome != flight.Failed || !known,
			e.Event != flight.Unpublished && e.Event != flight.Unmounted:
		default:
			if !again {
				s.First = e.Time
			}
			s.Reason, s.Last, s.at, s.Source = csierr.Reason(e.Reason), e.Time, LinkMounts, theRecorder
			s.Sentence = fmt.Sprintf("%q could not be unmounted: files are open below it, or the kernel "+
				"refused; the log of the driver on the node quotes it", e.Path)
			failed[e.Path] = s
		}
	}
	var all []driverError
	for _, path := range sortedKeys(failed) {
		if slices.ContainsFunc(v.Mounts, func(m inspection.Mount) bool { return m.Path == path }) {
			all = append(all, failed[path])
		}
	}
	return all
}

// lastFailure returns the failure of the attacher's last call, or nil.
func lastFailure(a *kube.Object) *kube.Failure {
	attach, detach := a.Status.AttachError, a.Status.DetachError
	if attach == nil || a.Status.Attached || detach != nil && detach.Time.After(attach.Time) {
		return detach
	}
	return attach
}

// addFailure adds the failure of an attachment. It replaces the same error in the pod's events, and
// takes over the time of the first event.
func addFailure(all []driverError, a *kube.Object) []driverError {
	f := lastFailure(a)
	if f == nil {
		return all
	}
	s := driverError{Source: "VolumeAttachment " + a.Metadata.Name, First: f.Time, Last: f.Time,
		at: LinkAttachment, node: a.Spec.NodeName}
	for _, s := range quoted(nil, s, f.Message) {
		all = slices.DeleteFunc(all, func(e driverError) bool {
			repeats := e.at == s.at && e.node == s.node
			if repeats && e.Reason == s.Reason && !e.First.IsZero() && e.First.Before(s.First) {
				s.First = e.First
			}
			return repeats
		})
		all = append(all, s)
	}
	return all
}

// events returns the events of an object with one of the reasons. It compares UIDs or, if one is
// unknown, takes those that are not older than the object.
func (e *Evidence) events(o *kube.Object, reasons ...string) []kube.Object {
	found, _ := e.Cluster.objects(kindEvent, func(event *kube.Object) bool {
		about := event.InvolvedObject
		same := about.UID == o.Metadata.UID
		if about.UID == "" || o.Metadata.UID == "" {
			same = event.Last().IsZero() || !event.Last().Before(o.Metadata.CreationTimestamp)
		}
		return same && slices.Contains(reasons, event.Reason) && about.Kind == o.Kind &&
			about.Name == o.Metadata.Name && about.Namespace == o.Metadata.Namespace
	})
	return found
}

// forgeable ends the source of a quoted event: nothing in an event proves who created it.
const forgeable = " (anybody with the right to create events can write it)"

// successes contains the reasons of events after which earlier errors of a call no longer count.
var successes = []string{"ProvisioningSucceeded", "SuccessfulAttachVolume"}

// latest returns the driver's error in the latest of an object's events. It returns nothing if no
// event contains one, or if the latest event reports a success.
func (e *Evidence) latest(o *kube.Object, at Link, about func(message string) bool,
	reasons ...string) []driverError {
	var all []driverError
	var last driverError
	for _, event := range e.events(o, reasons...) {
		s := driverError{First: event.First(), Last: event.Last(), at: at, node: o.Spec.NodeName,
			Source: "event " + event.Reason + " of " + o.Kind + " " + o.Metadata.Name + forgeable}
		failed := quoted(nil, s, event.Message)
		if about != nil && !about(event.Message) ||
			len(failed) == 0 && !slices.Contains(successes, event.Reason) {
			continue
		}
		if all = append(all, append(failed, s)[0]); len(all) == 1 || s.Last.After(last.Last) {
			last = all[len(all)-1]
		}
	}
	if last.Reason == "" {
		return nil
	}
	for _, s := range all {
		if s.Reason == last.Reason && s.First.Before(last.First) {
			last.First = s.First
		}
	}
	return []driverError{last}
}
