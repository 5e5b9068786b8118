package csierr

import "google.golang.org/grpc/codes"

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

var requestReasons = section{
	title: "Errors in the request",
	intro: "Repeating the call does not help: change the StorageClass, the claim or the volume.",
	reasons: []Explanation{
		{
			Reason: VolumeIDMissing, Code: codes.InvalidArgument,
			Means: "The request names no volume.",
			Do:    "Report it to the orchestrator, whose request is invalid.",
		},
		{
			Reason: FieldMissing, Code: codes.InvalidArgument,
			Means: "A field that CSI requires is not set; the message names it.",
			Do:    "Report it to the orchestrator, whose request is invalid.",
		},
		{
			Reason: FieldInvalid, Code: codes.InvalidArgument,
			Means: "A field is too long, negative, or holds characters that CSI forbids, or the " +
				"contexts of a node's request name two disks.",
			Do: "Shorten or correct the field that the message names.",
		},
		{
			Reason: CapabilityInvalid, Code: codes.InvalidArgument,
			Means: "A volume capability has no access mode or no access type.",
			Do:    "Set the claim's access mode; without Kubernetes, check the request.",
		},
		{
			Reason: CapabilityUnsupported, Code: codes.InvalidArgument,
			Also: "; on a node, `FAILED_PRECONDITION`",
			Means: "Volumes have no such access mode, filesystem or mount group. A disk is " +
				"attached to one instance at a time, for reading and writing.",
			Do: "Use ReadWriteOnce or ReadWriteOncePod, and ext3, ext4, xfs, btrfs or a raw block " +
				"volume, in a new claim.",
		},
		{
			Reason: ParameterInvalid, Code: codes.InvalidArgument,
			Means: "The StorageClass has an unknown parameter, or an invalid value.",
			Do:    "Correct the parameter of the StorageClass; docs/configuration.md lists them.",
		},
		{
			Reason: CapacityInvalid, Code: codes.InvalidArgument,
			Means: "The capacity range is empty or negative.",
			Do:    "Ask for a size.",
		},
		{
			Reason: CapacityOutOfRange, Code: codes.OutOfRange,
			Means: "No disk that the rack can make has a size in the range.",
			Do: "Ask for a size that fits: whole GiB from 1 to 1023, and no smaller than the " +
				"snapshot or image.",
		},
		{
			Reason: SourceUnsupported, Code: codes.InvalidArgument,
			Means: "Volumes are made blank, from a snapshot or from an image, not from other " +
				"volumes.",
			Do: "Take a snapshot of the other volume and restore it.",
		},
		{
			Reason: SourceIncompatible, Code: codes.InvalidArgument,
			Means: "The snapshot belongs to another project, or its block size differs from the " +
				"StorageClass's.",
			Do: "Use a snapshot of this project; leave `blockSize` out of the StorageClass when " +
				"restoring.",
		},
		{
			Reason: TopologyInvalid, Code: codes.InvalidArgument,
			Means: "The accessibility requirements break CSI's rules, or the plugin has no " +
				"topology and the request has one, or a volume with `placement: instance` is " +
				"requested without exactly one instance.",
			Do: "Set the same topology on every controller and node, or none. For `placement: " +
				"instance` also set `OXIDE_TOPOLOGY_INSTANCE` on all of them (`topologyInstance` of " +
				"the chart), `volumeBindingMode: WaitForFirstConsumer` in a new StorageClass, and the " +
				"provisioner's `--strict-topology`.",
		},
		{
			Reason: TopologyUnreachable, Code: codes.ResourceExhausted,
			Means: "This plugin's rack is in none of the requested locations.",
			Do:    "Let the scheduler choose the location, or run the workload at the rack's.",
		},
		{
			Reason: ReadOnlyUnsupported, Code: codes.InvalidArgument,
			Means: "The request asks for a read-only attachment. The rack attaches disks for " +
				"writing only.",
			Do: "Publish the volume read-only to the pod instead (`readOnly: true` in the pod).",
		},
		{
			Reason: StartingTokenInvalid, Code: codes.Aborted,
			Means: "The listing cannot be continued from this token.",
			Do:    "Begin the listing again.",
		},
		{
			Reason: NotSupported, Code: codes.Unimplemented,
			Means: "Oxide has no such thing; the message says what to do instead.",
			Do:    "Follow the message.",
		},
		{
			Reason: MkfsOptions, Code: codes.InvalidArgument,
			Means: "`mkfsOptions` has an option that the driver does not allow for this " +
				"filesystem, or options with which mkfs cannot make it in the volume's size.",
			Do: "Correct `mkfsOptions` of the StorageClass; the message says what is allowed.",
		},
		{
			Reason: MountFlags, Code: codes.FailedPrecondition,
			Also: "; from the controller, `INVALID_ARGUMENT`",
			Means: "A mount flag is none that the driver allows for the filesystem, or has a value that " +
				"is not allowed (`commit=0`, `ro=1`), or contradicts another flag; or the kernel refuses it " +
				"(its log says why). The message does not show the flags, because a flag may contain a secret.",
			Do: "Correct or remove the flag in `mountOptions`; the message counts the flags from 1, and " +
				"docs/configuration.md lists what is allowed. A volume keeps the flags of the StorageClass " +
				"that it was made with: edit the PersistentVolume of an existing volume, and the " +
				"StorageClass for new ones.",
		},
		{
			Reason: PathInvalid, Code: codes.InvalidArgument,
			Means: "A path of the request is not absolute, or is a file instead of a directory, " +
				"or a directory instead of a file.",
			Do: "Check what is at the path on the node.",
		},
		{
			Reason: DiskNameMissing, Code: codes.InvalidArgument,
			Means: "Neither publish_context nor volume_context names the disk.",
			Do: "Give a static volume that no controller publishes the volume attribute " +
				"`diskName`.",
		},
	},
}
