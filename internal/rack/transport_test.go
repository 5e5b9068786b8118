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
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func writeToken(t *testing.T, path, token string) {
	t.Helper()
	// Replace the file, as kubelet does, instead of writing to it.
	must(t, os.WriteFile(path+".new", []byte(token+"\n"), 0o600))
	must(t, os.Rename(path+".new", path))
}

func TestTransportReadsAChangedTokenFile(t *testing.T) { // D-63
	var accepted, body string
	var seen []string
	url := racktest.At(t, func(w http.ResponseWriter, r *http.Request) {
		got, _ := io.ReadAll(r.Body)
		token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		seen, body = append(seen, token), string(got)
		w.Header().Set("X-Request-Id", "r-1")
		if token == accepted {
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, diskOf("creating"))
			return
		}
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, rackError(401, "Unauthorized", "missing or invalid").Body)
	})
	path, refusals := filepath.Join(t.TempDir(), "token"), 0
	writeToken(t, path, "one")
	c := clientWith(t, Options{Host: url}, &Transport{
		Tokens: tokenFile(path), Refused: func() { refusals++ }})
	for _, step := range []struct {
		what     string
		change   func()
		accepted string
		ends     func(*testing.T, error)
		seen     string
	}{
		{"at first", func() {}, "one", csitest.OK, "one"},
		{"a new file is seen before the rack refuses", func() { writeToken(t, path, "two") }, "two",
			csitest.OK, "two"},
		{"a refusal is followed by one more try, with the body", func() {
			info := csitest.Got(os.Stat(path))(t)
			must(t, os.WriteFile(path, []byte("six\n"), 0o600))
			must(t, os.Chtimes(path, time.Now(), info.ModTime())) // so that the file looks unchanged
		}, "six", csitest.OK, "two six"},
		{"without its file the last token serves on", func() { must(t, os.Remove(path)) }, "six",
			csitest.OK, "six"},
		{"a token that stays wrong is not tried again", func() {}, "seven",
			fails(csierr.TokenRejected), "six"},
		{"another wrong one", func() { writeToken(t, path, "eight") }, "seven",
			fails(csierr.TokenRejected), "eight"},
	} {
		step.change()
		accepted, seen = step.accepted, nil
		_, err := create(t.Context(), c, Looking())
		if err != nil {
			err = Error(t.Context(), "create disk", err) // a refusal is still the SDK's error
		}
		step.ends(t, err)
		if got := strings.Join(seen, " "); got != step.seen ||
			!strings.Contains(body, volume.DiskName("blue", "pvc-1")) {
			t.Errorf("%s: the rack saw %s and %q, want %s", step.what, got, body, step.seen)
		}
	}
	if refusals != 2 {
		t.Errorf("%d refusals were reported, want those of the last two calls", refusals)
	}
}

func TestTransportFollowsNoRedirectToAnotherHost(t *testing.T) {
	thief := racktest.At(t, func(http.ResponseWriter, *http.Request) {
		t.Error("a redirect was followed")
	})
	url := racktest.At(t, http.RedirectHandler(thief, http.StatusTemporaryRedirect).ServeHTTP)
	if _, err := clientFor(t, url).Ping(t.Context()); err == nil {
		t.Error("a redirect is a success")
	}
}

// flood returns a server that calls begin() and then sends a GiB. sentMiB counts the MiB sent.
func flood(t *testing.T, begin http.HandlerFunc) (server *httptest.Server, sentMiB *atomic.Int64) {
	t.Helper()
	sentMiB = &atomic.Int64{}
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		begin(w, r)
		piece := []byte(strings.Repeat(" ", 1<<20))
		for range 1 << 10 {
			if _, err := w.Write(piece); err != nil {
				return
			}
			sentMiB.Add(1)
		}
	}))
	t.Cleanup(server.Close)
	return server, sentMiB
}

// The client reads at most 32 MiB. The server also counts data in buffers, so 256 MiB are allowed.
func TestTransportRejectsTooLargeResponses(t *testing.T) { // OX-9
	server, sent := flood(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("project") == "told" {
			w.Header().Set("Content-Length", "34359738368")
		}
		w.Header().Set("X-Request-Id", "r-1")
		w.WriteHeader(http.StatusCreated)
	})
	client := clientFor(t, server.URL)
	for _, project := range []oxide.NameOrId{"told", "untold"} {
		err := csitest.Err(client.DiskView(t.Context(), oxide.DiskViewParams{Project: project,
			Disk: "x"}))
		fails(csierr.RackUnavailable, "more than 32 MiB")(t, Error(t.Context(), "read disk", err))
	}
	server.Close()
	if got := sent.Load(); got > 256 {
		t.Errorf("%d MiB of the answers were read", got)
	}
}

func TestTransportReadsErrorBodiesUpToALimit(t *testing.T) {
	server, sent := flood(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
	})
	_, err := create(t.Context(), clientFor(t, server.URL), Looking())
	server.Close()
	fails(csierr.RackUnavailable)(t, err)
	var answer *oxide.HTTPError
	if errors.As(err, &answer) || len(err.Error()) > 1<<10 || sent.Load() > 16 {
		t.Errorf("%d MiB were read, and the error has %d bytes", sent.Load(), len(err.Error()))
	}
}

func tokenFile(path string) *TokenSource {
	return &TokenSource{Path: path, Log: slog.New(slog.DiscardHandler), Limit: 300 * time.Millisecond}
}

// If another machine takes over the rack's address, nobody answers on the old connections. The
// client must close them soon.
func TestTransportClosesASilentConnection(t *testing.T) { // OX-9
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request) {
		_, _ = io.WriteString(w, racktest.ProjectOf())
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(path, racktest.PEM(server.Certificate().Raw), 0o600))
	base := csitest.Got(connections(Options{Host: server.URL, CAFile: path},
		slog.New(slog.DiscardHandler)))(t)
	t.Cleanup(base.CloseIdleConnections)
	base.HTTP2.SendPingTimeout, base.HTTP2.PingTimeout = 50*time.Millisecond, 50*time.Millisecond
	var silent atomic.Bool
	base.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err != nil || silent.Load() {
			return conn, err
		}
		return &silenced{conn, &silent}, nil
	}
	call := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
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
	silent.Store(true)
	csitest.Await(t, "calls take another connection", func() bool { return call() == nil })
}

type silenced struct {
	net.Conn
	silent *atomic.Bool
}

func (c *silenced) Read(p []byte) (int, error) {
	for {
		if n, err := c.Conn.Read(p); err != nil || !c.silent.Load() {
			return n, err
		}
	}
}

var (
	must                       = csitest.Must
	fails                      = csitest.Fails
	with                       = racktest.With
	rackError                  = racktest.Error
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

func TestTransportAwaitsTheResponseToAChangeAfterTheCallerGivesUp(t *testing.T) { // B-10
	const leaves = time.Second
	for _, c := range []struct {
		what     string
		method   string
		needs    time.Duration
		gone     bool // the caller gives up before the request
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
				req := csitest.Got(http.NewRequestWithContext(ctx, c.method, "http://rack.example.com/v1",
					strings.NewReader("{}")))(t)
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
