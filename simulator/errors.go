package simulator

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

var (
	errUnauthorized = &engine.Error{Status: http.StatusUnauthorized, Code: "Unauthorized",
		Message: "credentials missing or invalid"}
	errNoRoute = &engine.Error{Status: http.StatusNotFound, Message: "Not Found"}
)

// badRequest is an error of the rack's HTTP layer, before any rule is checked. It has no code
// (A01).
func badRequest(format string, args ...any) error {
	return &engine.Error{Status: http.StatusBadRequest, Message: fmt.Sprintf(format, args...)}
}

func badBody(format string, args ...any) error {
	return badRequest("unable to parse JSON body: "+format, args...)
}

func badQuery(format string, args ...any) error {
	return badRequest("unable to parse query string: "+format, args...)
}

func badPath(problem string) error { return badRequest("bad parameter in URL path: %s", problem) }

// unknownVariant returns the error for a word that is not allowed.
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
