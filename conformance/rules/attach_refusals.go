package rules

import (
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// hold is the time for which a simulated rack delays an operation, so that a check can do
// something in the middle of it.
const hold = time.Second

// attachedElsewhere is the refusal to attach or detach a disk that is attached to another
// instance.
func attachedElsewhere(verb string, disk *oxide.Disk) Refused {
	return invalidRequest("cannot %s disk %q: disk is attached to another instance", verb, disk.Name)
}

// notStopped is the refusal to attach or detach a disk while the instance has a VMM.
func notStopped(verb string) Refused {
	return invalidRequest("cannot %s disk: instance is not fully stopped", verb)
}

// FaultedDisk returns a faulted disk of a simulated rack. Its deletion has failed halfway.
func (c *Check) FaultedDisk() *oxide.Disk {
	disk := c.Disk()
	c.Fault(adminapi.Fault{Operation: "disk_delete", Object: disk.Id, Phase: adminapi.Unwind})
	if c.DeleteDisk(disk.Id) == nil {
		c.Fatalf("delete disk %s, halfway: expected an error; it is deleted", disk.Name)
	}
	return c.Look(disk.Id)
}

func checkAttachRefusals(c *Check) {
	disk, stopped := c.Disk(), c.StoppedInstance()
	running, there := c.RunningInstance()
	c.MustRefuse("attach a disk that a running instance has", attachedElsewhere("attach", there))(
		c.Attach(there.Id, stopped.Id))
	Must[*oxide.Disk](c, "attach a disk")(c.Attach(disk.Id, stopped.Id))
	c.MustRefuse("attach it to a running instance as well", attachedElsewhere("attach", disk))(
		c.Attach(disk.Id, running.Id))
	c.AttachedTo("after that", c.Look(disk.Id), stopped.Id)
	if !c.Hotplug && !c.AttachOnly {
		c.MustRefuse("attach a detached disk to a running instance", notStopped("attach"))(
			c.Attach(c.Disk().Id, running.Id))
	}
	if !c.Arrange("a faulted disk") {
		return
	}
	faulted := c.FaultedDisk()
	state := invalidRequest("cannot attach disk %q: invalid state faulted", faulted.Name)
	c.MustRefuse("attach a faulted disk to a running instance", state)(
		c.Attach(faulted.Id, running.Id))
	failed := c.Instance(c.Disk())
	c.Fail(failed.Id)
	c.MustRefuse("attach a faulted disk to a failed instance", state)(c.Attach(faulted.Id, failed.Id))
	c.MustRefuse("attach a disk to a failed instance",
		invalidRequest("cannot attach disk to instance in failed state"))(
		c.Attach(c.Disk().Id, failed.Id))
}

func checkLocalDisks(c *Check) {
	create := c.Blank()
	create.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	disk := Must[*oxide.Disk](c, "create a local disk")(c.CreateDisk(create))
	running, _ := c.RunningInstance()
	_, err := c.Attach(disk.Id, running.Id)
	want := notStopped("attach")
	if c.Hotplug || c.AttachOnly {
		want = inConflict("cannot attach local storage disk: instance is starting")
	}
	c.Refuses("attach a local disk to a running instance", err, want)

	instance := c.Instance()
	Must[*oxide.Disk](c, "attach it to a stopped instance")(c.Attach(disk.Id, instance.Id))
	c.StartAndAwait(instance.Id)
	c.MustRefuse("detach a local disk from a running instance", notStopped("detach"))(
		c.Detach(disk.Id, instance.Id))
	c.AttachedTo("after that", c.Look(disk.Id), instance.Id)
}

func checkDetachRefusals(c *Check) {
	stopped := c.StoppedInstance()
	running, there := c.RunningInstance()
	_, err := c.Detach(there.Id, stopped.Id)
	c.Refuses("detach a disk from an instance that does not have it", err,
		attachedElsewhere("detach", there))
	c.AttachedTo("after that", c.Look(there.Id), running.Id)
	if !c.Hotplug {
		c.MustRefuse("detach a disk from a running instance", notStopped("detach"))(
			c.Detach(there.Id, running.Id))
	}
	boot, data := c.Disk(), c.Disk()
	create := c.NewInstance()
	create.Body.BootDisk = With(boot)
	create.Body.Disks = []oxide.InstanceDiskAttachment{With(data)}
	instance := Must[*oxide.Instance](c, "create an instance with a boot disk")(
		c.CreateInstance(create))
	c.Await(instance.Id, oxide.InstanceStateStopped)
	c.MustRefuse("detach the boot disk of a stopped instance",
		inConflict("boot disk cannot be detached"))(c.Detach(boot.Id, instance.Id))
	c.AttachedTo("after that", c.Look(boot.Id), instance.Id)
	if !c.Arrange("a faulted disk") {
		return
	}
	faulted := c.FaultedDisk()
	c.MustRefuse("detach a faulted disk",
		invalidRequest("cannot detach disk %q: invalid state faulted", faulted.Name))(
		c.Detach(faulted.Id, running.Id))
	c.Fail(instance.Id)
	c.MustRefuse("detach the boot disk of a failed instance",
		invalidRequest("cannot detach disk from instance in failed state"))(
		c.Detach(boot.Id, instance.Id))
	c.MustDetach("detach another disk of a failed instance", data.Id, instance.Id)
}

func checkUnreadAttachments(c *Check) {
	c.needSimulated("no request from outside takes all connections to the rack's database")
	disk, instance := c.Disk(), c.StoppedInstance()
	_, there := c.RunningInstance()
	c.Fault(adminapi.Fault{Operation: "instance_disk_attach", Object: there.Id,
		Phase: adminapi.Reread})
	_, err := c.Attach(there.Id, instance.Id)
	c.Refuses("attach another's disk without a connection to the database", err,
		attachedElsewhere("attach", there))
	for _, step := range []struct {
		operation, instance string
		call                func(string, string) (*oxide.Disk, error)
	}{
		{"instance_disk_attach", instance.Id, c.Attach}, {"instance_disk_detach", "", c.Detach},
	} {
		for _, what := range []string{step.operation, step.operation + " again"} {
			c.Fault(adminapi.Fault{Operation: step.operation, Object: disk.Id, Phase: adminapi.Reread})
			c.MustRefuse(what+" without a connection to the database", unavailable)(
				step.call(disk.Id, instance.Id))
			c.AttachedTo("after that", c.Look(disk.Id), step.instance)
		}
	}
}
