//go:build linux

package simulator

import (
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

func TestAnInvalidFaultOfADiskIsRefused(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	path := "/disks/" + r.disk("d").Id + "/faults"
	for body, want := range map[string]string{
		`{}`:                                           `"read", "write" or "flush"`,
		`{"on": ["seek"]}`:                             `"seek"`,
		`{"on": ["read"], "from": 8, "to": 4}`:         "no range",
		`{"on": ["read"], "times": -1}`:                "negative",
		`{"on": ["write"], "hang": 1}`:                 "read the body",
		`{"on": ["write"], "hang": true, "lie": true}`: "hang and lie",
		`{"on": ["read"], "lie": true}`:                "cannot lie",
		`{"on": ["read"], "fired": 1}`:                 "count",
		`{"on": ["read"], "colour": 1}`:                "known are on, from",
	} {
		w := r.askAdmin("POST", path, body, "*/*")
		if text := w.Body.String(); w.Code != http.StatusBadRequest || !strings.Contains(text, want) {
			t.Errorf("%s: HTTP %d: %s, want 400 with %q", body, w.Code, text, want)
		}
	}
	if w := r.askAdmin("GET", path, "", "*/*"); strings.TrimSpace(w.Body.String()) != "[]" {
		t.Errorf("the disk has the faults %s, want none", w.Body)
	}
	w := r.askAdmin("POST", path,
		`{"on": ["write", "flush"], "from": 512, "to": 1024, "times": 2}`, "*/*")
	if w.Code != http.StatusNoContent {
		t.Errorf("a fault: HTTP %d: %s", w.Code, w.Body)
	}
	shown := strings.Join(strings.Fields(r.askAdmin("GET", path, "", "*/*").Body.String()), "")
	if want := `[{"on":["flush","write"],"from":512,"to":1024,"times":2}]`; shown != want {
		t.Errorf("the faults are %s, want %s", shown, want)
	}
}

func TestDisksThatArePlainFilesCannotFail(t *testing.T) {
	r := serveRack(t, engine.Config{})
	w := r.askAdmin("POST", "/disks/"+r.disk("d").Id+"/faults", `{"on": ["read"]}`, "*/*")
	if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "--disks=fuse") {
		t.Errorf("HTTP %d: %s, want 400 that says how to have such disks", w.Code, w.Body)
	}
}
