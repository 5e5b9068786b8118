package rules

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

type computing struct{ cpus, memory int64 }

func (c *Check) provisioned() computing {
	seen := must(c.Client.UtilizationView(c.ctx))(c, "read the utilization")
	if seen.Provisioned.Cpus == nil {
		c.fatalf("read the utilization: expected the number of provisioned CPUs; found none")
	}
	return computing{int64(*seen.Provisioned.Cpus), int64(seen.Provisioned.Memory)}
}

func checkProvisioned(c *Check) {
	instance := c.instance()
	c.steadily(func() {
		before := c.provisioned()
		must(c.start(instance.Id))(c, "start an instance")
		started := c.provisioned()
		c.Await(instance.Id, oxide.InstanceStateRunning)
		must(c.stop(instance.Id))(c, "stop it")
		c.Await(instance.Id, oxide.InstanceStateStopped)
		stopped := c.provisioned()
		own := computing{int64(instance.Ncpus), int64(instance.Memory)}
		equal(c, "what one more started instance adds to CPUs and memory", started.less(before), own)
		equal(c, "what is left of it when it is stopped again", stopped.less(before), computing{})
	})
}

func (a computing) less(b computing) computing {
	return computing{a.cpus - b.cpus, a.memory - b.memory}
}

func checkStart(c *Check) {
	instance := c.instance(c.disk())
	started := must(c.start(instance.Id))(c, "start a stopped instance")
	equal(c, "start a stopped instance: its state", started.RunState, oxide.InstanceStateStarting)
	again := must(c.start(instance.Id))(c, "start it again")
	if !slices.Contains([]oxide.InstanceState{oxide.InstanceStateStarting,
		oxide.InstanceStateRunning}, again.RunState) {
		c.errorf("start it again: expected it starting or running; found it %s", again.RunState)
	}
	c.Await(instance.Id, oxide.InstanceStateRunning)
	again = must(c.start(instance.Id))(c, "start a running instance")
	equal(c, "start a running instance: its state", again.RunState, oxide.InstanceStateRunning)

	if c.arrange("a failed instance") {
		c.fail(instance.Id)
		started = must(c.start(instance.Id))(c, "start a failed instance")
		equal(c, "start a failed instance: its state", started.RunState, oxide.InstanceStateStarting)
		c.Await(instance.Id, oxide.InstanceStateRunning)
	}
	c.stopSlowly(instance.Id)
	// On a real rack the instance may have stopped by now, and is then started.
	if _, err := c.start(instance.Id); err != nil || c.simulated() {
		c.refuses("start an instance that is stopping", err,
			inConflict("instance must finish stopping before it can be started"))
	}
}

// stopSlowly stops an instance. A real rack is slow; a simulated one is told to be.
func (c *Check) stopSlowly(instance string) {
	if c.simulated() {
		c.Switch("instance_delay", adminapi.Duration(hold))
	}
	stopping := must(c.stop(instance))(c, "stop an instance")
	equal(c, "stop an instance: its state", stopping.RunState, oxide.InstanceStateStopping)
}

func checkStop(c *Check) {
	instance := c.instance(c.disk())
	c.startAndAwait(instance.Id)
	stopping := must(c.stop(instance.Id))(c, "stop an instance without an operating system")
	equal(c, "stop an instance without an operating system: its state", stopping.RunState,
		oxide.InstanceStateStopping)
	if read := c.see(instance.Id).RunState; read != oxide.InstanceStateStopping &&
		read != oxide.InstanceStateStopped {
		c.errorf("the next read of its state: expected stopping or stopped; found %s", read)
	}
	c.Await(instance.Id, oxide.InstanceStateStopped)
	stopped := c.see(instance.Id)
	again := must(c.stop(instance.Id))(c, "stop a stopped instance")
	equal(c, "stop a stopped instance: its state", again.RunState, oxide.InstanceStateStopped)
	equal(c, "the time of its state", moment(again.TimeRunStateUpdated),
		moment(stopped.TimeRunStateUpdated))
	if c.arrange("a failed instance") {
		c.fail(instance.Id)
		stopped = must(c.stop(instance.Id))(c, "stop a failed instance")
		equal(c, "stop a failed instance: its state", stopped.RunState, oxide.InstanceStateStopped)
	}
}

