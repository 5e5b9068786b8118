package simulator

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// wireCase is a request and the expected answer: its status, its message, and no error code.
type wireCase struct {
	name, request string
	status        int
	message       string
}

func (c wireCase) check(t *testing.T, r *rackServer, header ...string) {
	t.Run(c.name, func(t *testing.T) {
		answer := r.on(t).send(c.request, header...)
		got := unmarshal[errorBody](t, answer.body)
		if answer.status != c.status || got.Message != c.message || got.ErrorCode != "" {
			t.Errorf("got %d %s, want %d %q", answer.status, answer.body, c.status, c.message)
		}
	})
}

// TestUnsupportedRequestsAreAnsweredWith501 sends requests that a rack serves and the simulator
// does not. The simulator must answer 501, because any other answer may differ from a rack's.
func TestUnsupportedRequestsAreAnsweredWith501(t *testing.T) {
	r := serveRack(t, engine.Config{})
	wireCase{"an operation", "GET /v1/groups", 501,
		"the simulator does not have group_list (GET /v1/groups), which the rack has"}.check(t, r)
	wireCase{"an operation whose parameter is neither a name nor an ID",
		"GET /v1/metrics/cpus_provisioned", 501, "the simulator does not have silo_metric " +
			"(GET /v1/metrics/{metric_name}), which the rack has"}.check(t, r)
	wireCase{"an older version", "GET /v1/ping", 501, "the simulator serves the API versions from " +
		"2026060800.0.0 to 2026073100.0.0; a rack answers 2026032500.0.0 in its older shape. Send " +
		"api-version 2026073100.0.0, or none"}.check(t, r, "Api-Version", "2026032500.0.0")
	const console = "GET /v1/instances/a/serial-console?project=default"
	wireCase{"the console of a directory", console + "&most_recent=10", 501,
		"the simulator does not have instance_serial_console " +
			"(GET /v1/instances/{instance}/serial-console), which the rack has"}.check(t, r)
	for _, offsets := range []string{"", "&most_recent=1&from_start=1"} {
		wireCase{"a console" + offsets, console + offsets, 400,
			"Exactly one of 'from_start' or 'most_recent' must be specified."}.check(t, r)
	}
	for part, fields := range map[string]string{
		"multicast_groups": `,"multicast_groups":[{"group":"m"}]`,
		"ncpus of 0":       `,"ncpus":0`,
		"transit_ips": `,"network_interfaces":{"type":"create","params":[{"name":"nic",` +
			`"description":"","vpc_name":"default","subnet_name":"default","ip_config":{"type":"v4",` +
			`"value":{"ip":{"type":"auto"},"transit_ips":["10.0.0.0/8"]}}}]}`,
	} {
		request := newInstance("new", fields)
		if part == "ncpus of 0" { // a body must not have a field twice
			request = strings.Replace(request, `"ncpus":1,`, "", 1)
		}
		wireCase{part, request, 501, "the simulator does not have an instance's " + part +
			", which the rack has"}.check(t, r)
	}
}

// TestInvalidBodiesGetTheErrorMessagesOfSerde checks messages of serde (the rack's JSON library)
// that no rack has confirmed yet. The conformance suite checks the other messages (A06).
func TestInvalidBodiesGetTheErrorMessagesOfSerde(t *testing.T) { // A06, A63
	r := serveRack(t, engine.Config{})
	const post = "POST /v1/disks?project=default "
	for _, test := range []struct{ name, request, message string }{
		{"JSON that ends in a string", post + `{"name":"d`, "EOF while parsing an object"},
		{"not JSON", post + "nope", "expected value"},
		{"a surplus comma", post + `{"name":"d",}`, "expected value"},
		{"null", post + "null", "invalid type: null, expected an object"},
		{"a list", post + "[]", "invalid type: sequence, expected an object"},
		{"a name of another type", newDisk("d", `"name":"d"`, `"name":{}`),
			"name: invalid type: map, expected a string"},
		{"a fraction for a size", newDisk("d", oneGiB, "1.5"),
			"size: invalid type: floating point `1.5`, expected u64"},
		{"a boolean for a size", newDisk("d", oneGiB, "true"),
			"size: invalid type: boolean `true`, expected u64"},
		{"a null backend", newDisk("d", blankBackend, "null"),
			"disk_backend: invalid type: null, expected an object"},
		{"a text for a backend", newDisk("d", blankBackend, `"local"`),
			`disk_backend: invalid type: string "local", expected an object`},
		{"a tag twice", newDisk("d", `"type":"blank"`, `"type":"blank","type":"blank"`),
			"disk_backend.disk_source: duplicate field `type`"},
		{"neither a name nor an ID", moving("attach", "a", "D"), "disk: " + store.InvalidNameOrID},
	} {
		wireCase{test.name, test.request, 400, "unable to parse JSON body: " + test.message}.check(t, r)
	}
}

