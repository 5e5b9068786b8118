package rules

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
)

func (c *Check) importing() *oxide.Disk {
	params := c.blank()
	params.Body.DiskBackend = From(&oxide.DiskSourceImportingBlocks{BlockSize: 512})
	return must(c.createDisk(params))(c, "create a disk that imports blocks")
}

func (r *TestedRack) startImport(ctx context.Context, disk string) error {
	return r.Client.DiskBulkWriteImportStart(ctx,
		oxide.DiskBulkWriteImportStartParams{Disk: oxide.NameOrId(disk)})
}

func (r *TestedRack) stopImport(ctx context.Context, disk string) error {
	return r.Client.DiskBulkWriteImportStop(ctx,
		oxide.DiskBulkWriteImportStopParams{Disk: oxide.NameOrId(disk)})
}

func (r *TestedRack) finalize(ctx context.Context, disk string, snapshot oxide.Name) error {
	return r.Client.DiskFinalizeImport(ctx, oxide.DiskFinalizeImportParams{
		Disk: oxide.NameOrId(disk), Body: &oxide.FinalizeDisk{SnapshotName: snapshot}})
}

// EndImport ends the import of a disk, which cannot be deleted before.
func (r *TestedRack) EndImport(ctx context.Context, disk *oxide.Disk) error {
	state := disk.State.State()
	if state == oxide.DiskStateStateImportingFromBulkWrites {
		if err := r.stopImport(ctx, disk.Id); err != nil {
			return err
		}
	}
	if !slices.Contains(importStates, state) {
		return nil
	}
	return r.finalize(ctx, disk.Id, "")
}

var importStates = []oxide.DiskStateState{
	oxide.DiskStateStateImportReady, oxide.DiskStateStateImportingFromBulkWrites,
}

func checkImport(c *Check) {
	disk, instance := c.importing(), c.StoppedInstance().Id
	in := func(state oxide.DiskStateState) {
		equal(c, "the disk's state", c.look(disk.Id).State.State(), state)
	}
	unusable := func(state oxide.DiskStateState) {
		in(state)
		c.refuses("delete a disk in state "+string(state), c.deleteDisk(disk.Id),
			invalidRequest("disk cannot be deleted in state %q", state))
		c.mustRefuse("attach a disk in state "+string(state), invalidRequest(
			"cannot attach disk %q: invalid state %s", disk.Name, state))(c.attach(disk.Id, instance))
		if c.arrange("a snapshot of an import") { // a real rack's check would be repeated after a 503
			c.mustRefuse("take a snapshot of a disk in state "+string(state), unavailable)(
				c.snapshot(disk.Id))
		}
	}
	write := func(offset uint64, bytes int) error {
		return c.Client.DiskBulkWriteImport(c.ctx, oxide.DiskBulkWriteImportParams{
			Disk: oxide.NameOrId(disk.Id), Body: &oxide.ImportBlocksBulkWrite{Offset: &offset,
				Base64EncodedData: base64.StdEncoding.EncodeToString(make([]byte, bytes))}})
	}
	unusable(oxide.DiskStateStateImportReady)
	c.refuses("write before the start", write(0, 512), invalidRequest(
		"cannot import blocks with a bulk write for disk in state ImportReady"))
	c.refuses("stop before the start", c.stopImport(c.ctx, disk.Id),
		invalidRequest("cannot set disk in state ImportReady to %q", "import_ready"))
	c.must("start the import", c.startImport(c.ctx, disk.Id))
	unusable(oxide.DiskStateStateImportingFromBulkWrites)
	c.must("write a block", write(512, 512))
	for _, wrong := range []struct {
		offset uint64
		bytes  int
		text   string
	}{
		{0, 513 << 10, "Invalid number of blocks: data len 525312 over max chunk size 524288!"},
		{1, 512, "Offset not block aligned"},
		{0, 511, "Data length not block size multiple"},
		{GiB, 512, "Offset past end of extent"},
	} {
		c.refuses(fmt.Sprintf("write %d bytes at %d", wrong.bytes, wrong.offset),
			write(wrong.offset, wrong.bytes), invalidRequest("%s", wrong.text))
	}
	c.refuses("finalize before the stop", c.finalize(c.ctx, disk.Id, ""), invalidRequest(
		"cannot finalize disk in state DiskState(ImportingFromBulkWrites)"))
	c.must("stop the import", c.stopImport(c.ctx, disk.Id))
	in(oxide.DiskStateStateImportReady)
	if c.arrange("an import that is finalized slowly") {
		// On a real rack nothing would mark the snapshot as one of this run.
		c.checkFinalizing(disk)
	} else {
		c.must("finalize the disk", c.finalize(c.ctx, disk.Id, ""))
	}
	in(oxide.DiskStateStateDetached)
	c.refuses("start an import into a detached disk", c.startImport(c.ctx, disk.Id),
		invalidRequest("cannot set disk in state Detached to %q", "importing_from_bulk_writes"))
	c.must("delete the disk", c.deleteDisk(disk.Id))
}

