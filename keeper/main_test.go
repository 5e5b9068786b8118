package keeper

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func (w *fixture) kubeconfig() string {
	w.t.Helper()
	config, _ := w.api.Client("kubeconfig")
	path := filepath.Join(w.t.TempDir(), "kubeconfig")
	csitest.Must(w.t, os.WriteFile(path, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q}}]
contexts: [{name: test, context: {cluster: test}}]
current-context: test
`, config.Host), 0o600))
	return path
}

func TestTheProgramEndsWithAStatus(t *testing.T) {
	for _, c := range []struct {
		args   string // separated by spaces
		env    func(string) string
		status int
		want   string // what it writes
	}{
		{"--help", env(), 0, "oxide-node-keeper move PV NODE"},
		{"leave --help", env(), 0, "Flags of oxide-node-keeper leave:"},
		{"move --help", env(), 0, "Flags of oxide-node-keeper move:"},
		{"--version", env(), 0, "devel"},
		{"--no-such", env(), 1, "oxide-node-keeper: flag provided but not defined: -no-such; see --help"},
		{"--startup-taint", env(), 1, "how to reach Kubernetes"},
		{"--startup-taint --kubeconfig=/no/such/file", env(), 1, "how to reach Kubernetes"},
		{"leave", env("K8S_NODE_NAME", ""), 1, "K8S_NODE_NAME is not set"},
		{"leave --timeout=0s", env(), 1, "--timeout is 0s; it has to be positive"},
		{"leave --no-such", env(), 1, "see --help"},
		{"leave --kubeconfig=/no/such/file", env(), 1, "how to reach Kubernetes"},
		{"move pv-1", env(), 1, "expected 2 arguments beside flags, found 1"},
		{"move pv-1 b --kubeconfig=/no/such/file", env(), 1, "how to reach Kubernetes"},
	} {
		t.Run(c.args+" "+c.want, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			got := Main(t.Context(), strings.Fields(c.args), c.env, &stdout, &stderr)
			wrote := stdout.String()
			if c.status != 0 {
				wrote = stderr.String()
			}
			if got != c.status || !strings.Contains(wrote, c.want) {
				t.Errorf("the status is %d, stdout has %q and stderr %q", got, stdout.String(),
					stderr.String())
			}
		})
	}
}

// run runs the program until met returns true, and returns its status and its output. The writers
// have no lock, so that the race detector finds goroutines that the program left running.
func (w *fixture) run(met func() bool, env func(string) string, args ...string) (int, string) {
	w.t.Helper()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	status := make(chan int, 1)
	go func() { status <- Main(ctx, args, env, &stdout, &stderr) }()
	w.await(strings.Join(args, " "), func() bool { return len(status) > 0 || met() })
	cancel()
	return <-status, stdout.String() + stderr.String()
}

func TestTheProgramLooksAfterTheNodesUntilItIsAskedToEnd(t *testing.T) {
	for format, line := range map[string]string{"text": "time=", "json": "{"} {
		w := newFixture(t, "a")
		w.wait("a", "data")
		status, wrote := w.run(func() bool { return w.plan("a") != "" },
			env("OXIDE_HOST", w.rackURL), "--cold-attach", "--kubeconfig="+w.kubeconfig(),
			"--http-endpoint=127.0.0.1:0", "--log-format="+format)
		if status != 0 || !strings.Contains(wrote, "acquired lease") {
			t.Errorf("the status is %d; it wrote\n%s", status, wrote)
		}
		for wrote := range strings.Lines(wrote) {
			if !strings.HasPrefix(wrote, line) {
				t.Errorf("a line is not %s: %s", format, wrote)
			}
		}
		if leader := w.leader(); leader != "" {
			t.Errorf("the lease is still that of %s", leader)
		}
	}
}

func TestTheProgramKeepsTheDriverOfALeavingNode(t *testing.T) {
	w := newFixture(t, "a")
	socket := filepath.Join(t.TempDir(), "leave.sock")
	status, wrote := w.run(func() bool {
		connection, err := net.Dial("unix", socket)
		if err == nil {
			_ = connection.Close()
		}
		return err == nil
	}, env("K8S_NODE_NAME", "a"), "leave", "--socket="+socket, "--kubeconfig="+w.kubeconfig())
	if status != 0 || !strings.Contains(wrote, "the node stays") {
		t.Errorf("the status is %d; it wrote\n%s", status, wrote)
	}
}

func TestTheProgramMovesAVolume(t *testing.T) {
	m := newMoving(t)
	status, wrote := m.run(func() bool { return false }, env(), "move", "pv-1", "--timeout=8s", "b",
		"--kubeconfig="+m.kubeconfig())
	if status != 0 || !strings.Contains(wrote, "belongs to the node b") {
		t.Errorf("the status is %d; it wrote\n%s", status, wrote)
	}
	m.belongs("b")
}

func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../docs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// written returns a default in one form for comparison: 1m30s and 90s become the same.
func written(text string) string {
	text = strings.ToLower(strings.Trim(text, "`\""))
	if d, err := time.ParseDuration(text); err == nil {
		return d.String()
	}
	return text
}

