package rules

import (
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// Simulated reports whether the rack is a simulated one, on which every situation can be created.
func (c *Check) Simulated() bool { return c.Admin != nil }

// needSimulated ends a check that cannot create its situation on a real rack.
func (c *Check) needSimulated(why string) {
	if !c.Simulated() {
		c.NotTested("%s", why)
	}
}

// situations is the unit of an extent: run counts a situation when the check has come to its end.
const situations = "situations"

// Arrange reports whether the check can create a situation, which it can on a simulated rack. If
// not, or if the check ends early, its extent says that it has not seen the situation.
func (c *Check) Arrange(situation string) bool {
	m := report.Measure{What: situation, Of: 1, Unit: situations}
	if c.Simulated() {
		m.Words = "the check ended before"
	} else {
		m.Words = "it cannot be brought about from outside"
	}
	c.extent.Look(m)
	return c.Simulated()
}

// RunningInstance returns a small instance that all checks share. It has one disk, attached
// before its start. It has no boot disk and no network, and is never stopped.
func (c *Check) RunningInstance() (*oxide.Instance, *oxide.Disk) {
	if c.runningDisk == nil {
		params := c.Blank()
		made, err := c.Client.DiskCreate(c.ctx, params)
		if mayBeDone(err) {
			c.removeIfMade(params.Body.Name)
		}
		c.runningDisk = Must[*oxide.Disk](c, "create a disk")(made, err)
	}
	if c.running == nil {
		create := c.NewInstance()
		create.Body.Start = oxide.NewPointer(true)
		create.Body.Disks = []oxide.InstanceDiskAttachment{With(c.runningDisk)}
		c.running = Must[*oxide.Instance](c, "create an instance and start it")(
			c.createShared(c.ctx, create))
		c.Await(c.running.Id, oxide.InstanceStateRunning)
	}
	return c.running, c.runningDisk
}

// With returns the request for an existing disk at the creation of an instance.
func With(disk *oxide.Disk) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{
		Value: &oxide.InstanceDiskAttachmentAttach{Name: disk.Name}}
}

// Instance creates a small stopped instance of the check with these disks.
func (c *Check) Instance(disks ...*oxide.Disk) *oxide.Instance {
	create := c.NewInstance()
	for _, disk := range disks {
		create.Body.Disks = append(create.Body.Disks, With(disk))
	}
	instance := Must[*oxide.Instance](c, "create an instance")(c.CreateInstance(create))
	c.Await(instance.Id, oxide.InstanceStateStopped)
	return instance
}

// Start sends a request to start an instance.
func (c *Check) Start(instance string) (*oxide.Instance, error) {
	return c.Client.InstanceStart(c.ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instance)})
}

// Stop sends a request to stop an instance.
func (c *Check) Stop(instance string) (*oxide.Instance, error) {
	return c.Client.InstanceStop(c.ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)})
}

// Reboot sends a request to reboot an instance.
func (c *Check) Reboot(instance string) (*oxide.Instance, error) {
	return c.Client.InstanceReboot(c.ctx,
		oxide.InstanceRebootParams{Instance: oxide.NameOrId(instance)})
}

// StartAndAwait starts an instance and waits until it runs.
func (c *Check) StartAndAwait(instance string) {
	Must[*oxide.Instance](c, "start an instance")(c.Start(instance))
	c.Await(instance, oxide.InstanceStateRunning)
}

// Fail makes an instance of a simulated rack failed: it starts the instance, whose reboot then
// fails. The instance needs a disk.
func (c *Check) Fail(instance string) {
	c.StartAndAwait(instance)
	c.Fault(adminapi.Fault{Operation: "instance_reboot", Object: instance,
		Device: &adminapi.DeviceFault{Fails: true}})
	Must[*oxide.Instance](c, "reboot an instance that will not come back")(c.Reboot(instance))
	c.Await(instance, oxide.InstanceStateFailed)
}

// See reads an instance.
func (c *Check) See(id string) *oxide.Instance {
	return Must[*oxide.Instance](c, "read instance "+id)(c.Client.InstanceView(c.ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(id)}))
}

// DisksOf lists the disks of an instance.
func (c *Check) DisksOf(instance string) []oxide.Disk {
	return Must[[]oxide.Disk](c, "list the disks of instance "+instance)(
		c.Client.InstanceDiskListAllPages(c.ctx,
			oxide.InstanceDiskListParams{Instance: oxide.NameOrId(instance)}))
}

// AttachedTo demands that a disk is attached to an instance; "" demands that it is detached.
func (c *Check) AttachedTo(what string, disk *oxide.Disk, instance string) {
	want := "detached"
	if instance != "" {
		want = "attached to instance " + instance
	}
	got := string(disk.State.State())
	if attached, is := disk.State.AsAttached(); is {
		got += " to instance " + attached.Instance
	}
	Equal(c, what+": the disk", got, want)
}

// MustAttach attaches a disk to an instance, and demands that the answer says so.
func (c *Check) MustAttach(what, disk, instance string) {
	c.AttachedTo(what, Must[*oxide.Disk](c, what)(c.Attach(disk, instance)), instance)
}

// MustDetach detaches a disk from an instance, and demands that the answer says so.
func (c *Check) MustDetach(what, disk, instance string) {
	c.AttachedTo(what, Must[*oxide.Disk](c, what)(c.Detach(disk, instance)), "")
}
