package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// grace is how long an object may wait before the doctor reports it as stuck.
const grace = 5 * time.Minute

const (
	phaseBound     = "Bound"
	phaseReleased  = "Released"
	phaseFailed    = "Failed"
	phaseLost      = "Lost"
	phaseRunning   = "Running"
	phaseSucceeded = "Succeeded"
)

func ended(pod kube.Object) bool {
	return pod.Status.Phase == phaseSucceeded || pod.Status.Phase == phaseFailed
}

func unseenStep(what, why string) Step {
	return Step{State: Unseen, What: what + " could not be seen: " + why}
}

func (e *Evidence) old(o *kube.Object) bool {
	return e.At.Sub(o.Metadata.CreationTimestamp) > grace
}

func (c *chain) judgeClaim() Step {
	name := "PersistentVolumeClaim " + c.claimName.Namespace + "/" + c.claimName.Name
	switch {
	case c.claim == nil && c.claimWhy != "":
		return unseenStep("the claim", c.claimWhy)
	case c.claimName.Name == "":
		return Step{State: Idle, What: "no claim is bound to it"}
	case c.claim == nil && c.volume != nil && (c.volume.Status.Phase != phaseBound ||
		!c.volume.Metadata.DeletionTimestamp.IsZero()):
		return Step{State: Idle, What: "its claim " + c.claimName.Namespace + "/" + c.claimName.Name +
			" is gone"}
	case c.claim == nil:
		return broken(name, &Finding{Wrong: name + " does not exist", Source: "Kubernetes",
			ByItself: "Nothing, unless something makes the claim, such as a StatefulSet.",
			Do:       "Check namespace and name.", Next: "kubectl get pvc --all-namespaces"})
	}
	o := c.claim
	what := fmt.Sprintf("%s: %s, class %s", name, cmp.Or(o.Status.Phase, "no phase"),
		cmp.Or(o.Spec.StorageClassName, "none"))
	if !o.Metadata.DeletionTimestamp.IsZero() {
		what += ", being deleted"
	}
	if p := o.Metadata.Annotations.Provisioner; p != "" && p != volume.DriverName {
		return unseenStep(what+", and its volume", "it is of the driver "+p)
	}
	switch {
	case c.overdue(o):
		return broken(what, c.stuckDeletion(o, name, "Kubernetes keeps a claim until no pod uses it",
			showClaim))
	case o.Status.Phase == phaseBound && o.Spec.VolumeName == "":
		return broken(what, &Finding{Wrong: "it is bound, and names no PersistentVolume", Source: name,
			ByItself: "Nothing: Kubernetes binds a claim once.",
			Do:       "Make a new claim; give it the PersistentVolume by spec.volumeName.", Next: showClaim})
	case o.Status.Phase == phaseBound:
		return Step{State: OK, What: what}
	case o.Status.Phase == phaseLost:
		return broken(what, &Finding{Wrong: "its PersistentVolume " + o.Spec.VolumeName + " is gone",
			Source: name, ByItself: "Nothing: the claim stays lost.",
			Do:   "Make a PersistentVolume for the disk if it still exists on the rack, and a new claim.",
			Next: "oxide-csi-plugin audit --kubectl"})
	}
	return c.judgePendingClaim(what)
}

func (c *chain) stuckDeletion(o *kube.Object, name, rule, next string) *Finding {
	f := &Finding{Source: name, Since: o.Metadata.DeletionTimestamp, Next: next,
		Wrong: "it was deleted " + c.At.Sub(o.Metadata.DeletionTimestamp).Round(time.Second).String() +
			" ago, and is still there",
		ByItself: "It goes when nothing holds it any more: " + rule + "."}
	if len(o.Metadata.Finalizers) > 0 {
		f.Wrong += "; its finalizers are " + firstOf(o.Metadata.Finalizers)
	}
	var holders []string
	for _, pod := range c.pods {
		holders = append(holders, "the pod "+pod.Metadata.Name+" ("+podWords(pod)+")")
	}
	if o.Kind == kindVolume {
		for _, a := range c.attachments {
			holders = append(holders, "the VolumeAttachment "+a.Metadata.Name)
		}
	}
	f.Do = "Find out who set the finalizers, and why the owner does not remove them."
	if len(holders) > 0 {
		f.Wrong += "; it is held by " + firstOf(holders)
		f.Do = "End what holds it, if nobody needs the volume."
	}
	return f
}

