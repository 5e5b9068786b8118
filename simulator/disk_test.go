package simulator

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// TestCreatingADiskRefusesSourcesOfOtherProjects is not a conformance rule, because a real rack may
// have no image in the silo and no second project for the token.
func TestCreatingADiskRefusesSourcesOfOtherProjects(t *testing.T) { // A40
	r := serveRack(t, engine.Config{Projects: []string{"default", "other"}, Images: []engine.ImageSpec{
		{Name: "silo", SizeBytes: 2 << 30, BlockSize: 4096},
		{Name: "theirs", Project: "other", SizeBytes: 1 << 30}}})
	made := func(request string) string {
		return unmarshal[store.Identity](t, r.demand(201, "",
			strings.Replace(request, "project=default", "project=other", 1))).ID
	}
	there := made(newDisk("there"))
	theirs := made(newSnapshot("s", "there"))
	image := func(path string) string {
		return unmarshal[store.Identity](t, r.demand(200, "", "GET /v1/images/"+path)).ID
	}
	silo, other, nobody := image("silo"), image("theirs?project=other"), uuid.NewString()
	for _, test := range []struct {
		name, source string
		status       int
		want         string
	}{
		{"a snapshot of another project", source("snapshot", theirs), 400,
			"snapshot does not belong to this project"},
		{"an image that is larger", source("image", silo), 400,
			"disk size 1073741824 must be greater than or equal to image size 2147483648"},
		{"an image of another project", source("image", other), 400,
			"image does not belong to this project"},
		{"a missing image", source("image", nobody), 404, `not found: image with id \"` + nobody},
	} {
		t.Run(test.name, func(t *testing.T) {
			r.on(t).demand(test.status, test.want, newDisk("x", blankSource, test.source))
		})
	}
	d := r.disk("x", oneGiB, "2147483648", blankSource, source("image", silo))
	if d.BlockSize != 4096 {
		t.Errorf("the disk has blocks of %d bytes, want 4096 as in its image", d.BlockSize)
	}
	r.demand(400, "can't create a snapshot of a disk in a different project", newSnapshot("s", there))
}

func TestEachInstanceHasItsOwnInterfaces(t *testing.T) {
	r := serveRack(t, engine.Config{})
	seen := map[string]bool{}
	for _, instance := range []string{"a", "b"} {
		nics := unmarshal[page[store.NetworkInterface]](t, r.demand(200, "",
			"GET /v1/network-interfaces?project=default&instance="+instance))
		for _, nic := range nics.Items {
			seen[nic.ID], seen[nic.MAC] = true, true
		}
	}
	if len(seen) != 4 {
		t.Errorf("the IDs and addresses are %v, want two of each", seen)
	}
}

func TestInstancesHaveTheSameIDsInEveryDirectory(t *testing.T) {
	given := "6A3E1F3A-0000-4000-8000-000000000001"
	c := engine.Config{Instances: []engine.InstanceSpec{{Name: "x"}, {Name: "y", ID: given}}}
	first := serveRack(t, c)
	second := serveRack(t, engine.Config{Instances: c.Instances})
	for _, name := range []string{"x", "y"} {
		if a, b := first.instance(name).ID, second.instance(name).ID; a != b {
			t.Errorf("%s is %s and %s", name, a, b)
		}
	}
	simtest.NoError(t, first.Close())
	again := serveRack(t, engine.Config{Dir: first.dir, Instances: []engine.InstanceSpec{{Name: "y"}}})
	if got := again.Server.Instances()[0].ID; got != "6a3e1f3a-0000-4000-8000-000000000001" {
		t.Errorf("got %s, want the one that was given", got)
	}
}

// TestDeletedDisksAndSnapshotsAreFreedAfterADelay checks what the conformance rule A68 cannot see
// on a real rack: the files of deleted disks, and each event that ends the delay.
func TestDeletedDisksAndSnapshotsAreFreedAfterADelay(t *testing.T) { // A68
	later := func(r *rackServer) *rackServer {
		simtest.NoError(t, r.RunDeferred(t.Context()))
		return r
	}
	for name, test := range map[string]struct {
		config           engine.Config
		meanwhile, files int
		free             func(*rackServer) *rackServer
	}{
		"RunDeferred frees both":  {engine.Config{FreeDelay: time.Hour}, 2, 2, later},
		"a restart frees both":    {engine.Config{FreeDelay: time.Hour}, 2, 2, (*rackServer).again},
		"the delay ends":          {engine.Config{FreeDelay: time.Millisecond}, -1, -1, nil},
		"only the quota is freed": {engine.Config{FreeDelay: time.Hour, QuotaFirst: true}, 0, 2, later},
	} {
		t.Run(name, func(t *testing.T) {
			test.config.QuotaBytes = 2 << 30
			r := serveRack(t, test.config)
			disk := r.rack.Plane().DiskPath(r.disk("d").ID)
			snapshot := r.rack.Plane().SnapshotPath(r.snapshot("s", "d").ID)
			r.delete("disks/d")
			r.delete("snapshots/s")
			left := func() (gib, files int) {
				for _, path := range []string{disk, snapshot} {
					if _, err := os.Stat(path); err == nil {
						files++
					}
				}
				return int(view[engine.Utilization](r, "utilization").Provisioned.Storage >> 30), files
			}
			if test.free != nil {
				if gib, files := left(); gib != test.meanwhile || files != test.files {
					t.Errorf("%d GiB and %d files are left at first", gib, files)
				}
				r.demand(507, "", newDisk("d"))
				r = test.free(r)
			}
			simtest.Eventually(t, "everything to be freed", func() bool {
				gib, files := left()
				return gib+files == 0
			})
			r.disk("d")
		})
	}
}

