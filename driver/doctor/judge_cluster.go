package doctor

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/kube"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// grace is how long something may take until the doctor calls it stuck.
const grace = 5 * time.Minute

// The phases of claims, volumes and pods.
const (
	phaseBound    = "Bound"
	phaseReleased = "Released"
	phaseFailed   = "Failed"
	phaseLost     = "Lost"
	phaseRunning  = "Running"
)

func ended(pod kube.Object) bool {
	return pod.Status.Phase == "Succeeded" || pod.Status.Phase == phaseFailed
}

func unseenStep(what, why string) Step {
	return Step{State: Unseen, What: what + " could not be seen: " + why}
}

// old reports whether an object has existed for longer than the grace.
func (c *chain) old(o *kube.Object) bool {
	return c.At.Sub(o.Metadata.CreationTimestamp) > grace
}

func (c *chain) judgeClaim() Step {
	name := "PersistentVolumeClaim " + c.claimName.Namespace + "/" + c.claimName.Name
	switch {
	case c.claim == nil && c.claimWhy != "":
		return unseenStep("the claim", c.claimWhy)
	case c.claimName.Name == "":
		return Step{State: Idle, What: "no claim is bound to it"}
	case c.claim == nil:
		return broken(name, Finding{Wrong: name + " does not exist", Source: "Kubernetes",
			ByItself: "Nothing, unless something makes the claim, such as a StatefulSet.",
			Do:       "Check namespace and name.", Next: "kubectl get pvc --all-namespaces"})
	}
	o := c.claim
	what := fmt.Sprintf("%s: %s, class %s", name, cmp.Or(o.Status.Phase, "no phase"),
		cmp.Or(o.Spec.StorageClassName, "none"))
	if p := o.Metadata.Annotations.Provisioner; p != "" && p != volume.DriverName {
		return unseenStep(what+", and its volume", "it is of the driver "+p)
	}
	switch o.Status.Phase {
	case phaseBound:
		return Step{State: OK, What: what}
	case phaseLost:
		return broken(what, Finding{Wrong: "its PersistentVolume " + o.Spec.VolumeName + " is gone",
			Source: name, ByItself: "Nothing: the claim stays lost.",
			Do:   "Make a PersistentVolume for the disk if it still exists on the rack, and a new claim.",
			Next: "oxide-csi-plugin audit --kubectl"})
	}
	return c.judgePendingClaim(what)
}

func (c *chain) judgePendingClaim(what string) Step {
	var last kube.Object
	for _, e := range c.events(c.claim, "ProvisioningFailed", "Provisioning", "ExternalProvisioning",
		"WaitForFirstConsumer", "WaitForPodScheduled", "FailedBinding") {
		if last.Kind == "" || e.Last().After(last.Last()) {
			last = e
		}
	}
	switch {
	case c.heardAt(LinkClaim):
		return Step{State: Waiting, What: what}
	case last.Reason == "ProvisioningFailed", last.Reason == "FailedBinding":
		return broken(what, Finding{Wrong: last.Message, Source: "event " + last.Reason,
			Since: last.First(), Last: last.Last(), ByItself: "The provisioner tries again.",
			Do: "Follow the message.", Next: showClaim})
	case strings.HasPrefix(last.Reason, "WaitFor") && (len(c.pods) == 0 && c.podsWhy == "" ||
		c.pod != nil && c.pod.Spec.NodeName == ""):
		return Step{State: Idle, What: what + "; it waits for a pod that is scheduled"}
	case !c.old(c.claim):
		return Step{State: Waiting, What: what}
	}
	note := "no event tells why; events are kept for an hour"
	if last.Kind != "" {
		note = "the last event is " + last.Reason + ": " + last.Message
	}
	if why := c.Cluster.Unseen[kindEvent]; why != "" {
		note = "the events, which tell why, could not be seen: " + why
	}
	return broken(what, Finding{Wrong: "it has been pending for " + c.age(c.claim) + ", and " + note,
		Source: "Kubernetes", Since: c.claim.Metadata.CreationTimestamp,
		ByItself: "The provisioner tries again as long as it runs.",
		Do:       "Check that the controller of the driver runs, and its log.", Next: controllerLog})
}

// overdue reports whether an object should be gone by now.
func (c *chain) overdue(o *kube.Object) bool {
	deleted := o.Metadata.DeletionTimestamp
	return !deleted.IsZero() && c.At.Sub(deleted) > grace
}

// age returns an object's age in words.
func (c *chain) age(o *kube.Object) string {
	return c.At.Sub(o.Metadata.CreationTimestamp).Round(time.Second).String()
}