func (c *chain) judgePendingClaim(what string) Step {
	last := c.Cluster.lastEvent(c.claim, "ProvisioningFailed", "ProvisioningSucceeded", "Provisioning",
		"ExternalProvisioning", "WaitForFirstConsumer", "WaitForPodScheduled", "FailedBinding")
	switch {
	case last.Reason == "ProvisioningFailed", last.Reason == "FailedBinding":
		return broken(what, &Finding{Wrong: last.Message, Source: "event " + last.Reason + forgeable,
			Since: last.First(), Last: last.Last(), ByItself: "The provisioner tries again.",
			Do: "Follow the message.", Next: showClaim})
	case strings.HasPrefix(last.Reason, "WaitFor") && (len(c.pods) == 0 && c.podsWhy == "" ||
		c.pod != nil && c.pod.Spec.NodeName == ""):
		return Step{State: Idle, What: what + "; it waits for a pod that is scheduled"}
	case !c.old(c.claim):
		return Step{State: Waiting, What: what}
	}
	note := "no event says why; events are kept for an hour"
	if last.Kind != "" {
		note = "the last event is " + last.Reason + ": " + last.Message
	}
	if why := c.Cluster.Unseen[kindEvent]; why != "" {
		note = "the events, which may say why, could not be seen: " + why
	}
	return broken(what, c.silence(&Finding{Wrong: "it has been pending for " + c.age(c.claim) +
		", and " + note, Source: "Kubernetes", Since: c.claim.Metadata.CreationTimestamp,
		ByItself: "The provisioner tries again as long as it runs."}, "csi-provisioner"))
}

// silence completes a finding about a call that was not made, if no error is known. The finding
// then refers to the log of the sidecar that makes the call, or to a container of the controller's
// pod that is not ready.
func (e *Evidence) silence(f *Finding, sidecar string) *Finding {
	f.Do = "Check that the controller of the driver runs, and the log of its " + sidecar + "."
	f.Next = logOf(controllerLog, sidecar)
	if e.Cluster.Unseen[kindDriverPod] != "" {
		return f
	}
	pods := e.Nodes.driverPods(kindReplicaSet)
	if len(pods) == 0 {
		f.Wrong += "; no pod of the driver's controller is in the namespace " + e.Nodes.Namespace
		f.Do, f.Next = "Let the driver's controller run.", "kubectl get deployments -n {driverNamespace}"
	}
	for _, pod := range pods {
		if s := deadContainer(pod, driverContainer, sidecar); s != nil {
			name := pod.Metadata.Name
			f.Wrong += "; " + s.Name + " of the pod " + name + " does not work: " + podWords(pod)
			if f.Next = logOf(controllerLog, s.Name); commandWord.MatchString(name) {
				f.Next = strings.Replace(f.Next, controllerLogs, name, 1)
			}
			break
		}
	}
	return f
}

// deadContainer returns the pod's first container that is not ready and has not ended. If names are
// given, it ignores all other containers.
func deadContainer(pod kube.Object, names ...string) *kube.ContainerStatus {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if !s.Ready && s.State.Terminated == nil && (len(names) == 0 || slices.Contains(names, s.Name)) {
			return &s
		}
	}
	return nil
}

func (e *Evidence) overdue(o *kube.Object) bool {
	deleted := o.Metadata.DeletionTimestamp
	return !deleted.IsZero() && e.At.Sub(deleted) > grace
}

func (e *Evidence) age(o *kube.Object) string {
	return e.At.Sub(o.Metadata.CreationTimestamp).Round(time.Second).String()
}

