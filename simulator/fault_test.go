package simulator

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func (r *rackServer) fault(rule adminapi.Fault) string {
	r.t.Helper()
	return looptest.Got(r.Faults.Add(rule))(r.t)
}

// exists removes all faults and then reports whether the rack has the disk.
func (r *rackServer) exists(name string) bool {
	r.t.Helper()
	r.Faults.Clear()
	got := r.send("GET /v1/disks/" + name + "?project=default")
	if got.status != http.StatusOK && got.status != http.StatusNotFound {
		r.t.Fatalf("HTTP %d: %s", got.status, got.body)
	}
	return got.status == http.StatusOK
}

func TestTheFaultsPhaseDecidesWhetherTheOperationIsDone(t *testing.T) {
	answer := &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "no"}
	const hang = adminapi.Duration(30 * time.Millisecond)
	const answered, failed = `"no"`, `"Internal Server Error"`
	for _, test := range []struct {
		name string
		rule adminapi.Fault
		want string // a part of the refusal; "" means a broken connection
		done bool
	}{
		{"before: refused and not done", adminapi.Fault{Phase: adminapi.Before, Response: answer},
			answered, false},
		{"instead: refused and not done", adminapi.Fault{Phase: adminapi.Instead, Response: answer},
			answered, false},
		{"after: done and refused", adminapi.Fault{Phase: adminapi.After, Response: answer}, answered,
			true},
		{"an answer without a phase is instead", adminapi.Fault{Response: answer}, answered, false},
		{"cut before", adminapi.Fault{Phase: adminapi.Before, Cut: true}, "", false},
		{"cut after", adminapi.Fault{Phase: adminapi.After, Cut: true}, "", true},
		{"hang instead", adminapi.Fault{Phase: adminapi.Instead, Hang: hang}, "", false},
		{"hang after", adminapi.Fault{Phase: adminapi.After, Hang: hang}, "", true},
		{"truncated body", adminapi.Fault{TruncateBody: 20}, "", true},
		{"unwind: refused and undone", adminapi.Fault{Phase: adminapi.Unwind}, failed, false},
		{"unwind with a response of the fault", adminapi.Fault{Phase: adminapi.Unwind,
			Response: answer}, answered, false},
		{"twice: the second request finds the first one's disk", adminapi.Fault{Phase: adminapi.Twice},
			`already exists: disk \"d\"`, true},
		{"twice with a response of the fault", adminapi.Fault{Phase: adminapi.Twice, Response: answer},
			answered, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := serveRack(t, engine.Config{})
			test.rule.Operation = "disk_create"
			id := r.fault(test.rule)
			got, err := r.try(t.Context(), newDisk("d"))
			if (err != nil) != (test.want == "") || err == nil && got.status < http.StatusBadRequest ||
				!strings.Contains(got.body, test.want) {
				t.Errorf("got %d %s (%v), want a refusal with %q", got.status, got.body, err, test.want)
			}
			if got := r.Faults.List()[0].Fired; got != 1 {
				t.Errorf("the fault fired %d times, want 1", got)
			}
			requests := r.Requests()
			last := requests[len(requests)-1]
			if last.Operation != "disk_create" || !slices.Equal(last.Faults, []string{id}) {
				t.Errorf("the last entry of the log is %+v", last)
			}
			if got := r.exists("d"); got != test.done {
				t.Errorf("the disk exists: %v, want %v", got, test.done)
			}
		})
	}
}

func TestAnUnwindFaultUndoesTheCreationOfAnSSHKey(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.fault(adminapi.Fault{Phase: adminapi.Unwind, Times: 1})
	const key = `POST /v1/me/ssh-keys {"name":"k","description":"","public_key":"ssh"}`
	r.demand(http.StatusInternalServerError, "", key)
	r.demand(http.StatusNotFound, "", "GET /v1/me/ssh-keys/k")
	r.demand(http.StatusCreated, "", key)
}

