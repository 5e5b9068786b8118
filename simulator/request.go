package simulator

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/console"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const (
	// apiVersion is the newest version of the API that this simulator serves: that of release v22.
	apiVersion = "2026073100.0.0"
	// oldestVersion is the oldest version that this simulator serves: that of release v20. Objects
	// have the same form in all versions from oldestVersion to apiVersion.
	oldestVersion = "2026060800.0.0"
	// maxBody limits the body of a request (A12), and maxBulkWrite the body of a bulk write (A90).
	maxBody      = 1 << 20
	maxBulkWrite = 8 << 20
	// smallBody is the limit of a small body. Only a few larger bodies are read at the same time.
	smallBody = 64 << 10
)

type apiRequest struct {
	*http.Request
	id      string
	started time.Time
	op      *operation
	path    url.Values // the parameters in the path
	unfound error      // the error for the API version or, if nil, for the route
	query   url.Values
	scan    scan
	raw     []byte // the body
	rawErr  error  // the error of reading the body
	faults  []adminapi.ActiveFault
	entry   adminapi.Request
	call    engine.Call
	err     error // internal errors, which are only logged
	// subjects are the names and IDs of the request's objects. Fault.Object is compared with them.
	subjects []string
}

func newRequest(hr *http.Request) *apiRequest {
	id := uuid.NewString()
	r := &apiRequest{Request: hr, id: id, started: time.Now(),
		call:  engine.Call{Context: hr.Context(), ReadOnly: hr.Method == http.MethodGet},
		entry: adminapi.Request{RequestID: id, Method: hr.Method, Caller: clip(hr.UserAgent())}}
	r.find()
	return r
}

// find looks up the request's operation and parses its URL. The rack checks the API version before
// the path (A13).
func (r *apiRequest) find() {
	var err error
	r.query, r.entry.Path = r.URL.Query(), clip(r.URL.RequestURI())
	r.op, r.path, err = route(r.Method, r.URL.EscapedPath())
	r.unfound = cmp.Or(checkVersion(r.Header.Get("Api-Version")), err)
	if r.op != nil {
		r.entry.Operation = r.op.name
	}
}

// checkVersion treats a missing version as the newest (A13). It answers 501 to versions before
// oldestVersion, because a real rack serves them with other forms of objects.
func checkVersion(version string) error {
	if version == "" {
		return nil
	}
	want, err := parseVersion(version)
	if err != nil {
		return badRequest("bad value for header \"api-version\": %s: %s", err, version)
	}
	newest, _ := parseVersion(apiVersion)
	oldest, _ := parseVersion(oldestVersion)
	switch {
	case slices.Compare(want, newest) > 0:
		return badRequest("server does not support this API version: %s", version)
	case slices.Compare(want, oldest) < 0:
		return &engine.Error{Status: http.StatusNotImplemented, Message: fmt.Sprintf(
			"the simulator serves the API versions from %s to %s; a rack answers %s in its older "+
				"shape. Send api-version %s, or none", oldestVersion, apiVersion, version, apiVersion)}
	}
	return nil
}

func parseVersion(s string) ([]uint64, error) {
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return nil, errors.New("not a semantic version")
	}
	numbers := make([]uint64, len(parts))
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("not a semantic version: %q is not a number", part)
		}
		numbers[i] = n
	}
	return numbers, nil
}

func (r *apiRequest) parse() error {
	if r.unfound != nil {
		return r.unfound
	}
	r.identify(r.raw)
	if r.op.serve == nil {
		return nil // this simulator does not know the parameters of the operation
	}
	r.call.Kind, r.call.Named = r.op.kind, map[string]store.Selector{}
	for name := range r.path {
		sel, problem := store.ParseSelector(r.path.Get(name))
		if problem != "" {
			return badPath(problem)
		}
		r.call.Named[name] = sel
	}
	if err := r.parseQuery(); err != nil {
		return err
	}
	if r.op.body == nil {
		return nil
	}
	if r.rawErr != nil {
		return r.rawErr
	}
	if err := r.checkBody(); err != nil {
		return err
	}
	f, err := parseFields(r.raw)
	if err != nil {
		return err
	}
	r.call.Body = r.op.body(f)
	return *f.err
}

