package simulator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// again closes the rack and opens its directory again.
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
	simtest.NoError(r.t, err)
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

func TestARestartCreatesAnInstanceAlthoughItsVPCIsRenamed(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.demand(200, "", `PUT /v1/vpcs/default?project=default {"name":"renamed"}`)
	r.demand(204, "", "DELETE /v1/instances/idle?project=default")
	const interfaces = "GET /v1/network-interfaces?instance=%s&project=default"
	next := r.again()
	next.demand(200, `"items":[]`, fmt.Sprintf(interfaces, "idle"))
	next.demand(200, `"name":"net0"`, fmt.Sprintf(interfaces, "a"))
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
		simtest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", fmt.Sprintf("size=%dk", kib))
		full := engine.Config{Dir: dir, Instances: []engine.InstanceSpec{{Name: "a"}},
			Log: slog.New(slog.DiscardHandler)}
		if _, err := Open(t.Context(), full); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("%d KiB: got %v, want %v", kib, err, syscall.ENOSPC)
		}
		simtest.Command(t, "mount", "-o", "remount,size=4m", dir)
		serveRack(t, engine.Config{Dir: dir}).disk("d")
	}
}

func TestAnImageWithoutARecordIsImportedAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	simtest.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("new!"), 256), 0o600))
	dir := t.TempDir()
	first := serveRack(t, engine.Config{Dir: dir})
	id := store.DerivedID("image", "", "image")
	simtest.NoError(t, os.WriteFile(first.rack.Plane().ImagePath(id), make([]byte, 4096), 0o600))
	simtest.NoError(t, first.Close())

	r := serveRack(t, engine.Config{Dir: dir, Images: []engine.ImageSpec{{Name: "image", File: file}}})
	got, err := os.ReadFile(r.rack.Plane().ImagePath(id))
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
	s := must[*Server](t)(Open(t.Context(), engine.Config{Dir: t.TempDir(), Devices: withoutDevices,
		Log: slog.New(slog.DiscardHandler), CreateHold: time.Hour, InstanceDelay: time.Hour,
		DeviceDelay: time.Hour, Instances: []engine.InstanceSpec{{Name: "a"}}}))
	server := httptest.NewServer(s)
	defer server.Close()
	r := &rackServer{t: t, Server: s, client: client, url: server.URL}
	created := make(chan int)
	go func() {
		got, _ := r.try(t.Context(), newDisk("d")) // the status is 0 without an answer
		created <- got.status
	}()
	simtest.Eventually(t, "the disk to exist", func() bool { return r.exists("d") })
	r.demand(202, "", "POST /v1/instances/a/stop?project=default")
	start := time.Now()
	simtest.NoError(t, s.Close())
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
	before := must[os.FileInfo](t)(os.Stat(guest))
	for range 2 {
		r.disk("d")
		r.attach("a", "d")
		r.snapshot("s", "d")
		r.demand(201, "", newInstance("more", ""))
		used := must[*os.File](t)(os.Open(r.device("a")))
		simtest.NoError(t, r.Reset(t.Context()))
		if _, err := used.ReadAt(make([]byte, 4096), 0); err == nil {
			t.Error("the guest still reads the disk")
		}
		simtest.NoError(t, used.Close())
		left := r.guestDevices("a")
		for _, kind := range []string{"disks/*", "snapshots/*"} {
			left = append(left, must[[]string](t)(filepath.Glob(filepath.Join(r.dir, kind)))...)
		}
		guests := must[[]os.DirEntry](t)(os.ReadDir(filepath.Join(r.dir, "guests")))
		if len(left) > 0 || len(r.disks()) > 0 || len(guests) != 3 {
			t.Errorf("a reset leaves %v, the disks %v and the guests %v", left, r.disks(), guests)
		}
		if !os.SameFile(before, must[os.FileInfo](t)(os.Stat(guest))) {
			t.Error("the guest's view is another directory, which a container with the old one does not see")
		}
		simtest.Eventually(t, "the device is released", func() bool {
			return len(loopsUnder(t, r.dir)) == 0
		})
	}
}

func TestASeededDiskIsBlankAfterAReset(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{Disks: []engine.DiskSpec{{Name: "seeded", SizeBytes: 1 << 30}}})
	path := filepath.Join(r.dir, "disks", r.disks()[0].ID+".img")
	f := must[*os.File](t)(os.OpenFile(path, os.O_WRONLY, 0))
	must[int](t)(f.WriteString("of the earlier life"))
	simtest.NoError(t, f.Close())
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the caller has gone away
	simtest.NoError(t, r.Reset(ctx))
	f = must[*os.File](t)(os.Open(path))
	defer f.Close()
	b := make([]byte, 4096)
	if must[int](t)(f.Read(b)); !bytes.Equal(b, make([]byte, 4096)) {
		t.Errorf("the disk begins with %.20q", b)
	}
}

