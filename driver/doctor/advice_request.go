package doctor

import "github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"

// requestAdvices is what follows from errors in the request.
var requestAdvices = map[csierr.Reason]advice{
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
		Do: "Set the same topology on every controller and node, or none. For placement: instance " +
			"also set OXIDE_TOPOLOGY_INSTANCE on all of them (topologyInstance of the chart), and " +
			"volumeBindingMode: WaitForFirstConsumer in a new StorageClass.",
		Next: "kubectl get csinodes -o yaml",
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
}
