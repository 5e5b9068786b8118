package rack

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type guardedRack struct {
	mu sync.Mutex
	// guarded by mu
	token    string
	requests []string
}

func (g *guardedRack) accept(token string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.token = token
}

func (g *guardedRack) seen() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	seen := g.requests
	g.requests = nil
	return seen
}

func (g *guardedRack) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	got := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	g.requests = append(g.requests, got)
	w.Header().Set("X-Request-Id", "r-1")
	switch {
	case got != g.token:
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"request_id":"r-1","error_code":"Unauthorized",`+
			`"message":"credentials missing or invalid"}`)
	case r.Method == http.MethodPost && !strings.Contains(string(body), volume.DiskName("blue",
		"pvc-1")):
		w.WriteHeader(http.StatusBadRequest) // the body was not sent again
	case r.Method == http.MethodPost:
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, diskOf("creating"))
	default:
		_, _ = io.WriteString(w, racktest.ProjectOf())
	}
}

func writeToken(t *testing.T, path, token string) {
	t.Helper()
	// Replace the file, as kubelet does.
	must(t, os.WriteFile(path+".new", []byte(token+"\n"), 0o600))
	must(t, os.Rename(path+".new", path))
}

func TestATokenFileIsReadAgain(t *testing.T) { // D-63
	rack := &guardedRack{}
	server := httptest.NewServer(rack)
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "token")
	writeToken(t, path, "one")
	refusals := 0
	c := clientWith(t, Options{Host: server.URL}, &Transport{
		Tokens: tokenFile(path), Refused: func() { refusals++ }})
	request := func() error {
		_, err := create(t.Context(), c, Looking())
		if err != nil {
			err = Error(t.Context(), "create disk", err)
		}
		return err
	}
	expect := func(what string, want ...string) {
		t.Helper()
		if got := rack.seen(); strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("%s: the rack saw %v, want %v", what, got, want)
		}
	}

	rack.accept("one")
	must(t, request())
	expect("at first", "one")

	writeToken(t, path, "two")
	rack.accept("two")
	must(t, request())
	expect("a new file is seen before the rack refuses", "two")

	// Change the file without changing its times.
	info, err := os.Stat(path)
	must(t, err)
	must(t, os.WriteFile(path, []byte("six\n"), 0o600))
	must(t, os.Chtimes(path, time.Now(), info.ModTime()))
	rack.accept("six")
	must(t, request())
	expect("a refusal is followed by one more try, with the body", "two", "six")

	must(t, os.Remove(path))
	if err := request(); err != nil {
		t.Errorf("without its file the last token serves on: %v", err)
	}
	expect("without its file", "six")

	rack.accept("seven")
	csitest.Want(t, request(), codes.Unauthenticated, csierr.TokenRejected)
	expect("a token that stays wrong is not tried again", "six")
	if refusals != 1 {
		t.Errorf("%d refusals were reported", refusals)
	}
	writeToken(t, path, "eight")
	csitest.Want(t, request(), codes.Unauthenticated, csierr.TokenRejected)
	expect("another wrong one", "eight")
}

func TestTheTokenGoesToTheRackOnly(t *testing.T) {
	thief := &guardedRack{}
	elsewhere := httptest.NewServer(thief)
	t.Cleanup(elsewhere.Close)
	server := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	t.Cleanup(server.Close)
	_, err := clientFor(t, server.URL).Ping(t.Context())
	if err == nil || len(thief.seen()) > 0 {
		t.Errorf("a redirect was followed: %v", err)
	}
}

func TestAResponseThatIsTooLargeIsRejected(t *testing.T) { // OX-9
	var sent atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("project") == "told" {
			w.Header().Set("Content-Length", "34359738368")
		}
		w.Header().Set("X-Request-Id", "r-1")
		w.WriteHeader(http.StatusCreated)
		piece := []byte(strings.Repeat(" ", 1<<20))
		for range 1 << 10 {
			if _, err := w.Write(piece); err != nil {
				return
			}
			sent.Add(1)
		}
	}))
	client := clientFor(t, server.URL)
	for _, project := range []oxide.NameOrId{"told", "untold"} {
		_, err := client.DiskView(t.Context(), oxide.DiskViewParams{Project: project, Disk: "x"})
		err = Error(t.Context(), "read disk", err)
		csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable, "more than 32 MiB")
	}
	server.Close()
	// Data in the connection's buffers counts as sent, too.
	if got := sent.Load(); got > 256 {
		t.Errorf("%d MiB of the answers were read", got)
	}
}

func tokenFile(path string) *TokenSource {
	return &TokenSource{Path: path, Log: slog.New(slog.DiscardHandler), Limit: 300 * time.Millisecond}
}

// When a rack's address moves to another machine, nobody answers on the old connections. They must
// be closed soon, so that calls do not wait for them.
func TestASilentConnectionIsClosed(t *testing.T) { // OX-9
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request) {
		_, _ = io.WriteString(w, racktest.ProjectOf())
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(path, racktest.PEM(server.Certificate().Raw), 0o600))
	relay := newRelay(t, server.Listener.Addr().String())
	base, err := connections(Options{Host: relay.url, CAFile: path}, slog.New(slog.DiscardHandler))
	must(t, err)
	t.Cleanup(base.CloseIdleConnections)
	base.HTTP2.SendPingTimeout, base.HTTP2.PingTimeout = 50*time.Millisecond, 50*time.Millisecond
	call := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, relay.url, nil)
		if err != nil {
			return err
		}
		answer, err := base.RoundTrip(req)
		if err != nil {
			return err
		}
		return answer.Body.Close()
	}
	must(t, call())
	relay.silent.Store(true)
	csitest.Await(t, "calls take another connection", func() bool { return call() == nil })
}

// relay forwards bytes to a server until it is silenced; connections made after that work.
type relay struct {
	url    string
	silent atomic.Bool
}

func newRelay(t *testing.T, server string) *relay {
	t.Helper()
	front, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = front.Close() })
	r := &relay{url: "https://" + front.Addr().String()}
	go func() {
		for {
			in, err := front.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", server)
			if err != nil {
				_ = in.Close()
				continue
			}
			works := r.silent.Load()
			go r.pass(out, in, works)
			go r.pass(in, out, works)
		}
	}()
	return r
}

// pass copies one direction; works means that the connection works although the relay is silenced.
func (r *relay) pass(to, from net.Conn, works bool) {
	defer func() { _ = to.Close() }()
	buffer := make([]byte, 4096)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		if works || !r.silent.Load() {
			_, _ = to.Write(buffer[:n])
		}
	}
}

var (
	must      = csitest.Must
	with      = racktest.With
	rackError = racktest.Error
	// diskOf, snapshotOf and pageOf return what a rack responds.
	diskOf, snapshotOf, pageOf = racktest.DiskOf, racktest.SnapshotOf, racktest.PageOf
)

type exchange = racktest.Exchange

func fixedToken() *Transport { return &Transport{Tokens: &TokenSource{Fixed: racktest.Token}} }

func clientFor(t *testing.T, url string) *Client {
	t.Helper()
	return clientWith(t, Options{Host: url}, fixedToken())
}

func clientThat(t *testing.T, lines ...exchange) *Client {
	t.Helper()
	return clientFor(t, racktest.Serve(t, lines...))
}

func clientWith(t *testing.T, o Options, transport *Transport) *Client {
	t.Helper()
	o.Project, o.UserAgent = racktest.Project, "test"
	client, closeIdle, err := New(o, transport)
	must(t, err)
	t.Cleanup(closeIdle)
	return client
}

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

func TestAChangeIsAwaitedAfterItsCallerHasGone(t *testing.T) { // B-10
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
