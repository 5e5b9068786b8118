package driver

// Reason is the first word of every error a CO sees: one word for dashboards and documentation,
// before the sentence for people.
type Reason string

// What a request can have wrong.
const (
	// ReasonVolumeIDMissing: the request names no volume.
	ReasonVolumeIDMissing Reason = "VolumeIDMissing"
	// ReasonFieldMissing: a field that CSI requires is not set.
	ReasonFieldMissing Reason = "FieldMissing"
	// ReasonFieldInvalid: a field is too long, negative, or holds characters it may not hold.
	ReasonFieldInvalid Reason = "FieldInvalid"
	// ReasonCapabilityInvalid: a volume capability lacks its access mode or its access type.
	ReasonCapabilityInvalid Reason = "CapabilityInvalid"
	// ReasonCapabilityUnsupported: volumes have no such access mode, filesystem or mount group.
	ReasonCapabilityUnsupported Reason = "CapabilityUnsupported"
	// ReasonParameterInvalid: the StorageClass has a parameter that is unknown or has a bad value.
	ReasonParameterInvalid Reason = "ParameterInvalid"
	// ReasonCapacityInvalid: the capacity range is empty or negative.
	ReasonCapacityInvalid Reason = "CapacityInvalid"
	// ReasonCapacityOutOfRange: no disk the rack can make has a size in the range.
	ReasonCapacityOutOfRange Reason = "CapacityOutOfRange"
	// ReasonSourceUnsupported: volumes can be made blank, from a snapshot or from an image, not
	// from other volumes. Take a snapshot and restore it instead.
	ReasonSourceUnsupported Reason = "SourceUnsupported"
	// ReasonSourceIncompatible: the snapshot is of another project, or the parameters contradict
	// it.
	ReasonSourceIncompatible Reason = "SourceIncompatible"
	// ReasonTopologyInvalid: the accessibility requirements break CSI's rules, or the plugin was
	// started without a topology.
	ReasonTopologyInvalid Reason = "TopologyInvalid"
	// ReasonTopologyUnreachable: this plugin's rack is in none of the wanted places.
	ReasonTopologyUnreachable Reason = "TopologyUnreachable"
	// ReasonReadOnlyUnsupported: the rack attaches disks for writing only.
	ReasonReadOnlyUnsupported Reason = "ReadOnlyUnsupported"
	// ReasonStartingTokenInvalid: the listing cannot be continued from this token; begin again.
	ReasonStartingTokenInvalid Reason = "StartingTokenInvalid"
	// ReasonNotSupported: Oxide has no such thing; the message says what to do instead.
	ReasonNotSupported Reason = "NotSupported"
)

// What the state of an object can forbid.
const (
	// ReasonOperationPending: another call for this object is at work. Repeat the call later.
	ReasonOperationPending Reason = "OperationPending"
	// ReasonVolumeNotFound: the rack has no disk with this id, or the token may not see it.
	ReasonVolumeNotFound Reason = "VolumeNotFound"
	// ReasonVolumeExists: a volume of that name exists and is not what is asked for.
	ReasonVolumeExists Reason = "VolumeExists"
	// ReasonInstanceNotFound: the rack has no instance with the node's id, or the token may not see
	// it.
	ReasonInstanceNotFound Reason = "InstanceNotFound"
	// ReasonInstanceFull: the instance has as many disks as the rack allows. Run the workload on
	// another node.
	ReasonInstanceFull Reason = "InstanceFull"
	// ReasonInstanceMustBeStopped: this rack attaches and detaches disks only while the instance is
	// stopped. Stop it, or wait for a release of the rack with hot-plug.
	ReasonInstanceMustBeStopped Reason = "InstanceMustBeStopped"
	// ReasonInstanceState: the instance's state allows no attach or detach.
	ReasonInstanceState Reason = "InstanceState"
	// ReasonDiskAttached: the disk is attached to an instance and cannot be deleted.
	ReasonDiskAttached Reason = "DiskAttached"
	// ReasonDiskAttachedElsewhere: the disk is attached to another instance, which the message
	// names.
	ReasonDiskAttachedElsewhere Reason = "DiskAttachedElsewhere"
	// ReasonDiskBusy: the rack is at work on the disk. Repeat the call later.
	ReasonDiskBusy Reason = "DiskBusy"
	// ReasonDiskFaulted: the rack reports the disk as faulted. Restore the volume from a snapshot,
	// or ask the rack's operator.
	ReasonDiskFaulted Reason = "DiskFaulted"
	// ReasonOtherProject: the disk and the instance are in different projects.
	ReasonOtherProject Reason = "OtherProject"
	// ReasonSerialTaken: another disk of the instance has a name with the same first 20 bytes, and
	// the guest would show only one of the two.
	ReasonSerialTaken Reason = "SerialTaken"
	// ReasonUseDiffers: the volume was created for filesystems, or for raw block access, and the
	// request wants the other. Create a volume with the access type that the workload needs.
	ReasonUseDiffers Reason = "UseDiffers"
	// ReasonBootDisk: the disk is the instance's boot disk, which cannot be detached.
	ReasonBootDisk Reason = "BootDisk"
	// ReasonDiskNotOurs: the disk or snapshot carries no mark of this driver, or another cluster's,
	// and the driver deletes only what it made. Give the volume the reclaim policy Retain (the
	// snapshot the deletionPolicy Retain), and delete by hand on the rack.
	ReasonDiskNotOurs Reason = "DiskNotOurs"
	// ReasonSnapshotNotFound: the rack has no snapshot with this id, or the token may not see it.
	ReasonSnapshotNotFound Reason = "SnapshotNotFound"
	// ReasonSnapshotNotReady: the snapshot is not complete yet. Repeat the call later.
	ReasonSnapshotNotReady Reason = "SnapshotNotReady"
	// ReasonSnapshotExists: a snapshot of that name exists, of another volume.
	ReasonSnapshotExists Reason = "SnapshotExists"
	// ReasonSnapshotFaulted: the rack failed to make the snapshot. Delete it and take another.
	ReasonSnapshotFaulted Reason = "SnapshotFaulted"
	// ReasonSnapshotImpossible: the rack takes no snapshots of such a disk.
	ReasonSnapshotImpossible Reason = "SnapshotImpossible"
	// ReasonImageNotFound: the rack has no image with this id, or the token may not see it.
	ReasonImageNotFound Reason = "ImageNotFound"
)

