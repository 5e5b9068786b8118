package simulator

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

const hour = adminapi.Duration(time.Hour)

func TestADeferredEffectComesAfterTheResponse(t *testing.T) {
	r := serveRack(t, engine.Config{})
	answer := &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "no"}
	for name, rule := range map[string]adminapi.Fault{
		"answered": {Response: answer},
		"cut":      {Cut: true},
		"hung":     {Hang: adminapi.Duration(20 * time.Millisecond)},
	} {
		t.Run(name, func(t *testing.T) {
			rule.Operation, rule.Phase, rule.Delay = "disk_create", adminapi.Deferred, hour
			r.fault(rule)
			if _, err := r.DiskCreate(t.Context(), r.blank(name, 1)); err == nil {
				t.Fatal("the caller was told of a success")
			}
			if r.exists(name) {
				t.Fatal("it was done at once")
			}
			simtest.NoError(t, r.RunDeferred(t.Context()))
			if !r.exists(name) {
				t.Fatal("it was not done")
			}
			var late int
			for _, request := range r.Requests() {
				if request.Deferred && request.Object == name && request.Status == http.StatusCreated {
					late++
				}
			}
			if late != 1 {
				t.Errorf("the log has %d late entries, want 1", late)
			}
		})
	}
}

func TestCloseDropsDeferredRequests(t *testing.T) {
	dir := t.TempDir()
	s := must[*Server](t)(Open(t.Context(), engine.Config{Dir: dir, Token: testToken,
		Devices: withoutDevices}))
	server := httptest.NewServer(s)
	defer server.Close()
	if _, err := s.Faults.Add(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Deferred,
		Cut:   true,
		Delay: hour}); err != nil {
		t.Fatal(err)
	}
	r := &rackServer{Server: s, Client: newClient(t, server.URL), t: t}
	if _, err := r.DiskCreate(t.Context(), r.blank("d", 1)); err == nil {
		t.Fatal("the caller was told of a success")
	}
	simtest.NoError(t, s.Close())
	if again := serveRack(t, engine.Config{Dir: dir}); again.exists("d") {
		t.Error("it was done by a rack that was closed")
	}
}

func TestAFaultDropsTheFieldsOfAnotherRelease(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.disk("d")
	r.fault(adminapi.Fault{DropFields: []string{"disk_type", "read_only"}})
	for _, path := range []string{"/v1/disks/d?project=default", "/v1/disks?project=default"} {
		_, body := r.call("GET", path, "")
		if strings.Contains(body, "disk_type") || strings.Contains(body, "read_only") ||
			!strings.Contains(body, `"block_size":512`) {
			t.Errorf("GET %s: %s", path, body)
		}
	}
}

func TestAFaultRespondsAsAProxyWould(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.fault(adminapi.Fault{Operation: "ping", Response: &adminapi.Response{Status: 502,
		Body: "<html>bad gateway</html>", ContentType: "text/html", PadBytes: 1 << 20,
		Header: map[string]string{"Location": "/v1/me"}}})
	resp, body := r.call("GET", "/v1/ping", "")
	if resp.status != 502 || len(body) != 1<<20+24 ||
		!strings.HasSuffix(body, " <html>bad gateway</html>") ||
		resp.header.Get("Content-Type") != "text/html" || resp.header.Get("Location") != "/v1/me" {
		t.Errorf("got %d, %d bytes and %v", resp.status, len(body), resp.header)
	}
}
