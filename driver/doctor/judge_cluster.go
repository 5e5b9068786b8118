package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

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
	if why := c.Cluster.Unseen[kindEvent]; why != "" {
		note = "the events, which tell why, could not be seen: " + why
	}
	return broken(what, Finding{Wrong: "it has been pending for " + c.age(c.claim) + ", and " + note,
		Source: "Kubernetes", Since: c.claim.Metadata.CreationTimestamp,
		ByItself: "The provisioner tries again as long as it runs.",
		Do:       "Check that the controller of the driver runs, and its log.", Next: controllerLog})
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
	case !deleted.IsZero() && c.At.Sub(deleted) > grace:
		step.Finding = &Finding{Wrong: "it has been deleted, and the disk is not yet detached",
			Source: "VolumeAttachment " + a.Metadata.Name, Since: deleted,
			ByItself: "The attacher tries again as long as it runs.",
			Do:       "Check that the controller of the driver runs, and its log.", Next: controllerLog}
	case !deleted.IsZero():
		step.State, step.What = Waiting, what+", being detached"
	case !a.Status.Attached && c.old(a):
		step.Finding = &Finding{Wrong: "it has not been attached for " + c.age(a) + ", and holds no error",
			Source: "VolumeAttachment " + a.Metadata.Name, Since: a.Metadata.CreationTimestamp,
			ByItself: "The attacher tries again as long as it runs.",
			Do:       "Check that the controller of the driver runs, and its log.", Next: controllerLog}
	case !a.Status.Attached:
		step.State = Waiting
	}
	return step
}

func (c *chain) otherAttachments() string {
	var words []string
	for _, a := range c.attachments {
		if a.Metadata.Name != c.attachment.Metadata.Name {
			words = append(words, fmt.Sprintf("%s at node %s, attached %t", a.Metadata.Name,
				a.Spec.NodeName, a.Status.Attached))
		}
	}
	return "another VolumeAttachment of the volume: " + strings.Join(words, "; ")
}

// wanted reports whether something on a node is to have the volume, or has it.
func (c *chain) wanted() bool { return c.nodeName != "" }

func (c *chain) judgeNode() Step {
	switch {
	case !c.wanted() && c.nodeWhy != "":
		return unseenStep("the node", c.nodeWhy)
	case !c.wanted():
		return Step{State: Idle, What: "none: the volume is on no node"}
	case c.csiNode == nil && c.nodeWhy != "":
		return unseenStep("the CSINode "+c.nodeName, c.nodeWhy)
	}
	d := c.nodeDriver()
	if d == nil {
		return c.nodeWithoutDriver()
	}
	what := fmt.Sprintf("node %s: the driver is registered, instance %s", c.nodeName, d.NodeID)
	if n := d.Allocatable.Count; n != nil {
		what += fmt.Sprintf(", room for %d volumes", *n)
	}
	step := Step{State: OK, What: what}
	c.judgeReadiness(&step)
	if r, ok := c.Nodes.Reports[c.instance]; ok && r.Instance != "" && r.Instance != c.instance {
		step.Finding = &Finding{Wrong: fmt.Sprintf("the node is registered as the instance %s, and its "+
			"driver runs on %s", c.instance, r.Instance), Source: "the node's report",
			ByItself: "Nothing until the driver on the node registers again.",
			Do:       "Delete the driver's pod on the node, so that it registers again.",
			Next:     "kubectl get csinode {node} -o yaml"}
	}
	return step
}

// judgeReadiness notes that the node does not report to Kubernetes. That is what is broken unless its
// instance does not run, which comes later in the chain and explains it.
func (c *chain) judgeReadiness(step *Step) {
	node, _ := c.Cluster.one(kindNode, named("", c.nodeName))
	if node == nil {
		return
	}
	i := slices.IndexFunc(node.Status.Conditions, func(o kube.Condition) bool {
		return o.Type == "Ready" && o.Status != "True"
	})
	if i < 0 {
		return
	}
	wrong := "the node is not ready"
	machine, asked := c.Rack.Instances[c.instance]
	if asked && machine.Unseen == "" && (machine.Missing() || machine.Object.State != instanceRunning) {
		step.Notes = append(step.Notes, wrong)
		return
	}
	step.Finding = &Finding{Wrong: wrong, Source: "Node " + c.nodeName,
		Since: node.Status.Conditions[i].LastTransitionTime,
		ByItself: "Kubernetes deletes the node's pods after some minutes, and waits until the node " +
			"confirms that they have ended.",
		Do:   "Bring the node back. Its volumes move to another node only when their pods have ended.",
		Next: "kubectl describe node {node}"}
}

