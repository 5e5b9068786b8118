// Package racktest serves a scripted rack for tests. A script lists the requests that the driver
// has to send, in order, and the responses. Even responses that no working rack sends are possible.
package racktest

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The names and ids of the scripted rack's objects.
const (
	Token         = "oxide-token-tweetytweety"
	Project       = "kittens"
	Silo          = "11111111-aaaa-4bbb-8ccc-333333333333"
	ProjectID     = "11111111-aaaa-4bbb-8ccc-222222222222"
	Disk          = "6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01"
	Instance      = "0d9d1d7a-3c5e-4a37-8d51-5d3f0a1b2c03"
	OtherInstance = "0d9d1d7a-3c5e-4a37-8d51-5d3f0a1b2c04"
	Snapshot      = "b1e7a1de-2f4f-4f05-9f0e-6f2f3f4f5f06"
	Image         = "a2e7a1de-2f4f-4f05-9f0e-6f2f3f4f5f07"
)

// Exchange is an expected request and the rack's answer.
type Exchange struct {
	Want   string // "POST /v1/disks"
	Status int
	Body   string
	Cut    bool // the connection breaks instead of a response
	// Proxy omits the rack's request id, as in the response of another server.
	Proxy bool
	// Hold delays the response.
	Hold  time.Duration
	Check func(t *testing.T, body []byte)
	Query string // the request's query; empty means any
}

type script struct {
	t  *testing.T
	mu sync.Mutex
	// guarded by mu
	lines []Exchange
	// guarded by mu: the requests that were answered from the map world
	worldly map[string]bool
}

// world contains the answers to two requests that each client sends once. A script may omit them.
var world = map[string]string{ViewProject: ProjectOf(), ViewUser: UserOf(Silo)}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := r.Method + " " + r.URL.Path
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Request-Id", "r-1")
	if body := world[got]; body != "" && !s.worldly[got] &&
		(len(s.lines) == 0 || s.lines[0].Want != got) {
		s.worldly[got] = true
		_, _ = io.WriteString(w, body)
		return
	}
	if len(s.lines) == 0 || s.lines[0].Want != got {
		s.t.Errorf("unexpected request %s", got)
		http.Error(w, "unexpected", http.StatusTeapot)
		return
	}
	line := s.lines[0]
	s.lines = s.lines[1:]
	if header := r.Header.Get("Authorization"); header != "Bearer "+Token {
		s.t.Errorf("%s came with the Authorization %q", got, header)
	}
	if line.Query != "" && r.URL.RawQuery != line.Query {
		s.t.Errorf("%s came with the query %q, want %q", got, r.URL.RawQuery, line.Query)
	}
	body, _ := io.ReadAll(r.Body)
	if line.Check != nil {
		line.Check(s.t, body)
	}
	if line.Cut {
		panic(http.ErrAbortHandler)
	}
	if line.Proxy {
		w.Header().Del("X-Request-Id")
	}
	select {
	case <-time.After(line.Hold):
	case <-r.Context().Done():
	}
	w.WriteHeader(line.Status)
	_, _ = io.WriteString(w, line.Body)
}

// Error returns an error response in the rack's format. The method To adds the request.
func Error(status int, code, message string) Exchange {
	answer := map[string]string{"request_id": "r-1", "message": message}
	if code != "" {
		answer["error_code"] = code
	}
	return Exchange{Status: status, Body: JSON(answer)}
}

// To returns the exchange for this request.
func (e Exchange) To(want string) Exchange {
	e.Want = want
	return e
}

// Serve serves the script until the test ends. The test fails if the driver omits a request.
func Serve(t *testing.T, lines ...Exchange) (url string) {
	t.Helper()
	s := &script{t: t, lines: lines, worldly: map[string]bool{}}
	server := httptest.NewServer(s)
	t.Cleanup(func() {
		server.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, l := range s.lines {
			t.Errorf("the driver did not send %s", l.Want)
		}
	})
	return server.URL
}

// OwnTag is the ownership tag of the volume pvc-1 of the cluster blue.
var OwnTag = volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginBlank,
	Use: volume.UseFilesystem}

