package keeper

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	coordinationv1 "k8s.io/api/coordination/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
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

func TestTheExitStatusIsZeroForHelpAndOneForAnError(t *testing.T) {
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
		{"--startup-taint", env(), 1, "read how to reach Kubernetes"},
		{"--startup-taint --kubeconfig=/no/such/file", env(), 1, "read how to reach Kubernetes"},
		{"leave", env("K8S_NODE_NAME", ""), 1, "K8S_NODE_NAME is not set"},
		{"leave --timeout=0s", env(), 1, "--timeout is 0s; it has to be positive"},
		{"leave --no-such", env(), 1, "see --help"},
		{"leave --kubeconfig=/no/such/file", env(), 1, "read how to reach Kubernetes"},
		{"move pv-1", env(), 1, "expected 2 arguments beside flags, found 1"},
		{"move pv-1 b --kubeconfig=/no/such/file", env(), 1, "read how to reach Kubernetes"},
	} {
		t.Run(c.args+" "+c.want, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			got := Main(t.Context(), strings.Fields(c.args), c.env, &stdout, &stderr)
			wrote := stdout.String()
			if c.status != 0 {
				wrote = stderr.String()
			}
			if got != c.status || !strings.Contains(wrote, c.want) {
				t.Errorf("the status is %d, stdout has %q and stderr %q", got, stdout.String(), stderr.String())
			}
		})
	}
}

// run runs the program until met() is true, and returns the program's status and output. stdout and
// stderr have no lock, so that the race detector finds goroutines that the program left running.
func (w *fixture) run(met func() bool, env func(string) string, args ...string) (int, string) {
	w.t.Helper()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	status := make(chan int, 1)
	go func() { status <- Main(ctx, args, env, &stdout, &stderr) }()
	csitest.Await(w.t, strings.Join(args, " "), func() bool { return len(status) > 0 || met() })
	cancel()
	return <-status, stdout.String() + stderr.String()
}

