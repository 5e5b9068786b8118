package rules

import (
	"errors"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
)

func checkInheritedBlocks(c *Check) {
	params := c.Blank()
	params.Body.DiskBackend = From(&oxide.DiskSourceBlank{BlockSize: 2048})
	disk := Must[*oxide.Disk](c, "create a disk with blocks of 2048 bytes")(c.CreateDisk(params))
	snapshot := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(disk.Id))
	fields := c.object("read the snapshot", c.Send(get("/v1/snapshots/"+snapshot.Id)))
	if shown, is := fields["block_size"]; is {
		c.Errorf("a snapshot's block size: expected none; found %s", shown)
	}
	made := Must[*oxide.Disk](c, "create a disk from it")(c.CreateDisk(
		c.fromSnapshot(snapshot.Id, false)))
	Equal(c, "the blocks of the disk from it, in the answer", made.BlockSize, 2048)
	Equal(c, "the blocks of the disk from it", c.Look(made.Id).BlockSize, 2048)
}

func checkImages(c *Check) {
	project := Must[*oxide.Project](c, "read the project")(c.Client.ProjectView(c.ctx,
		oxide.ProjectViewParams{Project: c.project()}))
	var none []string
	for _, list := range []struct {
		what, kind, owner string
		project           oxide.NameOrId
	}{
		{"the silo's images", "silo-image", "", ""},
		{"the project's images", "project-image", project.Id, c.project()},
	} {
		images := func() []oxide.Image {
			return Must[*oxide.ImageResultsPage](c, "list "+list.what)(c.Client.ImageList(c.ctx,
				oxide.ImageListParams{Project: list.project})).Items
		}
		items := images()
		for _, image := range items {
			Equal(c, "the project of "+string(image.Name)+" of "+list.what, image.ProjectId, list.owner)
		}
		if len(items) > 0 {
			first := items[0]
			byName, err := c.Client.ImageView(c.ctx, oxide.ImageViewParams{
				Image: oxide.NameOrId(first.Name), Project: list.project})
			byID, err2 := c.Client.ImageView(c.ctx, oxide.ImageViewParams{
				Image: oxide.NameOrId(first.Id)})
			if errors.Join(err, err2) != nil && !slices.ContainsFunc(images(),
				func(i oxide.Image) bool { return i.Id == first.Id }) {
				items = nil // somebody else has deleted it
			} else {
				c.must("read one of "+list.what, errors.Join(err, err2))
				c.Same("the one of "+list.what+" that was read by name", byName, first)
				c.Same("the one of "+list.what+" that was read by ID", byID, first)
			}
		}
		if len(items) == 0 {
			none = append(none, list.what)
		}
		nobodys := string(c.Name())
		_, err := c.Client.ImageView(c.ctx,
			oxide.ImageViewParams{Image: oxide.NameOrId(nobodys), Project: list.project})
		c.Refuses("read none of "+list.what, err, notFound(list.kind, "name", nobodys))
	}
	missing := uuid.NewString()
	c.MustRefuse("read an image that is not there", notFound("image", "id", missing))(
		c.Client.ImageView(c.ctx, oxide.ImageViewParams{Image: oxide.NameOrId(missing)}))
	if len(none) > 0 {
		c.NotTested("there are none of %s, so it cannot be seen in which list they are",
			strings.Join(none, " and "))
	}
}
