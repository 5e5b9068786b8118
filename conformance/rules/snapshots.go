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
	view := func() (*oxide.Snapshot, error) { return c.viewSnapshot(c.ctx, string(name)) }
	u.underway = begin(c, "take a snapshot", "snapshot_hold", func() (*oxide.Snapshot, error) {
		return c.Client.SnapshotCreate(c.ctx, oxide.SnapshotCreateParams{Project: c.project(),
			Body: &oxide.SnapshotCreate{Name: name, Description: c.Description,
				Disk: oxide.NameOrId(disk)}})
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
	if u.seen == nil {
		c.fatalf("while a snapshot is taken: expected that others see it; found it taken before")
	}
	return u
}

func checkTaking(c *Check) {
	detached, attached := c.disk(), c.disk()
	must(c.attach(attached.Id, c.StoppedInstance().Id))(c, "attach a disk")
	for disk, states := range map[*oxide.Disk][2]oxide.DiskStateState{
		detached: {oxide.DiskStateStateMaintenance, oxide.DiskStateStateDetached},
		attached: {oxide.DiskStateStateAttached, oxide.DiskStateStateAttached},
	} {
		which := "a disk that is " + string(states[1])
		u := c.beginSnapshot(disk.Id)
		equal(c, "a snapshot of "+which+", meanwhile", u.seen.State, oxide.SnapshotStateCreating)
		equal(c, which+", meanwhile", c.look(disk.Id).State.State(), states[0])
		if disk == detached {
			c.refuses("delete the disk meanwhile", c.deleteDisk(disk.Id),
				invalidRequest("disk cannot be deleted in state %q", states[0]))
		}
		taken := must(u.end(c))(c, "take a snapshot of "+which)
		equal(c, "a snapshot of "+which, taken.State, oxide.SnapshotStateReady)
		equal(c, "the snapshot's disk", taken.DiskId, disk.Id)
		equal(c, "the snapshot's size", taken.Size, disk.Size)
		equal(c, "the snapshot's project", taken.ProjectId, disk.ProjectId)
		equal(c, which+", afterwards", c.look(disk.Id).State.State(), states[1])
	}
}

func checkRepairLock(c *Check) {
	disk := c.disk()
	u := c.beginSnapshot(disk.Id)
	locked := inConflict("volume repair lock")
	c.mustRefuse("take a second snapshot meanwhile", locked)(c.snapshot(disk.Id))
	c.mustRefuse("take a second snapshot meanwhile, under a name that is taken", locked)(
		c.takeSnapshot(c.ctx, u.seen.Name, disk.Id))
	must(u.end(c))(c, "take the first snapshot")
	must(c.snapshot(disk.Id))(c, "take a second snapshot afterwards")
	if c.arrange("a disk whose region is replaced") {
		c.Switch("replacing", true)
		c.mustRefuse("take a snapshot while a region is replaced", locked)(c.snapshot(disk.Id))
	}
}

func checkUnfitDisk(c *Check) {
	c.needSimulated("a disk in such a state cannot be brought about from outside")
	c.mustRefuse("take a snapshot of a faulted disk", unavailable)(c.snapshot(c.faultedDisk().Id))
}

func checkOrderOnSnapshot(c *Check) {
	disk := c.disk()
	first := must(c.snapshot(disk.Id))(c, "take a snapshot")
	missing := uuid.NewString()
	c.mustRefuse("take a snapshot of a disk that is not there", unknownID("disk", missing))(
		c.takeSnapshot(c.ctx, first.Name, missing))
	exists := nameTaken("snapshot", first.Name)
	c.mustRefuse("take a snapshot under a name that is taken", exists)(
		c.takeSnapshot(c.ctx, first.Name, disk.Id))
	if !c.arrange("a silo without quota") {
		return
	}
	faulty := c.faultedDisk().Id
	c.Switch("quota_bytes", c.storageUsed(c.ctx))
	for _, source := range []string{disk.Id, faulty} {
		c.mustRefuse("take a snapshot without quota, under a name that is taken", exists)(
			c.takeSnapshot(c.ctx, first.Name, source))
		c.mustRefuse("take a snapshot without quota", quotaExceeded)(c.snapshot(source))
	}
	c.Switch("full", true)
	c.mustRefuse("take a snapshot on a full rack, under a name that is taken", rackIsFull)(
		c.takeSnapshot(c.ctx, first.Name, disk.Id))
}

func checkSurvival(c *Check) {
	disk := c.disk()
	snapshot := must(c.snapshot(disk.Id))(c, "take a snapshot")
	c.must("delete a disk that has a snapshot", c.deleteDisk(disk.Id))
	left := must(c.viewSnapshot(c.ctx, snapshot.Id))(c, "read the snapshot of a disk that is gone")
	equal(c, "its state", left.State, oxide.SnapshotStateReady)
	equal(c, "its disk", left.DiskId, disk.Id)
	restored := must(c.createDisk(c.fromSnapshot(snapshot.Id, false)))(c, "create a disk from it")
	equal(c, "the disk's snapshot", restored.SnapshotId, snapshot.Id)
	c.must("delete a snapshot that a disk was made from", c.deleteSnapshot(snapshot.Id))
	equal(c, "the disk of a snapshot that is gone", c.look(restored.Id).State.State(),
		oxide.DiskStateStateDetached)
	u := c.beginSnapshot(restored.Id)
	c.refuses("delete a snapshot that is being taken", c.deleteSnapshot(u.seen.Id),
		invalidRequest("snapshot cannot be deleted in state Creating"))
	must(u.end(c))(c, "take a snapshot")
}

func checkUnfinishedSource(c *Check) {
	disk := c.disk()
	u := c.beginSnapshot(disk.Id)
	params := c.fromSnapshot(u.seen.Id, false)
	c.refusesDisk("from a snapshot that is being taken", params, internalError)
	c.mustRefuse("read that disk", notFound("disk", "name", string(params.Body.Name)))(
		c.viewDisk(context.WithoutCancel(c.ctx), string(params.Body.Name)))
	named := params
	body := *params.Body
	named.Body = &body
	named.Body.Name = disk.Name
	c.refusesDisk("from a snapshot that is being taken, with a name that is taken", named,
		nameTaken("disk", disk.Name))
	if c.arrange("a silo without quota") {
		c.Switch("quota_bytes", c.storageUsed(c.ctx))
		c.refusesDisk("from a snapshot that is being taken, without quota", named, quotaExceeded)
	}
	must(u.end(c))(c, "take the snapshot")
}
