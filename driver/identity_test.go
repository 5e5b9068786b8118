package driver

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

func TestGI1AndGI2TheNameAndVersion(t *testing.T) {
	info, err := (&Identity{}).GetPluginInfo(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if info.GetName() != "csi.oxide.computer" || info.GetVendorVersion() == "" {
		t.Errorf("got %v", info)
	}
	if !regexp.MustCompile(`^[a-z][-a-z0-9.]{0,61}[a-z]$`).MatchString(info.GetName()) {
		t.Errorf("%q is no name", info.GetName())
	}
}

func TestGC1CapabilitiesDependOnTheTopologyAlone(t *testing.T) {
	for _, test := range []struct {
		topology bool
		want     []csi.PluginCapability_Service_Type
	}{
		{false,
			[]csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}},
		{true, []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE,
			csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS}},
	} {
		answer, err := (&Identity{Topology: test.topology}).GetPluginCapabilities(t.Context(), nil)
		if err != nil || len(answer.GetCapabilities()) != len(test.want) {
			t.Fatalf("got %v, %v", answer, err)
		}
		for i, c := range answer.GetCapabilities() {
			if c.GetService().GetType() != test.want[i] {
				t.Errorf("got %v", answer)
			}
		}
	}
}

func TestGC1EveryModeAnswersTheSame(t *testing.T) {
	var answers []proto.Message
	for _, mode := range []Mode{ModeController, ModeNode, ModeAll} {
		p := plugin{config: Config{Mode: mode, Host: "http://127.0.0.1:1", Token: "x", Project: "p",
			InstanceID: racktest.Instance, SysfsRoot: t.TempDir(),
			Topology: []volume.Segments{{volume.TopologyPrefix + "rack": "a"}}},
			log: slog.New(slog.DiscardHandler), metrics: newMetrics()}
		server, err := p.assemble()
		if err != nil {
			t.Fatal(err)
		}
		if (server.Controller != nil) != (mode != ModeNode) ||
			(server.Node != nil) != (mode != ModeController) {
			t.Errorf("D-6: mode %s serves %v and %v", mode, server.Controller, server.Node)
		}
		answer, err := server.Identity.GetPluginCapabilities(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, answer)
	}
	csitest.SameMessage(t, answers[1], answers[0])
	csitest.SameMessage(t, answers[2], answers[0])
}

// moodyRack answers every request as its mood is, and counts.
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

func (m *moodyRack) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.served++
	w.WriteHeader(m.mood.Status)
	_, _ = w.Write([]byte(m.mood.Body))
}

func TestPR1ToPR5Probe(t *testing.T) {
	rack := &moodyRack{}
	server := httptest.NewServer(rack)
	t.Cleanup(server.Close)
	h := &rackHealth{Rack: clientFor(t, server.URL), Log: slog.New(slog.DiscardHandler),
		asked: make(chan struct{}, 1)}
	identity := &Identity{Health: h.state}
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
	fine := racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}

	expect("PR-2 before the first look", false)
	rack.set(away)
	h.look(t.Context())
	expect("PR-5 a rack that is away at the start is no reason to restart", true)
	rack.set(fine)
	h.look(t.Context())
	expect("PR-1 healthy", true)
	rack.set(away)
	h.look(t.Context())
	expect("PR-5 the rack is away", true)

	rack.set(racktest.Error(401, "Unauthorized", "credentials missing or invalid"))
	h.look(t.Context())
	_, err := probe()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.TokenRejected)
	rack.set(away)
	h.look(t.Context())
	_, err = probe()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.TokenRejected)
	rack.set(racktest.Error(403, "Forbidden", "Forbidden"))
	h.look(t.Context())
	_, err = probe()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.RoleMissing)
	rack.set(racktest.Error(404, "ObjectNotFound", "not found: project"))
	h.look(t.Context())
	_, err = probe()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.ProjectNotFound)
	rack.set(fine)
	h.look(t.Context())
	expect("PR-1 mended", true)

	before := rack.count()
	for range 100 {
		expect("PR-5 asks nobody", true)
	}
	if after := rack.count(); after != before {
		t.Errorf("a hundred probes made %d requests", after-before)
	}
}

func TestARefusedTokenIsLookedIntoAtOnce(t *testing.T) {
	rack := &moodyRack{mood: racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}}
	server := httptest.NewServer(rack)
	t.Cleanup(server.Close)
	h := &rackHealth{Rack: clientFor(t, server.URL), Log: slog.New(slog.DiscardHandler),
		asked: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.run(ctx)
	}()
	csitest.Await(t, "the first look is done", func() bool {
		ready, err := h.state()
		return ready && err == nil
	})
	rack.set(racktest.Error(401, "Unauthorized", "credentials missing or invalid"))
	h.lookSoon()
	csitest.Await(t, "the refusal is known", func() bool {
		_, err := h.state()
		return err != nil
	})
	served := rack.count()
	for range 100 {
		h.lookSoon()
	}
	cancel()
	<-ended
	if more := rack.count() - served; more > 1 {
		t.Errorf("a hundred refusals made %d more requests", more)
	}
}

func TestPR4MissingProgramsAreNamed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := toolsHealth()
	csitest.Want(t, err, codes.FailedPrecondition, csierr.ToolsMissing)
	if !strings.Contains(err.Error(), "mkfs.xfs") {
		t.Errorf("%v does not name what is missing", err)
	}
	p := plugin{config: Config{Mode: ModeNode}}
	if _, err := p.state(); err == nil {
		t.Error("a node without its programs is healthy")
	}
	p.config.Mode = ModeController
	if ready, err := p.state(); err != nil || !ready {
		t.Errorf("a controller needs no programs: %v, %v", ready, err)
	}
}
