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

var ofSnapshots = []tested{
	{"A38", "snapshot_create snapshot_view disk_view", func(c *Check) { // taking a snapshot
		detached, attached := c.disk(), c.disk()
		c.attach(attached.Id, c.StoppedInstance().Id).must()
		for disk, states := range map[*oxide.Disk][2]oxide.DiskStateState{
			detached: {oxide.DiskStateStateMaintenance, oxide.DiskStateStateDetached},
			attached: {oxide.DiskStateStateAttached, oxide.DiskStateStateAttached},
		} {
			which := "a disk that is " + string(states[1])
			u := c.beginSnapshot(disk.Id)
			equal(c, "a snapshot of "+which+", meanwhile", u.seen.State, oxide.SnapshotStateCreating)
			equal(c, which+", meanwhile", c.stateOf(disk.Id), states[0])
			if disk == detached {
				c.deleteDisk(disk.Id).refused(undeletable(states[0]))
			}
			taken := u.end().must()
			equal(c, "a snapshot of "+which, taken.State, oxide.SnapshotStateReady)
			equal(c, "the snapshot's disk", taken.DiskId, disk.Id)
			equal(c, "the snapshot's size", taken.Size, disk.Size)
			equal(c, "the snapshot's project", taken.ProjectId, disk.ProjectId)
			equal(c, which+", afterwards", c.stateOf(disk.Id), states[1])
		}
	}},
	{"A39", "snapshot_create", func(c *Check) { // the repair lock
		disk := c.disk()
		u := c.beginSnapshot(disk.Id)
		locked := inConflict("volume repair lock")
		c.snapshot(disk.Id).refused(locked)
		c.takeSnapshot(u.seen.Name, disk.Id).refused(locked)
		u.end().must()
		c.snapshot(disk.Id).must()
		if c.arrange("a disk whose region is replaced") {
			c.Switch("replacing", true)
			c.snapshot(disk.Id).refused(locked)
		}
	}},
	{"A40", "snapshot_create snapshot_view disk_create disk_view", func(c *Check) { // inherited blocks
		blank := oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 2048}}
		disk := c.createDisk(c.diskFrom(blank)).must()
		snapshot := c.snapshot(disk.Id).must()
		fields := c.object("read the snapshot", c.Send(get("/v1/snapshots/"+snapshot.Id)))
		if shown, is := fields["block_size"]; is {
			c.errorf("a snapshot's block size: expected none; found %s", shown)
		}
		made := c.createDisk(c.fromSnapshot(snapshot.Id, false)).must()
		equal(c, "the blocks of the disk from it, in the answer", made.BlockSize, 2048)
		equal(c, "the blocks of the disk from it", c.look(made.Id).BlockSize, 2048)
	}},
	{"A41", "snapshot_create", func(c *Check) { // the order of refusals
		disk := c.disk()
		first := c.snapshot(disk.Id).must()
		missing := uuid.NewString()
		c.takeSnapshot(first.Name, missing).refused(unknownID("disk", missing))
		exists := nameTaken("snapshot", first.Name)
		c.takeSnapshot(first.Name, disk.Id).refused(exists)
		if !c.arrange("a silo without quota") {
			return
		}
		faulty := c.faultedDisk().Id
		c.Switch("quota_bytes", c.storageUsed())
		for _, source := range []string{disk.Id, faulty} {
			c.takeSnapshot(first.Name, source).refused(exists)
			c.snapshot(source).refused(quotaExceeded)
		}
		c.Switch("full", true)
		c.takeSnapshot(first.Name, disk.Id).refused(rackIsFull)
	}},
	{"A42", "snapshot_create", func(c *Check) { // a faulted disk
		c.needSimulated("a disk in such a state cannot be brought about from outside")
		c.snapshot(c.faultedDisk().Id).refused(unavailable)
	}},
	{"A43", "snapshot_create snapshot_view snapshot_delete disk_delete", func(c *Check) { // survival
		disk := c.disk()
		snapshot := c.snapshot(disk.Id).must()
		c.deleteDisk(disk.Id).must()
		left := c.viewSnapshot(snapshot.Id).must()
		equal(c, "its state", left.State, oxide.SnapshotStateReady)
		equal(c, "its disk", left.DiskId, disk.Id)
		restored := c.createDisk(c.fromSnapshot(snapshot.Id, false)).must()
		equal(c, "the disk's snapshot", restored.SnapshotId, snapshot.Id)
		c.deleteSnapshot(snapshot.Id).must()
		equal(c, "the disk of a snapshot that is gone", c.stateOf(restored.Id),
			oxide.DiskStateStateDetached)
		u := c.beginSnapshot(restored.Id)
		c.deleteSnapshot(u.seen.Id).refused(
			invalidRequest("snapshot cannot be deleted in state Creating"))
		u.end().must()
	}},
	{"A44", "image_list image_view", func(c *Check) {
		project := c.viewProject(c.Project).must()
		var none []string
		for _, list := range []struct {
			what, kind, owner string
			project           oxide.NameOrId
		}{
			{"the silo's images", "silo-image", "", ""},
			{"the project's images", "project-image", project.Id, c.project()},
		} {
			images := func() []oxide.Image {
				return asked(c.Client.ImageList(c.ctx, oxide.ImageListParams{Project: list.project}))(c,
					"list %s", list.what).must().Items
			}
			items := images()
			for _, image := range items {
				equal(c, "the project of "+string(image.Name)+" of "+list.what, image.ProjectId, list.owner)
			}
			if len(items) > 0 {
				first := items[0]
				byName := c.viewImage(string(first.Name), list.project)
				byID := c.viewImage(first.Id, "")
				if errors.Join(byName.err, byID.err) != nil && !slices.ContainsFunc(images(),
					func(i oxide.Image) bool { return i.Id == first.Id }) {
					items = nil // somebody else has deleted it
				} else {
					c.same("the one of "+list.what+" that was read by name", byName.must(), first)
					c.same("the one of "+list.what+" that was read by ID", byID.must(), first)
				}
			}
			if len(items) == 0 {
				none = append(none, list.what)
			}
			nobodys := string(c.name())
			c.viewImage(nobodys, list.project).refused(notFound(list.kind, "name", nobodys))
		}
		missing := uuid.NewString()
		c.viewImage(missing, "").refused(unknownID("image", missing))
		if len(none) > 0 {
			c.notTested("there are none of %s, so it cannot be seen in which list they are",
				strings.Join(none, " and "))
		}
	}},
	{"A59", "snapshot_create disk_create", func(c *Check) { // an unfinished source
		disk := c.disk()
		u := c.beginSnapshot(disk.Id)
		params := c.fromSnapshot(u.seen.Id, false)
		c.createDisk(params).refused(internalError)
		c.viewDisk(string(params.Body.Name)).refused(unknownName("disk", params.Body.Name))
		named := params
		body := *params.Body
		named.Body = &body
		named.Body.Name = disk.Name
		c.createDisk(named).refused(nameTaken("disk", disk.Name))
		if c.arrange("a silo without quota") {
			c.Switch("quota_bytes", c.storageUsed())
			c.createDisk(named).refused(quotaExceeded)
		}
		u.end().must()
	}},
	{"A90", "disk_bulk_write_import_start disk_bulk_write_import disk_bulk_write_import_stop " +
		"disk_finalize_import disk_delete", checkImport},
	{"A91", "image_create image_view image_delete disk_create", func(c *Check) { // images
		source := c.disk()
		snapshot := c.snapshot(source.Id).must()
		var before int64
		if c.simulated() {
			before = c.storageUsed()
		}
		params := c.image(snapshot.Id)
		image := c.createImage(params).must()
		c.same("the new image", c.viewImage(image.Id, "").must(), image)
		equal(c, "its name", image.Name, params.Body.Name)
		equal(c, "its description", image.Description, params.Body.Description)
		equal(c, "its OS", image.Os, params.Body.Os)
		equal(c, "its version", image.Version, params.Body.Version)
		equal(c, "its project", image.ProjectId, source.ProjectId)
		equal(c, "its size", image.Size, snapshot.Size)
		equal(c, "its blocks", image.BlockSize, source.BlockSize)
		c.createImage(params).refused(nameTaken("project-image", image.Name))
		if c.arrange("an OS of 65 characters") { // a real rack's check would be repeated after a 500
			long := c.image(snapshot.Id)
			long.Body.Os = fmt.Sprintf("%065d", 0)
			c.createImage(long).refused(internalError)
		}
		c.deleteSnapshot(snapshot.Id).must()
		disk := c.createDisk(c.diskFrom(oxide.DiskSource{
			Value: &oxide.DiskSourceImage{ImageId: image.Id}})).must()
		equal(c, "the disk's image", disk.ImageId, image.Id)
		equal(c, "the disk's image, read again", c.look(disk.Id).ImageId, image.Id)
		if c.arrange("the promotion of an image") {
			equal(c, "what is provisioned with an image and its disk, and without its snapshot",
				c.storageUsed(), before)
			c.checkPromotion(image)
		}
		c.must("delete the image of a disk", c.deleteImage(c.ctx, image.Id))
		c.viewImage(image.Id, "").refused(unknownID("image", image.Id))
		equal(c, "the state of the image's disk", c.stateOf(disk.Id), oxide.DiskStateStateDetached)
	}},
}

