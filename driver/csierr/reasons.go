package csierr

// Reason is the first word of every error that a CO sees. Dashboards and documentation refer to it;
// the sentence after it is for people.
type Reason string

// Reasons in the request.
const (
	// VolumeIDMissing: the request names no volume.
	VolumeIDMissing Reason = "VolumeIDMissing"
	// FieldMissing: a field that CSI requires is not set.
	FieldMissing Reason = "FieldMissing"
	// FieldInvalid: a field is too long, negative, or holds characters it may not hold.
	FieldInvalid Reason = "FieldInvalid"
	// CapabilityInvalid: a volume capability lacks its access mode or its access type.
	CapabilityInvalid Reason = "CapabilityInvalid"
	// CapabilityUnsupported: volumes have no such access mode, filesystem or mount group.
	CapabilityUnsupported Reason = "CapabilityUnsupported"
	// ParameterInvalid: the StorageClass has a parameter that is unknown or has a bad value.
	ParameterInvalid Reason = "ParameterInvalid"
	// CapacityInvalid: the capacity range is empty or negative.
	CapacityInvalid Reason = "CapacityInvalid"
	// CapacityOutOfRange: no disk the rack can make has a size in the range.
	CapacityOutOfRange Reason = "CapacityOutOfRange"
	// SourceUnsupported: volumes can be made blank, from a snapshot or from an image, not
	// from other volumes. Take a snapshot and restore it instead.
	SourceUnsupported Reason = "SourceUnsupported"
	// SourceIncompatible: the snapshot is of another project, or the parameters contradict
	// it.
	SourceIncompatible Reason = "SourceIncompatible"
	// TopologyInvalid: the accessibility requirements break CSI's rules, the plugin was started
	// without a topology, or a volume with placement instance is asked for without one instance.
	TopologyInvalid Reason = "TopologyInvalid"
	// TopologyUnreachable: this plugin's rack is in none of the requested locations.
	TopologyUnreachable Reason = "TopologyUnreachable"
	// ReadOnlyUnsupported: the rack attaches disks for writing only.
	ReadOnlyUnsupported Reason = "ReadOnlyUnsupported"
	// StartingTokenInvalid: the listing cannot be continued from this token; begin again.
	StartingTokenInvalid Reason = "StartingTokenInvalid"
	// NotSupported: Oxide has no such thing; the message says what to do instead.
	NotSupported Reason = "NotSupported"
)

// Reasons in the state of an object.
const (
	// OperationPending: another call for this object is in progress. Repeat the call later.
	OperationPending Reason = "OperationPending"
	// VolumeNotFound: the rack has no disk with this id, or the token may not see it.
	VolumeNotFound Reason = "VolumeNotFound"
	// VolumeExists: a volume of that name exists and differs from the request.
	VolumeExists Reason = "VolumeExists"
	// InstanceNotFound: the rack has no instance with the node's id, or the token may not see
	// it.
	InstanceNotFound Reason = "InstanceNotFound"
	// InstanceFull: the instance has as many disks as the rack allows. Run the workload on
	// another node.
	InstanceFull Reason = "InstanceFull"
	// InstanceMustBeStopped: this rack attaches and detaches disks only while the instance is
	// stopped. Stop it, or wait for a release of the rack with hot-plug.
	InstanceMustBeStopped Reason = "InstanceMustBeStopped"
	// InstanceState: the instance's state allows no attach or detach.
	InstanceState Reason = "InstanceState"
	// DiskAttached: the disk is attached to an instance and cannot be deleted.
	DiskAttached Reason = "DiskAttached"
	// DiskAttachedElsewhere: the disk is attached to another instance, which the message
	// names.
	DiskAttachedElsewhere Reason = "DiskAttachedElsewhere"
	// DiskBusy: the rack is busy with the disk. Repeat the call later.
	DiskBusy Reason = "DiskBusy"
	// DiskFaulted: the rack reports the disk as faulted. Restore the volume from a snapshot,
	// or ask the rack's operator.
	DiskFaulted Reason = "DiskFaulted"
	// OtherProject: the disk and the instance are in different projects.
	OtherProject Reason = "OtherProject"
	// SerialTaken: another disk of the instance has a name with the same first 20 bytes, and
	// the guest would show only one of the two.
	SerialTaken Reason = "SerialTaken"
	// UseDiffers: the volume was created for filesystems, or for raw block access, and the
	// request wants the other. Create a volume with the access type that the workload needs.
	UseDiffers Reason = "UseDiffers"
	// UseUnknown: the request is for a raw device, and publish_context does not say that the disk may
	// be used so. Let a controller publish the volume; a static volume, too.
	UseUnknown Reason = "UseUnknown"
	// BootDisk: the disk is the instance's boot disk, which cannot be detached.
	BootDisk Reason = "BootDisk"
	// DiskNotOurs: the disk or snapshot has no ownership tag of this driver, or another cluster's, and
	// the driver deletes only what it made. If OXIDE_CLUSTER_ID was changed, set it back. Otherwise
	// give the volume the reclaim policy Retain (the snapshot the deletionPolicy Retain), and delete
	// by hand on the rack.
	DiskNotOurs Reason = "DiskNotOurs"
	// SnapshotNotFound: the rack has no snapshot with this id, or the token may not see it.
	SnapshotNotFound Reason = "SnapshotNotFound"
	// SnapshotNotReady: the snapshot is not complete yet. Repeat the call later.
	SnapshotNotReady Reason = "SnapshotNotReady"
	// SnapshotExists: a snapshot of that name exists, of another volume.
	SnapshotExists Reason = "SnapshotExists"
	// SnapshotFaulted: the rack failed to make the snapshot. Delete it and take another.
	SnapshotFaulted Reason = "SnapshotFaulted"
	// SnapshotImpossible: the rack takes no snapshots of such a disk.
	SnapshotImpossible Reason = "SnapshotImpossible"
	// ImageNotFound: the rack has no image with this id, or the token may not see it.
	ImageNotFound Reason = "ImageNotFound"
)

