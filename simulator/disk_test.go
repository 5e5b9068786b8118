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

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// TestDiskCreateRefusesForeignMissingAndTooLargeSources is no conformance check, because it needs
// an image of the silo and a second project, and a real rack may lack these.
func TestDiskCreateRefusesForeignMissingAndTooLargeSources(t *testing.T) { // A40
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

func TestEachInstanceHasItsOwnNetworkInterfaces(t *testing.T) {
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

func TestInstanceIDsDoNotDependOnTheRacksDirectory(t *testing.T) {
	given := "6A3E1F3A-0000-4000-8000-000000000001"
	c := engine.Config{Instances: []engine.InstanceSpec{{Name: "x"}, {Name: "y", ID: given}}}
	first := serveRack(t, c)
	second := serveRack(t, engine.Config{Instances: c.Instances})
	for _, name := range []string{"x", "y"} {
		if a, b := first.instance(name).ID, second.instance(name).ID; a != b {
			t.Errorf("%s is %s and %s", name, a, b)
		}
	}
	looptest.Must(t, first.Close())
	again := serveRack(t, engine.Config{Dir: first.dir, Instances: []engine.InstanceSpec{{Name: "y"}}})
	if got := again.Server.Instances()[0].ID; got != "6a3e1f3a-0000-4000-8000-000000000001" {
		t.Errorf("got %s, want the one that was given", got)
	}
}

// TestDeletedDisksAndSnapshotsAreFreedAfterADelay checks what the conformance suite cannot check on
// a real rack (A68): the files of deleted disks, and each event that ends the delay.
func TestDeletedDisksAndSnapshotsAreFreedAfterADelay(t *testing.T) { // A68
	later := func(r *rackServer) *rackServer {
		looptest.Must(t, r.RunDeferred(t.Context()))
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
			disk := r.rack.Plane().Files.DiskPath(r.disk("d").ID)
			snapshot := r.rack.Plane().Files.SnapshotPath(r.snapshot("s", "d").ID)
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
			looptest.Await(t, "everything to be freed", func() bool {
				gib, files := left()
				return gib+files == 0
			})
			r.disk("d")
		})
	}
}

const chunk = 512 << 10

const importing = `{"type":"importing_blocks","block_size":512}`

// upload writes content[from:to] in chunks as "oxide disk import" does: eight requests at a time,
// and none for chunks that contain only zeroes.
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
				got, err := r.try(r.t.Context(), fmt.Sprintf("POST /v1/disks/%s/bulk-write?project=default "+
					`{"offset":%d,"base64_encoded_data":%q}`, disk, offset,
					base64.StdEncoding.EncodeToString(part)))
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
	r.play("204 POST disks/d/bulk-write-start?project=default")
	r.upload("d", content, 0, 10*chunk)
	restartIn("importing_from_bulk_writes")
	r.upload("d", content, 10*chunk, len(content))
	r.play("204 POST disks/d/bulk-write-stop?project=default")
	restartIn("import_ready")
	r.fault(adminapi.Fault{Operation: "disk_finalize_import", Phase: adminapi.Unwind, Times: 1})
	r.play(`
500 POST disks/d/finalize?project=default {"snapshot_name":"s"} => Internal Server Error
404 GET snapshots/s?project=default`)
	restartIn("import_ready")
	r.play(`204 POST disks/d/finalize?project=default {"snapshot_name":"s"}`)
	snapshot := view[store.Snapshot](r, "snapshots/s")
	if want := "snapshot of finalized disk " + d.ID; snapshot.Description != want {
		t.Errorf("the snapshot's description is %q, want %q", snapshot.Description, want)
	}
	// Set the records to those of a simulator that was killed while it finalized the disk.
	r.force("d", store.DiskState{State: store.StateFinalizing})
	r.update(func(tx *store.Tx, _ string) error {
		sn, _ := store.Snapshots.Get(tx, snapshot.ID)
		sn.State = store.SnapshotCreating
		store.Snapshots.Put(tx, sn)
		return nil
	})
	looptest.Must(t, os.Remove(r.rack.Plane().Files.SnapshotPath(snapshot.ID)))
	restartIn("detached")

	img := unmarshal[store.Image](t, r.play(`201 POST images?project=default {NAME=image,"os":"debian",
	"version":"13","source":{"type":"snapshot","id":"SNAPSHOT"}} => "os":"debian","version":"13"`,
		"SNAPSHOT", snapshot.ID))
	if img.Size != 1<<30 || img.BlockSize != 512 {
		t.Errorf("the image is %+v", img)
	}
	r.play(`
204 DELETE snapshots/s?project=default
204 DELETE disks/d?project=default
202 POST images/image/promote?project=default`)
	r = r.again()
	r.disk("e", blankSource, source("image", img.ID))
	r.play(`
200 GET images?project=default => "items":[]
200 GET images => "name":"image"
200 GET utilization => "storage":1073741824}
202 POST images/image/demote?project=default
204 DELETE images/image?project=default
200 GET images?project=default => "items":[]`) // disks use provisioned storage, images do not
	r.attach("a", "e")
	got := readDevice(t, r.device("a"), 0, len(content)+chunk)
	if want := string(content) + strings.Repeat("\x00", chunk); got != want {
		t.Error("the guest reads other bytes than those that were imported")
	}
}