func TestARestartRestoresTheSizesOfDisks(t *testing.T) {
	r := serveRack(t, engine.Config{})
	d := r.disk("d")
	r.fault(adminapi.Fault{Operation: "instance_disk_attach",
		Device: &adminapi.DeviceFault{SizeBytes: 2 << 30}})
	r.attach("a", "d")
	simtest.Eventually(t, "the device", func() bool { return len(r.guestDevices("a")) == 1 })
	r.force("d", store.DiskState{State: store.StateDetached}) // a detach that ended halfway
	next := r.again()
	if got := diskSize(t, next, d.ID); got != 1<<30 {
		t.Errorf("the disk has %d bytes, want 1 GiB", got)
	}
}

func diskSize(t *testing.T, r *rackServer, id string) int64 {
	t.Helper()
	st, err := os.Stat(r.rack.Plane().DiskPath(id))
	simtest.NoError(t, err)
	return st.Size()
}

// device waits until an instance's guest has one device, and returns the path of the device node.
func (r *rackServer) device(instance string) string {
	r.t.Helper()
	simtest.Eventually(r.t, "a device in guest "+instance, func() bool {
		return len(r.guestDevices(instance)) == 1
	})
	return filepath.Join(r.GuestDir(r.instance(instance).ID), "dev", r.guestDevices(instance)[0])
}

func readDevice(t *testing.T, path string, offset int64, n int) string {
	t.Helper()
	f, err := os.Open(path)
	simtest.NoError(t, err)
	defer f.Close()
	data := make([]byte, n)
	if _, err := f.ReadAt(data, offset); err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestDeviceFaultsChangeTheDeviceOfADisk(t *testing.T) {
	needGuests(t)
	r := serveRack(t, engine.Config{})
	const late = adminapi.Duration(150 * time.Millisecond)
	for name, c := range map[string]struct {
		rule  adminapi.DeviceFault
		slow  time.Duration
		sizes []int64 // of the loop devices
	}{
		"with-another-size": {adminapi.DeviceFault{SizeBytes: 1 << 20}, 0, []int64{1 << 20}},
		"late":              {adminapi.DeviceFault{Delay: late}, time.Duration(late), []int64{1 << 30}},
		"larger":            {adminapi.DeviceFault{SizeBytes: 2 << 30}, 0, []int64{2 << 30}},
		"never":             {adminapi.DeviceFault{Never: true}, 0, nil},
		"not-at-all":        {adminapi.DeviceFault{Fails: true}, 0, nil},
	} {
		r.Faults.Clear()
		id := r.disk(name).ID
		r.fault(adminapi.Fault{Operation: "instance_disk_attach", Device: &c.rule})
		start := time.Now()
		if c.rule.Fails {
			r.demand(500, "Internal Server Error", moving("attach", "a", name))
		} else {
			r.attach("a", name)
		}
		var sizes []int64
		for _, d := range r.ownDevices() {
			sizes = append(sizes, d.SizeBytes)
		}
		if len(sizes) > 0 {
			r.device("a")
		}
		if got := r.state(name); !slices.Equal(sizes, c.sizes) || time.Since(start) < c.slow ||
			(got == "detached") != c.rule.Fails {
			t.Errorf("%s: devices of %v bytes after %s, and the disk is %s", name, sizes,
				time.Since(start), got)
		}
		if !c.rule.Fails {
			r.detach("a", name)
		}
		if size := diskSize(t, r, id); size != 1<<30 {
			t.Errorf("%s: afterwards the disk's file has %d bytes", name, size)
		}
	}
}

func TestAFullHostRefusesNewDisksAndKeepsTheOthers(t *testing.T) { // A27
	needGuests(t)
	dir := t.TempDir()
	simtest.Mount(t, "tmpfs", dir, "-t", "tmpfs", "-o", "size=3m")
	r := serveRack(t, engine.Config{Dir: filepath.Join(dir, "rack")})
	r.disk("kept")
	ballast := filepath.Join(dir, "ballast")
	f, err := os.Create(ballast)
	simtest.NoError(t, err)
	for _, size := range []int{1 << 16, 4096, 1} {
		for err = nil; err == nil; {
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
	simtest.NoError(t, os.Remove(ballast))
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
