package doctor

import "github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"

// stateAdvices is what follows from errors in the state of a volume, a snapshot or an instance.
var stateAdvices = map[csierr.Reason]advice{
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
		Do: "Stop the instance until the volume is attached or detached, or let the node keeper " +
			"do that (docs/howto/node-keeper.md). A rack with hot-plug needs neither, except for " +
			"local disks.",
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
	csierr.UseUnknown: {
		Link:     LinkClaim,
		ByItself: never,
		Do: "Let a controller of this release publish the volume. If an older one has attached it, " +
			"delete the pods that use the volume on this node, wait until it is detached, and start " +
			"them again.",
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
		Do: "If the cluster's id (OXIDE_CLUSTER_ID) was changed, set it back. Otherwise give the " +
			"volume the reclaim policy Retain, and delete its disk on the rack by hand.",
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
}