// TestInvalidImportsAndImagesAreRefused sends requests that the rules A90 and A91 forbid, and that
// the conformance suite cannot send to a real rack.
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
	zeroes := func(n int) string { return base64.StdEncoding.EncodeToString(make([]byte, n)) }
	r.play(`
204 START-open
400 START-attached => cannot set disk in state Attached(A) to \"importing_from_bulk_writes\"
500 START-local => Internal
500 POST disks/local/finalize?IN {} => Internal
400 WRITE 0,DATA:"AA!A"} => error base64 decoding data: Invalid symbol 33, offset 2.
400 WRITE 0,DATA:"AAA"} => error base64 decoding data: Invalid padding
204 WRITE 1099511627776,DATA:""}
204 WRITE 1073741312,DATA:"ACROSS-THE-END"}
400 WRITE 0,DATA:"6-MIB"} => request body exceeded maximum size of 8388608 bytes
400 POST disks/ready/finalize?IN {"snapshot_name":"taken"} => already exists: snapshot \"taken\"
507 POST disks/ready/finalize?IN {"snapshot_name":"x"} => Insufficient capacity: Storage Limit
	Exceeded: Not enough storage to complete request. Either remove unneeded disks and snapshots to
	free up resources or contact the rack operator to request a capacity increase.
204 POST disks/ready/finalize?IN {}
400 POST images?project=other {NAME=x,SOURCE => snapshot does not belong to this project
400 POST images {NAME=silos,SOURCE => already exists: project-image \"silos\"
201 POST images {NAME=new,SOURCE
400 POST images/none/promote => Cannot promote a silo image
400 POST images/twice/promote?IN => already exists: silo-image \"twice\"
400 POST images/twice/demote?IN => already exists: project-image \"twice\"
202 POST images/silos/demote?project=other
404 DELETE images/silos => not found: silo-image with name \"silos\"`,
		"START-open", "POST disks/open/bulk-write-start?project=default",
		"START-attached", "POST disks/attached/bulk-write-start?project=default",
		"START-local", "POST disks/local/bulk-write-start?project=default",
		"WRITE ", `POST disks/open/bulk-write?project=default {"offset":`,
		"DATA", `"base64_encoded_data"`, "ACROSS-THE-END", zeroes(1024), "6-MIB", zeroes(6<<20),
		"(A)", "("+r.instance("a").ID+")", "IN", "project=default",
		"SOURCE", `"os":"debian","version":"13","source":{"type":"snapshot","id":"`+snapshot+`"}}`)
	if attached, open := r.state("attached"), r.state("open"); attached != "attached" ||
		open != "importing_from_bulk_writes" {
		t.Errorf("afterwards the disks are %s and %s", attached, open)
	}
}
