package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

func (f Finding) brokenLink() Link {
	// In advices, LinkClaim means a wrong value in a request. Then the failed call's link is broken.
	if link := advices[f.Reason].Link; link != "" && link != LinkClaim {
		return link
	}
	return f.Link // where the error was recorded
}

// driverErrors returns the last error of each call to the driver that has not succeeded since. It
// reads the errors from objects of Kubernetes and from the node's report.
func (c *chain) driverErrors() []Finding {
	var all []Finding
	if c.claim != nil && c.claim.Status.Phase != phaseBound && c.claim.Status.Phase != phaseLost {
		all = c.Cluster.latest(all, c.claim, LinkClaim, "", "ProvisioningFailed", "ProvisioningSucceeded")
	}
	// The provisioner deletes only a volume that is released and has the reclaim policy Delete.
	if o := c.volume; o != nil && o.Spec.ReclaimPolicy != "Retain" &&
		slices.Contains([]string{phaseReleased, phaseFailed, ""}, o.Status.Phase) {
		if all = c.Cluster.latest(all, o, LinkVolume, "", "VolumeFailedDelete"); len(all) == 0 {
			all = quoted(all, Finding{Link: LinkVolume, Source: "PersistentVolume " + o.Metadata.Name},
				o.Status.Message)
		}
	}
	if c.pod != nil && c.volume != nil && !containersMade(c.pod) {
		ofVolume := `"` + c.volume.Metadata.Name + `"`
		if !isAttached(c.attachment) {
			all = c.Cluster.latest(all, c.pod, LinkAttachment, ofVolume, "FailedAttachVolume",
				"SuccessfulAttachVolume")
		}
		all = c.Cluster.latest(all, c.pod, LinkMounts, ofVolume, "FailedMount", "FailedMapVolume")
	}
	if v, _ := c.reported(); v != nil {
		for _, p := range v.Problems {
			if _, known := advices[p.Reason]; known {
				all = append(all, Finding{Reason: p.Reason, Wrong: p.Says, Source: theReport, Link: LinkDevice})
			}
		}
		all = append(all, v.failedUnmounts()...)
	}
	for _, a := range c.attachments {
		all = addFailure(all, &a)
	}
	// An error of a snapshot matters only if the claim waits for the snapshot.
	if len(all) == 0 && c.claim != nil && c.claim.Status.Phase != phaseBound {
		for _, o := range c.snapshots() {
			if f := o.Status.Error; f != nil {
				all = quoted(all, Finding{Source: o.Kind + " " + o.Metadata.Name, Since: f.Time,
					Last: f.Time, Link: LinkVolume}, f.Message)
			}
		}
	}
	return all
}

func quoted(all []Finding, f Finding, message string) []Finding {
	var ok bool
	if f.Reason, f.Wrong, ok = csierr.ParseMessage(message); !ok {
		return all
	}
	return append(all, f)
}

// failedUnmounts returns the failed unmounts of paths that are still mounted. Only the node's
// report shows them: the kubelet creates events for failed mounts, but not for failed unmounts.
func (v nodeView) failedUnmounts() (all []Finding) {
	failed := map[string]Finding{} // keys: paths
	for _, e := range v.Flight {
		f, again := failed[e.Path]
		_, known := advices[csierr.Reason(e.Reason)]
		switch {
		case e.Outcome == flight.Done && e.Event == flight.Published:
			clear(failed) // the volume has been published again
		case e.Outcome == flight.Done:
			delete(failed, e.Path)
		case e.Outcome != flight.Failed || !known,
			e.Event != flight.Unpublished && e.Event != flight.Unmounted:
		default:
			if !again {
				f.Since = e.Time
			}
			f.Reason, f.Last, f.Link, f.Source = csierr.Reason(e.Reason), e.Time, LinkMounts, theRecorder
			f.Wrong = fmt.Sprintf("%q could not be unmounted: files are open below it, or the kernel "+
				"refused; the log of the driver on the node has the kernel's error", e.Path)
			failed[e.Path] = f
		}
	}
	for _, path := range sortedKeys(failed) {
		if slices.ContainsFunc(v.Mounts, func(m inspection.Mount) bool { return m.Path == path }) {
			all = append(all, failed[path])
		}
	}
	return all
}

// lastFailure returns the error of the attacher's last call, or nil if that call succeeded.
func lastFailure(a *kube.Object) *kube.Failure {
	attach, detach := a.Status.AttachError, a.Status.DetachError
	if attach == nil || a.Status.Attached || detach != nil && detach.Time.After(attach.Time) {
		return detach
	}
	return attach
}