// Reasons in the rack's responses.
const (
	// TokenRejected: the rack does not accept the token. It may have expired.
	TokenRejected Reason = "TokenRejected"
	// TokenFileUnreadable: the token file blocks, is gone, or holds no token. Calls continue with the
	// token read last.
	TokenFileUnreadable Reason = "TokenFileUnreadable"
	// RoleMissing: the token's user lacks the role limited-collaborator on the project.
	RoleMissing Reason = "RoleMissing"
	// ProjectNotFound: OXIDE_PROJECT names no project that the token may see.
	ProjectNotFound Reason = "ProjectNotFound"
	// ObjectNotFound: the rack does not know an object the call is about.
	ObjectNotFound Reason = "ObjectNotFound"
	// NameTaken: the rack has an object of that name already.
	NameTaken Reason = "NameTaken"
	// ValueRefused: the rack does not accept a value.
	ValueRefused Reason = "ValueRefused"
	// Conflict: the rack refuses the call in the object's present state.
	Conflict Reason = "Conflict"
	// RackFull: the silo's quota or the rack's space is used up.
	RackFull Reason = "RackFull"
	// RackUnavailable: the rack cannot be reached, or cannot respond now. The CO repeats the call.
	RackUnavailable Reason = "RackUnavailable"
	// EffectUnknown: the rack's responses leave open whether a disk or snapshot was made, or a disk
	// attached or detached. The CO repeats the call, which finds out.
	EffectUnknown Reason = "EffectUnknown"
	// RackUnknown: what answers at OXIDE_HOST is not a rack of release v20 or later.
	RackUnknown Reason = "RackUnknown"
	// RackError: the rack failed. Give its operator the request id.
	RackError Reason = "RackError"
	// RackResponseInvalid: the rack's response is invalid or contradicts the call.
	RackResponseInvalid Reason = "RackResponseInvalid"
	// DeadlineExceeded: the deadline passed before the rack responded. The CO repeats the call.
	DeadlineExceeded Reason = "DeadlineExceeded"
	// Canceled: the caller gave up.
	Canceled Reason = "Canceled"
)

// Reasons in the plugin itself.
const (
	// ToolsMissing: programs that the node service runs are not in the image or on the host.
	ToolsMissing Reason = "ToolsMissing"
	// Internal: a bug in the driver. Please report it with the log.
	Internal Reason = "Internal"
)

