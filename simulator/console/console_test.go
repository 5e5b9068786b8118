package console

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

// hostile has markup, a terminal's escape sequence and a right-to-left override.
const hostile = "<script>alert(1)</script>\x1b[31m\u202egpj.exe\"'"

// testConsole returns a console with hostile texts. Its Admin handler adds requests to forwarded.
func testConsole(forwarded *[]string) *Console {
	c := New()
	c.Machines = func() []adminapi.Machine { return nil }
	id := "00000000-0000-0000-0000-00000000000d"
	state := adminapi.State{
		Instances: []adminapi.Instance{{Identity: adminapi.Identity{ID: "i", Name: hostile},
			RunState: hostile}},
		Disks: []adminapi.Disk{
			{Identity: adminapi.Identity{ID: id, Name: hostile, Description: hostile},
				State: adminapi.DiskState{State: hostile}},
			{Identity: adminapi.Identity{ID: "e", Name: "e", Description: `x {"name": "` +
				`<script>", "cluster": "\u001b\u202e", "` + `<script>` + `": 1}`},
				State: adminapi.DiskState{State: "attached", Instance: "i"}}},
		Snapshots: []adminapi.SnapshotRecord{{Snapshot: adminapi.Snapshot{
			Identity: adminapi.Identity{Name: hostile}, DiskID: id}}},
	}
	c.State = func() (adminapi.State, int, error) { return state, 1, nil }
	c.Version = func() (int, error) { return 1, nil }
	c.Switches = func() adminapi.Switches { return adminapi.Switches{DiskLimit: 12, Role: hostile} }
	c.Faults = func() []adminapi.ActiveFault {
		return []adminapi.ActiveFault{{ID: "1", Fault: adminapi.Fault{Object: hostile,
			Bearer: "oxide-token-secret"}}}
	}
	c.Requests = func(_ int, keep func(*adminapi.Request) bool) []adminapi.Request {
		r := adminapi.Request{Seq: 1, Time: time.Now(), Operation: hostile, Object: hostile,
			Caller: hostile, Path: "/v1/disks/" + hostile, ObjectID: id, Faults: []string{hostile}}
		if !keep(&r) {
			return nil
		}
		return []adminapi.Request{r}
	}
	c.Flights = func(_ int, keep func(*flightlog.Entry) bool) []flightlog.Entry {
		e := flightlog.Entry{Seq: 1, Time: time.Now(), Event: hostile, Outcome: hostile, Volume: hostile,
			Disk: hostile, Instance: hostile, Path: hostile, Filesystem: hostile, Detail: hostile,
			Reason: hostile}
		if !keep(&e) {
			return nil
		}
		return []flightlog.Entry{e}
	}
	c.Disk = func(string) (Disk, error) {
		return Disk{CanFail: true, Faults: []adminapi.DiskFault{{On: []string{hostile}}},
			Activity: []Activity{{Reads: 1}, {Writes: 2}}}, nil
	}
	c.Admin = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		*forwarded = append(*forwarded, r.Method+" "+r.URL.Path+" "+string(body))
	})
	return c
}

