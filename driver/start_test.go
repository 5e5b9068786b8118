package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestWhitespaceAfterSettingsIsTrimmed(t *testing.T) { // D-45
	values := map[string]string{
		"OXIDE_HOST": "https://silo.sys.example.com", "OXIDE_TOKEN": racktest.Token,
		"OXIDE_PROJECT": "kittens", "OXIDE_CLUSTER_ID": "e2e", "OXIDE_LOG_FORMAT": "json",
		"OXIDE_TOPOLOGY_RACK": "a", "OXIDE_INSTANCE_ID": racktest.Instance, "OXIDE_MAX_DISKS": "8",
	}
	want := csitest.Got(ParseConfig(nil, goodEnv(values), io.Discard))(t)
	for _, end := range []string{"\n", "\r\n", " ", "\n\n"} {
		padded := map[string]string{}
		for key, value := range values {
			padded[key] = value + end
		}
		got, err := ParseConfig(nil, goodEnv(padded), io.Discard)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("with %q at the end: %v, %s", end, err, diff)
		}
		audit, err := parseAudit(invocation{args: []string{"--kubectl"}, getenv: goodEnv(padded)})
		if err != nil || audit.Host != want.Host || audit.Project != want.Project {
			t.Errorf("an audit with %q at the end: %+v, %v", end, audit, err)
		}
	}
}

func TestAnEmptyValueCountsAsNotSet(t *testing.T) { // D-45
	for _, value := range []string{"", "\n", "  "} {
		for _, key := range []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_PROJECT"} {
			_, err := ParseConfig(nil, goodEnv(map[string]string{key: value}), io.Discard)
			if err == nil || !strings.HasPrefix(err.Error(), key) ||
				!strings.Contains(err.Error(), "is not set") {
				t.Errorf("%s=%q: got %v, want that it is not set", key, value, err)
			}
		}
		want := csitest.Got(ParseConfig(nil, goodEnv(map[string]string{"OXIDE_CLUSTER_ID": ""}),
			io.Discard))(t)
		c, err := ParseConfig(nil, goodEnv(map[string]string{"OXIDE_CLUSTER_ID": value,
			"OXIDE_CA_FILE": value, "OXIDE_TOKEN_FILE": value, "OXIDE_TOPOLOGY": value,
			"OXIDE_METRICS_ADDRESS": value, "OXIDE_MAX_DISKS": value}), io.Discard)
		if diff := cmp.Diff(want, c); err != nil || diff != "" {
			t.Errorf("optional settings of %q: %v, %s", value, err, diff)
		}
	}
}

func started(t *testing.T, level string, args []string, env map[string]string) map[string]string {
	t.Helper()
	p := run(t, args, env)
	defer p.stop()
	return p.line(t, level)
}

func (p *running) line(t *testing.T, level string) (found map[string]string) {
	t.Helper()
	csitest.Await(t, "the log has a line of level "+level, func() bool {
		for line := range strings.Lines(p.log.String()) {
			entry := map[string]string{}
			if json.Unmarshal([]byte(line), &entry) == nil && entry["level"] == level {
				found = entry
				return true
			}
		}
		return false
	})
	if strings.Contains(p.log.String(), "tweety") {
		t.Errorf("the log shows a value:\n%s", p.log)
	}
	return found
}

