package simulator

import (
	"testing"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
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
