package driver

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	testToken     = "oxide-token-tweetytweety"
	testProject   = "kittens"
	testProjectID = "11111111-aaaa-4bbb-8ccc-222222222222"
	testDisk      = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01"
	testInstance  = "0d9d1d7a-3c5e-4a37-8d51-5d3f0a1b2c03"
	otherInstance = "0d9d1d7a-3c5e-4a37-8d51-5d3f0a1b2c04"
	testSnapshot  = "b1e7a1de-2f4f-4f05-9f0e-6f2f3f4f5f06"
	testImage     = "a2e7a1de-2f4f-4f05-9f0e-6f2f3f4f5f07"
)

// exchange is one request that the driver is expected to send, and what a rack answers it.
type exchange struct {
	want   string // "POST /v1/disks"
	status int
	body   string
	cut    bool // the connection breaks instead of an answer
	// check looks at the request's body.
	check func(t *testing.T, body []byte)
	query string // of the request; empty means any
}

// script is a rack that knows its lines: it expects exactly these requests, in this order. How many
// they are is the budget that an RPC has.
type script struct {
	t  *testing.T
	mu sync.Mutex
	// guarded by mu
	lines []exchange
}

// rackThat serves a script and gives a controller for it.
func rackThat(t *testing.T, lines ...exchange) *Controller {
	t.Helper()
	s := &script{t: t, lines: lines}
	server := httptest.NewServer(s)
	t.Cleanup(func() {
		server.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, l := range s.lines {
			t.Errorf("the driver did not send %s", l.want)
		}
	})
	return controllerFor(t, server.URL)
}

func controllerFor(t *testing.T, url string) *Controller {
	t.Helper()
	client, closeIdle, err := newTestClient(Config{Host: url, Token: testToken,
		Project: testProject}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(closeIdle)
	return &Controller{
		Rack: client, ClusterID: "blue",
		Log: slog.New(slog.DiscardHandler),
	}
}

// newTestClient is newClient for a test that looks neither at metrics nor at what is hidden.
func newTestClient(c Config, refused func()) (*rackClient, func(), error) {
	tokens := tokensOf(c, &hidden{}, slog.New(slog.DiscardHandler))
	return newClient(c.rackOptions(), &rackTransport{Tokens: tokens, Refused: refused})
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := r.Method + " " + r.URL.Path
	if len(s.lines) == 0 || s.lines[0].want != got {
		s.t.Errorf("unexpected request %s", got)
		http.Error(w, "unexpected", http.StatusTeapot)
		return
	}
	line := s.lines[0]
	s.lines = s.lines[1:]
	if header := r.Header.Get("Authorization"); header != "Bearer "+testToken {
		s.t.Errorf("%s came with the Authorization %q", got, header)
	}
	if line.query != "" && r.URL.RawQuery != line.query {
		s.t.Errorf("%s came with the query %q, want %q", got, r.URL.RawQuery, line.query)
	}
	body, _ := io.ReadAll(r.Body)
	if line.check != nil {
		line.check(s.t, body)
	}
	if line.cut {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(line.status)
	_, _ = io.WriteString(w, line.body)
}

// rackError is an error as the rack writes it.
func rackError(status int, code, message string) exchange {
	quoted := fmt.Sprintf("%q", code)
	if code == "" {
		return exchange{status: status, body: fmt.Sprintf(`{"request_id":"r-1","message":%q}`,
			message)}
	}
	return exchange{status: status,
		body: fmt.Sprintf(`{"request_id":"r-1","error_code":%s,"message":%q}`,
			quoted, message)}
}

// to makes the answer one to that request.
func (e exchange) to(want string) exchange {
	e.want = want
	return e
}

// ownMark is the tag of the volume pvc-1 of the cluster blue.
var ownMark = volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginBlank,
	Use: volume.UseFilesystem}

// diskOf is a disk that the driver made for the volume pvc-1 of the cluster blue.
func diskOf(state string, edit ...func(map[string]any)) string {
	disk := map[string]any{
		"id": testDisk, "name": volume.DiskName("blue", "pvc-1"), "project_id": testProjectID,
		"description": ownMark.Description(),
		"size":        10 * volume.GiB, "block_size": 4096, "disk_type": "distributed",
		"read_only": false, "snapshot_id": nil, "image_id": nil, "device_path": "/mnt/x",
		"time_created":  "2026-06-12T18:01:02.345678Z",
		"time_modified": "2026-06-12T18:01:02.345678Z",
		"state":         stateOf(state),
	}
	for _, e := range edit {
		e(disk)
	}
	return asJSON(disk)
}

// stateOf reads "attached <instance>" or "detached".
func stateOf(text string) map[string]any {
	state, instance, ok := strings.Cut(text, " ")
	if ok {
		return map[string]any{"state": state, "instance": instance}
	}
	return map[string]any{"state": state}
}

func with(key string, value any) func(map[string]any) {
	return func(object map[string]any) { object[key] = value }
}

func snapshotOf(state string, edit ...func(map[string]any)) string {
	snapshot := map[string]any{
		"id": testSnapshot, "name": volume.SnapshotName("blue", "snap-1"), "project_id": testProjectID,
		"description": volume.Tag{Name: "snap-1", Cluster: "blue"}.Description(),
		"disk_id":     testDisk, "state": state, "size": 10 * volume.GiB,
		"time_created":  "2026-06-12T18:01:02.345678Z",
		"time_modified": "2026-06-12T18:01:02.345678Z",
	}
	for _, e := range edit {
		e(snapshot)
	}
	return asJSON(snapshot)
}

func instanceOf(runState string, edit ...func(map[string]any)) string {
	instance := map[string]any{
		"id": testInstance, "name": "worker-1", "project_id": testProjectID, "run_state": runState,
		"description": "", "hostname": "worker-1", "ncpus": 2, "memory": volume.GiB,
		"time_created":  "2026-06-12T18:01:02.345678Z",
		"time_modified": "2026-06-12T18:01:02.345678Z",
	}
	for _, e := range edit {
		e(instance)
	}
	return asJSON(instance)
}

func projectOf() string {
	return asJSON(map[string]any{"id": testProjectID, "name": testProject, "description": ""})
}

func pageOf(next string, items ...string) string {
	return fmt.Sprintf(`{"next_page":%s,"items":[%s]}`, asJSON(next), strings.Join(items, ","))
}

func asJSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func grpcCode(err error) codes.Code { return status.Code(err) }

// awaitCondition waits for something that another goroutine does.
func awaitCondition(t *testing.T, what string, met func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		if met() {
			return
		}
		<-time.After(2 * time.Millisecond)
	}
	t.Fatalf("it did not come to pass that %s", what)
}

// rackA is the topology of a driver that was started with rack=a.
var rackA = []volume.Segments{{volume.TopologyPrefix + "rack": "a"}}