func checkReboot(c *Check) {
	c.mustRefuse("reboot a stopped instance",
		invalidRequest("cannot reboot an instance in state stopped with no VMM"))(
		c.reboot(c.StoppedInstance().Id))
	running, disk := c.runningInstance()
	rebooting := must(c.reboot(running.Id))(c, "reboot a running instance")
	equal(c, "reboot a running instance: its state", rebooting.RunState, oxide.InstanceStateRebooting)
	c.attachedTo("meanwhile", c.look(disk.Id), running.Id)
	c.Await(running.Id, oxide.InstanceStateRunning)
	c.attachedTo("after that", c.look(disk.Id), running.Id)
	if !c.arrange("a failed instance") {
		return
	}
	instance := c.instance(c.disk())
	c.fail(instance.Id)
	c.mustRefuse("reboot a failed instance",
		invalidRequest("instance state cannot be changed from failed"))(c.reboot(instance.Id))
	c.Switch("instance_delay", adminapi.Duration(hold))
	must(c.start(instance.Id))(c, "start an instance slowly")
	c.mustRefuse("reboot an instance that is starting", invalidRequest("Forbidden"))(
		c.reboot(instance.Id))
	c.stopSlowly(instance.Id)
	c.mustRefuse("reboot an instance that is stopping",
		invalidRequest("cannot reboot an instance in state stopping"))(c.reboot(instance.Id))
}

func (c *Check) deleteInstance(id string) error {
	return c.Client.InstanceDelete(c.ctx, oxide.InstanceDeleteParams{Instance: oxide.NameOrId(id)})
}

func checkDeleteInstance(c *Check) {
	running, there := c.runningInstance()
	err := c.deleteInstance(running.Id)
	c.refuses("delete a running instance", err, invalidRequest(
		"cannot delete instance: instance is running or has not yet fully stopped"))
	if err == nil {
		c.running = nil
	} else {
		c.attachedTo("after that", c.look(there.Id), running.Id)
	}
	states := []string{"stopped"}
	if c.arrange("a failed instance") {
		states = append(states, "failed")
	}
	for _, state := range states {
		disk := c.disk()
		instance := c.instance(disk)
		if state == "failed" {
			c.fail(instance.Id)
		}
		c.must("delete a "+state+" instance", c.deleteInstance(instance.Id))
		c.mustRefuse("read it afterwards", unknownID("instance", instance.Id))(
			c.viewInstance(c.ctx, instance.Id))
		c.attachedTo("the disk of a deleted instance", c.look(disk.Id), "")
		c.refuses("delete it again", c.deleteInstance(instance.Id), unknownID("instance", instance.Id))
	}
}

func checkChangeWhileCreating(c *Check) {
	c.needSimulated("the creation of an instance cannot be held open from outside")
	create := c.newInstance()
	create.Body.Disks = []oxide.InstanceDiskAttachment{c.newDisk()}
	c.Switch("create_hold", adminapi.Duration(hold))
	made := make(chan error, 1)
	go func() {
		_, err := c.createInstance(create)
		made <- err
	}()
	var seen *oxide.Instance
	err := harness.Await(c.ctx, requestTimeout, func() (err error) {
		seen, err = c.viewInstance(c.ctx, string(create.Body.Name))
		return err
	})
	changes := map[string]func(string) (*oxide.Instance, error){"start": c.start, "stop": c.stop,
		"reboot": c.reboot}
	errs := map[string]error{}
	if err == nil {
		for verb, change := range changes {
			_, errs[verb] = change(seen.Id)
		}
	}
	// The clean-up of the request removes the instance.
	c.must("create an instance", <-made)
	c.must("read an instance while it is being created", err)
	equal(c, "its state before the changes", seen.RunState, oxide.InstanceStateCreating)
	c.refuses("start an instance that is being created", errs["start"], inConflict(
		"instance is in state creating but it must be stopped to be started"))
	for _, verb := range []string{"stop", "reboot"} {
		c.refuses(verb+" an instance that is being created", errs[verb],
			invalidRequest("cannot change instance state while it is still being created"))
	}
	c.Await(seen.Id, oxide.InstanceStateStopped)
}

