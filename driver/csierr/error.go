// Package csierr is the one error language of the driver. Every error that a caller of the CSI
// services sees is an Error: a Reason, which a person can look up in driver/REASONS.md, and a
// sentence. One table gives each reason its gRPC code, so code below the RPCs needs no gRPC.
//
// To read: reasons.go (what there is), codes.go (their codes), error.go (how errors are made,
// wrapped, recognized and shown).
package csierr

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is an error with the reason a person can look up.
type Error struct {
	Reason Reason
	code   codes.Code
	err    error
}

// New returns an Error with the reason's code. The format may hold %w.
func New(reason Reason, format string, args ...any) error {
	return &Error{Reason: reason, code: codeOf[reason], err: fmt.Errorf(format, args...)}
}

// Coded returns an Error with another code than its reason's, for the calls in which CSI asks for
// it.
func Coded(code codes.Code, reason Reason, format string, args ...any) error {
	return &Error{Reason: reason, code: code, err: fmt.Errorf(format, args...)}
}

// Error returns the sentence without the reason, so that errors can be wrapped.
func (e *Error) Error() string { return e.err.Error() }

// Unwrap returns the error with the sentence, and what it wraps.
func (e *Error) Unwrap() error { return e.err }

// WithText returns the error with another sentence.
func (e *Error) WithText(text string) *Error {
	return &Error{Reason: e.Reason, code: e.code, err: errors.New(text)}
}

// Message returns what the caller sees, "Reason: sentence" on one line.
func (e *Error) Message() string { return string(e.Reason) + ": " + Plain(e.Error()) }

// GRPCStatus returns the status that gRPC sends, without details: CSI wants them empty.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.code, e.Message()) }

// Convert makes any error an Error; nil stays nil. The text of an error that wraps an Error is kept
// as a whole. The end of a context has a reason of its own, and an error without a reason gets the
// given one.
func Convert(err error, otherwise Reason) error {
	if err == nil {
		return nil
	}
	return From(err, otherwise)
}

// From is Convert for an error that is not nil.
func From(err error, otherwise Reason) *Error {
	var e *Error
	switch {
	case errors.As(err, &e):
		if e == err { //nolint:errorlint // a wrapped one has more text
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

// fromStatus keeps the code of an error that gRPC itself has made.
func fromStatus(err error, otherwise Reason) *Error {
	s, ok := status.FromError(err)
	if !ok || s.Code() == codes.Unknown || s.Code() == codes.OK {
		return &Error{Reason: otherwise, code: codeOf[otherwise], err: err}
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

// ReasonOf returns the reason of an error, or "".
func ReasonOf(err error) Reason {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Reason
	}
	return ""
}

// Has reports whether an error has the reason.
func Has(err error, reason Reason) bool { return err != nil && ReasonOf(err) == reason }

// Message returns what the caller would see of an error, or "" for nil.
func Message(err error) string {
	if err == nil {
		return ""
	}
	return From(err, Internal).Message()
}

// IsNotFound reports whether an error says that an object does not exist.
func IsNotFound(err error) bool { return status.Code(err) == codes.NotFound }

// IsAlreadyExists reports whether an error says that a name is taken.
func IsAlreadyExists(err error) bool { return status.Code(err) == codes.AlreadyExists }

// retryable are the codes after which a CO makes the same call again. It takes any other for the
// end.
var retryable = []codes.Code{
	codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.Aborted,
}

// Retryable reports whether a CO makes the same call again after the error.
func Retryable(err error) bool { return slices.Contains(retryable, status.Code(err)) }
