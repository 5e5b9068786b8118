package simulator

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func serveAdmin(t *testing.T, s *Server) string {
	t.Helper()
	server := httptest.NewServer(s.Admin())
	t.Cleanup(server.Close)
	return server.URL
}

type process struct {
	cmd *exec.Cmd
	// ready is the line of JSON that the simulator prints when it is ready.
	ready struct {
		URL, Admin, Project, CA string
		Instances               []struct{ Name, ID, Guest string }
	}
}

// buildSimulator returns the program that OXIDE_SIMULATOR names, or builds it.
func buildSimulator(t *testing.T) string {
	t.Helper()
	if ready := os.Getenv("OXIDE_SIMULATOR"); ready != "" {
		return ready
	}
	path := filepath.Join(t.TempDir(), "oxide-simulator")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", path,
		"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-simulator")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the simulator: %v\n%s", err, out)
	}
	return path
}

func startProcess(t *testing.T, binary, dir string, args ...string) *process {
	t.Helper()
	p, printed := startIn(t, "", binary, append([]string{"--dir", dir, "--token", testToken,
		"--instance", "a", "--instance", "b"}, args...)...)
	if err := json.Unmarshal(printed.Bytes(), &p.ready); err != nil {
		t.Fatalf("the simulator printed %q: %v", printed.Text(), err)
	}
	return p
}

// startIn starts a simulator with temp as its TMPDIR, and waits for its first line of output.
func startIn(t *testing.T, temp, binary string, args ...string) (*process, *bufio.Scanner) {
	t.Helper()
	p := &process{cmd: exec.Command(binary, append([]string{"serve"}, args...)...)}
	p.cmd.Stderr, p.cmd.Env = t.Output(), append(os.Environ(), "TMPDIR="+temp)
	stdout, err := p.cmd.StdoutPipe()
	simtest.NoError(t, err)
	simtest.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() {
		t.Fatalf("the simulator printed nothing: %v", lines.Err())
	}
	return p, lines
}

// stop ends the process with SIGTERM, as an operator does, and expects the exit status 0.
func (p *process) stop(t *testing.T) {
	t.Helper()
	simtest.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

func (p *process) kill(t *testing.T) {
	t.Helper()
	simtest.NoError(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait() // the error of a killed process
}

func loopsUnder(t *testing.T, dir string) []loopdev.Device {
	t.Helper()
	needGuests(t)
	dir, err := filepath.EvalSymlinks(dir)
	simtest.NoError(t, err)
	all := must[[]loopdev.Device](t)(loopdev.List())
	var ours []loopdev.Device
	for _, d := range all {
		if strings.HasPrefix(d.BackingFile, dir+"/") {
			ours = append(ours, d)
		}
	}
	return ours
}

// trusting returns an HTTP client that trusts the certificate authority in a file.
func trusting(t *testing.T, caFile string) *http.Client {
	t.Helper()
	pem, err := os.ReadFile(caFile)
	simtest.NoError(t, err)
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatal("the authority's file holds no certificate")
	}
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}}
}

