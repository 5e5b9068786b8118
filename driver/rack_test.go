package driver

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

var must = csitest.Must

// clientFor is a client of the rack at an address.
func clientFor(t *testing.T, url string) *rack.Client {
	t.Helper()
	client, closeIdle, err := newTestClient(Config{Host: url, Token: racktest.Token,
		Project: racktest.Project})
	must(t, err)
	t.Cleanup(closeIdle)
	return client
}

// newTestClient is rack.New for a test without metrics.
func newTestClient(c Config) (*rack.Client, func(), error) {
	tokens := tokensOf(c, &hidden{}, slog.New(slog.DiscardHandler))
	return rack.New(c.rackOptions(), &rack.Transport{Tokens: tokens})
}

// rackAt serves a rack, and returns its address.
func rackAt(t *testing.T, rack http.Handler) (url string) {
	t.Helper()
	server := httptest.NewServer(rack)
	t.Cleanup(server.Close)
	return server.URL
}

// inOrder is a rack's response to the check of its project.
var inOrder = racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}

// shortDir returns a directory whose name is short enough for a socket, unlike that of t.TempDir.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// running is a plugin that runs until stop.
type running struct {
	log      *logBook
	endpoint string
	stop     func()
}

// run starts a plugin. At its end it must have removed its sockets.
func run(t *testing.T, args []string, env map[string]string) *running {
	t.Helper()
	dir := shortDir(t)
	p := &running{log: &logBook{}, endpoint: "unix://" + filepath.Join(dir, "csi.sock")}
	env["CSI_ENDPOINT"], env["OXIDE_LOG_FORMAT"] = p.endpoint, "json"
	env["OXIDE_STATE_DIR"] = t.TempDir()
	config, err := ParseConfig(args, goodEnv(env), io.Discard)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config, p.log) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("B-29: got %v", err)
		}
		if left := names(t, dir); len(left) > 0 {
			t.Errorf("B-29: left behind: %v", left)
		}
	})
	t.Cleanup(p.stop)
	return p
}
