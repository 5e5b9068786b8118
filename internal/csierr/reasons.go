package csierr

import (
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// Reason is the first word of every error that a CO sees. Dashboards and documentation refer to it;
// the sentence after it is for people.
type Reason string

// Explanation says with which code a reason is answered, and what to do. docs/reasons.md has the
// same, and what the reason means.
type Explanation struct {
	Reason Reason
	Code   codes.Code
	Do     string // Markdown: a person's part; "Nothing; …" where repeating the call suffices
}

var explanations = func() map[Reason]Explanation {
	all := map[Reason]Explanation{}
	for _, e := range table {
		all[e.Reason] = e
	}
	return all
}()

// Explain returns the explanation of a reason, and false if the driver has no such reason.
func Explain(reason Reason) (e Explanation, known bool) {
	e, known = explanations[reason]
	return e, known
}

// Reasons returns every reason, in the order of the alphabet.
func Reasons() []Reason { return slices.Sorted(maps.Keys(explanations)) }

// ParseMessage parses a message of the driver, "Reason: sentence", as others show it: Kubernetes
// puts words of its own before it ("rpc error: code = Aborted desc = "). It returns false for a
// text without a known reason.
func ParseMessage(text string) (reason Reason, sentence string, ok bool) {
	if _, after, found := strings.Cut(text, " desc = "); found {
		text = after
	}
	word, sentence, found := strings.Cut(text, ": ")
	reason = Reason(word)
	if _, known := explanations[reason]; !found || !known {
		return "", "", false
	}
	return reason, sentence, true
}

// Reasons of errors in the request.
const (
	VolumeIDMissing       Reason = "VolumeIDMissing"
	FieldMissing          Reason = "FieldMissing"
	FieldInvalid          Reason = "FieldInvalid"
	CapabilityInvalid     Reason = "CapabilityInvalid"
	CapabilityUnsupported Reason = "CapabilityUnsupported"
	ParameterInvalid      Reason = "ParameterInvalid"
	CapacityInvalid       Reason = "CapacityInvalid"
	CapacityOutOfRange    Reason = "CapacityOutOfRange"
	SourceUnsupported     Reason = "SourceUnsupported"
	SourceIncompatible    Reason = "SourceIncompatible"
	TopologyInvalid       Reason = "TopologyInvalid"
	TopologyUnreachable   Reason = "TopologyUnreachable"
	ReadOnlyUnsupported   Reason = "ReadOnlyUnsupported"
	StartingTokenInvalid  Reason = "StartingTokenInvalid"
	NotSupported          Reason = "NotSupported"
	MkfsOptions           Reason = "MkfsOptionsInvalid"
	MountFlags            Reason = "MountFlagsUnsupported"
	PathInvalid           Reason = "PathInvalid"
	DiskNameMissing       Reason = "DiskNameMissing"
)

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

// Reasons of errors of the rack.
const (
	TokenRejected       Reason = "TokenRejected"
	TokenFileUnreadable Reason = "TokenFileUnreadable"
	RoleMissing         Reason = "RoleMissing"
	ProjectNotFound     Reason = "ProjectNotFound"
	ProjectChanged      Reason = "ProjectChanged"
	ObjectNotFound      Reason = "ObjectNotFound"
	NameTaken           Reason = "NameTaken"
	ValueRefused        Reason = "ValueRefused"
	Conflict            Reason = "Conflict"
	RackFull            Reason = "RackFull"
	RackUnavailable     Reason = "RackUnavailable"
	EffectUnknown       Reason = "EffectUnknown"
	LookTooOld          Reason = "LookTooOld"
	RackUnknown         Reason = "RackUnknown"
	RackError           Reason = "RackError"
	RackResponseInvalid Reason = "RackResponseInvalid"
	DeadlineExceeded    Reason = "DeadlineExceeded"
	Canceled            Reason = "Canceled"
)

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

// table has every reason, in the order of docs/reasons.md.
var table = []Explanation{
	{VolumeIDMissing, codes.InvalidArgument, "Report it to the orchestrator, whose request is " +
		"invalid."},
	{FieldMissing, codes.InvalidArgument, "Report it to the orchestrator, whose request is invalid."},
	{FieldInvalid, codes.InvalidArgument, "Shorten or correct the field that the message names."},
	{CapabilityInvalid, codes.InvalidArgument, "Set the claim's access mode; without Kubernetes, " +
		"check the request."},
	{CapabilityUnsupported, codes.InvalidArgument, "Use ReadWriteOnce or ReadWriteOncePod, and " +
		"ext3, ext4, xfs, btrfs or a raw block volume, in a new claim."},
	{ParameterInvalid, codes.InvalidArgument, "Correct the parameter of the StorageClass; " +
		"docs/configuration.md lists them."},
	{CapacityInvalid, codes.InvalidArgument, "Ask for a size."},
	{CapacityOutOfRange, codes.OutOfRange, "Ask for a size that fits: whole GiB from 1 to 1023, and " +
		"no smaller than the snapshot or image."},
	{SourceUnsupported, codes.InvalidArgument, "Take a snapshot of the other volume and restore it."},
	{SourceIncompatible, codes.InvalidArgument, "Use a snapshot of this project; leave `blockSize` " +
		"out of the StorageClass when restoring."},
	{TopologyInvalid, codes.InvalidArgument, "Set the same topology on every controller and node, " +
		"or none. For `placement: instance` also set `OXIDE_TOPOLOGY_INSTANCE` on all of them " +
		"(`topologyInstance` of the chart), `volumeBindingMode: WaitForFirstConsumer` in a new " +
		"StorageClass, and the provisioner's `--strict-topology`."},
	{TopologyUnreachable, codes.ResourceExhausted, "Let the scheduler choose the location, or run " +
		"the workload at the rack's."},
	{ReadOnlyUnsupported, codes.InvalidArgument, "Publish the volume read-only to the pod instead " +
		"(`readOnly: true` in the pod)."},
	{StartingTokenInvalid, codes.Aborted, "Begin the listing again."},
	{NotSupported, codes.Unimplemented, "Follow the message."},
	{MkfsOptions, codes.InvalidArgument, "Correct `mkfsOptions` of the StorageClass; the " +
		"message says what is allowed."},
	{MountFlags, codes.FailedPrecondition, "Correct or remove the flag in " +
		"`mountOptions`; the message counts the flags from 1, and docs/configuration.md lists what is " +
		"allowed. A volume keeps the flags of the StorageClass that it was made with: edit the " +
		"PersistentVolume of an existing volume, and the StorageClass for new ones."},
	{PathInvalid, codes.InvalidArgument, "Check what is at the path on the node."},
	{DiskNameMissing, codes.InvalidArgument, "Give a static volume that no controller publishes the " +
		"volume attribute `diskName`."},
	{OperationPending, codes.Aborted, "Nothing; the call is repeated."},
	{VolumeNotFound, codes.NotFound, "Check the disk on the rack, and the token's project."},
	{VolumeExists, codes.AlreadyExists, "Choose another name, or delete the other volume."},
	{InstanceNotFound, codes.NotFound, "Check whether the instance was deleted, and the node's " +
		"CSINode object."},
	{InstanceFull, codes.ResourceExhausted, "Run the workload on another node, or detach a disk; " +
		"`OXIDE_MAX_DISKS` sets the limit that the scheduler knows."},
	{InstanceMustBeStopped, codes.FailedPrecondition, "Stop the instance until the volume is " +
		"attached or detached (`docs/howto/attach-by-hand.md`), or let the node keeper do that " +
		"(`docs/howto/node-keeper.md`). A rack with hot-plug needs neither, except for local disks."},
	{InstanceState, codes.FailedPrecondition, "Restart the instance, or delete it."},
	{DiskAttached, codes.FailedPrecondition, "Detach the disk; the driver never detaches a disk in " +
		"order to delete it."},
	{DiskAttachedElsewhere, codes.FailedPrecondition, "Wait until the volume is unpublished at the " +
		"other node; find the pod that uses it there."},
	{DiskBusy, codes.Aborted, "Nothing; the call is repeated. If snapshots stay refused, ask the " +
		"rack's operator whether a part of the disk is being replaced, and for how long."},
	{DiskImporting, codes.FailedPrecondition, "If everything is written, run `oxide disk import " +
		"stop` while the disk is `importing_from_bulk_writes`, and then `oxide disk import finalize`. " +
		"To use an image, name it in the StorageClass (`imageId`) instead of the disk that it was " +
		"imported with."},
	{DiskFaulted, codes.FailedPrecondition, "Restore the volume from a snapshot, or ask the rack's " +
		"operator. If CreateVolume reports it, delete the disk on the rack."},
	{OtherProject, codes.InvalidArgument, "Use disks and instances of that project. If " +
		"`OXIDE_PROJECT` was changed, set it back."},
	{SerialTaken, codes.FailedPrecondition, "Detach the other disk, or give it another name."},
	{UseDiffers, codes.FailedPrecondition, "Create a volume with the access type (`volumeMode`) " +
		"that the workload needs, and copy the data."},
	{UseUnknown, codes.FailedPrecondition, "Let a controller of this release publish the volume. If " +
		"an older one has attached it, delete the pods that use the volume on this node, wait until it " +
		"is detached, and start them again."},
	{BootDisk, codes.FailedPrecondition, "Use another disk."},
	{DiskNotOurs, codes.FailedPrecondition, "If the cluster's id (`OXIDE_CLUSTER_ID`) was changed, " +
		"set it back: it is part of the ownership tag. Otherwise give the volume the reclaim policy " +
		"Retain (the snapshot the deletionPolicy Retain), and delete the disk or snapshot on the rack " +
		"by hand."},
	{SnapshotNotFound, codes.NotFound, "Check the snapshot on the rack."},
	{SnapshotNotReady, codes.FailedPrecondition, "Nothing; the call is repeated."},
	{SnapshotExists, codes.AlreadyExists, "Choose another name."},
	{SnapshotFaulted, codes.FailedPrecondition, "Delete the snapshot and take another."},
	{SnapshotImpossible, codes.FailedPrecondition, "Use distributed disks for volumes that need " +
		"snapshots."},
	{ImageNotFound, codes.InvalidArgument, "Correct `imageId` in the StorageClass."},
	{TokenRejected, codes.Unauthenticated, "Put a new token into the Secret; the driver reads it " +
		"without a restart."},
	{TokenFileUnreadable, codes.FailedPrecondition, "Restore the file, or repair its mount; the " +
		"driver reads it without a restart. A driver that is started while the file cannot be read " +
		"ends at once."},
	{RoleMissing, codes.PermissionDenied, "Give the token's user the role limited-collaborator on " +
		"the project."},
	{ProjectNotFound, codes.FailedPrecondition, "Correct `OXIDE_PROJECT`, or give the token's user " +
		"a role on the project."},
	{ProjectChanged, codes.FailedPrecondition, "Set `OXIDE_PROJECT` to the project's id, which no " +
		"other project can get, and check `OXIDE_HOST`."},
	{ObjectNotFound, codes.NotFound, "Check whether somebody deleted the object."},
	{NameTaken, codes.AlreadyExists, "Find the object with the name on the rack."},
	{ValueRefused, codes.OutOfRange, "Change the value in the StorageClass or the claim."},
	{Conflict, codes.FailedPrecondition, "Check the object on the rack."},
	{RackFull, codes.ResourceExhausted, "Delete unneeded disks and snapshots (`oxide-csi-plugin " +
		"audit` lists orphans), or have the quota raised."},
	{RackUnavailable, codes.Unavailable, "Nothing if it passes; otherwise check `OXIDE_HOST`, the " +
		"network and the certificate."},
	{EffectUnknown, codes.Unavailable, "Nothing; the call is repeated, and finds what was done. If " +
		"the error persists, follow its message."},
	{LookTooOld, codes.Aborted, "Nothing; the call is repeated. If it persists, find out why the " +
		"rack's answers take seconds."},
	{RackUnknown, codes.Unavailable, "Correct the address in `OXIDE_HOST`, or update the rack."},
	{RackError, codes.Internal, "Give the rack's operator the request id in the message."},
	{RackResponseInvalid, codes.Unavailable, "Report it with the log; a server between driver and " +
		"rack may answer in the rack's place."},
	{DeadlineExceeded, codes.DeadlineExceeded, "Nothing; the call is repeated and continues where " +
		"this one stopped."},
	{Canceled, codes.Canceled, "Nothing."},
	{DeviceNotFound, codes.NotFound, "Check on the rack whether the disk is attached to this " +
		"instance; compare the serials in the message. If it is attached, the rack has recorded an " +
		"attach that it did not carry out. Stop the instance and start it again: it starts with all " +
		"its disks. Or delete the pod, so that the disk is detached; a rack may need the instance " +
		"stopped for that, which the node keeper does where it may."},
	{DeviceNotUnique, codes.FailedPrecondition, "Detach the disk that is not this volume's; their " +
		"names share the first 20 bytes."},
	{DeviceChanged, codes.FailedPrecondition, "Nothing; the call is safe to repeat."},
	{DeviceWrongSize, codes.FailedPrecondition, "Compare the two sizes in the message with the " +
		"rack; detach and attach the disk again."},
	{DeviceDiffers, codes.FailedPrecondition, "Compare the disks of the instance on the rack; " +
		"detach the one that does not belong there."},
	{DeviceHeld, codes.FailedPrecondition, "Stop the process that uses the device, or unmount it; " +
		"the message says where it is in use if that is visible."},
	{DeviceReadOnly, codes.FailedPrecondition, "Publish the volume read-only, or find out why the " +
		"device is read-only; `blockdev --setrw` makes it writable."},
	{DeviceUnreadable, codes.FailedPrecondition, "Check the kernel's log and the disk's health on " +
		"the rack."},
	{DiskNotBlank, codes.FailedPrecondition, "If the message says that the node mounted the " +
		"volume's filesystem before, it was destroyed: take a snapshot, do not delete the volume, and " +
		"recover what is left by hand. Otherwise mount the disk by hand and inspect it; if its content " +
		"is not needed, delete the volume and create a new one. A superblock whose checksum is wrong " +
		"may have been torn by a power failure: take a snapshot first, and repair it by hand (`e2fsck " +
		"-f`; the copies that `btrfs rescue super-recover` uses may lack what was synced last)."},
	{DiskSizeUnknown, codes.FailedPrecondition, "Let a controller publish the volume, or create the " +
		"filesystem by hand."},
	{WrongFilesystem, codes.FailedPrecondition, "Compare the disks of the instance on the rack; " +
		"detach the one that does not belong there. If the UUID was changed by hand, or an older " +
		"driver made the filesystem, set it (`tune2fs -U`, `xfs_admin -U`, `btrfstune -M`)."},
	{DeviceLocked, codes.Aborted, "Nothing; the call is repeated. If the error persists, end the " +
		"other process, which the message names."},
	{DiskProofPending, codes.Aborted, "Nothing; the call is repeated, and waits for the same read. " +
		"The driver's log shows the progress."},
	{FilesystemDamaged, codes.Internal, "Take a snapshot of the volume, and repair a copy of its " +
		"disk first: docs/howto/repair-a-filesystem.md."},
	{FilesystemFeature, codes.FailedPrecondition, "Take the feature away on a machine that has all " +
		"devices of the filesystem and knows the feature (`tune2fs`, `xfs_repair`, `btrfs device " +
		"remove`), or copy the files into a new volume. If only this node's kernel refuses the " +
		"feature, use a node with a newer one."},
	{FilesystemTooLarge, codes.FailedPrecondition, "Compare the disk with the rack: was it " +
		"truncated, or is it another disk?"},
	{FilesystemNotGrown, codes.FailedPrecondition, "Look at the rest of the disk behind the " +
		"filesystem. If it is not needed, overwrite it with zeroes while the volume is not staged; or " +
		"copy the files into a new volume."},
	{FilesystemFailed, codes.FailedPrecondition, "Check the kernel's log; delete the pods that use " +
		"the volume, so that it is staged again."},
	{LogNotReplayed, codes.FailedPrecondition, "Restore the snapshot to a writable volume and let a " +
		"pod use that once, which replays the log. Take the snapshot for the read-only disk of that " +
		"volume when no pod uses it. Or restore to a writable volume for good, and publish it " +
		"read-only to pods."},
	{StagedDifferently, codes.AlreadyExists, "Unstage the volume; check what is mounted there."},
	{NotStaged, codes.FailedPrecondition, "Nothing if the orchestrator stages it again; otherwise " +
		"restart the pod."},
	{PublishedDifferently, codes.AlreadyExists, "Unpublish the volume first; unmount by hand what " +
		"belongs to no volume."},
	{PublishedElsewhere, codes.FailedPrecondition, "Wait until the other pod is gone, or use " +
		"ReadWriteOnce instead of ReadWriteOncePod."},
	{StillMounted, codes.Internal, "Stop what uses the volume there."},
	{TargetNotEmpty, codes.Internal, "Save the files at the path, and remove the path by hand."},
	{VolumeNotAtPath, codes.NotFound, "Nothing, if the pod is on its way out."},
	{VolumeUnknownToNode, codes.NotFound, "Nothing; staging or publishing the volume records it " +
		"again."},
	{StateNotKept, codes.Internal, "Check the free space and the permissions of the directory in " +
		"`OXIDE_STATE_DIR`."},
	{NodeToolFailed, codes.Internal, "Follow the message; check the kernel's log."},
	{ToolsMissing, codes.FailedPrecondition, "Use the node image, or install the packages that the " +
		"message names."},
	{InstanceUnknown, codes.FailedPrecondition, "Set `OXIDE_INSTANCE_ID`, or give the container " +
		"access to SMBIOS."},
	{Internal, codes.Internal, "Please report it with the log."},
}
