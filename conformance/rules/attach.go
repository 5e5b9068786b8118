package rules

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var ofAttach = []tested{
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
			if c.Here != nil { // hot-plug needs an operating system, which running lacks
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
	{"A67", "instance_disk_attach instance_disk_detach", func(c *Check) { // unread attachments
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
}

const maxDisks = 12

var (
	tooManyDisks   = invalidRequest("cannot attach more than 12 disks to instance")
	attachToFailed = invalidRequest("cannot attach disk to instance in failed state")
)

// newDisk returns the request for a blank disk that is created together with an instance, and
// removes the disk at the end of the check. Call it before the instance is created, so that the
// instance is removed first.
func (c *Check) newDisk() oxide.InstanceDiskAttachment {
	blank := c.blank().Body
	c.disks().removeNamed(c, blank.Name)
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: blank.Name,
		Description: blank.Description, Size: blank.Size, DiskBackend: blank.DiskBackend}}
}

// hold is how long a simulated rack delays an operation, so that a check can act in the middle of
// it.
const hold = time.Second

func attachedElsewhere(verb string, disk *oxide.Disk) Refused {
	return invalidRequest("cannot %s disk %q: disk is attached to another instance", verb, disk.Name)
}

func notStopped(verb string) Refused {
	return invalidRequest("cannot %s disk: instance is not fully stopped", verb)
}

// faultedDisk returns a faulted disk of a simulated rack: it lets the disk's deletion fail halfway.
func (c *Check) faultedDisk() *oxide.Disk {
	disk := c.disk()
	c.fault(adminapi.Fault{Operation: "disk_delete", Object: disk.Id, Phase: adminapi.Unwind})
	if c.deleteDisk(disk.Id).err == nil {
		c.fatalf("delete disk %s, halfway: expected an error; it is deleted", disk.Name)
	}
	return c.look(disk.Id)
}

// Trial describes what a rack did with the disks of a running instance that the trial created. The
// trial attaches a disk only if the rack refuses to detach one.
type Trial struct {
	Attaches, Detaches bool
	// Says are findings that an operator can send to Oxide, one sentence each.
	Says []string
}

// TryHotplug detaches and attaches disks of a running instance that it creates, because a run
// cannot stop its own instance to get a disk back.
func (r *TestedRack) TryHotplug(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "hot-plug", Check: func(c *Check) {
		t = Trial{}
		first, second := c.disk(), c.disk()
		instance := c.instance(first)
		c.startAndAwait(instance.Id)
		err := c.detach(first.Id, instance.Id).err
		if t.Detaches = err == nil; t.Detaches {
			return
		}
		if !SaysNotStopped(err) {
			c.fatalf("detach a disk of a running instance: expected that the rack does it, or refuses "+
				"because the instance is not stopped; found %s", Brief(err))
		}
		refused := Brief(err)
		err = c.attach(second.Id, instance.Id).err
		if IsUnanswered(err) {
			c.must("attach a disk to a running instance", err)
		}
		if err == nil {
			t.Attaches = true
			t.Says = append(t.Says, "a running instance gains a disk, and keeps it until it is stopped: "+
				refused)
			t.refusal(c, first)
		} else if says := Recorded(err, c.look(second.Id), instance.Id); says != "" {
			t.Says = append(t.Says, says)
		}
	}})
	return t, result
}

// TryRefusal tries to attach a disk that another instance has, and reports how the rack refuses.
func (r *TestedRack) TryRefusal(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "refusal", Check: func(c *Check) {
		t = Trial{}
		disk := c.disk()
		c.instance(disk)
		t.refusal(c, disk)
	}})
	return t, result
}

func (t *Trial) refusal(c *Check, attached *oxide.Disk) {
	err := c.attach(attached.Id, c.StoppedInstance().Id).err
	if statusOf(err) == http.StatusInternalServerError {
		t.Says = append(t.Says, "a refused attach is a 500 without a reason: the disk "+
			string(attached.Name)+" has another instance, and the answer is "+Brief(err))
	}
}

// SaysNotStopped recognizes the refusal of a rack without hot-plug (A17, A34).
func SaysNotStopped(err error) bool {
	return errors.Is(err, oxide.ErrInvalidRequest) && errors.Is(err, oxide.ErrHTTP400) &&
		strings.Contains(Brief(err), "instance is not fully stopped")
}

// Recorded describes an attach that the rack answered with an error although it now shows the disk
// as attached. It returns "" for every other attach.
func Recorded(err error, disk *oxide.Disk, instance string) string {
	attached, is := disk.State.AsAttached()
	if err == nil || IsUnanswered(err) || !is || attached.Instance != instance {
		return ""
	}
	return fmt.Sprintf("an attach that failed stays recorded: the disk %s is attached to the "+
		"instance %s, and the answer was %s", disk.Name, instance, Brief(err))
}
