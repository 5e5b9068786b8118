// Package csierr defines the driver's errors. Every error that a caller of the CSI services gets is
// an Error: a Reason and a sentence. One table contains each reason's gRPC code and the advice that
// the command doctor prints. docs/reasons.md repeats the table.
package csierr

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is an error with a reason.
type Error struct {
	Reason Reason
	code   codes.Code
	err    error
}

// New returns an Error with the reason's code. The format may contain %w.
func New(reason Reason, format string, args ...any) error {
	return &Error{Reason: reason, code: explanations[reason].Code, err: fmt.Errorf(format, args...)}
}

// Coded returns an Error with this code, which CSI demands for the call, and not the reason's code.
func Coded(code codes.Code, reason Reason, format string, args ...any) error {
	return &Error{Reason: reason, code: code, err: fmt.Errorf(format, args...)}
}

// Error returns the sentence without the reason, so that other errors can wrap it.
func (e *Error) Error() string { return e.err.Error() }

// Unwrap returns the wrapped error, which has the same sentence.
func (e *Error) Unwrap() error { return e.err }

// WithText returns an Error with the same reason and code, but with this sentence.
func (e *Error) WithText(text string) *Error {
	return &Error{Reason: e.Reason, code: e.code, err: errors.New(text)}
}

// Message returns the text for the caller, "Reason: sentence" on one line. For a damaged filesystem
// it adds the advice to repair a copy.
func (e *Error) Message() string {
	text := string(e.Reason) + ": " + Plain(e.Error())
	if e.Reason == FilesystemDamaged && !strings.Contains(text, repairAdvice) {
		text += "; " + repairAdvice
	}
	return text
}

const repairAdvice = "take a snapshot, and repair a copy of the disk first: " +
	"docs/howto/repair-a-filesystem.md"

// GRPCStatus returns the status for gRPC, without details, because CSI forbids them.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.code, e.Message()) }

// Convert converts an error to an Error, and nil to nil. If err wraps an Error, the result keeps
// the text of err. An error of a context or of gRPC gets the reason DeadlineExceeded, Canceled or
// NotSupported if one of them fits. Any other error gets the reason that the caller passes.
func Convert(err error, otherwise Reason) error {
	if err == nil {
		return nil
	}
	return From(err, otherwise)
}

// From is like Convert, for an error that is not nil.
func From(err error, otherwise Reason) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		if e == err { //nolint:errorlint // a wrapped Error has more text
			return e
		}
		return &Error{Reason: e.Reason, code: e.code, err: err}
	case errors.Is(err, context.DeadlineExceeded):
		otherwise = DeadlineExceeded
	case errors.Is(err, context.Canceled):
		otherwise = Canceled
	}
	return fromStatus(err, otherwise)
}

func fromStatus(err error, otherwise Reason) *Error {
	s, ok := status.FromError(err)
	if !ok || s.Code() == codes.Unknown || s.Code() == codes.OK {
		return &Error{Reason: otherwise, code: explanations[otherwise].Code, err: err}
	}
	switch s.Code() {
	case codes.DeadlineExceeded:
		otherwise = DeadlineExceeded
	case codes.Canceled:
		otherwise = Canceled
	case codes.Unimplemented:
		otherwise = NotSupported
	}
	return &Error{Reason: otherwise, code: s.Code(), err: errors.New(s.Message())}
}

// ReasonOf returns the reason of an error, or "" if it has none.
func ReasonOf(err error) Reason {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Reason
	}
	return ""
}

// Has reports whether an error has the reason.
func Has(err error, reason Reason) bool { return err != nil && ReasonOf(err) == reason }

// Message returns an error's text as a caller gets it, or "" for nil.
func Message(err error) string {
	if err == nil {
		return ""
	}
	return From(err, Internal).Message()
}

// IsNotFound reports whether the error's code is NOT_FOUND.
func IsNotFound(err error) bool { return status.Code(err) == codes.NotFound }

// IsAlreadyExists reports whether the error's code is ALREADY_EXISTS.
func IsAlreadyExists(err error) bool { return status.Code(err) == codes.AlreadyExists }

var retryable = []codes.Code{
	codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted,
}

// Retryable reports whether a CO repeats the call after the error. Other errors are final.
func Retryable(err error) bool { return slices.Contains(retryable, status.Code(err)) }

// rackToken matches a token of the rack in a program's quoted output, where an unescaped quote ends
// the token. rackTokenAsSent matches a token in any other text. A token may contain any visible
// ASCII character.
var (
	rackToken       = regexp.MustCompile(`oxide-token-(\\+[!-~]|[!#-\[\]-~])*`)
	rackTokenAsSent = regexp.MustCompile(`oxide-token-[!-~]*`)
)

// Plain converts untrusted text, such as a response from the rack's address, to one line of valid
// UTF-8 of at most about 1000 bytes. It removes tokens, and characters that change the order in
// which text is displayed.
func Plain(text string) string {
	const most = 1000
	// Cut first. If that cuts a token, the expression still matches the beginning of the token.
	text = text[:min(len(text), 2*most)]
	text = rackTokenAsSent.ReplaceAllString(strings.ToValidUTF8(text, "�"), "***")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return strings.TrimSpace(text)
}

// WithoutTokens replaces tokens of the rack with ***.
func WithoutTokens(text string) string { return rackToken.ReplaceAllString(text, "***") }

// WithoutPath removes the path from the error of a system call: a caller must not see the paths
// that an operator has configured.
func WithoutPath(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// OutputTail returns the end of a program's output as one quoted line.
func OutputTail(output string) string {
	const most = 300
	words := strings.Join(strings.Fields(output), " ")
	if words == "" {
		return "no output"
	}
	if len(words) > most {
		words = "…" + strings.ToValidUTF8(words[len(words)-most:], "")
	}
	return fmt.Sprintf("%q", words)
}

// Reason is the first word of every error that a CO gets. Dashboards and documentation refer to it.
type Reason string

// Explanation contains a reason's gRPC code and advice.
type Explanation struct {
	Reason Reason
	Code   codes.Code
	Do     string // advice in Markdown; "Nothing; …" if a repeated call suffices
}

var explanations = func() map[Reason]Explanation {
	all := map[Reason]Explanation{}
	for _, e := range table {
		all[e.Reason] = e
	}
	return all
}()

// Explain returns the explanation of a reason, and false for an unknown reason.
func Explain(reason Reason) (e Explanation, known bool) {
	e, known = explanations[reason]
	return e, known
}

// Reasons returns all reasons in alphabetical order.
func Reasons() []Reason { return slices.Sorted(maps.Keys(explanations)) }

// ParseMessage parses an error message of the driver, "Reason: sentence". It skips a prefix from
// Kubernetes, such as "rpc error: code = Aborted desc = ". ok is false if the text has no known
// reason.
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

// Reasons of errors from the rack, or from the connection to it.
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

// Reasons of errors on a node.
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

// table contains all reasons in the order of docs/reasons.md. A line of reasons.txt has a reason,
// its code, and advice.
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
