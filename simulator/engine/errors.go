package engine

import (
	"errors"
	"fmt"
	"net/http"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Error is a refusal of the rack. The caller gets its status, code and message unchanged (A01).
type Error struct {
	Status  int
	Code    string
	Message string
	// Header is added to the response's header: a 405 has an Allow.
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

// notFound is the error for an object that does not exist, by the name or ID that the caller used
// (A01).
func notFound(kind string, s store.Selector) error {
	by := "name"
	if s.ID != "" {
		by = "id"
	}
	return &Error{Status: http.StatusNotFound, Code: "ObjectNotFound",
		Message: fmt.Sprintf("not found: %s with %s %q", kind, by, s)}
}

// alreadyExists is the error for a taken name, which is a 400 instead of a 409 (A01).
func alreadyExists(kind, name string) error {
	return &Error{Status: http.StatusBadRequest, Code: "ObjectAlreadyExists",
		Message: fmt.Sprintf("already exists: %s %q", kind, name)}
}

func insufficientCapacity(text string) *Error {
	return &Error{Status: http.StatusInsufficientStorage, Code: "InsufficientCapacity",
		Message: "Insufficient capacity: " + text}
}

var (
	// ErrForbidden is the error for a caller who may see the object.
	ErrForbidden = &Error{Status: http.StatusForbidden, Code: "Forbidden",
		Message: "Forbidden"}
	errUnavailable = &Error{Status: http.StatusServiceUnavailable, Code: "ServiceNotAvailable",
		Message: "Service Unavailable"}
	errInternal = &Error{Status: http.StatusInternalServerError, Code: "Internal",
		Message: "Internal Server Error"}
	// errNoSpace means that the rack has no physical space left (A27).
	errNoSpace = insufficientCapacity("Not enough storage")
)

// AsError returns the error that the caller gets. An error that is not a refusal of the rack
// becomes a 500 without its reason (A01). A full host becomes the rack's "no space" (A27).
func AsError(err error) *Error {
	var known *Error
	var full *store.FullError
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &full):
		return insufficientCapacity(full.Error())
	case errors.Is(err, dataplane.ErrWrittenMeanwhile):
		return errUnavailable
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT),
		errors.Is(err, syscall.EFBIG):
		return errNoSpace
	}
	return errInternal
}