func TestTheProgramAcquiresTheLeaseAndReleasesIt(t *testing.T) {
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

func TestTheLeaveCommandEndsIfTheNodeStays(t *testing.T) {
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

func TestTheMoveCommandMovesAVolume(t *testing.T) {
	m := newMoving(t)
	status, wrote := m.run(func() bool { return false }, env(), "move", "pv-1", "--timeout=8s", "b",
		"--kubeconfig="+m.kubeconfig())
	if status != 0 || !strings.Contains(wrote, "belongs to the node b") {
		t.Errorf("the status is %d; it wrote\n%s", status, wrote)
	}
	m.belongs("b")
}

// written returns a default in a uniform form: "1m30s" and "90s" become equal.
func written(text string) string {
	text = strings.ToLower(strings.Trim(text, "`\""))
	if d, err := time.ParseDuration(text); err == nil {
		return d.String()
	}
	return text
}

// spokenDefaults contains the documented defaults of the flags for which --help prints none.
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
	page := string(csitest.Got(os.ReadFile("../docs/configuration.md"))(t))
	_, table, _ := strings.Cut(page, "\n## The node keeper\n")
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

// The test takes a metric's type from its name: a registry's descriptions contain no types, and its
// Gather does not return a vector without a sample.
func TestTheDocumentationListsEveryMetric(t *testing.T) {
	described := make(chan *prometheus.Desc, 100)
	NewMetrics().Registry.Describe(described)
	close(described)
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
		want[m[1]] = strings.TrimSpace(kind + " " + m[2]) // no metric has two labels
	}
	got := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `(oxide_node_keeper_\\w+)` \\| (\\w+) \\| (.*?) ?\\| ")
	page := string(csitest.Got(os.ReadFile("../docs/metrics.md"))(t))
	for _, m := range row.FindAllStringSubmatch(page, -1) {
		got[m[1]] = strings.TrimSpace(m[2] + " " + strings.Trim(m[3], "`"))
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 5 {
		t.Errorf("the program (-) and docs/metrics.md (+):\n%s", diff)
	}
}

var complete = map[string]string{"OXIDE_HOST": "https://rack.example.com",
	"OXIDE_PROJECT": racktest.Project, "OXIDE_TOKEN": racktest.Token, "K8S_NODE_NAME": "z",
	"K8S_NAMESPACE": "oxide"}

func env(changed ...string) func(string) string {
	set := maps.Clone(complete)
	for i := 0; i < len(changed); i += 2 {
		set[changed[i]] = changed[i+1]
	}
	return func(name string) string { return set[name] }
}

func TestSettingsAreReadFromTheArgumentsAndTheEnvironment(t *testing.T) {
	args := []string{"--cold-attach", "--settle=1s", "--window=0 2 * * 6", "--window-length=2h",
		"--log-format=json", "--log-level=warn", "--leader-election-lease-duration=30s"}
	s := csitest.Got(ParseSettings(args, env("OXIDE_TOKEN", "", "OXIDE_TOKEN_FILE", "/token ",
		"OXIDE_CA_FILE", "/ca.pem"), nil))(t)
	if !s.ColdAttach || s.Fence || s.DryRun || s.Settle != time.Second ||
		s.MinInterval != 10*time.Minute || s.Window.String() != `"0 2 * * 6" for 2h0m0s` ||
		s.NodeName != "z" || s.LeaseNamespace != "oxide" || s.LeaseDuration != 30*time.Second ||
		!s.LogJSON || s.LogLevel != slog.LevelWarn || s.TokenFile != "/token" ||
		s.Rack.CAFile != "/ca.pem" || s.Rack.Host != "https://rack.example.com" {
		t.Errorf("the settings are %+v", s)
	}
	s = csitest.Got(ParseSettings([]string{"--startup-taint", "--node-name=y",
		"--leader-election-namespace=there"}, env(), nil))(t)
	if s.NodeName != "y" || s.LeaseNamespace != "there" || s.Window != nil || s.Token == "" {
		t.Errorf("the settings are %+v", s)
	}
}

func TestInvalidSettingsAreRefused(t *testing.T) {
	for _, c := range []struct {
		args string // after --cold-attach, separated by "|"
		env  []string
		want string
	}{
		{"--drain-timeout=0s", nil, "--drain-timeout is 0s; it has to be positive"},
		{"--settle=-1s", nil, "--settle is -1s; it must not be negative"},
		{"--fence", nil, "--fence is part of --leaving-nodes"},
		{"", []string{"K8S_NODE_NAME", ""}, "K8S_NODE_NAME"},
		{"", []string{"K8S_NAMESPACE", ""}, "K8S_NAMESPACE"},
		{"--leader-election-lease-duration=2s", nil, "has to be 3s at least"},
		{"--cold-attach=false", nil, "no duty is set"},
		{"--window=every night", nil, "--window has to be a cron expression of five fields"},
		{"--window=@every 1h", nil, "--window has to be a cron expression of five fields"},
		{"--window=CRON_TZ=Moon/Tycho 0 2 * * 6", nil, "--window has to be a cron expression"},
		{"--window=0 2 30 2 *", nil, "--window has to be a time that comes"},
		{"--window=0 2 * * 6|--window-length=0s", nil, "--window has to have a positive --window-length"},
		{"--log-format=xml", nil, "--log-format has to be text or json"},
		{"--log-level=loud", nil, "flag -log-level"},
		{"now", nil, "expected 0 arguments beside flags, found 1"},
		{"", []string{"OXIDE_HOST", ""}, "OXIDE_HOST has to be an address"},
		{"", []string{"OXIDE_TOKEN", ""}, "OXIDE_TOKEN_FILE is not set"},
	} {
		t.Run(c.want, func(t *testing.T) {
			args := []string{"--cold-attach"}
			if c.args != "" {
				args = append(args, strings.Split(c.args, "|")...)
			}
			_, err := ParseSettings(args, env(c.env...), nil)
			csitest.Says(t, err, c.want)
			if err != nil && strings.Contains(err.Error(), racktest.Token) {
				t.Error("the error shows the token")
			}
		})
	}
}

func TestAMaintenanceWindowIsOpenForItsLength(t *testing.T) {
	for _, c := range []struct {
		name, window string
		length       time.Duration
		at           string
		open         bool
	}{
		{"before it", "0 2 * * 6", time.Hour, "2030-01-05T01:59:59Z", false},
		{"at its beginning", "0 2 * * 6", time.Hour, "2030-01-05T02:00:00Z", true},
		{"at its end", "0 2 * * 6", time.Hour, "2030-01-05T03:00:00Z", false},
		{"in UTC, wherever the clock is", "0 2 * * 6", time.Hour, "2030-01-05T03:30:00+01:00", true},
		{"beyond midnight", "30 23 * * *", time.Hour, "2030-01-05T00:15:00Z", true},
		{"in winter", "CRON_TZ=Europe/Zurich 0 2 * * *", time.Hour, "2030-01-05T01:30:00Z", true},
		{"over the hour that winter time repeats", "CRON_TZ=Europe/Zurich 0 1 * * *", 3 * time.Hour,
			"2030-10-27T01:59:59Z", true}, // the second 2:59 of the day
		{"after the hour that winter time repeats", "CRON_TZ=Europe/Zurich 0 1 * * *", 3 * time.Hour,
			"2030-10-27T02:00:00Z", false},
		{"when the next is in more than five years", "0 2 29 2 *", time.Hour, "2096-03-01T02:30:00Z",
			false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := csitest.Got(ParseWindow(c.window, c.length))(t)
			if got := w.open(csitest.Got(time.Parse(time.RFC3339, c.at))(t)); got != c.open {
				t.Errorf("%s is open at %s: %v", w, c.at, got)
			}
		})
	}
	if !(*Window)(nil).open(begin) {
		t.Error("without a window, operations do not begin")
	}
}

func (w *fixture) replica(node string) {
	w.t.Helper()
	k := &Keeper{Config: w.Config, Rack: w.Rack, Log: w.Log, Now: w.Now, Metrics: NewMetrics(),
		Namespace: "oxide"}
	k.Config.NodeName, k.Config.Interval = node, 50*time.Millisecond
	k.Kubernetes, _ = w.client(node)
	p := &process{keeper: k, name: node,
		settings: Settings{LeaseNamespace: "oxide", LeaseDuration: time.Second}}
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			if err := p.candidacy(ctx); err != nil {
				w.t.Error(err)
				return
			}
		}
	})
	w.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

