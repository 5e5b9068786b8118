package rules

import (
	"context"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// snapshotUnderway is a snapshot that is being taken.
type snapshotUnderway struct {
	*underway[*oxide.Snapshot]
	// seen is the snapshot as others see it.
	seen *oxide.Snapshot
}

// beginSnapshot starts to take a snapshot, and waits until the snapshot is visible.
func (c *Check) beginSnapshot(disk string) snapshotUnderway {
	name := c.name()
	u := snapshotUnderway{}
	view := func() (*oxide.Snapshot, error) { return c.readSnapshot(c.ctx, string(name)) }
	u.underway = begin(c, "take a snapshot", "snapshot_hold", func() (*oxide.Snapshot, error) {
		return c.Client.SnapshotCreate(c.ctx, oxide.SnapshotCreateParams{Project: c.project(),
			Body: &oxide.SnapshotCreate{Name: name, Description: c.Description, Disk: oxide.NameOrId(disk)}})
	}, func() (err error) {
		u.seen, err = view()
		return err
	}, func(ctx context.Context) error {
		if u.seen != nil {
			return c.removeSnapshot(ctx, u.seen)
		}
		return c.removeSnapshotByName(ctx, name, disk)
	})
	u.carriedOut = func() bool {
		now, err := view()
		return IsGone(err) || err == nil && now.State != oxide.SnapshotStateCreating
	}
	return u
}

func checkTaking(c *Check) {
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
}

func checkRepairLock(c *Check) {
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
}

func checkUnfitDisk(c *Check) {
	c.needSimulated("a disk in such a state cannot be brought about from outside")
	c.snapshot(c.faultedDisk().Id).refused(unavailable)
}

func checkOrderOnSnapshot(c *Check) {
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
}

func checkSurvival(c *Check) {
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
	c.deleteSnapshot(u.seen.Id).refused(invalidRequest("snapshot cannot be deleted in state Creating"))
	u.end().must()
}

func checkUnfinishedSource(c *Check) {
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
}
