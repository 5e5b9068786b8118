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
	return c.diskFrom(&oxide.DiskSourceSnapshot{SnapshotId: id, ReadOnly: &readOnly})
}

func (c *Check) local(bytes int64) oxide.DiskCreateParams {
	params := sized(bytes, c.blank())
	params.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	return params
}

// sized sets the size in a request for a disk.
func sized(bytes int64, params oxide.DiskCreateParams) oxide.DiskCreateParams {
	params.Body.Size = oxide.ByteCount(bytes)
	return params
}

func checkNewDisk(c *Check) {
	project, params := c.viewProject(c.Project).must(), c.blank()
	made := c.createDisk(params).must()
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
	c.deleteDisk(made.Id).must()
	c.viewDisk(string(made.Name)).refused(unknownName("disk", made.Name))
	again := c.createDisk(params).must()
	if again.Id == made.Id {
		c.errorf("another disk of the name: expected another ID; found %s again", made.Id)
	}
}

func checkReadOnlyDisk(c *Check) {
	snapshot := c.snapshot(c.disk().Id).must()
	disk := c.createDisk(c.fromSnapshot(snapshot.Id, true)).must()
	equal(c, "its state in the answer", disk.State.State(), oxide.DiskStateStateDetached)
	equal(c, "whether it is read-only", disk.ReadOnly != nil && *disk.ReadOnly, true)
	equal(c, "its snapshot", disk.SnapshotId, snapshot.Id)
	c.snapshot(disk.Id).refused(invalidRequest("can't create a snapshot of a read-only disk"))
}

func checkFailedDelete(c *Check) {
	c.needSimulated("a deletion that fails cannot be brought about from outside")
	before := c.storageUsed()
	disk := c.faultedDisk()
	equal(c, "the name of a disk whose deletion failed", string(disk.Name), "deleted-"+disk.Id)
	equal(c, "its state", disk.State.State(), oxide.DiskStateStateFaulted)
	equal(c, "what is provisioned", c.storageUsed(), before+GiB)
	c.deleteDisk(disk.Id).must()
	equal(c, "what is provisioned when it is deleted", c.storageUsed(), before)
}

func checkSoftDelete(c *Check) {
	before := c.storageUsed()
	if c.simulated() {
		c.cleanup(c.Admin.RunDeferred) // runs last, after all deletions
		c.Switch("free_delay", "1h")
	}
	params := c.blank()
	disk := c.createDisk(params).must()
	snapshot := c.snapshot(disk.Id).must()
	c.deleteDisk(disk.Id).must()
	c.deleteSnapshot(snapshot.Id).must()
	c.viewDisk(disk.Id).refused(unknownID("disk", disk.Id))
	c.viewSnapshot(snapshot.Id).refused(unknownID("snapshot", snapshot.Id))
	again := c.createDisk(params).must()
	c.takeSnapshot(snapshot.Name, again.Id).must()
	if !c.arrange("a rack that frees late") {
		return
	}
	equal(c, "what is provisioned until all is freed", c.storageUsed(), before+4*GiB)
	c.Switch("quota_bytes", before+4*GiB)
	c.createDisk(c.blank()).refused(quotaExceeded)
	c.must("let the rack free what was deleted", c.Admin.RunDeferred(c.ctx))
	equal(c, "what is provisioned then", c.storageUsed(), before+2*GiB)
	c.look(again.Id)
}

func undeletable(state oxide.DiskStateState) Refused {
	return invalidRequest("disk cannot be deleted in state %q", state)
}

func checkDeleteAttached(c *Check) {
	disk := c.disk()
	instance := c.instance(disk)
	for _, state := range []string{"stopped", "running"} {
		if state == "running" {
			c.startAndAwait(instance.Id)
		}
		c.deleteDisk(disk.Id).as("of a " + state + " instance").refused(undeletable("attached"))
		c.staysAttached(disk.Id, instance.Id)
	}
}

