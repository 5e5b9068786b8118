package simulator

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func snapshotSource(id string, readOnly bool) oxide.DiskSource {
	return oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: id, ReadOnly: &readOnly}}
}

func imageSource(id string, readOnly bool) oxide.DiskSource {
	return oxide.DiskSource{Value: &oxide.DiskSourceImage{ImageId: id, ReadOnly: &readOnly}}
}

func TestA22ADiskIsCreatingInTheAnswerAndDetachedAfterIt(t *testing.T) {
	r := newRack(t, engine.Config{})
	d := r.disk("pvc-1")
	want := oxide.Disk{Id: d.Id, Name: "pvc-1", ProjectId: d.ProjectId, Size: 1 << 30,
		BlockSize: 512, DevicePath: "/mnt/pvc-1", DiskType: "distributed"}
	if d.State.State() != "creating" || d.Name != want.Name || d.Size != want.Size ||
		d.BlockSize != want.BlockSize || d.DevicePath != want.DevicePath ||
		d.DiskType != want.DiskType || *d.ReadOnly {
		t.Errorf("got %+v", d)
	}
	if got := r.state("pvc-1"); got != "detached" {
		t.Errorf("the next read says %q, want detached", got)
	}
	if err := r.doDelete("pvc-1"); err != nil {
		t.Fatal(err)
	}
	gone("disk", "pvc-1").check(t, r.doDelete("pvc-1"))
	r.disk("pvc-1") // the name is free again
}

func TestA23AReadOnlyDiskIsDetachedAtOnce(t *testing.T) {
	r := newRack(t, engine.Config{})
	r.disk("d")
	sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
	ro := must[*oxide.Disk](t)(r.DiskCreate(t.Context(),
		r.from(snapshotSource(sn.Id, true), "ro", 1)))
	if ro.State.State() != "detached" || !*ro.ReadOnly || ro.SnapshotId != sn.Id {
		t.Errorf("got %+v", ro)
	}
	_, err := r.doSnapshot("s2", "ro")
	refusedAs(400, "InvalidRequest", "can't create a snapshot of a read-only disk").check(t, err)
}

func TestSituationsOfCreate(t *testing.T) {
	r := newRack(t, engine.Config{Projects: []string{"default", "other"}, Images: []engine.ImageSpec{
		{Name: "silo", SizeBytes: 2 << 30, BlockSize: 4096},
		{Name: "theirs", Project: "other", SizeBytes: 1 << 30}}})
	r.disk("taken")
	r.call("POST", "/v1/disks?project=default", `{"name":"two","description":"","size":2147483648,
		"disk_backend":{"type":"distributed","disk_source":{"type":"blank","block_size":2048}}}`)
	two := must[*oxide.Snapshot](t)(r.doSnapshot("two", "two")).Id
	elsewhere := r.blank("there", 1)
	elsewhere.Project = "other"
	must[*oxide.Disk](t)(r.DiskCreate(t.Context(), elsewhere))
	theirs := must[*oxide.Snapshot](t)(r.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{
		Project: "other", Body: &oxide.SnapshotCreate{Name: "s", Disk: "there"}})).Id
	silo := must[*oxide.Image](t)(r.ImageView(t.Context(), oxide.ImageViewParams{Image: "silo"})).Id
	other := must[*oxide.Image](t)(r.ImageView(t.Context(),
		oxide.ImageViewParams{Image: "theirs", Project: "other"})).Id
	nobody := uuid.NewString()
	bytes := func(p oxide.DiskCreateParams, size uint64) oxide.DiskCreateParams {
		p.Body.Size = oxide.ByteCount(size)
		return p
	}
	const least = `unsupported value for "size": total size must be at least 1 GiB`
	for _, test := range []struct {
		name   string
		create oxide.DiskCreateParams
		want   refused
	}{
		{"A01 duplicate name", r.blank("taken", 5), refusedAs(400, "ObjectAlreadyExists",
			`already exists: disk "taken"`)},
		{"A25 less than 1 GiB", bytes(r.blank("x", 0), 1<<29), refusedAs(400, "InvalidValue", least)},
		{"A25 nothing", r.blank("x", 0), refusedAs(400, "InvalidValue", least)},
		{"A25 no whole GiB", bytes(r.blank("x", 1), 1<<30+512), refusedAs(400, "InvalidValue",
			`unsupported value for "size": total size must be a multiple of 1 GiB`)},
		{"A28 no whole block", bytes(r.blank("x", 1), 1<<29+1), refusedAs(400, "InvalidValue",
			`unsupported value for "size and block_size": `+
				`total size must be a multiple of block size 512`)},
		{"A25 1023 GiB", r.blank("largest", 1023), refused{}},
		{"A25 more", r.blank("x", 1024), refusedAs(400, "InvalidValue",
			`unsupported value for "size": total size must be less than 1023 GiB`)},
		{"A26 local", r.local("local", 1), refused{}},
		{"A26 local beyond any drive, and so beyond the quota", r.local("x", 11<<20),
			refusedAs(507, "InsufficientCapacity", quotaText)},
		{"from a snapshot", r.from(snapshotSource(two, false), "restored", 3), refused{}},
		{"from a snapshot, smaller", r.from(snapshotSource(two, false), "x", 1), refusedAs(400,
			"InvalidRequest",
			"disk size 1073741824 must be greater than or equal to snapshot size 2147483648")},
		{"from a snapshot, read-only, larger", r.from(snapshotSource(two, true), "x", 3),
			refusedAs(400, "InvalidRequest",
				"read-only disk size 3221225472 must be equal to source snapshot size 2147483648")},
		{"from a snapshot of another project", r.from(snapshotSource(theirs, false), "x", 1),
			refusedAs(400, "InvalidRequest", "snapshot does not belong to this project")},
		{"from no snapshot", r.from(snapshotSource(nobody, false), "x", 1),
			refusedAs(404, "ObjectNotFound", "not found: snapshot with id %q", nobody)},
		{"from an image of the silo", r.from(imageSource(silo, false), "imaged", 2), refused{}},
		{"from an image, smaller", r.from(imageSource(silo, false), "x", 1), refusedAs(400,
			"InvalidRequest",
			"disk size 1073741824 must be greater than or equal to image size 2147483648")},
		{"from an image of another project", r.from(imageSource(other, false), "x", 1),
			refusedAs(400, "InvalidRequest", "image does not belong to this project")},
		{"from no image", r.from(imageSource(nobody, false), "x", 1),
			refusedAs(404, "ObjectNotFound", "not found: image with id %q", nobody)},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := r.DiskCreate(t.Context(), test.create)
			test.want.check(t, err)
		})
	}
	inherited := map[string]oxide.BlockSize{"restored": 2048, "imaged": 4096, "local": 4096}
	for name, size := range inherited {
		d := must[*oxide.Disk](t)(r.DiskView(t.Context(),
			oxide.DiskViewParams{Disk: oxide.NameOrId(name), Project: "default"}))
		if d.BlockSize != size {
			t.Errorf("A40: %s has blocks of %d, want %d", name, d.BlockSize, size)
		}
	}
}

