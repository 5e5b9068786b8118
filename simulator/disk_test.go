package simulator

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// TestADiskIsCreatedOnlyFromASourceThatItsProjectMayUse is not a conformance rule, because a real
// rack may have no image in the silo and no second project for the token.
func TestADiskIsCreatedOnlyFromASourceThatItsProjectMayUse(t *testing.T) { // A40
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
		{"no image", source("image", nobody), 404, `not found: image with id \"` + nobody},
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

func TestTwoInstancesShareNoInterface(t *testing.T) {
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

// TestDeletedObjectsAreFreedLater checks what the conformance rule A68 cannot see: the files, and
// each way in which the delay ends.
func TestDeletedObjectsAreFreedLater(t *testing.T) { // A68
	later := func(r *rackServer) *rackServer {
		simtest.NoError(t, r.RunDeferred(t.Context()))
		return r
	}
	for name, test := range map[string]struct {
		config           engine.Config
		meanwhile, files int
		free             func(*rackServer) *rackServer
	}{
		"on demand":       {engine.Config{FreeDelay: time.Hour}, 2, 2, later},
		"by a restart":    {engine.Config{FreeDelay: time.Hour}, 2, 2, (*rackServer).again},
		"by itself":       {engine.Config{FreeDelay: time.Millisecond}, -1, -1, nil},
		"the quota first": {engine.Config{FreeDelay: time.Hour, QuotaFirst: true}, 0, 2, later},
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