// ask sends a request such as "GET /". In header, names and values alternate. A header with an
// empty value is not sent, except Host.
func ask(h http.Handler, request string, form url.Values, header ...string) (
	w *httptest.ResponseRecorder) {
	method, path, _ := strings.Cut(request, " ")
	r := httptest.NewRequest(method, path, strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	for i := 0; i < len(header); i += 2 {
		if header[i+1] != "" || header[i] == "Host" {
			r.Header.Set(header[i], header[i+1])
		}
	}
	if host, given := r.Header["Host"]; given {
		r.Host = host[0]
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestPagesEscapeHostileTexts(t *testing.T) {
	c := testConsole(nil)
	for _, path := range []string{"/", "/?disk=" + url.QueryEscape(hostile),
		"/?said=" + url.QueryEscape(hostile), "/console/disks/00000000-0000-0000-0000-00000000000d",
		"/console/disks/e", "/console/disks/" + url.PathEscape(hostile), "/routes"} {
		w := ask(c.Handler(), "GET "+path, nil)
		text := w.Body.String()
		for _, never := range []string{"<script>", "\x1b", "\u202e", "oxide-token-secret"} {
			if strings.Contains(text, never) {
				t.Errorf("GET %s has %q", path, never)
			}
		}
		shown := strings.Contains(text, `&lt;script&gt;`) && strings.Contains(text, `\u202e`)
		if path != "/routes" && !shown {
			t.Errorf("GET %s does not show the hostile texts: HTTP %d", path, w.Code)
		}
		if got := w.Header().Get("Content-Security-Policy"); got != policy {
			t.Errorf("GET %s has the policy %q", path, got)
		}
	}
}

func TestTheConsoleRefusesRequestsOfOtherOrigins(t *testing.T) {
	var forwarded []string
	c := testConsole(&forwarded)
	c.Hosts = []string{"rack.test"}
	const own = "127.0.0.1:8080"
	handler := c.Guard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == actionPath {
			c.Handler().ServeHTTP(w, r)
			return
		}
		c.Admin.ServeHTTP(w, r)
	}))
	for _, test := range []struct{ name, request, host, origin, site, token, refused string }{
		{"curl reads", "GET /state", own, "", "", "", ""},
		{"curl changes", "POST /faults", own, "", "", "", ""},
		{"a request to localhost", "POST /faults", "localhost:8080", "", "", "", ""},
		{"a request to an IPv6 address", "POST /faults", "[::1]:8080", "", "", "", ""},
		{"a request to an IPv6 address without a port", "POST /faults", "[::1]", "", "", "", ""},
		{"a request from another machine", "POST /faults", "172.18.0.2:80", "", "", "", ""},
		{"a read by a foreign host name", "GET /state", "evil.example:8080", "", "", "", "Host"},
		{"a foreign host name", "POST /faults", "evil.example:8080", "http://evil.example:8080",
			"", c.Token, "Host"},
		{"a host name that begins with an address", "POST /faults", "127.0.0.1.evil.example", "",
			"", "", "Host"},
		{"an allowed host name", "POST /faults", "Rack.test:8080", "http://rack.test:8080",
			"", c.Token, ""},
		{"a subdomain of an allowed host name", "GET /state", "a.rack.test:8080", "", "", "", "Host"},
		{"no host name", "GET /state", "", "", "", "", "Host"},
		{"another origin", "POST /faults", own, "http://evil.example", "", c.Token, "evil.example"},
		{"another port", "DELETE /faults", own, "http://127.0.0.1:9090", "", c.Token, "9090"},
		{"another scheme", "POST /faults", own, "https://" + own, "", c.Token, "https"},
		{"a hidden origin", "POST /faults", own, "null", "", c.Token, "null"},
		{"a read by another origin", "GET /state", own, "http://evil.example", "", "", "evil.example"},
		{"our page without the token", "POST /faults", own, "http://" + own, "", "", "token"},
		{"our page with another token", "POST /faults", own, "http://" + own, "", "x", "token"},
		{"our page", "POST /faults", own, "http://" + own, "", c.Token, ""},
		{"a browser that sends no Origin", "POST /faults", own, "", "cross-site", "", "another site"},
		{"another site reads", "GET /debug/pprof/goroutine", own, "", "same-site", "", "another site"},
		{"a form without a token", "POST " + actionPath, own, "", "", "", "token"},
		{"a form of another origin", "POST " + actionPath, own, "http://evil.example",
			"", c.Token, "evil.example"},
		{"our form", "POST " + actionPath, own, "http://" + own, "", c.Token, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			forwarded = nil
			form, token := url.Values{"do": {"disarm 1"}}, test.token
			if test.request == "POST "+actionPath {
				form.Set("token", token)
				token = ""
			}
			w := ask(handler, test.request, form, "Host", test.host, "Origin", test.origin,
				"Sec-Fetch-Site", test.site, tokenHeader, token)
			switch {
			case test.refused == "" && (w.Code != http.StatusOK || len(forwarded) != 1):
				t.Errorf("HTTP %d: %s, and %q were done", w.Code, w.Body, forwarded)
			case test.refused != "" && (w.Code != http.StatusForbidden || len(forwarded) != 0 ||
				!strings.Contains(w.Body.String(), test.refused)):
				t.Errorf("HTTP %d: %s, and %q were done; want a refusal with %q", w.Code, w.Body,
					forwarded, test.refused)
			}
		})
	}
}

func TestAFormIsConvertedToARequest(t *testing.T) {
	for _, test := range []struct{ form, want string }{
		{"do=hang+x", `POST /disks/x/faults {"on":["read","write","flush"],"hang":true}`},
		{"do=slow+x", `POST /disks/x/faults {"on":["read","write","flush"],"delay":"500ms"}`},
		{"do=heal+..%2Fy", `DELETE /disks/../y/faults `},
		{`do=switch+{"full":true}`, `PATCH /switches {"full":true}`},
		{"do=arm&what=lose&operation=disk_create&times=2&object=+x",
			`POST /faults {"operation":"disk_create","object":"x","times":2,"phase":"after","cut":true}`},
		{"do=stop+x", "POST /v1/instances/x/stop"},
		{"do=arm&what=lose&times=x", `Refused: times is "x"`},
		{"do=switch+}", "Refused: the form's value for /switches is not JSON"},
		{"do=jump", `Refused: the form asks for "jump"`},
	} {
		var forwarded []string
		c := testConsole(&forwarded)
		c.Run = func(_ context.Context, method, path string) (int, []byte) {
			forwarded = append(forwarded, method+" "+path)
			return http.StatusAccepted, nil
		}
		form, err := url.ParseQuery(test.form)
		if err != nil {
			t.Fatal(err)
		}
		w := ask(http.HandlerFunc(c.act), "POST "+actionPath, form)
		got := cmp.Or(strings.Join(forwarded, "\n"), w.Body.String())
		if !strings.HasPrefix(got, test.want) || test.want == "" {
			t.Errorf("%s: %q, want %q", test.form, got, test.want)
		}
	}
}