func (c *Check) beginSnapshot(disk string) *underway[*oxide.Snapshot] {
	name := c.name()
	u := begin(c, c.snapshotsOf(disk), name, "take a snapshot", "snapshot_hold",
		func() (*oxide.Snapshot, error) {
			return c.Client.SnapshotCreate(c.ctx, c.newSnapshot(name, disk))
		})
	u.carriedOut = func() bool {
		now, err := c.readSnapshot(c.ctx, string(name))
		return IsGone(err) || err == nil && now.State != oxide.SnapshotStateCreating
	}
	return u
}

func (r *TestedRack) stopImport(ctx context.Context, disk string) error {
	return r.Client.DiskBulkWriteImportStop(ctx,
		oxide.DiskBulkWriteImportStopParams{Disk: oxide.NameOrId(disk)})
}

func (r *TestedRack) finalize(ctx context.Context, disk string, snapshot oxide.Name) error {
	return r.Client.DiskFinalizeImport(ctx, oxide.DiskFinalizeImportParams{
		Disk: oxide.NameOrId(disk), Body: &oxide.FinalizeDisk{SnapshotName: snapshot}})
}

// EndImport ends the import of a disk, because a disk cannot be deleted during its import.
func (r *TestedRack) EndImport(ctx context.Context, disk *oxide.Disk) error {
	switch disk.State.State() {
	case oxide.DiskStateStateImportingFromBulkWrites:
		if err := r.stopImport(ctx, disk.Id); err != nil {
			return err
		}
	case oxide.DiskStateStateImportReady:
	default:
		return nil
	}
	return r.finalize(ctx, disk.Id, "")
}

