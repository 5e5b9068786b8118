package simulator

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// askAdmin sends a request to the admin listener.
func (r *rackServer) askAdmin(method, path, body, accept string) *httptest.ResponseRecorder {
	req := httptest.NewRequestWithContext(r.t.Context(), method, path, strings.NewReader(body))
	req.Header.Set("Accept", accept)
	req.Host = "localhost"
	w := httptest.NewRecorder()
	r.Admin().ServeHTTP(w, req)
	return w
}

func TestTheAdminListenerAnswersEveryRouteThatItLists(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	var listed []adminapi.Route
	simtest.NoError(t, json.Unmarshal(r.askAdmin("GET", "/", "", "*/*").Body.Bytes(), &listed))
	page := r.askAdmin("GET", "/routes", "", "text/html").Body.String()
	for _, route := range listed {
		path := strings.NewReplacer("{id}", "1", "{name}", "none", "{disk}", "none").
			Replace(route.Path)
		w := r.askAdmin(route.Method, path, route.Body, "*/*")
		if text := w.Body.String(); w.Code >= http.StatusBadRequest &&
			(path == route.Path || !strings.Contains(text, "there is no")) {
			t.Errorf("%s %s: HTTP %d: %s", route.Method, route.Path, w.Code, text)
		}
		if !strings.Contains(page, route.Does) {
			t.Errorf("the page lacks %s %s", route.Method, route.Path)
		}
	}
	if len(listed) != len(adminapi.Routes) {
		t.Errorf("%d routes are listed, want %d", len(listed), len(adminapi.Routes))
	}
}

func TestAnUnknownFieldIsRefusedWithAListOfTheKnownFields(t *testing.T) {
	r := serveRack(t, engine.Config{})
	for path, want := range map[string]string{"/faults": "response.status", "/switches": "hotplug"} {
		method := map[string]string{"/faults": "POST", "/switches": "PATCH"}[path]
		w := r.askAdmin(method, path, `{"colour": 1}`, "*/*")
		if text := w.Body.String(); w.Code != http.StatusBadRequest ||
			!strings.Contains(text, `"colour"`) || !strings.Contains(text, want) {
			t.Errorf("%s: HTTP %d: %s", path, w.Code, text)
		}
	}
}

func TestAHotplugThatNoRackHasIsRefusedWithItsReason(t *testing.T) {
	for words, want := range map[adminapi.Hotplug]string{
		"":                             "begin with full, attach-only or none",
		"sometimes":                    "begin with full, attach-only or none",
		"full,slowly":                  `unknown behaviour "slowly"`,
		"none,record-first":            "a rack with none cannot have record-first",
		"none,refusals-500":            "a rack with none cannot have refusals-500",
		"attach-only,surprise-removal": "a rack with attach-only cannot have surprise-removal",
	} {
		if err := words.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", words, err, want)
		}
	}
	all := adminapi.HotplugFull.With(adminapi.RecordFirst, adminapi.RefusalsAs500,
		adminapi.SurpriseRemoval)
	if err := all.Check(); err != nil {
		t.Error(err)
	}
}
