package csierr

import "google.golang.org/grpc/codes"

// Reasons of errors of a node.
const (
	DeviceNotFound       Reason = "DeviceNotFound"
	DeviceNotUnique      Reason = "DeviceNotUnique"
	DeviceChanged        Reason = "DeviceChanged"
	DeviceWrongSize      Reason = "DeviceWrongSize"
	DeviceDiffers        Reason = "DeviceDiffers"
	DeviceHeld           Reason = "DeviceHeld"
	DeviceReadOnly       Reason = "DeviceReadOnly"
	DeviceUnreadable     Reason = "DeviceUnreadable"
	DiskNotBlank         Reason = "DiskNotBlank"
	DiskSizeUnknown      Reason = "DiskSizeUnknown"
	WrongFilesystem      Reason = "WrongFilesystem"
	DeviceLocked         Reason = "DeviceLocked"
	DiskProofPending     Reason = "DiskProofPending"
	FilesystemDamaged    Reason = "FilesystemDamaged"
	FilesystemFeature    Reason = "FilesystemFeature"
	FilesystemTooLarge   Reason = "FilesystemTooLarge"
	FilesystemNotGrown   Reason = "FilesystemNotGrown"
	FilesystemFailed     Reason = "FilesystemFailed"
	LogNotReplayed       Reason = "LogNotReplayed"
	StagedDifferently    Reason = "StagedDifferently"
	NotStaged            Reason = "NotStaged"
	PublishedDifferently Reason = "PublishedDifferently"
	PublishedElsewhere   Reason = "PublishedElsewhere"
	StillMounted         Reason = "StillMounted"
	TargetNotEmpty       Reason = "TargetNotEmpty"
	VolumeNotAtPath      Reason = "VolumeNotAtPath"
	VolumeUnknownToNode  Reason = "VolumeUnknownToNode"
	StateNotKept         Reason = "StateNotKept"
	NodeToolFailed       Reason = "NodeToolFailed"
	ToolsMissing         Reason = "ToolsMissing"
	InstanceUnknown      Reason = "InstanceUnknown"
	Internal             Reason = "Internal"
)