func TestTheBinaryRefusesAnInvalidCommandLine(t *testing.T) {
	binary := buildSimulator(t)
	t.Chdir(t.TempDir())
	seed := func(disk string) string {
		path := filepath.Join(t.TempDir(), "rack.yaml")
		simtest.NoError(t, os.WriteFile(path, []byte("disks:\n- "+disk), 0o600))
		return path
	}
	for _, test := range []struct {
		want string
		args []string
	}{
		{`the first argument must be "serve"`, nil},
		{"--keep-devices needs --dir", []string{"serve", "--keep-devices"}},
		{"--disks is \"tape\"; use file, fuse or none", []string{"serve", "--disks", "tape"}},
		{"--vm-machine is \"isa\"; use pc or q35", []string{"serve", "--vm-machine", "isa"}},
		{`line 3: unknown key "size_bytes"`,
			[]string{"serve", "--seed", seed("{name: d,\n size_bytes: 1}")}},
		{`line 2: "much" is not a size`, []string{"serve", "--seed", seed("{name: d, size: much}")}},
		{`disk "d": project "default" has no instance "x"`, []string{"serve", "--disks=none", "--seed",
			seed("{name: d, size: 1GiB, instance: x}")}},
		{`unexpected argument "now"`, []string{"serve", "--dir", "x", "now"}},
		{"--token does not begin with oxide-token-",
			[]string{"serve", "--dir", "x", "--token", "secret"}},
		{"--tls-cert and --tls-key go together", []string{"serve", "--dir", "x", "--tls-cert", "y"}},
		{"-flight-records: syntax error in pattern", []string{"serve", "--flight-records", "a["}},
		{"flag provided but not defined", []string{"serve", "--nope"}},
		{`"much" is not a size`, []string{"serve", "--dir", "x", "--quota", "much"}},
		{"expected a size or a file", []string{"serve", "--dir", "x", "--image", "i=much"}},
		{"listen for the API", []string{"serve", "--dir", "x", "--listen", "nowhere"}},
		{"--tls-cert and --tls-key: open", []string{"serve", "--dir", "x", "--tls-cert", "no",
			"--tls-key", "no"}},
		{`role is "king"`, []string{"serve", "--dir", "x", "--role", "king"}},
		{`there is no mutation "nope"`, []string{"serve", "--dir", "x", "--mutation", "nope"}},
		{`"X"`, []string{"serve", "--dir", "x", "--instance", "X"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		out, err := exec.CommandContext(ctx, binary, test.args...).CombinedOutput()
		cancel()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), test.want) ||
			strings.Contains(string(out), "secret") || strings.Count(string(out), "\n") != 1 {
			t.Errorf("%v: got %v and %q, want exit 1 and one line with %q", test.args, err, out, test.want)
		}
		if _, err := os.Lstat("x"); err == nil {
			t.Fatalf("%v: a directory was made for it", test.args)
		}
	}
	for _, args := range [][]string{{"help"}, {"--help"}, {"serve", "--help"}} {
		out, err := exec.CommandContext(t.Context(), binary, args...).Output()
		if err != nil || !strings.Contains(string(out), "-quota size") {
			t.Errorf("%v: got %v and %q on stdout", args, err, out)
		}
	}
}

// TestARackRemovesTheTemporaryDirectoriesOfKilledRacks kills racks without --dir. The next rack
// must remove their directories and devices. It must keep the directory of a running rack, and
// another program's directory with a similar name.
func TestARackRemovesTheTemporaryDirectoriesOfKilledRacks(t *testing.T) {
	binary, temp := buildSimulator(t), t.TempDir()
	seed := filepath.Join(t.TempDir(), "rack.yaml")
	simtest.NoError(t, os.WriteFile(seed, []byte(
		"instances: [{name: a}]\ndisks: [{name: d, size: 1GiB, instance: a}]\n"), 0o644))
	start := func(args ...string) *process {
		p, _ := startIn(t, temp, binary, append([]string{"--seed", seed}, args...)...)
		return p
	}
	foreign := filepath.Join(temp, "oxide-simulator-1", "disks")
	simtest.NoError(t, os.MkdirAll(foreign, 0o700))
	living := start("--disks=none")
	for _, disks := range []string{"file", "fuse", "none"} {
		if withoutDevices == "" || disks == "none" {
			start("--disks=" + disks).kill(t)
		}
	}
	last := start("--disks=none")
	found, err := filepath.Glob(filepath.Join(temp, "*"))
	if err != nil || len(found) != 3 {
		t.Errorf("there are %v (%v), want the living rack's, the last one's and the foreign one",
			found, err)
	}
	if withoutDevices == "" {
		if left := loopsUnder(t, temp); len(left) != 0 {
			t.Errorf("the devices %v are left", left)
		}
	}
	living.stop(t)
	last.stop(t)
	if found, err := filepath.Glob(filepath.Join(temp, "*", "*")); err != nil || len(found) != 1 {
		t.Errorf("there is %v (%v), want only the foreign one", found, err)
	}
}

