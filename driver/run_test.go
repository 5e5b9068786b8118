package driver

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
)

func TestAPluginServesShowsItsMetricsAndEndsCleanly(t *testing.T) {
	rack := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, racktest.ProjectOf())
	}))
	t.Cleanup(rack.Close)
	before := goleak.IgnoreCurrent()
	dir, err := os.MkdirTemp("", "csi")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket, metricsSocket := filepath.Join(dir, "csi.sock"), filepath.Join(dir, "metrics.sock")
	config, err := ParseConfig([]string{"--metrics-address=unix://" + metricsSocket},
		goodEnv(map[string]string{"OXIDE_HOST": rack.URL, "CSI_ENDPOINT": "unix://" + socket,
			"OXIDE_LOG_FORMAT": "json", "OXIDE_LOG_LEVEL": "debug"}), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	log := &logBook{}
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config, log) }()

	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	csitest.Await(t, "the plugin is ready", func() bool {
		answer, err := csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{})
		return err == nil && answer.GetReady().GetValue()
	})
	text := scrape(t, metricsSocket)
	for _, want := range []string{"go_goroutines", "process_open_fds", "oxide_csi_calls_in_flight",
		`oxide_csi_call_seconds_count{code="OK",method="Probe"}`,
		`oxide_csi_calls_total{code="OK",method="Probe",reason=""}`,
		`oxide_csi_rack_request_seconds_count{operation="project_view",status="200"} 1`,
		"oxide_csi_rack_up 1", `oxide_csi_rack_api_info{version="`, "oxide_csi_build_info{",
		`oxide_csi_changes_total{event="Formatted"} 0`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s:\n%s", want, text)
		}
	}
	_ = conn.Close()
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("B-29: got %v", err)
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("B-29: left behind: %v", left)
	}
	if strings.Contains(log.String(), canary) || !strings.Contains(log.String(),
		`"msg":"serving"`) {
		t.Errorf("the log is %s", log)
	}
	goleak.VerifyNone(t, before)
}

// scrape reads the metrics.
func scrape(t *testing.T, socket string) string {
	t.Helper()
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}
	defer transport.CloseIdleConnections()
	answer, err := (&http.Client{Transport: transport}).Get("http://plugin/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
