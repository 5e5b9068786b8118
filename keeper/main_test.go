package keeper

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kubeconfig writes a kubeconfig file for the cluster, and returns its path.
func (w *story) kubeconfig() string {
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
		{"", env(), 1, "no duty is set"},
		{"--startup-taint", env(), 1, "how to reach Kubernetes"},
		{"--startup-taint --kubeconfig=/no/such/file", env(), 1, "how to reach Kubernetes"},
		{"--startup-taint --kubeconfig=/no/such/file", env("OXIDE_HOST", ""), 1, "OXIDE_HOST"},
		{"leave", env("K8S_NODE_NAME", ""), 1, "K8S_NODE_NAME is not set"},
		{"leave --timeout=0s", env(), 1, "--timeout is 0s; it has to be positive"},
		{"leave now", env(), 1, "expected 0 arguments beside flags, found 1"},
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
func (w *story) run(met func() bool, env func(string) string, args ...string) (int, string) {
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
		w := newStory(t, "a")
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
	w := newStory(t, "a")
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
