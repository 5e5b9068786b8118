package rules

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

func (c *Check) fromSnapshot(id string, readOnly bool) oxide.DiskCreateParams {
	params := c.blank()
	params.Body.DiskBackend = From(&oxide.DiskSourceSnapshot{SnapshotId: id, ReadOnly: &readOnly})
	return params
}

func (c *Check) local(bytes int64) oxide.DiskCreateParams {
	params := c.blank()
	params.Body.Size = oxide.ByteCount(bytes)
	params.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	return params
}

func (c *Check) sized(bytes int64) oxide.DiskCreateParams {
	params := c.blank()
	params.Body.Size = oxide.ByteCount(bytes)
	return params
}

func checkNewDisk(c *Check) {
	project := must(c.viewProject(c.Project))(c, "read the project")
	params := c.blank()
	made := must(c.createDisk(params))(c, "create a disk")
	read := c.look(made.Id)
	for what, state := range map[*oxide.Disk]oxide.DiskStateState{
		made: oxide.DiskStateStateCreating, read: oxide.DiskStateStateDetached,
	} {
		where := "the disk as it is " + string(state)
		equal(c, where+": its state", what.State.State(), state)
		equal(c, where+": its name", what.Name, params.Body.Name)
		equal(c, where+": its description", what.Description, params.Body.Description)
		equal(c, where+": its project", what.ProjectId, project.Id)
		equal(c, where+": its size", what.Size, params.Body.Size)
		equal(c, where+": its type", what.DiskType, oxide.DiskTypeDistributed)
		equal(c, where+": whether it is read-only", what.ReadOnly != nil && *what.ReadOnly, false)
		equal(c, where+": its source", what.SnapshotId+what.ImageId, "")
	}
	c.must("delete the disk", c.deleteDisk(made.Id))
	c.mustRefuse("read a deleted disk", notFound("disk", "name", string(made.Name)))(
		c.viewDisk(c.ctx, string(made.Name)))
	again := must(c.createDisk(params))(c, "create another one of its name")
	if again.Id == made.Id {
		c.errorf("another disk of the name: expected another ID; found %s again", made.Id)
	}
}

func checkReadOnlyDisk(c *Check) {
	snapshot := must(c.snapshot(c.disk().Id))(c, "take a snapshot")
	disk := must(c.createDisk(c.fromSnapshot(snapshot.Id, true)))(c, "create a read-only disk")
	equal(c, "its state in the answer", disk.State.State(), oxide.DiskStateStateDetached)
	equal(c, "whether it is read-only", disk.ReadOnly != nil && *disk.ReadOnly, true)
	equal(c, "its snapshot", disk.SnapshotId, snapshot.Id)
	c.mustRefuse("take a snapshot of a read-only disk",
		invalidRequest("can't create a snapshot of a read-only disk"))(c.snapshot(disk.Id))
}

func checkFailedDelete(c *Check) {
	c.needSimulated("a deletion that fails cannot be brought about from outside")
	before := c.storageUsed(c.ctx)
	disk := c.faultedDisk()
	equal(c, "the name of a disk whose deletion failed", string(disk.Name), "deleted-"+disk.Id)
	equal(c, "its state", disk.State.State(), oxide.DiskStateStateFaulted)
	equal(c, "what is provisioned", c.storageUsed(c.ctx), before+GiB)
	c.must("delete it again", c.deleteDisk(disk.Id))
	equal(c, "what is provisioned when it is deleted", c.storageUsed(c.ctx), before)
}

func checkSoftDelete(c *Check) {
	before := c.storageUsed(c.ctx)
	if c.simulated() {
		c.cleanup(c.Admin.RunDeferred) // runs last, after all deletions
		c.Switch("free_delay", "1h")
	}
	params := c.blank()
	disk := must(c.createDisk(params))(c, "create a disk")
	snapshot := must(c.snapshot(disk.Id))(c, "take a snapshot")
	c.must("delete the disk", c.deleteDisk(disk.Id))
	c.must("delete the snapshot", c.deleteSnapshot(snapshot.Id))
	c.mustRefuse("read the deleted disk", notFound("disk", "id", disk.Id))(
		c.viewDisk(c.ctx, disk.Id))
	c.mustRefuse("read the deleted snapshot", notFound("snapshot", "id", snapshot.Id))(
		c.viewSnapshot(c.ctx, snapshot.Id))
	again := must(c.createDisk(params))(c, "create another disk of the name")
	must(c.takeSnapshot(c.ctx, snapshot.Name, again.Id))(c, "take another snapshot of the name")
	if !c.arrange("a rack that frees late") {
		return
	}
	equal(c, "what is provisioned until all is freed", c.storageUsed(c.ctx), before+4*GiB)
	c.Switch("quota_bytes", before+4*GiB)
	c.mustRefuse("create a disk until then", quotaExceeded)(c.createDisk(c.blank()))
	c.must("let the rack free what was deleted", c.Admin.RunDeferred(c.ctx))
	equal(c, "what is provisioned then", c.storageUsed(c.ctx), before+2*GiB)
	c.look(again.Id)
}

