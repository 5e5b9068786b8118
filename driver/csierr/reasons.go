package csierr

// Reason is the first word of every error a CO sees: one word for dashboards and documentation,
// before the sentence for people.
type Reason string

// What a request can have wrong.
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
	// TopologyInvalid: the accessibility requirements break CSI's rules, or the plugin was
	// started without a topology.
	TopologyInvalid Reason = "TopologyInvalid"
	// TopologyUnreachable: this plugin's rack is in none of the wanted places.
	TopologyUnreachable Reason = "TopologyUnreachable"
	// ReadOnlyUnsupported: the rack attaches disks for writing only.
	ReadOnlyUnsupported Reason = "ReadOnlyUnsupported"
	// StartingTokenInvalid: the listing cannot be continued from this token; begin again.
	StartingTokenInvalid Reason = "StartingTokenInvalid"
	// NotSupported: Oxide has no such thing; the message says what to do instead.
	NotSupported Reason = "NotSupported"
)

// What the state of an object can forbid.
const (
	// OperationPending: another call for this object is at work. Repeat the call later.
	OperationPending Reason = "OperationPending"
	// VolumeNotFound: the rack has no disk with this id, or the token may not see it.
	VolumeNotFound Reason = "VolumeNotFound"
	// VolumeExists: a volume of that name exists and is not what is asked for.
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
	// DiskBusy: the rack is at work on the disk. Repeat the call later.
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
	// BootDisk: the disk is the instance's boot disk, which cannot be detached.
	BootDisk Reason = "BootDisk"
	// DiskNotOurs: the disk or snapshot carries no mark of this driver, or another cluster's,
	// and the driver deletes only what it made. Give the volume the reclaim policy Retain (the
	// snapshot the deletionPolicy Retain), and delete by hand on the rack.
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

// What the rack can answer, or fail to answer.
const (
	// TokenRejected: the rack does not accept the token. It may have expired.
	TokenRejected Reason = "TokenRejected"
	// TokenFileUnreadable: the token file blocks, is gone, or holds no token. Calls go on with
	// the token last read.
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
	// RackUnavailable: the rack cannot be reached, or cannot answer now. The call is
	// repeated.
	RackUnavailable Reason = "RackUnavailable"
	// EffectUnknown: the rack's answers leave open whether a disk or snapshot was made, or a
	// disk attached or detached. The call is repeated, and finds out.
	EffectUnknown Reason = "EffectUnknown"
	// RackUnknown: what answers at OXIDE_HOST is not a rack of release v20 or later.
	RackUnknown Reason = "RackUnknown"
	// RackError: the rack failed. Give its operator the request id.
	RackError Reason = "RackError"
	// RackAnswerWrong: the rack's answer contradicts the call and is not believed.
	RackAnswerWrong Reason = "RackAnswerWrong"
	// DeadlineExceeded: the caller's time was up before the rack answered. The call is
	// repeated.
	DeadlineExceeded Reason = "DeadlineExceeded"
	// Canceled: the caller gave up.
	Canceled Reason = "Canceled"
)

// What the plugin itself can lack.
const (
	// ToolsMissing: programs that the node service runs are not in the image or on the host.
	ToolsMissing Reason = "ToolsMissing"
	// Internal: a bug in the driver. Please report it with the log.
	Internal Reason = "Internal"
)

// The reasons a node gives. Each names one condition a person can act on.
const (
	// DeviceNotFound: no device of this instance carries the disk's serial. Look whether the
	// disk is attached to this instance, and at the serials the message lists.
	DeviceNotFound Reason = "DeviceNotFound"
	// DeviceNotUnique: two devices carry the same serial. Detach one of the two disks; their
	// names share the first 20 bytes.
	DeviceNotUnique Reason = "DeviceNotUnique"
	// DeviceChanged: the device became another one while the driver worked on it. The call is
	// safe to repeat.
	DeviceChanged Reason = "DeviceChanged"
	// DeviceWrongSize: the device's size is not the disk's. Compare the two with the rack.
	DeviceWrongSize Reason = "DeviceWrongSize"
	// DeviceDiffers: the device is not what the rack says of the disk: it has blocks of another
	// size. Another disk may have taken the volume's place.
	DeviceDiffers Reason = "DeviceDiffers"
	// DeviceHeld: the device is mounted or held open exclusively elsewhere on the node. The
	// message says where if it can be seen.
	DeviceHeld Reason = "DeviceHeld"
	// DeviceReadOnly: the device cannot be written, and the request needs that.
	DeviceReadOnly Reason = "DeviceReadOnly"
	// DeviceUnreadable: the device answers reads with errors, so nothing can be said of it.
	DeviceUnreadable Reason = "DeviceUnreadable"
	// DiskNameMissing: neither context names the disk. A static volume needs the volume
	// attribute diskName, or a controller that publishes it.
	DiskNameMissing Reason = "DiskNameMissing"
	// DiskNotBlank: the disk holds something that is not the wanted filesystem, or the mark of
	// an unfinished format of another volume. The driver never overwrites; the message says what was
	// found and where.
	DiskNotBlank Reason = "DiskNotBlank"
	// DiskSizeUnknown: the disk is blank, but nobody has told the node how large it is to be, so
	// it is not formatted. Let a controller publish the volume, or make the filesystem by hand.
	DiskSizeUnknown Reason = "DiskSizeUnknown"
	// WrongFilesystem: the disk holds a filesystem, but not the volume's own: its UUID is
	// another one. Another disk may have taken the volume's place; the message names both UUIDs.
	WrongFilesystem Reason = "WrongFilesystem"
	// DeviceLocked: another process of the driver, or a program it started, works on the device.
	// Repeat the call later.
	DeviceLocked Reason = "DeviceLocked"
	// DiskProofPending: the disk is being read whole before it is formatted. Repeat the call.
	DiskProofPending Reason = "DiskProofPending"
	// FilesystemDamaged: the filesystem's check found what it may not repair by itself.
	FilesystemDamaged Reason = "FilesystemDamaged"
	// FilesystemTooLarge: the filesystem claims more bytes than its device has.
	FilesystemTooLarge Reason = "FilesystemTooLarge"
	// FilesystemNotGrown: the filesystem is smaller than its disk, and stays so, because
	// something lies behind it or because nothing grows it. Only a volume's health has this reason.
	FilesystemNotGrown Reason = "FilesystemNotGrown"
	// FilesystemFailed: the kernel made the filesystem read-only, or shut it down, after
	// errors. Look at the kernel's log; unpublish the volume everywhere, then stage it again.
	FilesystemFailed Reason = "FilesystemFailed"
	// MkfsOptions: mkfsOptions holds what the driver does not allow for this filesystem.
	MkfsOptions Reason = "MkfsOptionsInvalid"
	// MountFlags: a mount flag is one that a volume may not have.
	MountFlags Reason = "MountFlagsUnsupported"
	// StagedDifferently: something else than the request asks for is mounted at the path, or the
	// volume is another disk on this node than the request names. Unstage it first.
	StagedDifferently Reason = "StagedDifferently"
	// NotStaged: the volume is not mounted at the staging path. Stage it again.
	NotStaged Reason = "NotStaged"
	// PublishedDifferently: the target path is taken by a publication with other arguments.
	PublishedDifferently Reason = "PublishedDifferently"
	// PublishedElsewhere: the access mode allows one target path, and the volume has one.
	PublishedElsewhere Reason = "PublishedElsewhere"
	// StillMounted: mounts of the volume are left on the node; unpublish them first.
	StillMounted Reason = "StillMounted"
	// TargetNotEmpty: the target path holds files of somebody, and is left alone.
	TargetNotEmpty Reason = "TargetNotEmpty"
	// PathInvalid: a path of the request is not absolute, or of the wrong kind.
	PathInvalid Reason = "PathInvalid"
	// VolumeNotAtPath: the path shows no volume, or another one.
	VolumeNotAtPath Reason = "VolumeNotAtPath"
	// VolumeUnknownToNode: this node knows nothing of the volume.
	VolumeUnknownToNode Reason = "VolumeUnknownToNode"
	// StateNotKept: the node cannot write down which disk the volume is. Look at the space and
	// the rights of its state directory.
	StateNotKept Reason = "StateNotKept"
	// NodeToolFailed: mkfs, e2fsck, resize2fs or the kernel refused. The message has its
	// words.
	NodeToolFailed Reason = "NodeToolFailed"
	// InstanceUnknown: the driver does not know which instance it runs on.
	InstanceUnknown Reason = "InstanceUnknown"
)
