package csierr

import (
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// codeOf is the gRPC code of each reason. In some calls CSI requires another code: see Coded.
var codeOf = map[Reason]codes.Code{
	VolumeIDMissing:       codes.InvalidArgument,
	FieldMissing:          codes.InvalidArgument,
	FieldInvalid:          codes.InvalidArgument,
	CapabilityInvalid:     codes.InvalidArgument,
	CapabilityUnsupported: codes.InvalidArgument,
	ParameterInvalid:      codes.InvalidArgument,
	CapacityInvalid:       codes.InvalidArgument,
	CapacityOutOfRange:    codes.OutOfRange,
	SourceUnsupported:     codes.InvalidArgument,
	SourceIncompatible:    codes.InvalidArgument,
	TopologyInvalid:       codes.InvalidArgument,
	TopologyUnreachable:   codes.ResourceExhausted,
	ReadOnlyUnsupported:   codes.InvalidArgument,
	StartingTokenInvalid:  codes.Aborted,
	NotSupported:          codes.Unimplemented,
	OperationPending:      codes.Aborted,
	VolumeNotFound:        codes.NotFound,
	VolumeExists:          codes.AlreadyExists,
	InstanceNotFound:      codes.NotFound,
	InstanceFull:          codes.ResourceExhausted,
	InstanceMustBeStopped: codes.FailedPrecondition,
	InstanceState:         codes.FailedPrecondition,
	DiskAttached:          codes.FailedPrecondition,
	DiskAttachedElsewhere: codes.FailedPrecondition,
	DiskBusy:              codes.Aborted,
	DiskFaulted:           codes.FailedPrecondition,
	OtherProject:          codes.InvalidArgument,
	SerialTaken:           codes.FailedPrecondition,
	UseDiffers:            codes.FailedPrecondition,
	UseUnknown:            codes.FailedPrecondition,
	BootDisk:              codes.FailedPrecondition,
	DiskNotOurs:           codes.FailedPrecondition,
	SnapshotNotFound:      codes.NotFound,
	SnapshotNotReady:      codes.FailedPrecondition,
	SnapshotExists:        codes.AlreadyExists,
	SnapshotFaulted:       codes.FailedPrecondition,
	SnapshotImpossible:    codes.FailedPrecondition,
	ImageNotFound:         codes.InvalidArgument,
	TokenRejected:         codes.Unauthenticated,
	TokenFileUnreadable:   codes.FailedPrecondition,
	RoleMissing:           codes.PermissionDenied,
	ProjectNotFound:       codes.FailedPrecondition,
	ObjectNotFound:        codes.NotFound,
	NameTaken:             codes.AlreadyExists,
	ValueRefused:          codes.OutOfRange,
	Conflict:              codes.FailedPrecondition,
	RackFull:              codes.ResourceExhausted,
	RackUnavailable:       codes.Unavailable,
	EffectUnknown:         codes.Unavailable,
	RackUnknown:           codes.Internal,
	RackError:             codes.Internal,
	RackResponseInvalid:   codes.Internal,
	DeadlineExceeded:      codes.DeadlineExceeded,
	Canceled:              codes.Canceled,
	ToolsMissing:          codes.FailedPrecondition,
	Internal:              codes.Internal,
	DeviceNotFound:        codes.NotFound,
	DeviceNotUnique:       codes.FailedPrecondition,
	DeviceChanged:         codes.FailedPrecondition,
	DeviceWrongSize:       codes.FailedPrecondition,
	DeviceDiffers:         codes.FailedPrecondition,
	DeviceHeld:            codes.FailedPrecondition,
	DeviceReadOnly:        codes.FailedPrecondition,
	DeviceUnreadable:      codes.FailedPrecondition,
	DiskNameMissing:       codes.InvalidArgument,
	DiskNotBlank:          codes.FailedPrecondition,
	DiskSizeUnknown:       codes.FailedPrecondition,
	WrongFilesystem:       codes.FailedPrecondition,
	DeviceLocked:          codes.Aborted,
	DiskProofPending:      codes.Aborted,
	FilesystemDamaged:     codes.Internal,
	FilesystemFeature:     codes.FailedPrecondition,
	FilesystemTooLarge:    codes.FailedPrecondition,
	FilesystemNotGrown:    codes.FailedPrecondition,
	FilesystemFailed:      codes.FailedPrecondition,
	MkfsOptions:           codes.InvalidArgument,
	MountFlags:            codes.FailedPrecondition,
	StagedDifferently:     codes.AlreadyExists,
	NotStaged:             codes.FailedPrecondition,
	PublishedDifferently:  codes.AlreadyExists,
	PublishedElsewhere:    codes.FailedPrecondition,
	StillMounted:          codes.Internal,
	TargetNotEmpty:        codes.Internal,
	PathInvalid:           codes.InvalidArgument,
	VolumeNotAtPath:       codes.NotFound,
	VolumeUnknownToNode:   codes.NotFound,
	StateNotKept:          codes.Internal,
	NodeToolFailed:        codes.Internal,
	InstanceUnknown:       codes.FailedPrecondition,
}

// Reasons returns every reason, in the order of the alphabet.
func Reasons() []Reason { return slices.Sorted(maps.Keys(codeOf)) }

// ParseMessage parses a message of the driver, "Reason: sentence", as others show it: Kubernetes
// puts words of its own before it ("rpc error: code = Aborted desc = "). It returns false for a
// text without a known reason.
func ParseMessage(text string) (reason Reason, sentence string, ok bool) {
	if _, after, found := strings.Cut(text, " desc = "); found {
		text = after
	}
	word, sentence, found := strings.Cut(text, ": ")
	reason = Reason(word)
	if _, known := codeOf[reason]; !found || !known {
		return "", "", false
	}
	return reason, sentence, true
}
