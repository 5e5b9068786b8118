package rack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// Transport sends the client's requests with the current token. If the rack refuses the token,
// Transport repeats the request once with a newer one.
type Transport struct {
	Base   http.RoundTripper
	Tokens *TokenSource
	// Observe is called with each request and its response, which is nil if there was none.
	Observe func(req *http.Request, answer *http.Response, took time.Duration)
	// Refused is called when the rack has refused the newest token.
	Refused func()
}

// RoundTrip sends one request. If the caller gives up during a change, RoundTrip waits a little
// longer for the response.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	token, err := t.Tokens.get(req.Context(), false)
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
	// Read the body to its end, so that the connection can be used again.
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, 64<<10))
	_ = answer.Body.Close()
	if answer, err = t.send(again, fresh); err == nil &&
		answer.StatusCode == http.StatusUnauthorized {
		t.refused()
	}
	return answer, err
}

// refusal reports whether the request may be repeated after this 401. Another server may send a 401
// after the rack has made the change, so a change is repeated only if the 401 is the rack's.
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
	ctx, stop := withPatience(req)
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
		// The SDK accepts any 2xx as success. After a status other than 204 the disk may still exist.
		err = fmt.Errorf("HTTP %d to a DELETE, which no rack answers; check OXIDE_HOST and the "+
			"proxies before it", answer.StatusCode)
	}
	if err != nil {
		_ = answer.Body.Close() // this also closes the connection
		return nil, err
	}
	answer.Body = &boundedBody{ReadCloser: answer.Body, left: maxResponseBytes}
	return answer, nil
}

const maxRequestID = 64 // a rack's ids are UUIDs

const maxErrorBytes = 64 << 10 // more than any error of a rack has

type errorBody struct {
	io.Reader
	io.Closer
}

// connectError adds host and port to the error of a failed connection, because transportText
// removes the addresses in errors of package net.
func connectError(u *url.URL, err error) error {
	var dial *net.OpError
	if !errors.As(err, &dial) || dial.Op != "dial" {
		return err
	}
	port := cmp.Or(u.Port(), map[string]string{"http": "80"}[u.Scheme], "443")
	return fmt.Errorf("connect to %s: %w", net.JoinHostPort(u.Hostname(), port), dial.Err)
}

// throughProxy adds what the error of net/http lacks: the request's proxy, and the environment
// variable that contains it.
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

// patience is how long RoundTrip waits for a change's response after the caller has given up.
const patience = 5 * time.Second

