package csierr

import (
	_ "embed"
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
)

// Reason is the first word of every error that a CO sees. Dashboards and documentation refer to it;
// the sentence after it is for people.
type Reason string

// Explanation contains the gRPC code of a reason, and advice. docs/reasons.md has both, and the
// meaning of the reason.
type Explanation struct {
	Reason Reason
	Code   codes.Code
	Do     string // advice in Markdown; "Nothing; …" if repeating the call suffices
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

// Reasons returns every reason, in alphabetical order.
func Reasons() []Reason { return slices.Sorted(maps.Keys(explanations)) }

// ParseMessage parses a message of the driver, "Reason: sentence", as it appears elsewhere:
// Kubernetes puts a prefix before it ("rpc error: code = Aborted desc = "). It returns false for a
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
	BtrfsTwin            Reason = "BtrfsTwin"
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

//go:embed reasons.txt
var reasons string

// table has every reason, in the order of docs/reasons.md: a line of the file has the reason, the
// code, and what to do.
var table = func() (all []Explanation) {
	known := map[string]codes.Code{}
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		known[code.String()] = code
	}
	for line := range strings.Lines(reasons) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		code, ok := known[words[1]]
		if !ok {
			panic("reasons.txt: " + line)
		}
		all = append(all, Explanation{Reason(words[0]), code, words[2]})
	}
	return all
}()