func (c *chain) judgeVolume() Step {
	o := c.volume
	switch {
	case o == nil && c.volumeWhy != "":
		return unseenStep("the PersistentVolume", c.volumeWhy)
	case o == nil && c.claim != nil && c.claim.Spec.VolumeName != "":
		name := "PersistentVolume " + c.claim.Spec.VolumeName
		return broken(name, &Finding{Wrong: "the claim names " + name + ", which does not exist",
			Source: "Kubernetes", ByItself: "Nothing: the claim stays without a volume.",
			Do:   "Make a PersistentVolume for the disk if it still exists on the rack.",
			Next: "oxide-csi-plugin audit --kubectl"})
	case o == nil && c.handle == "":
		return Step{State: Idle, What: "none yet: the claim is not bound"}
	case o == nil:
		return Step{State: Idle, What: "no PersistentVolume names the disk " + c.handle}
	}
	name := "PersistentVolume " + o.Metadata.Name
	what := fmt.Sprintf("%s: %s, %s, disk %s", name, cmp.Or(o.Status.Phase, "no phase"),
		cmp.Or(o.Spec.Capacity["storage"], "no size"), c.handle)
	switch another := boundToAnother(o, c.claim); {
	case o.Spec.CSI.Driver != volume.DriverName:
		return unseenStep(what, "it is of the driver "+cmp.Or(o.Spec.CSI.Driver, "that is no CSI driver"))
	case o.Status.Phase == phaseFailed:
		return broken(what, &Finding{Wrong: cmp.Or(o.Status.Message, "its deletion failed"), Source: name,
			ByItself: "The provisioner tries again.", Do: "Follow the message.", Next: showVolume})
	case c.handle == "":
		return broken(what, &Finding{Wrong: "it names no disk (spec.csi.volumeHandle)", Source: name,
			ByItself: "Nothing: the field cannot be changed.",
			Do:       "Make the PersistentVolume again, with the disk's id.", Next: showVolume})
	case c.overdue(o):
		return broken(what, c.stuckDeletion(o, name, "Kubernetes keeps a PersistentVolume until it has "+
			"no claim and is detached, and the provisioner until its disk is deleted", showVolume))
	case another != "":
		return broken(what, &Finding{Wrong: another, Source: name,
			ByItself: "Kubernetes reports such a claim as lost.", Next: showVolume,
			Do: "Compare spec.volumeName of the claim and spec.claimRef of the PersistentVolume."})
	}
	return Step{State: OK, What: what}
}

func boundToAnother(volume, claim *kube.Object) string {
	ref := volume.Spec.ClaimRef
	switch {
	case claim == nil || claim.Status.Phase != phaseBound:
		return ""
	case ref.Namespace != claim.Metadata.Namespace || ref.Name != claim.Metadata.Name:
		return fmt.Sprintf("it belongs to the claim %q, and the claim that names it is %s/%s",
			strings.Trim(ref.Namespace+"/"+ref.Name, "/"), claim.Metadata.Namespace, claim.Metadata.Name)
	case volume.Status.Phase != phaseBound:
		return "its claim is bound to it, and its own phase is " + cmp.Or(volume.Status.Phase, "missing")
	}
	return ""
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
		return broken("none", &Finding{Wrong: "the pod " + c.pod.Metadata.Name + " is on the node " +
			c.node.name + ", and no VolumeAttachment asks for its volume there", Source: "Kubernetes",
			ByItself: "The attach controller of Kubernetes tries again.", Next: describePod,
			Do: "Check the events of the pod: another node may still have the volume."})
	case a == nil:
		return Step{State: Waiting, What: "none yet: the pod has just come to the node " + c.node.name}
	}
	what := fmt.Sprintf("VolumeAttachment %s: node %s, attached %t", a.Metadata.Name,
		a.Spec.NodeName, a.Status.Attached)
	step := Step{State: OK, What: what}
	if len(c.attachments) > 1 {
		step.Notes = append(step.Notes, c.otherAttachments())
	}
	deleted := a.Metadata.DeletionTimestamp
	switch failure := lastFailure(a); {
	case failure != nil:
		step.Finding = &Finding{Wrong: failure.Message, Source: "VolumeAttachment " + a.Metadata.Name,
			Since: failure.Time, Last: failure.Time, ByItself: "The attacher tries again.",
			Do: "Follow the message.", Next: "kubectl describe volumeattachment {attachment}"}
	case c.overdue(a), deleted.IsZero() && !a.Status.Attached && c.old(a):
		f := &Finding{Wrong: "it has been deleted, and the disk is not yet detached",
			Source: "VolumeAttachment " + a.Metadata.Name, Since: deleted,
			ByItself: "The attacher tries again as long as it runs."}
		if deleted.IsZero() {
			f.Since = a.Metadata.CreationTimestamp
			f.Wrong = "it has not been attached for " + c.age(a) + ", and holds no error"
		}
		step.Finding = c.silence(f, "csi-attacher")
	case !deleted.IsZero():
		step.State, step.What = Waiting, what+", being detached"
	case !a.Status.Attached:
		step.State = Waiting
	}
	return step
}