func TestAFaultFiresOnlyForMatchingRequests(t *testing.T) {
	r := serveRack(t, engine.Config{})
	d := r.disk("d").ID
	r.disk("e")
	a := r.instance("a").ID
	for _, test := range []struct {
		name string
		rule adminapi.Fault
		want string // one character for each attach below: "x" if the fault fires, else "."
	}{
		{"any object", adminapi.Fault{}, "xxxxxx"},
		{"a disk by name", adminapi.Fault{Object: "d"}, "xx.xx."},
		{"a disk by ID", adminapi.Fault{Object: d}, "xx.xx."},
		{"an instance by name", adminapi.Fault{Object: "a"}, "xxxxxx"},
		{"an instance by ID", adminapi.Fault{Object: a}, "xxxxxx"},
		{"another instance", adminapi.Fault{Object: "b"}, "......"},
		{"once", adminapi.Fault{Times: 1}, "x....."},
		{"twice, after the first one", adminapi.Fault{Skip: 1, Times: 2}, ".xx..."},
		{"a token", adminapi.Fault{Bearer: testToken, Times: 1}, "x....."},
		{"another token", adminapi.Fault{Bearer: testToken + "-other"}, "......"},
		{"another operation", adminapi.Fault{Operation: "disk_view"}, "......"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.rule.Response = &adminapi.Response{Status: 503}
			test.rule.Operation = cmp.Or(test.rule.Operation, "instance_disk_attach")
			r.Faults.Clear()
			r.fault(test.rule)
			got := ""
			for _, disk := range []string{"d", d, "e", "d", d, "e"} {
				answer := r.send(fmt.Sprintf(`POST /v1/instances/%s/disks/attach {"disk":%q}`, a, disk))
				switch answer.status {
				case http.StatusAccepted:
					got += "."
				case http.StatusServiceUnavailable:
					got += "x"
				default:
					t.Fatalf("HTTP %d: %s", answer.status, answer.body)
				}
			}
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestNoFaultOfALaterPhaseFiresIfTheOperationIsPrevented(t *testing.T) {
	for at, first := range phases[:2] { // Before and Instead, which can prevent the operation
		for _, phase := range phases[at+1:] {
			for _, addedFirst := range []bool{false, true} {
				var f Faults
				both := []adminapi.Fault{{Phase: phase, Times: 1, Cut: true},
					{Phase: first, Times: 1, Cut: true}}
				if addedFirst {
					slices.Reverse(both)
				}
				for _, fault := range both {
					looptest.Got(f.Add(fault))(t)
				}
				for n, want := range []adminapi.Phase{first, phase} {
					if got := f.match(&apiRequest{}); len(got) != 1 || got[0].Phase != want {
						t.Errorf("%s and %s, request %d: %+v strike, want %s", first, phase, n, got, want)
					}
				}
			}
		}
	}
}

func TestASlowResponseBodyArrivesCompletely(t *testing.T) {
	r := serveRack(t, engine.Config{})
	for _, fault := range []adminapi.Fault{{SlowBody: adminapi.Duration(5 * time.Millisecond)},
		{SlowByte: adminapi.Duration(2 * time.Millisecond)}} {
		r.Faults.Clear()
		r.fault(fault)
		start := time.Now()
		r.demand(200, `{"status":"ok"}`, "GET /v1/ping")
		if took := time.Since(start); took < 30*time.Millisecond {
			t.Errorf("it took %s, want 8 pauses of 5 ms or 15 of 2 ms", took)
		}
	}
}

func TestInvalidFaultsAreRefused(t *testing.T) {
	for name, rule := range map[string]adminapi.Fault{
		"no operation \"disk_cretae\"": {Operation: "disk_cretae", Cut: true},
		"unknown phase \"later\"":      {Phase: "later", Cut: true},
		"it does nothing":              {Operation: "disk_create"},
		"status is 99":                 {Response: &adminapi.Response{Status: 99}},
		"probability is 1.5":           {Cut: true, Probability: 1.5},
		"cannot be negative":           {Cut: true, Times: -1},
		"no rack has the error code \"Busy\"": {Response: &adminapi.Response{Status: 503,
			ErrorCode: "Busy"}},
		"pad_bytes is -1":            {Response: &adminapi.Response{Status: 200, PadBytes: -1}},
		"cannot fail halfway":        {Operation: "disk_view", Phase: adminapi.Unwind},
		"does not read a disk again": {Operation: "disk_create", Phase: adminapi.Reread},
		"shows no device to a guest": {Operation: "disk_create",
			Device: &adminapi.DeviceFault{Never: true}},
		"deferred needs what the caller": {Operation: "disk_create", Phase: adminapi.Deferred, Delay: 1},
	} {
		var f Faults
		if _, err := f.Add(rule); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%+v: got %v, want %q", rule, err, name)
		}
	}
}

const hour = adminapi.Duration(time.Hour)

func TestADeferredRequestTakesEffectAfterItsResponse(t *testing.T) {
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
			if got, err := r.try(t.Context(), newDisk(name)); err == nil && got.status != 503 {
				t.Fatalf("the caller got HTTP %d", got.status)
			}
			if r.exists(name) {
				t.Fatal("the disk was created at once")
			}
			looptest.Must(t, r.RunDeferred(t.Context()))
			if !r.exists(name) {
				t.Fatal("the disk was not created")
			}
			var late int
			for _, request := range r.Requests() {
				if request.Deferred && request.Object == name && request.Status == http.StatusCreated {
					late++
				}
			}
			if late != 1 {
				t.Errorf("the log has %d deferred entries, want 1", late)
			}
		})
	}
}

