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

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const maxDisks = 12

var tooManyDisks = invalidRequest("cannot attach more than 12 disks to instance")

// newDisk returns the request for a blank disk that is created together with an instance, and
// removes the disk at the end. Call it before the instance is created, so that the instance is
// removed first.
func (c *Check) newDisk() oxide.InstanceDiskAttachment {
	blank := c.blank().Body
	c.cleanup(func(ctx context.Context) error { return c.removeByName(ctx, blank.Name) })
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: blank.Name,
		Description: blank.Description, Size: blank.Size, DiskBackend: blank.DiskBackend}}
}

func checkNumberOfDisks(c *Check) {
	full := c.newInstance()
	full.Body.BootDisk = c.newDisk()
	for range maxDisks - 1 {
		full.Body.Disks = append(full.Body.Disks, c.newDisk())
	}
	crowded := c.newInstance()
	crowded.Body.BootDisk = full.Body.BootDisk
	crowded.Body.Disks = append(slices.Clone(full.Body.Disks), full.Body.Disks[0])
	c.mustRefuse("create an instance with a boot disk and 12 others", tooManyDisks)(
		c.createInstance(crowded))

	instance := must(c.createInstance(full))(c, "create an instance with a boot disk and 11 others")
	c.Await(instance.Id, oxide.InstanceStateStopped)
	disk, elsewhere := c.disk(), c.StoppedInstance()
	c.mustRefuse("attach a 13th disk", tooManyDisks)(c.attach(disk.Id, instance.Id))
	must(c.attach(disk.Id, elsewhere.Id))(c, "attach it to another instance")
	c.mustRefuse("attach a 13th disk that is attached to another instance",
		attachedElsewhere("attach", disk))(c.attach(disk.Id, instance.Id))
	must(c.detach(disk.Id, elsewhere.Id))(c, "detach it there")
	if c.arrange("a failed instance") {
		c.fail(instance.Id)
		c.mustRefuse("attach a 13th disk while the instance is failed",
			invalidRequest("cannot attach disk to instance in failed state"))(c.attach(disk.Id, instance.Id))
		must(c.stop(instance.Id))(c, "stop the failed instance")
		c.Await(instance.Id, oxide.InstanceStateStopped)
	}
	for _, other := range c.disksOf(instance.Id) {
		if other.Id != instance.BootDiskId {
			must(c.detach(other.Id, instance.Id))(c, "detach one of the 12")
			break
		}
	}
	must(c.attach(disk.Id, instance.Id))(c, "attach a disk in its place")
}

func checkHotplug(c *Check) {
	disk, stopped := c.disk(), c.StoppedInstance()
	running, there := c.runningInstance()
	c.mustAttach("attach while the instance is stopped", disk.Id, stopped.Id)
	c.mustDetach("detach while it is stopped", disk.Id, stopped.Id)
	switch {
	case c.Hotplug:
		id := running.Id
		if c.Here != nil { // whose operating system must cooperate
			id = c.Here.ID
		}
		c.mustAttach("attach while the instance runs", disk.Id, id)
		c.mustDetach("detach while it runs", disk.Id, id)
		return
	case c.AttachOnly:
		own := c.instance(c.disk()) // its end detaches the disk
		c.startAndAwait(own.Id)
		c.mustAttach("attach while the instance runs", disk.Id, own.Id)
	default:
		c.mustRefuse("attach while the instance runs", notStopped("attach"))(
			c.attach(disk.Id, running.Id))
		c.attachedTo("after that", c.look(disk.Id), "")
	}
	c.mustRefuse("detach while it runs", notStopped("detach"))(c.detach(there.Id, running.Id))
	c.attachedTo("after that", c.look(there.Id), running.Id)
}

func checkWhatIsAttached(c *Check) {
	disk, instance := c.disk(), c.StoppedInstance()
	nowhere, missing := uuid.NewString(), c.name()
	for verb, call := range map[string]func(string, string) (*oxide.Disk, error){
		"attach": c.attach, "detach": c.detach} {
		c.mustRefuse(verb+" a disk that is not there, with an instance that is not there",
			unknownID("instance", nowhere))(call(uuid.NewString(), nowhere))
		c.mustRefuse(verb+" a disk that is not there", unknownID("disk", nowhere))(
			call(nowhere, instance.Id))
		c.mustRefuse(verb+" a name that no disk has", unknownName("disk", missing))(
			call(string(missing), instance.Id))
	}
	c.mustAttach("attach a disk by name", string(disk.Name), instance.Id)
	c.mustDetach("detach it by name", string(disk.Name), instance.Id)
	if other := c.otherProject(); other != "" {
		c.checkOtherProject(other, instance.Id)
	}
}

