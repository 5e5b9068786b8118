package rules

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var ofDisks = []tested{
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
			if noDriveHas(creation.err) || c.simulated() { // a rack before v22 looks at the quota alone
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
		if c.simulated() { // only the answer shows the quota of a real rack
			const quota = 1 << 50
			c.Switch("quota_bytes", quota)
			use = c.utilization()
			equal(c, "the silo's quota", int64(use.Capacity.Storage), quota)
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
	return created(asked(c.sendSnapshot(name, disk))(c, "take snapshot %s of disk %s", name, disk),
		c.snapshotsOf(disk), name)
}

func (c *Check) sendSnapshot(name oxide.Name, disk string) (*oxide.Snapshot, error) {
	return c.Client.SnapshotCreate(c.ctx, oxide.SnapshotCreateParams{Project: c.project(),
		Body: &oxide.SnapshotCreate{Name: name, Description: c.Description, Disk: oxide.NameOrId(disk)}})
}

// snapshotsOf takes every snapshot of the disk for this run's, because that of a finalized disk has
// no mark.
func (r *TestedRack) snapshotsOf(disk string) kind[*oxide.Snapshot] {
	return kind[*oxide.Snapshot]{r.readSnapshot, func(ctx context.Context, id string) error {
		return gone(r.Client.SnapshotDelete(ctx,
			oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)}))
	}, func(s *oxide.Snapshot) (string, bool) {
		return s.Id, s.DiskId == disk || r.isOwn(s.Description)
	}}
}

var (
	rackIsFull = Refused{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"}
	tooSmall   = invalidValue("size", "total size must be at least 1 GiB")
	noWholeGiB = invalidValue("size", "total size must be a multiple of 1 GiB")
	tooLarge   = invalidValue("size", "total size must be less than 1023 GiB")
	// The rack looks for whole blocks before it compares the size with the limits in GiB.
	noWholeBlock = invalidValue("size and block_size",
		"total size must be a multiple of block size 512")
)

func (c *Check) refusesBeyondQuota(params oxide.DiskCreateParams) {
	if creation := c.createDisk(params); !noDriveHas(creation.err) {
		creation.refused(quotaExceeded)
	}
}

// beyondQuota returns a size in whole GiB that exceeds what is left of the silo's quota. It first
// sets a simulated rack's quota to what is used.
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

func (c *Check) fault(f adminapi.Fault) {
	f.Times = 1
	id, err := c.Admin.AddFault(c.ctx, f)
	c.must("let the simulated rack fail", err)
	c.cleanup(func(ctx context.Context) error {
		faults, err := c.Admin.Faults(ctx)
		for _, f := range faults {
			if f.ID == id { // a restart may have removed it
				err = c.Admin.RemoveFault(ctx, id)
			}
		}
		return err
	})
}

// Switch changes a switch of a simulated rack, by its JSON name, until the check ends.
func (c *Check) Switch(name string, value any) {
	now, err := c.Admin.Switches(c.ctx)
	c.must("read the simulated rack's switches", err)
	before := fieldsOf[map[string]any](c, now)
	c.cleanup(func(ctx context.Context) error {
		return c.Admin.Switch(ctx, map[string]any{name: before[name]})
	})
	c.must("change the simulated rack's "+name, c.Admin.Switch(c.ctx, map[string]any{name: value}))
}

type underway[T any] struct {
	c          *Check
	what, hold string
	done       chan struct{}
	answer     T
	err        error
	problems   int // that the check had found before
	seen       T   // the object as a read shows it while the request is unanswered
	// carriedOut, if it is not nil, reports whether the rack has carried out the request, answered
	// or not.
	carriedOut func() bool
}

// begin sends a request that creates an object, and waits until a read shows the object. A
// simulated rack completes the request only when the check calls end. The end of the check removes
// the object of the name, whether its creation was confirmed or not.
func begin[T any](c *Check, k kind[T], name oxide.Name, what, hold string,
	send func() (T, error)) *underway[T] {
	u := &underway[T]{c: c, what: what, hold: hold, problems: len(c.problems)}
	k.removeNamed(c, name)
	c.cleanup(func(context.Context) error {
		if u.done != nil {
			<-u.done
		}
		return nil
	})
	if c.simulated() {
		c.Switch(hold, "1h")
	}
	u.done = make(chan struct{})
	go func() {
		defer close(u.done)
		u.answer, u.err = send()
	}()
	others := false
	err := harness.Await(c.ctx, patience, func() (err error) {
		if u.over() {
			return nil
		}
		u.seen, err = k.read(c.ctx, string(name))
		others = err == nil
		return err
	})
	switch {
	case u.over() && u.err != nil:
		c.must(what, u.err)
	case u.over() && !c.simulated():
		c.notTested("the rack ended it before anybody could look: %s", what)
	case err == nil && !others:
		c.fatalf("%s: expected that others see it being made; found it made before", what)
	}
	c.must(what+": expected that others see it being made", err)
	return u
}

func (u *underway[T]) over() bool {
	select {
	case <-u.done:
		return true
	default:
		return false
	}
}

// end makes a simulated rack complete the request, and returns its outcome. If a real rack may have
// completed the request before, the problems that the check found since begin prove nothing: end
// drops them and ends the check as not tested.
func (u *underway[T]) end() outcome[T] {
	c := u.c
	if c.simulated() {
		c.must("end the hold of the simulated rack", c.Admin.Switch(c.ctx, map[string]any{u.hold: "0s"}))
	} else if len(c.problems) > u.problems && (u.over() || u.carriedOut != nil && u.carriedOut()) {
		c.problems = c.problems[:u.problems]
		c.notTested("the rack ended it before everything could be looked at: %s", u.what)
	}
	select {
	case <-u.done:
	case <-c.ctx.Done():
		c.must(u.what, c.ctx.Err())
	}
	return asked(u.answer, u.err)(c, u.what)
}

// beginDisk sends a request that creates a disk. The end of ctx cancels the request.
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
