package engine

import (
	"errors"
	"fmt"
	"net/http"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Error is a refusal in the rack's words: status, code and message go to the caller as they are
// (A01).
type Error struct {
	Status  int
	Code    string
	Message string
	// Header is added to the response's: a 405 has an Allow.
	Header http.Header
}

func (e *Error) Error() string { return e.Message }

func invalidRequest(format string, args ...any) error {
	return &Error{Status: http.StatusBadRequest, Code: "InvalidRequest",
		Message: fmt.Sprintf(format, args...)}
}

func invalidValue(label, format string, args ...any) error {
	return &Error{Status: http.StatusBadRequest, Code: "InvalidValue",
		Message: fmt.Sprintf("unsupported value for %q: ", label) + fmt.Sprintf(format, args...)}
}

func conflict(format string, args ...any) error {
	return &Error{Status: http.StatusConflict, Code: "Conflict",
		Message: fmt.Sprintf(format, args...)}
}

// notFound names the object as the caller did (A01).
func notFound(kind string, s store.Selector) error {
	by := "name"
	if s.ID != "" {
		by = "id"
	}
	return &Error{Status: http.StatusNotFound, Code: "ObjectNotFound",
		Message: fmt.Sprintf("not found: %s with %s %q", kind, by, s)}
}

// alreadyExists is a 400, not a 409 (A01).
func alreadyExists(kind, name string) error {
	return &Error{Status: http.StatusBadRequest, Code: "ObjectAlreadyExists",
		Message: fmt.Sprintf("already exists: %s %q", kind, name)}
}

func insufficientCapacity(text string) *Error {
	return &Error{Status: http.StatusInsufficientStorage, Code: "InsufficientCapacity",
		Message: "Insufficient capacity: " + text}
}

var (
	// ErrForbidden is for a caller who may see the object.
	ErrForbidden = &Error{Status: http.StatusForbidden, Code: "Forbidden",
		Message: "Forbidden"}
	errUnavailable = &Error{Status: http.StatusServiceUnavailable, Code: "ServiceNotAvailable",
		Message: "Service Unavailable"}
	errInternal = &Error{Status: http.StatusInternalServerError, Code: "Internal",
		Message: "Internal Server Error"}
	// errNoSpace is the rack's lack of physical space (A27).
	errNoSpace = insufficientCapacity("Not enough storage")
)

// AsError returns what the caller gets for an error. An error that is no rule of the rack's is a
// 500 without its reason (A01); a full host is the rack's "no space" (A27).
func AsError(err error) *Error {
	var known *Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, dataplane.ErrWritersNotHeld):
		return errUnavailable
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT),
		errors.Is(err, syscall.EFBIG):
		return errNoSpace
	}
	return errInternal
}