func checkImport(c *Check) {
	source := oxide.DiskSource{Value: &oxide.DiskSourceImportingBlocks{BlockSize: 512}}
	disk := c.createDisk(c.diskFrom(source)).must()
	instance := c.StoppedInstance().Id
	in := func(state oxide.DiskStateState) { equal(c, "the disk's state", c.stateOf(disk.Id), state) }
	unusable := func(state oxide.DiskStateState) {
		in(state)
		c.deleteDisk(disk.Id).refused(undeletable(state))
		c.attach(disk.Id, instance).refused(
			invalidRequest("cannot attach disk %q: invalid state %s", disk.Name, state))
		if c.arrange("a snapshot of an import") { // a real rack's check would be repeated after a 503
			c.snapshot(disk.Id).refused(unavailable)
		}
	}
	write := func(offset uint64, bytes int) outcome[any] {
		return c.done(c.Client.DiskBulkWriteImport(c.ctx, oxide.DiskBulkWriteImportParams{
			Disk: oxide.NameOrId(disk.Id), Body: &oxide.ImportBlocksBulkWrite{Offset: &offset,
				Base64EncodedData: base64.StdEncoding.EncodeToString(make([]byte, bytes))}}),
			"write %d bytes at %d", bytes, offset)
	}
	start := func() outcome[any] {
		return c.done(c.Client.DiskBulkWriteImportStart(c.ctx, oxide.DiskBulkWriteImportStartParams{
			Disk: oxide.NameOrId(disk.Id)}), "start an import")
	}
	stop := func() outcome[any] { return c.done(c.stopImport(c.ctx, disk.Id), "stop an import") }
	finalize := func() outcome[any] {
		return c.done(c.finalize(c.ctx, disk.Id, ""), "finalize an import")
	}
	unusable(oxide.DiskStateStateImportReady)
	write(0, 512).refused(
		invalidRequest("cannot import blocks with a bulk write for disk in state ImportReady"))
	stop().refused(invalidRequest(`cannot set disk in state ImportReady to "import_ready"`))
	start().must()
	unusable(oxide.DiskStateStateImportingFromBulkWrites)
	write(512, 512).must()
	write(0, 513<<10).refused(
		invalidRequest("Invalid number of blocks: data len 525312 over max chunk size 524288!"))
	write(1, 512).refused(invalidRequest("Offset not block aligned"))
	write(0, 511).refused(invalidRequest("Data length not block size multiple"))
	write(GiB, 512).refused(invalidRequest("Offset past end of extent"))
	finalize().refused(
		invalidRequest("cannot finalize disk in state DiskState(ImportingFromBulkWrites)"))
	stop().must()
	in(oxide.DiskStateStateImportReady)
	if c.arrange("an import that is finalized slowly") {
		checkSlowFinalize(c, disk.Id)
	} else {
		finalize().must()
	}
	in(oxide.DiskStateStateDetached)
	start().refused(
		invalidRequest(`cannot set disk in state Detached to "importing_from_bulk_writes"`))
	c.deleteDisk(disk.Id).must()
}

