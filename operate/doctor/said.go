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

// said is an error of the driver that Kubernetes recorded, or the node's report tells.
type said struct {
	Reason   csierr.Reason
	Sentence string
	Source   string
	First    time.Time
	Last     time.Time
	at       Link   // where it was recorded
	node     string // the node of the call, if it is not the chain's
}

// link returns the link that the error is about.
func (s said) link() Link {
	switch a := advices[s.Reason]; {
	case a.Link == "", a.Link == LinkClaim && s.at != "":
		// What a create says of the request's values, every other call says of its own.
		return s.at
	default:
		return a.Link
	}
}

// heardAt reports whether the driver's errors that still count include one recorded at a link. Then
// that error, which may be about another link, is what is wrong.
func (c *chain) heardAt(at Link) bool {
	return slices.ContainsFunc(c.heard, func(s said) bool { return s.at == at })
}

// said returns the driver's errors that still count: an error of a call that has succeeded since is
// history.
func (c *chain) said() []said {
	var all []said
	if c.claim != nil && c.claim.Status.Phase != phaseBound {
		all = append(all, c.latest(c.claim, LinkClaim, nil, "ProvisioningFailed")...)
	}
	if c.volume != nil && c.volume.Status.Phase != phaseBound {
		all = append(all, c.latest(c.volume, LinkVolume, nil, "VolumeFailedDelete")...)
		if reason, sentence, ok := csierr.ParseMessage(c.volume.Status.Message); ok && len(all) == 0 {
			all = append(all, said{Reason: reason, Sentence: sentence, at: LinkVolume,
				Source: "PersistentVolume " + c.volume.Metadata.Name})
		}
	}
	attached := c.attachment != nil && c.attachment.Status.Attached
	if c.pod != nil && c.pod.Status.Phase != phaseRunning && !ended(*c.pod) && c.volume != nil {
		ofVolume := func(message string) bool {
			return strings.Contains(message, `"`+c.volume.Metadata.Name+`"`)
		}
		if !attached {
			all = append(all, c.latest(c.pod, LinkAttachment, ofVolume, "FailedAttachVolume")...)
		}
		all = append(all, c.latest(c.pod, LinkMounts, ofVolume, "FailedMount", "FailedMapVolume")...)
	}
	if _, v, _ := c.report(); v != nil {
		for _, p := range v.Problems {
			if _, known := advices[p.Reason]; known {
				all = append(all, said{Reason: p.Reason, Sentence: p.Says, Source: theReport, at: LinkDevice})
			}
		}
		all = append(all, failedUnmounts(v)...)
	}
	for _, a := range c.attachments {
		if !a.Status.Attached {
			all = addFailure(all, a, a.Status.AttachError)
		}
		all = addFailure(all, a, a.Status.DetachError)
	}
	return all
}

// failedUnmounts returns the unmounts that have failed and were not overcome. Kubernetes shows
// nothing of them: the kubelet makes events of failed mounts only.
func failedUnmounts(v *inspection.Volume) []said {
	failed := map[string]said{} // by path
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
	var all []said
	for _, path := range sortedKeys(failed) {
		if slices.ContainsFunc(v.Mounts, func(m inspection.Mount) bool { return m.Path == path }) {
			all = append(all, failed[path])
		}
	}
	return all
}

// addFailure adds the failure of an attachment. The events of a pod may know it for longer.
func addFailure(all []said, attachment kube.Object, failure *kube.Failure) []said {
	if failure == nil {
		return all
	}
	reason, sentence, ok := csierr.ParseMessage(failure.Message)
	if !ok {
		return all
	}
	s := said{Reason: reason, Sentence: sentence, Source: "VolumeAttachment " +
		attachment.Metadata.Name, First: failure.Time, Last: failure.Time, at: LinkAttachment,
		node: attachment.Spec.NodeName}
	if i := slices.IndexFunc(all, func(other said) bool { return other.Reason == reason }); i >= 0 {
		if known := all[i].First; !known.IsZero() && known.Before(s.First) {
			s.First = known
		}
		if all[i].Last.After(s.Last) {
			s.Last = all[i].Last
		}
		all[i] = s
		return all
	}
	return append(all, s)
}

// events returns the events of an object with one of the reasons.
func (e *Evidence) events(o *kube.Object, reasons ...string) []kube.Object {
	found, _ := e.Cluster.objects(kindEvent, func(event *kube.Object) bool {
		about := event.InvolvedObject
		return slices.Contains(reasons, event.Reason) && about.Kind == o.Kind &&
			about.Name == o.Metadata.Name && about.Namespace == o.Metadata.Namespace &&
			(about.UID == "" || o.Metadata.UID == "" || about.UID == o.Metadata.UID)
	})
	return found
}

// latest returns the driver's error in the latest of an object's events, unless none of them has
// one. Those before it were overcome.
func (e *Evidence) latest(o *kube.Object, at Link, about func(message string) bool,
	reasons ...string) []said {
	var last said
	var all []said
	for _, event := range e.events(o, reasons...) {
		reason, sentence, ok := csierr.ParseMessage(event.Message)
		if !ok || about != nil && !about(event.Message) {
			continue
		}
		s := said{Reason: reason, Sentence: sentence, First: event.First(), Last: event.Last(), at: at,
			Source: "event " + event.Reason + " of " + o.Kind + " " + o.Metadata.Name}
		all = append(all, s)
		if last.Reason == "" || s.Last.After(last.Last) {
			last = s
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
	return []said{last}
}