// withPatience returns a context for the request, and a function that ends it. A rack completes a
// change even if the client stops waiting. So the driver waits longer than its caller, and keeps
// the volume locked meanwhile. The next call then sees the effect of the change.
func withPatience(req *http.Request) (context.Context, func()) {
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

// maxResponseBytes is more than a rack sends: a page of a thousand disks with long descriptions has
// a few MiB. Without the limit another server could fill the driver's memory.
const maxResponseBytes = 32 << 20

var errResponseTooLarge = fmt.Errorf("the response has more than %d MiB, which no rack sends; "+
	"check OXIDE_HOST and the proxies before it", maxResponseBytes>>20)

type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errResponseTooLarge
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// retry returns a copy of the request, and a newer token. If it cannot get both, it returns nil.
func (t *Transport) retry(req *http.Request, token string) (*http.Request, string) {
	fresh, err := t.Tokens.get(req.Context(), true)
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

// TokenSource provides the rack's token, from the configuration or from a file that may change.
type TokenSource struct {
	Fixed string
	Path  string
	// OnToken, if not nil, gets every token before its first use, so that logs never contain it.
	OnToken func(token string)
	Log     *slog.Logger
	// Limit is how long a caller waits for the file; 0 means fileLimit.
	Limit time.Duration

	once sync.Once
	file *renewedFile[string]
}

func (s *TokenSource) renewed() *renewedFile[string] {
	s.once.Do(func() {
		s.file = &renewedFile[string]{path: s.Path, log: s.Log, limit: cmp.Or(s.Limit, fileLimit),
			parse: func(content []byte) (string, error) {
				token := string(bytes.TrimSpace(content))
				err := CheckToken(token)
				if err == nil && s.OnToken != nil {
					s.OnToken(token)
				}
				return token, err
			}}
	})
	return s.file
}

// get returns the token to send. It reads a changed file again, and returns the last token if the
// read fails. If the parameter force is true, it reads even a file with unchanged times: after the
// rack has refused a token, the file may contain a new one.
func (s *TokenSource) get(ctx context.Context, force bool) (string, error) {
	if s.Path == "" {
		return s.Fixed, nil
	}
	return s.renewed().get(ctx, force)
}

// Fault returns the error of the last read of the token file, or nil. After an error, calls use the
// token that was last read.
func (s *TokenSource) Fault() error {
	if s == nil || s.Path == "" {
		return nil
	}
	err := s.renewed().fault()
	if err == nil {
		return nil
	}
	return csierr.New(csierr.TokenFileUnreadable, "OXIDE_TOKEN_FILE (--token-file): %s; the token "+
		"last read is in use until the rack refuses it", err)
}

// CheckToken returns why a token cannot be sent, or nil. It makes no request to the rack.
func CheckToken(token string) error {
	const most = 4096
	noWord := func(r rune) bool { return r <= ' ' || r > '~' }
	switch {
	case token == "":
		return errors.New("holds no token")
	case len(token) > most || strings.ContainsFunc(token, noWord):
		return errors.New("holds no valid token: a token is one word of ASCII characters")
	}
	return nil
}

type renewedFile[T any] struct {
	path  string
	limit time.Duration
	log   *slog.Logger
	parse func(content []byte) (T, error)

	mu sync.Mutex
	// guarded by mu
	value T
	// guarded by mu: describes the file from which value was read; nil at first
	file os.FileInfo
	// guarded by mu: the error of the last read
	problem error
	// guarded by mu: whether the last read failed after a long time
	slow bool
	// guarded by mu: the current read, or nil
	reading *reading
}

const fileLimit = 3 * time.Second

type reading struct {
	force bool // read the file even if it is unchanged
	began time.Time
	done  chan struct{} // closed when the read ends
}

// get reads the file and returns its value. On some mounts even stat never returns, so get()
// returns the last value after the limit.
func (s *renewedFile[T]) get(ctx context.Context, force bool) (value T, err error) {
	asked := time.Now()
	for {
		r, wait := s.begin(force)
		if !wait || !s.await(ctx, r) || !force || r.force && !r.began.Before(asked) {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return value, cmp.Or(s.lastError(), ctx.Err())
	}
	return s.value, nil
}

// begin starts a read, or returns the one in progress. Only one goroutine reads, because a system
// call on a hanging mount cannot be canceled. The result wait is false if the last read failed
// after a long time, a value is known, and force is false.
func (s *renewedFile[T]) begin(force bool) (r *reading, wait bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reading == nil {
		r := &reading{force: force, began: time.Now(), done: make(chan struct{})}
		s.reading = r
		async.Detach(func() { s.read(r) })
	}
	return s.reading, force || s.file == nil || !s.slow
}

func (s *renewedFile[T]) await(ctx context.Context, r *reading) bool {
	limit := time.NewTimer(time.Until(r.began.Add(s.limit)))
	defer limit.Stop()
	select {
	case <-r.done:
		return true
	case <-limit.C:
	case <-ctx.Done():
	}
	return false
}

func (s *renewedFile[T]) read(r *reading) {
	defer close(r.done)
	err := async.Guard(context.Background(), s.log, "the reader of a renewed file", func() error {
		return s.readFile(r.force)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem, s.reading = err, nil
	s.slow = err != nil && time.Since(r.began) > s.limit/4
}

func (s *renewedFile[T]) readFile(force bool) error {
	s.mu.Lock()
	known := s.file
	s.mu.Unlock()
	info, err := os.Stat(s.path)
	if err == nil && !force && known != nil && os.SameFile(info, known) &&
		info.ModTime().Equal(known.ModTime()) && info.Size() == known.Size() {
		return nil
	}
	content, info, err := readRenewed(s.path, s.limit)
	if err != nil {
		return err
	}
	value, err := s.parse(content)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value, s.file = value, info
	return nil
}

// lastError returns the error of the last read, or an error if the current read has taken too long.
// The caller holds mu.
func (s *renewedFile[T]) lastError() error {
	if s.reading != nil && time.Since(s.reading.began) >= s.limit {
		return fmt.Errorf("not read within %s; check whether its mount hangs", s.limit)
	}
	return s.problem
}

func (s *renewedFile[T]) fault() error {
	s.mu.Lock()
	err := s.lastError()
	s.mu.Unlock()
	if err != nil {
		// Read the file again even if no call needs the token, so that the next health check succeeds.
		_, _ = s.begin(false)
	}
	return err
}

// readRenewed reads the file. It waits for data at most half the limit, because a FIFO may have
// none.
func readRenewed(path string, limit time.Duration) ([]byte, os.FileInfo, error) {
	// With O_NONBLOCK, open does not wait for a FIFO's writer, and without a writer read returns EOF.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open: %w", csierr.WithoutPath(err))
	}
	defer func() { _ = f.Close() }()
	// Regular files support no deadline, and need none.
	_ = f.SetReadDeadline(time.Now().Add(limit / 2))
	info, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("stat: %w", csierr.WithoutPath(err))
	}
	const most = 1 << 20
	content, err := io.ReadAll(io.LimitReader(f, most))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, nil, errors.New("read: timed out; it is a pipe, and has to be a file")
	case err != nil:
		return nil, nil, fmt.Errorf("read: %w", csierr.WithoutPath(err))
	}
	return content, info, nil
}