func checkFailedReboot(c *Check) {
	c.needSimulated("no request from outside keeps a guest from coming back")
	disk := c.disk()
	instance := c.instance(disk)
	c.fail(instance.Id)
	c.attachedTo("the disk of a failed instance", c.look(disk.Id), instance.Id)
	c.startAndAwait(instance.Id)
	c.attachedTo("the disk of an instance that runs again", c.look(disk.Id), instance.Id)
}

// updated updates an instance with its present values, after change has altered them.
func (c *Check) updated(id string, change func(*oxide.InstanceUpdate)) (*oxide.Instance, error) {
	now := c.see(id)
	body := &oxide.InstanceUpdate{Ncpus: now.Ncpus, Memory: now.Memory,
		EnableJumboFrames: oxide.NewPointer(false)}
	if now.BootDiskId != "" {
		body.BootDisk = oxide.NewPointer(oxide.NameOrId(now.BootDiskId))
	}
	change(body)
	return c.Client.InstanceUpdate(c.ctx,
		oxide.InstanceUpdateParams{Instance: oxide.NameOrId(id), Body: body})
}

func checkUpdate(c *Check) {
	disk := c.disk()
	instance := c.instance()
	boot := func(u *oxide.InstanceUpdate) {
		u.BootDisk = oxide.NewPointer(oxide.NameOrId(disk.Id))
	}
	c.mustRefuse("set a boot disk that is not attached", inConflict("boot disk must be attached"))(
		c.updated(instance.Id, boot))
	must(c.attach(disk.Id, instance.Id))(c, "attach it")
	all := must(c.updated(instance.Id,
		func(u *oxide.InstanceUpdate) {
			boot(u)
			u.Ncpus, u.Memory = 2, 2*GiB
			u.CpuPlatform = oxide.NewPointer(oxide.InstanceCpuPlatformAmdMilan)
			u.AutoRestartPolicy = oxide.NewPointer(oxide.InstanceAutoRestartPolicyNever)
		}))(c, "change a stopped instance")
	equal(c, "what was changed", changeable(all), changes{2, 2 * GiB, disk.Id, "amd_milan", "never"})
	c.same("the answer to a change", all, c.see(instance.Id))
	none := must(c.updated(instance.Id, func(u *oxide.InstanceUpdate) {
		u.BootDisk, u.Ncpus, u.Memory = nil, 1, GiB
	}))(c, "change it back")
	equal(c, "what was changed, or left out", changeable(none), changes{1, GiB, "", "", ""})
	equal(c, "when it was modified", moment(none.TimeModified), moment(none.TimeCreated))

	_, err := c.updated(instance.Id, func(u *oxide.InstanceUpdate) {
		u.EnableJumboFrames = oxide.NewPointer(true)
	})
	// The fleet of a real rack may have opted in.
	if err != nil || c.simulated() {
		c.refuses("enable jumbo frames", err, invalidRequest("enable_jumbo_frames may only be set to "+
			"true when the fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"))
	}
	c.checkUpdateWhileRunning()
}

func (c *Check) checkUpdateWhileRunning() {
	running, there := c.runningInstance()
	resize := inConflict("instance must be stopped to change CPU or memory")
	for _, test := range []struct {
		what   string
		change func(*oxide.InstanceUpdate)
		want   Refused
	}{
		{"CPUs", func(u *oxide.InstanceUpdate) { u.Ncpus++ }, resize},
		{"memory", func(u *oxide.InstanceUpdate) { u.Memory += GiB }, resize},
		{"platform", func(u *oxide.InstanceUpdate) {
			u.CpuPlatform = oxide.NewPointer(oxide.InstanceCpuPlatformAmdMilan)
		}, resize},
		{"boot disk", func(u *oxide.InstanceUpdate) {
			u.BootDisk = oxide.NewPointer(oxide.NameOrId(there.Id))
		}, inConflict("instance must be stopped to set boot disk")},
	} {
		c.mustRefuse("change the "+test.what+" of a running instance", test.want)(
			c.updated(running.Id, test.change))
	}
	missing := uuid.NewString()
	c.mustRefuse("change the CPUs of a running instance, and its boot disk to none that is there",
		unknownID("disk", missing))(c.updated(running.Id, func(u *oxide.InstanceUpdate) {
		u.Ncpus++
		u.BootDisk = oxide.NewPointer(oxide.NameOrId(missing))
	}))
	must(c.updated(running.Id, func(*oxide.InstanceUpdate) {}))(c,
		"change nothing of a running instance")
}