// addFailure adds the last error of a VolumeAttachment. It removes an attach error of the same node
// that came from the pod's events. If both have the same reason, it keeps the earlier Since.
func addFailure(all []Finding, a *kube.Object) []Finding {
	last := lastFailure(a)
	if last == nil {
		return all
	}
	for _, f := range quoted(nil, Finding{Source: "VolumeAttachment " + a.Metadata.Name,
		Since: last.Time, Last: last.Time, Link: LinkAttachment, node: a.Spec.NodeName}, last.Message) {
		all = slices.DeleteFunc(all, func(e Finding) bool {
			repeats := e.Link == f.Link && e.node == f.node
			if repeats && e.Reason == f.Reason && !e.Since.IsZero() && e.Since.Before(f.Since) {
				f.Since = e.Since
			}
			return repeats
		})
		all = append(all, f)
	}
	return all
}

// events() returns an object's events with one of these reasons, the latest first. It compares
// names and UIDs. If a UID is unknown, it omits events that are older than the object.
func (c Cluster) events(o *kube.Object, reasons ...string) []kube.Object {
	found, _ := c.objects(kindEvent, func(event *kube.Object) bool {
		about := event.InvolvedObject
		same := about.UID == o.Metadata.UID
		if about.UID == "" || o.Metadata.UID == "" {
			same = event.Last().IsZero() || !event.Last().Before(o.Metadata.CreationTimestamp)
		}
		return same && slices.Contains(reasons, event.Reason) && reference(event) == reference(o)
	})
	slices.SortStableFunc(found, func(a, b kube.Object) int { return b.Last().Compare(a.Last()) })
	return found
}

func (c Cluster) lastEvent(o *kube.Object, reasons ...string) (last kube.Object) {
	if all := c.events(o, reasons...); len(all) > 0 {
		last = all[0]
	}
	return last
}

// forgeable is appended to the source of an error from an event, because anybody may write events.
const forgeable = " (anybody with the right to create events can write it)"

// successes contains the reasons of successful events. Errors before a success do not count.
var successes = []string{"ProvisioningSucceeded", "SuccessfulAttachVolume"}

// latest() adds the driver's latest error in o's events, unless a later event reports a success. It
// skips messages without the text in about. Since is the time of the first error with that reason.
func (c Cluster) latest(all []Finding, o *kube.Object, at Link, about string,
	reasons ...string) []Finding {
	last := len(all)
	for _, event := range c.events(o, reasons...) {
		failed := quoted(nil, Finding{Since: event.First(), Last: event.Last(), Link: at,
			node: o.Spec.NodeName, Source: "event " + event.Reason + " of " + o.Kind + " " +
				o.Metadata.Name + forgeable}, event.Message)
		switch {
		case !strings.Contains(event.Message, about):
		case len(failed) == 0 && len(all) == last && slices.Contains(successes, event.Reason):
			return all
		case len(failed) == 0:
		case len(all) == last:
			all = append(all, failed...)
		case failed[0].Reason == all[last].Reason && failed[0].Since.Before(all[last].Since):
			all[last].Since = failed[0].Since
		}
	}
	return all
}

// advice completes the explanation of some reasons (csierr.Explain): it names the broken link, what
// happens by itself, and the next command.
type advice struct {
	// Link is the broken link. "" means the link of the failed call, whichever call that is.
	Link     Link
	ByItself string
	// Next is a command with placeholders such as {volume}. names() returns their values.
	Next    string
	Reasons reasons // the reasons for which the advice is given
}

// Values of ByItself, which says what happens if nobody acts.
const (
	repeated = "The orchestrator repeats the call, which fails until somebody has acted."
	succeeds = "The orchestrator repeats the call, which succeeds "
	passes   = succeeds + "as soon as the cause has passed."
	goesOn   = "The orchestrator repeats the call, which continues where this one stopped."
	never    = "Nothing: repeating the call does not help."
)

