package rules

import (
	"context"
	"errors"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// diskByName reads a disk of the project.
func (c *Check) diskByName(ctx context.Context, name oxide.Name) (*oxide.Disk, error) {
	return c.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(name),
		Project: c.project()})
}

// beginDisk starts to create a disk for a caller who gives up when ctx ends.
func (c *Check) beginDisk(ctx context.Context,
	params oxide.DiskCreateParams) *underway[*oxide.Disk] {
	return begin(c, "create a disk", "create_hold", func() (*oxide.Disk, error) {
		return c.Client.DiskCreate(ctx, params)
	}, func() error {
		_, err := c.diskByName(c.ctx, params.Body.Name)
		return err
	}, func(ctx context.Context) error { return c.removeByName(ctx, params.Body.Name) })
}

func checkAbandonedSaga(c *Check) {
	params := c.Blank()
	ctx, giveUp := context.WithCancel(c.ctx)
	defer giveUp()
	creation := c.beginDisk(ctx, params)
	giveUp()
	<-creation.done
	if creation.err == nil {
		c.NotTested("the rack answered before its caller could give up")
	}
	if c.Simulated() {
		c.must("end the hold", c.Admin.Switch(c.ctx, map[string]any{"create_hold": "0s"}))
	}
	found := "nothing"
	err := harness.Await(c.ctx, patience, func() error {
		disk, err := c.diskByName(c.ctx, params.Body.Name)
		if err != nil {
			found = Brief(err)
			return nil
		}
		found = string(disk.State.State())
		if found == "creating" {
			return errors.New("the disk is still being created")
		}
		return nil
	})
	c.must("wait for a disk whose creator gave up", err)
	Equal(c, "a disk whose creator gave up", found, "detached")
}

func checkFailedSaga(c *Check) {
	c.needSimulated("a saga that fails halfway cannot be brought about from outside")
	params, before := c.Blank(), c.storageUsed(c.ctx)
	c.Fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Unwind})
	c.MustRefuse("create a disk while the rack fails", internalError)(c.CreateDisk(params))
	c.checkUndone(params.Body.Name, before)
	if c.Restart == nil || len(c.problems) > 0 {
		return
	}
	instance := Must[*oxide.Instance](c, "create an instance")(c.CreateInstance(c.NewInstance()))
	c.Await(instance.Id, oxide.InstanceStateStopped)
	c.Switch("instance_delay", "1h")
	Must[*oxide.Instance](c, "start an instance")(c.Start(instance.Id))
	cutOff := c.Blank()
	ctx, giveUp := context.WithCancel(c.ctx)
	defer giveUp()
	creation := c.beginDisk(ctx, cutOff)
	giveUp() // so that the check has no request without an answer
	<-creation.done
	c.must("restart the rack", c.Restart(c.ctx))
	c.closeIdle() // they lead to the rack that has died
	disk := Must[*oxide.Disk](c, "read the disk whose creation was open when the rack died")(
		c.diskByName(c.ctx, cutOff.Body.Name))
	Equal(c, "the disk whose creation was open when the rack died", disk.State.State(),
		oxide.DiskStateStateDetached)
	Equal(c, "what is provisioned with it", c.storageUsed(c.ctx), before+GiB)
	c.Await(instance.Id, oxide.InstanceStateRunning)
}

// checkUndone demands that nothing of the creation of a disk is left.
func (c *Check) checkUndone(name oxide.Name, provisioned int64) {
	c.MustRefuse("read a disk whose creation was undone", notFound("disk", "name", string(name)))(
		c.diskByName(c.ctx, name))
	Equal(c, "what is provisioned afterwards", c.storageUsed(c.ctx), provisioned)
}