// What the rack can answer, or fail to answer.
const (
	// ReasonTokenRejected: the rack does not accept the token. It may have expired.
	ReasonTokenRejected Reason = "TokenRejected"
	// ReasonTokenFileUnreadable: the token file blocks, is gone, or holds no token. Calls go on with
	// the token last read.
	ReasonTokenFileUnreadable Reason = "TokenFileUnreadable"
	// ReasonRoleMissing: the token's user lacks the role limited-collaborator on the project.
	ReasonRoleMissing Reason = "RoleMissing"
	// ReasonProjectNotFound: OXIDE_PROJECT names no project that the token may see.
	ReasonProjectNotFound Reason = "ProjectNotFound"
	// ReasonObjectNotFound: the rack does not know an object the call is about.
	ReasonObjectNotFound Reason = "ObjectNotFound"
	// ReasonNameTaken: the rack has an object of that name already.
	ReasonNameTaken Reason = "NameTaken"
	// ReasonValueRefused: the rack does not accept a value.
	ReasonValueRefused Reason = "ValueRefused"
	// ReasonConflict: the rack refuses the call in the object's present state.
	ReasonConflict Reason = "Conflict"
	// ReasonRackFull: the silo's quota or the rack's space is used up.
	ReasonRackFull Reason = "RackFull"
	// ReasonRackUnavailable: the rack cannot be reached, or cannot answer now. The call is
	// repeated.
	ReasonRackUnavailable Reason = "RackUnavailable"
	// ReasonEffectUnknown: the rack's answers leave open whether a disk or snapshot was made, or a
	// disk attached or detached. The call is repeated, and finds out.
	ReasonEffectUnknown Reason = "EffectUnknown"
	// ReasonRackUnknown: what answers at OXIDE_HOST is not a rack of release v20 or later.
	ReasonRackUnknown Reason = "RackUnknown"
	// ReasonRackError: the rack failed. Give its operator the request id.
	ReasonRackError Reason = "RackError"
	// ReasonRackAnswerWrong: the rack's answer contradicts the call and is not believed.
	ReasonRackAnswerWrong Reason = "RackAnswerWrong"
	// ReasonDeadlineExceeded: the caller's time was up before the rack answered. The call is
	// repeated.
	ReasonDeadlineExceeded Reason = "DeadlineExceeded"
	// ReasonCanceled: the caller gave up.
	ReasonCanceled Reason = "Canceled"
)

// What the plugin itself can lack.
const (
	// ReasonToolsMissing: programs that the node service runs are not in the image or on the host.
	ReasonToolsMissing Reason = "ToolsMissing"
	// ReasonInternal: a bug in the driver. Please report it with the log.
	ReasonInternal Reason = "Internal"
)
