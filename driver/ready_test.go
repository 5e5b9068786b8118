package driver

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
)

// readiness is what `ready` says of the plugin at an endpoint.
func readiness(t *testing.T, endpoint string) (status int, says string) {
	t.Helper()
	var said bytes.Buffer
	status = Main(t.Context(), []string{"ready"},
		goodEnv(map[string]string{"CSI_ENDPOINT": endpoint}), io.Discard, &said)
	return status, said.String()
}

func TestAProcessThatCannotWorkIsNotReadyWithTheReasonAndIsAlive(t *testing.T) {
	rackThat := func(e racktest.Exchange) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(e.Status)
			_, _ = io.WriteString(w, e.Body)
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	silent := httptest.NewServer(nil)
	silent.Close()
	for _, test := range []struct {
		name string
		env  map[string]string
		want []string // in the reason; none: ready
	}{
		{"a rack in order", map[string]string{"OXIDE_HOST": rackThat(racktest.Exchange{Status: 200,
			Body: racktest.ProjectOf()})}, nil},
		{"an address where nothing listens", map[string]string{"OXIDE_HOST": silent.URL},
			[]string{"RackUnavailable: ", "OXIDE_HOST", "connection refused"}},
		{"an address of something else", map[string]string{"OXIDE_HOST": rackThat(
			racktest.Exchange{Status: 404, Body: "no such page"})}, []string{"RackUnknown: ", "OXIDE_HOST"}},
		{"a wrong token", map[string]string{"OXIDE_HOST": rackThat(racktest.Error(401, "Unauthorized",
			"credentials missing or invalid"))}, []string{"TokenRejected: ", "OXIDE_TOKEN"}},
		{"an unknown project", map[string]string{"OXIDE_HOST": rackThat(racktest.Error(404,
			"ObjectNotFound", "not found: project"))}, []string{"ProjectNotFound: ", "OXIDE_PROJECT"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "csi")
			must(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			endpoint := "unix://" + filepath.Join(dir, "csi.sock")
			test.env["CSI_ENDPOINT"] = endpoint
			test.env["OXIDE_LIVENESS_ENDPOINT"] = "unix://" + filepath.Join(t.TempDir(), "live.sock")
			config, err := ParseConfig(nil, goodEnv(test.env), io.Discard)
			must(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- Run(ctx, config, io.Discard) }()
			defer func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
				if left := names(t, dir); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
			}()
			var status int
			var said string
			csitest.Await(t, "what it waits for is no longer the first answer", func() bool {
				status, said = readiness(t, endpoint)
				return !strings.Contains(said, "first answer") && !strings.Contains(said, "no plugin")
			})
			if (status == 0) != (test.want == nil) {
				t.Errorf("status %d, %q", status, said)
			}
			for _, want := range test.want {
				if !strings.Contains(said, want) || strings.Contains(said, "127.0.0.1") {
					t.Errorf("%q lacks %q, or shows the address", said, want)
				}
			}
			answer, err := probeAt(t, test.env["OXIDE_LIVENESS_ENDPOINT"])
			if err != nil || !answer.GetReady().GetValue() {
				t.Errorf("it would be restarted for it: %v, %v", answer, err)
			}
		})
	}
}

func probeAt(t *testing.T, endpoint string) (*csi.ProbeResponse, error) {
	t.Helper()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { _ = conn.Close() }()
	return csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{})
}

func TestAnEndpointWhereNoPluginServesIsNotReady(t *testing.T) {
	for endpoint, want := range map[string]string{
		"":                                     "CSI_ENDPOINT",
		"tcp://127.0.0.1:1":                    "unix:///path/name.sock",
		"unix://" + t.TempDir() + "/none.sock": "no plugin serves at CSI_ENDPOINT",
	} {
		if status, says := readiness(t, endpoint); status != 1 || !strings.Contains(says, want) {
			t.Errorf("%q: status %d, %q; want %q", endpoint, status, says, want)
		}
	}
}
