package driver

import (
	"context"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestD45SurroundingWhitespaceIsTrimmed(t *testing.T) {
	values := map[string]string{
		"OXIDE_HOST": "https://silo.sys.example.com", "OXIDE_TOKEN": racktest.Token,
		"OXIDE_PROJECT": "kittens", "OXIDE_CLUSTER_ID": "e2e", "OXIDE_LOG_FORMAT": "json",
		"OXIDE_TOPOLOGY_RACK": "a", "OXIDE_INSTANCE_ID": racktest.Instance, "OXIDE_MAX_DISKS": "8",
	}
	want, err := ParseConfig(nil, goodEnv(values), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"\n", "\r\n", " ", "\n\n"} {
		padded := map[string]string{}
		for key, value := range values {
			padded[key] = value + end
		}
		got, err := ParseConfig(nil, goodEnv(padded), io.Discard)
		if err != nil {
			t.Errorf("with %q at the end: %v", end, err)
			continue
		}
		if got.Host != want.Host || got.Token != want.Token || got.Project != want.Project ||
			got.ClusterID != want.ClusterID || !got.LogJSON || got.MaxDisks != want.MaxDisks ||
			got.InstanceID != want.InstanceID ||
			got.Topology[0][volume.TopologyPrefix+"rack"] != "a" {
			t.Errorf("with %q at the end: got %+v", end, got)
		}
		audit, err := ParseAuditConfig([]string{"--kubectl"}, goodEnv(padded), io.Discard)
		if err != nil || audit.Host != want.Host || audit.Project != want.Project {
			t.Errorf("an audit with %q at the end: %+v, %v", end, audit, err)
		}
	}
}

func TestD45AnEmptyValueIsNotSet(t *testing.T) {
	for _, value := range []string{"", "\n", "  "} {
		for _, key := range []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_PROJECT"} {
			_, err := ParseConfig(nil, goodEnv(map[string]string{key: value}), io.Discard)
			if err == nil || !strings.HasPrefix(err.Error(), key) ||
				!strings.Contains(err.Error(), "is not set") {
				t.Errorf("%s=%q: got %v, want that it is not set", key, value, err)
			}
		}
		c, err := ParseConfig(nil, goodEnv(map[string]string{"OXIDE_CLUSTER_ID": value,
			"OXIDE_CA_FILE": value, "OXIDE_TOKEN_FILE": value, "OXIDE_TOPOLOGY": value,
			"OXIDE_METRICS_ADDRESS": value, "OXIDE_MAX_DISKS": value}), io.Discard)
		if err != nil || c.ClusterID != "" || c.CAFile != "" || c.TokenFile != "" ||
			c.Topology != nil || c.MetricsAddress != "" || c.MaxDisks != 12 {
			t.Errorf("optional settings of %q: got %+v, %v", value, c, err)
		}
	}
}

// started runs the plugin with a JSON log until it has said something at a level, and returns that.
func started(t *testing.T, level string, args []string, env map[string]string) map[string]string {
	t.Helper()
	dir, err := os.MkdirTemp("", "csi")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	env["CSI_ENDPOINT"], env["OXIDE_LOG_FORMAT"] = "unix://"+filepath.Join(dir, "csi.sock"), "json"
	env["OXIDE_STATE_DIR"] = filepath.Join(dir, "state")
	if _, given := env["OXIDE_CLUSTER_ID"]; !given {
		env["OXIDE_CLUSTER_ID"] = "blue"
	}
	config, err := ParseConfig(args, goodEnv(env), io.Discard)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	book := &logBook{}
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config, book) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	var found map[string]string
	csitest.Await(t, "the log has a line of level "+level, func() bool {
		for line := range strings.Lines(book.String()) {
			entry := map[string]string{}
			err := json.Unmarshal([]byte(line), &entry)
			if err == nil && entry["level"] == level && found == nil {
				found = entry
			}
		}
		return found != nil
	})
	if strings.Contains(book.String(), "tweety") {
		t.Errorf("the log shows a value:\n%s", book)
	}
	return found
}

