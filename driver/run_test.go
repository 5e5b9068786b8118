package driver

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestAPluginServesShowsItsMetricsAndEndsCleanly(t *testing.T) {
	url := rackAt(t, &moodyRack{mood: inOrder})
	before := goleak.IgnoreCurrent()
	metrics := filepath.Join(shortDir(t), "metrics.sock")
	p := run(t, []string{"--metrics-address=unix://" + metrics}, map[string]string{
		"OXIDE_HOST": url, "OXIDE_LOG_LEVEL": "debug"})
	csitest.Await(t, "the plugin is ready", func() bool {
		answer, err := probeAt(t, p.endpoint)
		return err == nil && answer.GetReady().GetValue()
	})
	text := scrape(t, metrics)
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
	p.stop()
	if log := p.log.String(); strings.Contains(log, canary) ||
		!strings.Contains(log, `"mode":"controller","rack":"127.0.0.1:`) ||
		!strings.Contains(log, `,"project":"kittens","cluster":"blue"`) {
		t.Errorf("the log is %s", log)
	}
	goleak.VerifyNone(t, before)
}

func TestB30AProcessMakesItsSocketAndLogsToItsStandardErrorOnly(t *testing.T) { // B-22, B-29
	dir := shortDir(t)
	endpoint := "unix://" + filepath.Join(dir, "csi.sock")
	env := goodEnv(map[string]string{"CSI_ENDPOINT": endpoint, "OXIDE_LOG_LEVEL": "debug",
		"OXIDE_HOST": rackAt(t, &moodyRack{mood: inOrder})})
	ctx, terminate := context.WithCancel(t.Context())
	defer terminate()
	var out bytes.Buffer
	log := &logBook{}
	status := make(chan int, 1)
	go func() { status <- Main(ctx, nil, env, &out, log) }()
	csitest.Await(t, "the plugin answers", func() bool {
		_, err := probeAt(t, endpoint)
		return err == nil
	})
	if got := names(t, dir); !slices.Equal(got, []string{"csi.sock"}) {
		t.Errorf("it has made %q", got)
	}
	info, err := os.Stat(filepath.Join(dir, "csi.sock"))
	must(t, err)
	if info.Mode().Perm()&0o007 != 0 {
		t.Errorf("others can use the socket: %v", info.Mode())
	}
	terminate()
	if got := <-status; got != 0 || out.Len() > 0 || log.String() == "" {
		t.Errorf("status %d, on standard output %q, the log %q", got, out.String(), log)
	}
}

func TestB26AMistakeEndsTheProcessWithOneLine(t *testing.T) {
	var out, log bytes.Buffer
	status := Main(t.Context(), nil, goodEnv(map[string]string{"OXIDE_MODE": "tweety"}), &out, &log)
	said := log.String()
	if status != 1 || out.Len() > 0 || strings.Count(said, "\n") != 1 ||
		!strings.Contains(said, "OXIDE_MODE") || strings.Contains(said, "tweety") {
		t.Errorf("status %d, on standard output %q, the log %q", status, out.String(), said)
	}
}

func TestAProcessKnowsItsVersion(t *testing.T) { // GI-3
	var out, log bytes.Buffer
	status := Main(t.Context(), []string{"--version"}, goodEnv(nil), &out, &log)
	if status != 0 || strings.TrimSpace(out.String()) == "" {
		t.Errorf("status %d, %q, %q", status, out.String(), log.String())
	}
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
	must(t, err)
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	must(t, err)
	return string(text)
}
