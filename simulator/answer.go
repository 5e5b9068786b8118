package simulator

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"strconv"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// answer is what goes back to the caller. The zero status says that nothing does: the connection
// is cut.
type answer struct {
	status      int
	header      http.Header
	contentType string
	body        []byte
}

// errorBody has its fields in the rack's order; a refusal without a code has no such field (A01).
type errorBody struct {
	RequestID string `json:"request_id"`
	ErrorCode string `json:"error_code,omitempty"`
	Message   string `json:"message"`
}

func newAnswer(requestID string, status int, body any, err error) answer {
	if err != nil {
		refused := engine.AsError(err)
		return answer{refused.Status, refused.Header, jsonType,
			encode(errorBody{requestID, refused.Code, refused.Message}, "  ")}
	}
	if body == nil {
		return answer{status: status}
	}
	return answer{status, nil, jsonType, encode(body, "")}
}

const jsonType = "application/json"

// encode writes JSON as the rack does: no escapes that HTML would need, errors over several
// lines (A01).
func encode(body any, indent string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(body); err != nil {
		panic(err) // our own types always encode
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// write is the one place that answers a caller.
func (s *Server) write(w http.ResponseWriter, r *request, a answer) {
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
	if !s.misdeliver(w, r, a.body) {
		// The caller may be gone; what was done stays done.
		if _, err := w.Write(a.body); err != nil {
			s.log.Debug("the caller is gone", slog.String("request_id", r.id))
		}
	}
}
