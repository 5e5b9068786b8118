package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"go.uber.org/goleak"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// again opens the directory of a closed rack again.
func (r *rackServer) again() *rackServer {
	r.t.Helper()
	if err := r.Close(); err != nil {
		r.t.Fatalf("close: %v", err)
	}
	return serveRack(r.t, engine.Config{Dir: r.dir})
}

// guestDevices returns the devices in an instance's guest.
func (r *rackServer) guestDevices(instance string) []string {
	r.t.Helper()
	entries, err := os.ReadDir(filepath.Join(r.GuestDir(r.instance(instance).Id), "sys", "block"))
	if err != nil {
		r.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestARestartedRackHasEverything(t *testing.T) {
	r := serveRack(t, engine.Config{Images: []engine.ImageSpec{{Name: "image", SizeBytes: 1 << 20}}})
	d := r.disk("d")
	r.disk("e")
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	must[*oxide.Snapshot](t)(r.doSnapshot("s", "e"))
	must[*oxide.Instance](t)(r.doCreate(r.instanceBody("more")))
	r.doStop("b")
	simtest.Eventually(t, "the device", func() bool { return len(r.guestDevices("a")) == 1 })

	next := r.again()
	for name, state := range map[string]string{"d": "attached", "e": "detached"} {
		if got := next.state(name); got != state {
			t.Errorf("%s is %q, want %q", name, got, state)
		}
	}
	if got := next.disks()[0]; got.Id != d.Id || !got.TimeCreated.Equal(*d.TimeCreated) {
		t.Errorf("disk d was %+v and is %+v", d, got)
	}
	if got := next.snapshotState("s"); got != "ready" {
		t.Errorf("the snapshot is %q", got)
	}
	for name, state := range map[string]string{
		"a": "running", "b": "stopped", "idle": "stopped", "more": "running",
	} {
		if got := next.instance(name).RunState; string(got) != state {
			t.Errorf("instance %s is %s, want %s", name, got, state)
		}
	}
	simtest.Eventually(t, "the device again", func() bool { return len(next.guestDevices("a")) == 1 })
	u := must[*oxide.Utilization](t)(next.UtilizationView(t.Context()))
	if u.Provisioned.Storage != 3<<30 {
		t.Errorf("storage is %d, want 3 GiB", u.Provisioned.Storage)
	}
}

func (r *rackServer) disks() []oxide.Disk {
	r.t.Helper()
	return must[[]oxide.Disk](r.t)(r.DiskListAllPages(r.t.Context(),
		oxide.DiskListParams{Project: "default"}))
}

// TestA19ARestartUndoesOrCompletesUnfinishedWork demands that the unfinished work of a simulator
// that died is undone or completed.
func TestA19ARestartUndoesOrCompletesUnfinishedWork(t *testing.T) {
	r := serveRack(t, engine.Config{})
	for _, name := range []string{"half", "resting", "attached", "made", "lent"} {
		r.disk(name)
	}
	must[*oxide.Snapshot](t)(r.doSnapshot("begun", "resting"))
	must[*oxide.Disk](t)(r.doAttach("a", "attached"))
	r.forceRun("b", store.RunStopping)
	r.forceRun("idle", store.RunStarting)
	r.force("half", store.DiskState{State: store.StateCreating})
	r.force("resting", store.DiskState{State: store.StateMaintenance})
	halfMadeInstance(r, "begun", "made", "lent")
	r.update(func(tx *store.Tx, project string) error {
		sn, _, err := store.Snapshots.ByName(tx, project, "begun")
		sn.State = store.SnapshotCreating
		return errors.Join(err, store.Snapshots.Put(tx, sn))
	})

	next := r.again()
	var got []string
	for _, d := range next.disks() {
		got = append(got, string(d.Name)+" "+string(d.State.State()))
	}
	want := "attached attached, lent detached, resting detached"
	if s := strings.Join(got, ", "); s != want {
		t.Errorf("got  %s\nwant %s", s, want)
	}
	if s := next.snapshotState("begun"); s != "none" {
		t.Errorf("the snapshot is %q", s)
	}
	for name, state := range map[string]string{"b": "stopped", "idle": "running"} {
		if got := next.instance(name).RunState; string(got) != state {
			t.Errorf("instance %s is %s, want %s", name, got, state)
		}
	}
	_, err := next.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: "begun", Project: "default"})
	gone("instance", "begun").check(t, err)
	u := must[*oxide.Utilization](t)(next.UtilizationView(t.Context()))
	if u.Provisioned.Storage != 3<<30 {
		t.Errorf("storage is %d, want 3 GiB", u.Provisioned.Storage)
	}
	files, err := filepath.Glob(filepath.Join(next.dir, "disks", "*"))
	if err != nil || len(files) != 3 {
		t.Errorf("the disks' files are %v (%v), want 3", files, err)
	}
}