func TestAControllerReportsWhyItsRackIsUnusableAndStaysAlive(t *testing.T) { // D-45
	at := func(mood racktest.Exchange) map[string]string {
		return map[string]string{"OXIDE_HOST": racktest.At(t, moody(mood).ServeHTTP)}
	}
	secure := secureRack(t, moody(inOrder))
	ca := filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(ca, racktest.PEM(secure.Certificate().Raw), 0o600))
	// This token has no prefix by which it could be recognized, and quoting changes it.
	const echoed = `a"tweety<b\c`
	for _, test := range []struct {
		name  string
		env   map[string]string
		level string
		want  []string // words of the problem; nil means that the process is ready
	}{
		{"a rack in order", at(inOrder), "INFO", nil},
		{"a wrong token", at(badToken), "ERROR", []string{"TokenRejected: ", "OXIDE_TOKEN"}},
		{"a token that the rack's response repeats (B-16)", map[string]string{"OXIDE_TOKEN": echoed,
			"OXIDE_HOST": racktest.At(t, moody(racktest.Error(401, echoed, echoed)).ServeHTTP)}, "ERROR",
			[]string{"TokenRejected: ", "***"}},
		{"a token without a role", at(noRole), "ERROR",
			[]string{"RoleMissing: ", "limited-collaborator"}},
		{"an unknown project", at(racktest.Error(404, "ObjectNotFound",
			`not found: project with name "tweety"`)), "ERROR",
			[]string{"ProjectNotFound: ", "OXIDE_PROJECT"}},
		{"an address of another server", at(racktest.Exchange{Status: 404, Body: "no such page"}),
			"WARN", []string{"RackUnknown: ", "OXIDE_HOST"}},
		{"an address where nothing listens", map[string]string{"OXIDE_HOST": "http://127.0.0.1:1"},
			"WARN", []string{"RackUnavailable: ", "OXIDE_HOST", "connection refused",
				"connect to 127.0.0.1:1"}},
		{"a name that does not resolve", map[string]string{"OXIDE_HOST": "https://nowhere..invalid"},
			"WARN", []string{"RackUnavailable: ", "OXIDE_HOST", "connect to nowhere..invalid:443: "}},
		{"a certificate of an unknown authority", map[string]string{"OXIDE_HOST": secure.URL}, "WARN",
			[]string{"RackUnavailable: ", "unknown authority", "OXIDE_CA_FILE"}},
		{"a certificate for another name", map[string]string{"OXIDE_CA_FILE": ca,
			"OXIDE_HOST": strings.Replace(secure.URL, "127.0.0.1", "localhost", 1)}, "WARN",
			[]string{"RackUnavailable: ", "other names than the one in OXIDE_HOST"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			live := "unix://" + filepath.Join(shortDir(t), "live.sock")
			test.env["OXIDE_LIVENESS_ENDPOINT"], test.env["OXIDE_PROJECT"] = live, racktest.ProjectID
			p := run(t, nil, test.env)
			defer p.stop()
			line := p.line(t, test.level)
			var status int
			var said string
			csitest.Await(t, "it no longer waits for the first answer", func() bool {
				status, said = readiness(t, p.endpoint)
				return !strings.Contains(said, "first answer") && !strings.Contains(said, "no plugin")
			})
			if (status == 0) != (test.want == nil) {
				t.Errorf("status %d, %q", status, said)
			}
			for _, text := range []string{line["msg"] + " " + line["error"], said} {
				for _, want := range test.want {
					if !strings.Contains(text, want) {
						t.Errorf("%q lacks %q", text, want)
					}
				}
				for _, not := range []string{"rpc error", "dial tcp", "lookup", "/v1/", "tweety"} {
					if strings.Contains(text, not) && test.want != nil {
						t.Errorf("%q shows gRPC's words, or more of an address than host and port", text)
					}
				}
			}
			answer, err := probeAt(t, live)
			if err != nil || !answer.GetReady().GetValue() {
				t.Errorf("the liveness probe fails: %v, %v", answer, err)
			}
		})
	}
}

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
		c := csitest.Got(ParseConfig(nil, goodEnv(map[string]string{"OXIDE_HOST": test.host,
			"OXIDE_CLUSTER_ID": test.cluster}), io.Discard))(t)
		var got []string
		for _, warning := range c.rackWarnings() {
			name, _, _ := strings.Cut(warning, " ")
			got = append(got, name)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s, cluster %q: warned of %q, want %q", test.host, test.cluster, got, test.want)
		}
	}
	for cluster, want := range map[string]string{"": "OXIDE_CLUSTER_ID is not set: ",
		"blue": "OXIDE_PROJECT is a name: "} {
		line := started(t, "WARN", nil, map[string]string{"OXIDE_CLUSTER_ID": cluster,
			"OXIDE_HOST": racktest.At(t, http.NotFound)})
		if !strings.HasPrefix(line["msg"], want) {
			t.Errorf("the log warns of %v", line)
		}
	}
}