func (c *Check) checkFinalizing(disk *oxide.Disk) {
	name := c.name()
	view := func() (*oxide.Snapshot, error) { return c.viewSnapshot(c.ctx, string(name)) }
	u := begin(c, "finalize a disk with a snapshot", "snapshot_hold", func() (any, error) {
		return nil, c.finalize(c.ctx, disk.Id, name)
	}, func() error { _, err := view(); return err }, func(ctx context.Context) error {
		return c.removeSnapshotByName(ctx, name, disk.Id)
	})
	equal(c, "the disk meanwhile", c.look(disk.Id).State.State(), oxide.DiskStateStateFinalizing)
	_, err := u.end(c)
	c.must("finalize a disk with a snapshot", err)
	snapshot := must(view())(c, "read the snapshot")
	equal(c, "the snapshot's state", snapshot.State, oxide.SnapshotStateReady)
	equal(c, "the snapshot's disk", snapshot.DiskId, disk.Id)
	equal(c, "the snapshot's description", snapshot.Description, "snapshot of finalized disk "+disk.Id)
}

func (c *Check) image(snapshot string) oxide.ImageCreateParams {
	return oxide.ImageCreateParams{Project: c.project(), Body: &oxide.ImageCreate{
		Name: c.name(), Description: c.Description, Os: "conformance", Version: "1",
		Source: oxide.ImageSource{Value: &oxide.ImageSourceSnapshot{Id: snapshot}}}}
}

// createImage sends a request for an image, and removes the image at the end if it was created.
func (c *Check) createImage(params oxide.ImageCreateParams) (*oxide.Image, error) {
	image, err := c.Client.ImageCreate(c.ctx, params)
	if err == nil || mayBeDone(err) {
		view := oxide.ImageViewParams{Project: params.Project, Image: oxide.NameOrId(params.Body.Name)}
		if err == nil {
			view = oxide.ImageViewParams{Image: oxide.NameOrId(image.Id)}
		}
		c.cleanup(func(ctx context.Context) error {
			made, err := c.Client.ImageView(ctx, view)
			if err != nil || !c.isOwn(made.Description) {
				return gone(err)
			}
			return gone(c.Client.ImageDelete(ctx, oxide.ImageDeleteParams{Image: oxide.NameOrId(made.Id)}))
		})
	}
	return image, err
}

func (c *Check) viewImage(id string) (*oxide.Image, error) {
	return c.Client.ImageView(c.ctx, oxide.ImageViewParams{Image: oxide.NameOrId(id)})
}

func (c *Check) sameImage(what string, answered *oxide.Image) {
	c.same(what, must(c.viewImage(answered.Id))(c, "read the image"), answered)
}

func checkImageLife(c *Check) {
	source := c.disk()
	snapshot := must(c.snapshot(source.Id))(c, "take a snapshot")
	var before int64
	if c.simulated() {
		before = c.storageUsed(c.ctx)
	}
	params := c.image(snapshot.Id)
	image := must(c.createImage(params))(c, "create an image")
	c.sameImage("the new image", image)
	equal(c, "its name", image.Name, params.Body.Name)
	equal(c, "its description", image.Description, params.Body.Description)
	equal(c, "its OS", image.Os, params.Body.Os)
	equal(c, "its version", image.Version, params.Body.Version)
	equal(c, "its project", image.ProjectId, source.ProjectId)
	equal(c, "its size", image.Size, snapshot.Size)
	equal(c, "its blocks", image.BlockSize, source.BlockSize)
	c.mustRefuse("create another of its name", nameTaken("project-image", image.Name))(
		c.createImage(params))
	if c.arrange("an OS of 65 characters") { // a real rack's check would be repeated after a 500
		long := c.image(snapshot.Id)
		long.Body.Os = fmt.Sprintf("%065d", 0)
		c.mustRefuse("create one with an OS of 65 characters", internalError)(c.createImage(long))
	}
	c.must("delete its snapshot", c.deleteSnapshot(snapshot.Id))
	fromImage := c.blank()
	fromImage.Body.DiskBackend = From(&oxide.DiskSourceImage{ImageId: image.Id})
	disk := must(c.createDisk(fromImage))(c, "create a disk from it")
	equal(c, "the disk's image", disk.ImageId, image.Id)
	equal(c, "the disk's image, read again", c.look(disk.Id).ImageId, image.Id)
	if c.arrange("the promotion of an image") {
		equal(c, "what is provisioned with an image and its disk, and without its snapshot",
			c.storageUsed(c.ctx), before)
		c.checkPromotion(image)
	}
	c.must("delete the image of a disk", c.Client.ImageDelete(c.ctx,
		oxide.ImageDeleteParams{Image: oxide.NameOrId(image.Id)}))
	c.mustRefuse("read the deleted image", unknownID("image", image.Id))(c.viewImage(image.Id))
	equal(c, "the state of the image's disk", c.look(disk.Id).State.State(),
		oxide.DiskStateStateDetached)
}