const quotaText = "Insufficient capacity: Storage Limit Exceeded: Not enough storage to complete " +
	"request. Either remove unneeded disks and snapshots to free up resources or contact the " +
	"rack operator to request a capacity increase."

func TestA29TheQuotaIsChargedBeforeTheNameIsLookedAt(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 3 << 30})
	full := refusedAs(507, "InsufficientCapacity", quotaText)
	r.disk("a")
	must[*oxide.Snapshot](t)(r.doSnapshot("s", "a"))
	_, err := r.DiskCreate(t.Context(), r.blank("b", 2))
	full.check(t, err)
	r.disk("b")
	_, err = r.DiskCreate(t.Context(), r.blank("a", 1))
	full.check(t, err)
	_, err = r.doSnapshot("s2", "a")
	full.check(t, err)
	r.force("b", store.DiskState{State: store.StateImportReady})
	_, err = r.doSnapshot("s2", "b")
	full.check(t, err) // A41: also where the disk is in no state for it
	_, err = r.doSnapshot("s", "a")
	refusedAs(400, "ObjectAlreadyExists", `already exists: snapshot "s"`).check(t, err) // A41

	if got := r.state("a"); got != "detached" {
		t.Errorf("a refused snapshot leaves its disk %q", got)
	}
	if err := r.SnapshotDelete(t.Context(),
		oxide.SnapshotDeleteParams{Snapshot: "s", Project: "default"}); err != nil {
		t.Fatal(err)
	}
	r.disk("c")
	if err := r.doDelete("c"); err != nil {
		t.Fatal(err)
	}
	r.disk("d")
}

func TestSituationsOfDelete(t *testing.T) {
	for _, test := range []struct {
		state string
		want  refused
	}{
		{store.StateDetached, refused{}},
		{store.StateFaulted, refused{}},
		{store.StateCreating, refusedAs(400, "InvalidRequest",
			`disk cannot be deleted in state "creating"`)},
		{store.StateMaintenance, refusedAs(400, "InvalidRequest",
			`disk cannot be deleted in state "maintenance"`)},
		{store.StateImportReady, refusedAs(400, "InvalidRequest",
			`disk cannot be deleted in state "import_ready"`)},
		{store.StateAttached, refusedAs(400, "InvalidRequest",
			`disk cannot be deleted in state "attached"`)},
	} {
		t.Run(test.state, func(t *testing.T) {
			r := newRack(t, engine.Config{})
			r.disk("d")
			state := store.DiskState{State: test.state}
			if test.state == store.StateAttached {
				state.Instance = r.instance("a").Id
			}
			r.force("d", state)
			test.want.check(t, r.doDelete("d"))
		})
	}
}

