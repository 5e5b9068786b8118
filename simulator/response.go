package simulator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// response is the response to the caller. A zero status means that the connection is cut.
type response struct {
	status      int
	header      http.Header
	contentType string
	body        []byte
}

// errorBody has its fields in the rack's order. A refusal without a code has no such field (A01).
type errorBody struct {
	RequestID string `json:"request_id"`
	ErrorCode string `json:"error_code,omitempty"`
	Message   string `json:"message"`
}

func newResponse(requestID string, status int, body any, err error) response {
	if err != nil {
		refused := engine.AsError(err)
		return response{refused.Status, refused.Header, jsonType,
			encode(errorBody{requestID, refused.Code, refused.Message}, "  ")}
	}
	if body == nil {
		return response{status: status}
	}
	return response{status, nil, jsonType, encode(body, "")}
}

const jsonType = "application/json"

// encode encodes JSON as the rack does: without the escapes for HTML, and errors over several
// lines (A01).
func encode(body any, indent string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(body); err != nil {
		panic(err) // this package's types always encode
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

func (s *Server) write(w http.ResponseWriter, r *apiRequest, a response) {
	if a.status == 0 {
		panic(http.ErrAbortHandler)
	}
	for name, values := range a.header {
		w.Header()[name] = values
	}
	w.Header().Set("X-Request-Id", r.id)
	if a.contentType != "" {
		w.Header().Set("Content-Type", a.contentType)
	}
	if a.status != http.StatusNoContent {
		w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	w.WriteHeader(a.status)
	if !s.writeFaulty(w, r, a.body) {
		// The caller may be gone, but the effect stays.
		if _, err := w.Write(a.body); err != nil {
			s.log.Debug("the caller is gone", slog.String("request_id", r.id))
		}
	}
}

var (
	errUnauthorized = &engine.Error{Status: http.StatusUnauthorized, Code: "Unauthorized",
		Message: "credentials missing or invalid"}
	errNoRoute = &engine.Error{Status: http.StatusNotFound, Message: "Not Found"}
)

// badRequest returns an error of the rack's HTTP layer, which has no code (A01).
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