// nodeWithoutDriver is the step for a node on which the driver is not registered.
func (c *chain) nodeWithoutDriver() Step {
	wrong := "the driver " + volume.DriverName + " is not registered with the node " + c.nodeName
	if c.csiNode == nil {
		wrong = "there is no CSINode " + c.nodeName + ": is the node gone?"
	}
	pod := c.driverPod()
	switch {
	case pod != nil:
		wrong += "; its pod there, " + pod.Metadata.Name + ", is " + podWords(*pod)
	case c.Cluster.Unseen[kindDriverPod] != "":
		wrong += "; whether its pod runs there could not be seen: " + c.Cluster.Unseen[kindDriverPod]
	default:
		wrong += "; no pod of it (oxide-csi-node) is there"
	}
	return broken("node "+c.nodeName, Finding{Wrong: wrong, Source: "CSINode " + c.nodeName,
		ByItself: "The driver registers as soon as its pod runs on the node.",
		Do:       "Let the driver's DaemonSet run on the node: check its pod, taints and tolerations.",
		Next:     "kubectl get pods --all-namespaces -l app=oxide-csi-node -o wide"})
}

// podWords describes the state of a pod in words.
func podWords(pod kube.Object) string {
	words := strings.ToLower(cmp.Or(pod.Status.Phase, "of unknown phase"))
	for _, s := range pod.Status.ContainerStatuses {
		switch {
		case s.State.Waiting.Reason != "":
			words += fmt.Sprintf(", %s waits (%s)", s.Name, s.State.Waiting.Reason)
		case !s.Ready:
			words += fmt.Sprintf(", %s is not ready", s.Name)
		}
	}
	return words
}

func (c *chain) judgePod() Step {
	o := c.pod
	switch {
	case o == nil && c.podsWhy != "":
		return unseenStep("the pods", c.podsWhy)
	case o == nil && c.Question.Kind == AskPod:
		name := "pod " + c.Question.Namespace + "/" + c.Question.Name
		return broken(name, Finding{Wrong: name + " does not exist", Source: "Kubernetes",
			ByItself: "Nothing, unless something makes the pod, such as a StatefulSet.",
			Do:       "Check namespace and name.", Next: "kubectl get pods -n {namespace}"})
	case o == nil:
		return Step{State: Idle, What: "no pod uses the volume"}
	}
	what := fmt.Sprintf("pod %s/%s: %s", o.Metadata.Namespace, o.Metadata.Name, podWords(*o))
	if o.Spec.NodeName != "" {
		what += ", node " + o.Spec.NodeName
	}
	switch {
	case o.Status.Phase == phaseRunning:
		return Step{State: OK, What: what}
	case o.Spec.NodeName == "":
		return c.judgeUnscheduled(what)
	case !c.old(o):
		return Step{State: Waiting, What: what}
	}
	for _, s := range o.Status.ContainerStatuses {
		if r := s.State.Waiting.Reason; r != "" && r != "ContainerCreating" && r != "PodInitializing" {
			return Step{State: OK, What: what,
				Notes: []string{"it does not run, but not for its volumes: its containers were made"}}
		}
	}
	return broken(what, Finding{Wrong: "its containers have not been made for " + c.age(o),
		Source: "Kubernetes", Since: o.Metadata.CreationTimestamp,
		ByItself: "The kubelet tries again.", Do: "Follow the events of the pod.",
		Next: "kubectl describe pod -n {namespace} {pod}"})
}

func (c *chain) judgeUnscheduled(what string) Step {
	var last kube.Object
	for _, e := range c.events(c.pod, "FailedScheduling") {
		if last.Kind == "" || e.Last().After(last.Last()) {
			last = e
		}
	}
	switch {
	case last.Kind != "":
		return broken(what, Finding{Wrong: "it is on no node: " + last.Message,
			Source: "event FailedScheduling", Since: last.First(), Last: last.Last(),
			ByItself: "The scheduler tries again whenever something changes.",
			Do:       "Follow the message.", Next: "kubectl describe pod -n {namespace} {pod}"})
	case c.old(c.pod):
		return broken(what, Finding{Wrong: "it has been on no node for " + c.age(c.pod),
			Source: "Kubernetes", Since: c.pod.Metadata.CreationTimestamp,
			ByItself: "The scheduler tries again whenever something changes.",
			Do:       "Follow the events of the pod.", Next: "kubectl describe pod -n {namespace} {pod}"})
	}
	return Step{State: Waiting, What: what + ", not yet on a node"}
}