// checkSlowFinalize needs a simulated rack: on a real one, `clean` would not find the snapshot.
func checkSlowFinalize(c *Check, disk string) {
	name := c.name()
	u := begin(c, c.snapshotsOf(disk), name, "finalize a disk with a snapshot", "snapshot_hold",
		func() (*oxide.Snapshot, error) { return nil, c.finalize(c.ctx, disk, name) })
	equal(c, "the disk meanwhile", c.stateOf(disk), oxide.DiskStateStateFinalizing)
	u.end().must()
	snapshot := c.viewSnapshot(string(name)).must()
	equal(c, "the snapshot's state", snapshot.State, oxide.SnapshotStateReady)
	equal(c, "the snapshot's disk", snapshot.DiskId, disk)
	equal(c, "the snapshot's description", snapshot.Description, "snapshot of finalized disk "+disk)
}

func (c *Check) image(snapshot string) oxide.ImageCreateParams {
	return oxide.ImageCreateParams{Project: c.project(), Body: &oxide.ImageCreate{
		Name: c.name(), Description: c.Description, Os: "conformance", Version: "1",
		Source: oxide.ImageSource{Value: &oxide.ImageSourceSnapshot{Id: snapshot}}}}
}

func (c *Check) createImage(params oxide.ImageCreateParams) outcome[*oxide.Image] {
	made := asked(c.Client.ImageCreate(c.ctx, params))(c, "create image %s", params.Body.Name)
	if made.err == nil || mayBeDone(made.err) {
		which := oxide.ImageViewParams{Image: oxide.NameOrId(params.Body.Name), Project: params.Project}
		if made.err == nil {
			which = oxide.ImageViewParams{Image: oxide.NameOrId(made.value.Id)}
		}
		c.cleanup(func(ctx context.Context) error {
			image, err := c.Client.ImageView(ctx, which)
			if err != nil || !c.isOwn(image.Description) {
				return gone(err)
			}
			return gone(c.deleteImage(ctx, image.Id))
		})
	}
	return made
}

// viewImage reads an image by its ID or name. If project is "", a name is that of a silo's image.
func (c *Check) viewImage(which string, project oxide.NameOrId) outcome[*oxide.Image] {
	return asked(c.Client.ImageView(c.ctx, oxide.ImageViewParams{Image: oxide.NameOrId(which),
		Project: project}))(c, "read image %s", which)
}

func (r *TestedRack) deleteImage(ctx context.Context, id string) error {
	return r.Client.ImageDelete(ctx, oxide.ImageDeleteParams{Image: oxide.NameOrId(id)})
}

// checkPromotion needs a simulated rack: on a real one, other users would see the promoted image.
func (c *Check) checkPromotion(image *oxide.Image) {
	ref := oxide.NameOrId(image.Id)
	promote := func() outcome[*oxide.Image] {
		return asked(c.Client.ImagePromote(c.ctx, oxide.ImagePromoteParams{Image: ref}))(c,
			"promote image %s", image.Name)
	}
	demote := func() outcome[*oxide.Image] {
		return asked(c.Client.ImageDemote(c.ctx, oxide.ImageDemoteParams{Image: ref,
			Project: c.project()}))(c, "demote image %s", image.Name)
	}
	demote().refused(invalidRequest("Cannot demote a project image"))
	silos := promote().must()
	equal(c, "its project then", silos.ProjectId, "")
	c.same("the promoted image", c.viewImage(silos.Id, "").must(), silos)
	promote().refused(invalidRequest("Cannot promote a silo image"))
	again := demote().must()
	equal(c, "its project then", again.ProjectId, image.ProjectId)
	c.same("the demoted image", c.viewImage(again.Id, "").must(), again)
}
