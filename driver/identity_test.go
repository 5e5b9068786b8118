package driver

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// moodyRack answers every request with the same response, which can be changed, and counts the
// requests. While that response is a success, it answers a request for the current user with the
// user.
type moodyRack struct {
	mu sync.Mutex
	// guarded by mu
	mood   racktest.Exchange
	served int
}

func (m *moodyRack) set(mood racktest.Exchange) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mood = mood
}

func (m *moodyRack) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.served
}

func (m *moodyRack) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.served++
	body := m.mood.Body
	if m.mood.Status == http.StatusOK && r.URL.Path == "/v1/me" {
		body = racktest.UserOf(racktest.Silo)
	}
	w.Header().Set("X-Request-Id", "r-1")
	w.WriteHeader(m.mood.Status)
	_, _ = w.Write([]byte(body))
}

func healthOf(t *testing.T, rack http.Handler, log *slog.Logger) *rackHealth {
	t.Helper()
	return &rackHealth{Rack: clientFor(t, rackAt(t, rack)), Log: log, asked: make(chan struct{}, 1)}
}

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
	rack := &moodyRack{}
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	identity := &identityService{Health: h.state}
	probe := func() (bool, error) {
		answer, err := identity.Probe(t.Context(), &csi.ProbeRequest{})
		return answer.GetReady().GetValue(), err
	}
	expect := func(name string, ready bool) {
		t.Helper()
		if got, err := probe(); err != nil || got != ready {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	away := racktest.Error(503, "ServiceNotAvailable", "Service Unavailable")
	fine := inOrder
	another := racktest.OK("", strings.Replace(fine.Body, racktest.ProjectID, racktest.Numbered(7), 1))

	expect("before the first look (PR-2)", false)
	rack.set(away)
	h.check(t.Context())
	expect("the rack is unreachable at the start (PR-5)", true)
	if why := h.waiting(); !csierr.Has(why, csierr.RackUnavailable) {
		t.Errorf("waits for %v, want %s", why, csierr.RackUnavailable)
	}
	rack.set(fine)
	h.check(t.Context())
	expect("healthy (PR-1)", true)
	rack.set(away)
	h.check(t.Context())
	expect("the rack is unreachable (PR-5)", true)
	if why := h.waiting(); why != nil {
		t.Errorf("an outage after the first answer makes the process wait: %v", why)
	}

	for _, refusal := range []struct {
		mood   racktest.Exchange
		reason csierr.Reason
	}{
		{racktest.Error(401, "Unauthorized", "credentials missing or invalid"), csierr.TokenRejected},
		{away, csierr.TokenRejected}, // an outage is no answer
		{racktest.Error(403, "Forbidden", "Forbidden"), csierr.RoleMissing},
		{racktest.Error(404, "ObjectNotFound", "not found: project"), csierr.ProjectNotFound},
		{another, csierr.ProjectChanged},
		{away, csierr.ProjectChanged},
	} {
		rack.set(refusal.mood)
		h.check(t.Context())
		_, err := probe()
		csitest.Want(t, err, codes.FailedPrecondition, refusal.reason)
	}
	rack.set(fine)
	h.check(t.Context())
	expect("mended (PR-1)", true)

	before := rack.count()
	for range 100 {
		expect("makes no request (PR-5)", true)
	}
	if after := rack.count(); after != before {
		t.Errorf("a hundred probes made %d requests", after-before)
	}
}

func TestARefusedTokenCausesACheckAtOnce(t *testing.T) {
	rack := &moodyRack{mood: inOrder}
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	end := begin(t, h)
	csitest.Await(t, "the first look is done", func() bool {
		ready, err := h.state()
		return ready && err == nil
	})
	rack.set(racktest.Error(401, "Unauthorized", "credentials missing or invalid"))
	h.checkSoon()
	csitest.Await(t, "the refusal is known", func() bool {
		_, err := h.state()
		return err != nil
	})
	served := rack.count()
	for range 100 {
		h.checkSoon()
	}
	end()
	if more := rack.count() - served; more > 1 {
		t.Errorf("a hundred refusals made %d more requests", more)
	}
}

// After a token or a role was corrected, the process needs no restart.
func TestARefusedProcessChecksAgainByItself(t *testing.T) { // D-63
	rack := &moodyRack{mood: racktest.Error(401, "Unauthorized", "credentials missing or invalid")}
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	defer begin(t, h)()
	csitest.Await(t, "the refusal is known", func() bool {
		_, err := h.state()
		return err != nil
	})
	rack.set(inOrder)
	csitest.Await(t, "the process is well again", func() bool {
		ready, err := h.state()
		return ready && err == nil
	})
}

func TestMissingProgramsAreNamed(t *testing.T) { // PR-4
	t.Setenv("PATH", t.TempDir())
	err := toolsHealth()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.ToolsMissing, "mkfs.xfs")
	p := plugin{config: Config{Mode: ModeNode}}
	if _, err := p.state(); err == nil {
		t.Error("a node without its programs is healthy")
	}
	p.config.Mode = ModeController
	if ready, err := p.state(); err != nil || !ready {
		t.Errorf("a controller needs no programs: %v, %v", ready, err)
	}
}
