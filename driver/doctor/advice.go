package doctor

import (
	"maps"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// advice is what follows from a reason: the link of the chain that is broken, what happens by
// itself, what a person has to do, and the next command. driver/REASONS.md has the facts.
type advice struct {
	// Link is empty for a reason that any call may end with: then it is the link at which it was said.
	Link     Link
	ByItself string
	Do       string
	// Next is a command with words such as {volume}; see names.
	Next string
}

// What happens by itself.
const (
	repeated = "The orchestrator repeats the call, which fails until somebody has acted."
	passes   = "The orchestrator repeats the call, which succeeds as soon as the cause has passed."
	goesOn   = "The orchestrator repeats the call, which continues where this one stopped."
	never    = "Nothing: repeating the call does not help."
)

// The commands. All of them but kernelLog only read, so that nothing is done that was not
// understood first.
const (
	showClaim    = "kubectl get pvc -n {namespace} {claim} -o yaml"
	showClass    = "kubectl get storageclass {class} -o yaml"
	showVolume   = "kubectl get pv {pv} -o yaml"
	showPods     = "kubectl get pods -n {namespace} -o wide"
	showNodePods = "kubectl get pods --all-namespaces --field-selector spec.nodeName={node}"
	showDisk     = "oxide disk view --disk {volume}"
	showInstance = "oxide instance view --instance {instance}"
	listDisks    = "oxide instance disk list --instance {instance}"
	inspectNode  = "kubectl exec -n {driverNamespace} {driverPod} -c oxide-plugin -- " +
		"/oxide-csi-plugin inspect --volume {volume}={disk}"
	nodeLog       = "kubectl logs -n {driverNamespace} {driverPod} -c oxide-plugin --since=1h"
	controllerLog = "kubectl logs -n {driverNamespace} " + controllerLogs +
		" -c oxide-plugin --since=1h"
	// The one command that is more than a read: it makes a privileged pod on the node; docs/doctor.md
	// says so.
	kernelLog = "kubectl debug node/{node} -it --profile=sysadmin --image=busybox -- dmesg"
	checkRack = "oxide-csi-plugin doctor rack"
)

// controllerLogs names the pods of the controller for kubectl logs.
const controllerLogs = "deployment/oxide-csi-controller"

// controllerLogOf is the command that shows the log of a container of the controller.
func controllerLogOf(container string) string {
	return strings.Replace(controllerLog, driverContainer, container, 1)
}

// advices has an entry for every reason. Its parts are in the order of driver/REASONS.md.
var advices = join(requestAdvices, stateAdvices, rackAdvices, nodeAdvices)

func join(parts ...map[csierr.Reason]advice) map[csierr.Reason]advice {
	all := map[csierr.Reason]advice{}
	for _, part := range parts {
		maps.Copy(all, part)
	}
	return all
}
