package rack

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// When a rack's address moves to another machine, nobody answers on the old connections. Calls must
// not wait for those any longer than it takes to see that.
func TestOX9ASilentConnectionIsClosed(t *testing.T) {
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

// relay passes bytes on to a server until it falls silent; connections made after that work.
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

// pass copies one direction; works reports whether silence does not affect it.
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

// clientFor is a client of the rack at an address.
func clientFor(t *testing.T, url string) *Client {
	t.Helper()
	return clientWith(t, Options{Host: url}, fixedToken())
}

// clientThat serves a script and returns a client for it.
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
