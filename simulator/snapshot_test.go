package simulator

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func (r *rack) snapshotState(name string) string {
	sn, err := r.SnapshotView(r.t.Context(),
		oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(name), Project: "default"})
	if err != nil {
		return "none"
	}
	return string(sn.State)
}

func (r *rack) dropSnapshot(name string) error {
	return r.SnapshotDelete(r.t.Context(),
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(name), Project: "default"})
}

func TestA38ASnapshotsLife(t *testing.T) {
	r := newRack(t, engine.Config{SnapshotHold: 300 * time.Millisecond})
	d := r.disk("d")
	answered := make(chan *oxide.Snapshot, 1)
	go func() {
		sn, err := r.doSnapshot("s", "d")
		if err != nil {
			t.Error(err)
		}
		answered <- sn
	}()
	simtest.Eventually(t, "the snapshot to be seen",
		func() bool { return r.snapshotState("s") == "creating" })
	if got := r.state("d"); got != "maintenance" {
		t.Errorf("meanwhile the disk is %q, want maintenance", got)
	}
	_, err := r.doSnapshot("s2", "d")
	refusedAs(409, "Conflict", "volume repair lock").check(t, err) // A39
	_, err = r.doAttach("a", "d")
	refusedAs(400, "InvalidRequest", `cannot attach disk "d": invalid state maintenance`).check(t, err)
	refusedAs(400, "InvalidRequest", "snapshot cannot be deleted in state Creating").
		check(t, r.dropSnapshot("s")) // A43
	sn := <-answered
	if sn.State != "ready" || sn.Size != 1<<30 || sn.DiskId != d.Id || sn.ProjectId != d.ProjectId {
		t.Errorf("got %+v", sn)
	}
	if got := r.state("d"); got != "detached" {
		t.Errorf("afterwards the disk is %q, want detached", got)
	}
}

func TestA38ADiskThatIsAttachedStaysSo(t *testing.T) {
	r := newRack(t, engine.Config{SnapshotHold: 200 * time.Millisecond})
	r.disk("d")
	must[*oxide.Disk](t)(r.doAttach("idle", "d"))
	done := make(chan error)
	go func() {
		_, err := r.doSnapshot("s", "d")
		done <- err
	}()
	simtest.Eventually(t, "the snapshot to be seen",
		func() bool { return r.snapshotState("s") == "creating" })
	if got := r.state("d"); got != "attached" {
		t.Errorf("meanwhile the disk is %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestA43SnapshotsAndDisksSurviveEachOther(t *testing.T) {
	r := newRack(t, engine.Config{})
	r.disk("d")
	sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
	if err := r.doDelete("d"); err != nil {
		t.Fatal(err)
	}
	restored := must[*oxide.Disk](t)(r.DiskCreate(t.Context(),
		r.from(snapshotSource(sn.Id, false), "restored", 2)))
	if restored.SnapshotId != sn.Id {
		t.Errorf("got %+v", restored)
	}
	if err := r.dropSnapshot("s"); err != nil {
		t.Fatal(err)
	}
	gone("snapshot", "s").check(t, r.dropSnapshot("s"))
	if got := r.state("restored"); got != "detached" {
		t.Errorf("got %q", got)
	}
}

func TestSituationsOfSnapshot(t *testing.T) {
	r := newRack(t, engine.Config{Projects: []string{"default", "other"}})
	p := r.blank("d", 1)
	p.Project = "other"
	there := must[*oxide.Disk](t)(r.DiskCreate(t.Context(), p)).Id
	r.disk("d")
	r.disk("faulted")
	r.force("faulted", store.DiskState{State: store.StateFaulted})
	must[*oxide.Snapshot](t)(r.doSnapshot("taken", "d"))
	nobody := uuid.NewString()
	for _, test := range []struct {
		name, snapshot, disk string
		want                 refused
	}{
		{"duplicate name", "taken", "d",
			refusedAs(400, "ObjectAlreadyExists", `already exists: snapshot "taken"`)},
		{"no disk of that name", "s", "nope", gone("disk", "nope")},
		{"no disk of that ID", "s", nobody,
			refusedAs(404, "ObjectNotFound", "not found: disk with id %q", nobody)},
		{"disk of another project", "s", there, refusedAs(400, "InvalidRequest",
			"can't create a snapshot of a disk in a different project")},
		{"A42 disk in no state for it", "s", "faulted",
			refusedAs(503, "ServiceNotAvailable", "Service Unavailable")},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := r.doSnapshot(test.snapshot, test.disk)
			test.want.check(t, err)
		})
	}
}

func TestASnapshotThatUnwindsLeavesNothing(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 2 << 30})
	r.disk("d")
	r.fault(adminapi.Fault{Operation: "snapshot_create", Phase: adminapi.Unwind, Times: 1})
	_, err := r.doSnapshot("s", "d")
	refusedAs(500, "Internal", "Internal Server Error").check(t, err)
	if disk, sn := r.state("d"), r.snapshotState("s"); disk != "detached" || sn != "none" {
		t.Errorf("it left the disk %q and the snapshot %q", disk, sn)
	}
	must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
}

func TestA44Images(t *testing.T) {
	r := newRack(t, engine.Config{Images: []engine.ImageSpec{
		{Name: "silo-image", SizeBytes: 1 << 20},
		{Name: "project-image", Project: "default", SizeBytes: 1 << 30, BlockSize: 4096}}})
	silo := must[[]oxide.Image](t)(r.ImageListAllPages(t.Context(), oxide.ImageListParams{}))
	if len(silo) != 1 || silo[0].Name != "silo-image" || silo[0].ProjectId != "" {
		t.Errorf("the silo's images: %+v", silo)
	}
	ours := must[[]oxide.Image](t)(r.ImageListAllPages(t.Context(),
		oxide.ImageListParams{Project: "default"}))
	if len(ours) != 1 || ours[0].Name != "project-image" || ours[0].ProjectId == "" {
		t.Errorf("the project's images: %+v", ours)
	}
	got := must[*oxide.Image](t)(r.ImageView(t.Context(),
		oxide.ImageViewParams{Image: oxide.NameOrId(ours[0].Id)}))
	if got.Size != 1<<30 || got.BlockSize != 4096 {
		t.Errorf("got %+v", got)
	}
	_, err := r.ImageView(t.Context(), oxide.ImageViewParams{Image: "project-image"})
	gone("silo-image", "project-image").check(t, err)
	_, err = r.ImageView(t.Context(),
		oxide.ImageViewParams{Image: "silo-image", Project: "default"})
	gone("project-image", "silo-image").check(t, err)
	nobody := uuid.NewString()
	_, err = r.ImageView(t.Context(), oxide.ImageViewParams{Image: oxide.NameOrId(nobody)})
	refusedAs(404, "ObjectNotFound", "not found: image with id %q", nobody).check(t, err)
}