func checkDeleteAttached(c *Check) {
	disk := c.disk()
	instance := c.instance(disk)
	for _, state := range []string{"stopped", "running"} {
		if state == "running" {
			c.startAndAwait(instance.Id)
		}
		c.refuses("delete a disk of a "+state+" instance", c.deleteDisk(disk.Id),
			invalidRequest("disk cannot be deleted in state %q", "attached"))
		c.attachedTo("after that", c.look(disk.Id), instance.Id)
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
		c.cleanup(func(ctx context.Context) error { return c.removeSnapshot(ctx, snapshot) })
	case mayBeDone(err):
		c.cleanup(func(ctx context.Context) error { return c.removeSnapshotByName(ctx, name, disk) })
	}
	return snapshot, err
}

func (c *Check) removeSnapshotByName(ctx context.Context, name oxide.Name, disk string) error {
	made, err := c.viewSnapshot(ctx, string(name))
	if err != nil || made.DiskId != disk && !c.isOwn(made.Description) {
		return gone(err)
	}
	return c.removeSnapshot(ctx, made)
}

func (c *Check) removeSnapshot(ctx context.Context, snapshot *oxide.Snapshot) error {
	return gone(c.Client.SnapshotDelete(ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(snapshot.Id)}))
}

var rackIsFull = Refused{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"}

const leastSize = "total size must be at least 1 GiB"

func (c *Check) refusesDisk(what string, params oxide.DiskCreateParams, want Refused) {
	c.mustRefuse("create a disk "+what, want)(c.createDisk(params))
}

func checkDiskSizes(c *Check) {
	sizes := []int64{GiB}
	if c.arrange("a disk of 1023 GiB") {
		sizes = append(sizes, 1023*GiB) // too large for a real rack
	}
	for _, bytes := range sizes {
		disk := must(c.createDisk(c.sized(bytes)))(c, "create a disk of a size that it may have")
		equal(c, "its size", int64(c.look(disk.Id).Size), bytes)
	}
	c.refusesDisk("of no bytes", c.sized(0), invalidValue("size", leastSize))
	c.refusesDisk("of half a GiB", c.sized(GiB/2), invalidValue("size", leastSize))
	c.refusesDisk("of a GiB and a block", c.sized(GiB+512),
		invalidValue("size", "total size must be a multiple of 1 GiB"))
	c.refusesDisk("of 1024 GiB", c.sized(1024*GiB),
		invalidValue("size", "total size must be less than 1023 GiB"))
}

func checkLocalDisk(c *Check) {
	made := must(c.createDisk(c.local(GiB)))(c, "create a local disk")
	disk := c.look(made.Id)
	equal(c, "its type", disk.DiskType, oxide.DiskTypeLocal)
	equal(c, "its blocks", disk.BlockSize, 4096)
	equal(c, "its source", disk.SnapshotId+disk.ImageId, "")
	equal(c, "whether it is read-only", disk.ReadOnly != nil && *disk.ReadOnly, false)
	c.mustRefuse("take a snapshot of a local disk",
		invalidRequest("can't create a snapshot of a local storage disk"))(c.snapshot(disk.Id))
	c.refusesDisk("that is local, of half a GiB", c.local(GiB/2), invalidValue("size", leastSize))
	c.refusesDisk("that is local, of a GiB and a block", c.local(GiB+4096),
		invalidValue("size", "total size must be a multiple of 1 GiB"))
	for bytes, problem := range map[int64]string{
		11 << 50: "requested size over 10 PiB",
		9 << 50:  "requested size is too large to fit on any physical disk",
	} {
		_, err := c.createDisk(c.local(bytes))
		if noDriveHas(err) || c.simulated() { // a rack before v22 looks at the quota alone
			c.refuses("create a local disk that no drive can hold", err, invalidValue("size", problem))
		}
	}
	c.refusesBeyondQuota("create a local disk beyond the quota", c.local(c.beyondQuota()))
}

func (c *Check) refusesBeyondQuota(what string, params oxide.DiskCreateParams) {
	if _, err := c.createDisk(params); !noDriveHas(err) {
		c.refuses(what, err, quotaExceeded)
	}
}

// beyondQuota returns a size in whole GiB that the silo's quota cannot hold. A simulated rack gets
// a quota that is used up.
func (c *Check) beyondQuota() int64 {
	if c.simulated() {
		c.Switch("quota_bytes", c.storageUsed(c.ctx))
		return GiB
	}
	use := must(c.Client.UtilizationView(c.ctx))(c, "read the silo's utilization")
	return (int64(use.Capacity.Storage)/GiB + 1) * GiB
}

// noDriveHas reports whether the error is that of a rack of v22 or later, which refuses a local
// disk before it checks the quota (A26).
func noDriveHas(err error) bool {
	refused := refusal(err)
	return errors.Is(err, oxide.ErrInvalidValue) && refused.ErrorResponse.Message !=
		invalidValue("size", leastSize).Message
}

func checkNoSpace(c *Check) {
	c.needSimulated("a rack without space cannot be brought about from outside")
	disk := c.disk()
	source := must(c.snapshot(disk.Id))(c, "take a snapshot")
	before, params := c.storageUsed(c.ctx), c.blank()
	c.Switch("full", true)
	c.refusesDisk("on a full rack", params, rackIsFull)
	c.checkUndone(params.Body.Name, before)
	c.mustRefuse("take a snapshot on a full rack", rackIsFull)(c.snapshot(disk.Id))
	equal(c, "the disk's state afterwards", c.look(disk.Id).State.State(),
		oxide.DiskStateStateDetached)
	must(c.createDisk(c.fromSnapshot(source.Id, true)))(c,
		"create a read-only disk, which needs no space, on a full rack")
	must(c.createDisk(c.local(GiB)))(c, "create a local disk on a full rack")
}

func checkOrderOnCreate(c *Check) {
	missing := uuid.NewString()
	wrong := c.fromSnapshot(missing, false)
	wrong.Body.Size = 1
	c.refusesDisk("from no snapshot, of one byte", wrong, notFound("snapshot", "id", missing))
	large := c.blank()
	large.Body.Size = 2 * GiB
	big := must(c.createDisk(large))(c, "create a disk of 2 GiB")
	snapshot := must(c.snapshot(big.Id))(c, "take a snapshot")
	c.refusesDisk("from a snapshot, smaller and of no whole GiB", func() oxide.DiskCreateParams {
		p := c.fromSnapshot(snapshot.Id, false)
		p.Body.Size = GiB + 1
		return p
	}(), invalidRequest(
		"disk size 1073741825 must be greater than or equal to snapshot size 2147483648"))
	c.refusesDisk("from a snapshot, read-only and larger", func() oxide.DiskCreateParams {
		p := c.fromSnapshot(snapshot.Id, true)
		p.Body.Size = 3 * GiB
		return p
	}(), invalidRequest(
		"read-only disk size 3221225472 must be equal to source snapshot size 2147483648"))
	c.refusesDisk("of no whole block, below a GiB", c.sized(GiB/2+1), invalidValue(
		"size and block_size", "total size must be a multiple of block size 512"))
	c.refusesDisk("of no whole GiB, below one", c.sized(GiB/2), invalidValue("size", leastSize))
	c.refusesDisk("of no whole GiB, beyond the largest", c.sized(1024*GiB+512),
		invalidValue("size", "total size must be a multiple of 1 GiB"))
	most := c.sized(1024 * GiB)
	most.Body.Name = big.Name
	c.refusesDisk("beyond the largest, with a name that is taken", most,
		invalidValue("size", "total size must be less than 1023 GiB"))
	beyond := c.local(c.beyondQuota())
	beyond.Body.Name = big.Name
	c.refusesBeyondQuota("create a disk beyond the quota, with a name that is taken", beyond)
}

func checkQuota(c *Check) {
	c.steadily(c.checkProvisioned)
	use := must(c.Client.UtilizationView(c.ctx))(c, "read the silo's utilization")
	if use.Capacity.Storage < use.Provisioned.Storage {
		c.errorf("the silo's quota: expected at least the %d bytes that are provisioned; found %d",
			use.Provisioned.Storage, use.Capacity.Storage)
	}
	c.refusesBeyondQuota("create a disk beyond the quota", c.local(c.beyondQuota()))
	if c.simulated() { // only the answer shows the quota of a real rack
		const quota = 1 << 50
		c.Switch("quota_bytes", quota)
		use = must(c.Client.UtilizationView(c.ctx))(c, "read the silo's utilization")
		equal(c, "the silo's quota", int64(use.Capacity.Storage), quota)
	}
}

func (c *Check) checkProvisioned() {
	before, problems := c.storageUsed(c.ctx), len(c.problems)
	params := c.blank()
	params.Body.Size = 2 * GiB
	disk := must(c.createDisk(params))(c, "create a disk of 2 GiB")
	equal(c, "what a disk of 2 GiB takes of the quota", c.storageUsed(c.ctx)-before, 2*GiB)
	snapshot := must(c.snapshot(disk.Id))(c, "take a snapshot")
	equal(c, "what it takes with its snapshot", c.storageUsed(c.ctx)-before, 4*GiB)
	c.must("delete the disk", c.deleteDisk(disk.Id))
	c.must("delete the snapshot", c.deleteSnapshot(snapshot.Id))
	if len(c.problems) > problems {
		return
	}
	if err := c.awaitProvisioned(before); err != nil {
		c.errorf("what is provisioned when both are deleted: expected %d bytes; found, %s", before, err)
	}
}
