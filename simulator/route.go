package simulator

import (
	_ "embed"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// operation is an operation of the rack: its route, its parameters and its handler.
type operation struct {
	name, method string
	path         []string
	// noAuth needs no token (A11).
	noAuth bool
	// list means that it accepts limit, page_token and sort_by. required are the other parameters
	// that the first page must have.
	list     bool
	required []string
	// selectors are the parameters of the query that name objects; nil means project and instance.
	selectors []string
	// body parses the request's body; nil means that there is no body.
	body func(*fields) any
	// maxBody is the limit for the body; 0 means the rack's default (A12).
	maxBody int
	// serve carries out the operation. It is nil if the rack has the operation and this simulator
	// lacks it.
	serve func(*engine.Simulation, *apiRequest) (status int, body any, err error)
}

//go:embed operations.txt
var operationsText string

// routes are all operations of the rack, by method and path.
var routes = parseOperations(operationsText)

func parseOperations(text string) []*operation {
	var all []*operation
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) != 3 || words[0] == "#" {
			continue
		}
		op := &operation{}
		if known, ok := served[words[0]]; ok {
			op = known
		}
		if op.selectors == nil {
			op.selectors = []string{"project", "instance"}
		}
		op.name, op.method = words[0], words[1]
		op.path = strings.Split(words[2], "/")[1:]
		all = append(all, op)
	}
	return all
}

// route finds a request's operation and the parameters in its path. For another method of an
// existing path it returns 405 with Allow, and for an unknown path the rack's 404 (A01).
func route(method, escapedPath string) (*operation, url.Values, error) {
	segments, err := parsePath(escapedPath)
	if err != nil {
		return nil, nil, err
	}
	var allowed []string
	for _, op := range routes {
		params, ok := match(op.path, segments)
		switch {
		case !ok:
		case op.method == method:
			return op, params, nil
		default:
			allowed = append(allowed, op.method)
		}
	}
	if len(allowed) == 0 {
		return nil, nil, errNoRoute
	}
	slices.Sort(allowed)
	return nil, nil, &engine.Error{Status: http.StatusMethodNotAllowed, Message: "Method Not Allowed",
		Header: http.Header{"Allow": {strings.Join(slices.Compact(allowed), ", ")}}}
}

// parsePath splits a path into segments and ignores empty ones (A61).
func parsePath(escaped string) ([]string, error) {
	var segments []string
	for segment := range strings.SplitSeq(escaped, "/") {
		text, err := url.PathUnescape(segment)
		switch {
		case segment == "":
			continue
		case segment == ".", segment == "..", err != nil, !utf8.ValidString(text):
			return nil, badRequest("invalid path encoding")
		}
		segments = append(segments, text)
	}
	return segments, nil
}

func match(path, segments []string) (url.Values, bool) {
	if len(path) != len(segments) {
		return nil, false
	}
	params := url.Values{}
	for i, want := range path {
		switch {
		case strings.HasPrefix(want, "{"):
			params.Set(strings.Trim(want, "{}"), segments[i])
		case want != segments[i]:
			return nil, false
		}
	}
	return params, true
}

// unimplemented is an error that no rack returns: the simulator lacks the operation.
func unimplemented(op *operation) error {
	return &engine.Error{Status: http.StatusNotImplemented,
		Message: fmt.Sprintf("the simulator does not have %s (%s /%s), which the rack has",
			op.name, op.method, strings.Join(op.path, "/"))}
}