func TestLivePagesReloadInABrowserWithoutScriptsUnlessPaused(t *testing.T) {
	for path, want := range map[string]bool{"/": true, "/?disk=x": true, "/console/disks/e": true,
		"/?pause": false, "/routes": false} {
		w := ask(testConsole(nil).Handler(), "GET "+path, nil)
		if strings.Contains(w.Body.String(), `<noscript><meta http-equiv="refresh"`) != want {
			t.Errorf("GET %s reloads: %t, want %t", path, !want, want)
		}
	}
}

func TestAnUnchangedPageIsAnsweredWith304(t *testing.T) {
	for _, path := range []string{"/", "/?disk=e", "/console/disks/e", "/console/disks/gone"} {
		get := func(c *Console, tag string) *httptest.ResponseRecorder {
			return ask(c.Handler(), "GET "+path, nil, "If-None-Match", tag)
		}
		same, reads := testConsole(nil), 0
		state := same.State
		same.State = func() (adminapi.State, int, error) { reads++; return state() }
		first := get(same, "")
		tag := first.Header().Get("ETag")
		again := get(same, tag)
		if again.Code != http.StatusNotModified || again.Body.Len() > 0 || reads != 1 {
			t.Errorf("GET %s again: HTTP %d with %d bytes, and the records were read %d times, want once",
				path, again.Code, again.Body.Len(), reads)
		}
		for what, change := range map[string]func(*Console){
			"the records": func(c *Console) {
				c.State = func() (adminapi.State, int, error) { s, _, err := state(); return s, 2, err }
			},
			"a switch": func(c *Console) {
				c.Switches = func() adminapi.Switches { return adminapi.Switches{} }
			},
			"a fault": func(c *Console) { c.Faults = func() []adminapi.ActiveFault { return nil } },
			"a request": func(c *Console) {
				c.Requests = func(int, func(*adminapi.Request) bool) []adminapi.Request { return nil }
			},
			"a flight record": func(c *Console) {
				c.Flights = func(int, func(*flightlog.Entry) bool) []flightlog.Entry { return nil }
			},
			"the simulator": func(c *Console) { c.Token = "of a simulator that started again" },
		} {
			c := testConsole(nil)
			c.Token = same.Token
			change(c)
			if got := get(c, tag); got.Code != first.Code || got.Header().Get("ETag") == tag {
				t.Errorf("GET %s after a change of %s: HTTP %d, want %d with another tag", path, what,
					got.Code, first.Code)
			}
		}
	}
}

func TestAFormSentWithoutScriptsRedirectsOnlyToConsolePages(t *testing.T) {
	for back, want := range map[string]string{
		"/?disk=x":             "/?disk=x&said=The+fault+is+removed.",
		"/console/disks/d":     "/console/disks/d?said=The+fault+is+removed.",
		"//evil.example/":      "/?said=The+fault+is+removed.",
		"http://evil.example/": "/?said=The+fault+is+removed.",
		"/switches":            "/?said=The+fault+is+removed.",
	} {
		c := testConsole(new([]string))
		form := url.Values{"do": {"disarm 1"}, "back": {back}}
		w := ask(http.HandlerFunc(c.act), "POST "+actionPath, form, "Accept", "text/html")
		if got := w.Header().Get("Location"); w.Code != http.StatusSeeOther || got != want {
			t.Errorf("back to %q: HTTP %d to %q, want %q", back, w.Code, got, want)
		}
	}
}

func TestTheConsoleShowsTheLastLinesOfASerialConsole(t *testing.T) {
	const text = "lost\r\n1\r\r\n\x1b[1;32m2\x1b[0m <b>\n3\xff\n4\x07\n"
	if got, want := lastLines(text), "1\n2 <b>\n3�\n4"; got != want {
		t.Errorf("the last lines are %q, want %q", got, want)
	}
}

func TestTheConsoleListsTheBootDiskFirst(t *testing.T) {
	disk := func(id, description string) adminapi.Disk {
		return adminapi.Disk{Identity: adminapi.Identity{ID: id, Name: id, Description: description}}
	}
	boot := "z"
	attached := []adminapi.Disk{disk("b", ""), disk("z", "the boot disk"),
		disk("a", `csi {"name":"pvc-1","claim":"shop/orders"}`), disk("c", `csi {"name":"pvc-2"}`)}
	for limit, want := range map[int]string{
		6: "*z shop/orders b pvc-2  ", 2: "*z shop/orders b pvc-2",
	} {
		var got []string
		for _, s := range newCard(adminapi.Instance{BootDiskID: &boot}, attached, limit).Slots {
			mark := ""
			if s.Boot {
				mark = "*"
			}
			got = append(got, mark+s.Label)
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("with a limit of %d the slots are %q, want %q", limit, got, want)
		}
	}
}
