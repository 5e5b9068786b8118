package rules

import (
	"context"
	"slices"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// maxDisks is the number of disks that an instance may have.
const maxDisks = 12

var tooManyDisks = invalidRequest("cannot attach more than 12 disks to instance")

// NewDisk returns the request for a blank disk that is created together with an instance, and
// removes the disk at the end. Call it before the instance is created, so that the instance is
// removed first.
func (c *Check) NewDisk() oxide.InstanceDiskAttachment {
	blank := c.Blank().Body
	c.Cleanup(func(ctx context.Context) error { return c.removeByName(ctx, blank.Name) })
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: blank.Name,
		Description: blank.Description, Size: blank.Size, DiskBackend: blank.DiskBackend}}
}

func checkNumberOfDisks(c *Check) {
	full := c.NewInstance()
	full.Body.BootDisk = c.NewDisk()
	for range maxDisks - 1 {
		full.Body.Disks = append(full.Body.Disks, c.NewDisk())
	}
	crowded := c.NewInstance()
	crowded.Body.BootDisk = full.Body.BootDisk
	crowded.Body.Disks = append(slices.Clone(full.Body.Disks), full.Body.Disks[0])
	c.MustRefuse("create an instance with a boot disk and 12 others", tooManyDisks)(
		c.CreateInstance(crowded))

	instance := Must[*oxide.Instance](c, "create an instance with a boot disk and 11 others")(
		c.CreateInstance(full))
	c.Await(instance.Id, oxide.InstanceStateStopped)
	disk, elsewhere := c.Disk(), c.StoppedInstance()
	c.MustRefuse("attach a 13th disk", tooManyDisks)(c.Attach(disk.Id, instance.Id))
	Must[*oxide.Disk](c, "attach it to another instance")(c.Attach(disk.Id, elsewhere.Id))
	c.MustRefuse("attach a 13th disk that is attached to another instance",
		attachedElsewhere("attach", disk))(c.Attach(disk.Id, instance.Id))
	Must[*oxide.Disk](c, "detach it there")(c.Detach(disk.Id, elsewhere.Id))
	if c.Arrange("a failed instance") {
		c.Fail(instance.Id)
		c.MustRefuse("attach a 13th disk while the instance is failed",
			invalidRequest("cannot attach disk to instance in failed state"))(c.Attach(disk.Id, instance.Id))
		Must[*oxide.Instance](c, "stop the failed instance")(c.Stop(instance.Id))
		c.Await(instance.Id, oxide.InstanceStateStopped)
	}
	for _, other := range c.DisksOf(instance.Id) {
		if other.Id != instance.BootDiskId {
			Must[*oxide.Disk](c, "detach one of the 12")(c.Detach(other.Id, instance.Id))
			break
		}
	}
	Must[*oxide.Disk](c, "attach a disk in its place")(c.Attach(disk.Id, instance.Id))
}

func checkHotplug(c *Check) {
	disk, stopped := c.Disk(), c.StoppedInstance()
	running, there := c.RunningInstance()
	c.MustAttach("attach while the instance is stopped", disk.Id, stopped.Id)
	c.MustDetach("detach while it is stopped", disk.Id, stopped.Id)
	switch {
	case c.Hotplug:
		id := running.Id
		if c.Here != nil { // whose operating system must cooperate
			id = c.Here.ID
		}
		c.MustAttach("attach while the instance runs", disk.Id, id)
		c.MustDetach("detach while it runs", disk.Id, id)
		return
	case c.AttachOnly:
		own := c.Instance(c.Disk()) // its end detaches the disk
		c.StartAndAwait(own.Id)
		c.MustAttach("attach while the instance runs", disk.Id, own.Id)
	default:
		c.MustRefuse("attach while the instance runs", notStopped("attach"))(
			c.Attach(disk.Id, running.Id))
		c.AttachedTo("after that", c.Look(disk.Id), "")
	}
	c.MustRefuse("detach while it runs", notStopped("detach"))(c.Detach(there.Id, running.Id))
	c.AttachedTo("after that", c.Look(there.Id), running.Id)
}

