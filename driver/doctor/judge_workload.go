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

// judgeReadiness notes that the node does not report to Kubernetes. That is what is broken unless
// its instance does not run, which comes later in the chain and explains it.
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
	if asked && machine.Unseen == "" &&
		(machine.Missing() || machine.Object.State != instanceRunning) {
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
		wrong = "there is no CSINode " + c.nodeName + ", so the node may be gone"
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
	if !pod.Metadata.DeletionTimestamp.IsZero() {
		words += ", being deleted"
	}
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
