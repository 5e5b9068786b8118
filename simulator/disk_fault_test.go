//go:build linux

package simulator

import (
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func TestAnInvalidDiskFaultIsRefused(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	path := "/disks/" + r.disk("d").ID + "/faults"
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

func TestFaultsAndRecordsAreLimited(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	for path, fault := range map[string]string{"/faults": `{"delay": "1ms"}`,
		"/disks/" + r.disk("d").ID + "/faults": `{"on": ["read"]}`} {
		for n := range maxFaults {
			if w := r.askAdmin("POST", path, fault, "*/*"); w.Code >= http.StatusBadRequest {
				t.Fatalf("%s, fault %d: HTTP %d: %s", path, n, w.Code, w.Body)
			}
		}
		w := r.askAdmin("POST", path, fault, "*/*")
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "are 256") ||
			!strings.Contains(w.Body.String(), "DELETE "+path) {
			t.Errorf("%s, one more: HTTP %d: %s", path, w.Code, w.Body)
		}
	}
	r.Faults.Clear()
	r.update(func(tx *store.Tx, _ string) error { // as many as there can be, but one
		disks := tx.Bucket([]byte(store.Disks.Name))
		return disks.SetSequence(disks.Sequence() + 20_000 - 2)
	})
	r.disk("last")
	const full = "Insufficient capacity: there are 20000 objects of the kind disk, and a simulated " +
		"rack keeps no more: delete some"
	for range 2 {
		r.demand(507, full, newDisk("more"))
		r.attach("a", "last") // a change is no creation
		r.detach("a", "last")
		r.delete("disks/last")
		r.disk("last")
	}
}

func TestDisksThatArePlainFilesCannotFail(t *testing.T) {
	r := serveRack(t, engine.Config{})
	w := r.askAdmin("POST", "/disks/"+r.disk("d").ID+"/faults", `{"on": ["read"]}`, "*/*")
	if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "--disks=fuse") {
		t.Errorf("HTTP %d: %s, want 400 that says how to have such disks", w.Code, w.Body)
	}
}
