package rack

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

const someID = "5e1a9c0e-0c53-4a1c-8f0e-7a3e8f6f0a11"

// A response about another object, or without what the driver decides from, is no response.
func TestOX12AResponseThatCannotBeIsRefused(t *testing.T) {
	now := time.Now()
	const largest = 1 << 62
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"an image of one byte": {
			ValidateImage(someID, &oxide.Image{Id: someID, Size: 1}), true},
		"an image of the largest size": {
			ValidateImage(someID, &oxide.Image{Id: someID, Size: largest}), true},
		"another image": {
			ValidateImage(someID, &oxide.Image{Id: "x", Size: 1}), false},
		"an image without bytes": {
			ValidateImage(someID, &oxide.Image{Id: someID}), false},
		"an image that is too large": {
			ValidateImage(someID, &oxide.Image{Id: someID, Size: largest + 1}), false},
		"a snapshot of one byte": {
			ValidateSnapshot("read", &oxide.Snapshot{Id: someID, Size: 1, TimeCreated: &now}), true},
		"a snapshot of the largest size": {
			ValidateSnapshot("read", &oxide.Snapshot{Id: someID, Size: largest, TimeCreated: &now}), true},
		"a snapshot whose id is no UUID": {
			ValidateSnapshot("read", &oxide.Snapshot{Id: "x", Size: 1, TimeCreated: &now}), false},
		"a snapshot without bytes": {
			ValidateSnapshot("read", &oxide.Snapshot{Id: someID, TimeCreated: &now}), false},
		"a snapshot that is too large": {
			ValidateSnapshot("read", &oxide.Snapshot{Id: someID, Size: largest + 1,
				TimeCreated: &now}), false},
		"a snapshot without a time": {
			ValidateSnapshot("read", &oxide.Snapshot{Id: someID, Size: 1}), false},
		"an instance with a state": {validateInstance(someID,
			&oxide.Instance{Id: someID, ProjectId: someID, RunState: "running"}), true},
		"another instance": {validateInstance(someID,
			&oxide.Instance{Id: "x", ProjectId: someID, RunState: "running"}), false},
		"an instance in no project": {validateInstance(someID,
			&oxide.Instance{Id: someID, RunState: "running"}), false},
		"an instance without a state": {validateInstance(someID,
			&oxide.Instance{Id: someID, ProjectId: someID}), false},
		"a quota that counts no CPUs":          {ValidateUtilization(&oxide.Utilization{}), false},
		"a token of one character":             {CheckToken("x"), true},
		"a token that is as long as it may be": {CheckToken(strings.Repeat("x", 4096)), true},
		"a token that is too long":             {CheckToken(strings.Repeat("x", 4097)), false},
		"no token":                             {CheckToken(""), false},
		"a token of two words":                 {CheckToken("a b"), false},
	} {
		if got := c.err == nil; got != c.want {
			t.Errorf("%s: valid is %v (%v)", name, got, c.err)
		}
	}
}

func TestASnapshotThatCannotBeReadIsNoUnknownOne(t *testing.T) {
	for name, c := range map[string]struct {
		exchange racktest.Exchange
		code     codes.Code
		reason   csierr.Reason
	}{
		"the rack fails": {racktest.Error(503, "ServiceUnavailable", "later"), codes.Unavailable, ""},
		"it is unknown": {racktest.Error(404, "ObjectNotFound", "no"), codes.NotFound,
			csierr.SnapshotNotFound},
		"it is deleted": {racktest.OK("", racktest.SnapshotOf("destroyed", racktest.With("id", someID))),
			codes.NotFound, csierr.SnapshotNotFound},
		"it is another": {racktest.OK("", racktest.SnapshotOf("ready")), codes.Unavailable,
			csierr.RackResponseInvalid},
		"it has no bytes": {racktest.OK("", racktest.SnapshotOf("ready", racktest.With("id", someID),
			racktest.With("size", 0))), codes.Unavailable, csierr.RackResponseInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			client := clientThat(t, c.exchange.To("GET /v1/snapshots/"+someID))
			snapshot, err := client.Snapshot(t.Context(), someID)
			if c.reason != "" {
				csitest.Want(t, err, c.code, c.reason)
			} else if csitest.Presentable(t, err, c.code); snapshot != nil {
				t.Errorf("and a snapshot: %+v", snapshot)
			}
		})
	}
}

func TestARequestIsRepeatedWithItsWholeBodyOrNotAtAll(t *testing.T) {
	request := func(body io.Reader) *http.Request {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://rack", body)
		must(t, err)
		return r
	}
	for name, r := range map[string]*http.Request{
		"without a body": request(nil), "with an empty body": request(http.NoBody),
	} {
		again, err := replay(r)
		if must(t, err); again.Body != nil && again.Body != http.NoBody {
			t.Errorf("%s: the copy has a body", name)
		}
	}
	first := request(bytes.NewReader([]byte("disk")))
	_, err := io.ReadAll(first.Body)
	must(t, err)
	again, err := replay(first)
	must(t, err)
	if body, err := io.ReadAll(again.Body); string(body) != "disk" || err != nil {
		t.Errorf("the copy's body is %q, %v", body, err)
	}
	if _, err := replay(request(io.MultiReader(strings.NewReader("disk")))); err == nil {
		t.Error("a body that is gone is sent again")
	}
	broken := request(bytes.NewReader([]byte("disk")))
	broken.GetBody = func() (io.ReadCloser, error) { return http.NoBody, errors.New("no") }
	if _, err := replay(broken); err == nil {
		t.Error("a body that cannot be read again is sent")
	}
}

func TestAResponseMayHaveAsManyBytesAsItsBound(t *testing.T) {
	for bound, want := range map[int64]error{4: nil, 3: errResponseTooLarge} {
		body := &boundedBody{io.NopCloser(strings.NewReader("disk")), bound}
		got := make([]byte, 4)
		if _, err := io.ReadFull(body, got); !errors.Is(err, want) {
			t.Errorf("of 4 bytes with a bound of %d: %v, want %v", bound, err, want)
		}
	}
}

func TestSettingsThatNoClientTakesAreRefused(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(empty, nil, 0o600))
	for want, o := range map[string]Options{
		"OXIDE_HOST":                      {Host: "http://[::1"},
		"OXIDE_CA_FILE (--ca-file): open": {Host: "http://rack", CAFile: empty + ".not"},
		"holds no PEM certificate":        {Host: "http://rack", CAFile: empty},
	} {
		client, _, err := New(o, &Transport{Tokens: &TokenSource{Fixed: racktest.Token}})
		if err == nil || client != nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), empty) {
			t.Errorf("got %v, %v, want %q", client, err, want)
		}
	}
}