// awaitProvisioned waits until the silo's disks and snapshots use the given part of its quota. A
// rack may free the space of deleted objects later (A68).
func (c *Check) awaitProvisioned(want int64) error {
	return harness.Await(c.ctx, patience, func() error {
		if is := c.storageUsed(); is != want {
			return fmt.Errorf("%d bytes are provisioned, not %d", is, want)
		}
		return nil
	})
}

// takeSnapshot takes a snapshot with a name, and removes it at the end.
func (c *Check) takeSnapshot(name oxide.Name, disk string) outcome[*oxide.Snapshot] {
	snapshot, err := c.Client.SnapshotCreate(c.ctx, oxide.SnapshotCreateParams{Project: c.project(),
		Body: &oxide.SnapshotCreate{Name: name, Description: c.Description, Disk: oxide.NameOrId(disk)}})
	switch {
	case err == nil:
		c.cleanup(func(ctx context.Context) error { return c.removeSnapshot(ctx, snapshot) })
	case mayBeDone(err):
		c.cleanup(func(ctx context.Context) error { return c.removeSnapshotByName(ctx, name, disk) })
	}
	return asked(snapshot, err)(c, "take snapshot %s of disk %s", name, disk)
}

func (c *Check) removeSnapshotByName(ctx context.Context, name oxide.Name, disk string) error {
	made, err := c.readSnapshot(ctx, string(name))
	if err != nil || made.DiskId != disk && !c.isOwn(made.Description) {
		return gone(err)
	}
	return c.removeSnapshot(ctx, made)
}

func (c *Check) removeSnapshot(ctx context.Context, snapshot *oxide.Snapshot) error {
	return gone(c.Client.SnapshotDelete(ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(snapshot.Id)}))
}