// Reasons of a node.
const (
	// DeviceNotFound: no device of this instance has the disk's serial. Check whether the disk is
	// attached to this instance, and the serials in the message.
	DeviceNotFound Reason = "DeviceNotFound"
	// DeviceNotUnique: two devices have the same serial. Detach one of the two disks; their names
	// share the first 20 bytes.
	DeviceNotUnique Reason = "DeviceNotUnique"
	// DeviceChanged: the device became another one while the driver worked on it. The call is
	// safe to repeat.
	DeviceChanged Reason = "DeviceChanged"
	// DeviceWrongSize: the device's size is not the disk's. Compare the two with the rack.
	DeviceWrongSize Reason = "DeviceWrongSize"
	// DeviceDiffers: the device has another block size than the rack's disk. It may be another disk.
	DeviceDiffers Reason = "DeviceDiffers"
	// DeviceHeld: the device is mounted or held open exclusively elsewhere on the node. The
	// message says where if it can be seen.
	DeviceHeld Reason = "DeviceHeld"
	// DeviceReadOnly: the device cannot be written, and the request needs that.
	DeviceReadOnly Reason = "DeviceReadOnly"
	// DeviceUnreadable: reads of the device fail, so its content is unknown.
	DeviceUnreadable Reason = "DeviceUnreadable"
	// DiskNameMissing: neither context names the disk. A static volume needs the volume
	// attribute diskName, or a controller that publishes it.
	DiskNameMissing Reason = "DiskNameMissing"
	// DiskNotBlank: the disk holds something other than the requested filesystem, or the
	// format-in-progress record of another volume. The driver never overwrites it; the message says
	// what was found and where.
	DiskNotBlank Reason = "DiskNotBlank"
	// DiskSizeUnknown: the disk is blank, but the node does not know its expected size, so it does not
	// format it. Let a controller publish the volume, or make the filesystem by hand.
	DiskSizeUnknown Reason = "DiskSizeUnknown"
	// WrongFilesystem: the disk holds a filesystem with a UUID other than the volume's. It may be
	// another disk; the message names both UUIDs.
	WrongFilesystem Reason = "WrongFilesystem"
	// DeviceLocked: another process of the driver, or a program it started, works on the volume or its
	// device, or is about to mount at the same path. Repeat the call later.
	DeviceLocked Reason = "DeviceLocked"
	// DiskProofPending: the node is reading the whole disk before it formats it. Repeat the call.
	DiskProofPending Reason = "DiskProofPending"
	// FilesystemDamaged: the filesystem check, or the kernel at the mount, found damage that the
	// driver must not repair by itself.
	FilesystemDamaged Reason = "FilesystemDamaged"
	// FilesystemFeature: the filesystem uses a feature that the driver does not know or this node's
	// kernel does not support, or keeps a part of itself on another device.
	FilesystemFeature Reason = "FilesystemFeature"
	// FilesystemTooLarge: the filesystem claims more bytes than its device has.
	FilesystemTooLarge Reason = "FilesystemTooLarge"
	// FilesystemNotGrown: the filesystem is smaller than its disk and is not grown, because other data
	// follows it or no tool grows it. Only a volume's health has this reason.
	FilesystemNotGrown Reason = "FilesystemNotGrown"
	// FilesystemFailed: the kernel made the filesystem read-only, or shut it down, after errors. See
	// the kernel's log; unpublish the volume everywhere, then stage it again.
	FilesystemFailed Reason = "FilesystemFailed"
	// MkfsOptions: mkfsOptions has an option that the driver does not allow for this filesystem.
	MkfsOptions Reason = "MkfsOptionsInvalid"
	// MountFlags: the driver does not allow a mount flag for volumes.
	MountFlags Reason = "MountFlagsUnsupported"
	// StagedDifferently: something other than the request is mounted at the path, or the volume is a
	// different disk on this node. Unstage it first.
	StagedDifferently Reason = "StagedDifferently"
	// NotStaged: the volume is not mounted at the staging path. Stage it again.
	NotStaged Reason = "NotStaged"
	// PublishedDifferently: the volume is published at the target path with other arguments.
	PublishedDifferently Reason = "PublishedDifferently"
	// PublishedElsewhere: the access mode allows one target path, and the volume has one.
	PublishedElsewhere Reason = "PublishedElsewhere"
	// StillMounted: mounts of the volume are left on the node; unpublish them first.
	StillMounted Reason = "StillMounted"
	// TargetNotEmpty: the target path contains files. The driver does not remove them.
	TargetNotEmpty Reason = "TargetNotEmpty"
	// PathInvalid: a path of the request is not absolute, or of the wrong kind.
	PathInvalid Reason = "PathInvalid"
	// VolumeNotAtPath: the path shows no volume, or another one.
	VolumeNotAtPath Reason = "VolumeNotAtPath"
	// VolumeUnknownToNode: this node has no record of the volume.
	VolumeUnknownToNode Reason = "VolumeUnknownToNode"
	// StateNotKept: the node cannot write the volume record. Check the space and the permissions of
	// its state directory.
	StateNotKept Reason = "StateNotKept"
	// NodeToolFailed: mkfs, e2fsck, resize2fs or the kernel failed. The message quotes it.
	NodeToolFailed Reason = "NodeToolFailed"
	// InstanceUnknown: the driver does not know which instance it runs on.
	InstanceUnknown Reason = "InstanceUnknown"
)
