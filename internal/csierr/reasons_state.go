package csierr

import "google.golang.org/grpc/codes"

// Reasons of errors in the state of a volume, a snapshot or an instance.
const (
	OperationPending      Reason = "OperationPending"
	VolumeNotFound        Reason = "VolumeNotFound"
	VolumeExists          Reason = "VolumeExists"
	InstanceNotFound      Reason = "InstanceNotFound"
	InstanceFull          Reason = "InstanceFull"
	InstanceMustBeStopped Reason = "InstanceMustBeStopped"
	InstanceState         Reason = "InstanceState"
	DiskAttached          Reason = "DiskAttached"
	DiskAttachedElsewhere Reason = "DiskAttachedElsewhere"
	DiskBusy              Reason = "DiskBusy"
	DiskImporting         Reason = "DiskImporting"
	DiskFaulted           Reason = "DiskFaulted"
	OtherProject          Reason = "OtherProject"
	SerialTaken           Reason = "SerialTaken"
	UseDiffers            Reason = "UseDiffers"
	UseUnknown            Reason = "UseUnknown"
	BootDisk              Reason = "BootDisk"
	DiskNotOurs           Reason = "DiskNotOurs"
	SnapshotNotFound      Reason = "SnapshotNotFound"
	SnapshotNotReady      Reason = "SnapshotNotReady"
	SnapshotExists        Reason = "SnapshotExists"
	SnapshotFaulted       Reason = "SnapshotFaulted"
	SnapshotImpossible    Reason = "SnapshotImpossible"
	ImageNotFound         Reason = "ImageNotFound"
)

