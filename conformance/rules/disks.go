package rules

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var ofDisks = []tested{
	{"A03", "disk_create disk_view", func(c *Check) { // the device path
		disk := c.disk()
		equal(c, "the device path of the disk "+string(disk.Name), disk.DevicePath,
			"/mnt/"+string(disk.Name))
	}},
	{"A16", "instance_create instance_disk_attach instance_disk_detach", func(c *Check) {
		full := c.newInstance()
		full.Body.BootDisk = c.newDisk()
		for range maxDisks - 1 {
			full.Body.Disks = append(full.Body.Disks, c.newDisk())
		}
		crowded := c.newInstance()
		crowded.Body.BootDisk = full.Body.BootDisk
		crowded.Body.Disks = append(slices.Clone(full.Body.Disks), full.Body.Disks[0])
		c.createInstance(crowded).refused(tooManyDisks)

		instance := c.createInstance(full).must()
		c.Await(instance.Id, oxide.InstanceStateStopped)
		disk, elsewhere := c.disk(), c.StoppedInstance()
		c.attach(disk.Id, instance.Id).refused(tooManyDisks)
		c.attach(disk.Id, elsewhere.Id).must()
		c.attach(disk.Id, instance.Id).refused(attachedElsewhere("attach", disk))
		c.detach(disk.Id, elsewhere.Id).must()
		if c.arrange("a failed instance") {
			c.fail(instance.Id)
			c.attach(disk.Id, instance.Id).refused(attachToFailed)
			c.stop(instance.Id).must()
			c.Await(instance.Id, oxide.InstanceStateStopped)
		}
		others := slices.DeleteFunc(c.disksOf(instance.Id), func(d oxide.Disk) bool {
			return d.Id == instance.BootDiskId
		})
		c.detach(others[0].Id, instance.Id).must()
		c.attach(disk.Id, instance.Id).must()
	}},
	{"A17", "instance_disk_attach instance_disk_detach", func(c *Check) { // hot-plug
		disk, stopped := c.disk(), c.StoppedInstance()
		running, there := c.runningInstance()
		attachedTo(c.attach(disk.Id, stopped.Id).as("it is stopped"), stopped.Id)
		attachedTo(c.detach(disk.Id, stopped.Id).as("it is stopped"), "")
		switch {
		case c.Hotplug:
			id := running.Id
			if c.Here != nil { // hot-plug needs an operating system; "running" has none
				id = c.Here.ID
			}
			attachedTo(c.attach(disk.Id, id).as("it runs"), id)
			attachedTo(c.detach(disk.Id, id).as("it runs"), "")
			return
		case c.AttachOnly:
			own := c.instance(c.disk()) // its deletion detaches the disks
			c.startAndAwait(own.Id)
			attachedTo(c.attach(disk.Id, own.Id).as("it runs"), own.Id)
		default:
			c.attach(disk.Id, running.Id).refused(notStopped("attach"))
			c.staysAttached(disk.Id, "")
		}
		c.detach(there.Id, running.Id).refused(notStopped("detach"))
		c.staysAttached(there.Id, running.Id)
	}},
	{"A18", "disk_view", checkAbandonedSaga},
	{"A19", "disk_create disk_view", func(c *Check) { // a saga that fails
		c.needSimulated("a saga that fails halfway cannot be brought about from outside")
		params, before := c.blank(), c.storageUsed()
		c.fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Unwind})
		c.createDisk(params).refused(internalError)
		c.checkUndone(params.Body.Name, before)
	}},
	{"A22", "disk_create disk_view disk_delete", func(c *Check) { // a new disk
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
	}},
	{"A23", "disk_create snapshot_create", func(c *Check) { // a read-only disk
		snapshot := c.snapshot(c.disk().Id).must()
		disk := c.createDisk(c.fromSnapshot(snapshot.Id, true)).must()
		equal(c, "its state in the answer", disk.State.State(), oxide.DiskStateStateDetached)
		equal(c, "whether it is read-only", disk.ReadOnly != nil && *disk.ReadOnly, true)
		equal(c, "its snapshot", disk.SnapshotId, snapshot.Id)
		c.snapshot(disk.Id).refused(invalidRequest("can't create a snapshot of a read-only disk"))
	}},
	{"A24", "disk_delete disk_view", func(c *Check) { // a deletion that fails
		c.needSimulated("a deletion that fails cannot be brought about from outside")
		before := c.storageUsed()
		disk := c.faultedDisk()
		equal(c, "the name of a disk whose deletion failed", string(disk.Name), "deleted-"+disk.Id)
		equal(c, "its state", disk.State.State(), oxide.DiskStateStateFaulted)
		equal(c, "what is provisioned", c.storageUsed(), before+GiB)
		c.deleteDisk(disk.Id).must()
		equal(c, "what is provisioned when it is deleted", c.storageUsed(), before)
	}},
	{"A25", "disk_create", func(c *Check) { // the sizes of disks
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
	}},
	{"A26", "disk_create disk_view snapshot_create", func(c *Check) { // a local disk
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
			if noDriveHas(creation.err) || c.simulated() { // a rack before v22 checks only the quota
				creation.refused(invalidValue("size", problem))
			}
		}
		c.refusesBeyondQuota(c.local(c.beyondQuota()))
	}},
	{"A27", "disk_create", func(c *Check) { // no space
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
	}},
	{"A28", "disk_create", func(c *Check) { // the order of refusals
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
	}},
	{"A29", "utilization_view disk_create snapshot_create disk_delete", func(c *Check) { // the quota
		c.steadily(func() {
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
			// A rack may free the space of deleted objects later (A68).
			if err := harness.Await(c.ctx, patience, func() error {
				if is := c.storageUsed(); is != before {
					return fmt.Errorf("%d bytes are provisioned, not %d", is, before)
				}
				return nil
			}); err != nil {
				c.errorf("what is provisioned when both are deleted: expected %d bytes; found, %s", before, err)
			}
		})
		use := c.utilization()
		if use.Capacity.Storage < use.Provisioned.Storage {
			c.errorf("the silo's quota: expected at least the %d bytes that are provisioned; found %d",
				use.Provisioned.Storage, use.Capacity.Storage)
		}
		c.refusesBeyondQuota(c.local(c.beyondQuota()))
		if c.simulated() { // a real rack's quota is known only from this answer
			const quota = 1 << 50
			c.Switch("quota_bytes", quota)
			use = c.utilization()
			equal(c, "the silo's quota", int64(use.Capacity.Storage), quota)
		}
	}},
	{"A30", "instance_disk_attach instance_disk_detach", func(c *Check) { // what is attached
		disk, instance := c.disk(), c.StoppedInstance()
		nowhere, missing := uuid.NewString(), c.name()
		for _, call := range []func(string, string) outcome[*oxide.Disk]{c.attach, c.detach} {
			call(uuid.NewString(), nowhere).refused(unknownID("instance", nowhere))
			call(nowhere, instance.Id).refused(unknownID("disk", nowhere))
			call(string(missing), instance.Id).refused(unknownName("disk", missing))
		}
		attachedTo(c.attach(string(disk.Name), instance.Id), instance.Id)
		attachedTo(c.detach(string(disk.Name), instance.Id), "")
		if !c.arrange("another project") { // the token may have no rights there
			return
		}
		state, err := c.Admin.State(c.ctx)
		c.must("read the simulated rack's state", err)
		for _, project := range state.Projects {
			if project.ID != c.Project && project.Name != c.Project {
				create := c.blank()
				create.Project = oxide.NameOrId(project.ID)
				disk := c.createDisk(create).must()
				c.attach(disk.Id, instance.Id).refused(
					invalidRequest("disk must be in the same project as the instance"))
				c.attach(string(disk.Name), instance.Id).refused(unknownName("disk", disk.Name))
				c.detach(disk.Id, instance.Id).must()
				break
			}
		}
	}},
	{"A31", "instance_disk_attach instance_disk_detach instance_disk_list disk_view", func(c *Check) {
		instance := c.StoppedInstance()
		source := c.snapshot(c.disk().Id).must()
		disk := c.createDisk(c.fromSnapshot(source.Id, false)).must()
		attached := c.attach(disk.Id, instance.Id)
		attachedTo(attached, instance.Id)
		c.same("attach a disk, and read it", c.look(disk.Id), attached.value)
		c.listed("attach a disk: the list of the instance's disks", c.disksOf(instance.Id),
			attached.value)
		detached := c.detach(disk.Id, instance.Id)
		attachedTo(detached, "")
		c.same("detach it, and read it", c.look(disk.Id), detached.value)
		equal(c, "detach it: whether it is among the instance's disks", slices.ContainsFunc(
			c.disksOf(instance.Id), func(d oxide.Disk) bool { return d.Id == disk.Id }), false)
	}},
	{"A32", "instance_disk_attach", func(c *Check) { // attach while creating
		c.needSimulated("the creation of a disk cannot be held open from outside")
		instance, create := c.StoppedInstance(), c.blank()
		creation := c.beginDisk(c.ctx, create)
		c.Switch("create_hold", adminapi.Duration(hold)) // the attach waits until the creation ends
		attached := c.attach(string(create.Body.Name), instance.Id)
		creation.end().must()
		equal(c, "the disk's state before the attach", creation.seen.State.State(),
			oxide.DiskStateStateCreating)
		attachedTo(attached.as("the disk is being created"), instance.Id)
		c.staysAttached(attached.value.Id, instance.Id)
	}},
	{"A33", "instance_disk_attach", func(c *Check) { // attach again
		disk, instance := c.disk(), c.StoppedInstance()
		for _, turn := range []string{"once", "again"} {
			attachedTo(c.attach(disk.Id, instance.Id).as(turn), instance.Id)
		}
		running, there := c.runningInstance()
		attachedTo(c.attach(there.Id, running.Id).as("again"), running.Id)
	}},
	{"A34", "instance_disk_attach", func(c *Check) { // refused attaches
		disk, stopped := c.disk(), c.StoppedInstance()
		running, there := c.runningInstance()
		c.attach(there.Id, stopped.Id).refused(attachedElsewhere("attach", there))
		c.attach(disk.Id, stopped.Id).must()
		c.attach(disk.Id, running.Id).refused(attachedElsewhere("attach", disk))
		c.staysAttached(disk.Id, stopped.Id)
		if !c.Hotplug && !c.AttachOnly {
			c.attach(c.disk().Id, running.Id).refused(notStopped("attach"))
		}
		if !c.arrange("a faulted disk") {
			return
		}
		faulted := c.faultedDisk()
		state := invalidRequest("cannot attach disk %q: invalid state faulted", faulted.Name)
		c.attach(faulted.Id, running.Id).refused(state)
		failed := c.instance(c.disk())
		c.fail(failed.Id)
		c.attach(faulted.Id, failed.Id).refused(state)
		c.attach(c.disk().Id, failed.Id).refused(attachToFailed)
	}},
	{"A35", "instance_disk_attach instance_disk_detach", func(c *Check) { // local disks
		create := c.blank()
		create.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
		disk := c.createDisk(create).must()
		running, _ := c.runningInstance()
		want := notStopped("attach")
		if c.Hotplug || c.AttachOnly {
			want = inConflict("cannot attach local storage disk: instance is starting")
		}
		c.attach(disk.Id, running.Id).refused(want)
		instance := c.instance()
		c.attach(disk.Id, instance.Id).must()
		c.startAndAwait(instance.Id)
		c.detach(disk.Id, instance.Id).refused(notStopped("detach"))
		c.staysAttached(disk.Id, instance.Id)
	}},
	{"A36", "instance_disk_detach", func(c *Check) { // detach again
		disk := c.disk()
		running, _ := c.runningInstance()
		for _, instance := range []*oxide.Instance{c.StoppedInstance(), running} {
			attachedTo(c.detach(disk.Id, instance.Id), "") // it is detached already
		}
	}},
	{"A37", "instance_disk_detach", func(c *Check) { // refused detaches
		stopped := c.StoppedInstance()
		running, there := c.runningInstance()
		c.detach(there.Id, stopped.Id).refused(attachedElsewhere("detach", there))
		c.staysAttached(there.Id, running.Id)
		if !c.Hotplug {
			c.detach(there.Id, running.Id).refused(notStopped("detach"))
		}
		boot, data := c.disk(), c.disk()
		create := c.newInstance()
		create.Body.BootDisk = with(boot)
		create.Body.Disks = []oxide.InstanceDiskAttachment{with(data)}
		instance := c.createInstance(create).must()
		c.Await(instance.Id, oxide.InstanceStateStopped)
		c.detach(boot.Id, instance.Id).refused(inConflict("boot disk cannot be detached"))
		c.staysAttached(boot.Id, instance.Id)
		if !c.arrange("a faulted disk") {
			return
		}
		faulted := c.faultedDisk()
		c.detach(faulted.Id, running.Id).refused(
			invalidRequest("cannot detach disk %q: invalid state faulted", faulted.Name))
		c.fail(instance.Id)
		c.detach(boot.Id, instance.Id).refused(
			invalidRequest("cannot detach disk from instance in failed state"))
		attachedTo(c.detach(data.Id, instance.Id), "")
	}},
	{"A67", "instance_disk_attach instance_disk_detach", func(c *Check) { // a failed reread
		c.needSimulated("no request from outside takes all connections to the rack's database")
		disk, instance := c.disk(), c.StoppedInstance()
		_, there := c.runningInstance()
		c.fault(adminapi.Fault{Operation: "instance_disk_attach", Object: there.Id,
			Phase: adminapi.Reread})
		c.attach(there.Id, instance.Id).refused(attachedElsewhere("attach", there))
		for _, operation := range []string{"attach", "attach", "detach", "detach"} {
			call, attached := c.attach, instance.Id
			if operation == "detach" {
				call, attached = c.detach, ""
			}
			c.fault(adminapi.Fault{Operation: "instance_disk_" + operation, Object: disk.Id,
				Phase: adminapi.Reread})
			call(disk.Id, instance.Id).refused(unavailable)
			c.staysAttached(disk.Id, attached)
		}
	}},
	{"A68", "disk_create disk_delete snapshot_create snapshot_delete", func(c *Check) { // deletions
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
	}},
	{"A71", "disk_delete disk_view", func(c *Check) { // delete an attached disk
		disk := c.disk()
		instance := c.instance(disk)
		for _, state := range []string{"stopped", "running"} {
			if state == "running" {
				c.startAndAwait(instance.Id)
			}
			c.deleteDisk(disk.Id).as("of a " + state + " instance").refused(undeletable("attached"))
			c.staysAttached(disk.Id, instance.Id)
		}
	}},
}

