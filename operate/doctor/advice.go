package doctor

import (
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// advice adds to a reason's explanation (csierr.Explain) the link of the chain that is broken, what
// happens by itself, and the next command.
type advice struct {
	// Link is empty for a reason that any call may return: then it is the link of the failed call.
	Link     Link
	ByItself string
	// Next is a command with words such as {volume}; see names.
	Next string
}

// What happens by itself.
const (
	repeated = "The orchestrator repeats the call, which fails until somebody has acted."
	succeeds = "The orchestrator repeats the call, which succeeds "
	passes   = succeeds + "as soon as the cause has passed."
	goesOn   = "The orchestrator repeats the call, which continues where this one stopped."
	never    = "Nothing: repeating the call does not help."
)

// The commands. All but kernelLog only read.
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

// controllerLogs names the pods of the controller for kubectl logs.
const controllerLogs = "deployment/oxide-csi-controller"

// logOf changes a command that shows the log of the driver to another container of the same pod.
func logOf(command, container string) string {
	return strings.Replace(command, driverContainer, container, 1)
}

// advices contains the advice for every reason, in the order of docs/reasons.md.
var advices = map[csierr.Reason]advice{
	csierr.VolumeIDMissing:       {"", never, controllerLog},
	csierr.FieldMissing:          {"", never, controllerLog},
	csierr.FieldInvalid:          {LinkVolume, never, showVolume},
	csierr.CapabilityInvalid:     {LinkClaim, never, showClaim},
	csierr.CapabilityUnsupported: {LinkClaim, never, showClaim},
	csierr.ParameterInvalid:      {LinkClaim, repeated, showClass},
	csierr.CapacityInvalid:       {LinkClaim, never, showClaim},
	csierr.CapacityOutOfRange:    {LinkClaim, never, showClaim},
	csierr.SourceUnsupported:     {LinkClaim, never, showClaim},
	csierr.SourceIncompatible:    {LinkClaim, never, showClaim},
	csierr.TopologyInvalid:       {LinkClaim, repeated, "kubectl get csinodes -o yaml"},
	csierr.TopologyUnreachable:   {LinkClaim, repeated, showClaim},
	csierr.ReadOnlyUnsupported:   {LinkAttachment, never, showVolume},
	csierr.StartingTokenInvalid:  {"", "The orchestrator begins the listing again.", controllerLog},
	csierr.NotSupported:          {"", never, showClaim},
	csierr.MkfsOptions:           {LinkClaim, repeated, showClass},
	csierr.MountFlags:            {LinkVolume, repeated, showVolume},
	csierr.PathInvalid:           {LinkMounts, repeated, inspectNode},
	csierr.DiskNameMissing:       {LinkVolume, repeated, showVolume},

	csierr.OperationPending: {"", passes, showPods},
	csierr.VolumeNotFound:   {LinkDisk, "Nothing: a disk does not come back.", showDisk},
	csierr.VolumeExists:     {LinkClaim, repeated, showClaim},
	csierr.InstanceNotFound: {LinkInstance, repeated, showNodeEntry},
	csierr.InstanceFull:     {LinkInstance, repeated, listDisks},
	csierr.InstanceMustBeStopped: {LinkInstance, succeeds + "while the instance is stopped. The " +
		"driver never stops an instance.", showNodePods},
	csierr.InstanceState: {LinkInstance, repeated, showInstance},
	csierr.DiskAttached:  {LinkDisk, repeated, showDisk},
	csierr.DiskAttachedElsewhere: {LinkDisk, succeeds + "when the volume is unpublished there. The " +
		"driver never detaches a disk that is in use.", "kubectl get volumeattachments"},
	csierr.DiskBusy:           {LinkDisk, passes, showDisk},
	csierr.DiskImporting:      {LinkDisk, "Nothing: an import stays as it is.", showDisk},
	csierr.DiskFaulted:        {LinkDisk, "Nothing: the disk stays faulted.", showDisk},
	csierr.OtherProject:       {LinkDisk, never, showDisk},
	csierr.SerialTaken:        {LinkSerial, repeated, listDisks},
	csierr.UseDiffers:         {LinkClaim, never, showClaim},
	csierr.UseUnknown:         {LinkClaim, never, showClaim},
	csierr.BootDisk:           {LinkDisk, never, showDisk},
	csierr.DiskNotOurs:        {LinkDisk, repeated, showVolume},
	csierr.SnapshotNotFound:   {LinkClaim, repeated, showSnapshots},
	csierr.SnapshotNotReady:   {LinkClaim, passes, showSnapshots},
	csierr.SnapshotExists:     {LinkClaim, repeated, showSnapshots},
	csierr.SnapshotFaulted:    {LinkClaim, "Nothing: the snapshot stays faulted.", showSnapshots},
	csierr.SnapshotImpossible: {LinkClaim, never, showDisk},
	csierr.ImageNotFound:      {LinkClaim, repeated, showClass},

	csierr.TokenRejected: {LinkRack, repeated, checkRack},
	csierr.TokenFileUnreadable: {LinkRack, "Calls continue with the token read last, until the rack " +
		"refuses it.", controllerLog},
	csierr.RoleMissing:     {LinkRack, repeated, checkRack},
	csierr.ProjectNotFound: {LinkRack, repeated, checkRack},
	csierr.ProjectChanged:  {LinkRack, repeated, checkRack},
	csierr.ObjectNotFound:  {LinkRack, repeated, controllerLog},
	csierr.NameTaken:       {LinkRack, repeated, controllerLog},
	csierr.ValueRefused:    {LinkClaim, repeated, showClass},
	csierr.Conflict:        {LinkDisk, repeated, showDisk},
	csierr.RackFull: {LinkRack, succeeds + "when there is room.",
		"oxide-csi-plugin audit --kubectl"},
	csierr.RackUnavailable: {LinkRack, passes, checkRack},
	csierr.EffectUnknown: {LinkRack,
		"The orchestrator repeats the call, which finds what was done.", checkRack},
	csierr.LookTooOld:          {"", passes, controllerLog},
	csierr.RackUnknown:         {LinkRack, repeated, checkRack},
	csierr.RackError:           {LinkRack, repeated, controllerLog},
	csierr.RackResponseInvalid: {LinkRack, repeated, controllerLog},
	csierr.DeadlineExceeded:    {"", goesOn, showPods},
	csierr.Canceled: {"", "The orchestrator repeats the call if it still needs it.",
		showPods},

	csierr.DeviceNotFound:   {LinkDevice, repeated, showDisk},
	csierr.DeviceNotUnique:  {LinkDevice, repeated, listDisks},
	csierr.DeviceChanged:    {LinkDevice, passes, inspectNode},
	csierr.DeviceWrongSize:  {LinkDevice, repeated, showDisk},
	csierr.DeviceDiffers:    {LinkDevice, repeated, listDisks},
	csierr.DeviceHeld:       {LinkDevice, repeated, inspectNode},
	csierr.DeviceReadOnly:   {LinkDevice, repeated, inspectNode},
	csierr.DeviceUnreadable: {LinkDevice, repeated, kernelLog},
	csierr.DiskNotBlank: {LinkFilesystem,
		"The orchestrator repeats the call, which fails as long as the disk holds that. The " +
			"driver never overwrites it.", inspectNode},
	csierr.DiskSizeUnknown: {LinkFilesystem, repeated, showVolume},
	csierr.WrongFilesystem: {LinkFilesystem, repeated, listDisks},
	csierr.DeviceLocked:    {LinkDevice, passes, nodeLog},
	csierr.DiskProofPending: {LinkFilesystem,
		"The node reads the disk on; the orchestrator repeats the call, which waits for the same " +
			"read.", nodeLog},
	csierr.FilesystemDamaged:  {LinkFilesystem, repeated, nodeLog},
	csierr.FilesystemFeature:  {LinkFilesystem, repeated, kernelLog},
	csierr.FilesystemTooLarge: {LinkFilesystem, repeated, showDisk},
	csierr.FilesystemNotGrown: {LinkFilesystem, "Nothing: the filesystem is used at its size.",
		nodeLog},
	csierr.FilesystemFailed: {LinkFilesystem,
		"Nothing until the volume is unpublished everywhere and staged again.", kernelLog},
	csierr.LogNotReplayed:    {LinkFilesystem, repeated, showDisk},
	csierr.BtrfsTwin:         {LinkFilesystem, repeated, showPods},
	csierr.StagedDifferently: {LinkMounts, repeated, inspectNode},
	csierr.NotStaged: {LinkMounts, "The orchestrator may stage the volume again.",
		showPods},
	csierr.PublishedDifferently: {LinkMounts, repeated, inspectNode},
	csierr.PublishedElsewhere:   {LinkMounts, succeeds + "when the other pod is gone.", showPods},
	csierr.StillMounted: {LinkMounts, succeeds + "when nothing uses the volume. The driver never " +
		"unmounts lazily.", inspectNode},
	csierr.TargetNotEmpty: {LinkMounts, repeated, inspectNode},
	csierr.VolumeNotAtPath: {LinkMounts, "The path goes with the pod if that is on its way out.",
		showPods},
	csierr.VolumeUnknownToNode: {LinkMounts, "Staging or publishing the volume records it again.",
		inspectNode},
	csierr.StateNotKept:    {LinkNode, repeated, nodeLog},
	csierr.NodeToolFailed:  {LinkFilesystem, repeated, kernelLog},
	csierr.ToolsMissing:    {LinkNode, repeated, nodeLog},
	csierr.InstanceUnknown: {LinkNode, repeated, nodeLog},
	csierr.Internal:        {"", repeated, controllerLog},
}
