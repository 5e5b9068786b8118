package simulator

import (
	"bytes"
	"encoding/base64"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const chunk = 512 << 10

func (r *rackServer) importing(name string) *oxide.Disk {
	r.t.Helper()
	return must[*oxide.Disk](r.t)(r.DiskCreate(r.t.Context(), r.from(oxide.DiskSource{
		Value: &oxide.DiskSourceImportingBlocks{BlockSize: 512}}, name, 1)))
}

func (r *rackServer) doStartImport(disk string) error {
	return r.DiskBulkWriteImportStart(r.t.Context(), oxide.DiskBulkWriteImportStartParams{
		Disk: oxide.NameOrId(disk), Project: "default"})
}

func (r *rackServer) doStopImport(disk string) error {
	return r.DiskBulkWriteImportStop(r.t.Context(), oxide.DiskBulkWriteImportStopParams{
		Disk: oxide.NameOrId(disk), Project: "default"})
}

func (r *rackServer) doImport(disk string, offset uint64, data []byte) error {
	return r.doImportText(disk, offset, base64.StdEncoding.EncodeToString(data))
}

func (r *rackServer) doImportText(disk string, offset uint64, text string) error {
	return r.DiskBulkWriteImport(r.t.Context(), oxide.DiskBulkWriteImportParams{
		Disk: oxide.NameOrId(disk), Project: "default",
		Body: &oxide.ImportBlocksBulkWrite{Offset: &offset, Base64EncodedData: text}})
}

func (r *rackServer) doFinalize(disk, snapshot string) error {
	return r.DiskFinalizeImport(r.t.Context(), oxide.DiskFinalizeImportParams{
		Disk: oxide.NameOrId(disk), Project: "default",
		Body: &oxide.FinalizeDisk{SnapshotName: oxide.Name(snapshot)}})
}

func (r *rackServer) imageBody(name, project, snapshot string) oxide.ImageCreateParams {
	return oxide.ImageCreateParams{Project: oxide.NameOrId(project), Body: &oxide.ImageCreate{
		Name: oxide.Name(name), Os: "debian", Version: "13",
		Source: oxide.ImageSource{Value: &oxide.ImageSourceSnapshot{Id: snapshot}}}}
}

func (r *rackServer) doPromote(image, project string) (*oxide.Image, error) {
	return r.ImagePromote(r.t.Context(), oxide.ImagePromoteParams{
		Image: oxide.NameOrId(image), Project: oxide.NameOrId(project)})
}

func (r *rackServer) doDemote(image, project string) (*oxide.Image, error) {
	return r.ImageDemote(r.t.Context(), oxide.ImageDemoteParams{
		Image: oxide.NameOrId(image), Project: oxide.NameOrId(project)})
}

// images returns the names of a project's or of the silo's images.
func (r *rackServer) images(project oxide.NameOrId) string {
	r.t.Helper()
	var names []string
	for _, i := range must[[]oxide.Image](r.t)(r.ImageListAllPages(r.t.Context(),
		oxide.ImageListParams{Project: project})) {
		names = append(names, string(i.Name))
	}
	return strings.Join(names, " ")
}

// upload writes the chunks of content from an offset on as the command "oxide disk import" does:
// eight at a time, and without those that contain only zeroes.
func (r *rackServer) upload(disk string, content []byte, from, to int) {
	r.t.Helper()
	offsets := make(chan int)
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for offset := range offsets {
				part := content[offset:min(offset+chunk, len(content))]
				if bytes.Count(part, []byte{0}) == len(part) {
					continue
				}
				if err := r.doImport(disk, uint64(offset), part); err != nil {
					r.t.Errorf("write at %d: %v", offset, err)
				}
			}
		})
	}
	for offset := from; offset < to; offset += chunk {
		offsets <- offset
	}
	close(offsets)
	workers.Wait()
}

