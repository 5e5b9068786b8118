package simulator

import (
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func snapshotSource(id string, readOnly bool) oxide.DiskSource {
	return oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: id, ReadOnly: &readOnly}}
}

func imageSource(id string, readOnly bool) oxide.DiskSource {
	return oxide.DiskSource{Value: &oxide.DiskSourceImage{ImageId: id, ReadOnly: &readOnly}}
}

// TestADiskIsCreatedOnlyFromASourceThatItsProjectMayUse is no rule, because a real rack's silo may
// have no image, and a token of a real rack no second project.
func TestADiskIsCreatedOnlyFromASourceThatItsProjectMayUse(t *testing.T) {
	r := serveRack(t, engine.Config{Projects: []string{"default", "other"}, Images: []engine.ImageSpec{
		{Name: "silo", SizeBytes: 2 << 30, BlockSize: 4096},
		{Name: "theirs", Project: "other", SizeBytes: 1 << 30}}})
	elsewhere := r.blank("there", 1)
	elsewhere.Project = "other"
	there := must[*oxide.Disk](t)(r.DiskCreate(t.Context(), elsewhere)).Id
	theirs := must[*oxide.Snapshot](t)(r.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{
		Project: "other", Body: &oxide.SnapshotCreate{Name: "s", Disk: "there"}})).Id
	silo := must[*oxide.Image](t)(r.ImageView(t.Context(), oxide.ImageViewParams{Image: "silo"})).Id
	other := must[*oxide.Image](t)(r.ImageView(t.Context(),
		oxide.ImageViewParams{Image: "theirs", Project: "other"})).Id
	nobody := uuid.NewString()
	for _, test := range []struct {
		name   string
		create oxide.DiskCreateParams
		want   refused
	}{
		{"a snapshot of another project", r.from(snapshotSource(theirs, false), "x", 1),
			refusedAs(400, "InvalidRequest", "snapshot does not belong to this project")},
		{"an image of the silo", r.from(imageSource(silo, false), "imaged", 2), refused{}},
		{"an image that is larger", r.from(imageSource(silo, false), "x", 1), refusedAs(400,
			"InvalidRequest",
			"disk size 1073741824 must be greater than or equal to image size 2147483648")},
		{"an image of another project", r.from(imageSource(other, false), "x", 1),
			refusedAs(400, "InvalidRequest", "image does not belong to this project")},
		{"no image", r.from(imageSource(nobody, false), "x", 1),
			refusedAs(404, "ObjectNotFound", "not found: image with id %q", nobody)},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, err := r.DiskCreate(t.Context(), test.create)
			test.want.check(t, err)
			if err == nil && d.BlockSize != 4096 {
				t.Errorf("A40: it has blocks of %d, want the image's 4096", d.BlockSize)
			}
		})
	}
	_, err := r.doSnapshot("s", there)
	refusedAs(400, "InvalidRequest",
		"can't create a snapshot of a disk in a different project").check(t, err)
}

func (r *rackServer) change(verb, instance string) (*oxide.Instance, error) {
	ctx, name := r.t.Context(), oxide.NameOrId(instance)
	switch verb {
	case "start":
		return r.InstanceStart(ctx,
			oxide.InstanceStartParams{Instance: name, Project: "default"})
	case "stop":
		return r.InstanceStop(ctx,
			oxide.InstanceStopParams{Instance: name, Project: "default"})
	}
	return r.InstanceReboot(ctx,
		oxide.InstanceRebootParams{Instance: name, Project: "default"})
}

func (r *rackServer) instanceBody(name string) *oxide.InstanceCreate {
	return &oxide.InstanceCreate{Name: oxide.Name(name), Hostname: oxide.Hostname(name), Ncpus: 2,
		Memory: 4 << 30}
}

func (r *rackServer) doCreate(body *oxide.InstanceCreate) (*oxide.Instance, error) {
	return r.InstanceCreate(r.t.Context(),
		oxide.InstanceCreateParams{Project: "default", Body: body})
}

func createdDisk(name string) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{
		Name: oxide.Name(name), Size: 1 << 30,
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 512}}}}}}
}

func TestTwoInstancesShareNoInterface(t *testing.T) {
	r := serveRack(t, engine.Config{})
	seen := map[string]bool{}
	for _, instance := range []string{"a", "b"} {
		for _, nic := range must[[]oxide.InstanceNetworkInterface](t)(
			r.InstanceNetworkInterfaceListAllPages(t.Context(), oxide.InstanceNetworkInterfaceListParams{
				Instance: oxide.NameOrId(instance), Project: "default"})) {
			seen[nic.Id], seen[string(nic.Mac)] = true, true
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
		if a, b := first.instance(name).Id, second.instance(name).Id; a != b {
			t.Errorf("%s is %s and %s", name, a, b)
		}
	}
	simtest.NoError(t, first.Close())
	again := serveRack(t, engine.Config{Dir: first.dir, Instances: []engine.InstanceSpec{{Name: "y"}}})
	if got := again.Server.Instances()[0].ID; got != "6a3e1f3a-0000-4000-8000-000000000001" {
		t.Errorf("got %s, want the one that was given", got)
	}
}

// TestDeletedObjectsAreFreedLater has what the rule A68 cannot see: the files, and each of what
// ends the delay.
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
			disk := r.rack.Plane().DiskPath(r.disk("d").Id)
			sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
			simtest.NoError(t, r.doDelete("d"))
			simtest.NoError(t, r.SnapshotDelete(t.Context(), oxide.SnapshotDeleteParams{
				Snapshot: oxide.NameOrId(sn.Id)}))
			left := func() (gib, files int) {
				for _, path := range []string{disk, r.rack.Plane().SnapshotPath(sn.Id)} {
					if _, err := os.Stat(path); err == nil {
						files++
					}
				}
				u := must[*oxide.Utilization](t)(r.UtilizationView(t.Context()))
				return int(u.Provisioned.Storage >> 30), files
			}
			if test.free != nil {
				if gib, files := left(); gib != test.meanwhile || files != test.files {
					t.Errorf("%d GiB and %d files are left at first", gib, files)
				}
				if _, err := r.DiskCreate(t.Context(), r.blank("d", 1)); err == nil {
					t.Error("a disk finds room meanwhile")
				}
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
