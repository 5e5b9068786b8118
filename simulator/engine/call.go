package engine

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Call has the parts of one request that the rules need.
type Call struct {
	// Context ends when the caller has the response or has given up. Its end does not stop the call
	// (A18).
	Context context.Context
	// ReadOnly marks a call that changes nothing.
	ReadOnly bool
	// Unwind makes the call fail halfway and undo its changes. Reread makes it fail after it has
	// taken effect.
	Unwind, Reread bool
	// Resumed marks a call of an earlier simulator that a restart completes (A19).
	Resumed bool
	// Device is the fault of the devices that the call attaches; nil means no fault.
	Device *adminapi.DeviceFault
	// Cascade permits a deletion together with the objects that depend on it.
	Cascade bool
	// Object is set to the object of the call.
	Object store.Identity
}

// Ref names an object in the form of a request: by ID, or by name in a project.
type Ref struct{ Project, Object store.Selector }

// Window is the requested part of a list: up to Limit items after the name or ID After, in the
// order SortBy.
type Window struct {
	SortBy string
	After  *string
	Limit  int
}

// deviceFault returns the fault of the devices that the call attaches, with the delay of the
// switches.
func (c *Call) deviceFault(delay adminapi.Duration) dataplane.Fault {
	if d := c.Device; d != nil {
		return dataplane.Fault{Never: d.Never, Delay: time.Duration(max(delay, d.Delay)),
			SizeBytes: int64(d.SizeBytes), Fails: d.Fails}
	}
	return dataplane.Fault{Delay: time.Duration(delay)}
}

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
	// ErrForbidden is the error for a caller who may see the object and not change it.
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
