package simulator

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// again closes the rack, and opens another one in the same directory.
func (r *rackServer) again() *rackServer {
	r.t.Helper()
	if err := r.Close(); err != nil {
		r.t.Fatalf("close: %v", err)
	}
	return serveRack(r.t, engine.Config{Dir: r.dir})
}

func (r *rackServer) guestDevices(instance string) []string {
	r.t.Helper()
	needGuests(r.t)
	entries, err := os.ReadDir(filepath.Join(r.GuestDir(r.instance(instance).ID), "sys", "block"))
	looptest.Must(r.t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestARestartKeepsARenamedProject(t *testing.T) {
	r := serveRack(t, engine.Config{})
	before := r.demand(200, `"name":"renamed"`, `PUT /v1/projects/default {"name":"renamed"}`)
	next := r.again()
	if after := next.demand(200, "", "GET /v1/projects/renamed"); after != before {
		t.Errorf("got  %s\nwant %s", after, before)
	}
	next.demand(200, `"name":"a"`, "GET /v1/instances/a?project=renamed")
	next.demand(404, "", "GET /v1/projects/default")
}

func TestARecreatedInstanceHasNoInterfaceIfItsVPCWasRenamed(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.demand(200, "", `PUT /v1/vpcs/default?project=default {"name":"renamed"}`)
	r.demand(204, "", "DELETE /v1/instances/idle?project=default")
	const interfaces = "GET /v1/network-interfaces?instance=%s&project=default"
	next := r.again()
	next.demand(200, `"items":[]`, fmt.Sprintf(interfaces, "idle"))
	next.demand(200, `"name":"net0"`, fmt.Sprintf(interfaces, "a"))
}

func TestARestartedRackAdoptsTheDevicesInItsGuests(t *testing.T) {
	needGuests(t)
	const first = 600
	r := serveRack(t, engine.Config{KeepDevices: true, FirstLoop: first})
	r.disk("kept")
	r.attach("a", "kept")
	before := r.ownDevices()
	if len(before) != 1 || before[0].Number < first {
		t.Fatalf("devices = %+v, want one from number %d on", before, first)
	}
	if diff := cmp.Diff(before, r.again().ownDevices()); diff != "" {
		t.Errorf("the next rack has other devices (-before +after):\n%s", diff)
	}
}

func TestARestartedRackKeepsItsCertificateUnlessItsHostsChange(t *testing.T) {
	dir, roots := t.TempDir(), x509.NewCertPool()
	for n, host := range []string{"localhost", "localhost", "rack.test"} {
		cert, ca, err := Certificate(dir, []string{host})
		looptest.Must(t, err)
		if n == 0 {
			roots.AppendCertsFromPEM(looptest.Got(os.ReadFile(ca))(t))
		}
		_, err = cert.Leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: roots})
		if (err == nil) != (host == "localhost") {
			t.Errorf("certificate %d is for %s, and its client says %v", n, host, err)
		}
	}
}

func TestASecondSimulatorCannotOpenTheSameDirectory(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.disk("d")
	_, err := Open(t.Context(), engine.Config{Dir: r.dir, Log: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, store.ErrInUse) {
		t.Errorf("got %v, want %v", err, store.ErrInUse)
	}
	if got := r.state("d"); got != "detached" {
		t.Errorf("the first one's disk is %q", got)
	}
}

func TestOpenSucceedsAfterAFailureOnAFullFilesystem(t *testing.T) {
	needGuests(t)
	for _, kib := range []int{4, 8, 12, 16, 20, 24} {
		dir := t.TempDir()
		looptest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", fmt.Sprintf("size=%dk", kib))
		full := engine.Config{Dir: dir, Instances: []engine.InstanceSpec{{Name: "a"}},
			Log: slog.New(slog.DiscardHandler)}
		if _, err := Open(t.Context(), full); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("%d KiB: got %v, want %v", kib, err, syscall.ENOSPC)
		}
		looptest.Command(t, "mount", "-o", "remount,size=4m", dir)
		serveRack(t, engine.Config{Dir: dir}).disk("d")
	}
}

func TestAnImageWithoutARecordIsImportedAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	looptest.Must(t, os.WriteFile(file, bytes.Repeat([]byte("new!"), 256), 0o600))
	dir := t.TempDir()
	first := serveRack(t, engine.Config{Dir: dir})
	id := store.DerivedID("image", "", "image")
	looptest.Must(t, os.WriteFile(first.rack.Plane().Files.ImagePath(id), make([]byte, 4096), 0o600))
	looptest.Must(t, first.Close())

	r := serveRack(t, engine.Config{Dir: dir, Images: []engine.ImageSpec{{Name: "image", File: file}}})
	got, err := os.ReadFile(r.rack.Plane().Files.ImagePath(id))
	if err != nil || len(got) != 1024 || string(got[:4]) != "new!" {
		t.Errorf("the image has %d bytes (%v), want the file's 1024", len(got), err)
	}
}

func TestBadConfigurationsAreRefused(t *testing.T) {
	for want, c := range map[string]engine.Config{
		`project "X": name must begin`:  {Projects: []string{"X"}},
		`instance "X": name must begin`: {Instances: []engine.InstanceSpec{{Name: "X"}}},
		`its ID "5" is not a UUID`:      {Instances: []engine.InstanceSpec{{Name: "x", ID: "5"}}},
		`there is no project "other"`: {Instances: []engine.InstanceSpec{{Name: "x",
			Project: "other"}}},
		"needs a size or a file":    {Images: []engine.ImageSpec{{Name: "x"}}},
		"no such file or directory": {Images: []engine.ImageSpec{{Name: "x", File: "/nowhere"}}},
		"role is \"king\"; use":     {Role: "king"},
		`is that of instance "x"`: {Instances: []engine.InstanceSpec{
			{Name: "x", ID: store.DerivedID("x")}, {Name: "y", ID: store.DerivedID("x")}}},
		"quota_bytes is -1; it cannot be": {QuotaBytes: -1},
	} {
		c.Dir, c.Log, c.Devices = t.TempDir(), slog.New(slog.DiscardHandler), withoutDevices
		if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestCloseEndsDelaysAndLeavesNoGoroutine(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	s := looptest.Got(Open(t.Context(), engine.Config{Dir: t.TempDir(), Devices: withoutDevices,
		Log: slog.New(slog.DiscardHandler), CreateHold: time.Hour, InstanceDelay: time.Hour,
		DeviceDelay: time.Hour, Instances: []engine.InstanceSpec{{Name: "a"}}}))(t)
	server := httptest.NewServer(s)
	defer server.Close()
	r := &rackServer{t: t, Server: s, client: client, url: server.URL}
	created := make(chan int)
	go func() {
		got, _ := r.try(t.Context(), newDisk("d")) // the status is 0 without an answer
		created <- got.status
	}()
	looptest.Await(t, "the disk to exist", func() bool { return r.exists("d") })
	r.demand(202, "", "POST /v1/instances/a/stop?project=default")
	start := time.Now()
	looptest.Must(t, s.Close())
	if got := <-created; got != 201 {
		t.Errorf("the creation in progress ends with HTTP %d", got)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestResetRemovesDisksThatGuestsUse(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{})
	guest := r.GuestDir(r.instance("a").ID)
	before := looptest.Got(os.Stat(guest))(t)
	for range 2 {
		r.disk("d")
		r.attach("a", "d")
		r.snapshot("s", "d")
		r.demand(201, "", newInstance("more", ""))
		used := looptest.Got(os.Open(r.device("a")))(t)
		looptest.Must(t, r.Reset(t.Context()))
		if _, err := used.ReadAt(make([]byte, 4096), 0); err == nil {
			t.Error("the guest still reads the disk")
		}
		looptest.Must(t, used.Close())
		left := r.guestDevices("a")
		for _, kind := range []string{"disks/*", "snapshots/*"} {
			left = append(left, looptest.Got(filepath.Glob(filepath.Join(r.dir, kind)))(t)...)
		}
		guests := looptest.Got(os.ReadDir(filepath.Join(r.dir, "guests")))(t)
		if len(left) > 0 || len(r.disks()) > 0 || len(guests) != 3 {
			t.Errorf("a reset leaves %v, the disks %v and the guests %v", left, r.disks(), guests)
		}
		if !os.SameFile(before, looptest.Got(os.Stat(guest))(t)) {
			t.Error("the guest's view is another directory, which a container with the old one does not see")
		}
		looptest.Await(t, "the device is released", func() bool {
			return len(loopsUnder(t, r.dir)) == 0
		})
	}
}

func TestAConfiguredDiskIsBlankAfterAReset(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{Disks: []engine.DiskSpec{{Name: "seeded", SizeBytes: 1 << 30}}})
	path := filepath.Join(r.dir, "disks", r.disks()[0].ID+".img")
	f := looptest.Got(os.OpenFile(path, os.O_WRONLY, 0))(t)
	looptest.Got(f.WriteString("of the earlier life"))(t)
	looptest.Must(t, f.Close())
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the caller has gone away
	looptest.Must(t, r.Reset(ctx))
	f = looptest.Got(os.Open(path))(t)
	defer f.Close()
	b := make([]byte, 4096)
	if looptest.Got(f.Read(b))(t); !bytes.Equal(b, make([]byte, 4096)) {
		t.Errorf("the disk begins with %.20q", b)
	}
}

func TestADetachOrARestartRestoresTheDisksSizeAfterADeviceFault(t *testing.T) {
	r := serveRack(t, engine.Config{})
	d := r.disk("d")
	r.fault(adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{SizeBytes: 2 << 30}})
	size := func(r *rackServer) int64 {
		return looptest.Got(os.Stat(r.rack.Plane().Files.DiskPath(d.ID)))(t).Size()
	}
	attached := func() int64 {
		r.attach("a", "d")
		r.device("a")
		return r.ownDevices()[0].SizeBytes
	}
	if got := attached(); got != 2<<30 {
		t.Errorf("the device has %d bytes, want 2 GiB", got)
	}
	r.detach("a", "d")
	if got := size(r); got != 1<<30 {
		t.Errorf("the detached disk has %d bytes, want 1 GiB", got)
	}
	attached()
	r.force("d", store.DiskState{State: store.StateDetached}) // as after a kill during a detach
	if got := size(r.again()); got != 1<<30 {
		t.Errorf("the disk has %d bytes, want 1 GiB", got)
	}
}

// device waits until an instance's guest has one device, and returns the path of the device node.
func (r *rackServer) device(instance string) string {
	r.t.Helper()
	looptest.Await(r.t, "a device in guest "+instance, func() bool {
		return len(r.guestDevices(instance)) == 1
	})
	return filepath.Join(r.GuestDir(r.instance(instance).ID), "dev", r.guestDevices(instance)[0])
}

func readDevice(t *testing.T, path string, offset int64, n int) string {
	t.Helper()
	f := looptest.Got(os.Open(path))(t)
	defer f.Close()
	data := make([]byte, n)
	if _, err := f.ReadAt(data, offset); err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestDeviceFaultsMakeADeviceSmallerLateOrMissing(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{})
	const late = adminapi.Duration(150 * time.Millisecond)
	for name, c := range map[string]struct {
		rule  adminapi.DeviceFault
		slow  time.Duration
		sizes []int64 // the sizes of the loop devices
	}{
		"smaller": {adminapi.DeviceFault{SizeBytes: 1 << 20}, 0, []int64{1 << 20}},
		"late":    {adminapi.DeviceFault{Delay: late}, time.Duration(late), []int64{1 << 30}},
		"never":   {adminapi.DeviceFault{Never: true}, 0, nil},
	} {
		r.Faults.Clear()
		id := r.disk(name).ID
		r.fault(adminapi.Fault{Operation: "instance_disk_attach", Device: &c.rule})
		start := time.Now()
		r.attach("a", name)
		var sizes []int64
		for _, d := range r.ownDevices() {
			sizes = append(sizes, d.SizeBytes)
		}
		if len(sizes) > 0 {
			r.device("a")
		}
		if !slices.Equal(sizes, c.sizes) || time.Since(start) < c.slow {
			t.Errorf("%s: devices of %v bytes after %s", name, sizes, time.Since(start))
		}
		r.detach("a", name)
		if file := looptest.Got(os.Stat(r.rack.Plane().Files.DiskPath(id)))(t); file.Size() != 1<<30 {
			t.Errorf("%s: afterwards the disk's file has %d bytes", name, file.Size())
		}
	}
}

func TestARackOnAFullFilesystemKeepsItsDisksAndRefusesNewOnes(t *testing.T) { // A27
	needGuests(t)
	dir := t.TempDir()
	looptest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", "size=3m")
	r := serveRack(t, engine.Config{Dir: filepath.Join(dir, "rack")})
	r.disk("kept")
	ballast := filepath.Join(dir, "ballast")
	f := looptest.Got(os.Create(ballast))(t)
	for _, size := range []int{1 << 16, 4096, 1} {
		for err := error(nil); err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	if err := f.Close(); err != nil && !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	created := http.StatusCreated
	for n := 0; n < 64 && created == http.StatusCreated; n++ {
		created = r.send(newDisk("d" + strconv.Itoa(n))).status
	}
	r.demand(507, "Insufficient capacity: Not enough storage", newDisk("more"))
	looptest.Must(t, os.Remove(ballast))
	made := len(r.disks())
	next := r.again()
	if got := len(next.disks()); got != made || next.state("kept") != "detached" {
		t.Errorf("there are %d disks, want %d", got, made)
	}
	next.disk("fits")
	files, err := filepath.Glob(filepath.Join(next.dir, "disks", "*"))
	if err != nil || len(files) != made+1 {
		t.Errorf("%d files for %d disks (%v)", len(files), made+1, err)
	}
}

func serveAdmin(t *testing.T, s *Server) string {
	t.Helper()
	server := httptest.NewServer(s.Admin())
	t.Cleanup(server.Close)
	return server.URL
}

type process struct {
	cmd   *exec.Cmd
	ready struct{ URL, Admin string }
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

func startIn(t *testing.T, temp, binary string, args ...string) (*process, *bufio.Scanner) {
	t.Helper()
	p := &process{cmd: exec.Command(binary, append([]string{"serve"}, args...)...)}
	p.cmd.Stderr, p.cmd.Env = t.Output(), append(os.Environ(), "TMPDIR="+temp)
	stdout := looptest.Got(p.cmd.StdoutPipe())(t)
	looptest.Must(t, p.cmd.Start())
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
	looptest.Must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

func (p *process) kill(t *testing.T) {
	t.Helper()
	looptest.Must(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait() // always an error, because the process was killed
}

func loopsUnder(t *testing.T, dir string) []loopdev.Device {
	t.Helper()
	needGuests(t)
	dir = looptest.Got(filepath.EvalSymlinks(dir))(t)
	all := looptest.Got(loopdev.List())(t)
	var ours []loopdev.Device
	for _, d := range all {
		if strings.HasPrefix(d.BackingFile, dir+"/") {
			ours = append(ours, d)
		}
	}
	return ours
}

func TestTheBinaryRefusesAnInvalidCommandLine(t *testing.T) {
	binary := buildSimulator(t)
	t.Chdir(t.TempDir())
	seed := func(disk string) string {
		path := filepath.Join(t.TempDir(), "rack.yaml")
		looptest.Must(t, os.WriteFile(path, []byte("disks:\n- "+disk), 0o600))
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
	looptest.Must(t, os.WriteFile(seed, []byte(
		"instances: [{name: a}]\ndisks: [{name: d, size: 1GiB, instance: a}]\n"), 0o644))
	start := func(args ...string) *process {
		p, _ := startIn(t, temp, binary, append([]string{"--seed", seed}, args...)...)
		return p
	}
	foreign := filepath.Join(temp, "oxide-simulator-1", "disks")
	looptest.Must(t, os.MkdirAll(foreign, 0o700))
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

// TestAKilledRackKeepsAcknowledgedChanges kills a rack that has acknowledged some changes and is in
// the middle of others. The next simulator must keep the acknowledged changes, complete the
// unfinished ones (A19), and leave no further file, device or used quota.
func TestAKilledRackKeepsAcknowledgedChanges(t *testing.T) {
	binary, dir := buildSimulator(t), filepath.Join(t.TempDir(), "rack")
	p := startProcess(t, binary, dir)
	r := &rackServer{t: t, url: p.ready.URL, client: client}
	for _, name := range []string{"attached", "detached", "deleted"} {
		r.disk(name)
		r.attach("a", name)
	}
	r.detach("a", "detached")
	r.detach("a", "deleted")
	r.delete("disks/deleted")
	id := r.snapshot("taken", "attached").ID
	r.disk("clone", blankSource, source("snapshot", id))
	looptest.Must(t, adminapi.Client{URL: p.ready.Admin}.Switch(t.Context(),
		map[string]any{"create_hold": "1h", "snapshot_hold": "1h"}))
	created := func(name string) string {
		return fmt.Sprintf(`{"type":"create","name":%q,"description":"","size":1073741824,`+
			`"disk_backend":%s}`, name, blankBackend)
	}
	var open sync.WaitGroup
	for _, request := range []string{newDisk("late"), newDisk("import", blankSource, importing),
		newSnapshot("unfinished", "attached"), newInstance("made", fmt.Sprintf(
			`,"start":false,"boot_disk":%s,"disks":[%s]`, created("boot"), created("data")))} {
		open.Go(func() {
			if got, err := r.try(t.Context(), request); err == nil {
				t.Errorf("%s: HTTP %d: %s", request, got.status, got.body)
			}
		})
	}
	looptest.Await(t, "the rack to be in the middle of every creation", func() bool {
		return len(r.disks()) == 6 && len(list[store.Snapshot](r, "snapshots")) == 2
	})
	p.kill(t)
	open.Wait()

	p = startProcess(t, binary, dir)
	r.url = p.ready.URL
	ids := map[string]string{"": ""}
	for _, i := range list[store.Instance](r, "instances") {
		ids[i.ID] = " " + i.Name
		want := map[bool]string{true: "stopped", false: "running"}[i.Name == "made"]
		if i.RunState != want {
			t.Errorf("instance %s is %s, want %s", i.Name, i.RunState, want)
		}
	}
	found, storage := map[string]string{}, int64(0)
	for _, d := range r.disks() {
		found[d.Name] = d.State.State + ids[d.State.Instance]
		storage += d.Size
	}
	if diff := cmp.Diff(map[string]string{"attached": "attached a", "detached": "detached",
		"clone": "detached", "late": "detached", "import": "import_ready", "boot": "attached made",
		"data": "attached made"}, found); diff != "" {
		t.Errorf("the disks differ (-want +got):\n%s", diff)
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
		if err != nil || len(files) != n || n < 2 {
			t.Errorf("%d files (%v) for %d %s", len(files), err, n, kind)
		}
	}
	if got := loopsUnder(t, dir); len(got) != 1 {
		t.Errorf("the devices are %v, want that of the one disk of a running instance", got)
	}
	p.stop(t)
	if got := loopsUnder(t, dir); len(got) != 0 {
		t.Errorf("SIGTERM left the devices %v", got)
	}
}
