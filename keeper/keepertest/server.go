// Package keepertest is an API server for the tests of the node keeper: it answers over HTTP, in
// the test's process, as much of Kubernetes as the keeper and its actors ask. It has no scheduler,
// no kubelet and no controller; the test is all of them.
//
// It differs from an API server in this: objects are hardly validated; unknown fields are refused;
// metadata.generation does not rise; a write to a status changes nothing but the status; the events
// of core/v1 and of events.k8s.io/v1 are separate; lists have one page; an update may leave out the
// resourceVersion of any object. What it does not know it answers with 501, and the test fails.
package keepertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// T is a test: a *testing.T or a *rapid.T.
type T interface {
	Errorf(format string, args ...any)
	Cleanup(func())
}

// Server is the API server. Its Go API (Put, Get, Edit, Delete, Remove, List) passes no interceptor
// and leaves nothing in the log.
type Server struct {
	t      T
	store  store
	http   *httptest.Server
	closed chan struct{}
	mu     sync.Mutex
	// guarded by mu
	log       []Request
	intercept func(Request) error
	cuts      []func()
}

// Request is a request to the server, in the words of RBAC.
type Request struct {
	Client      string // its User-Agent
	Verb        string // get, list, watch, create, update, patch, delete
	Group       string
	Resource    string // plural
	Subresource string // status, eviction, or none
	Namespace   string
	Name        string // as in the path, or in the body of a create
	Body        []byte
	// Applied is false if the interceptor is called before the request is applied.
	Applied bool
	// Status is the status of the response, or 0 if there is none (yet). A watch has 0.
	Status int
}

// String describes the request in one line.
func (r Request) String() string {
	resource := strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
	name := strings.Trim(r.Namespace+"/"+r.Name, "/")
	return fmt.Sprintf("%s: %s %s %s", r.Client, r.Verb, resource, name)
}

// ErrBreak is what an interceptor returns to break the connection.
var ErrBreak = errors.New("the connection is broken")

// Serve starts a server that runs until the test ends.
func Serve(t T, now func() time.Time) *Server {
	s := &Server{t: t, closed: make(chan struct{}), store: store{now: now,
		objects: map[*resource]map[string]*stored{}, changed: make(chan struct{})}}
	s.http = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		close(s.closed)
		s.http.Close() // waits for the requests
		for _, cut := range s.cuts {
			cut()
		}
	})
	return s
}

// Intercept has f called for each request that changes something, before it is applied and again
// after that, before the response. If f returns nil, the request goes on; if ErrBreak, the client
// sees a broken connection; any other error is the response, by its apierrors.APIStatus. No lock is
// held, so that f may use the server, and send requests, for which it is called as well.
func (s *Server) Intercept(f func(Request) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.intercept = f
}

// Log returns the requests so far, in the order of their arrival.
func (s *Server) Log() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.log)
}

// Compact forgets all changes so far, so that a watch from an older version is Expired.
func (s *Server) Compact() {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	s.store.history, s.store.forgotten = nil, s.store.version
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client went away
	}
	c := parse(r, body)
	s.mu.Lock()
	entry := len(s.log)
	s.log = append(s.log, c.Request)
	s.mu.Unlock()
	var answer []byte
	if c.unknown == "" && c.Verb == "watch" {
		if err = s.watch(w, r, c); err == nil {
			return
		}
	} else {
		answer, err = s.answer(c)
	}
	if errors.Is(err, ErrBreak) {
		panic(http.ErrAbortHandler)
	}
	code := http.StatusOK
	if err == nil && c.Verb == "create" {
		code = http.StatusCreated
	}
	if err != nil {
		status := statusOf(err)
		code = int(status.Code)
		if answer, err = json.Marshal(status); err != nil {
			panic(err)
		}
	}
	s.mu.Lock()
	s.log[entry].Status = code
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(answer)
}

// answer answers any request but a watch.
func (s *Server) answer(c call) ([]byte, error) {
	if c.unknown != "" {
		return nil, s.notImplemented(c, c.unknown)
	}
	switch c.Verb {
	case "get":
		return s.get(c)
	case "list":
		return s.list(c)
	}
	if err := s.ask(c.Request); err != nil {
		return nil, err
	}
	answer, err := s.apply(c)
	c.Applied, c.Status = true, http.StatusOK
	if err != nil {
		c.Status = int(statusOf(err).Code)
	}
	if broken := s.ask(c.Request); broken != nil {
		return nil, broken
	}
	return answer, err
}

// ask calls the interceptor.
func (s *Server) ask(r Request) error {
	s.mu.Lock()
	intercept := s.intercept
	s.mu.Unlock()
	if intercept == nil {
		return nil
	}
	return intercept(r)
}

// notImplemented fails the test.
func (s *Server) notImplemented(c call, what string) error {
	message := fmt.Sprintf("the server of package keepertest does not know %s (%s)", what, c.Request)
	s.t.Errorf("%s", message)
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure,
		Code: http.StatusNotImplemented, Reason: "NotImplemented", Message: message}}
}

func statusOf(err error) metav1.Status {
	var known apierrors.APIStatus
	if !errors.As(err, &known) {
		known = apierrors.NewInternalError(err)
	}
	status := known.Status()
	status.Kind, status.APIVersion = "Status", "v1"
	return status
}