func (c *Check) fromSnapshot(id string, readOnly bool) oxide.DiskCreateParams {
	return c.diskFrom(oxide.DiskSource{
		Value: &oxide.DiskSourceSnapshot{SnapshotId: id, ReadOnly: &readOnly}})
}

func (c *Check) local(bytes int64) oxide.DiskCreateParams {
	params := sized(bytes, c.blank())
	params.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	return params
}

func sized(bytes int64, params oxide.DiskCreateParams) oxide.DiskCreateParams {
	params.Body.Size = oxide.ByteCount(bytes)
	return params
}

func undeletable(state oxide.DiskStateState) Refused {
	return invalidRequest("disk cannot be deleted in state %q", state)
}

func (c *Check) takeSnapshot(name oxide.Name, disk string) outcome[*oxide.Snapshot] {
	made := asked(c.Client.SnapshotCreate(c.ctx, c.newSnapshot(name, disk)))(c,
		"take snapshot %s of disk %s", name, disk)
	return created(made, c.snapshotsOf(disk), name)
}

func (c *Check) newSnapshot(name oxide.Name, disk string) oxide.SnapshotCreateParams {
	return oxide.SnapshotCreateParams{Project: c.project(), Body: &oxide.SnapshotCreate{
		Name: name, Description: c.Description, Disk: oxide.NameOrId(disk)}}
}