func (w *fixture) leader() string {
	lease, ok := keepertest.Get[*coordinationv1.Lease](w.api, "oxide", component)
	if !ok || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

func TestAReplicaReleasesTheLeaseSoThatAnotherMayStopItsNode(t *testing.T) { // D-61
	w := waiting(t, "a")
	w.replica("a")
	csitest.Await(w.t, "the replica on the node gives up the lead", func() bool {
		_, led := keepertest.Get[*coordinationv1.Lease](w.api, "oxide", component)
		return led && w.leader() == ""
	})
	if w.step("a") != "" || w.plan("a") != runsHere {
		t.Errorf("the step is %s, the plan %q", w.step("a"), w.plan("a"))
	}
	w.replica("second")
	csitest.Await(w.t, "the instance is stopped", func() bool {
		w.retry()
		return w.step("a") == string(attaching)
	})
	if w.rack.state("a") != "stopped" {
		t.Errorf("the instance is %s", w.rack.state("a"))
	}
}

func TestASaveFailsIfAnotherKeeperHasWrittenTheRecords(t *testing.T) { // D-61
	w := newFixture(t, "a")
	for i, refused := range []func(error) bool{apierrors.IsAlreadyExists, apierrors.IsConflict} {
		v := csitest.Got(w.observe(t.Context()))(t)
		w.setRecord("a", record{Fenced: instanceOf("a") + strings.Repeat("x", i)}) // by another keeper
		if err := v.save(t.Context(), v.Nodes[0]); !refused(err) {
			t.Errorf("the error is %v", err)
		}
	}
}

func TestAnAttachmentThatBeginsToWaitStartsARoundAtOnce(t *testing.T) {
	w := newFixture(t)
	w.Config.Interval = time.Hour
	p := &process{keeper: w.Keeper, settings: Settings{LeaseDuration: time.Minute}}
	ctx, cancel := context.WithCancel(t.Context())
	led := make(chan bool)
	go func() { led <- p.lead(ctx) }()
	csitest.Await(w.t, "it watches", func() bool {
		for _, r := range w.api.Log() {
			if r.Verb == "watch" {
				return true
			}
		}
		return false
	})
	rounds := w.metric("rounds_total", "ok")
	keepertest.Put(w.api, va(attachFailed(mustStop, 0)).VolumeAttachment)
	csitest.Await(w.t, "another round", func() bool { return w.metric("rounds_total", "ok") > rounds })
	cancel()
	if <-led {
		t.Error("it steps aside")
	}
}

func TestAChangeStartsARoundOnlyIfAnAttachmentBeginsOrCeasesToWait(t *testing.T) {
	waits := attachFailed(mustStop, 0)
	others := func(a *storagev1.VolumeAttachment) { a.Spec.Attacher = "other.example.com" }
	goes := va(attached, deleted, detaching(mustStop)).VolumeAttachment
	waited := map[string]bool{}
	for _, c := range []struct {
		name string
		kind watch.EventType
		a    runtime.Object
		want bool
	}{
		{"not tried yet", watch.Added, va().VolumeAttachment, false},
		{"fails for another reason", watch.Modified, va(attachFailed("full", 0)).VolumeAttachment, false},
		{"waits", watch.Modified, va(waits).VolumeAttachment, true},
		{"tried again", watch.Modified, va(attachFailed(mustStop, 9)).VolumeAttachment, false},
		{"attached", watch.Modified, va(attached).VolumeAttachment, true},
		{"changed while it is attached", watch.Modified, va(attached).VolumeAttachment, false},
		{"waits to be detached", watch.Modified, goes, true},
		{"gone", watch.Deleted, goes, true},
		{"waits when the watch begins", watch.Added, va(waits).VolumeAttachment, true},
		{"gone while it waits", watch.Deleted, va(waits).VolumeAttachment, true},
		{"another driver's", watch.Added, va(waits, others).VolumeAttachment, false},
		{"the end of the watch", watch.Error, &metav1.Status{}, false},
	} {
		if got := matters(watch.Event{Type: c.kind, Object: c.a}, waited); got != c.want {
			t.Errorf("%s: it matters: %v", c.name, got)
		}
	}
	if len(waited) > 0 {
		t.Errorf("deleted attachments are still listed: %v", waited)
	}
}

func TestARequestOfADisconnectedClientDoesNotReachTheServer(t *testing.T) {
	server := keepertest.Serve(t, time.Now)
	for range 1000 {
		config, cut := server.Client("killed")
		client := csitest.Got(rest.HTTPClientFor(config))(t)
		cut()
		if response, err := client.Get(config.Host + "/api/v1/nodes"); err == nil {
			_ = response.Body.Close()
			t.Fatalf("the server answered %s", response.Status)
		}
	}
	if log := server.Log(); len(log) > 0 {
		t.Fatalf("the server got %d requests: %v …", len(log), log[0])
	}
}

func TestMetricsAndHealthAreServed(t *testing.T) {
	w := newFixture(t)
	w.round()
	w.Metrics.round(nil)
	w.Metrics.round(errBroken)
	p := &process{keeper: w.Keeper, settings: Settings{HTTPEndpoint: "127.0.0.1:0"}}
	url := racktest.At(t, p.handler().ServeHTTP)
	for path, want := range map[string]string{"/healthz": "ok",
		"/metrics": `oxide_node_keeper_rounds_total{result="error"} 1`} {
		response, err := http.Get(url + path)
		csitest.Must(t, err)
		text := string(csitest.Got(io.ReadAll(response.Body))(t))
		_ = response.Body.Close()
		if response.StatusCode != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s has the status %d and no %q:\n%s", path, response.StatusCode, want, text)
		}
	}
	stop := csitest.Got(p.serve())(t)
	stop()
	p.settings.HTTPEndpoint = "nowhere"
	csitest.Says(t, csitest.Err(p.serve()), "--http-endpoint")
}