var (
	rackIsFull = Refused{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"}
	tooSmall   = invalidValue("size", "total size must be at least 1 GiB")
	noWholeGiB = invalidValue("size", "total size must be a multiple of 1 GiB")
	tooLarge   = invalidValue("size", "total size must be less than 1023 GiB")
	// This is checked before the others.
	noWholeBlock = invalidValue("size and block_size",
		"total size must be a multiple of block size 512")
)

func checkDiskSizes(c *Check) {
	sizes := []int64{GiB}
	if c.arrange("a disk of 1023 GiB") {
		sizes = append(sizes, 1023*GiB) // too large for a real rack
	}
	for _, bytes := range sizes {
		disk := c.createDisk(sized(bytes, c.blank())).must()
		equal(c, "its size", int64(c.look(disk.Id).Size), bytes)
	}
	c.createDisk(sized(0, c.blank())).refused(tooSmall)
	c.createDisk(sized(GiB/2, c.blank())).refused(tooSmall)
	c.createDisk(sized(GiB+512, c.blank())).refused(noWholeGiB)
	c.createDisk(sized(1024*GiB, c.blank())).refused(tooLarge)
}

func checkLocalDisk(c *Check) {
	made := c.createDisk(c.local(GiB)).must()
	disk := c.look(made.Id)
	equal(c, "its type", disk.DiskType, oxide.DiskTypeLocal)
	equal(c, "its blocks", disk.BlockSize, 4096)
	equal(c, "its source", disk.SnapshotId+disk.ImageId, "")
	equal(c, "whether it is read-only", disk.ReadOnly != nil && *disk.ReadOnly, false)
	c.snapshot(disk.Id).refused(invalidRequest("can't create a snapshot of a local storage disk"))
	c.createDisk(c.local(GiB / 2)).refused(tooSmall)
	c.createDisk(c.local(GiB + 4096)).refused(noWholeGiB)
	for bytes, problem := range map[int64]string{
		11 << 50: "requested size over 10 PiB",
		9 << 50:  "requested size is too large to fit on any physical disk",
	} {
		creation := c.createDisk(c.local(bytes))
		if noDriveHas(creation.err) || c.simulated() { // a rack before v22 looks at the quota alone
			creation.refused(invalidValue("size", problem))
		}
	}
	c.refusesBeyondQuota(c.local(c.beyondQuota()))
}

func (c *Check) refusesBeyondQuota(params oxide.DiskCreateParams) {
	if creation := c.createDisk(params); !noDriveHas(creation.err) {
		creation.refused(quotaExceeded)
	}
}

// beyondQuota returns a size in whole GiB that the silo's quota cannot hold. A simulated rack gets
// a quota that is used up.
func (c *Check) beyondQuota() int64 {
	if c.simulated() {
		c.Switch("quota_bytes", c.storageUsed())
		return GiB
	}
	use := c.utilization()
	return (int64(use.Capacity.Storage)/GiB + 1) * GiB
}

// noDriveHas reports whether the error is that of a rack of v22 or later, which refuses a local
// disk before it checks the quota (A26).
func noDriveHas(err error) bool {
	refused := refusal(err)
	return errors.Is(err, oxide.ErrInvalidValue) && refused.ErrorResponse.Message != tooSmall.Message
}

func checkNoSpace(c *Check) {
	c.needSimulated("a rack without space cannot be brought about from outside")
	disk := c.disk()
	source := c.snapshot(disk.Id).must()
	before, params := c.storageUsed(), c.blank()
	c.Switch("full", true)
	c.createDisk(params).refused(rackIsFull)
	c.checkUndone(params.Body.Name, before)
	c.snapshot(disk.Id).refused(rackIsFull)
	equal(c, "the disk's state afterwards", c.stateOf(disk.Id), oxide.DiskStateStateDetached)
	c.createDisk(c.fromSnapshot(source.Id, true)).must()
	c.createDisk(c.local(GiB)).must()
}

func checkOrderOnCreate(c *Check) {
	missing := uuid.NewString()
	c.createDisk(sized(1, c.fromSnapshot(missing, false))).refused(unknownID("snapshot", missing))
	big := c.createDisk(sized(2*GiB, c.blank())).must()
	snapshot := c.snapshot(big.Id).must()
	c.createDisk(sized(GiB+1, c.fromSnapshot(snapshot.Id, false))).refused(invalidRequest(
		"disk size 1073741825 must be greater than or equal to snapshot size 2147483648"))
	c.createDisk(sized(3*GiB, c.fromSnapshot(snapshot.Id, true))).refused(invalidRequest(
		"read-only disk size 3221225472 must be equal to source snapshot size 2147483648"))
	c.createDisk(sized(GiB/2+1, c.blank())).refused(noWholeBlock)
	c.createDisk(sized(GiB/2, c.blank())).refused(tooSmall)
	c.createDisk(sized(1024*GiB+512, c.blank())).refused(noWholeGiB)
	most := sized(1024*GiB, c.blank())
	most.Body.Name = big.Name
	c.createDisk(most).refused(tooLarge)
	beyond := c.local(c.beyondQuota())
	beyond.Body.Name = big.Name
	c.refusesBeyondQuota(beyond)
}

func checkQuota(c *Check) {
	c.steadily(c.checkProvisioned)
	use := c.utilization()
	if use.Capacity.Storage < use.Provisioned.Storage {
		c.errorf("the silo's quota: expected at least the %d bytes that are provisioned; found %d",
			use.Provisioned.Storage, use.Capacity.Storage)
	}
	c.refusesBeyondQuota(c.local(c.beyondQuota()))
	if c.simulated() { // only the answer shows the quota of a real rack
		const quota = 1 << 50
		c.Switch("quota_bytes", quota)
		use = c.utilization()
		equal(c, "the silo's quota", int64(use.Capacity.Storage), quota)
	}
}

func (c *Check) checkProvisioned() {
	before, problems := c.storageUsed(), len(c.problems)
	disk := c.createDisk(sized(2*GiB, c.blank())).must()
	equal(c, "what a disk of 2 GiB takes of the quota", c.storageUsed()-before, 2*GiB)
	snapshot := c.snapshot(disk.Id).must()
	equal(c, "what it takes with its snapshot", c.storageUsed()-before, 4*GiB)
	c.deleteDisk(disk.Id).must()
	c.deleteSnapshot(snapshot.Id).must()
	if len(c.problems) > problems {
		return
	}
	if err := c.awaitProvisioned(before); err != nil {
		c.errorf("what is provisioned when both are deleted: expected %d bytes; found, %s", before, err)
	}
}