// DiskOf returns the disk that the driver made for the volume pvc-1 of the cluster blue.
func DiskOf(state string, edit ...func(map[string]any)) string {
	return edited(edit, map[string]any{
		"id": Disk, "name": volume.DiskName("blue", "pvc-1"), "description": OwnTag.Description(),
		"size": 10 * volume.GiB, "block_size": 4096, "disk_type": "distributed", "read_only": false,
		"snapshot_id": nil, "image_id": nil, "device_path": "/mnt/x", "state": StateOf(state)})
}

func edited(edit []func(map[string]any), object map[string]any) string {
	object["project_id"] = ProjectID
	object["time_created"] = "2026-06-12T18:01:02.345678Z"
	object["time_modified"] = object["time_created"]
	for _, e := range edit {
		e(object)
	}
	return JSON(object)
}

// StateOf returns a disk's state as a JSON object. The text is "detached", for example, or
// "attached <instance>".
func StateOf(text string) map[string]any {
	state, instance, ok := strings.Cut(text, " ")
	if ok {
		return map[string]any{"state": state, "instance": instance}
	}
	return map[string]any{"state": state}
}

// With returns a function that sets a field of an object.
func With(key string, value any) func(map[string]any) {
	return func(object map[string]any) { object[key] = value }
}

// SnapshotOf returns a snapshot that the driver took for the cluster blue.
func SnapshotOf(state string, edit ...func(map[string]any)) string {
	return edited(edit, map[string]any{"id": Snapshot, "name": volume.SnapshotName("blue", "snap-1"),
		"description": volume.Tag{Name: "snap-1", Cluster: "blue"}.Description(), "disk_id": Disk,
		"state": state, "size": 10 * volume.GiB})
}

// InstanceOf returns an instance in this state.
func InstanceOf(runState string, edit ...func(map[string]any)) string {
	return edited(edit, map[string]any{"id": Instance, "name": "worker-1", "run_state": runState,
		"description": "", "hostname": "worker-1", "ncpus": 2, "memory": volume.GiB})
}

// ProjectOf returns the driver's project.
func ProjectOf() string {
	return JSON(map[string]any{"id": ProjectID, "name": Project, "description": ""})
}

// UserOf returns the user of the driver's token, a member of the silo.
func UserOf(silo string) string {
	return JSON(map[string]any{"id": Numbered(1), "display_name": "cat", "silo_id": silo,
		"silo_name": "cats"})
}

// PageOf returns a page of a list. The parameter next is the token of the page after it.
func PageOf(next string, items ...string) string {
	return fmt.Sprintf(`{"next_page":%s,"items":[%s]}`, JSON(next), strings.Join(items, ","))
}

// JSON encodes a value as JSON.
func JSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// At serves a handler until the test ends.
func At(t *testing.T, answer http.HandlerFunc) (url string) {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	return server.URL
}

// Dead returns an address where no server listens.
func Dead() (url string) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	return server.URL
}

// Silent returns the address of a server that reads requests and never answers.
func Silent(t *testing.T) (url string) {
	t.Helper()
	return At(t, func(_ http.ResponseWriter, r *http.Request) {
		// Go's server notices that the client is gone only after the body has been read.
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
}

// PEM encodes a certificate in PEM form.
func PEM(certificate []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})
}

// ViewDisk is the request for the disk.
const ViewDisk = "GET /v1/disks/" + Disk

// More requests, and the state of a disk that is attached to Instance.
const (
	ViewProject  = "GET /v1/projects/" + Project
	ViewUser     = "GET /v1/me"
	DeleteDisk   = "DELETE /v1/disks/" + Disk
	AttachedHere = "attached " + Instance
)

// NotFound is the answer about an unknown object. Refused is the answer to an invalid request.
var (
	NotFound = Error(404, "ObjectNotFound", "not found: it")
	Refused  = Error(400, "InvalidRequest", "the rack says no")
)

// OK returns an exchange that answers the request with 200.
func OK(want, body string) Exchange { return Exchange{Want: want, Status: 200, Body: body} }

// Numbered returns a UUID for n. The UUIDs sort like their numbers.
func Numbered(n int) string { return fmt.Sprintf("%08x-aaaa-4bbb-8ccc-222222222222", n) }