func TestANodeLogsMissingProgramsAtStart(t *testing.T) { // PR-4
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

func TestAProcessLogsToStandardErrorAndMakesOnlyItsSocket(t *testing.T) { // B-30, B-22, B-29
	dir := shortDir(t)
	endpoint := "unix://" + filepath.Join(dir, "csi.sock")
	env := goodEnv(map[string]string{"CSI_ENDPOINT": endpoint, "OXIDE_LOG_LEVEL": "debug",
		"OXIDE_HOST": racktest.At(t, moody(inOrder).ServeHTTP)})
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
	info := csitest.Got(os.Stat(filepath.Join(dir, "csi.sock")))(t)
	if info.Mode().Perm()&0o007 != 0 {
		t.Errorf("others can use the socket: %v", info.Mode())
	}
	terminate()
	if got := <-status; got != 0 || out.Len() > 0 || strings.Contains(log.String(), canary) ||
		!strings.Contains(log.String(), "mode=controller rack=127.0.0.1:") ||
		!strings.Contains(log.String(), " project=kittens cluster=blue") {
		t.Errorf("status %d, on standard output %q, the log %q", got, out.String(), log)
	}
}

func TestAnInvalidSettingEndsTheProcessWithAOneLineError(t *testing.T) { // B-26
	var out, log bytes.Buffer
	status := Main(t.Context(), nil, goodEnv(map[string]string{"OXIDE_MODE": "tweety"}), &out, &log)
	said := log.String()
	if status != 1 || out.Len() > 0 || strings.Count(said, "\n") != 1 ||
		!strings.Contains(said, "OXIDE_MODE") || strings.Contains(said, "tweety") {
		t.Errorf("status %d, on standard output %q, the log %q", status, out.String(), said)
	}
}

func TestTheVersionFlagPrintsTheVersion(t *testing.T) { // GI-3
	var out, log bytes.Buffer
	status := Main(t.Context(), []string{"--version"}, goodEnv(nil), &out, &log)
	if status != 0 || strings.TrimSpace(out.String()) == "" {
		t.Errorf("status %d, %q, %q", status, out.String(), log.String())
	}
}

var must, fails = csitest.Must, csitest.Fails

func clientFor(t *testing.T, url string) *rack.Client {
	t.Helper()
	client, closeIdle, err := rack.New(rack.Options{Host: url, Project: racktest.Project},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token}})
	must(t, err)
	t.Cleanup(closeIdle)
	return client
}

var inOrder = racktest.Exchange{Status: 200, Body: racktest.ProjectOf()}

// shortDir returns a directory whose path is short enough for a socket, unlike that of t.TempDir.
func shortDir(t *testing.T) string {
	t.Helper()
	dir := csitest.Got(os.MkdirTemp("", "csi"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

type running struct {
	log      *logBook
	endpoint string
	stop     func()
}

func run(t *testing.T, args []string, env map[string]string) *running {
	t.Helper()
	dir := shortDir(t)
	p := &running{log: &logBook{}, endpoint: "unix://" + filepath.Join(dir, "csi.sock")}
	env["CSI_ENDPOINT"], env["OXIDE_LOG_FORMAT"] = p.endpoint, "json"
	env["OXIDE_STATE_DIR"] = t.TempDir()
	config := csitest.Got(ParseConfig(args, goodEnv(env), io.Discard))(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config, p.log) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("B-29: got %v", err)
		}
		if left := names(t, dir); len(left) > 0 {
			t.Errorf("B-29: left behind: %v", left)
		}
	})
	t.Cleanup(p.stop)
	return p
}

// moodyRack counts the requests and answers each with its field mood, which a test can change.
// If mood is a success, the answer to a request for the current user contains a user.
type moodyRack struct {
	mood   atomic.Pointer[racktest.Exchange]
	served atomic.Int64
}

func moody(mood racktest.Exchange) *moodyRack {
	m := &moodyRack{}
	m.mood.Store(&mood)
	return m
}

func (m *moodyRack) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.served.Add(1)
	mood := *m.mood.Load()
	if mood.Status == http.StatusOK && r.URL.Path == "/v1/me" {
		mood.Body = racktest.UserOf(racktest.Silo)
	}
	w.Header().Set("X-Request-Id", "r-1")
	w.WriteHeader(mood.Status)
	_, _ = w.Write([]byte(mood.Body))
}

func healthOf(t *testing.T, rack *moodyRack, log *slog.Logger) *rackHealth {
	t.Helper()
	return &rackHealth{Rack: clientFor(t, racktest.At(t, rack.ServeHTTP)), Log: log,
		asked: make(chan struct{}, 1)}
}

var (
	badToken = racktest.Error(401, "Unauthorized", "credentials missing or invalid")
	noRole   = racktest.Error(403, "Forbidden", "Forbidden")
	away     = racktest.Error(503, "ServiceNotAvailable", "Service Unavailable")
)

func begin(t *testing.T, h *rackHealth) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