type changes struct {
	cpus, memory               int64
	bootDisk, platform, policy string
}

func changeable(i *oxide.Instance) changes {
	return changes{int64(i.Ncpus), int64(i.Memory), i.BootDiskId, string(i.CpuPlatform),
		string(i.AutoRestartPolicy)}
}

func moment(t *time.Time) string {
	if t == nil {
		return "never"
	}
	return t.UTC().Format(time.RFC3339Nano)
}

func checkInstanceSize(c *Check) {
	const maxCPUs, maxMemory = 254, 1536 * GiB
	for _, test := range []struct {
		what   string
		cpus   int
		memory int64
		want   Refused
	}{
		{"255 vCPUs", maxCPUs + 1, GiB,
			invalidRequest("cannot have more than 254 vCPUs per instance")},
		{"half a GiB", 1, GiB / 2, invalidValue("size", "memory must be at least 1 GiB")},
		{"a GiB and a half", 1, GiB + GiB/2,
			invalidValue("size", "memory must be divisible by 1 GiB")},
		{"1537 GiB", 1, maxMemory + GiB,
			invalidValue("size", "memory must be less than or equal to 1536 GiB")},
	} {
		create := c.newInstance()
		create.Body.Ncpus = oxide.InstanceCpuCount(test.cpus)
		create.Body.Memory = oxide.ByteCount(test.memory)
		c.mustRefuse("create an instance with "+test.what, test.want)(c.createInstance(create))
	}
	const notRFC = "hostname: Hostnames must comply with RFC 1035"
	for _, test := range []struct{ name, problem string }{
		{strings.Repeat("a", 254), "hostname: Max hostname length is 253"},
		{"an_host", notRFC}, {"-host", notRFC}, {"host.", notRFC},
	} {
		create := c.newInstance()
		create.Body.Hostname = oxide.Hostname(test.name)
		_, err := c.createInstance(create)
		equal(c, "create an instance with the host name "+test.name, unplaced(refusedBy(err)),
			badBody(test.problem))
	}
	// The instance stays stopped, and so uses nothing of the silo (A20).
	create := c.newInstance()
	create.Body.Ncpus, create.Body.Memory = maxCPUs, maxMemory
	must(c.createInstance(create))(c, "create an instance with 254 vCPUs and 1536 GiB")
}

func checkUndoneInstance(c *Check) {
	free, taken, other := c.disk(), c.disk(), c.StoppedInstance()
	before := c.storageUsed(c.ctx)
	must(c.attach(taken.Id, other.Id))(c, "attach a disk")
	create := c.newInstance()
	made := c.newDisk()
	create.Body.Disks = []oxide.InstanceDiskAttachment{made, with(free), with(taken)}
	c.mustRefuse("create an instance with a disk that another one has",
		attachedElsewhere("attach", taken))(c.createInstance(create))
	name := made.Value.(*oxide.InstanceDiskAttachmentCreate).Name
	c.mustRefuse("read the disk that was to be made", unknownName("disk", name))(
		c.viewDisk(c.ctx, string(name)))
	left, err := c.viewInstance(c.ctx, string(create.Body.Name))
	c.refuses("read the instance", err, unknownName("instance", create.Body.Name))
	if err == nil {
		c.cleanup(func(ctx context.Context) error { return c.RemoveInstance(ctx, left.Id) })
	}
	c.attachedTo("the disk that was free", c.look(free.Id), "")
	c.attachedTo("the disk that another instance has", c.look(taken.Id), other.Id)
	if c.simulated() { // nobody else uses its silo
		equal(c, "what is provisioned afterwards", c.storageUsed(c.ctx), before)
	}
}

func checkStartAfterCreation(c *Check) {
	c.needSimulated("no request from outside keeps an instance from starting that may be made")
	disk, create := c.disk(), c.newInstance()
	create.Body.Start = oxide.NewPointer(true)
	create.Body.Disks = []oxide.InstanceDiskAttachment{with(disk)}
	c.fault(adminapi.Fault{Operation: "instance_create", Object: string(create.Body.Name),
		Device: &adminapi.DeviceFault{Fails: true}})
	instance := must(c.createInstance(create))(c, "create an instance that cannot be started")
	equal(c, "its state", instance.RunState, oxide.InstanceStateStopped)
	equal(c, "its state when it is read", c.see(instance.Id).RunState, oxide.InstanceStateStopped)
	c.attachedTo("its disk", c.look(disk.Id), instance.Id)
}