var stateReasons = section{
	title: "Errors in the state of a volume, a snapshot or an instance",
	intro: "The state has to change first. The driver changes only what it owns.",
	reasons: []Explanation{
		{
			Reason: OperationPending, Code: codes.Aborted,
			Means: "Another call for this object is in progress.",
			Do:    "Nothing; the call is repeated.",
		},
		{
			Reason: VolumeNotFound, Code: codes.NotFound,
			Means: "The rack has no disk with this id, or the token may not see it.",
			Do:    "Check the disk on the rack, and the token's project.",
		},
		{
			Reason: VolumeExists, Code: codes.AlreadyExists,
			Means: "A disk with the volume's name exists and differs from the request; the " +
				"message names the difference.",
			Do: "Choose another name, or delete the other volume.",
		},
		{
			Reason: InstanceNotFound, Code: codes.NotFound,
			Means: "The rack has no instance with the node's id, or the token may not see it.",
			Do:    "Check whether the instance was deleted, and the node's CSINode object.",
		},
		{
			Reason: InstanceFull, Code: codes.ResourceExhausted,
			Means: "The instance has as many disks as the rack allows.",
			Do: "Run the workload on another node, or detach a disk; `OXIDE_MAX_DISKS` sets the " +
				"limit that the scheduler knows.",
		},
		{
			Reason: InstanceMustBeStopped, Code: codes.FailedPrecondition,
			Means: "This rack attaches or detaches disks only while the instance is stopped. A rack may " +
				"need that for detaches alone. With local disks every rack does.",
			Do: "Stop the instance until the volume is attached or detached " +
				"(`docs/howto/attach-by-hand.md`), or let the node keeper do that " +
				"(`docs/howto/node-keeper.md`). A rack with hot-plug needs neither, except for local disks.",
		},
		{
			Reason: InstanceState, Code: codes.FailedPrecondition,
			Means: "The instance is in a state that allows no attach or detach, such as failed.",
			Do:    "Restart the instance, or delete it.",
		},
		{
			Reason: DiskAttached, Code: codes.FailedPrecondition,
			Means: "The disk is attached to an instance, so it cannot be deleted.",
			Do:    "Detach the disk; the driver never detaches a disk in order to delete it.",
		},
		{
			Reason: DiskAttachedElsewhere, Code: codes.FailedPrecondition,
			Means: "The disk is attached to another instance, which the message names. The driver " +
				"never detaches a disk that is in use.",
			Do: "Wait until the volume is unpublished at the other node; find the pod that uses " +
				"it there.",
		},
		{
			Reason: DiskBusy, Code: codes.Aborted,
			Means: "The rack is busy with the disk, or is still taking the snapshot.",
			Do: "Nothing; the call is repeated. If snapshots stay refused, ask the rack's operator " +
				"whether a part of the disk is being replaced, and for how long.",
		},
		{
			Reason: DiskImporting, Code: codes.FailedPrecondition,
			Means: "Somebody began to import content into the disk and has not finalized it. Until " +
				"then the rack does not attach, snapshot or delete the disk.",
			Do: "If everything is written, run `oxide disk import stop` while the disk is " +
				"`importing_from_bulk_writes`, and then `oxide disk import finalize`. To use an image, " +
				"name it in the StorageClass (`imageId`) instead of the disk that it was imported with.",
		},
		{
			Reason: DiskFaulted, Code: codes.FailedPrecondition,
			Also: "; at CreateVolume, `INTERNAL` if the disk is deleted again, and `ABORTED` if an " +
				"earlier call has made it",
			Means: "The rack reports the disk as faulted.",
			Do: "Restore the volume from a snapshot, or ask the rack's operator. If CreateVolume " +
				"reports it, delete the disk on the rack.",
		},
		{
			Reason: OtherProject, Code: codes.InvalidArgument,
			Means: "The disk, snapshot or instance is not in the driver's project (`OXIDE_PROJECT`). The " +
				"driver attaches, detaches, deletes and lists only what is there, whatever its tag says.",
			Do: "Use disks and instances of that project. If `OXIDE_PROJECT` was changed, set it back.",
		},
		{
			Reason: SerialTaken, Code: codes.FailedPrecondition,
			Also: "; after the attach, `ABORTED`",
			Means: "Another disk of the instance has a name with the same first 20 bytes, and the " +
				"guest would show only one of the two. The driver lists the instance's disks before " +
				"and after it attaches one. If two such disks are attached at the same time, both calls " +
				"fail, and both disks stay attached until they are unpublished.",
			Do: "Detach the other disk, or give it another name.",
		},
		{
			Reason: UseDiffers, Code: codes.FailedPrecondition,
			Means: "The volume was created for filesystems and is requested as a raw device, or " +
				"the reverse. A disk that workloads write as a raw device could later look blank, or " +
				"like one of the driver's filesystems.",
			Do: "Create a volume with the access type (`volumeMode`) that the workload needs, and " +
				"copy the data.",
		},
		{
			Reason: UseUnknown, Code: codes.FailedPrecondition,
			Means: "The request is for a raw device, and `publish_context` does not say that the " +
				"disk may be used so. The disk may be one for filesystems, and what a workload writes " +
				"to a raw device may later look blank, or like one of the driver's filesystems.",
			Do: "Let a controller of this release publish the volume. If an older one has " +
				"attached it, delete the pods that use the volume on this node, wait until it is " +
				"detached, and start them again.",
		},
		{
			Reason: BootDisk, Code: codes.FailedPrecondition,
			Means: "The disk is the instance's boot disk, which the rack does not detach.",
			Do:    "Use another disk.",
		},
		{
			Reason: DiskNotOurs, Code: codes.FailedPrecondition,
			Means: "The disk or snapshot has no ownership tag of this driver, or another " +
				"cluster's. The driver deletes only what it made.",
			Do: "If the cluster's id (`OXIDE_CLUSTER_ID`) was changed, set it back: it is part of " +
				"the ownership tag. Otherwise give the volume the reclaim policy Retain (the snapshot " +
				"the deletionPolicy Retain), and delete the disk or snapshot on the rack by hand.",
		},
		{
			Reason: SnapshotNotFound, Code: codes.NotFound,
			Means: "The rack has no snapshot with this id, or the token may not see it.",
			Do:    "Check the snapshot on the rack.",
		},
		{
			Reason: SnapshotNotReady, Code: codes.FailedPrecondition,
			Also:  "; at DeleteSnapshot, `ABORTED`",
			Means: "The snapshot is not complete yet.",
			Do:    "Nothing; the call is repeated.",
		},
		{
			Reason: SnapshotExists, Code: codes.AlreadyExists,
			Means: "A snapshot with that name exists, of another volume.",
			Do:    "Choose another name.",
		},
		{
			Reason: SnapshotFaulted, Code: codes.FailedPrecondition,
			Also: "; at CreateSnapshot, `INTERNAL` if it is deleted again, and `ABORTED` if an earlier " +
				"call has made it",
			Means: "The rack failed to make the snapshot.",
			Do:    "Delete the snapshot and take another.",
		},
		{
			Reason: SnapshotImpossible, Code: codes.FailedPrecondition,
			Means: "The rack takes no snapshots of such a disk.",
			Do:    "Use distributed disks for volumes that need snapshots.",
		},
		{
			Reason: ImageNotFound, Code: codes.InvalidArgument,
			Means: "The rack has no image with this id, or the token may not see it.",
			Do:    "Correct `imageId` in the StorageClass.",
		},
	},
}
