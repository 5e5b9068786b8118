package simulator

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func (r *rackServer) fault(rule adminapi.Fault) string {
	r.t.Helper()
	return must[string](r.t)(r.Faults.Add(rule))
}

// exists reports whether the rack has a disk, without regard to faults.
func (r *rackServer) exists(name string) bool {
	r.t.Helper()
	r.Faults.Clear()
	_, err := r.DiskView(r.t.Context(),
		oxide.DiskViewParams{Disk: oxide.NameOrId(name), Project: "default"})
	if err != nil && !errors.Is(err, oxide.ErrObjectNotFound) {
		r.t.Fatal(err)
	}
	return err == nil
}

func TestFaultsApplyInTheirPhase(t *testing.T) {
	answer := &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "no"}
	answered := refusedAs(503, "ServiceNotAvailable", "no")
	for _, test := range []struct {
		name string
		rule adminapi.Fault
		want refused // the zero value means a cut connection
		done bool
	}{
		{"before: refused and not done", adminapi.Fault{Phase: adminapi.Before, Response: answer},
			answered, false},
		{"instead: refused and not done", adminapi.Fault{Phase: adminapi.Instead, Response: answer},
			answered, false},
		{"after: done and refused", adminapi.Fault{Phase: adminapi.After, Response: answer}, answered,
			true},
		{"an answer without a phase is instead", adminapi.Fault{Response: answer}, answered, false},
		{"cut before", adminapi.Fault{Phase: adminapi.Before, Cut: true}, refused{}, false},
		{"cut after", adminapi.Fault{Phase: adminapi.After, Cut: true}, refused{}, true},
		{"hang instead", adminapi.Fault{Phase: adminapi.Instead,
			Hang: adminapi.Duration(30 * time.Millisecond)}, refused{}, false},
		{"hang after", adminapi.Fault{Phase: adminapi.After,
			Hang: adminapi.Duration(30 * time.Millisecond)}, refused{}, true},
		{"truncated body", adminapi.Fault{TruncateBody: 20}, refused{}, true},
		{"unwound: refused and undone", adminapi.Fault{Phase: adminapi.Unwind},
			refusedAs(500, "Internal", "Internal Server Error"), false},
		{"unwound with an answer of the rule's", adminapi.Fault{Phase: adminapi.Unwind, Response: answer},
			answered, false},
		{"twice: the second finds what the first made", adminapi.Fault{Phase: adminapi.Twice},
			refusedAs(400, "ObjectAlreadyExists", `already exists: disk "d"`), true},
		{"twice with an answer of the rule's", adminapi.Fault{Phase: adminapi.Twice, Response: answer},
			answered, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := serveRack(t, engine.Config{})
			test.rule.Operation = "disk_create"
			id := r.fault(test.rule)
			_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
			if test.want != (refused{}) {
				test.want.check(t, err)
			} else if err == nil || errors.As(err, new(*oxide.HTTPError)) {
				t.Errorf("got %v, want a broken connection", err)
			}
			if got := r.Faults.List()[0].Fired; got != 1 {
				t.Errorf("the rule fired %d times, want 1", got)
			}
			requests := r.Requests()
			last := requests[len(requests)-1]
			if last.Operation != "disk_create" || !slices.Equal(last.Faults, []string{id}) {
				t.Errorf("the log says %+v", last)
			}
			if got := r.exists("d"); got != test.done {
				t.Errorf("the disk exists: %v, want %v", got, test.done)
			}
		})
	}
}

func TestADelayedRequestIsCarriedOutAfterItsCallerHasGone(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Before,
		Delay: adminapi.Duration(200 * time.Millisecond)})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.DiskCreate(ctx, r.blank("d", 1)); err == nil {
		t.Fatal("the caller did not give up")
	}
	if r.exists("d") {
		t.Fatal("it was not delayed")
	}
	simtest.Eventually(t, "the disk to be there", func() bool { return r.exists("d") })
}

func TestFaultsMatchTheirRequests(t *testing.T) {
	r := serveRack(t, engine.Config{})
	d := r.disk("d")
	r.disk("e")
	attach := func(instance, disk string) bool {
		_, err := r.InstanceDiskAttach(t.Context(), oxide.InstanceDiskAttachParams{
			Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
		if err != nil && !errors.Is(err, oxide.ErrHTTP503) {
			t.Fatal(err)
		}
		return err != nil
	}
	a := r.instance("a").Id
	answer := &adminapi.Response{Status: 503}
	for _, test := range []struct {
		name string
		rule adminapi.Fault
		want []bool // for attaches of d by name, d by ID, e, and again
	}{
		{"any object", adminapi.Fault{}, []bool{true, true, true, true, true, true}},
		{"a disk by name", adminapi.Fault{Object: "d"}, []bool{true, true, false, true, true, false}},
		{"a disk by ID", adminapi.Fault{Object: d.Id}, []bool{true, true, false, true, true, false}},
		{"an instance by name", adminapi.Fault{Object: "a"}, []bool{true, true, true, true, true, true}},
		{"an instance by ID", adminapi.Fault{Object: a}, []bool{true, true, true, true, true, true}},
		{"another", adminapi.Fault{Object: "b"}, []bool{false, false, false, false, false, false}},
		{"once", adminapi.Fault{Times: 1}, []bool{true, false, false, false, false, false}},
		{"twice, after one", adminapi.Fault{Skip: 1, Times: 2}, []bool{false, true, true, false, false,
			false}},
		{"a token", adminapi.Fault{Bearer: testToken, Times: 1},
			[]bool{true, false, false, false, false, false}},
		{"another token", adminapi.Fault{Bearer: testToken + "-other"},
			[]bool{false, false, false, false, false, false}},
		{"another operation", adminapi.Fault{Operation: "disk_view"},
			[]bool{false, false, false, false, false, false}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.rule.Response = answer
			if test.rule.Operation == "" {
				test.rule.Operation = "instance_disk_attach"
			}
			r.Faults.Clear()
			r.fault(test.rule)
			var got []bool
			for _, disk := range []string{"d", d.Id, "e", "d", d.Id, "e"} {
				got = append(got, attach(a, disk))
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestAFaultWaitsForARequestThatReachesItsPhase(t *testing.T) {
	for at, first := range phases[:2] { // those that end a request
		for _, phase := range phases[at+1:] {
			for _, addedFirst := range []bool{false, true} {
				var f Faults
				both := []adminapi.Fault{{Phase: phase, Times: 1, Cut: true},
					{Phase: first, Times: 1, Cut: true}}
				if addedFirst {
					slices.Reverse(both)
				}
				for _, fault := range both {
					must[string](t)(f.Add(fault))
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

func TestASlowBodyArrivesWhole(t *testing.T) {
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

func TestAFaultThatCannotFireIsRefused(t *testing.T) {
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