// answers records what a rack has acknowledged: the instance of each disk, or "" if the disk is
// detached.
type answers struct {
	mu sync.Mutex
	// mu guards disks and unknown.
	disks map[string]string
	// unknown has the disks of calls that got no answer. Such a call may have taken effect or not.
	unknown map[string]bool
	// acknowledged receives a value for each answer.
	acknowledged chan struct{}
}

// absent is the value in answers.disks of a disk that the rack has deleted.
const absent = "absent"

// call sends a request that leaves the disks attached to an instance ("" for none), records the
// result, and reports whether the request was answered.
func (a *answers) call(ctx context.Context, r *rackServer, request, instance string,
	disks ...string) bool {
	got, err := r.try(ctx, request)
	if err == nil && got.status >= http.StatusBadRequest {
		r.t.Errorf("%s: HTTP %d: %s", request, got.status, got.body)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, disk := range disks {
		if err != nil {
			a.unknown[disk] = true
		} else {
			a.disks[disk] = instance
		}
	}
	if err == nil {
		a.acknowledged <- struct{}{}
	}
	return err == nil
}

// churn creates, attaches, detaches, copies and deletes disks until the rack no longer answers.
func (a *answers) churn(ctx context.Context, r *rackServer, worker, round int) {
	instance := []string{"a", "b"}[worker%2]
	for n := 0; ; n++ {
		name := fmt.Sprintf("w%d-r%d-n%d", worker, round, n)
		if !a.call(ctx, r, newDisk(name), "", name) ||
			!a.call(ctx, r, moving("attach", instance, name), instance, name) {
			return
		}
		if n%4 == 3 {
			continue // the disk stays attached
		}
		if !a.call(ctx, r, moving("detach", instance, name), "", name) {
			return
		}
		ok := true
		switch n % 4 {
		case 0:
			ok = a.call(ctx, r, "DELETE /v1/disks/"+name+"?project=default", absent, name)
		case 1:
			created := func(suffix string) string {
				return fmt.Sprintf(`{"type":"create","name":"%s%s","description":"","size":1073741824,`+
					`"disk_backend":%s}`, name, suffix, blankBackend)
			}
			ok = a.call(ctx, r, newInstance(name+"-i", fmt.Sprintf(`,"start":false,"boot_disk":%s,`+
				`"disks":[%s]`, created("-boot"), created("-data"))), name+"-i", name+"-boot",
				name+"-data") && a.call(ctx, r, newDisk(name+"-import", blankSource, importing), "",
				name+"-import")
		case 2:
			got, err := r.try(ctx, newSnapshot(name, name))
			if err != nil {
				return
			}
			id := unmarshal[store.Identity](r.t, got.body).ID
			ok = a.call(ctx, r, newDisk(name+"-clone", blankSource, source("snapshot", id)), "",
				name+"-clone")
		}
		if !ok {
			return
		}
	}
}

// TestAKilledRackKeepsAcknowledgedChanges kills a rack at random moments. The next simulator must
// have everything that the rack acknowledged, and no device without a record.
func TestAKilledRackKeepsAcknowledgedChanges(t *testing.T) {
	binary := buildSimulator(t)
	dir := filepath.Join(t.TempDir(), "rack")
	told := &answers{disks: map[string]string{}, unknown: map[string]bool{},
		acknowledged: make(chan struct{}, 1<<16)}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	for round := range 4 {
		p := startProcess(t, binary, dir, "--disk-limit", "1000")
		r := &rackServer{t: t, url: p.ready.URL, client: client}
		told.compare(t, r, dir)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		var workers sync.WaitGroup
		for worker := range 4 {
			workers.Go(func() { told.churn(ctx, r, worker, round) })
		}
		// Wait for a number of answers instead of a time, so that slow machines do as much as fast ones.
		for range 40 + dice.IntN(80) {
			select {
			case <-told.acknowledged:
			case <-ctx.Done():
				t.Fatal("the rack stopped answering")
			}
		}
		p.kill(t)
		workers.Wait()
		cancel()
	}
	p := startProcess(t, binary, dir)
	told.compare(t, &rackServer{t: t, url: p.ready.URL, client: client}, dir)
	if len(told.disks) < 4 {
		t.Errorf("only %d disks were made, which shows little", len(told.disks))
	}
	p.stop(t)
	if got := loopsUnder(t, dir); len(got) != 0 {
		t.Errorf("SIGTERM left the devices %v", got)
	}
}

// compare checks a restarted rack against the recorded answers. If a disk's last request got no
// answer, the disk may be in either state.
func (a *answers) compare(t *testing.T, r *rackServer, dir string) {
	t.Helper()
	ids, running := map[string]string{"": ""}, 0
	for _, i := range list[store.Instance](r, "instances") {
		ids[i.ID] = i.Name
		if i.RunState != store.RunRunning && i.RunState != store.RunStopped {
			t.Errorf("instance %s came back as %s", i.Name, i.RunState)
		}
	}
	found := map[string]string{}
	var storage int64
	for _, d := range r.disks() {
		found[d.Name] = ids[d.State.Instance]
		storage += d.Size
		if name := ids[d.State.Instance]; name == "a" || name == "b" {
			running++
		}
		if s := d.State.State; s != "attached" && s != "detached" &&
			(s != "import_ready" || !strings.HasSuffix(d.Name, "-import")) {
			t.Errorf("disk %s came back as %s", d.Name, s)
		}
	}
	for name := range a.unknown {
		a.disks[name] = absent
		if instance, ok := found[name]; ok {
			a.disks[name] = instance
		}
	}
	a.unknown = map[string]bool{}
	maps.DeleteFunc(a.disks, func(_, instance string) bool { return instance == absent })
	if diff := cmp.Diff(a.disks, found); diff != "" {
		t.Errorf("the disks and their instances differ (-acknowledged +found):\n%s", diff)
	}
	if got := len(loopsUnder(t, dir)); got != running {
		t.Errorf("%d loop devices for %d disks of running instances", got, running)
	}
	snapshots := list[store.Snapshot](r, "snapshots")
	for _, sn := range snapshots {
		storage += sn.Size
		if sn.State != store.SnapshotReady {
			t.Errorf("snapshot %s came back as %s", sn.Name, sn.State)
		}
	}
	if u := view[engine.Utilization](r, "utilization"); u.Provisioned.Storage != storage {
		t.Errorf("the quota counts %d, disks and snapshots have %d", u.Provisioned.Storage, storage)
	}
	for kind, n := range map[string]int{"disks": len(found), "snapshots": len(snapshots)} {
		files, err := filepath.Glob(filepath.Join(dir, kind, "*"))
		if err != nil || len(files) != n {
			t.Errorf("%d files (%v) for %d %s", len(files), err, n, kind)
		}
	}
}

func TestARestartedRackAdoptsKeptDevices(t *testing.T) {
	needGuests(t)
	binary, dir := buildSimulator(t), t.TempDir()
	const first = 600
	p := startProcess(t, binary, dir, "--keep-devices", "--first-loop", strconv.Itoa(first), "--tls")
	r := &rackServer{t: t, url: p.ready.URL, client: trusting(t, p.ready.CA)}
	r.disk("kept")
	r.attach("a", "kept")
	before := loopsUnder(t, dir)
	if len(before) != 1 || before[0].Number < first {
		t.Fatalf("devices = %+v, want one from number %d on", before, first)
	}
	p.stop(t)
	if diff := cmp.Diff(before, loopsUnder(t, dir)); diff != "" {
		t.Errorf("SIGTERM changed the devices (-before +after):\n%s", diff)
	}
	again := startProcess(t, binary, dir, "--tls")
	r.url = again.ready.URL // the same authority has signed its certificate
	if got := r.state("kept"); got != "attached" {
		t.Errorf("the disk is %s", got)
	}
	if diff := cmp.Diff(before, loopsUnder(t, dir)); diff != "" {
		t.Errorf("the next rack has other devices (-before +after):\n%s", diff)
	}
	again.stop(t)
	if left := loopsUnder(t, dir); len(left) != 0 {
		t.Errorf("the rack left %+v", left)
	}
}
