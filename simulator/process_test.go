package simulator

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func serveAdmin(t *testing.T, s *Server) string {
	t.Helper()
	server := httptest.NewServer(s.Admin())
	t.Cleanup(server.Close)
	return server.URL
}

// process is a simulator in a process of its own.
type process struct {
	cmd  *exec.Cmd
	said struct {
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
	p, said := startIn(t, "", binary, append([]string{"--dir", dir, "--token", testToken,
		"--instance", "a", "--instance", "b"}, args...)...)
	if err := json.Unmarshal(said.Bytes(), &p.said); err != nil {
		t.Fatalf("the simulator said %q: %v", said.Text(), err)
	}
	return p
}

// startIn starts a simulator, whose folder for temporary files is temp, and reads its first line.
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
		t.Fatalf("the simulator said nothing: %v", lines.Err())
	}
	return p, lines
}

// stop ends the process as an operator does, and demands the exit status 0.
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
	_ = p.cmd.Wait() // the process was killed
}

// loopsUnder returns the loop devices whose files are in a directory.
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

func trusting(t *testing.T, caFile, url string) *oxide.Client {
	t.Helper()
	pem, err := os.ReadFile(caFile)
	simtest.NoError(t, err)
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatal("the authority's file holds no certificate")
	}
	server := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool,
		MinVersion: tls.VersionTLS12}}
	c, err := oxide.NewClient(oxide.WithHost(url), oxide.WithToken(testToken),
		oxide.WithHTTPClient(&http.Client{Transport: server}))
	simtest.NoError(t, err)
	return c
}

func TestTheBinaryRefusesABadCommandLine(t *testing.T) {
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
		{`line 3: unknown key "size_bytes"`,
			[]string{"serve", "--seed", seed("{name: d,\n size_bytes: 1}")}},
		{`line 2: "much" is no size`, []string{"serve", "--seed", seed("{name: d, size: much}")}},
		{`disk "d": project "default" has no instance "x"`, []string{"serve", "--disks=none", "--seed",
			seed("{name: d, size: 1GiB, instance: x}")}},
		{`unexpected argument "now"`, []string{"serve", "--dir", "x", "now"}},
		{"--token does not begin with oxide-token-",
			[]string{"serve", "--dir", "x", "--token", "secret"}},
		{"--tls-cert and --tls-key go together", []string{"serve", "--dir", "x", "--tls-cert", "y"}},
		{"-flight-records: syntax error in pattern", []string{"serve", "--flight-records", "a["}},
		{"flag provided but not defined", []string{"serve", "--nope"}},
		{`"much" is no size`, []string{"serve", "--dir", "x", "--quota", "much"}},
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

// TestAKilledRackWithoutADirectoryIsFoundByTheNext kills racks that nobody gave a directory. The
// next one removes their directories and devices, and neither those of a living rack nor a
// directory that only has the name.
func TestAKilledRackWithoutADirectoryIsFoundByTheNext(t *testing.T) {
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

// ledger has the rack's answers to the callers: the existing disks, with the instances to which
// they are attached.
type ledger struct {
	mu sync.Mutex
	// mu guards disks and doubt.
	disks map[string]string
	// doubt has the disks of calls without an answer. The calls may have taken effect or not.
	doubt map[string]bool
	// acknowledged receives one value for each call that was answered.
	acknowledged chan struct{}
}

func (l *ledger) note(disk, instance string, exists bool, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		l.doubt[disk] = true
		return false
	case exists:
		l.disks[disk] = instance
	default:
		delete(l.disks, disk)
	}
	l.acknowledged <- struct{}{}
	return true
}

// churn creates, attaches, detaches, copies and deletes disks until the rack no longer answers.
func (l *ledger) churn(ctx context.Context, r *rackServer, worker, round int) {
	instance := []string{"a", "b"}[worker%2]
	for n := 0; ; n++ {
		name := fmt.Sprintf("w%d-r%d-n%d", worker, round, n)
		_, err := r.DiskCreate(ctx, r.blank(name, 1))
		if !l.note(name, "", true, err) {
			return
		}
		path := &oxide.DiskPath{Disk: oxide.NameOrId(name)}
		_, err = r.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
			Instance: oxide.NameOrId(instance), Project: "default", Body: path})
		if !l.note(name, instance, true, err) {
			return
		}
		if n%4 == 3 {
			continue // it stays attached
		}
		_, err = r.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(instance), Project: "default", Body: path})
		if !l.note(name, "", true, err) {
			return
		}
		if n%4 == 1 && !l.makeInstance(ctx, r, name+"-i") {
			return
		}
		if n%4 == 2 { // it stays detached, and another one is made of its snapshot
			sn, err := r.SnapshotCreate(ctx, oxide.SnapshotCreateParams{Project: "default",
				Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Disk: path.Disk}})
			if err != nil {
				return
			}
			clone := name + "-clone"
			_, err = r.DiskCreate(ctx, r.from(snapshotSource(sn.Id, false), clone, 1))
			if !l.note(clone, "", true, err) {
				return
			}
			continue
		}
		err = r.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: path.Disk, Project: "default"})
		if !l.note(name, "", false, err) {
			return
		}
	}
}

