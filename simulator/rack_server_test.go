package simulator

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const testToken = "oxide-token-test"

type rackServer struct {
	*Server
	dir    string
	t      *testing.T
	url    string
	client *http.Client
}

// client keeps no connection open, because some tests count connections or kill the server.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// withoutDevices is NoDevices unless the tests run as root on Linux: devices need both.
var withoutDevices = func() Devices {
	if runtime.GOOS == "linux" && os.Geteuid() == 0 {
		return ""
	}
	return NoDevices
}()

func needGuests(t *testing.T) {
	t.Helper()
	if withoutDevices != "" {
		t.Skip("only root on Linux can look into a guest")
	}
}

func serveRack(t *testing.T, c engine.Config) *rackServer {
	t.Helper()
	if c.Dir == "" {
		c.Dir = t.TempDir()
	}
	if c.Instances == nil {
		c.Instances = []engine.InstanceSpec{{Name: "a"}, {Name: "b"}, {Name: "idle", Stopped: true}}
	}
	c.Token = testToken
	if c.FlakyDisks {
		needGuests(t)
	}
	c.Devices = cmp.Or(c.Devices, withoutDevices)
	c.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	s, err := Open(t.Context(), c)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	server := httptest.NewServer(watch(t, s))
	t.Cleanup(func() {
		server.Close()
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return &rackServer{s, c.Dir, t, server.URL, client}
}

// watch wraps each rack's handler. TestAnswersMatchThePublishedSchema replaces this function.
var watch = func(_ *testing.T, s http.Handler) http.Handler { return s }

type reply struct {
	status int
	header http.Header
	body   string
}

// try sends a request such as "METHOD PATH BODY". The header's names and values alternate.
func (r *rackServer) try(ctx context.Context, request string, header ...string) (reply, error) {
	method, rest, _ := strings.Cut(request, " ")
	path, body, _ := strings.Cut(rest, " ")
	req, err := http.NewRequestWithContext(ctx, method, r.url+path, strings.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	req.Host = req.Header.Get("Host") // "" means the host of the URL
	resp, err := r.client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(text)}, err
}

func (r *rackServer) send(request string, header ...string) reply {
	r.t.Helper()
	got, err := r.try(r.t.Context(), request, header...)
	if err != nil {
		r.t.Fatalf("%.200s: %v", request, err)
	}
	return got
}

// demand sends a request and returns the body. It checks the status and a part of the answer.
func (r *rackServer) demand(status int, part, request string) string {
	r.t.Helper()
	got := r.send(request)
	if got.status != status || !strings.Contains(got.body, part) {
		r.t.Fatalf("%.500s: got %d %s\nwant %d with %s", request, got.status, got.body, status, part)
	}
	return got.body
}

var identities = regexp.MustCompile(`NAME=([a-z0-9-]+)`)

// play sends the requests of a script, one in each line. A line has the wanted status, the method,
// the path below /v1/, the body and, after =>, a part of the answer. An indented line continues the
// line above. NAME=x stands for the fields name and description. oldNew has pairs: a word in the
// script and the text that replaces it. play returns the last answer.
func (r *rackServer) play(script string, oldNew ...string) (answer string) {
	r.t.Helper()
	script = identities.ReplaceAllString(strings.ReplaceAll(strings.TrimSpace(script), "\n\t", " "),
		`"name":"$1","description":""`)
	for line := range strings.Lines(strings.NewReplacer(oldNew...).Replace(script)) {
		request, part, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " => ")
		words := strings.SplitN(request, " ", 3)
		status := looptest.Got(strconv.Atoi(words[0]))(r.t)
		answer = r.demand(status, part, words[1]+" /v1/"+words[2])
	}
	return answer
}

// on returns a copy of r whose failed checks fail the subtest t.
func (r *rackServer) on(t *testing.T) *rackServer {
	sub := *r
	sub.t = t
	return &sub
}

// newDisk() puts these texts into its request. Its argument oldNew can replace them.
const (
	blankSource  = `{"type":"blank","block_size":512}`
	blankBackend = `{"type":"distributed","disk_source":` + blankSource + `}`
	oneGiB       = `1073741824`
)

// newDisk returns a request to create a disk. oldNew has pairs of a text and its replacement.
func newDisk(name string, oldNew ...string) string {
	return "POST /v1/disks?project=default " + strings.NewReplacer(oldNew...).Replace(`{"name":"`+name+
		`","description":"","size":`+oneGiB+`,"disk_backend":`+blankBackend+`}`)
}

func source(kind, id string) string {
	return fmt.Sprintf(`{"type":%q,"%s_id":%q,"read_only":false}`, kind, kind, id)
}

func (r *rackServer) disk(name string, oldNew ...string) store.Disk {
	r.t.Helper()
	return unmarshal[store.Disk](r.t, r.demand(201, "", newDisk(name, oldNew...)))
}

// view returns an object of the project "default", such as "disks/d".
func view[T any](r *rackServer, object string) T {
	r.t.Helper()
	return unmarshal[T](r.t, r.demand(200, "", "GET /v1/"+object+"?project=default"))
}

func (r *rackServer) state(disk string) string {
	r.t.Helper()
	return view[store.Disk](r, "disks/"+disk).State.State
}

// list returns all objects of a kind, such as "disks", in the project "default".
func list[T any](r *rackServer, kind string) []T {
	r.t.Helper()
	return unmarshal[page[T]](r.t,
		r.demand(200, "", "GET /v1/"+kind+"?limit=1000&project=default")).Items
}

func (r *rackServer) disks() []store.Disk { return list[store.Disk](r, "disks") }

func (r *rackServer) delete(object string) {
	r.t.Helper()
	r.demand(204, "", "DELETE /v1/"+object+"?project=default")
}

func moving(verb, instance, disk string) string {
	return fmt.Sprintf(`POST /v1/instances/%s/disks/%s?project=default {"disk":%q}`, instance, verb,
		disk)
}

func (r *rackServer) attach(instance, disk string) {
	r.t.Helper()
	r.demand(202, `"state":"attached"`, moving("attach", instance, disk))
}

func (r *rackServer) detach(instance, disk string) {
	r.t.Helper()
	r.demand(202, `"state":"detached"`, moving("detach", instance, disk))
}

func newSnapshot(name, disk string) string {
	return fmt.Sprintf(`POST /v1/snapshots?project=default {"name":%q,"description":"","disk":%q}`,
		name, disk)
}

func (r *rackServer) snapshot(name, disk string) store.Snapshot {
	r.t.Helper()
	return unmarshal[store.Snapshot](r.t, r.demand(201, `"state":"ready"`, newSnapshot(name, disk)))
}

// newInstance returns the request to create an instance, with the given further fields in its body.
func newInstance(name, more string) string {
	return fmt.Sprintf(`POST /v1/instances?project=default {"name":%q,"description":"",`+
		`"hostname":"i","ncpus":1,"memory":1073741824%s}`, name, more)
}

func (r *rackServer) instance(name string) store.Instance {
	r.t.Helper()
	return view[store.Instance](r, "instances/"+name)
}

func (r *rackServer) awaitState(instance, state string) {
	r.t.Helper()
	looptest.Await(r.t, fmt.Sprintf("instance %s to be %s", instance, state), func() bool {
		return r.instance(instance).RunState == state
	})
}

func (r *rackServer) change(verb, instance, state string) {
	r.t.Helper()
	r.demand(202, "", fmt.Sprintf("POST /v1/instances/%s/%s?project=default", instance, verb))
	r.awaitState(instance, state)
}

// update runs change() in a transaction, with the ID of the project "default".
func (r *rackServer) update(change func(tx *store.Tx, project string) error) {
	r.t.Helper()
	looptest.Must(r.t, r.rack.Records().Update(func(tx *store.Tx) {
		p, _ := store.Projects.ByName(tx, "", "default")
		tx.Check(change(tx, p.ID))
	}))
}

// force changes a disk's state in the records, because no request leads to that state.
func (r *rackServer) force(name string, state store.DiskState) {
	r.t.Helper()
	r.update(func(tx *store.Tx, project string) error {
		d, _ := store.Disks.ByName(tx, project, name)
		d.State = state
		tx.PutDisk(d)
		return nil
	})
}

func unmarshal[T any](t *testing.T, text string) T {
	t.Helper()
	var got T
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatalf("decode %q: %v", text, err)
	}
	return got
}

func (r *rackServer) ownDevices() []loopdev.Device {
	r.t.Helper()
	return looptest.Got(r.rack.Plane().OwnDevices())(r.t)
}

func TestMain(m *testing.M) { namespace.Main(m) }