func TestA24AFailedDeleteLeavesTheDiskUnderAnotherName(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 1 << 30})
	d := r.disk("d")
	r.fault(adminapi.Fault{Operation: "disk_delete", Phase: adminapi.Unwind, Times: 1})
	refusedAs(500, "Internal", "Internal Server Error").check(t, r.doDelete("d"))
	gone("disk", "d").check(t, r.doDelete("d"))
	if got := r.state("deleted-" + d.Id); got != "faulted" {
		t.Errorf("got %q, want faulted", got)
	}
	_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
	refusedAs(507, "InsufficientCapacity", quotaText).check(t, err)
	if err := r.doDelete("deleted-" + d.Id); err != nil {
		t.Fatal(err)
	}
	r.disk("d")
}

func TestA18ACreateGoesOnWithoutItsCaller(t *testing.T) {
	r := newRack(t, engine.Config{CreateHold: 400 * time.Millisecond})
	c, err := oxide.NewClient(oxide.WithHost(r.url), oxide.WithToken(testToken),
		oxide.WithTimeout(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.DiskCreate(t.Context(), r.blank("d", 1)); err == nil {
		t.Fatal("the caller did not time out")
	}
	if got := r.state("d"); got != "creating" {
		t.Errorf("meanwhile others see %q, want creating", got)
	}
	refusedAs(400, "InvalidRequest", `disk cannot be deleted in state "creating"`).
		check(t, r.doDelete("d"))
	simtest.Eventually(t, "the disk to be detached", func() bool { return r.state("d") == "detached" })
}

func TestA32ADiskThatIsBeingCreatedCanBeAttached(t *testing.T) {
	r := newRack(t, engine.Config{CreateHold: 200 * time.Millisecond})
	created := make(chan error)
	go func() {
		_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
		created <- err
	}()
	simtest.Eventually(t, "the disk to be there", func() bool {
		_, err := r.DiskView(t.Context(), oxide.DiskViewParams{Disk: "d", Project: "default"})
		return err == nil
	})
	d := must[*oxide.Disk](t)(r.doAttach("a", "d"))
	if d.State.State() != "attached" {
		t.Errorf("got %q", d.State.State())
	}
	if err := <-created; err != nil {
		t.Error(err)
	}
	if got := r.state("d"); got != "attached" {
		t.Errorf("the end of the creation makes it %q", got)
	}
}

func TestACreateThatUnwindsLeavesNothing(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 1 << 30})
	r.fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Unwind, Times: 1})
	_, err := r.DiskCreate(t.Context(), r.blank("d", 1))
	refusedAs(500, "Internal", "Internal Server Error").check(t, err)
	gone("disk", "d").check(t, r.doDelete("d"))
	r.disk("d")
}

func TestAnImportedDiskWaitsForItsBlocks(t *testing.T) {
	r := newRack(t, engine.Config{})
	d := must[*oxide.Disk](t)(r.DiskCreate(t.Context(), r.from(oxide.DiskSource{
		Value: &oxide.DiskSourceImportingBlocks{BlockSize: 512}}, "d", 1)))
	if got := r.state("d"); d.State.State() != "creating" || got != "import_ready" {
		t.Errorf("got %q and then %q", d.State.State(), got)
	}
}

func TestA70ADescriptionFitsIntoTheRacksDatabase(t *testing.T) {
	r := newRack(t, engine.Config{})
	create := func(name string, characters int) error {
		_, err := r.DiskCreate(t.Context(), oxide.DiskCreateParams{Project: "default",
			Body: &oxide.DiskCreate{Name: oxide.Name(name), Size: 1 << 30,
				Description: strings.Repeat("é", characters), DiskBackend: oxide.DiskBackend{
					Value: &oxide.DiskBackendDistributed{DiskSource: oxide.DiskSource{
						Value: &oxide.DiskSourceBlank{BlockSize: 512}}}}}})
		return err
	}
	if err := create("long", 512); err != nil {
		t.Error(err)
	}
	refusedAs(500, "Internal", "Internal Server Error").check(t, create("longer", 513))
	take := func(name string, characters int) error {
		_, err := r.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{Project: "default",
			Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Disk: "long",
				Description: strings.Repeat("é", characters)}})
		return err
	}
	if err := take("long", 512); err != nil {
		t.Error(err)
	}
	refusedAs(500, "Internal", "Internal Server Error").check(t, take("longer", 513))
}
