package rules

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// fromSnapshot returns a request for a disk from a snapshot.
func (c *Check) fromSnapshot(id string, readOnly bool) oxide.DiskCreateParams {
	params := c.Blank()
	params.Body.DiskBackend = From(&oxide.DiskSourceSnapshot{SnapshotId: id, ReadOnly: &readOnly})
	return params
}

// local returns a request for a local disk.
func (c *Check) local(bytes int64) oxide.DiskCreateParams {
	params := c.Blank()
	params.Body.Size = oxide.ByteCount(bytes)
	params.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	return params
}

// sized returns a request for a blank disk of a size in bytes.
func (c *Check) sized(bytes int64) oxide.DiskCreateParams {
	params := c.Blank()
	params.Body.Size = oxide.ByteCount(bytes)
	return params
}

func checkNewDisk(c *Check) {
	project := Must[*oxide.Project](c, "read the project")(c.Client.ProjectView(c.ctx,
		oxide.ProjectViewParams{Project: c.project()}))
	params := c.Blank()
	made := Must[*oxide.Disk](c, "create a disk")(c.CreateDisk(params))
	read := c.Look(made.Id)
	for what, state := range map[*oxide.Disk]oxide.DiskStateState{
		made: oxide.DiskStateStateCreating, read: oxide.DiskStateStateDetached,
	} {
		where := "the disk as it is " + string(state)
		Equal(c, where+": its state", what.State.State(), state)
		Equal(c, where+": its name", what.Name, params.Body.Name)
		Equal(c, where+": its description", what.Description, params.Body.Description)
		Equal(c, where+": its project", what.ProjectId, project.Id)
		Equal(c, where+": its size", what.Size, params.Body.Size)
		Equal(c, where+": its type", what.DiskType, oxide.DiskTypeDistributed)
		Equal(c, where+": whether it is read-only", what.ReadOnly != nil && *what.ReadOnly, false)
		Equal(c, where+": its source", what.SnapshotId+what.ImageId, "")
	}
	c.must("delete the disk", c.DeleteDisk(made.Id))
	c.MustRefuse("read a deleted disk", notFound("disk", "name", string(made.Name)))(
		c.diskByName(c.ctx, made.Name))
	again := Must[*oxide.Disk](c, "create another one of its name")(c.CreateDisk(params))
	if again.Id == made.Id {
		c.Errorf("another disk of the name: expected another ID; found %s again", made.Id)
	}
}

func checkReadOnlyDisk(c *Check) {
	snapshot := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(c.Disk().Id))
	disk := Must[*oxide.Disk](c, "create a read-only disk")(c.CreateDisk(
		c.fromSnapshot(snapshot.Id, true)))
	Equal(c, "its state in the answer", disk.State.State(), oxide.DiskStateStateDetached)
	Equal(c, "whether it is read-only", disk.ReadOnly != nil && *disk.ReadOnly, true)
	Equal(c, "its snapshot", disk.SnapshotId, snapshot.Id)
	c.MustRefuse("take a snapshot of a read-only disk",
		invalidRequest("can't create a snapshot of a read-only disk"))(c.Snapshot(disk.Id))
}

func checkFailedDelete(c *Check) {
	c.needSimulated("a deletion that fails cannot be brought about from outside")
	before := c.storageUsed(c.ctx)
	disk := c.FaultedDisk()
	Equal(c, "the name of a disk whose deletion failed", string(disk.Name), "deleted-"+disk.Id)
	Equal(c, "its state", disk.State.State(), oxide.DiskStateStateFaulted)
	Equal(c, "what is provisioned", c.storageUsed(c.ctx), before+GiB)
	c.must("delete it again", c.DeleteDisk(disk.Id))
	Equal(c, "what is provisioned when it is deleted", c.storageUsed(c.ctx), before)
}

