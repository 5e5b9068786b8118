package driver

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// readiness is what `ready` says of the plugin at an endpoint.
func readiness(t *testing.T, endpoint string) (status int, says string) {
	t.Helper()
	var said bytes.Buffer
	status = Main(t.Context(), []string{"ready"},
		goodEnv(map[string]string{"CSI_ENDPOINT": endpoint}), io.Discard, &said)
	return status, said.String()
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