func (c *chain) judgeVolume() Step {
	o := c.volume
	switch {
	case o == nil && c.volumeWhy != "":
		return unseenStep("the PersistentVolume", c.volumeWhy)
	case o == nil && c.claim != nil && c.claim.Spec.VolumeName != "":
		name := "PersistentVolume " + c.claim.Spec.VolumeName
		return broken(name, Finding{Wrong: "the claim names " + name + ", which does not exist",
			Source: "Kubernetes", ByItself: "Nothing: the claim stays without a volume.",
			Do:   "Make a PersistentVolume for the disk if it still exists on the rack.",
			Next: "oxide-csi-plugin audit --kubectl"})
	case o == nil && c.handle == "":
		return Step{State: Idle, What: "none yet: the claim is not bound"}
	case o == nil:
		return Step{State: Idle, What: "no PersistentVolume names the disk " + c.handle}
	}
	what := fmt.Sprintf("PersistentVolume %s: %s, %s, disk %s", o.Metadata.Name,
		cmp.Or(o.Status.Phase, "no phase"), cmp.Or(o.Spec.Capacity["storage"], "no size"), c.handle)
	switch {
	case o.Spec.CSI.Driver != volume.DriverName:
		return unseenStep(what, "it is of the driver "+cmp.Or(o.Spec.CSI.Driver, "that is no CSI driver"))
	case o.Status.Phase == phaseFailed && c.heardAt(LinkVolume):
		return Step{State: Waiting, What: what}
	case o.Status.Phase == phaseFailed:
		return broken(what, Finding{Wrong: cmp.Or(o.Status.Message, "its deletion failed"),
			Source: "PersistentVolume " + o.Metadata.Name, ByItself: "The provisioner tries again.",
			Do: "Follow the message.", Next: showVolume})
	}
	return Step{State: OK, What: what}
}

func (c *chain) judgeAttachment() Step {
	a := c.attachment
	switch {
	case a == nil && c.attachmentWhy != "":
		return unseenStep("the VolumeAttachment", c.attachmentWhy)
	case a == nil && (c.pod == nil || c.pod.Spec.NodeName == ""):
		return Step{State: Idle, What: "none: no pod with the volume is on a node"}
	case a == nil && len(c.attachments) > 0:
		return c.attachedToOthers()
	case a == nil && c.volume == nil:
		return Step{State: Idle, What: "none: there is no PersistentVolume yet"}
	case a == nil && c.old(c.pod):
		return broken("none", Finding{Wrong: "the pod " + c.pod.Metadata.Name + " is on the node " +
			c.nodeName + ", and no VolumeAttachment asks for its volume there", Source: "Kubernetes",
			ByItself: "The attach controller of Kubernetes tries again.",
			Do:       "Check the events of the pod: another node may still have the volume.",
			Next:     "kubectl describe pod -n {namespace} {pod}"})
	case a == nil:
		return Step{State: Waiting, What: "none yet: the pod has just come to the node " + c.nodeName}
	}
	what := fmt.Sprintf("VolumeAttachment %s: node %s, attached %t", a.Metadata.Name,
		a.Spec.NodeName, a.Status.Attached)
	step := Step{State: OK, What: what}
	if len(c.attachments) > 1 {
		step.Notes = append(step.Notes, c.otherAttachments())
	}
	deleted := a.Metadata.DeletionTimestamp
	failure := a.Status.AttachError
	if failure == nil || a.Status.Attached {
		failure = a.Status.DetachError
	}
	switch {
	case c.heardAt(LinkAttachment):
		step.State = Waiting // for what the driver says
	case failure != nil:
		step.Finding = &Finding{Wrong: failure.Message, Source: "VolumeAttachment " + a.Metadata.Name,
			Since: failure.Time, Last: failure.Time, ByItself: "The attacher tries again.",
			Do: "Follow the message.", Next: "kubectl describe volumeattachment {attachment}"}
	case c.overdue(a):
		step.Finding = &Finding{Wrong: "it has been deleted, and the disk is not yet detached",
			Source: "VolumeAttachment " + a.Metadata.Name, Since: deleted,
			ByItself: "The attacher tries again as long as it runs.",
			Do:       "Check that the controller of the driver runs, and its log.", Next: controllerLog}
	case !deleted.IsZero():
		step.State, step.What = Waiting, what+", being detached"
	case !a.Status.Attached && c.old(a):
		step.Finding = &Finding{Wrong: "it has not been attached for " + c.age(a) +
			", and holds no error",
			Source: "VolumeAttachment " + a.Metadata.Name, Since: a.Metadata.CreationTimestamp,
			ByItself: "The attacher tries again as long as it runs.",
			Do:       "Check that the controller of the driver runs, and its log.", Next: controllerLog}
	case !a.Status.Attached:
		step.State = Waiting
	}
	return step
}

// attachedToOthers is the step for a volume that a pod waits for, and other nodes have.
func (c *chain) attachedToOthers() Step {
	step := Step{State: Waiting, What: c.otherAttachments()}
	other := c.attachments[0]
	leaving := other.Metadata.DeletionTimestamp
	if c.heardAt(LinkAttachment) || !leaving.IsZero() && c.At.Sub(leaving) < grace {
		return step
	}
	step.Finding = &Finding{Reason: csierr.DiskAttachedElsewhere, Source: "VolumeAttachment " +
		other.Metadata.Name, Since: leaving, Wrong: "the pod " + c.pod.Metadata.Name +
		" waits on the node " + c.pod.Spec.NodeName + ", and the volume belongs to the node " +
		other.Spec.NodeName}
	for _, pod := range c.pods {
		if pod.Spec.NodeName == other.Spec.NodeName {
			step.Finding.Wrong += ", where the pod " + pod.Metadata.Name + " uses it"
		}
	}
	return step
}

func (c *chain) otherAttachments() string {
	var words []string
	for _, a := range c.attachments {
		if c.attachment == nil || a.Metadata.Name != c.attachment.Metadata.Name {
			words = append(words, fmt.Sprintf("%s at node %s, attached %t", a.Metadata.Name,
				a.Spec.NodeName, a.Status.Attached))
		}
	}
	return "another VolumeAttachment of the volume: " + strings.Join(words, "; ")
}