func (r *apiRequest) parseQuery() error {
	if err := r.readRepeated(); err != nil {
		return err
	}
	if r.op.list {
		var err error
		if r.scan, err = parseScan(r.query, r.op.selectors); err != nil {
			return err
		}
		if r.query.Has("page_token") {
			r.query = r.scan.selectors()
		}
	}
	r.call.Window, r.call.Cascade = r.scan.Window, r.query.Get("cascade") == "true"
	for _, name := range r.op.required {
		if !r.query.Has(name) {
			return badQuery("%s", missingField(name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.query)) {
		sel, problem := store.ParseSelector(r.query.Get(name))
		if problem != "" && slices.Contains(r.op.selectors, name) {
			return badQuery("%s", problem)
		}
		if _, inPath := r.path[name]; !inPath {
			r.call.Named[name] = sel
		}
	}
	return nil
}

// readRepeated handles query parameters that occur twice. A list uses the last value, but refuses a
// second limit. Other operations refuse a repetition of a parameter that they know (A62).
func (r *apiRequest) readRepeated() error {
	once := r.op.selectors
	if r.op.list {
		once = []string{"limit"}
	}
	for _, name := range once {
		if len(r.query[name]) > 1 {
			return badQuery("%s", duplicateField(name))
		}
	}
	for name, values := range r.query {
		r.query[name] = values[len(values)-1:]
	}
	return nil
}

// readBody reads the body within s.bodyTime. Only a few large bodies are read at the same time, so
// that clients without a token cannot fill the memory.
func (s *Server) readBody(w http.ResponseWriter, r *apiRequest) ([]byte, error) {
	if r.op == nil || r.op.body == nil {
		if r.ContentLength != 0 {
			// net/http reads the body to discard it. Limit the time for that, too.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(s.bodyTime))
		}
		return nil, nil
	}
	limit := cmp.Or(r.op.maxBody, maxBody)
	body, err := console.ReadBody(w, r.Request, smallBody, s.bodyTime)
	if err == nil && len(body) > smallBody {
		select {
		case s.large <- struct{}{}:
			var rest []byte
			rest, err = console.ReadBody(w, r.Request, int64(limit-len(body)), s.bodyTime)
			body = append(body, rest...)
			<-s.large
		case <-time.After(s.bodyTime):
			return nil, &engine.Error{Status: http.StatusServiceUnavailable, Code: "ServiceNotAvailable",
				Message: "the simulator reads too many large bodies; try again"}
		}
	}
	if err != nil {
		return nil, badRequest("unable to read the body: %s", err)
	}
	return body, nil
}

func (r *apiRequest) checkBody() error {
	if limit := cmp.Or(r.op.maxBody, maxBody); len(r.raw) > limit {
		return badRequest("request body exceeded maximum size of %d bytes", limit)
	}
	if t := r.Header.Get("Content-Type"); t != "" {
		if media, _, err := mime.ParseMediaType(t); err != nil || media != "application/json" {
			return badRequest("expected content type %q, got %q", "application/json", t)
		}
	}
	return nil
}

func (r *apiRequest) identify(body []byte) {
	for _, values := range r.path {
		r.subject(values[0])
	}
	var named struct{ Name, Disk string }
	if json.Unmarshal(bytes.TrimSpace(body), &named) == nil {
		r.subject(named.Disk)
		r.subject(named.Name)
	}
}

// subject adds an object's name or ID to r.subjects. The request log shows the one added last.
func (r *apiRequest) subject(nameOrID string) {
	if nameOrID == "" {
		return
	}
	r.subjects = append(r.subjects, nameOrID)
	r.entry.Object = clip(nameOrID)
}

// bearerOf returns the token. The word Bearer may be in upper or lower case (A11).
func bearerOf(r *http.Request) string {
	scheme, bearer, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(bearer)
}

func (s *Server) authenticate(r *apiRequest) error {
	if r.op.noAuth {
		return nil
	}
	bearer := bearerOf(r.Request)
	if !strings.HasPrefix(bearer, tokenPrefix) || s.token != "" && bearer != s.token {
		return errUnauthorized
	}
	return nil
}

const tokenPrefix = "oxide-token-"

// response is the response to a caller. A status of 0 cuts the connection.
type response struct {
	status      int
	header      http.Header
	contentType string
	body        []byte
}

// errorBody has the fields of an error in the rack's order; the code is optional (A01).
type errorBody struct {
	RequestID string `json:"request_id"`
	ErrorCode string `json:"error_code,omitempty"`
	Message   string `json:"message"`
}

func (r *apiRequest) response(status int, body any, err error) response {
	if err != nil {
		var known *engine.Error
		if !errors.As(err, &known) {
			r.err = errors.Join(r.err, err)
		}
		refused := engine.AsError(err)
		return response{refused.Status, refused.Header, jsonType,
			encode(errorBody{r.id, refused.Code, refused.Message}, "  ")}
	}
	if body == nil {
		return response{status: status}
	}
	return response{status, nil, jsonType, encode(body, "")}
}

const jsonType = "application/json"

// encode encodes JSON as the rack does: without HTML escapes, and indented only for errors (A01).
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
		// If the caller has gone, the write fails, but the operation stays in effect.
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

// badRequest returns an error of the rack's HTTP layer. Such errors have no code (A01).
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

// unknownVariant returns serde's error message for a word that is not allowed.
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