// TestAnImportedImageBecomesADiskWithItsBytes restarts the rack in every state of the import.
func TestAnImportedImageBecomesADiskWithItsBytes(t *testing.T) { // A90
	content := make([]byte, 20*chunk+512)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(content[:3*chunk])
	_, _ = random.Read(content[9*chunk:])

	r := serveRack(t, engine.Config{})
	if d := r.importing("d"); d.State.State() != "creating" {
		t.Errorf("the answer to its creation says %q", d.State.State())
	}
	in := func(state string) {
		t.Helper()
		r = r.again()
		if got := r.state("d"); got != state {
			t.Fatalf("the disk is %q, want %q", got, state)
		}
	}
	in("import_ready")
	simtest.NoError(t, r.doStartImport("d"))
	r.upload("d", content, 0, 10*chunk)
	in("importing_from_bulk_writes")
	r.upload("d", content, 10*chunk, len(content))
	simtest.NoError(t, r.doStopImport("d"))
	in("import_ready")
	r.fault(adminapi.Fault{Operation: "disk_finalize_import", Phase: adminapi.Unwind, Times: 1})
	refusedAs(500, "Internal", "Internal Server Error").check(t, r.doFinalize("d", "s"))
	if got := r.snapshotState("s"); got != "none" {
		t.Errorf("a finalization that was undone left a snapshot that is %s", got)
	}
	in("import_ready")
	simtest.NoError(t, r.doFinalize("d", "s"))
	snapshot := must[*oxide.Snapshot](t)(r.SnapshotView(t.Context(),
		oxide.SnapshotViewParams{Snapshot: "s", Project: "default"}))
	d := must[*oxide.Disk](t)(r.DiskView(t.Context(),
		oxide.DiskViewParams{Disk: "d", Project: "default"}))
	if want := "snapshot of finalized disk " + d.Id; snapshot.Description != want {
		t.Errorf("the snapshot's description is %q, want %q", snapshot.Description, want)
	}
	// A simulator that was killed in the middle has finished neither.
	r.force("d", store.DiskState{State: store.StateFinalizing})
	r.update(func(tx *store.Tx, _ string) error {
		sn, _, err := store.Snapshots.Get(tx, snapshot.Id)
		sn.State = store.SnapshotCreating
		return errors.Join(err, store.Snapshots.Put(tx, sn))
	})
	simtest.NoError(t, os.Remove(r.rack.Plane().SnapshotPath(snapshot.Id)))
	in("detached")

	img := must[*oxide.Image](t)(r.ImageCreate(t.Context(),
		r.imageBody("image", "default", snapshot.Id)))
	if img.Size != 1<<30 || img.BlockSize != 512 || img.Os != "debian" || img.Version != "13" {
		t.Errorf("the image is %+v", img)
	}
	simtest.NoError(t, r.SnapshotDelete(t.Context(), oxide.SnapshotDeleteParams{
		Snapshot: oxide.NameOrId(snapshot.Id)}))
	simtest.NoError(t, r.doDelete("d"))
	must[*oxide.Image](t)(r.doPromote("image", "default"))
	r = r.again()
	if ours, silos := r.images("default"), r.images(""); ours != "" || silos != "image" {
		t.Errorf("after its promotion the project has %q and the silo %q", ours, silos)
	}
	u := must[*oxide.Utilization](t)(r.UtilizationView(t.Context()))
	if u.Provisioned.Storage != 0 {
		t.Errorf("A91: with an image alone %d bytes are provisioned", u.Provisioned.Storage)
	}
	must[*oxide.Disk](t)(r.DiskCreate(t.Context(), r.from(imageSource(img.Id, false), "e", 1)))
	must[*oxide.Image](t)(r.doDemote("image", "default"))
	simtest.NoError(t, r.ImageDelete(t.Context(),
		oxide.ImageDeleteParams{Image: "image", Project: "default"}))
	if got := r.images("default"); got != "" {
		t.Errorf("the project still has %q", got)
	}
	must[*oxide.Disk](t)(r.doAttach("a", "e"))
	got := readDevice(t, r.device("a"), 0, len(content)+chunk)
	if want := string(content) + strings.Repeat("\x00", chunk); got != want {
		t.Error("the guest reads other bytes than those that were imported")
	}
}

