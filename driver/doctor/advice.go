package doctor

import "github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"

// advice is what follows from a reason: the link of the chain that is broken, what happens by itself,
// what a person has to do, and the next command. driver/REASONS.md has the facts.
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
	repeated = "The orchestrator repeats the call, which fails until this is done."
	passes   = "The orchestrator repeats the call, which succeeds as soon as the cause has passed."
	goesOn   = "The orchestrator repeats the call, which continues where this one stopped."
	never    = "Nothing: repeating the call does not help."
)

// The commands. All of them only read, so that nothing is done that was not understood first.
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
	controllerLog = "kubectl logs -n {driverNamespace} deployment/oxide-csi-controller " +
		"-c oxide-plugin --since=1h"
	kernelLog = "kubectl debug node/{node} -it --profile=sysadmin --image=busybox -- dmesg"
	checkRack = "oxide-csi-plugin doctor rack"
)

// advices has an entry for every reason.
var advices = map[csierr.Reason]advice{
	// The request.
	csierr.VolumeIDMissing: {
		ByItself: never,
		Do:       "Report it to the orchestrator, whose request is invalid.",
		Next:     controllerLog,
	},
	csierr.FieldMissing: {
		ByItself: never,
		Do:       "Report it to the orchestrator, whose request is invalid.",
		Next:     controllerLog,
	},
	csierr.FieldInvalid: {
		Link:     LinkVolume,
		ByItself: never,
		Do:       "Shorten or correct the field that the message names.",
		Next:     showVolume,
	},
	csierr.CapabilityInvalid: {
		Link:     LinkClaim,
		ByItself: never,
		Do:       "Set the claim's access mode.",
		Next:     showClaim,
	},
	csierr.CapabilityUnsupported: {
		Link:     LinkClaim,
		ByItself: never,
		Do: "Use ReadWriteOnce or ReadWriteOncePod, and ext3, ext4, xfs, btrfs or a raw " +
			"block volume, in a new claim.",
		Next: showClaim,
	},
	csierr.ParameterInvalid: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do:       "Correct the parameter of the StorageClass; docs/configuration.md lists them.",
		Next:     showClass,
	},
	csierr.CapacityInvalid: {
		Link:     LinkClaim,
		ByItself: never,
		Do:       "Ask for a size.",
		Next:     showClaim,
	},
	csierr.CapacityOutOfRange: {
		Link:     LinkClaim,
		ByItself: never,
		Do: "Ask for a size that fits: whole GiB from 1 to 1023, and no smaller than the " +
			"snapshot or image.",
		Next: showClaim,
	},
	csierr.SourceUnsupported: {
		Link:     LinkClaim,
		ByItself: never,
		Do:       "Take a snapshot of the other volume and restore it.",
		Next:     showClaim,
	},
	csierr.SourceIncompatible: {
		Link:     LinkClaim,
		ByItself: never,
		Do: "Use a snapshot of this project; leave blockSize out of the StorageClass when " +
			"restoring.",
		Next: showClaim,
	},
	csierr.TopologyInvalid: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do:       "Set the same topology on every controller and node, or none.",
		Next:     "kubectl get csinodes -o yaml",
	},
	csierr.TopologyUnreachable: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do:       "Let the scheduler choose the location, or run the workload at the rack's.",
		Next:     showClaim,
	},
	csierr.ReadOnlyUnsupported: {
		Link:     LinkAttachment,
		ByItself: never,
		Do:       "Publish the volume read-only to the pod instead (readOnly: true in the pod).",
		Next:     showVolume,
	},
	csierr.StartingTokenInvalid: {
		ByItself: "The orchestrator begins the listing again.",
		Do:       "Begin the listing again.",
		Next:     controllerLog,
	},
	csierr.NotSupported: {
		ByItself: never,
		Do:       "Follow the message: Oxide has no such thing.",
		Next:     showClaim,
	},
	csierr.MkfsOptions: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do: "Correct mkfsOptions of the StorageClass; the message lists the allowed " +
			"options.",
		Next: showClass,
	},
	csierr.MountFlags: {
		Link:     LinkVolume,
		ByItself: repeated,
		Do: "Remove the flag from mountOptions of the StorageClass and the " +
			"PersistentVolume; the message counts the flags from 1.",
		Next: showVolume,
	},
	csierr.PathInvalid: {
		Link:     LinkMounts,
		ByItself: repeated,
		Do:       "Check what is at the path on the node.",
		Next:     inspectNode,
	},
	csierr.DiskNameMissing: {
		Link:     LinkVolume,
		ByItself: repeated,
		Do: "Give a static volume that no controller publishes the volume attribute " +
			"diskName.",
		Next: showVolume,
	},

	// The state of a volume, a snapshot or an instance.
	csierr.OperationPending: {
		ByItself: passes,
		Do:       "Nothing; the call is repeated.",
		Next:     showPods,
	},
	csierr.VolumeNotFound: {
		Link:     LinkDisk,
		ByItself: "Nothing: a disk does not come back.",
		Do:       "Check the disk on the rack, and the token's project.",
		Next:     showDisk,
	},
	csierr.VolumeExists: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do: "Choose another name, or delete the other volume; the message names the " +
			"difference.",
		Next: showClaim,
	},
	csierr.InstanceNotFound: {
		Link:     LinkInstance,
		ByItself: repeated,
		Do:       "Check whether the instance was deleted, and the node's CSINode object.",
		Next:     "kubectl get csinode {node} -o yaml",
	},
	csierr.InstanceFull: {
		Link:     LinkInstance,
		ByItself: repeated,
		Do: "Run the workload on another node, or detach a disk; OXIDE_MAX_DISKS sets the " +
			"limit that the scheduler knows.",
		Next: listDisks,
	},
	csierr.InstanceMustBeStopped: {
		Link: LinkInstance,
		ByItself: "The orchestrator repeats the call, which succeeds while the instance is " +
			"stopped. The driver never stops an instance.",
		Do: "Drain and stop the instance, or wait for a release of the rack with hot-plug, " +
			"which will not help local disks.",
		Next: showNodePods,
	},
	csierr.InstanceState: {
		Link:     LinkInstance,
		ByItself: repeated,
		Do:       "Restart the instance, or delete it.",
		Next:     showInstance,
	},
	csierr.DiskAttached: {
		Link:     LinkDisk,
		ByItself: repeated,
		Do:       "Detach the disk; the driver never detaches a disk in order to delete it.",
		Next:     showDisk,
	},
	csierr.DiskAttachedElsewhere: {
		Link: LinkDisk,
		ByItself: "The orchestrator repeats the call, which succeeds when the volume is " +
			"unpublished there. The driver never detaches a disk that is in use.",
		Do: "Wait until the volume is unpublished at the other node; find the pod that has " +
			"it there.",
		Next: "kubectl get volumeattachments",
	},
	csierr.DiskBusy: {
		Link:     LinkDisk,
		ByItself: passes,
		Do:       "Nothing; the call is repeated.",
		Next:     showDisk,
	},
	csierr.DiskFaulted: {
		Link:     LinkDisk,
		ByItself: "Nothing: the disk stays faulted.",
		Do:       "Restore the volume from a snapshot, or ask the rack's operator.",
		Next:     showDisk,
	},
	csierr.OtherProject: {
		Link:     LinkDisk,
		ByItself: never,
		Do:       "Use disks and instances of one project.",
		Next:     showDisk,
	},
	csierr.SerialTaken: {
		Link:     LinkSerial,
		ByItself: repeated,
		Do:       "Detach the other disk, or give it another name.",
		Next:     listDisks,
	},
	csierr.UseDiffers: {
		Link:     LinkClaim,
		ByItself: never,
		Do: "Create a volume with the access type (volumeMode) that the workload needs, and " +
			"copy the data.",
		Next: showClaim,
	},
	csierr.BootDisk: {
		Link:     LinkDisk,
		ByItself: never,
		Do:       "Use another disk.",
		Next:     showDisk,
	},
	csierr.DiskNotOurs: {
		Link:     LinkDisk,
		ByItself: repeated,
		Do: "Give a static volume the reclaim policy Retain, and delete its disk on the " +
			"rack by hand.",
		Next: showVolume,
	},
	csierr.SnapshotNotFound: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do:       "Check the snapshot on the rack.",
		Next:     "kubectl get volumesnapshotcontents",
	},
	csierr.SnapshotNotReady: {
		Link:     LinkClaim,
		ByItself: passes,
		Do:       "Nothing; the call is repeated.",
		Next:     "kubectl get volumesnapshotcontents",
	},
	csierr.SnapshotExists: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do:       "Choose another name.",
		Next:     "kubectl get volumesnapshotcontents",
	},
	csierr.SnapshotFaulted: {
		Link:     LinkClaim,
		ByItself: "Nothing: the snapshot stays faulted.",
		Do:       "Delete the snapshot and take another.",
		Next:     "kubectl get volumesnapshotcontents",
	},
	csierr.SnapshotImpossible: {
		Link:     LinkClaim,
		ByItself: never,
		Do:       "Use distributed disks for volumes that need snapshots.",
		Next:     showDisk,
	},
	csierr.ImageNotFound: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do:       "Correct imageId in the StorageClass.",
		Next:     showClass,
	},

	// The rack.
	csierr.TokenRejected: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Put a new token into the Secret; the driver reads it without a restart.",
		Next:     checkRack,
	},
	csierr.TokenFileUnreadable: {
		Link:     LinkRack,
		ByItself: "Calls continue with the token read last, until the rack refuses it.",
		Do:       "Restore the file, or repair its mount; the driver reads it without a restart.",
		Next:     controllerLog,
	},
	csierr.RoleMissing: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Give the token's user the role limited-collaborator on the project.",
		Next:     checkRack,
	},
	csierr.ProjectNotFound: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Correct OXIDE_PROJECT, or give the token's user a role on the project.",
		Next:     checkRack,
	},
	csierr.ObjectNotFound: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Check whether somebody deleted the object.",
		Next:     controllerLog,
	},
	csierr.NameTaken: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Find the object with the name on the rack.",
		Next:     controllerLog,
	},
	csierr.ValueRefused: {
		Link:     LinkClaim,
		ByItself: repeated,
		Do: "Change the value in the StorageClass or the claim; the message quotes the " +
			"rack.",
		Next: showClass,
	},
	csierr.Conflict: {
		Link:     LinkDisk,
		ByItself: repeated,
		Do:       "Check the object on the rack; the message quotes the rack.",
		Next:     showDisk,
	},
	csierr.RackFull: {
		Link:     LinkRack,
		ByItself: "The orchestrator repeats the call, which succeeds when there is room.",
		Do: "Delete unneeded disks and snapshots, or have the quota raised; an audit lists " +
			"orphans.",
		Next: "oxide-csi-plugin audit --kubectl",
	},
	csierr.RackUnavailable: {
		Link:     LinkRack,
		ByItself: passes,
		Do: "Nothing if it passes; otherwise check OXIDE_HOST, the network and the " +
			"certificate.",
		Next: checkRack,
	},
	csierr.EffectUnknown: {
		Link:     LinkRack,
		ByItself: "The orchestrator repeats the call, which finds what was done.",
		Do:       "Nothing; if the error persists, follow its message.",
		Next:     checkRack,
	},
	csierr.RackUnknown: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Correct the address in OXIDE_HOST, or update the rack.",
		Next:     checkRack,
	},
	csierr.RackError: {
		Link:     LinkRack,
		ByItself: repeated,
		Do:       "Give the rack's operator the request id in the message.",
		Next:     controllerLog,
	},
	csierr.RackResponseInvalid: {
		Link:     LinkRack,
		ByItself: repeated,
		Do: "Report it with the log; a server between driver and rack may answer in the " +
			"rack's place.",
		Next: controllerLog,
	},
	csierr.DeadlineExceeded: {
		ByItself: goesOn,
		Do:       "Nothing; the call is repeated.",
		Next:     showPods,
	},
	csierr.Canceled: {
		ByItself: "The orchestrator repeats the call if it still needs it.",
		Do:       "Nothing.",
		Next:     showPods,
	},

	// A node.
	csierr.DeviceNotFound: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do: "Check on the rack whether the disk is attached to this instance; compare the " +
			"serials in the message.",
		Next: showDisk,
	},
	csierr.DeviceNotUnique: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do: "Detach the disk that is not this volume's; their names share the first 20 " +
			"bytes.",
		Next: listDisks,
	},
	csierr.DeviceChanged: {
		Link:     LinkDevice,
		ByItself: passes,
		Do:       "Nothing; the call is safe to repeat.",
		Next:     inspectNode,
	},
	csierr.DeviceWrongSize: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do: "Compare the two sizes in the message with the rack; detach and attach the disk " +
			"again.",
		Next: showDisk,
	},
	csierr.DeviceDiffers: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do: "Compare the disks of the instance on the rack; detach the one that does not " +
			"belong there.",
		Next: listDisks,
	},
	csierr.DeviceHeld: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do: "Stop the process that uses the device, or unmount it; the message says where " +
			"it is in use if that is visible.",
		Next: inspectNode,
	},
	csierr.DeviceReadOnly: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do: "Publish the volume read-only, or find out why the device is read-only; " +
			"blockdev --setrw makes it writable.",
		Next: inspectNode,
	},
	csierr.DeviceUnreadable: {
		Link:     LinkDevice,
		ByItself: repeated,
		Do:       "Check the kernel's log and the disk's health on the rack.",
		Next:     kernelLog,
	},
	csierr.DiskNotBlank: {
		Link: LinkFilesystem,
		ByItself: "The orchestrator repeats the call, which fails as long as the disk holds that. " +
			"The driver never overwrites it.",
		Do: "Mount the disk by hand and inspect it. If its content is not needed, delete " +
			"the volume and create a new one.",
		Next: inspectNode,
	},
	csierr.DiskSizeUnknown: {
		Link:     LinkFilesystem,
		ByItself: repeated,
		Do:       "Let a controller publish the volume, or create the filesystem by hand.",
		Next:     showVolume,
	},
	csierr.WrongFilesystem: {
		Link:     LinkFilesystem,
		ByItself: repeated,
		Do: "Compare the disks of the instance on the rack; detach the one that does not " +
			"belong there. If the UUID was changed by hand, or an older driver made the " +
			"filesystem, set it.",
		Next: listDisks,
	},
	csierr.DeviceLocked: {
		Link:     LinkDevice,
		ByItself: passes,
		Do: "Nothing; if the error persists, end the other process, which the message " +
			"names.",
		Next: nodeLog,
	},
	csierr.DiskProofPending: {
		Link: LinkFilesystem,
		ByItself: "The node reads the disk on; the orchestrator repeats the call, which waits for " +
			"the same read.",
		Do:   "Nothing; the driver's log shows the progress.",
		Next: nodeLog,
	},
	csierr.FilesystemDamaged: {
		Link:     LinkFilesystem,
		ByItself: repeated,
		Do:       "Take a snapshot of the volume, then repair the filesystem by hand.",
		Next:     nodeLog,
	},
	csierr.FilesystemTooLarge: {
		Link:     LinkFilesystem,
		ByItself: repeated,
		Do:       "Compare the disk with the rack: was it truncated, or is it another disk?",
		Next:     showDisk,
	},
	csierr.FilesystemNotGrown: {
		Link:     LinkFilesystem,
		ByItself: "Nothing: the filesystem is used at its size.",
		Do: "Look at the rest of the disk behind the filesystem. If it is not needed, " +
			"overwrite it with zeroes while the volume is not staged; or copy the files " +
			"into a new volume.",
		Next: nodeLog,
	},
	csierr.FilesystemFailed: {
		Link:     LinkFilesystem,
		ByItself: "Nothing until the volume is unpublished everywhere and staged again.",
		Do: "Check the kernel's log; delete the pods that use the volume, so that it is " +
			"staged again.",
		Next: kernelLog,
	},
	csierr.StagedDifferently: {
		Link:     LinkMounts,
		ByItself: repeated,
		Do:       "Unstage the volume; check what is mounted there.",
		Next:     inspectNode,
	},
	csierr.NotStaged: {
		Link:     LinkMounts,
		ByItself: "The orchestrator may stage the volume again.",
		Do:       "Nothing if the orchestrator stages it again; otherwise restart the pod.",
		Next:     showPods,
	},
	csierr.PublishedDifferently: {
		Link:     LinkMounts,
		ByItself: repeated,
		Do:       "Unpublish the volume first; unmount by hand what belongs to no volume.",
		Next:     inspectNode,
	},
	csierr.PublishedElsewhere: {
		Link:     LinkMounts,
		ByItself: "The orchestrator repeats the call, which succeeds when the other pod is gone.",
		Do: "Wait until the other pod is gone, or use ReadWriteOnce instead of " +
			"ReadWriteOncePod.",
		Next: showPods,
	},
	csierr.StillMounted: {
		Link: LinkMounts,
		ByItself: "The orchestrator repeats the call, which succeeds when nothing uses the " +
			"volume. The driver never unmounts lazily.",
		Do:   "Stop what uses the volume there.",
		Next: inspectNode,
	},
	csierr.TargetNotEmpty: {
		Link:     LinkMounts,
		ByItself: repeated,
		Do:       "Save the files at the path, and remove it by hand.",
		Next:     inspectNode,
	},
	csierr.VolumeNotAtPath: {
		Link:     LinkMounts,
		ByItself: "The path goes with the pod if that is on its way out.",
		Do:       "Nothing, if the pod is on its way out.",
		Next:     showPods,
	},
	csierr.VolumeUnknownToNode: {
		Link:     LinkMounts,
		ByItself: "Staging or publishing the volume records it again.",
		Do:       "Nothing; staging or publishing the volume records it again.",
		Next:     inspectNode,
	},
	csierr.StateNotKept: {
		Link:     LinkNode,
		ByItself: repeated,
		Do:       "Check the free space and the permissions of the directory in OXIDE_STATE_DIR.",
		Next:     nodeLog,
	},
	csierr.NodeToolFailed: {
		Link:     LinkFilesystem,
		ByItself: repeated,
		Do:       "Follow the message; check the kernel's log.",
		Next:     kernelLog,
	},
	csierr.ToolsMissing: {
		Link:     LinkNode,
		ByItself: repeated,
		Do:       "Use the node image, or install the packages that the message names.",
		Next:     nodeLog,
	},
	csierr.InstanceUnknown: {
		Link:     LinkNode,
		ByItself: repeated,
		Do:       "Set OXIDE_INSTANCE_ID, or give the container access to SMBIOS.",
		Next:     nodeLog,
	},
	csierr.Internal: {
		ByItself: repeated,
		Do:       "Please report it with the log.",
		Next:     controllerLog,
	},
}
