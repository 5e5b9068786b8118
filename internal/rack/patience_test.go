package rack

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// slowRack answers requests after a while, unless they are cut off before.
type slowRack struct{ needs time.Duration }

func (s slowRack) RoundTrip(req *http.Request) (*http.Response, error) {
	select {
	case <-req.Context().Done():
		return nil, req.Context().Err()
	case <-time.After(s.needs):
		status := http.StatusAccepted
		if req.Method == http.MethodDelete {
			status = http.StatusNoContent
		}
		return &http.Response{StatusCode: status, Body: http.NoBody, Request: req,
			Header: http.Header{"X-Request-Id": {"r-1"}}}, nil
	}
}

func TestB10TheResponseToAChangeIsAwaitedForAWhileWhenTheCallerHasGone(t *testing.T) {
	const leaves = time.Second
	for _, c := range []struct {
		what     string
		method   string
		needs    time.Duration
		gone     bool // before the request
		ends     time.Duration
		answered bool
	}{
		{"a read", http.MethodGet, 3 * time.Second, false, leaves, false},
		{"a change", http.MethodPost, 3 * time.Second, false, 3 * time.Second, true},
		{"a deletion", http.MethodDelete, 3 * time.Second, false, 3 * time.Second, true},
		{"a change that takes long", http.MethodPost, time.Hour, false, leaves + patience, false},
		{"a change that nobody waits for", http.MethodPost, time.Second, true, 0, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				if c.gone {
					leave()
				}
				time.AfterFunc(leaves, leave)
				req, err := http.NewRequestWithContext(ctx, c.method, "http://rack.example.com/v1",
					strings.NewReader("{}"))
				must(t, err)
				began := time.Now()
				rack := &Transport{Base: slowRack{c.needs}, Tokens: &TokenSource{Fixed: "one"}}
				answer, err := rack.RoundTrip(req)
				if took := time.Since(began); took != c.ends || (err == nil) != c.answered {
					t.Fatalf("it ended after %v with %v; want %v, answered %t", took, err, c.ends, c.answered)
				}
				if answer == nil {
					return
				}
				must(t, answer.Body.Close())
				if sent := answer.Request.Context(); !errors.Is(sent.Err(), context.Canceled) {
					t.Error("the request's context outlives the body")
				}
			})
		})
	}
}