func TestCloseDropsDeferredRequests(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Deferred, Cut: true, Delay: hour})
	if got, err := r.try(t.Context(), newDisk("d")); err == nil {
		t.Fatalf("the caller got HTTP %d", got.status)
	}
	if r.again().exists("d") {
		t.Error("a closed rack has created the disk")
	}
}

func TestAFaultDropsFieldsFromAnswers(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.disk("d")
	r.fault(adminapi.Fault{DropFields: []string{"disk_type", "read_only"}})
	for _, path := range []string{"/v1/disks/d?project=default", "/v1/disks?project=default"} {
		body := r.demand(200, `"block_size":512`, "GET "+path)
		if strings.Contains(body, "disk_type") || strings.Contains(body, "read_only") {
			t.Errorf("GET %s: %s", path, body)
		}
	}
}

func TestAFaultCanAnswerLikeAProxy(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.fault(adminapi.Fault{Operation: "ping", Response: &adminapi.Response{Status: 502,
		Body: "<html>bad gateway</html>", ContentType: "text/html", PadBytes: 1 << 20,
		Header: map[string]string{"Location": "/v1/me"}}})
	got := r.send("GET /v1/ping")
	if got.status != 502 || len(got.body) != 1<<20+24 ||
		!strings.HasSuffix(got.body, " <html>bad gateway</html>") ||
		got.header.Get("Content-Type") != "text/html" || got.header.Get("Location") != "/v1/me" {
		t.Errorf("got %d, %d bytes and %v", got.status, len(got.body), got.header)
	}
}

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
	looptest.Must(t, json.Unmarshal(r.askAdmin("GET", "/", "", "*/*").Body.Bytes(), &listed))
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

func (r *rackServer) refuses(method, path, body string, want ...string) {
	r.t.Helper()
	w := r.askAdmin(method, path, body, "*/*")
	for _, part := range want {
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), part) {
			r.t.Errorf("%s %s %s: HTTP %d: %s, want 400 with %q", method, path, body, w.Code, w.Body, part)
		}
	}
}

func TestAnUnknownFieldIsRefusedWithAListOfTheKnownFields(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.refuses("POST", "/faults", `{"colour": 1}`, `"colour"`, "response.status")
	r.refuses("PATCH", "/switches", `{"colour": 1}`, `"colour"`, "hotplug")
}

func TestInvalidHotplugModesAreRefused(t *testing.T) {
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

func TestAnInvalidDiskFaultIsRefused(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	path := "/disks/" + r.disk("d").ID + "/faults"
	for body, want := range map[string]string{
		`{}`:                                           `"read", "write" or "flush"`,
		`{"on": ["seek"]}`:                             `"seek"`,
		`{"on": ["read"], "from": 8, "to": 4}`:         "not a range",
		`{"on": ["read"], "times": -1}`:                "negative",
		`{"on": ["write"], "hang": 1}`:                 "read the body",
		`{"on": ["write"], "hang": true, "lie": true}`: "hang and lie",
		`{"on": ["read"], "lie": true}`:                "cannot lie",
		`{"on": ["read"], "fired": 1}`:                 "count",
		`{"on": ["read"], "colour": 1}`:                "known are on, from",
	} {
		r.refuses("POST", path, body, want)
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

func TestTheNumbersOfFaultsAndDisksAreLimited(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	for path, fault := range map[string]string{"/faults": `{"delay": "1ms"}`,
		"/disks/" + r.disk("d").ID + "/faults": `{"on": ["read"]}`} {
		for n := range maxFaults {
			if w := r.askAdmin("POST", path, fault, "*/*"); w.Code >= http.StatusBadRequest {
				t.Fatalf("%s, fault %d: HTTP %d: %s", path, n, w.Code, w.Body)
			}
		}
		r.refuses("POST", path, fault, "are 256", "DELETE "+path)
	}
	r.Faults.Clear()
	r.update(func(tx *store.Tx, _ string) error { // as if the rack had 19,999 disks
		disks := tx.Bucket([]byte(store.Disks.Name))
		return disks.SetSequence(disks.Sequence() + 20_000 - 2)
	})
	r.disk("last")
	const full = "Insufficient capacity: there are 20000 objects of the kind disk, and a simulated " +
		"rack keeps no more: delete some"
	for range 2 {
		r.demand(507, full, newDisk("more"))
		r.attach("a", "last") // only a creation needs space
		r.detach("a", "last")
		r.delete("disks/last")
		r.disk("last")
	}
}

func TestDiskFaultsNeedFUSE(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.refuses("POST", "/disks/"+r.disk("d").ID+"/faults", `{"on": ["read"]}`, "--disks=fuse")
}