// otherProject returns the ID of another project of a simulated rack, or "". On a real rack the
// token may have no rights in another project.
func (c *Check) otherProject() string {
	if !c.arrange("another project") {
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
	create := c.blank()
	create.Project = oxide.NameOrId(project)
	disk := must(c.createDisk(create))(c, "create a disk in another project")
	c.mustRefuse("attach a disk of another project",
		invalidRequest("disk must be in the same project as the instance"))(c.attach(disk.Id, instance))
	c.mustRefuse("attach it by name", unknownName("disk", disk.Name))(
		c.attach(string(disk.Name), instance))
	must(c.detach(disk.Id, instance))(c, "detach a disk of another project")
}

func checkAttachAtOnce(c *Check) {
	instance := c.StoppedInstance()
	source := must(c.snapshot(c.disk().Id))(c, "take a snapshot")
	disk := must(c.createDisk(c.fromSnapshot(source.Id, false)))(c, "create a disk from it")
	for _, step := range []struct {
		name, instance string
		call           func(string, string) (*oxide.Disk, error)
	}{{"attach a disk", instance.Id, c.attach}, {"detach it", "", c.detach}} {
		answer := must(step.call(disk.Id, instance.Id))(c, step.name)
		c.attachedTo(step.name, answer, step.instance)
		c.same(step.name+", and read it", c.look(disk.Id), answer)
		listed := c.disksOf(instance.Id)
		if step.instance != "" {
			c.listed(step.name+": the list of the instance's disks", listed, answer)
		} else {
			equal(c, step.name+": whether it is among the instance's disks", slices.ContainsFunc(listed,
				func(d oxide.Disk) bool { return d.Id == disk.Id }), false)
		}
	}
}

func checkAttachWhileCreating(c *Check) {
	c.needSimulated("the creation of a disk cannot be held open from outside")
	instance, create := c.StoppedInstance(), c.blank()
	c.Switch("create_hold", adminapi.Duration(hold))
	made := make(chan error, 1)
	go func() {
		_, err := c.createDisk(create)
		made <- err
	}()
	name := string(create.Body.Name)
	var state oxide.DiskStateState
	err := harness.Await(c.ctx, requestTimeout, func() error {
		seen, err := c.viewDisk(c.ctx, name)
		if err == nil {
			state = seen.State.State()
		}
		return err
	})
	var attached *oxide.Disk
	if err == nil {
		attached, err = c.attach(name, instance.Id)
	}
	// The instance's clean-up removes the disk.
	c.must("create a disk", <-made)
	c.must("attach it while it is being created", err)
	equal(c, "the disk's state before the attach", state, oxide.DiskStateStateCreating)
	c.attachedTo("attach a disk while it is being created", attached, instance.Id)
	c.attachedTo("after its creation", c.look(attached.Id), instance.Id)
}

func checkRepeatedAttach(c *Check) {
	disk, instance := c.disk(), c.StoppedInstance()
	for _, step := range []string{"attach a disk", "attach it again"} {
		c.mustAttach(step, disk.Id, instance.Id)
	}
	running, there := c.runningInstance()
	const again = "attach what a running instance has"
	c.mustAttach(again, there.Id, running.Id)
}

func checkRepeatedDetach(c *Check) {
	disk := c.disk()
	running, _ := c.runningInstance()
	for _, instance := range []*oxide.Instance{c.StoppedInstance(), running} {
		const again = "detach a detached disk"
		c.mustDetach(again, disk.Id, instance.Id)
	}
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

// faultedDisk returns a faulted disk of a simulated rack. Its deletion has failed halfway.
func (c *Check) faultedDisk() *oxide.Disk {
	disk := c.disk()
	c.fault(adminapi.Fault{Operation: "disk_delete", Object: disk.Id, Phase: adminapi.Unwind})
	if c.deleteDisk(disk.Id) == nil {
		c.fatalf("delete disk %s, halfway: expected an error; it is deleted", disk.Name)
	}
	return c.look(disk.Id)
}

func checkAttachRefusals(c *Check) {
	disk, stopped := c.disk(), c.StoppedInstance()
	running, there := c.runningInstance()
	c.mustRefuse("attach a disk that a running instance has", attachedElsewhere("attach", there))(
		c.attach(there.Id, stopped.Id))
	must(c.attach(disk.Id, stopped.Id))(c, "attach a disk")
	c.mustRefuse("attach it to a running instance as well", attachedElsewhere("attach", disk))(
		c.attach(disk.Id, running.Id))
	c.attachedTo("after that", c.look(disk.Id), stopped.Id)
	if !c.Hotplug && !c.AttachOnly {
		c.mustRefuse("attach a detached disk to a running instance", notStopped("attach"))(
			c.attach(c.disk().Id, running.Id))
	}
	if !c.arrange("a faulted disk") {
		return
	}
	faulted := c.faultedDisk()
	state := invalidRequest("cannot attach disk %q: invalid state faulted", faulted.Name)
	c.mustRefuse("attach a faulted disk to a running instance", state)(
		c.attach(faulted.Id, running.Id))
	failed := c.instance(c.disk())
	c.fail(failed.Id)
	c.mustRefuse("attach a faulted disk to a failed instance", state)(c.attach(faulted.Id, failed.Id))
	c.mustRefuse("attach a disk to a failed instance",
		invalidRequest("cannot attach disk to instance in failed state"))(
		c.attach(c.disk().Id, failed.Id))
}

func checkLocalDisks(c *Check) {
	create := c.blank()
	create.Body.DiskBackend = oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}
	disk := must(c.createDisk(create))(c, "create a local disk")
	running, _ := c.runningInstance()
	want := notStopped("attach")
	if c.Hotplug || c.AttachOnly {
		want = inConflict("cannot attach local storage disk: instance is starting")
	}
	c.mustRefuse("attach a local disk to a running instance", want)(c.attach(disk.Id, running.Id))
	instance := c.instance()
	must(c.attach(disk.Id, instance.Id))(c, "attach it to a stopped instance")
	c.startAndAwait(instance.Id)
	c.mustRefuse("detach a local disk from a running instance", notStopped("detach"))(
		c.detach(disk.Id, instance.Id))
	c.attachedTo("after that", c.look(disk.Id), instance.Id)
}

func checkDetachRefusals(c *Check) {
	stopped := c.StoppedInstance()
	running, there := c.runningInstance()
	c.mustRefuse("detach a disk from an instance that does not have it",
		attachedElsewhere("detach", there))(c.detach(there.Id, stopped.Id))
	c.attachedTo("after that", c.look(there.Id), running.Id)
	if !c.Hotplug {
		c.mustRefuse("detach a disk from a running instance", notStopped("detach"))(
			c.detach(there.Id, running.Id))
	}
	boot, data := c.disk(), c.disk()
	create := c.newInstance()
	create.Body.BootDisk = with(boot)
	create.Body.Disks = []oxide.InstanceDiskAttachment{with(data)}
	instance := must(c.createInstance(create))(c, "create an instance with a boot disk")
	c.Await(instance.Id, oxide.InstanceStateStopped)
	c.mustRefuse("detach the boot disk of a stopped instance",
		inConflict("boot disk cannot be detached"))(c.detach(boot.Id, instance.Id))
	c.attachedTo("after that", c.look(boot.Id), instance.Id)
	if !c.arrange("a faulted disk") {
		return
	}
	faulted := c.faultedDisk()
	c.mustRefuse("detach a faulted disk",
		invalidRequest("cannot detach disk %q: invalid state faulted", faulted.Name))(
		c.detach(faulted.Id, running.Id))
	c.fail(instance.Id)
	c.mustRefuse("detach the boot disk of a failed instance",
		invalidRequest("cannot detach disk from instance in failed state"))(
		c.detach(boot.Id, instance.Id))
	c.mustDetach("detach another disk of a failed instance", data.Id, instance.Id)
}

func checkUnreadAttachments(c *Check) {
	c.needSimulated("no request from outside takes all connections to the rack's database")
	disk, instance := c.disk(), c.StoppedInstance()
	_, there := c.runningInstance()
	c.fault(adminapi.Fault{Operation: "instance_disk_attach", Object: there.Id,
		Phase: adminapi.Reread})
	c.mustRefuse("attach another's disk without a connection to the database",
		attachedElsewhere("attach", there))(c.attach(there.Id, instance.Id))
	for _, step := range []struct {
		operation, instance string
		call                func(string, string) (*oxide.Disk, error)
	}{
		{"instance_disk_attach", instance.Id, c.attach}, {"instance_disk_detach", "", c.detach},
	} {
		for _, what := range []string{step.operation, step.operation + " again"} {
			c.fault(adminapi.Fault{Operation: step.operation, Object: disk.Id, Phase: adminapi.Reread})
			c.mustRefuse(what+" without a connection to the database", unavailable)(
				step.call(disk.Id, instance.Id))
			c.attachedTo("after that", c.look(disk.Id), step.instance)
		}
	}
}

// Trial is what a rack did with the disks of a running instance of the trial's own. Attaches is
// tried only on a rack that detaches none.
type Trial struct {
	Attaches, Detaches bool
	// Says are findings that an operator can send to Oxide, one sentence each.
	Says []string
}

// TryHotplug tries what a rack does with the disks of a running instance. That instance can be
// stopped at the end, unlike the one that runs this program.
func (r *TestedRack) TryHotplug(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "hot-plug", Check: func(c *Check) {
		t = Trial{}
		first, second := c.disk(), c.disk()
		instance := c.instance(first)
		c.startAndAwait(instance.Id)
		_, err := c.detach(first.Id, instance.Id)
		if t.Detaches = err == nil; t.Detaches {
			return
		}
		if !SaysNotStopped(err) {
			c.fatalf("detach a disk of a running instance: expected that the rack does it, or refuses "+
				"because the instance is not stopped; found %s", Brief(err))
		}
		refused := Brief(err)
		_, err = c.attach(second.Id, instance.Id)
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

// TryRefusal tries how the rack refuses an attach: it asks for a disk that a running instance has.
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
	_, err := c.attach(attached.Id, c.StoppedInstance().Id)
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
// as attached. It returns "" if the attach did not fail so.
func Recorded(err error, disk *oxide.Disk, instance string) string {
	attached, is := disk.State.AsAttached()
	if err == nil || IsUnanswered(err) || !is || attached.Instance != instance {
		return ""
	}
	return fmt.Sprintf("an attach that failed stays recorded: the disk %s is attached to the "+
		"instance %s, and the answer was %s", disk.Name, instance, Brief(err))
}