var nodeReasons = section{
	title: "Errors of a node",
	intro: "A node that cannot verify which disk it has, or what is on it, does not touch the " +
		"disk.",
	reasons: []Explanation{
		{
			Reason: DeviceNotFound, Code: codes.NotFound,
			Means: "No device of this instance has the disk's serial.",
			Do: "Check on the rack whether the disk is attached to this instance; compare the " +
				"serials in the message. If it is attached, the rack has recorded an attach that it did " +
				"not carry out. Stop the instance and start it again: it starts with all its disks. Or " +
				"delete the pod, so that the disk is detached; a rack may need the instance stopped for " +
				"that, which the node keeper does where it may.",
		},
		{
			Reason: DeviceNotUnique, Code: codes.FailedPrecondition,
			Means: "Two devices have the same serial.",
			Do:    "Detach the disk that is not this volume's; their names share the first 20 bytes.",
		},
		{
			Reason: DeviceChanged, Code: codes.FailedPrecondition,
			Means: "The device became another one while the driver worked on it.",
			Do:    "Nothing; the call is safe to repeat.",
		},
		{
			Reason: DeviceWrongSize, Code: codes.FailedPrecondition,
			Means: "The device's size is not the disk's.",
			Do: "Compare the two sizes in the message with the rack; detach and attach the disk " +
				"again.",
		},
		{
			Reason: DeviceDiffers, Code: codes.FailedPrecondition,
			Means: "The device with the volume's serial number has another block size than the " +
				"rack reports for the disk. It may be another disk whose name begins with the same 20 " +
				"bytes. The message names both sizes.",
			Do: "Compare the disks of the instance on the rack; detach the one that does not " +
				"belong there.",
		},
		{
			Reason: DeviceHeld, Code: codes.FailedPrecondition,
			Means: "The device is mounted or open exclusively elsewhere on the node, or a process " +
				"has it open for writing. The driver sees the processes of its own PID namespace: all " +
				"of the node's with `hostPID`, which the manifests set.",
			Do: "Stop the process that uses the device, or unmount it; the message says where it " +
				"is in use if that is visible.",
		},
		{
			Reason: DeviceReadOnly, Code: codes.FailedPrecondition,
			Means: "The device is read-only, and the request needs to write to it. The driver " +
				"makes a device writable only if it may have made it read-only itself: a disk that " +
				"workloads may use as a raw device.",
			Do: "Publish the volume read-only, or find out why the device is read-only; `blockdev " +
				"--setrw` makes it writable.",
		},
		{
			Reason: DeviceUnreadable, Code: codes.FailedPrecondition,
			Means: "Reads of the device fail, so its content is unknown.",
			Do:    "Check the kernel's log and the disk's health on the rack.",
		},
		{
			Reason: DiskNotBlank, Code: codes.FailedPrecondition,
			Means: "The disk holds something other than the requested filesystem, or the record " +
				"of an unfinished format of another volume. The driver never overwrites it; the " +
				"message says what was found and where. The driver formats a disk that it created " +
				"blank, for filesystems only, after it has read all regions where signatures are " +
				"kept, and samples. It reads any other disk whole before it formats it.",
			Do: "If the message says that the node mounted the volume's filesystem before, it was " +
				"destroyed: take a snapshot, do not delete the volume, and recover what is left by " +
				"hand. Otherwise mount the disk by hand and inspect it; if its content is not needed, " +
				"delete the volume and create a new one. A superblock whose checksum is wrong may " +
				"have been torn by a power failure: take a snapshot first, and repair it by hand " +
				"(`e2fsck -f`; the copies that `btrfs rescue super-recover` uses may lack what was " +
				"synced last).",
		},
		{
			Reason: DiskSizeUnknown, Code: codes.FailedPrecondition,
			Means: "The disk is blank, but its expected size is unknown to the node, so it is not " +
				"formatted.",
			Do: "Let a controller publish the volume, or create the filesystem by hand.",
		},
		{
			Reason: WrongFilesystem, Code: codes.FailedPrecondition,
			Means: "The disk holds a filesystem whose UUID is not the one that the driver gave " +
				"the volume. Another disk may have the volume's serial number, or the UUID was " +
				"changed by hand. The message names both UUIDs.",
			Do: "Compare the disks of the instance on the rack; detach the one that does not " +
				"belong there. If the UUID was changed by hand, or an older driver made the " +
				"filesystem, set it (`tune2fs -U`, `xfs_admin -U`, `btrfstune -M`).",
		},
		{
			Reason: DeviceLocked, Code: codes.Aborted,
			Means: "Another process of the driver, or a program that it started, works on the " +
				"volume or its device, or is about to mount at the same path.",
			Do: "Nothing; the call is repeated. If the error persists, end the other process, " +
				"which the message names.",
		},
		{
			Reason: DiskProofPending, Code: codes.Aborted,
			Means: "The disk is to be formatted and the driver did not create it blank for " +
				"filesystems only, or its filesystem is to grow over the rest of the disk. So the " +
				"node first reads that range whole, which takes longer than the call can wait. The " +
				"read goes on; the message contains its progress.",
			Do: "Nothing; the call is repeated, and waits for the same read. The driver's log " +
				"shows the progress.",
		},
		{
			Reason: FilesystemDamaged, Code: codes.Internal,
			Means: "The filesystem's check, or the kernel at the mount, found errors whose repair " +
				"may lose data.",
			Do: "Take a snapshot of the volume, and repair a copy of its disk first: " +
				"docs/howto/repair-a-filesystem.md.",
		},
		{
			Reason: FilesystemFeature, Code: codes.FailedPrecondition,
			Means: "The filesystem uses a feature that the driver does not know or this node's " +
				"kernel does not support, or it keeps a part of itself on another device: a journal " +
				"or log, a realtime part, the other devices of a btrfs. The message names the field " +
				"of the superblock and the feature, or the bits of an unknown one. Nothing was " +
				"written, also not to the other device.",
			Do: "Take the feature away on a machine that has all devices of the filesystem and " +
				"knows the feature (`tune2fs`, `xfs_repair`, `btrfs device remove`), or copy the " +
				"files into a new volume. If only this node's kernel refuses the feature, use a node " +
				"with a newer one.",
		},
		{
			Reason: FilesystemTooLarge, Code: codes.FailedPrecondition,
			Means: "The filesystem is larger than its device.",
			Do:    "Compare the disk with the rack: was it truncated, or is it another disk?",
		},
		{
			Reason: FilesystemNotGrown, Code: codes.FailedPrecondition,
			Means: "No call fails with this reason; the volume's health reports it. The " +
				"filesystem is smaller than its disk and is used as it is. It was not grown because " +
				"the rest of the disk is not zero (the log of the call that staged the volume names " +
				"the first byte), or because it cannot be grown, like an ext4 with `bigalloc`.",
			Do: "Look at the rest of the disk behind the filesystem. If it is not needed, " +
				"overwrite it with zeroes while the volume is not staged; or copy the files into a " +
				"new volume.",
		},
		{
			Reason: FilesystemFailed, Code: codes.FailedPrecondition,
			Means: "The kernel made the filesystem read-only, or shut it down, after errors.",
			Do: "Check the kernel's log; delete the pods that use the volume, so that it is " +
				"staged again.",
		},
		{
			Reason: LogNotReplayed, Code: codes.FailedPrecondition,
			Means: "The filesystem's log holds changes that are not yet in their place, and the disk " +
				"is read-only, so that the kernel cannot replay them. Without them files that a " +
				"workload had synced would be missing. The snapshot was taken of a disk in use; a " +
				"frozen xfs, too, keeps something in its log.",
			Do: "Restore the snapshot to a writable volume and let a pod use that once, which replays " +
				"the log. Take the snapshot for the read-only disk of that volume when no pod uses it. " +
				"Or restore to a writable volume for good, and publish it read-only to pods.",
		},
		{
			Reason: StagedDifferently, Code: codes.AlreadyExists,
			Also: "; at NodeUnstageVolume, `INTERNAL`",
			Means: "Something other than the request is mounted at the staging path, or the " +
				"volume is a different disk on this node. Or the path to unstage shows a mount that " +
				"belongs to no volume, or the volume together with another one; the driver does not " +
				"unmount it then.",
			Do: "Unstage the volume; check what is mounted there.",
		},
		{
			Reason: NotStaged, Code: codes.FailedPrecondition,
			Means: "The volume is not mounted at the staging path.",
			Do:    "Nothing if the orchestrator stages it again; otherwise restart the pod.",
		},
		{
			Reason: PublishedDifferently, Code: codes.AlreadyExists,
			Also: "; at NodeUnpublishVolume, `INTERNAL`",
			Means: "The volume is published at the target path with other arguments. Or the path " +
				"to unpublish shows a mount that belongs to no volume, or the volume together with " +
				"another one; the driver does not unmount it then.",
			Do: "Unpublish the volume first; unmount by hand what belongs to no volume.",
		},
		{
			Reason: PublishedElsewhere, Code: codes.FailedPrecondition,
			Means: "The access mode allows one target path, and the volume has one.",
			Do: "Wait until the other pod is gone, or use ReadWriteOnce instead of " +
				"ReadWriteOncePod.",
		},
		{
			Reason: StillMounted, Code: codes.Internal,
			Means: "The volume is still mounted on the node at the paths in the message, or a " +
				"process holds its device. The driver never unmounts lazily, because the disk would " +
				"be detached while in use.",
			Do: "Stop what uses the volume there.",
		},
		{
			Reason: TargetNotEmpty, Code: codes.Internal,
			Means: "The target path contains files that are not the driver's.",
			Do:    "Save the files at the path, and remove the path by hand.",
		},
		{
			Reason: VolumeNotAtPath, Code: codes.NotFound,
			Means: "The path shows no volume, or another one.",
			Do:    "Nothing, if the pod is on its way out.",
		},
		{
			Reason: VolumeUnknownToNode, Code: codes.NotFound,
			Means: "This node has no record of the volume.",
			Do:    "Nothing; staging or publishing the volume records it again.",
		},
		{
			Reason: StateNotKept, Code: codes.Internal,
			Means: "The node cannot write the volume record to its state directory. It makes no " +
				"change that it could not undo after a restart.",
			Do: "Check the free space and the permissions of the directory in `OXIDE_STATE_DIR`.",
		},
		{
			Reason: NodeToolFailed, Code: codes.Internal,
			Means: "mkfs, e2fsck, resize2fs, blkid or the kernel failed; the message quotes it. " +
				"When a volume is taken back, it also says once that what its workload wrote last " +
				"could not be written; the repeated call goes on.",
			Do: "Follow the message; check the kernel's log.",
		},
		{
			Reason: ToolsMissing, Code: codes.FailedPrecondition,
			Means: "Programs that the node service runs are not in its image or on its host.",
			Do:    "Use the node image, or install the packages that the message names.",
		},
		{
			Reason: InstanceUnknown, Code: codes.FailedPrecondition,
			Means: "The driver does not know which instance it runs on.",
			Do:    "Set `OXIDE_INSTANCE_ID`, or give the container access to SMBIOS.",
		},
		{
			Reason: Internal, Code: codes.Internal,
			Means: "A bug in the driver.",
			Do:    "Please report it with the log.",
		},
	},
}
