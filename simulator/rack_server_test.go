package simulator

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const testToken = "oxide-token-test"

// rackServer is a server under test with Oxide's own client.
type rackServer struct {
	*Server
	dir string
	*oxide.Client
	t   *testing.T
	url string
}

// withoutDevices is NoDevices where a rack cannot have devices: for other users than root, and on
// other systems than Linux. There only the tests of the API run.
var withoutDevices = func() Devices {
	if runtime.GOOS == "linux" && os.Geteuid() == 0 {
		return ""
	}
	return NoDevices
}()

// needGuests skips a test that looks into a guest where nobody can have one. As root on Linux
// nothing is skipped.
func needGuests(t *testing.T) {
	t.Helper()
	if withoutDevices != "" {
		t.Skip("only root on Linux can look into a guest")
	}
}

// serveRack serves a rack. Without a directory in the config it uses a new one.
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
	server := httptest.NewServer(s)
	t.Cleanup(func() {
		server.Close()
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return &rackServer{Server: s, dir: c.Dir, Client: newClient(t, server.URL), t: t, url: server.URL}
}

func newClient(t *testing.T, url string) *oxide.Client {
	t.Helper()
	c, err := oxide.NewClient(oxide.WithHost(url), oxide.WithToken(testToken),
		oxide.WithHTTPClient(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}))
	if err != nil {
		t.Fatalf("make a client: %v", err)
	}
	return c
}

// reply is the status and the header of an answer.
type reply struct {
	status int
	header http.Header
}

// call sends a request without Oxide's client. header has names and values alternately.
func (r *rackServer) call(method, path, body string, header ...string) (reply, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path,
		strings.NewReader(body))
	simtest.NoError(r.t, err)
	req.Header.Set("Authorization", "Bearer "+testToken)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	req.Host = req.Header.Get("Host") // "" for that of the URL
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return reply{resp.StatusCode, resp.Header}, string(answer)
}

func must[T any](t *testing.T) func(T, error) T {
	return func(got T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatalf("unexpected refusal: %v", err)
		}
		return got
	}
}

func (r *rackServer) blank(name string, gib uint64) oxide.DiskCreateParams {
	return oxide.DiskCreateParams{Project: "default", Body: &oxide.DiskCreate{
		Name: oxide.Name(name), Size: oxide.ByteCount(gib << 30),
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}},
		}},
	}}
}

func (r *rackServer) from(source oxide.DiskSource, name string, gib uint64) oxide.DiskCreateParams {
	p := r.blank(name, gib)
	p.Body.DiskBackend.Value = &oxide.DiskBackendDistributed{DiskSource: source}
	return p
}

func (r *rackServer) disk(name string) *oxide.Disk {
	r.t.Helper()
	return must[*oxide.Disk](r.t)(r.DiskCreate(r.t.Context(), r.blank(name, 1)))
}

func (r *rackServer) state(name string) string {
	r.t.Helper()
	d := must[*oxide.Disk](r.t)(r.DiskView(r.t.Context(),
		oxide.DiskViewParams{Disk: oxide.NameOrId(name), Project: "default"}))
	return string(d.State.State())
}

func (r *rackServer) doAttach(instance, disk string) (*oxide.Disk, error) {
	return r.InstanceDiskAttach(r.t.Context(), oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Project: "default",
		Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
}

func (r *rackServer) doDetach(instance, disk string) (*oxide.Disk, error) {
	return r.InstanceDiskDetach(r.t.Context(), oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Project: "default",
		Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
}

func (r *rackServer) doDelete(disk string) error {
	return r.DiskDelete(r.t.Context(),
		oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk), Project: "default"})
}

func (r *rackServer) doSnapshot(name, disk string) (*oxide.Snapshot, error) {
	return r.SnapshotCreate(r.t.Context(), oxide.SnapshotCreateParams{Project: "default",
		Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Disk: oxide.NameOrId(disk)}})
}

func (r *rackServer) doStop(instance string) {
	r.t.Helper()
	must[*oxide.Instance](r.t)(r.InstanceStop(r.t.Context(),
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instance), Project: "default"}))
	r.awaitState(instance, "stopped")
}

func (r *rackServer) instance(name string) *oxide.Instance {
	r.t.Helper()
	return must[*oxide.Instance](r.t)(r.InstanceView(r.t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(name), Project: "default"}))
}

func (r *rackServer) awaitState(instance, state string) {
	r.t.Helper()
	simtest.Eventually(r.t, fmt.Sprintf("instance %s to be %s", instance, state), func() bool {
		return string(r.instance(instance).RunState) == state
	})
}

// update changes the records of the project without the rules.
func (r *rackServer) update(change func(tx *store.Tx, project string) error) {
	r.t.Helper()
	simtest.NoError(r.t, r.rack.Records().Update(func(tx *store.Tx) error {
		p, _, err := store.Projects.ByName(tx, "", "default")
		if err != nil {
			return err
		}
		return change(tx, p.ID)
	}))
}

// force sets a disk to a state that no request of the API causes.
func (r *rackServer) force(name string, state store.DiskState) {
	r.t.Helper()
	r.update(func(tx *store.Tx, project string) error {
		d, _, err := store.Disks.ByName(tx, project, name)
		d.State = state
		return errors.Join(err, tx.PutDisk(d))
	})
}

// refused is a refusal in the rack's words. The zero value means no refusal.
type refused struct {
	status        int
	code, message string
}

func refusedAs(status int, code, format string, args ...any) refused {
	return refused{status, code, fmt.Sprintf(format, args...)}
}

func (want refused) check(t *testing.T, err error) {
	t.Helper()
	var got refused
	var he *oxide.HTTPError
	switch {
	case errors.As(err, &he) && he.ErrorResponse != nil:
		got = refused{he.HTTPResponse.StatusCode, he.ErrorResponse.ErrorCode,
			he.ErrorResponse.Message}
	case errors.As(err, &he):
		got = refused{he.HTTPResponse.StatusCode, "", he.RawBody}
	case err != nil:
		t.Fatalf("got error %v, want %+v", err, want)
	}
	if got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func unmarshal[T any](t *testing.T, text string) T {
	t.Helper()
	var got T
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	if err := d.Decode(&got); err != nil {
		t.Fatalf("decode %q: %v", text, err)
	}
	return got
}

func gone(kind, name string) refused {
	return refusedAs(404, "ObjectNotFound", "not found: %s with name %q", kind, name)
}

// ownDevices returns the loop devices of the rack.
func (r *rackServer) ownDevices() []loopdev.Device {
	r.t.Helper()
	return must[[]loopdev.Device](r.t)(r.rack.Plane().OwnDevices())
}

func TestMain(m *testing.M) { namespace.Main(m) }
