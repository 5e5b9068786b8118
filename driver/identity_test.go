package driver

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// moodyRack answers every request with the same response, which can be changed, and counts the
// requests. While that response is a success, it answers a request for the current user with the
// user.
type moodyRack struct {
	mood   atomic.Pointer[racktest.Exchange]
	served atomic.Int64
}

func moody(mood racktest.Exchange) *moodyRack {
	m := &moodyRack{}
	m.mood.Store(&mood)
	return m
}

func (m *moodyRack) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.served.Add(1)
	mood := *m.mood.Load()
	if mood.Status == http.StatusOK && r.URL.Path == "/v1/me" {
		mood.Body = racktest.UserOf(racktest.Silo)
	}
	w.Header().Set("X-Request-Id", "r-1")
	w.WriteHeader(mood.Status)
	_, _ = w.Write([]byte(mood.Body))
}

func healthOf(t *testing.T, rack *moodyRack, log *slog.Logger) *rackHealth {
	t.Helper()
	return &rackHealth{Rack: clientFor(t, racktest.At(t, rack.ServeHTTP)), Log: log,
		asked: make(chan struct{}, 1)}
}

var (
	badToken = racktest.Error(401, "Unauthorized", "credentials missing or invalid")
	noRole   = racktest.Error(403, "Forbidden", "Forbidden")
	away     = racktest.Error(503, "ServiceNotAvailable", "Service Unavailable")
)

// begin runs the checks of a rack until end, which waits for the last one.
func begin(t *testing.T, h *rackHealth) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

func TestProbeReportsTheStateOfTheRack(t *testing.T) { // PR-1, PR-3, PR-5
	rack := moody(away)
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	identity := &identityService{Health: h.state}
	expect := func(name string, ready bool) {
		t.Helper()
		if got := csitest.Got(identity.Probe(t.Context(), nil))(t).GetReady().GetValue(); got != ready {
			t.Errorf("%s: %v", name, got)
		}
	}
	check := func(mood racktest.Exchange) {
		rack.mood.Store(&mood)
		h.check(t.Context())
	}
	another := racktest.OK("", strings.Replace(inOrder.Body, racktest.ProjectID, racktest.Numbered(7),
		1))

	expect("before the first look (PR-2)", false)
	check(away)
	expect("the rack is unreachable at the start (PR-5)", true)
	fails(csierr.RackUnavailable)(t, h.now().unanswered)
	check(inOrder)
	expect("healthy (PR-1)", true)
	check(away)
	expect("the rack is unreachable (PR-5)", true)
	if why := h.now().unanswered; why != nil {
		t.Errorf("an outage after the first answer makes the process wait: %v", why)
	}

	for _, refusal := range []struct {
		mood   racktest.Exchange
		reason csierr.Reason
	}{
		{badToken, csierr.TokenRejected}, {away, csierr.TokenRejected}, // an outage is no answer
		{noRole, csierr.RoleMissing},
		{racktest.Error(404, "ObjectNotFound", "not found: project"), csierr.ProjectNotFound},
		{another, csierr.ProjectChanged}, {away, csierr.ProjectChanged},
	} {
		check(refusal.mood)
		csitest.Want(t, csitest.Err(identity.Probe(t.Context(), nil)), codes.FailedPrecondition,
			refusal.reason)
	}
	check(inOrder)
	expect("mended (PR-1)", true)

	before := rack.served.Load()
	for range 100 {
		expect("makes no request (PR-5)", true)
	}
	if after := rack.served.Load(); after != before {
		t.Errorf("a hundred probes made %d requests", after-before)
	}
}

// awaitHealth waits until the checks find the rack in order, or do not.
func awaitHealth(t *testing.T, h *rackHealth, fine bool) {
	t.Helper()
	csitest.Await(t, fmt.Sprint("the rack is in order: ", fine), func() bool {
		ready, err := h.state()
		return ready && (err == nil) == fine
	})
}

func TestARefusedTokenCausesACheckAtOnce(t *testing.T) {
	rack := moody(inOrder)
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	end := begin(t, h)
	awaitHealth(t, h, true)
	rack.mood.Store(&badToken)
	h.checkSoon()
	awaitHealth(t, h, false)
	served := rack.served.Load()
	for range 100 {
		h.checkSoon()
	}
	end()
	if more := rack.served.Load() - served; more > 1 {
		t.Errorf("a hundred refusals made %d more requests", more)
	}
}

// After a token or a role was corrected, the process needs no restart.
func TestARefusedProcessChecksAgainByItself(t *testing.T) { // D-63
	rack := moody(badToken)
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	defer begin(t, h)()
	awaitHealth(t, h, false)
	rack.mood.Store(&inOrder)
	awaitHealth(t, h, true)
}

func TestMissingProgramsAreNamed(t *testing.T) { // PR-4
	t.Setenv("PATH", t.TempDir())
	fails(csierr.ToolsMissing, "mkfs.xfs")(t, toolsHealth())
	p := plugin{config: Config{Mode: ModeNode}}
	if _, err := p.state(); err == nil {
		t.Error("a node without its programs is healthy")
	}
	p.config.Mode = ModeController
	if ready, err := p.state(); err != nil || !ready {
		t.Errorf("a controller needs no programs: %v, %v", ready, err)
	}
}