// TestRefusalsOfImportsAndImages has what the rules A90 and A91 cannot ask of a real rack.
func TestRefusalsOfImportsAndImages(t *testing.T) { // A90
	r := serveRack(t, engine.Config{Projects: []string{"default", "other"}, QuotaBytes: 5 << 30,
		Images: []engine.ImageSpec{{Name: "silos", SizeBytes: 1 << 30},
			{Name: "twice", SizeBytes: 1 << 30},
			{Name: "twice", Project: "default", SizeBytes: 1 << 30}}})
	r.importing("ready")
	r.importing("open")
	r.disk("attached")
	attached := must[*oxide.Disk](t)(r.doAttach("a", "attached"))
	instance := r.instance("a").Id
	local := r.blank("local", 1)
	local.Body.DiskBackend.Value = &oxide.DiskBackendLocal{}
	must[*oxide.Disk](t)(r.DiskCreate(t.Context(), local))
	simple := must[*oxide.Snapshot](t)(r.doSnapshot("taken", "attached"))
	simtest.NoError(t, r.doStartImport("open"))
	internal := refusedAs(500, "Internal", "Internal Server Error")
	invalid := func(format string, args ...any) refused {
		return refusedAs(400, "InvalidRequest", format, args...)
	}
	write := func(disk string, offset uint64, bytes int) func() error {
		return func() error { return r.doImport(disk, offset, make([]byte, bytes)) }
	}
	image := func(name, project, snapshot string) func() error {
		return func() error {
			_, err := r.ImageCreate(t.Context(), r.imageBody(name, project, snapshot))
			return err
		}
	}
	promote := func(image, project string) func() error {
		return func() error { _, err := r.doPromote(image, project); return err }
	}
	demote := func(image, project string) func() error {
		return func() error { _, err := r.doDemote(image, project); return err }
	}
	for _, test := range []struct {
		name string
		do   func() error
		want refused
	}{
		{"start on an attached disk", func() error { return r.doStartImport("attached") }, invalid(
			`cannot set disk in state Attached(%s) to "importing_from_bulk_writes"`, instance)},
		{"start on a local disk", func() error { return r.doStartImport("local") }, internal},
		{"finalize a local disk", func() error { return r.doFinalize("local", "") }, internal},
		{"a letter that is no base64", func() error { return r.doImportText("open", 0, "AA!A") },
			invalid("error base64 decoding data: Invalid symbol 33, offset 2.")},
		{"base64 without its end", func() error { return r.doImportText("open", 0, "AAA") },
			invalid("error base64 decoding data: Invalid padding")},
		{"nothing behind the disk's end", write("open", 1<<40, 0), refused{}},
		{"a chunk across the disk's end", write("open", 1<<30-512, 1024), refused{}},
		{"a body of more than 8 MiB", write("open", 0, 6<<20), refusedAs(400, "",
			"request body exceeded maximum size of 8388608 bytes")},
		{"finalize with the name of another snapshot",
			func() error { return r.doFinalize("ready", "taken") },
			refusedAs(400, "ObjectAlreadyExists", `already exists: snapshot "taken"`)},
		{"finalize without quota", func() error { return r.doFinalize("ready", "x") },
			refusedAs(507, "InsufficientCapacity", "Insufficient capacity: Storage Limit Exceeded: "+
				"Not enough storage to complete request. Either remove unneeded disks and snapshots "+
				"to free up resources or contact the rack operator to request a capacity increase.")},
		{"finalize after these", func() error { return r.doFinalize("ready", "") }, refused{}},

		{"an image in another project", image("x", "other", simple.Id),
			invalid("snapshot does not belong to this project")},
		{"an image whose name the silo has", image("silos", "", simple.Id),
			refusedAs(400, "ObjectAlreadyExists", `already exists: project-image "silos"`)},
		{"an image of the silo", image("new", "", simple.Id), refused{}},
		{"promote by a name alone", promote("none", ""), invalid("Cannot promote a silo image")},
		{"promote to a name that the silo has", promote("twice", "default"),
			refusedAs(400, "ObjectAlreadyExists", `already exists: silo-image "twice"`)},
		{"demote to a name that the project has", demote("twice", "default"),
			refusedAs(400, "ObjectAlreadyExists", `already exists: project-image "twice"`)},
		{"demote", demote("silos", "other"), refused{}},
		{"delete what is not there", func() error {
			return r.ImageDelete(t.Context(), oxide.ImageDeleteParams{Image: "silos"})
		}, gone("silo-image", "silos")},
	} {
		t.Run(test.name, func(t *testing.T) { test.want.check(t, test.do()) })
	}
	if got := must[*oxide.Disk](t)(r.DiskView(t.Context(), oxide.DiskViewParams{
		Disk: oxide.NameOrId(attached.Id)})); got.State.State() != "attached" {
		t.Errorf("the attached disk is %s", got.State.State())
	}
	if got := r.state("open"); got != "importing_from_bulk_writes" {
		t.Errorf("the disk with the open import is %s", got)
	}
}