// snapshotsOf counts all the disk's snapshots as this run's: a finalize makes one without its mark.
func (c *Check) snapshotsOf(disk string) kind[*oxide.Snapshot] {
	return kind[*oxide.Snapshot]{c.readSnapshot, c.removeSnapshot,
		func(s *oxide.Snapshot) (string, bool) {
			return s.Id, s.DiskId == disk || c.isOwn(s.Description)
		}}
}

func (c *Check) removeSnapshot(ctx context.Context, id string) error {
	return gone(c.Client.SnapshotDelete(ctx,
		oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)}))
}

var (
	rackIsFull = Refused{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"}
	tooSmall   = invalidValue("size", "total size must be at least 1 GiB")
	noWholeGiB = invalidValue("size", "total size must be a multiple of 1 GiB")
	tooLarge   = invalidValue("size", "total size must be less than 1023 GiB")
	// The rack compares a size with the block size before it applies the limits in GiB.
	noWholeBlock = invalidValue("size and block_size",
		"total size must be a multiple of block size 512")
	tooManyDisks   = invalidRequest("cannot attach more than 12 disks to instance")
	attachToFailed = invalidRequest("cannot attach disk to instance in failed state")
)

const maxDisks = 12

func (c *Check) refusesBeyondQuota(params oxide.DiskCreateParams) {
	if creation := c.createDisk(params); !noDriveHas(creation.err) {
		creation.refused(quotaExceeded)
	}
}

// beyondQuota returns a size in whole GiB that exceeds what is left of the silo's quota. On a
// simulated rack it first sets the quota to what is used.
func (c *Check) beyondQuota() int64 {
	if c.simulated() {
		c.Switch("quota_bytes", c.storageUsed())
		return GiB
	}
	use := c.utilization()
	return (int64(use.Capacity.Storage)/GiB + 1) * GiB
}

// noDriveHas reports whether a rack of v22 or later has refused a local disk that no drive can
// hold. Such a rack checks the drives before the quota (A26).
func noDriveHas(err error) bool {
	refused := refusal(err)
	return errors.Is(err, oxide.ErrInvalidValue) && refused.ErrorResponse.Message != tooSmall.Message
}

func (c *Check) beginDisk(ctx context.Context,
	params oxide.DiskCreateParams) *underway[*oxide.Disk] {
	return begin(c, c.disks(), params.Body.Name, "create a disk", "create_hold",
		func() (*oxide.Disk, error) { return c.Client.DiskCreate(ctx, params) })
}

func checkAbandonedSaga(c *Check) {
	params := c.blank()
	ctx, giveUp := context.WithCancel(c.ctx)
	defer giveUp()
	creation := c.beginDisk(ctx, params)
	giveUp()
	<-creation.done
	if creation.err == nil {
		c.notTested("the rack answered before its caller could give up")
	}
	if c.simulated() {
		c.must("end the hold", c.Admin.Switch(c.ctx, map[string]any{"create_hold": "0s"}))
	}
	var found string
	err := harness.Await(c.ctx, patience, func() error {
		disk, err := c.readDisk(c.ctx, string(params.Body.Name))
		if err != nil {
			found = Brief(err)
		} else if found = string(disk.State.State()); found == "creating" {
			return errors.New("the disk is still being created")
		}
		return nil
	})
	c.must("wait for a disk whose creator gave up", err)
	equal(c, "a disk whose creator gave up", found, "detached")
}

func (c *Check) checkUndone(name oxide.Name, provisioned int64) {
	c.viewDisk(string(name)).refused(unknownName("disk", name))
	equal(c, "what is provisioned afterwards", c.storageUsed(), provisioned)
}

// newDisk returns a blank disk for the creation of an instance. Call it before createInstance,
// because the steps of cleanup run in reverse, and the instance must be removed first.
func (c *Check) newDisk() oxide.InstanceDiskAttachment {
	blank := c.blank().Body
	c.disks().removeNamed(c, blank.Name)
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: blank.Name,
		Description: blank.Description, Size: blank.Size, DiskBackend: blank.DiskBackend}}
}

// hold is how long a simulated rack delays an operation, so that a check can act meanwhile.
const hold = time.Second

func attachedElsewhere(verb string, disk *oxide.Disk) Refused {
	return invalidRequest("cannot %s disk %q: disk is attached to another instance", verb, disk.Name)
}

func notStopped(verb string) Refused {
	return invalidRequest("cannot %s disk: instance is not fully stopped", verb)
}

// faultedDisk returns a disk of a simulated rack whose deletion has failed halfway.
func (c *Check) faultedDisk() *oxide.Disk {
	disk := c.disk()
	c.fault(adminapi.Fault{Operation: "disk_delete", Object: disk.Id, Phase: adminapi.Unwind})
	if c.deleteDisk(disk.Id).err == nil {
		c.fatalf("delete disk %s, halfway: expected an error; it is deleted", disk.Name)
	}
	return c.look(disk.Id)
}
