package simulator

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

// apiError is a refusal as the rack words it: status, code and message go to the caller as they
// are (A01).
type apiError struct {
	Status  int
	Code    string
	Message string
	// Header is added to the answer's, for the one refusal that says more than its body: 405.
	Header http.Header
}

func (e *apiError) Error() string { return e.Message }

func invalidRequest(format string, args ...any) error {
	return &apiError{Status: http.StatusBadRequest, Code: "InvalidRequest",
		Message: fmt.Sprintf(format, args...)}
}

func invalidValue(label, format string, args ...any) error {
	return &apiError{Status: http.StatusBadRequest, Code: "InvalidValue",
		Message: fmt.Sprintf("unsupported value for %q: ", label) + fmt.Sprintf(format, args...)}
}

func conflict(format string, args ...any) error {
	return &apiError{Status: http.StatusConflict, Code: "Conflict",
		Message: fmt.Sprintf(format, args...)}
}

// notFound names the object as the caller did (A01).
func notFound(kind string, s store.Selector) error {
	by := "name"
	if s.ID != "" {
		by = "id"
	}
	return &apiError{Status: http.StatusNotFound, Code: "ObjectNotFound",
		Message: fmt.Sprintf("not found: %s with %s %q", kind, by, s)}
}

// alreadyExists is a 400, not a 409 (A01).
func alreadyExists(kind, name string) error {
	return &apiError{Status: http.StatusBadRequest, Code: "ObjectAlreadyExists",
		Message: fmt.Sprintf("already exists: %s %q", kind, name)}
}

func insufficientCapacity(text string) *apiError {
	return &apiError{Status: http.StatusInsufficientStorage, Code: "InsufficientCapacity",
		Message: "Insufficient capacity: " + text}
}

var (
	errUnauthorized = &apiError{Status: http.StatusUnauthorized, Code: "Unauthorized",
		Message: "credentials missing or invalid"}
	errForbidden = &apiError{Status: http.StatusForbidden, Code: "Forbidden",
		Message: "Forbidden"}
	errUnavailable = &apiError{Status: http.StatusServiceUnavailable, Code: "ServiceNotAvailable",
		Message: "Service Unavailable"}
	errInternal = &apiError{Status: http.StatusInternalServerError, Code: "Internal",
		Message: "Internal Server Error"}
	errNoRoute = &apiError{Status: http.StatusNotFound, Message: "Not Found"}
)

// badRequest is what the rack's HTTP layer answers before any rule of the rack is asked: it has
// no code (A01).
func badRequest(format string, args ...any) error {
	return &apiError{Status: http.StatusBadRequest, Message: fmt.Sprintf(format, args...)}
}

func badBody(format string, args ...any) error {
	return badRequest("unable to parse JSON body: "+format, args...)
}

func badQuery(format string, args ...any) error {
	return badRequest("unable to parse query string: "+format, args...)
}

func badPath(problem string) error { return badRequest("bad parameter in URL path: %s", problem) }

// unknownVariant refuses a word that is none of those allowed.
func unknownVariant(word string, allowed []string) string {
	expected := "`" + strings.Join(allowed, "`, `") + "`"
	switch len(allowed) {
	case 1:
	case 2:
		expected = strings.Replace(expected, ", ", " or ", 1)
	default:
		expected = "one of " + expected
	}
	return fmt.Sprintf("unknown variant `%s`, expected %s", word, expected)
}

func duplicateField(name string) string { return fmt.Sprintf("duplicate field `%s`", name) }

func missingField(name string) string { return fmt.Sprintf("missing field `%s`", name) }

// refusal finds what the caller is told about err. Whatever no rule of the rack explains is a 500
// that keeps its reason to itself (A01); a full host is the rack's "no space" (A27).
func refusal(err error) *apiError {
	var known *apiError
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, dataplane.ErrWritersNotHeld):
		return errUnavailable
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT),
		errors.Is(err, syscall.EFBIG):
		return insufficientCapacity("Not enough storage")
	}
	return errInternal
}