func (c *chain) attachedToOthers() Step {
	step := Step{State: Waiting, What: c.otherAttachments()}
	other := c.attachments[0]
	leaving := other.Metadata.DeletionTimestamp
	if !leaving.IsZero() && c.At.Sub(leaving) < grace {
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

const (
	registerAgain = "Delete the driver's pod on the node, so that it registers again."
	runDaemonSet  = "Let the driver's DaemonSet run on the node: check its pod, taints and " +
		"tolerations."
)

func (n node) judge() Step {
	switch {
	case n.name == "" && n.why != "":
		return unseenStep("the node", n.why)
	case n.name == "":
		return Step{State: Idle, What: "none: the volume is on no node"}
	case n.csiNode == nil && n.why != "":
		return unseenStep("the CSINode "+n.name, n.why)
	}
	d := nodeDriver(n.csiNode)
	if d == nil {
		return n.withoutDriver()
	}
	what := fmt.Sprintf("node %s: the driver is registered, instance %s", n.name, d.NodeID)
	if count := d.Allocatable.Count; count != nil {
		what += fmt.Sprintf(", room for %d volumes", *count)
	}
	step := Step{State: OK, What: what}
	if d.NodeID == "" {
		step.Finding = &Finding{Wrong: "the driver is registered without the id of an instance",
			Source: "CSINode " + n.name, ByItself: "Nothing until the driver registers again.",
			Do: registerAgain, Next: showNodeEntry}
	} else {
		n.judgeReadiness(&step)
	}
	if step.Finding == nil && len(step.Notes) == 0 {
		step.Finding = n.driverPodFinding()
	}
	if r, ok := n.Nodes.Reports[n.instance]; ok && r.Instance != "" && r.Instance != n.instance {
		step.Finding = &Finding{Wrong: fmt.Sprintf("the node is registered as the instance %s, and its "+
			"driver runs on %s", n.instance, r.Instance), Source: "the node's report",
			ByItself: "Nothing until the driver on the node registers again.",
			Do:       registerAgain, Next: showNodeEntry}
	}
	return step
}

// judgeReadiness adds a finding if the node is not ready. If the node's instance does not run, it
// adds only a note, because LinkInstance then has the finding.
func (n node) judgeReadiness(step *Step) {
	node, why := n.Cluster.one(kindNode, named("", n.name))
	if node == nil && why != "" {
		return
	}
	wrong, since := "there is no Node "+n.name, time.Time{}
	if node != nil {
		wrong = "the node is not ready"
		for _, o := range node.Status.Conditions {
			if o.Type == "Ready" && o.Status == "True" {
				return
			}
			if o.Type == "Ready" {
				since = o.LastTransitionTime
			}
		}
	}
	machine, asked := n.Rack.Instances[n.instance]
	if asked && machine.Unseen == "" &&
		(machine.Missing() || machine.Object.State != instanceRunning) {
		step.Notes = append(step.Notes, wrong)
		return
	}
	step.Finding = &Finding{Wrong: wrong, Source: "Node " + n.name, Since: since,
		ByItself: "Kubernetes deletes the node's pods after some minutes, and waits until the node " +
			"confirms that they have ended.",
		Do:   "Bring the node back. Its volumes move to another node only when their pods have ended.",
		Next: "kubectl describe node {node}"}
}

// driverPodFinding returns what is wrong with the driver's pod on a node with a registered driver,
// or nil. It does not report a young pod, because the pod may still start.
func (n node) driverPodFinding() *Finding {
	if n.Cluster.Unseen[kindDriverPod] != "" {
		return nil
	}
	f := &Finding{Source: "Kubernetes", Do: runDaemonSet, Next: showDrivers, ByItself: "Volumes " +
		"that are mounted stay so. None is mounted or unmounted on the node until the driver's pod runs."}
	pod := n.Nodes.driverPod(n.name)
	if pod == nil {
		f.Wrong = "no pod of the driver's DaemonSet is on the node " + n.name
		return f
	}
	s := deadContainer(*pod)
	if pod.Status.Phase == phaseRunning && len(pod.Status.ContainerStatuses) > 0 && s == nil ||
		!n.old(pod) {
		return nil
	}
	f.Wrong = "the driver's pod there, " + pod.Metadata.Name + ", is " + podWords(*pod)
	f.Next = "kubectl describe pod -n {driverNamespace} {driverPod}"
	if s != nil && commandWord.MatchString(s.Name) {
		f.Do = "Follow the log of " + s.Name + "."
		f.Next = logOf(nodeLog, s.Name)
	}
	return f
}

func (n node) withoutDriver() Step {
	wrong := "the driver " + volume.DriverName + " is not registered with the node " + n.name
	if n.csiNode == nil {
		wrong = "there is no CSINode " + n.name + ", so the node may be gone"
	}
	pod := n.Nodes.driverPod(n.name)
	next := showDrivers
	switch {
	case pod != nil:
		wrong += "; its pod there, " + pod.Metadata.Name + ", is " + podWords(*pod)
		next = logOf(nodeLog, "node-driver-registrar")
		if s := deadContainer(*pod); s != nil && commandWord.MatchString(s.Name) {
			next = logOf(nodeLog, s.Name)
		}
	case n.Cluster.Unseen[kindDriverPod] != "":
		wrong += "; whether its pod runs there could not be seen: " + n.Cluster.Unseen[kindDriverPod]
	default:
		wrong += "; no pod of its DaemonSet is there"
	}
	return broken("node "+n.name, &Finding{Wrong: wrong, Source: "CSINode " + n.name,
		ByItself: "The driver registers as soon as its pod runs on the node.", Do: runDaemonSet,
		Next: next})
}

func podWords(pod kube.Object) string {
	words := strings.ToLower(cmp.Or(pod.Status.Phase, "of unknown phase"))
	if !pod.Metadata.DeletionTimestamp.IsZero() {
		words += ", being deleted"
	}
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		switch {
		case s.State.Terminated != nil:
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
		return broken(name, &Finding{Wrong: name + " does not exist", Source: "Kubernetes",
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
	case c.overdue(o):
		return broken(what, &Finding{Wrong: "it should have been gone " + c.At.Sub(
			o.Metadata.DeletionTimestamp).Round(time.Second).String() + " ago, and is still there",
			Source: "Kubernetes", Since: o.Metadata.DeletionTimestamp, Next: nodeLog,
			ByItself: "The kubelet tries again to end its containers and to unmount its volumes. It " +
				"creates no event for an unmount that fails.",
			Do: "Look in the log of the driver on the node for calls of NodeUnpublishVolume that fail."})
	case o.Status.Phase == phaseRunning, ended(*o):
		return Step{State: OK, What: what}
	case o.Spec.NodeName == "":
		return c.judgeUnscheduled(what)
	case !c.old(o):
		return Step{State: Waiting, What: what}
	}
	if containersMade(o) {
		return Step{State: OK, What: what,
			Notes: []string{"it does not run, but not because of its volumes: its containers were made"}}
	}
	wrong, source := "its containers have not been made for "+c.age(o), "Kubernetes"
	failures := []string{"FailedMount", "FailedMapVolume", "FailedAttachVolume"}
	if isAttached(c.attachment) {
		failures = failures[:2]
	}
	if e := c.Cluster.lastEvent(o, failures...); e.Kind != "" {
		wrong, source = wrong+": "+e.Message, "event "+e.Reason+forgeable
	}
	return broken(what, &Finding{Wrong: wrong, Source: source, Since: o.Metadata.CreationTimestamp,
		ByItself: "The kubelet tries again.", Do: "Follow the events of the pod.", Next: describePod})
}

// containersMade reports whether any container of the pod was created. The kubelet creates the
// first one after it has mounted all volumes of the pod.
func containersMade(o *kube.Object) bool {
	all := slices.Concat(o.Status.InitContainerStatuses, o.Status.ContainerStatuses)
	return o.Status.Phase == phaseRunning || o.Status.Phase == phaseSucceeded ||
		slices.ContainsFunc(all, func(s kube.ContainerStatus) bool {
			r := s.State.Waiting.Reason
			return s.State.Running != nil || s.State.Terminated != nil || s.RestartCount > 0 ||
				r != "" && r != "ContainerCreating" && r != "PodInitializing"
		})
}

func (c *chain) judgeUnscheduled(what string) Step {
	f := &Finding{Wrong: "it has been on no node for " + c.age(c.pod), Source: "Kubernetes",
		Since: c.pod.Metadata.CreationTimestamp, Do: "Follow the events of the pod.",
		Next: describePod, ByItself: "The scheduler tries again whenever something changes."}
	last := c.Cluster.lastEvent(c.pod, "FailedScheduling")
	switch {
	case last.Kind != "":
		f.Wrong, f.Source = "it is on no node: "+last.Message, "event FailedScheduling"+forgeable
		f.Since, f.Last = last.First(), last.Last()
	case !c.old(c.pod):
		return Step{State: Waiting, What: what + ", not yet on a node"}
	}
	return broken(what, f)
}