// halfMadeInstance leaves the records of a creation that was cut off halfway.
func halfMadeInstance(r *rackServer, name, made, lent string) {
	r.t.Helper()
	r.update(func(tx *store.Tx, project string) error {
		i := store.Instance{Identity: store.NewIdentity(store.DerivedID(name), name, ""),
			ProjectID: project}
		i.SetRunState(store.StateCreating)
		var ids []string
		for _, disk := range []string{made, lent} {
			d, _, err := store.Disks.ByName(tx, project, disk)
			if err != nil {
				return err
			}
			d.State = store.DiskState{State: store.StateAttached, Instance: i.ID}
			if err := tx.PutDisk(d); err != nil {
				return err
			}
			ids = append(ids, d.ID)
		}
		return tx.InsertInstance(i, nil, ids[:1])
	})
}

func TestADirectoryOfAnotherVersionIsRefusedUnchanged(t *testing.T) {
	r := serveRack(t, engine.Config{})
	r.disk("d")
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	version := filepath.Join(r.dir, "VERSION")
	if err := os.WriteFile(version, []byte("7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(filepath.Join(r.dir, "rack.db"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), engine.Config{Dir: r.dir, Log: slog.New(slog.DiscardHandler)})
	const want = `says version "7" and this simulator reads version "1"`
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v", err)
	}
	after, err := os.ReadFile(filepath.Join(r.dir, "rack.db"))
	if err != nil || string(before) != string(after) {
		t.Errorf("the records changed (%v)", err)
	}
}

func TestADirectoryIsUsedByOneSimulatorOnly(t *testing.T) {
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

func TestAForeignDirectoryIsRefusedUnchanged(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "letter"), []byte("dear"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := engine.Config{Dir: dir, Log: slog.New(slog.DiscardHandler)}
	if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(),
		`it holds "letter"`) {
		t.Errorf("got %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("the directory has %v (%v)", entries, err)
	}
}

func TestADirectoryThatWasCreatedOnAFullDiskWorksLater(t *testing.T) {
	simtest.NeedRoot(t)
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

func TestAnImageWhoseImportWasNotRecordedIsImportedAnew(t *testing.T) {
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

func TestAServerReportsTheIDsOfItsInstances(t *testing.T) {
	id := store.DerivedID("some", "other")
	first := serveRack(t, engine.Config{Instances: []engine.InstanceSpec{{Name: "a", ID: id}}})
	simtest.NoError(t, first.Close())
	again := serveRack(t, engine.Config{Dir: first.dir, Instances: []engine.InstanceSpec{{Name: "a"}}})
	if got := again.Server.Instances()[0].ID; got != id {
		t.Errorf("it says %s, want %s", got, id)
	}
}

func TestASlowCallerOfTheAdminListenerBlocksNobody(t *testing.T) {
	r := serveRack(t, engine.Config{})
	body, slow := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Admin().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(
			http.MethodPatch, "/switches", body))
	}()
	_, err := io.WriteString(slow, "{")
	simtest.NoError(t, err) // the listener reads the body
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		_ = r.rack.Switches()
	}()
	select {
	case <-answered:
	case <-time.After(5 * time.Second):
		t.Error("the rack waits for a caller of its admin listener")
	}
	simtest.NoError(t, slow.Close())
	<-done
	<-answered
}

func TestBadConfigurationsAreRefused(t *testing.T) {
	for want, c := range map[string]engine.Config{
		`project "X": name must begin`:  {Projects: []string{"X"}},
		`instance "X": name must begin`: {Instances: []engine.InstanceSpec{{Name: "X"}}},
		`its ID "5" is no UUID`:         {Instances: []engine.InstanceSpec{{Name: "x", ID: "5"}}},
		`there is no project "other"`: {Instances: []engine.InstanceSpec{{Name: "x",
			Project: "other"}}},
		"needs a size or a file":    {Images: []engine.ImageSpec{{Name: "x"}}},
		"no such file or directory": {Images: []engine.ImageSpec{{Name: "x", File: "/nowhere"}}},
		"role is \"king\"; use":     {Role: "king"},
		`is that of instance "x"`: {Instances: []engine.InstanceSpec{
			{Name: "x", ID: store.DerivedID("x")}, {Name: "y", ID: store.DerivedID("x")}}},
		"quota_bytes is -1; it cannot be": {QuotaBytes: -1},
	} {
		c.Dir, c.Log = t.TempDir(), slog.New(slog.DiscardHandler)
		if _, err := Open(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestTheAdminListenerShowsAndChangesTheRack(t *testing.T) {
	r := serveRack(t, engine.Config{})
	url := serveAdmin(t, r.Server)
	r.disk("d")
	must[*oxide.Disk](t)(r.doAttach("a", "d"))

	var log []adminapi.Request
	adminCall(t, url, "GET", "/requests", "", &log)
	if len(log) != 2 || log[0].Operation != "disk_create" || log[0].Status != 201 ||
		log[0].Object != "d" || log[0].ObjectID == "" || log[0].DurationMS <= 0 ||
		log[1].Operation != "instance_disk_attach" || log[1].ObjectID != log[0].ObjectID {
		t.Errorf("got %+v", log)
	}
	adminCall(t, url, "GET", "/requests?since=1", "", &log)
	if len(log) != 1 || log[0].Seq != 2 {
		t.Errorf("since 1: got %+v", log)
	}
	adminCall(t, url, "DELETE", "/requests", "", nil)
	r.state("d")
	adminCall(t, url, "GET", "/requests", "", &log)
	if len(log) != 1 || log[0].Seq != 3 {
		t.Errorf("after forgetting: got %+v", log)
	}

	var added struct{ ID string }
	adminCall(t, url, "POST", "/faults", `{"operation":"disk_view","times":1,"hang":"10ms"}`, &added)
	var rules []adminapi.ActiveFault
	adminCall(t, url, "GET", "/faults", "", &rules)
	if len(rules) != 1 || rules[0].ID != added.ID || rules[0].Phase != adminapi.Instead ||
		rules[0].Hang != adminapi.Duration(10e6) {
		t.Errorf("got %+v", rules)
	}
	for _, bad := range []string{`{"opration":"disk_view"}`, `{"operation":"disk_vieww","cut":true}`,
		`{"delay":"-1s"}`, `{`} {
		if got := adminCall(t, url, "POST", "/faults", bad, nil); got != 400 {
			t.Errorf("%s: got %d, want 400", bad, got)
		}
	}
	if got := adminCall(t, url, "DELETE", "/faults/"+added.ID, "", nil); got != 204 {
		t.Errorf("got %d", got)
	}
	if got := adminCall(t, url, "DELETE", "/faults/"+added.ID, "", nil); got != 404 {
		t.Errorf("got %d", got)
	}

	var now adminapi.Switches
	adminCall(t, url, "PATCH", "/switches",
		`{"hotplug":false,"device_delay":"1.5s","disk_limit":3}`, &now)
	if now.Hotplug || now.DeviceDelay != adminapi.Duration(1.5e9) || now.DiskLimit != 3 ||
		now.QuotaBytes != 64<<40 {
		t.Errorf("got %+v", now)
	}
	if got := adminCall(t, url, "PATCH", "/switches", `{"role":"king"}`, nil); got != 400 {
		t.Errorf("got %d", got)
	}
	adminCall(t, url, "GET", "/switches", "", &now)
	if now.Role != adminapi.RoleCollaborator {
		t.Errorf("got %+v", now)
	}

	var state adminapi.State
	adminCall(t, url, "GET", "/state", "", &state)
	if len(state.Disks) != 1 || len(state.Instances) != 3 || len(state.Attachments) != 1 ||
		len(state.LoopDevices) != 1 || state.LoopDevices[0].Serial != "d" ||
		state.StorageBytes != 1<<30 {
		text, _ := json.MarshalIndent(state, "", " ")
		t.Errorf("got %s", text)
	}
}

func TestCloseCutsDelaysShortAndLeavesNothingRunning(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	s := must[*Server](t)(Open(t.Context(), engine.Config{Dir: t.TempDir(),
		Log: slog.New(slog.DiscardHandler), CreateHold: time.Hour, InstanceDelay: time.Hour,
		DeviceDelay: time.Hour, Instances: []engine.InstanceSpec{{Name: "a"}}}))
	server := httptest.NewServer(s)
	defer server.Close()
	r := &rackServer{t: t, Server: s, Client: newClient(t, server.URL), url: server.URL}
	created := make(chan error)
	go func() {
		_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
		created <- err
	}()
	simtest.Eventually(t, "the disk to be there", func() bool {
		_, err := r.DiskView(t.Context(), oxide.DiskViewParams{Disk: "d", Project: "default"})
		return err == nil
	})
	must[*oxide.Instance](t)(r.change("stop", "a"))
	start := time.Now()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-created; err != nil {
		t.Errorf("the creation under way ends with %v", err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
}
