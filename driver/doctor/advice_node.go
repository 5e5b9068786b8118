package doctor

import "github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"

// nodeAdvices is what follows from errors of a node.
var nodeAdvices = map[csierr.Reason]advice{
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
		Do: "If the message says that the node mounted the volume's filesystem before, it was " +
			"destroyed: take a snapshot, do not delete the volume, and recover what is left by hand. " +
			"Otherwise mount the disk by hand and inspect it; if its content is not needed, delete " +
			"the volume and create a new one. A superblock whose checksum is wrong may have been torn " +
			"by a power failure: take a snapshot first, and repair it by hand (e2fsck -f; the copies " +
			"that btrfs rescue super-recover uses may lack what was synced last).",
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
	csierr.FilesystemFeature: {
		Link:     LinkFilesystem,
		ByItself: repeated,
		Do: "Take the feature away on a machine that has all devices of the filesystem and knows " +
			"the feature (tune2fs, xfs_repair, btrfs device remove), or copy the files into a new " +
			"volume. If only this node's kernel refuses the feature, use a node with a newer one.",
		Next: kernelLog,
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