const chunk = 512 << 10

// importing is the disk_source of a disk into which blocks are imported.
const importing = `{"type":"importing_blocks","block_size":512}`

// importStep returns the request for one step of an import: bulk-write-start, bulk-write,
// bulk-write-stop or finalize.
func importStep(step, disk, body string) string {
	return fmt.Sprintf("POST /v1/disks/%s/%s?project=default %s", disk, step, body)
}

func bulkWrite(disk string, offset int, data string) string {
	return importStep("bulk-write", disk, fmt.Sprintf(`{"offset":%d,"base64_encoded_data":%q}`, offset,
		data))
}

func finalize(disk, snapshot string) string {
	if snapshot == "" {
		return importStep("finalize", disk, "{}")
	}
	return importStep("finalize", disk, fmt.Sprintf(`{"snapshot_name":%q}`, snapshot))
}

// newImage returns the request to create an image. query names its project; "" means the silo.
func newImage(name, query, snapshot string) string {
	return fmt.Sprintf(`POST /v1/images%s {"name":%q,"description":"","os":"debian","version":"13",`+
		`"source":{"type":"snapshot","id":%q}}`, query, name, snapshot)
}

// upload writes the bytes of content between two offsets in chunks as "oxide disk import" does:
// eight requests at a time, and none for chunks that contain only zeroes.
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
				text := base64.StdEncoding.EncodeToString(part)
				got, err := r.try(r.t.Context(), bulkWrite(disk, offset, text))
				if err != nil || got.status != 204 {
					r.t.Errorf("write at %d: %d %s (%v)", offset, got.status, got.body, err)
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

// TestAnImportedImageKeepsItsBytesAcrossRestarts restarts the rack in every state of the import.
func TestAnImportedImageKeepsItsBytesAcrossRestarts(t *testing.T) { // A90, A91
	content := make([]byte, 20*chunk+512)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(content[:3*chunk])
	_, _ = random.Read(content[9*chunk:])

	r := serveRack(t, engine.Config{})
	d := r.disk("d", blankSource, importing)
	if d.State.State != "creating" {
		t.Errorf("the new disk is %q", d.State.State)
	}
	restartIn := func(state string) {
		t.Helper()
		r = r.again()
		if got := r.state("d"); got != state {
			t.Fatalf("the disk is %q, want %q", got, state)
		}
	}
	restartIn("import_ready")
	r.demand(204, "", importStep("bulk-write-start", "d", ""))
	r.upload("d", content, 0, 10*chunk)
	restartIn("importing_from_bulk_writes")
	r.upload("d", content, 10*chunk, len(content))
	r.demand(204, "", importStep("bulk-write-stop", "d", ""))
	restartIn("import_ready")
	r.fault(adminapi.Fault{Operation: "disk_finalize_import", Phase: adminapi.Unwind, Times: 1})
	r.demand(500, "Internal Server Error", finalize("d", "s"))
	r.demand(404, "", "GET /v1/snapshots/s?project=default")
	restartIn("import_ready")
	r.demand(204, "", finalize("d", "s"))
	snapshot := view[store.Snapshot](r, "snapshots/s")
	if want := "snapshot of finalized disk " + d.ID; snapshot.Description != want {
		t.Errorf("the snapshot's description is %q, want %q", snapshot.Description, want)
	}
	// Make the records what they are if the simulator is killed while it finalizes the disk.
	r.force("d", store.DiskState{State: store.StateFinalizing})
	r.update(func(tx *store.Tx, _ string) error {
		sn, _ := store.Snapshots.Get(tx, snapshot.ID)
		sn.State = store.SnapshotCreating
		store.Snapshots.Put(tx, sn)
		return nil
	})
	simtest.NoError(t, os.Remove(r.rack.Plane().SnapshotPath(snapshot.ID)))
	restartIn("detached")

	img := unmarshal[store.Image](t, r.demand(201, `"os":"debian","version":"13"`,
		newImage("image", "?project=default", snapshot.ID)))
	if img.Size != 1<<30 || img.BlockSize != 512 {
		t.Errorf("the image is %+v", img)
	}
	r.delete("snapshots/s")
	r.delete("disks/d")
	r.demand(202, "", "POST /v1/images/image/promote?project=default")
	r = r.again()
	r.demand(200, `"items":[]`, "GET /v1/images?project=default")
	r.demand(200, `"name":"image"`, "GET /v1/images")
	r.demand(200, `"storage":0}`, "GET /v1/utilization") // an image is not provisioned storage
	r.disk("e", blankSource, source("image", img.ID))
	r.demand(202, "", "POST /v1/images/image/demote?project=default")
	r.delete("images/image")
	r.demand(200, `"items":[]`, "GET /v1/images?project=default")
	r.attach("a", "e")
	got := readDevice(t, r.device("a"), 0, len(content)+chunk)
	if want := string(content) + strings.Repeat("\x00", chunk); got != want {
		t.Error("the guest reads other bytes than those that were imported")
	}
}

// TestInvalidImportsAndImagesAreRefused sends requests for A90 and A91 that the conformance suite
// cannot send to a real rack.
func TestInvalidImportsAndImagesAreRefused(t *testing.T) {
	r := serveRack(t, engine.Config{Projects: []string{"default", "other"}, QuotaBytes: 5 << 30,
		Images: []engine.ImageSpec{{Name: "silos", SizeBytes: 1 << 30},
			{Name: "twice", SizeBytes: 1 << 30},
			{Name: "twice", Project: "default", SizeBytes: 1 << 30}}})
	r.disk("ready", blankSource, importing)
	r.disk("open", blankSource, importing)
	r.disk("attached")
	r.attach("a", "attached")
	r.disk("local", blankBackend, `{"type":"local"}`)
	snapshot := r.snapshot("taken", "attached").ID
	r.demand(204, "", importStep("bulk-write-start", "open", ""))
	zeroes := func(n int) string { return base64.StdEncoding.EncodeToString(make([]byte, n)) }
	for _, test := range []struct {
		name          string
		status        int
		want, request string
	}{
		{"start on an attached disk", 400, "cannot set disk in state Attached(" + r.instance("a").ID +
			`) to \"importing_from_bulk_writes\"`, importStep("bulk-write-start", "attached", "")},
		{"start on a local disk", 500, "Internal", importStep("bulk-write-start", "local", "")},
		{"finalize a local disk", 500, "Internal", finalize("local", "")},
		{"a character outside base64", 400, "error base64 decoding data: Invalid symbol 33, offset 2.",
			bulkWrite("open", 0, "AA!A")},
		{"base64 without its end", 400, "error base64 decoding data: Invalid padding",
			bulkWrite("open", 0, "AAA")},
		{"a chunk without bytes beyond the disk's end", 204, "", bulkWrite("open", 1<<40, "")},
		{"a chunk across the disk's end", 204, "", bulkWrite("open", 1<<30-512, zeroes(1024))},
		{"a body of more than 8 MiB", 400, "request body exceeded maximum size of 8388608 bytes",
			bulkWrite("open", 0, zeroes(6<<20))},
		{"finalize with the name of another snapshot", 400, `already exists: snapshot \"taken\"`,
			finalize("ready", "taken")},
		{"finalize without quota", 507, "Insufficient capacity: Storage Limit Exceeded: Not enough " +
			"storage to complete request. Either remove unneeded disks and snapshots to free up " +
			"resources or contact the rack operator to request a capacity increase.",
			finalize("ready", "x")},
		{"finalize after refusals", 204, "", finalize("ready", "")},

		{"an image in another project", 400, "snapshot does not belong to this project",
			newImage("x", "?project=other", snapshot)},
		{"an image whose name the silo has", 400, `already exists: project-image \"silos\"`,
			newImage("silos", "", snapshot)},
		{"an image of the silo", 201, "", newImage("new", "", snapshot)},
		{"promote by a name alone", 400, "Cannot promote a silo image", "POST /v1/images/none/promote"},
		{"promote to a name that the silo has", 400, `already exists: silo-image \"twice\"`,
			"POST /v1/images/twice/promote?project=default"},
		{"demote to a name that the project has", 400, `already exists: project-image \"twice\"`,
			"POST /v1/images/twice/demote?project=default"},
		{"demote", 202, "", "POST /v1/images/silos/demote?project=other"},
		{"delete a missing image", 404, `not found: silo-image with name \"silos\"`,
			"DELETE /v1/images/silos"},
	} {
		t.Run(test.name, func(t *testing.T) { r.on(t).demand(test.status, test.want, test.request) })
	}
	if attached, open := r.state("attached"), r.state("open"); attached != "attached" ||
		open != "importing_from_bulk_writes" {
		t.Errorf("afterwards the disks are %s and %s", attached, open)
	}
}
