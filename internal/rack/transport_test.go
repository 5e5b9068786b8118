package rack

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// guardedRack accepts one token, which can be changed, and counts its requests.
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

func TestD63ATokenFileIsReadAgain(t *testing.T) {
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

func TestOX9AResponseThatIsTooLargeIsRejected(t *testing.T) {
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
	// Data in the connection's buffers counts as sent too.
	if got := sent.Load(); got > 256 {
		t.Errorf("%d MiB of the answers were read", got)
	}
}

func tokenFile(path string) *TokenSource {
	return &TokenSource{Path: path, Log: slog.New(slog.DiscardHandler), Limit: 300 * time.Millisecond}
}