// TestSlowOrLargeRequestsDoNotBlockOtherRequests sends incomplete requests without a token. The
// rack must still answer other requests and a reset, and must log only a part of large requests.
func TestSlowOrLargeRequestsDoNotBlockOtherRequests(t *testing.T) {
	r := serveRack(t, engine.Config{})
	begin := func(r *rackServer, request, body string) net.Conn {
		conn := looptest.Got((&net.Dialer{}).DialContext(t.Context(), "tcp",
			strings.TrimPrefix(r.url, "http://")))(t)
		looptest.Got(fmt.Fprintf(conn, "%s?project=default HTTP/1.1\r\nHost: localhost\r\n"+
			"Content-Length: 1000000\r\n\r\n%s", request, body))(t)
		return conn
	}
	for _, body := range []string{"{", "{" + strings.Repeat(" ", 100_000)} {
		for range 20 {
			defer begin(r, "POST /v1/disks", body).Close()
		}
	}
	body, slow := io.Pipe()
	go r.Admin().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPatch,
		"http://localhost/switches", body))
	_, err := io.WriteString(slow, "{")
	looptest.Must(t, err) // the admin listener has begun to read the body
	defer slow.Close()
	looptest.Await(t, "the large bodies wait", func() bool { return len(r.large) == cap(r.large) })
	r.disk("d")
	r.askAdmin("POST", "/reset", "", "*/*")
	r.demand(404, "", "GET /v1/disks/d?project=default")

	hasty := serveRack(t, engine.Config{})
	hasty.bodyTime = 50 * time.Millisecond
	for _, operation := range []string{"POST /v1/disks", "GET /v1/projects", "POST /v1/nothing"} {
		conn := begin(hasty, operation, "{")
		if _, err := io.ReadAll(conn); err != nil { // until the rack ends the connection
			t.Errorf("%s: %v", operation, err)
		}
		_ = conn.Close()
	}

	long := strings.Repeat("x", 50_000)
	for range 20 {
		r.send("POST /v1/disks/"+long+"?project="+long+" {}", "User-Agent", long)
	}
	if r.requests.bytes > 20*(4*keptText+1000) {
		t.Errorf("the log keeps %d bytes of 20 requests", r.requests.bytes)
	}
	var log requestLog
	for range 2 * keptBytes / keptText {
		log.add(adminapi.Request{Path: long[:keptText]})
	}
	if n := len(log.since(0)); n*keptText > keptBytes || n*keptText < keptBytes/4 {
		t.Errorf("a full log has %d entries", n)
	}
}

func TestTheAPIRefusesRequestsOfOtherOrigins(t *testing.T) {
	r := serveRack(t, engine.Config{APIHosts: []string{"rack.test"}})
	for value, c := range map[string]struct {
		header string
		want   int
	}{"Rack.test:80": {"Host", 200}, "evil.example": {"Host", 403},
		"http://evil.example": {"Origin", 403}, "cross-site": {"Sec-Fetch-Site", 403}} {
		if got := r.send("GET /v1/disks?project=default", c.header, value); got.status != c.want {
			t.Errorf("%s %s: HTTP %d, want %d", c.header, value, got.status, c.want)
		}
	}
}

// FuzzPageToken checks that the simulator accepts only tokens that it could have returned. The
// token of the next page must be accepted, too, and must continue the same list.
func FuzzPageToken(f *testing.F) {
	f.Fuzz(func(t *testing.T, token, last string) {
		s, err := parseToken(token)
		if err != nil {
			if answer := err.Error(); strings.ContainsAny(answer, "\n") {
				t.Fatalf("the answer has several lines: %q", answer)
			}
			return
		}
		if s.After == nil || len(token) > maxToken {
			t.Fatalf("%q is taken: %+v", token, s)
		}
		last = strings.ToValidUTF8(last, "")
		next := s.after(store.Identity{ID: last, Name: last})
		if len(*next) > maxToken {
			return
		}
		again, err := parseToken(*next)
		if err != nil || *again.After != last || again.SortBy != s.SortBy ||
			!maps.Equal(again.Parents, s.Parents) {
			t.Fatalf("%+v behind %q becomes %+v, %v", s, last, again, err)
		}
	})
}