func TestAControllerWithoutAClusterIDLogsAWarning(t *testing.T) {
	line := started(t, "WARN", nil, map[string]string{"OXIDE_CLUSTER_ID": ""})
	if !strings.Contains(line["msg"], "OXIDE_CLUSTER_ID") {
		t.Errorf("the warning is %q", line["msg"])
	}
}

func TestD45AControllerLogsOneLineWhenTheRackRefusesIt(t *testing.T) {
	answering := func(e racktest.Exchange) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(e.Status)
			_, _ = io.WriteString(w, e.Body)
		}
	}
	plain := func(h http.Handler) func(*testing.T) map[string]string {
		return func(t *testing.T) map[string]string {
			server := httptest.NewServer(h)
			t.Cleanup(server.Close)
			return map[string]string{"OXIDE_HOST": server.URL}
		}
	}
	fine := answering(racktest.Exchange{Status: 200, Body: racktest.ProjectOf()})
	for _, test := range []struct {
		name  string
		rack  func(*testing.T) map[string]string
		level string
		want  []string
	}{
		{"a wrong token", plain(answering(racktest.Error(401, "Unauthorized",
			"credentials missing or invalid"))), "ERROR",
			[]string{"TokenRejected", "OXIDE_TOKEN"}},
		{"a token without a role", plain(answering(racktest.Error(403, "Forbidden", "Forbidden"))),
			"ERROR", []string{"RoleMissing", "limited-collaborator"}},
		{"an unknown project", plain(answering(racktest.Error(404, "ObjectNotFound",
			`not found: project with name "tweety"`))), "ERROR",
			[]string{"ProjectNotFound", "OXIDE_PROJECT"}},
		{"an address of something else", plain(http.NotFoundHandler()), "WARN",
			[]string{"RackUnknown", "OXIDE_HOST"}},
		{"an address where nothing listens", func(t *testing.T) map[string]string {
			server := httptest.NewServer(fine)
			server.Close()
			return map[string]string{"OXIDE_HOST": server.URL}
		}, "WARN", []string{"RackUnavailable", "OXIDE_HOST", "connection refused"}},
		{"a name that does not resolve", func(*testing.T) map[string]string {
			return map[string]string{"OXIDE_HOST": "https://tweety..invalid"}
		}, "WARN", []string{"RackUnavailable", "OXIDE_HOST"}},
		{"a certificate of an unknown authority", func(t *testing.T) map[string]string {
			return map[string]string{"OXIDE_HOST": secureRack(t, fine).URL}
		}, "WARN", []string{"RackUnavailable", "unknown authority", "OXIDE_CA_FILE"}},
		{"a certificate for another name", func(t *testing.T) map[string]string {
			server := secureRack(t, fine)
			ca := filepath.Join(t.TempDir(), "ca.pem")
			must(t, os.WriteFile(ca, racktest.PEM(server.Certificate().Raw), 0o600))
			return map[string]string{"OXIDE_CA_FILE": ca,
				"OXIDE_HOST": strings.Replace(server.URL, "127.0.0.1", "localhost", 1)}
		}, "WARN", []string{"RackUnavailable", "other names than the one in OXIDE_HOST"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			line := started(t, test.level, nil, test.rack(t))
			for _, want := range test.want {
				if !strings.Contains(line["msg"]+" "+line["error"], want) {
					t.Errorf("the line %v lacks %q", line, want)
				}
			}
			if strings.Contains(line["error"], "rpc error") ||
				strings.Contains(line["error"], "127.0.0.1") ||
				strings.Contains(line["error"], "localhost") {
				t.Errorf("the line %v shows gRPC's words or an address", line)
			}
		})
	}
}

