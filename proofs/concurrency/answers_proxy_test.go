//go:build linux

package concurrency

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
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
	rack  string
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
	p := &proxy{rack: rack, lates: l}
	p.Server = httptest.NewServer(p)
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

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	came := time.Now()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	a := p.take(r)
	answer := a.answer
	if a.effect == normal || a.effect == before {
		got, err := p.pass(r, body)
		switch {
		case err != nil:
			panic(http.ErrAbortHandler)
		case a.effect == normal:
			answer = got
		}
	}
	if a.effect == later {
		p.lates.Add(1)
		time.AfterFunc(lateEffect, func() {
			defer p.lates.Done()
			_, _ = p.pass(r, body)
			p.lates.mu.Lock()
			defer p.lates.mu.Unlock()
			p.lates.longest = max(p.lates.longest, time.Since(came))
		})
	}
	if a.meanwhile != nil {
		a.meanwhile()
	}
	if answer == nil {
		panic(http.ErrAbortHandler)
	}
	for key, values := range answer.header {
		if key != "Content-Length" {
			w.Header()[key] = values
		}
	}
	w.WriteHeader(answer.status)
	_, _ = io.WriteString(w, answer.body)
}

// pass sends a request to the rack, even if its caller has closed the connection.
func (p *proxy) pass(r *http.Request, body []byte) (*reply, error) {
	req, err := http.NewRequestWithContext(context.WithoutCancel(r.Context()), r.Method,
		p.rack+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("pass a request on: %w", err)
	}
	req.Header = r.Header.Clone()
	answer, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return &reply{answer.StatusCode, answer.Header, string(text)}, err
}
