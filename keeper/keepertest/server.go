// Package keepertest is an API server for the tests of the node keeper. It runs in the test's
// process and answers the requests of the keeper and of the test's other clients over HTTP. It has
// no scheduler, kubelet or controller; the test does their work.
//
// It differs from a real API server: it does not validate objects; metadata.generation does not
// rise; only the test writes a status; lists have one page; an update may omit the resourceVersion
// of any object; a watch covers all objects of a resource, and begins with all earlier changes. An
// unknown request fails the test.
package keepertest

import (
	"context"
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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// T is a *testing.T or a *rapid.T.
type T interface {
	Errorf(format string, args ...any)
	Cleanup(func())
}

// Server is the API server. The functions Put, Bind, Get, Edit, Delete, Remove and List access its
// objects directly, without an interceptor and without an entry in the log.
type Server struct {
	t      T
	now    func() time.Time
	http   *httptest.Server
	closed chan struct{}
	mu     sync.Mutex
	// guarded by mu
	log             []KubeRequest
	change, reading func(KubeRequest) error // the interceptors
	objects         map[*resource]map[string]*stored
	history         []change      // its length is the current resourceVersion
	changed         chan struct{} // the next change closes it
}

// KubeRequest is a request in the terms of RBAC.
type KubeRequest struct {
	Client      string // its User-Agent
	Verb        string // get, list, watch, create, update, patch, delete
	Resource    string // plural
	Subresource string // status, eviction, or none
	Namespace   string
	Name        string // from the path, or from the body of a create
	Body        []byte
	// Applied tells an interceptor whether the server has applied the request.
	Applied bool
	// Status is the response's status if Applied is true, and otherwise 0.
	Status int
}

func (r KubeRequest) String() string {
	resource := strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
	name := strings.Trim(r.Namespace+"/"+r.Name, "/")
	return fmt.Sprintf("%s: %s %s %s", r.Client, r.Verb, resource, name)
}

// ErrBreak makes the server break the connection if an interceptor returns it.
var ErrBreak = errors.New("the connection is broken")

// Serve starts a server whose clock is now(). The server runs until the test ends.
func Serve(t T, now func() time.Time) *Server {
	s := &Server{t: t, now: now, closed: make(chan struct{}), changed: make(chan struct{}),
		objects: map[*resource]map[string]*stored{}}
	s.http = httptest.NewServer(s.handler())
	t.Cleanup(func() {
		close(s.closed)
		s.http.Close() // waits for the requests in progress
	})
	return s
}

// Intercept sets an interceptor for requests that change something. The server calls f before it
// applies the request, and again before it responds. If f returns nil, the request continues. If f
// returns ErrBreak, the connection breaks. Any other error becomes the response, with the status of
// its apierrors.APIStatus. The server holds no lock meanwhile, so f may use the server and send
// requests, for which f is called as well.
func (s *Server) Intercept(f func(KubeRequest) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.change = f
}

// InterceptReads sets an interceptor for requests that change nothing. The server calls f before
// the response, and treats its error as [Server.Intercept] describes.
func (s *Server) InterceptReads(f func(KubeRequest) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reading = f
}

// Log returns the requests so far, in the order of their arrival.
func (s *Server) Log() []KubeRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.log)
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.t.Errorf("the server of package keepertest does not know %s %s", r.Method, r.URL)
		w.WriteHeader(http.StatusNotImplemented)
	})
	for _, to := range resources {
		for route, verb := range to.routes() {
			mux.HandleFunc(route, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, to, verb) })
		}
	}
	return mux
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, to *resource, verb string) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	if r.Header.Get("Content-Type") == runtime.ContentTypeProtobuf {
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
		if err != nil {
			s.t.Errorf("decode a request's body: %v", err)
			return
		}
		body = encode(object)
	}
	c := s.parse(r, to, verb, body)
	s.mu.Lock()
	s.log = append(s.log, c.KubeRequest)
	s.mu.Unlock()
	answer, err := s.answer(w, r, c)
	switch {
	case errors.Is(err, ErrBreak):
		panic(http.ErrAbortHandler)
	case err != nil:
		answer = encode(statusOf(err))
	case c.Verb == "watch":
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(codeOf(c, err))
	_, _ = w.Write(answer)
}

// answer calls the interceptor and applies the request. After a request that changes something, it
// calls the interceptor again. For a watch it returns when the watch has ended.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, c call) ([]byte, error) {
	reads := slices.Contains([]string{"get", "list", "watch"}, c.Verb)
	if err := s.ask(reads, c.KubeRequest); err != nil {
		return nil, err
	}
	if c.Verb == "watch" {
		s.watch(w, r, c)
		return nil, nil
	}
	answer, err := s.apply(c)
	if reads {
		return answer, err
	}
	c.Applied, c.Status = true, codeOf(c, err)
	if instead := s.ask(false, c.KubeRequest); instead != nil {
		return nil, instead
	}
	return answer, err
}

func (s *Server) ask(reads bool, r KubeRequest) error {
	s.mu.Lock()
	f := s.change
	if reads {
		f = s.reading
	}
	s.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(r)
}

func codeOf(c call, err error) int {
	if err != nil {
		return int(statusOf(err).Code)
	}
	if c.Verb == "create" {
		return http.StatusCreated
	}
	return http.StatusOK
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

// Client returns a client's configuration, with the name as its User-Agent. Calling cut disconnects
// the client for good, like the end of its process: requests in progress end, and later ones do not
// reach the server. The server may still apply a request that has arrived, unless an interceptor
// returns an error for it.
func (s *Server) Client(name string) (config *rest.Config, cut func()) {
	// A client may send many requests at once. A Transport's default is 2 idle connections per host.
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	ended, end := context.WithCancelCause(context.Background())
	cut = func() {
		end(fmt.Errorf("the client %s is cut off", name))
		transport.CloseIdleConnections()
	}
	s.t.Cleanup(cut)
	return &rest.Config{Host: s.http.URL, Transport: line{transport, ended}, UserAgent: name, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: "application/json",
			AcceptContentTypes: "application/json"}}, cut
}

type line struct {
	transport *http.Transport
	ended     context.Context
}

func (l line) RoundTrip(r *http.Request) (*http.Response, error) {
	if l.ended.Err() != nil { // AfterFunc alone may cancel too late
		return nil, context.Cause(l.ended)
	}
	ctx, cancel := context.WithCancel(r.Context())
	context.AfterFunc(l.ended, cancel)
	response, err := l.transport.RoundTrip(r.WithContext(ctx))
	if err != nil && l.ended.Err() != nil {
		// Do not return err, because client-go repeats a read after errors such as EOF.
		return nil, context.Cause(l.ended)
	}
	return response, err
}
