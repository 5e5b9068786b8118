//go:build linux

package concurrency

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// act is a disturbance of one request of a call.
type act struct {
	// The request is the first change if change is set, the first read of a disk or a snapshot if
	// object is set, and otherwise the first read.
	change, object bool
	effect         effect
	// answer replaces the rack's answer; nil closes the connection.
	answer *reply
	// meanwhile, if it is set, runs before the answer is sent.
	meanwhile func()
}

// reply is an answer to a request.
type reply struct {
	status int
	header http.Header
	body   string
}

func (r *reply) response() (*http.Response, error) {
	if r == nil {
		return nil, http.ErrAbortHandler
	}
	return &http.Response{StatusCode: r.status, Header: r.header.Clone(),
		Body: io.NopCloser(strings.NewReader(r.body))}, nil
}

type effect int

// The effects of a request.
const (
	normal  effect = iota // the caller gets the rack's answer
	before                // the rack gets the request, and the caller gets another answer
	instead               // the rack does not get the request
	later                 // the rack gets the request some time after the answer
)

// otherAnswer returns an answer that does not come from the rack, or reports a failure of the rack.
// nil is no answer.
func otherAnswer(r *rand.Rand) *reply {
	if r.IntN(6) == 0 {
		return nil
	}
	if r.IntN(6) == 0 {
		return &reply{http.StatusServiceUnavailable, http.Header{"X-Request-Id": {"r-1"}},
			`{"request_id":"r-1","error_code":"ServiceNotAvailable","message":"not now"}`}
	}
	statuses := []int{200, 201, 202, 204, 302, 400, 401, 403, 404, 407, 408, 409, 410, 413, 418, 429,
		431, 451, 499, 500, 501, 502, 503, 504, 507, 520}
	bodies := []string{"<html>blocked</html>", "{}", "null", "",
		`{"request_id":"r-2","error_code":"InvalidRequest","message":"no"}`,
		`{"request_id":"r-2","error_code":"ObjectNotFound","message":"no"}`,
		`{"error_code":"InsufficientCapacity","message":"no"}`}
	return &reply{statuses[r.IntN(len(statuses))], nil, bodies[r.IntN(len(bodies))]}
}

// noRole is the rack's answer to a token without a role on the project.
func noRole() *reply {
	return &reply{http.StatusNotFound, http.Header{"X-Request-Id": {"r-1"}},
		`{"request_id":"r-1","error_code":"ObjectNotFound","message":"not found"}`}
}

// proxy is between a controller and the rack.
type proxy struct {
	*httptest.Server
	lates *lates
	// queued disturbs the next request that it selects.
	queued atomic.Pointer[act]
}

// lates counts the requests that the rack gets after their answers.
type lates struct {
	sync.WaitGroup
	mu sync.Mutex
	// guarded by mu: the longest time from a request to its effect
	longest time.Duration
}

func newProxy(t *testing.T, rack string, l *lates) *proxy {
	to, err := url.Parse(rack)
	csitest.Must(t, err)
	p := &proxy{lates: l}
	p.Server = httptest.NewServer(&httputil.ReverseProxy{Transport: p,
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }})
	t.Cleanup(p.Close)
	return p
}

// take returns the queued act if it selects the request.
func (p *proxy) take(r *http.Request) act {
	background := strings.HasPrefix(r.URL.Path, "/v1/me") ||
		strings.HasPrefix(r.URL.Path, "/v1/projects")
	object := strings.HasPrefix(r.URL.Path, "/v1/disks/") ||
		strings.HasPrefix(r.URL.Path, "/v1/snapshots/")
	a := p.queued.Load()
	if a != nil && !background && a.change == (r.Method != http.MethodGet) &&
		(object || !a.object) && p.queued.CompareAndSwap(a, nil) {
		return *a
	}
	return act{}
}

// RoundTrip sends a request to the rack, even if its caller has closed the connection.
func (p *proxy) RoundTrip(r *http.Request) (*http.Response, error) {
	came := time.Now()
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	pass := func() (*http.Response, error) {
		again, err := http.NewRequestWithContext(context.WithoutCancel(r.Context()), r.Method,
			r.URL.String(), bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		again.Header = r.Header
		return http.DefaultTransport.RoundTrip(again)
	}
	a := p.take(r)
	answer, err := a.answer.response()
	switch a.effect {
	case normal:
		answer, err = pass()
	case before:
		got, failed := pass()
		if failed != nil {
			return nil, failed
		}
		_ = got.Body.Close()
	case later:
		p.lates.Go(func() {
			<-time.After(lateEffect)
			if got, failed := pass(); failed == nil {
				_ = got.Body.Close()
			}
			p.lates.mu.Lock()
			defer p.lates.mu.Unlock()
			p.lates.longest = max(p.lates.longest, time.Since(came))
		})
	}
	if a.meanwhile != nil {
		a.meanwhile()
	}
	return answer, err
}
