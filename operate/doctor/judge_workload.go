package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// What to do about a node where the driver does not work.
const (
	registerAgain = "Delete the driver's pod on the node, so that it registers again."
	runDaemonSet  = "Let the driver's DaemonSet run on the node: check its pod, taints and " +
		"tolerations."
)

func (c *chain) judgeNode() Step {
	switch {
	case c.nodeName == "" && c.nodeWhy != "":
		return unseenStep("the node", c.nodeWhy)
	case c.nodeName == "":
		return Step{State: Idle, What: "none: the volume is on no node"}
	case c.csiNode == nil && c.nodeWhy != "":
		return unseenStep("the CSINode "+c.nodeName, c.nodeWhy)
	}
	d := nodeDriver(c.csiNode)
	if d == nil {
		return c.nodeWithoutDriver()
	}
	what := fmt.Sprintf("node %s: the driver is registered, instance %s", c.nodeName, d.NodeID)
	if n := d.Allocatable.Count; n != nil {
		what += fmt.Sprintf(", room for %d volumes", *n)
	}
	step := Step{State: OK, What: what}
	if d.NodeID == "" {
		step.Finding = &Finding{Wrong: "the driver is registered without the id of an instance",
			Source: "CSINode " + c.nodeName, ByItself: "Nothing until the driver registers again.",
			Do: registerAgain, Next: showNodeEntry}
	} else {
		c.judgeReadiness(&step)
	}
	if step.Finding == nil && len(step.Notes) == 0 {
		step.Finding = c.driverPodFinding()
	}
	if r, ok := c.Nodes.Reports[c.instance]; ok && r.Instance != "" && r.Instance != c.instance {
		step.Finding = &Finding{Wrong: fmt.Sprintf("the node is registered as the instance %s, and its "+
			"driver runs on %s", c.instance, r.Instance), Source: "the node's report",
			ByItself: "Nothing until the driver on the node registers again.",
			Do:       registerAgain, Next: showNodeEntry}
	}
	return step
}

// judgeReadiness adds a finding if the node is not ready. If its instance does not run, which is a
// later link and explains this, it adds a note instead.
func (c *chain) judgeReadiness(step *Step) {
	node, why := c.Cluster.one(kindNode, named("", c.nodeName))
	if node == nil && why != "" {
		return
	}
	wrong, since := "there is no Node "+c.nodeName, time.Time{}
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
	machine, asked := c.Rack.Instances[c.instance]
	if asked && machine.Unseen == "" &&
		(machine.Missing() || machine.Object.State != instanceRunning) {
		step.Notes = append(step.Notes, wrong)
		return
	}
	step.Finding = &Finding{Wrong: wrong, Source: "Node " + c.nodeName,
		Since: since,
		ByItself: "Kubernetes deletes the node's pods after some minutes, and waits until the node " +
			"confirms that they have ended.",
		Do:   "Bring the node back. Its volumes move to another node only when their pods have ended.",
		Next: "kubectl describe node {node}"}
}

// driverPodFinding returns what is wrong with the driver's pod on a node where the driver is
// registered, or nil. A young pod may still be starting.
func (c *chain) driverPodFinding() *Finding {
	if c.Cluster.Unseen[kindDriverPod] != "" {
		return nil
	}
	f := Finding{Source: "Kubernetes", ByItself: "Volumes that are mounted stay so. None is mounted " +
		"or unmounted on the node until the driver's pod runs.",
		Do:   runDaemonSet,
		Next: showDrivers}
	pod := c.driverPod(c.nodeName)
	if pod == nil {
		f.Wrong = "no pod of the driver's DaemonSet is on the node " + c.nodeName
		return &f
	}
	s := deadContainer(*pod)
	if pod.Status.Phase == phaseRunning && len(pod.Status.ContainerStatuses) > 0 && s == nil ||
		!c.old(pod) {
		return nil
	}
	f.Wrong = "the driver's pod there, " + pod.Metadata.Name + ", is " + podWords(*pod)
	f.Next = "kubectl describe pod -n {driverNamespace} {driverPod}"
	if s != nil && commandWord.MatchString(s.Name) {
		f.Do = "Follow the log of " + s.Name + "."
		f.Next = logOf(nodeLog, s.Name)
	}
	return &f
}