// checkCreationOrder sends a request with every mistake. It corrects the mistake that the rack
// reports, and sends the request again.
func checkCreationOrder(c *Check) {
	create := c.newInstance()
	body := create.Body
	free, taken := body.Name, c.StoppedInstance().Name
	nowhere, missing := uuid.NewString(), c.name()
	small := c.madeWith(c.blank().Body.DiskBackend, 512)
	body.Name, body.Ncpus, body.Memory = taken, 255, 1
	body.BootDisk = c.madeWith(From(&oxide.DiskSourceSnapshot{SnapshotId: nowhere}), GiB)
	body.Disks = slices.Repeat([]oxide.InstanceDiskAttachment{small}, maxDisks)
	body.NetworkInterfaces = interfaces(0)
	ephemeral := oxide.ExternalIpCreate{Value: &oxide.ExternalIpCreateEphemeral{}}
	body.ExternalIps = slices.Repeat([]oxide.ExternalIpCreate{ephemeral}, 33)
	body.SshPublicKeys = []oxide.NameOrId{oxide.NameOrId(nowhere)}
	body.AntiAffinityGroups = []oxide.NameOrId{oxide.NameOrId(missing)}
	type step struct {
		what string
		want Refused
		mend func()
	}
	steps := []step{
		{"255 vCPUs", invalidRequest("cannot have more than 254 vCPUs per instance"),
			func() { body.Ncpus = 1 }},
		{"a byte of memory", invalidValue("size", "memory must be at least 1 GiB"),
			func() { body.Memory = GiB }},
		{"13 disks", tooManyDisks, func() { body.Disks = body.Disks[:1] }},
		{"a boot disk of no snapshot", unknownID("snapshot", nowhere),
			func() { body.BootDisk = oxide.InstanceDiskAttachment{} }},
		{"a disk of 512 bytes", invalidValue("size", "total size must be at least 1 GiB"),
			func() {
				body.Disks[0] = oxide.InstanceDiskAttachment{
					Value: &oxide.InstanceDiskAttachmentAttach{Name: missing}}
			}},
		{"33 external IPs", invalidRequest(
			"An instance may not have more than 32 external IP addresses"),
			func() { body.ExternalIps = body.ExternalIps[:3] }},
		{"jumbo frames", invalidRequest("enable_jumbo_frames may only be set on an instance when " +
			"the fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"),
			func() { body.EnableJumboFrames = nil }},
		{"3 ephemeral IPs", invalidRequest("An instance may not have more than 2 ephemeral IP addresses"),
			func() { body.ExternalIps = nil }},
		{"a list of no interfaces", otherVPCs,
			func() { body.NetworkInterfaces = interfaces(1, string(missing)) }},
		{"an SSH key that is not there", unknownID("ssh-key", nowhere),
			func() { body.SshPublicKeys = nil }},
		{"a group that is not there", unknownName("anti-affinity-group", missing),
			func() { body.AntiAffinityGroups = nil }},
		{"a name that is taken", nameTaken("instance", taken), func() { body.Name = free }},
		{"a network that is not there", unknownName("vpc", missing),
			func() {
				body.NetworkInterfaces.Value = &oxide.InstanceNetworkInterfaceAttachmentNone{}
			}},
		{"a disk that is not there", unknownName("disk", missing), func() {}},
	}
	if c.simulated() {
		body.EnableJumboFrames = oxide.NewPointer(true)
	} else { // its fleet may have opted in
		steps = slices.DeleteFunc(steps, func(s step) bool { return s.what == "jumbo frames" })
	}
	for _, step := range steps {
		c.mustRefuse("create an instance with "+step.what+" and worse", step.want)(
			c.createInstance(create))
		step.mend()
	}
}

func (c *Check) madeWith(backend oxide.DiskBackend, size oxide.ByteCount,
) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: c.name(),
		Description: c.Description, Size: size, DiskBackend: backend}}
}