func TestProbeAndLogReportTheStateOfTheRack(t *testing.T) { // PR-1, PR-2, PR-3, PR-5
	rack := moody(away)
	book := &logBook{}
	h := healthOf(t, rack, newLog(Config{}, &hidden{}, book))
	identity := &identityService{Health: h.state}
	probe := func() (bool, error) {
		answer, err := identity.Probe(t.Context(), nil)
		return answer.GetReady().GetValue(), err
	}
	if ready, err := probe(); ready || err != nil {
		t.Errorf("before the first check: %v, %v", ready, err)
	}
	another := racktest.OK("", strings.Replace(inOrder.Body, racktest.ProjectID, racktest.Numbered(7),
		1))
	noProject := racktest.Error(404, "ObjectNotFound", "not found: project")
	for i, step := range []struct {
		mood   racktest.Exchange
		reason csierr.Reason // the reason of Probe's error; "" means that the process is ready
		lines  int           // the number of log lines from the start
	}{
		{away, "", 1},
		{inOrder, "", 2},
		{away, "", 3},
		{racktest.Error(503, "ServiceNotAvailable", "another sentence, as one with a number is"), "", 3},
		{badToken, csierr.TokenRejected, 4},
		{badToken, csierr.TokenRejected, 4},
		{away, csierr.TokenRejected, 5}, // Probe keeps its error in an outage
		{noRole, csierr.RoleMissing, 6},
		{noProject, csierr.ProjectNotFound, 7},
		{another, csierr.ProjectChanged, 8},
		{away, csierr.ProjectChanged, 9},
		{inOrder, "", 10},
		{inOrder, "", 10},
	} {
		rack.mood.Store(&step.mood)
		h.check(t.Context())
		ready, err := probe()
		if step.reason != "" {
			csitest.Want(t, err, codes.FailedPrecondition, step.reason)
		} else if !ready || err != nil {
			t.Errorf("after check %d: %v, %v", i, ready, err)
		}
		if got := strings.Count(book.String(), "\n"); got != step.lines {
			t.Fatalf("after check %d the log has %d lines, want %d:\n%s", i, got, step.lines, book)
		}
		// Until the rack has answered once, the process reports why it waits. It never does later.
		why := h.now().unanswered
		if why != nil && i > 0 || i == 0 && !csierr.Has(why, csierr.RackUnavailable) {
			t.Errorf("after check %d the process waits because of %v", i, why)
		}
	}
	if !strings.HasSuffix(book.String(), "accepts this controller again\"\n") {
		t.Errorf("the log does not end with the recovery:\n%s", book)
	}
	before := rack.served.Load()
	for range 100 {
		_, _ = probe()
	}
	if after := rack.served.Load(); after != before {
		t.Errorf("a hundred probes made %d requests", after-before)
	}
}

func awaitHealth(t *testing.T, h *rackHealth, fine bool) {
	t.Helper()
	csitest.Await(t, fmt.Sprint("the rack is in order: ", fine), func() bool {
		ready, err := h.state()
		return ready && (err == nil) == fine
	})
}

func TestARefusedTokenCausesARackCheckAtOnce(t *testing.T) {
	rack := moody(inOrder)
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	end := begin(t, h)
	awaitHealth(t, h, true)
	rack.mood.Store(&badToken)
	h.checkSoon()
	awaitHealth(t, h, false)
	served := rack.served.Load()
	for range 100 {
		h.checkSoon()
	}
	end()
	if more := rack.served.Load() - served; more > 1 {
		t.Errorf("a hundred refusals made %d more requests", more)
	}
}

func TestAProcessWithARefusedTokenAsksTheRackAgain(t *testing.T) { // D-63
	rack := moody(badToken)
	h := healthOf(t, rack, slog.New(slog.DiscardHandler))
	defer begin(t, h)()
	awaitHealth(t, h, false)
	rack.mood.Store(&inOrder)
	awaitHealth(t, h, true)
}

func TestANodeWithoutItsProgramsIsUnhealthy(t *testing.T) { // PR-4
	t.Setenv("PATH", t.TempDir())
	fails(csierr.ToolsMissing, "mkfs.xfs")(t, toolsHealth())
	p := plugin{config: Config{Mode: ModeNode}}
	if _, err := p.state(); err == nil {
		t.Error("a node without its programs is healthy")
	}
	p.config.Mode = ModeController
	if ready, err := p.state(); err != nil || !ready {
		t.Errorf("a controller needs no programs: %v, %v", ready, err)
	}
}