func checkSoftDelete(c *Check) {
	before := c.storageUsed(c.ctx)
	if c.Simulated() {
		c.Cleanup(c.Admin.RunDeferred) // runs last, after all deletions
		c.Switch("free_delay", "1h")
	}
	params := c.Blank()
	disk := Must[*oxide.Disk](c, "create a disk")(c.CreateDisk(params))
	snapshot := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(disk.Id))
	c.must("delete the disk", c.DeleteDisk(disk.Id))
	c.must("delete the snapshot", c.DeleteSnapshot(snapshot.Id))
	c.MustRefuse("read the deleted disk", notFound("disk", "id", disk.Id))(
		c.Client.DiskView(c.ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Id)}))
	c.MustRefuse("read the deleted snapshot", notFound("snapshot", "id", snapshot.Id))(
		c.Client.SnapshotView(c.ctx, oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(snapshot.Id)}))
	again := Must[*oxide.Disk](c, "create another disk of the name")(c.CreateDisk(params))
	Must[*oxide.Snapshot](c, "take another snapshot of the name")(
		c.takeSnapshot(c.ctx, snapshot.Name, again.Id))
	if !c.Arrange("a rack that frees late") {
		return
	}
	Equal(c, "what is provisioned until all is freed", c.storageUsed(c.ctx), before+4*GiB)
	c.Switch("quota_bytes", before+4*GiB)
	c.MustRefuse("create a disk until then", quotaExceeded)(c.CreateDisk(c.Blank()))
	c.must("let the rack free what was deleted", c.Admin.RunDeferred(c.ctx))
	Equal(c, "what is provisioned then", c.storageUsed(c.ctx), before+2*GiB)
	c.Look(again.Id)
}

func checkDeleteAttached(c *Check) {
	disk := c.Disk()
	instance := c.Instance(disk)
	for _, state := range []string{"stopped", "running"} {
		if state == "running" {
			c.StartAndAwait(instance.Id)
		}
		c.Refuses("delete a disk of a "+state+" instance", c.DeleteDisk(disk.Id),
			invalidRequest("disk cannot be deleted in state %q", "attached"))
		c.AttachedTo("after that", c.Look(disk.Id), instance.Id)
	}
}

// awaitProvisioned waits until the silo's disks and snapshots use the given part of its quota. A
// rack may free the space of deleted objects later (A68).
func (c *Check) awaitProvisioned(want int64) error {
	return harness.Await(c.ctx, patience, func() error {
		if is := c.storageUsed(c.ctx); is != want {
			return fmt.Errorf("%d bytes are provisioned, not %d", is, want)
		}
		return nil
	})
}

// takeSnapshot takes a snapshot with a name, and removes it at the end.
func (c *Check) takeSnapshot(ctx context.Context, name oxide.Name, disk string) (*oxide.Snapshot,
	error) {
	snapshot, err := c.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{Project: c.project(),
		Body: &oxide.SnapshotCreate{Name: name, Description: c.Description,
			Disk: oxide.NameOrId(disk)}})
	switch {
	case err == nil:
		c.Cleanup(func(ctx context.Context) error { return c.removeSnapshot(ctx, snapshot) })
	case mayBeDone(err):
		c.Cleanup(func(ctx context.Context) error { return c.removeSnapshotByName(ctx, name, disk) })
	}
	return snapshot, err
}

// removeSnapshotByName removes a snapshot of a disk of this check.
func (c *Check) removeSnapshotByName(ctx context.Context, name oxide.Name, disk string) error {
	made, err := c.Client.SnapshotView(ctx, oxide.SnapshotViewParams{Project: c.project(),
		Snapshot: oxide.NameOrId(name)})
	if err != nil || made.DiskId != disk && !c.isOwn(made.Description) {
		return gone(err)
	}
	return c.removeSnapshot(ctx, made)
}

func (c *Check) removeSnapshot(ctx context.Context, snapshot *oxide.Snapshot) error {
	return gone(c.Client.SnapshotDelete(ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(snapshot.Id)}))
}