// makeInstance creates a stopped instance with two disks, and a disk that imports blocks.
func (l *ledger) makeInstance(ctx context.Context, r *rackServer, name string) bool {
	body := r.instanceBody(name)
	body.Start = oxide.NewPointer(false)
	body.BootDisk = createdDisk(name + "-boot")
	body.Disks = []oxide.InstanceDiskAttachment{createdDisk(name + "-data")}
	_, err := r.InstanceCreate(ctx, oxide.InstanceCreateParams{Project: "default", Body: body})
	for _, disk := range []string{"-boot", "-data"} {
		l.note(name+disk, name, true, err)
	}
	if err != nil {
		return false
	}
	_, err = r.DiskCreate(ctx, r.from(oxide.DiskSource{
		Value: &oxide.DiskSourceImportingBlocks{BlockSize: 512}}, name+importing, 1))
	return l.note(name+importing, "", true, err)
}

// importing ends the name of a disk that imports blocks.
const importing = "-import"

// TestAKilledRackKeepsWhatItAcknowledged kills a rack at any moment. The rack must keep
// everything that it acknowledged, and the next simulator must leave no device without a record.
func TestAKilledRackKeepsWhatItAcknowledged(t *testing.T) {
	binary := buildSimulator(t)
	dir := filepath.Join(t.TempDir(), "rack")
	told := &ledger{disks: map[string]string{}, doubt: map[string]bool{},
		acknowledged: make(chan struct{}, 1<<16)}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	for round := range 4 {
		p := startProcess(t, binary, dir, "--disk-limit", "1000")
		told.compare(t, &rackServer{t: t, Client: newClient(t, p.said.URL)}, p, dir)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		var workers sync.WaitGroup
		for worker := range 4 {
			workers.Go(func() {
				told.churn(ctx, &rackServer{t: t, Client: newClient(t, p.said.URL)}, worker, round)
			})
		}
		// The moment is a number of calls, so that a slow machine does as much as a fast one.
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
	told.compare(t, &rackServer{t: t, Client: newClient(t, p.said.URL)}, p, dir)
	if len(told.disks) < 4 {
		t.Errorf("only %d disks were made, which shows little", len(told.disks))
	}
	p.stop(t)
	if got := loopsUnder(t, dir); len(got) != 0 {
		t.Errorf("SIGTERM left the devices %v", got)
	}
}

// compare compares a restarted rack with the answers that the callers got. It accepts either
// state of a disk in doubt.
func (l *ledger) compare(t *testing.T, r *rackServer, p *process, dir string) {
	t.Helper()
	ids, running := map[string]string{}, 0
	for _, i := range must[[]oxide.Instance](t)(r.InstanceListAllPages(t.Context(),
		oxide.InstanceListParams{Project: "default"})) {
		ids[i.Id] = string(i.Name)
		if i.RunState != oxide.InstanceStateRunning && i.RunState != oxide.InstanceStateStopped {
			t.Errorf("instance %s came back as %s", i.Name, i.RunState)
		}
	}
	found := map[string]string{}
	var storage oxide.ByteCount
	for _, d := range r.disks() {
		found[string(d.Name)] = ""
		storage += d.Size
		if a, ok := d.State.AsAttached(); ok {
			found[string(d.Name)] = ids[a.Instance]
			if name := ids[a.Instance]; name == "a" || name == "b" {
				running++
			}
		} else if s := d.State.State(); s != "detached" &&
			(s != "import_ready" || !strings.HasSuffix(string(d.Name), importing)) {
			t.Errorf("disk %s came back as %s", d.Name, s)
		}
	}
	for name := range l.doubt {
		delete(l.disks, name)
		if instance, ok := found[name]; ok {
			l.disks[name] = instance
		}
	}
	l.doubt = map[string]bool{}
	for name, instance := range l.disks {
		if got, ok := found[name]; !ok || got != instance {
			t.Errorf("disk %s was acknowledged on %q and is there: %v, on %q", name, instance, ok, got)
		}
	}
	if len(found) != len(l.disks) {
		t.Errorf("there are %d disks, %d were acknowledged", len(found), len(l.disks))
	}
	if got := len(loopsUnder(t, dir)); got != running {
		t.Errorf("%d loop devices for %d disks of running instances", got, running)
	}
	snapshots := must[[]oxide.Snapshot](t)(r.SnapshotListAllPages(t.Context(),
		oxide.SnapshotListParams{Project: "default"}))
	for _, sn := range snapshots {
		storage += sn.Size
		if sn.State != oxide.SnapshotStateReady {
			t.Errorf("snapshot %s came back as %s", sn.Name, sn.State)
		}
	}
	u := must[*oxide.Utilization](t)(r.UtilizationView(t.Context()))
	if u.Provisioned.Storage != storage {
		t.Errorf("the quota counts %d, disks and snapshots have %d", u.Provisioned.Storage, storage)
	}
	for kind, n := range map[string]int{"disks": len(found), "snapshots": len(snapshots)} {
		files, err := filepath.Glob(filepath.Join(dir, kind, "*"))
		if err != nil || len(files) != n {
			t.Errorf("%d files (%v) for %d %s", len(files), err, n, kind)
		}
	}
}

func TestARackThatKeepsDevicesPassesThemToTheNextOne(t *testing.T) {
	needGuests(t)
	binary, dir := buildSimulator(t), t.TempDir()
	const first = 600
	p := startProcess(t, binary, dir, "--keep-devices", "--first-loop", strconv.Itoa(first), "--tls")
	r := &rackServer{t: t, Client: trusting(t, p.said.CA, p.said.URL)}
	r.disk("kept")
	must[*oxide.Disk](t)(r.doAttach("a", "kept"))
	before := loopsUnder(t, dir)
	if len(before) != 1 || before[0].Number < first {
		t.Fatalf("devices = %+v, want one from number %d on", before, first)
	}
	p.stop(t)
	if diff := cmp.Diff(before, loopsUnder(t, dir)); diff != "" {
		t.Errorf("SIGTERM changed the devices (-before +after):\n%s", diff)
	}
	again := startProcess(t, binary, dir, "--tls")
	r.Client = trusting(t, p.said.CA, again.said.URL) // the same authority
	if got := r.state("kept"); got != "attached" {
		t.Errorf("the disk is %s", got)
	}
	if diff := cmp.Diff(before, loopsUnder(t, dir)); diff != "" {
		t.Errorf("the next rack has other devices (-before +after):\n%s", diff)
	}
	again.stop(t)
	if left := loopsUnder(t, dir); len(left) != 0 {
		t.Errorf("a rack that gives everything back left %+v", left)
	}
}