// Values of Next: commands for a person to run. Only kernelLog changes the cluster.
const (
	showClaim     = "kubectl get pvc -n {namespace} {claim} -o yaml"
	showClass     = "kubectl get storageclass {class} -o yaml"
	showVolume    = "kubectl get pv {pv} -o yaml"
	showPods      = "kubectl get pods -n {namespace} -o wide"
	showNodePods  = "kubectl get pods --all-namespaces --field-selector spec.nodeName={node}"
	showNodeEntry = "kubectl get csinode {node} -o yaml"
	showDrivers   = "kubectl get pods -n {driverNamespace} -o wide"
	describePod   = "kubectl describe pod -n {namespace} {pod}"
	showDisk      = "oxide disk view --disk {volume}"
	showInstance  = "oxide instance view --instance {instance}"
	showSnapshots = "kubectl get volumesnapshotcontents"
	listDisks     = "oxide instance disk list --instance {instance}"
	inspectNode   = "kubectl exec -n {driverNamespace} {driverPod} -c oxide-plugin -- " +
		"/oxide-csi-plugin inspect --volume {volume}={disk}"
	nodeLog       = "kubectl logs -n {driverNamespace} {driverPod} -c oxide-plugin --since=1h"
	controllerLog = "kubectl logs -n {driverNamespace} " + controllerLogs +
		" -c oxide-plugin --since=1h"
	// kernelLog creates a privileged pod on the node; docs/doctor.md says so.
	kernelLog = "kubectl debug node/{node} -it --profile=sysadmin --image=busybox -- dmesg"
	checkRack = "oxide-csi-plugin doctor rack"
)

const controllerLogs = "deployment/oxide-csi-controller"

func logOf(command, container string) string {
	return strings.Replace(command, driverContainer, container, 1)
}

type reasons = []csierr.Reason