// spokenDefaults contains the defaults in the table for flags that have no default in the program.
var spokenDefaults = map[string]string{"node-name": "$k8s_node_name",
	"leader-election-namespace": "$k8s_namespace", "kubeconfig": "the pod's service account",
	"http-endpoint": "none"}

func TestTheDocumentationListsEveryFlag(t *testing.T) {
	var help bytes.Buffer
	if status := Main(t.Context(), []string{"--help"}, os.Getenv, &help, &help); status != 0 {
		t.Fatalf("--help ends with %d: %s", status, help.String())
	}
	program := regexp.MustCompile(`(?m)^  -([a-z-]+)(?: \S+)?\n    \t.*?(?: \(default (\S+)\))?$`)
	want := maps.Clone(spokenDefaults)
	for _, m := range program.FindAllStringSubmatch(help.String(), -1) {
		if want[m[1]] == "" && m[1] != "version" {
			want[m[1]] = written(m[2])
		}
	}
	_, table, _ := strings.Cut(page(t, "configuration.md"), "\n## The node keeper\n")
	table, _, _ = strings.Cut(table, "\n## ")
	got := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| (.*?) ?\\| .+ \\|$")
	for _, m := range row.FindAllStringSubmatch(table, -1) {
		got[m[1]] = written(m[2])
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 20 {
		t.Errorf("the program (-) and docs/configuration.md (+):\n%s", diff)
	}
}

// The types are compared by the metrics' names: a registry does not describe types, and does not
// return a vector that has no sample.
func TestTheDocumentationListsEveryMetric(t *testing.T) {
	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		NewMetrics().Registry.Describe(described)
	}()
	want := map[string]string{}
	parts := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([^}]*)\}`)
	for desc := range described {
		m := parts.FindStringSubmatch(desc.String())
		kind := "gauge"
		switch {
		case strings.HasSuffix(m[1], "_total"):
			kind = "counter"
		case strings.HasSuffix(m[1], "_seconds"):
			kind = "histogram"
		}
		labels := strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' })
		want[m[1]] = strings.Join(append([]string{kind}, slices.Sorted(slices.Values(labels))...), " ")
	}
	got := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `(oxide_node_keeper_\\w+)` \\| (\\w+) \\| (.*?) ?\\| ")
	for _, m := range row.FindAllStringSubmatch(page(t, "metrics.md"), -1) {
		labels := regexp.MustCompile(`\w+`).FindAllString(m[3], -1)
		got[m[1]] = strings.Join(append([]string{m[2]}, slices.Sorted(slices.Values(labels))...), " ")
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 5 {
		t.Errorf("the program (-) and docs/metrics.md (+):\n%s", diff)
	}
}
