package rack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// Transport sends the client's requests. It adds the current token, and repeats a request once with
// a fresh token if the rack refuses the first.
type Transport struct {
	Base   http.RoundTripper
	Tokens *TokenSource
	// Observe is called with every request and its response, which is nil if there was none.
	Observe func(req *http.Request, answer *http.Response, took time.Duration)
	// Refused is called when the rack refused the newest token.
	Refused func()
}

// RoundTrip sends one request. It waits for the response to a change for a while after the caller
// has given up.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := t.Tokens.current(req.Context())
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	answer, err := t.send(req, token)
	if err != nil || answer.StatusCode != http.StatusUnauthorized || !t.refusal(req, answer) {
		return answer, err
	}
	again, fresh := t.retry(req, token)
	if again == nil {
		t.refused()
		return answer, nil
	}
	// Read the rest, so that the connection can be used again.
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, 64<<10))
	_ = answer.Body.Close()
	if answer, err = t.send(again, fresh); err == nil &&
		answer.StatusCode == http.StatusUnauthorized {
		t.refused()
	}
	return answer, err
}

// refusal reports whether a response with 401 is the rack's own. Another server may send it after
// the effect, and a change may be requested again only if the first request had no effect.
func (t *Transport) refusal(req *http.Request, answer *http.Response) bool {
	if req.Method == http.MethodGet {
		return true
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	answer.Body = io.NopCloser(bytes.NewReader(body))
	var refused *oxide.HTTPError
	copied := *answer
	copied.Body = io.NopCloser(bytes.NewReader(body))
	return err == nil && errors.As(oxide.NewHTTPError(&copied), &refused) && own(refused)
}

func (t *Transport) send(req *http.Request, token string) (*http.Response, error) {
	ctx, stop := patient(req)
	if a, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		limited, err := a.begin(ctx, req.Context())
		if err != nil {
			stop()
			return nil, err
		}
		ctx = limited
	}
	req = req.Clone(ctx)
	req.Header.Set("Authorization", "Bearer "+token)
	start := time.Now()
	answer, err := t.Base.RoundTrip(req)
	if t.Observe != nil {
		t.Observe(req, answer, time.Since(start))
	}
	if err != nil {
		stop()
		return nil, t.throughProxy(req, connectError(req.URL, err))
	}
	answer.Body = &endedBody{answer.Body, stop}
	id := answer.Header.Get("X-Request-Id")
	if answer.StatusCode != http.StatusUnauthorized && len(id) <= maxRequestID {
		flight.Answered(req.Context(), id)
	}
	if answer.StatusCode >= http.StatusMultipleChoices {
		answer.Body = &errorBody{io.LimitReader(answer.Body, maxErrorBytes), answer.Body}
		return answer, nil
	}
	switch {
	case answer.ContentLength > maxResponseBytes:
		err = errResponseTooLarge
	case id == "" || len(id) > maxRequestID:
		err = fmt.Errorf("HTTP %d without the rack's request id, so the response is of another server; "+
			"check OXIDE_HOST and the proxies before it", answer.StatusCode)
	case req.Method == http.MethodDelete && answer.StatusCode != http.StatusNoContent:
		// The client accepts any 2xx, and a disk that still exists would appear to be deleted.
		err = fmt.Errorf("HTTP %d to a DELETE, which no rack answers; check OXIDE_HOST and the "+
			"proxies before it", answer.StatusCode)
	}
	if err != nil {
		_ = answer.Body.Close() // closes the connection, too
		return nil, err
	}
	answer.Body = &boundedBody{ReadCloser: answer.Body, left: maxResponseBytes}
	return answer, nil
}

// maxRequestID is longer than any request id of a rack, which is a UUID.
const maxRequestID = 64

// maxErrorBytes is longer than any error of a rack. The rest is not read.
const maxErrorBytes = 64 << 10

type errorBody struct {
	io.Reader
	io.Closer
}

// connectError adds the host and port to the error of a connection. transportText removes the
// addresses that package net puts into its errors.
func connectError(u *url.URL, err error) error {
	var dial *net.OpError
	if !errors.As(err, &dial) || dial.Op != "dial" {
		return err
	}
	port := cmp.Or(u.Port(), map[string]string{"http": "80"}[u.Scheme], "443")
	return fmt.Errorf("connect to %s: %w", net.JoinHostPort(u.Hostname(), port), dial.Err)
}

// throughProxy adds the proxy of the request to its error, which net/http does not do, and the
// variable that names the proxy.
func (t *Transport) throughProxy(req *http.Request, err error) error {
	base, ok := t.Base.(*http.Transport)
	if !ok || base.Proxy == nil {
		return err
	}
	proxy, unknown := base.Proxy(req)
	if proxy == nil || unknown != nil {
		return err
	}
	variable := strings.ToUpper(req.URL.Scheme) + "_PROXY"
	if os.Getenv(variable) == "" {
		variable = strings.ToLower(variable)
	}
	return fmt.Errorf("through the proxy %s in %s (without it if NO_PROXY has the rack's host): %w",
		proxy.Host, variable, err)
}

// patience is how long the response to a change is awaited after the caller has given up.
const patience = 5 * time.Second

// patient returns a context for the request, and a function that ends it. A rack completes a change
// even if its client stops waiting. So the driver waits after its caller has given up: the volume
// stays locked, and the next call, which may report the disk as detached, sees the effect.
func patient(req *http.Request) (context.Context, func()) {
	caller := req.Context()
	if req.Method == http.MethodGet || caller.Err() != nil {
		return caller, func() {}
	}
	return async.Linger(caller, patience)
}

type endedBody struct {
	io.ReadCloser
	stop func()
}

func (b *endedBody) Close() error {
	defer b.stop()
	return b.ReadCloser.Close()
}

// maxResponseBytes is more than any response of a rack: a page of a thousand disks with long
// descriptions has a few MiB. It keeps another server from filling the driver's memory.
const maxResponseBytes = 32 << 20

var errResponseTooLarge = fmt.Errorf("the response has more than %d MiB, which no rack sends; "+
	"check OXIDE_HOST and the proxies before it", maxResponseBytes>>20)

type boundedBody struct {
	io.ReadCloser
	left int64
}

// Read returns an error behind the limit.
func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errResponseTooLarge
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// retry returns a copy of the request with its body from the start, and a newer token for it, or
// nil if there is no such token or the body cannot be sent twice.
func (t *Transport) retry(req *http.Request, token string) (*http.Request, string) {
	fresh, err := t.Tokens.refresh(req.Context())
	if err != nil || fresh == token {
		return nil, ""
	}
	again := req.Clone(req.Context())
	switch {
	case req.Body == nil, req.Body == http.NoBody:
	case req.GetBody == nil:
		return nil, ""
	default:
		if again.Body, err = req.GetBody(); err != nil {
			return nil, ""
		}
	}
	return again, fresh
}

func (t *Transport) refused() {
	if t.Refused != nil {
		t.Refused()
	}
}
