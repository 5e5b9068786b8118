package simulator

import (
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

func TestTheZeroConfigServesARack(t *testing.T) {
	s := must[*Server](t)(Open(t.Context(), engine.Config{Devices: withoutDevices}))
	server := httptest.NewServer(s)
	defer server.Close()
	c := newClient(t, server.URL)
	p := must[*oxide.Project](t)(c.ProjectView(t.Context(),
		oxide.ProjectViewParams{Project: "default"}))
	if p.Name != "default" {
		t.Errorf("project %q, want default", p.Name)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

func TestEveryOperationOfTheRackHasARoute(t *testing.T) {
	names := map[string]bool{}
	for _, op := range routes {
		names[op.name] = true
		path := "/" + regexp.MustCompile(`{[^}]*}`).
			ReplaceAllString(strings.Join(op.path, "/"), "x")
		got, _, err := route(op.method, path)
		if err != nil || got.name != op.name {
			t.Errorf("%s %s leads to %+v (%v), want %s", op.method, path, got, err, op.name)
		}
	}
	for name := range served {
		if !names[name] {
			t.Errorf("%s is served but no operation of the rack", name)
		}
	}
}