func checkWhatIsAttached(c *Check) {
	disk, instance := c.Disk(), c.StoppedInstance()
	nowhere, missing := uuid.NewString(), c.Name()
	for verb, call := range map[string]func(string, string) (*oxide.Disk, error){
		"attach": c.Attach, "detach": c.Detach} {
		c.MustRefuse(verb+" a disk that is not there, with an instance that is not there",
			unknownID("instance", nowhere))(call(uuid.NewString(), nowhere))
		c.MustRefuse(verb+" a disk that is not there", unknownID("disk", nowhere))(
			call(nowhere, instance.Id))
		c.MustRefuse(verb+" a name that no disk has", unknownName("disk", missing))(
			call(string(missing), instance.Id))
	}
	c.MustAttach("attach a disk by name", string(disk.Name), instance.Id)
	c.MustDetach("detach it by name", string(disk.Name), instance.Id)
	if other := c.otherProject(); other != "" {
		c.checkOtherProject(other, instance.Id)
	}
}

// otherProject returns the ID of another project of a simulated rack, or "". On a real rack the
// token may have no rights in another project.
func (c *Check) otherProject() string {
	if !c.Arrange("another project") {
		return ""
	}
	state, err := c.Admin.State(c.ctx)
	c.must("read the simulated rack's state", err)
	for _, project := range state.Projects {
		if project.ID != c.Project && project.Name != c.Project {
			return project.ID
		}
	}
	return ""
}

func (c *Check) checkOtherProject(project, instance string) {
	create := c.Blank()
	create.Project = oxide.NameOrId(project)
	disk := Must[*oxide.Disk](c, "create a disk in another project")(c.CreateDisk(create))
	c.MustRefuse("attach a disk of another project",
		invalidRequest("disk must be in the same project as the instance"))(c.Attach(disk.Id, instance))
	c.MustRefuse("attach it by name", unknownName("disk", disk.Name))(
		c.Attach(string(disk.Name), instance))
	Must[*oxide.Disk](c, "detach a disk of another project")(c.Detach(disk.Id, instance))
}

func checkAttachAtOnce(c *Check) {
	instance := c.StoppedInstance()
	source := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(c.Disk().Id))
	disk := Must[*oxide.Disk](c, "create a disk from it")(c.CreateDisk(
		c.fromSnapshot(source.Id, false)))
	for _, step := range []struct {
		name, instance string
		call           func(string, string) (*oxide.Disk, error)
	}{{"attach a disk", instance.Id, c.Attach}, {"detach it", "", c.Detach}} {
		answer := Must[*oxide.Disk](c, step.name)(step.call(disk.Id, instance.Id))
		c.AttachedTo(step.name, answer, step.instance)
		c.Same(step.name+", and read it", c.Look(disk.Id), answer)
		listed := c.DisksOf(instance.Id)
		if step.instance != "" {
			c.Listed(step.name+": the list of the instance's disks", listed, answer)
		} else {
			Equal(c, step.name+": whether it is among the instance's disks", slices.ContainsFunc(listed,
				func(d oxide.Disk) bool { return d.Id == disk.Id }), false)
		}
	}
}

func checkAttachWhileCreating(c *Check) {
	c.needSimulated("the creation of a disk cannot be held open from outside")
	instance, create := c.StoppedInstance(), c.Blank()
	c.Switch("create_hold", adminapi.Duration(hold))
	made := make(chan error, 1)
	go func() {
		_, err := c.CreateDisk(create)
		made <- err
	}()
	name := oxide.NameOrId(create.Body.Name)
	var state oxide.DiskStateState
	err := harness.Await(c.ctx, requestTimeout, func() error {
		seen, err := c.Client.DiskView(c.ctx,
			oxide.DiskViewParams{Disk: name, Project: c.project()})
		if err == nil {
			state = seen.State.State()
		}
		return err
	})
	var attached *oxide.Disk
	if err == nil {
		attached, err = c.Attach(string(name), instance.Id)
	}
	// The instance's clean-up removes the disk.
	c.must("create a disk", <-made)
	c.must("attach it while it is being created", err)
	Equal(c, "the disk's state before the attach", state, oxide.DiskStateStateCreating)
	c.AttachedTo("attach a disk while it is being created", attached, instance.Id)
	c.AttachedTo("after its creation", c.Look(attached.Id), instance.Id)
}

func checkRepeatedAttach(c *Check) {
	disk, instance := c.Disk(), c.StoppedInstance()
	for _, step := range []string{"attach a disk", "attach it again"} {
		c.MustAttach(step, disk.Id, instance.Id)
	}
	running, there := c.RunningInstance()
	const again = "attach what a running instance has"
	c.MustAttach(again, there.Id, running.Id)
}

func checkRepeatedDetach(c *Check) {
	disk := c.Disk()
	running, _ := c.RunningInstance()
	for _, instance := range []*oxide.Instance{c.StoppedInstance(), running} {
		const again = "detach a detached disk"
		c.MustDetach(again, disk.Id, instance.Id)
	}
}