var advised = []advice{
	{"", never, controllerLog, reasons{csierr.VolumeIDMissing, csierr.FieldMissing}},
	{"", "The orchestrator begins the listing again.", controllerLog,
		reasons{csierr.StartingTokenInvalid}},
	{"", never, showClaim, reasons{csierr.NotSupported}},
	{"", passes, showPods, reasons{csierr.OperationPending}},
	{"", passes, controllerLog, reasons{csierr.LookTooOld}},
	{"", goesOn, showPods, reasons{csierr.DeadlineExceeded}},
	{"", "The orchestrator repeats the call if it still needs it.", showPods,
		reasons{csierr.Canceled}},
	{"", repeated, controllerLog, reasons{csierr.Internal}},
	{LinkClaim, never, showClaim, reasons{csierr.CapabilityInvalid, csierr.CapabilityUnsupported,
		csierr.CapacityInvalid, csierr.CapacityOutOfRange, csierr.SourceUnsupported,
		csierr.SourceIncompatible, csierr.UseDiffers, csierr.UseUnknown}},
	{LinkClaim, repeated, showClass, reasons{csierr.ParameterInvalid, csierr.MkfsOptions,
		csierr.ImageNotFound, csierr.ValueRefused}},
	{LinkClaim, repeated, "kubectl get csinodes -o yaml", reasons{csierr.TopologyInvalid}},
	{LinkClaim, repeated, showClaim, reasons{csierr.TopologyUnreachable, csierr.VolumeExists}},
	{LinkClaim, repeated, showSnapshots, reasons{csierr.SnapshotNotFound, csierr.SnapshotExists}},
	{LinkClaim, passes, showSnapshots, reasons{csierr.SnapshotNotReady}},
	{LinkClaim, "Nothing: the snapshot stays faulted.", showSnapshots,
		reasons{csierr.SnapshotFaulted}},
	{LinkClaim, never, showDisk, reasons{csierr.SnapshotImpossible}},
	{LinkVolume, never, showVolume, reasons{csierr.FieldInvalid}},
	{LinkVolume, repeated, showVolume, reasons{csierr.MountFlags, csierr.DiskNameMissing}},
	{LinkAttachment, never, showVolume, reasons{csierr.ReadOnlyUnsupported}},
	{LinkNode, repeated, nodeLog, reasons{csierr.StateNotKept, csierr.ToolsMissing,
		csierr.InstanceUnknown}},
	{LinkRack, repeated, checkRack, reasons{csierr.TokenRejected, csierr.RoleMissing,
		csierr.ProjectNotFound, csierr.ProjectChanged, csierr.RackUnknown}},
	{LinkRack, "Calls continue with the token read last, until the rack refuses it.", controllerLog,
		reasons{csierr.TokenFileUnreadable}},
	{LinkRack, repeated, controllerLog, reasons{csierr.ObjectNotFound, csierr.NameTaken,
		csierr.RackError, csierr.RackResponseInvalid}},
	{LinkRack, succeeds + "when there is room.", "oxide-csi-plugin audit --kubectl",
		reasons{csierr.RackFull}},
	{LinkRack, passes, checkRack, reasons{csierr.RackUnavailable}},
	{LinkRack, "The orchestrator repeats the call, which finds what was done.", checkRack,
		reasons{csierr.EffectUnknown}},
	{LinkInstance, repeated, showNodeEntry, reasons{csierr.InstanceNotFound}},
	{LinkInstance, repeated, listDisks, reasons{csierr.InstanceFull}},
	{LinkInstance, succeeds + "while the instance is stopped. The driver never stops an instance.",
		showNodePods, reasons{csierr.InstanceMustBeStopped}},
	{LinkInstance, repeated, showInstance, reasons{csierr.InstanceState}},
	{LinkDisk, "Nothing: a disk does not come back.", showDisk, reasons{csierr.VolumeNotFound}},
	{LinkDisk, repeated, showDisk, reasons{csierr.DiskAttached, csierr.Conflict}},
	{LinkDisk, succeeds + "when the volume is unpublished there. The driver never detaches a disk " +
		"that is in use.", "kubectl get volumeattachments", reasons{csierr.DiskAttachedElsewhere}},
	{LinkDisk, passes, showDisk, reasons{csierr.DiskBusy}},
	{LinkDisk, "Nothing: an import stays as it is.", showDisk, reasons{csierr.DiskImporting}},
	{LinkDisk, "Nothing: the disk stays faulted.", showDisk, reasons{csierr.DiskFaulted}},
	{LinkDisk, never, showDisk, reasons{csierr.OtherProject, csierr.BootDisk}},
	{LinkDisk, repeated, showVolume, reasons{csierr.DiskNotOurs}},
	{LinkSerial, repeated, listDisks, reasons{csierr.SerialTaken}},
	{LinkDevice, repeated, showDisk, reasons{csierr.DeviceNotFound, csierr.DeviceWrongSize}},
	{LinkDevice, repeated, listDisks, reasons{csierr.DeviceNotUnique, csierr.DeviceDiffers}},
	{LinkDevice, passes, inspectNode, reasons{csierr.DeviceChanged}},
	{LinkDevice, repeated, inspectNode, reasons{csierr.DeviceHeld, csierr.DeviceReadOnly}},
	{LinkDevice, repeated, kernelLog, reasons{csierr.DeviceUnreadable}},
	{LinkDevice, passes, nodeLog, reasons{csierr.DeviceLocked}},
	{LinkFilesystem, "The orchestrator repeats the call, which fails as long as the disk is not " +
		"blank. The driver never overwrites what a disk holds.", inspectNode,
		reasons{csierr.DiskNotBlank}},
	{LinkFilesystem, repeated, showVolume, reasons{csierr.DiskSizeUnknown}},
	{LinkFilesystem, repeated, listDisks, reasons{csierr.WrongFilesystem}},
	{LinkFilesystem, "The node continues to read the disk; the orchestrator repeats the call, which " +
		"waits for that.", nodeLog, reasons{csierr.DiskProofPending}},
	{LinkFilesystem, repeated, nodeLog, reasons{csierr.FilesystemDamaged}},
	{LinkFilesystem, repeated, kernelLog, reasons{csierr.FilesystemFeature, csierr.NodeToolFailed}},
	{LinkFilesystem, repeated, showDisk, reasons{csierr.FilesystemTooLarge, csierr.LogNotReplayed}},
	{LinkFilesystem, "Nothing: the filesystem is used at the size that it has.", nodeLog,
		reasons{csierr.FilesystemNotGrown}},
	{LinkFilesystem, "Nothing until the volume is unpublished everywhere and staged again.", kernelLog,
		reasons{csierr.FilesystemFailed}},
	{LinkFilesystem, repeated, showPods, reasons{csierr.BtrfsTwin}},
	{LinkMounts, repeated, inspectNode, reasons{csierr.PathInvalid, csierr.StagedDifferently,
		csierr.PublishedDifferently, csierr.TargetNotEmpty}},
	{LinkMounts, "The orchestrator may stage the volume again.", showPods, reasons{csierr.NotStaged}},
	{LinkMounts, succeeds + "when the other pod is gone.", showPods,
		reasons{csierr.PublishedElsewhere}},
	{LinkMounts, succeeds + "when nothing uses the volume. The driver never unmounts lazily.",
		inspectNode, reasons{csierr.StillMounted}},
	{LinkMounts, "The path is removed with the pod, if the pod is being deleted.", showPods,
		reasons{csierr.VolumeNotAtPath}},
	{LinkMounts, "Staging or publishing the volume records it again.", inspectNode,
		reasons{csierr.VolumeUnknownToNode}},
}

var advices = func() map[csierr.Reason]advice {
	all := map[csierr.Reason]advice{}
	for _, a := range advised {
		for _, reason := range a.Reasons {
			all[reason] = a
		}
	}
	return all
}()