// checkPromotion gives an image to the silo and back. On a real rack others would see it.
func (c *Check) checkPromotion(image *oxide.Image) {
	ref := oxide.NameOrId(image.Id)
	promote := func() (*oxide.Image, error) {
		return c.Client.ImagePromote(c.ctx, oxide.ImagePromoteParams{Image: ref})
	}
	demote := func() (*oxide.Image, error) {
		return c.Client.ImageDemote(c.ctx, oxide.ImageDemoteParams{Image: ref, Project: c.project()})
	}
	c.mustRefuse("demote an image of the project", invalidRequest("Cannot demote a project image"))(
		demote())
	silos := must(promote())(c, "promote an image")
	equal(c, "its project then", silos.ProjectId, "")
	c.sameImage("the promoted image", silos)
	c.mustRefuse("promote an image of the silo", invalidRequest("Cannot promote a silo image"))(
		promote())
	again := must(demote())(c, "demote an image")
	equal(c, "its project then", again.ProjectId, image.ProjectId)
	c.sameImage("the demoted image", again)
}

func checkInheritedBlocks(c *Check) {
	params := c.blank()
	params.Body.DiskBackend = From(&oxide.DiskSourceBlank{BlockSize: 2048})
	disk := must(c.createDisk(params))(c, "create a disk with blocks of 2048 bytes")
	snapshot := must(c.snapshot(disk.Id))(c, "take a snapshot")
	fields := c.object("read the snapshot", c.Send(get("/v1/snapshots/"+snapshot.Id)))
	if shown, is := fields["block_size"]; is {
		c.errorf("a snapshot's block size: expected none; found %s", shown)
	}
	made := must(c.createDisk(c.fromSnapshot(snapshot.Id, false)))(c, "create a disk from it")
	equal(c, "the blocks of the disk from it, in the answer", made.BlockSize, 2048)
	equal(c, "the blocks of the disk from it", c.look(made.Id).BlockSize, 2048)
}

func checkImages(c *Check) {
	project := must(c.viewProject(c.Project))(c, "read the project")
	var none []string
	for _, list := range []struct {
		what, kind, owner string
		project           oxide.NameOrId
	}{
		{"the silo's images", "silo-image", "", ""},
		{"the project's images", "project-image", project.Id, c.project()},
	} {
		images := func() []oxide.Image {
			return must(c.Client.ImageList(c.ctx, oxide.ImageListParams{Project: list.project}))(c,
				"list "+list.what).Items
		}
		items := images()
		for _, image := range items {
			equal(c, "the project of "+string(image.Name)+" of "+list.what, image.ProjectId, list.owner)
		}
		if len(items) > 0 {
			first := items[0]
			byName, err := c.Client.ImageView(c.ctx, oxide.ImageViewParams{
				Image: oxide.NameOrId(first.Name), Project: list.project})
			byID, err2 := c.viewImage(first.Id)
			if errors.Join(err, err2) != nil && !slices.ContainsFunc(images(),
				func(i oxide.Image) bool { return i.Id == first.Id }) {
				items = nil // somebody else has deleted it
			} else {
				c.must("read one of "+list.what, errors.Join(err, err2))
				c.same("the one of "+list.what+" that was read by name", byName, first)
				c.same("the one of "+list.what+" that was read by ID", byID, first)
			}
		}
		if len(items) == 0 {
			none = append(none, list.what)
		}
		nobodys := string(c.name())
		c.mustRefuse("read none of "+list.what, notFound(list.kind, "name", nobodys))(
			c.Client.ImageView(c.ctx,
				oxide.ImageViewParams{Image: oxide.NameOrId(nobodys), Project: list.project}))
	}
	missing := uuid.NewString()
	c.mustRefuse("read an image that is not there", unknownID("image", missing))(c.viewImage(missing))
	if len(none) > 0 {
		c.notTested("there are none of %s, so it cannot be seen in which list they are",
			strings.Join(none, " and "))
	}
}