// secureRack serves HTTPS, and does not log lost connections.
func secureRack(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

func TestDangerousSettingsAreLoggedAtStart(t *testing.T) {
	for _, test := range []struct {
		host, cluster string
		want          []string
	}{
		{"http://10.96.77.77", "blue", []string{"OXIDE_HOST"}},
		{"http://rack.example.com:8080", "blue", []string{"OXIDE_HOST"}},
		{"http://localhost.example.com", "blue", []string{"OXIDE_HOST"}},
		{"https://rack.example.com", "blue", nil},
		{"rack.example.com", "blue", nil},
		{"http://localhost:12220", "blue", nil},
		{"http://127.0.0.7", "blue", nil},
		{"http://[::1]:80", "blue", nil},
		{"https://rack.example.com", "", []string{"OXIDE_CLUSTER_ID"}},
		{"http://rack.example.com", "", []string{"OXIDE_HOST", "OXIDE_CLUSTER_ID"}},
	} {
		c, err := ParseConfig(nil, goodEnv(map[string]string{"OXIDE_HOST": test.host,
			"OXIDE_CLUSTER_ID": test.cluster}), io.Discard)
		must(t, err)
		var got []string
		for _, warning := range c.rackWarnings() {
			name, _, _ := strings.Cut(warning, " ")
			got = append(got, name)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s, cluster %q: warned of %q, want %q", test.host, test.cluster, got, test.want)
		}
	}
	server := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(server.Close)
	line := started(t, "WARN", nil, map[string]string{"OXIDE_HOST": server.URL,
		"OXIDE_CLUSTER_ID": ""})
	if !strings.HasPrefix(line["msg"], "OXIDE_CLUSTER_ID is not set: ") {
		t.Errorf("the log warns of %v", line)
	}
}

func TestAProblemWithTheRackIsLoggedOnce(t *testing.T) {
	rack := &moodyRack{}
	server := httptest.NewServer(rack)
	t.Cleanup(server.Close)
	book := &logBook{}
	h := &rackHealth{Rack: clientFor(t, server.URL),
		Log: newLog(Config{}, &hidden{}, book), asked: make(chan struct{}, 1)}
	for i, step := range []struct {
		mood racktest.Exchange
		want int // lines in the log from the start
	}{
		{racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}, 0},
		{racktest.Error(503, "ServiceNotAvailable", "Service Unavailable"), 1},
		{racktest.Error(503, "ServiceNotAvailable", "another sentence, as one with a number is"), 1},
		{racktest.Error(401, "Unauthorized", "credentials missing or invalid"), 2},
		{racktest.Error(401, "Unauthorized", "credentials missing or invalid"), 2},
		{racktest.Error(404, "ObjectNotFound", "not found: project"), 3},
		{racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}, 4},
		{racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}, 4},
	} {
		rack.set(step.mood)
		h.check(t.Context())
		if got := strings.Count(book.String(), "\n"); got != step.want {
			t.Fatalf("after look %d the log has %d lines, want %d:\n%s", i, got, step.want, book)
		}
	}
	if !strings.HasSuffix(book.String(), "accepts this controller again\"\n") {
		t.Errorf("the log does not end well:\n%s", book)
	}
}

func TestPR4ANodeNamesMissingProgramsAtItsStart(t *testing.T) {
	path := t.TempDir()
	for _, tool := range filesystem.Tools {
		if tool != "mkfs.xfs" && tool != "btrfs" {
			must(t, os.WriteFile(filepath.Join(path, tool), nil, 0o700))
		}
	}
	t.Setenv("PATH", path)
	line := started(t, "ERROR", []string{"--mode=node"}, map[string]string{
		"OXIDE_INSTANCE_ID": racktest.Instance, "OXIDE_SYSFS_ROOT": t.TempDir()})
	want := "ToolsMissing: the node service runs mkfs.xfs, btrfs and cannot find it"
	if !strings.HasPrefix(line["error"], want) || line["msg"] != "this node cannot stage volumes" {
		t.Errorf("got %v, want %q", line, want)
	}
}