// nodeWithoutDriver is the step for a node on which the driver is not registered.
func (c *chain) nodeWithoutDriver() Step {
	wrong := "the driver " + volume.DriverName + " is not registered with the node " + c.nodeName
	if c.csiNode == nil {
		wrong = "there is no CSINode " + c.nodeName + ", so the node may be gone"
	}
	pod := c.driverPod(c.nodeName)
	next := showDrivers
	switch {
	case pod != nil:
		wrong += "; its pod there, " + pod.Metadata.Name + ", is " + podWords(*pod)
		next = logOf(nodeLog, "node-driver-registrar")
		if s := deadContainer(*pod); s != nil && commandWord.MatchString(s.Name) {
			next = logOf(nodeLog, s.Name)
		}
	case c.Cluster.Unseen[kindDriverPod] != "":
		wrong += "; whether its pod runs there could not be seen: " + c.Cluster.Unseen[kindDriverPod]
	default:
		wrong += "; no pod of its DaemonSet is there"
	}
	return broken("node "+c.nodeName, Finding{Wrong: wrong, Source: "CSINode " + c.nodeName,
		ByItself: "The driver registers as soon as its pod runs on the node.",
		Do:       runDaemonSet,
		Next:     next})
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
	case c.overdue(o):
		return broken(what, Finding{Wrong: "it was to be gone " + c.At.Sub(o.Metadata.DeletionTimestamp).
			Round(time.Second).String() + " ago, and is still there", Source: "Kubernetes",
			Since: o.Metadata.DeletionTimestamp,
			ByItself: "The kubelet tries again to end its containers and to unmount its volumes. Of an " +
				"unmount that fails it makes no event.",
			Do:   "Look for calls of NodeUnpublishVolume that fail in the log of the driver on the node.",
			Next: nodeLog})
	case o.Status.Phase == phaseRunning, ended(*o):
		return Step{State: OK, What: what}
	case o.Spec.NodeName == "":
		return c.judgeUnscheduled(what)
	case !c.old(o):
		return Step{State: Waiting, What: what}
	}
	if containersMade(o) {
		return Step{State: OK, What: what,
			Notes: []string{"it does not run, but not for its volumes: its containers were made"}}
	}
	wrong, source := "its containers have not been made for "+c.age(o), "Kubernetes"
	failures := []string{"FailedMount", "FailedMapVolume", "FailedAttachVolume"}
	if c.attachedInKubernetes() {
		failures = failures[:2]
	}
	if e := latestOf(c.events(o, failures...)); e.Kind != "" {
		wrong, source = wrong+": "+e.Message, "event "+e.Reason+forgeable
	}
	return broken(what, Finding{Wrong: wrong, Source: source, Since: o.Metadata.CreationTimestamp,
		ByItself: "The kubelet tries again.", Do: "Follow the events of the pod.",
		Next: describePod})
}

// containersMade reports whether a container or an init container of the pod was created. The
// kubelet creates none before every volume of the pod is mounted.
func containersMade(o *kube.Object) bool {
	all := slices.Concat(o.Status.InitContainerStatuses, o.Status.ContainerStatuses)
	return o.Status.Phase == phaseRunning || o.Status.Phase == phaseSucceeded ||
		slices.ContainsFunc(all, func(s kube.ContainerStatus) bool {
			r := s.State.Waiting.Reason
			return s.State.Running != nil || s.State.Terminated != nil || s.RestartCount > 0 ||
				r != "" && r != "ContainerCreating" && r != "PodInitializing"
		})
}

func latestOf(events []kube.Object) (last kube.Object) {
	for _, e := range events {
		if last.Kind == "" || e.Last().After(last.Last()) {
			last = e
		}
	}
	return last
}

func (c *chain) judgeUnscheduled(what string) Step {
	f := Finding{Wrong: "it has been on no node for " + c.age(c.pod), Source: "Kubernetes",
		Since:    c.pod.Metadata.CreationTimestamp,
		ByItself: "The scheduler tries again whenever something changes.",
		Do:       "Follow the events of the pod.", Next: describePod}
	last := latestOf(c.events(c.pod, "FailedScheduling"))
	switch {
	case last.Kind != "":
		f.Wrong, f.Source = "it is on no node: "+last.Message, "event FailedScheduling"+forgeable
		f.Since, f.Last = last.First(), last.Last()
	case !c.old(c.pod):
		return Step{State: Waiting, What: what + ", not yet on a node"}
	}
	return broken(what, f)
}
