package rules

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var ofInstances = []tested{
	{"A15", "utilization_view image_list", func(c *Check) { // roles
		everybodys := func() {
			c.utilization()
			asked(c.Client.ImageList(c.ctx, oxide.ImageListParams{Limit: oxide.NewPointer(1)}))(c,
				"list the silo's images").must()
		}
		everybodys()
		if !c.arrange("a token with fewer rights") {
			return
		}
		disk, instance := c.disk(), c.StoppedInstance()
		c.Switch("role", adminapi.RoleViewer)
		c.look(disk.Id)
		c.deleteDisk(disk.Id).refused(forbidden)
		c.createDisk(c.blank()).refused(forbidden)
		c.attach(disk.Id, instance.Id).refused(forbidden)
		impossible := c.newInstance()
		impossible.Body.Ncpus, impossible.Body.Memory = 0, 1
		c.createInstance(impossible).refused(forbidden)
		everybodys()

		c.Switch("role", adminapi.RoleNone)
		unseen := unknownID("disk", disk.Id)
		c.viewDisk(disk.Id).refused(unseen)
		c.deleteDisk(disk.Id).refused(unseen)
		by := "name"
		if uuid.Validate(c.Project) == nil {
			by = "id"
		}
		projects := asked(c.Client.ProjectListAllPages(c.ctx, oxide.ProjectListParams{}))(c,
			"list the projects without a role").must()
		equal(c, "the projects that are listed without a role", len(projects), 0)
		hidden := notFound("project", by, c.Project)
		c.viewProject(c.Project).refused(hidden)
		c.createDisk(c.blank()).refused(hidden)
		c.createInstance(impossible).refused(hidden)
		everybodys()
	}},
	{"A20", "utilization_view instance_start instance_stop", func(c *Check) { // what is provisioned
		instance := c.instance()
		c.steadily(func() {
			before := c.provisioned()
			c.start(instance.Id).must()
			started := c.provisioned()
			c.Await(instance.Id, oxide.InstanceStateRunning)
			c.stop(instance.Id).must()
			c.Await(instance.Id, oxide.InstanceStateStopped)
			stopped := c.provisioned()
			own := computing{int64(instance.Ncpus), int64(instance.Memory)}
			equal(c, "what one more started instance adds to CPUs and memory", started.less(before), own)
			equal(c, "what is left of it when it is stopped again", stopped.less(before), computing{})
		})
	}},
	{"A21", "current_user_view utilization_view", func(c *Check) {
		me := asked(c.Client.CurrentUserView(c.ctx))(c, "read who the token belongs to").must()
		if me.FleetViewer != nil && *me.FleetViewer {
			c.notTested("the token's user is a fleet viewer; use the token of a project's collaborator")
		}
		c.expect([]expected{
			{"the racks", get("/v1/system/hardware/racks"), forbidden},
			{"the utilization of all silos", get("/v1/system/utilization/silos"), forbidden},
			{"the quotas of all silos", get("/v1/system/silo-quotas"), forbidden},
		})
		for _, silo := range []string{me.SiloId, string(me.SiloName)} {
			c.steadily(func() { c.checkOwnSilo(me, oxide.NameOrId(silo)) })
		}
		another := uuid.NewString()
		c.expect([]expected{
			{"the quotas of another silo", get("/v1/system/silos/" + another + "/quotas"),
				unknownID("silo", another)},
			{"the utilization of another silo", get("/v1/system/utilization/silos/" + another),
				unknownID("silo", another)},
		})
	}},
	{"A45", "instance_start instance_stop", func(c *Check) { // start
		instance := c.instance(c.disk())
		shows(c.start(instance.Id), oxide.InstanceStateStarting)
		again := c.start(instance.Id).must().RunState
		if again != oxide.InstanceStateStarting && again != oxide.InstanceStateRunning {
			c.errorf("start it again: expected it starting or running; found it %s", again)
		}
		c.Await(instance.Id, oxide.InstanceStateRunning)
		shows(c.start(instance.Id), oxide.InstanceStateRunning)
		if c.arrange("a failed instance") {
			c.fail(instance.Id)
			shows(c.start(instance.Id), oxide.InstanceStateStarting)
			c.Await(instance.Id, oxide.InstanceStateRunning)
		}
		c.stopSlowly(instance.Id)
		// On a real rack the instance may be stopped by now, and then the start succeeds.
		if late := c.start(instance.Id); late.err != nil || c.simulated() {
			late.refused(inConflict("instance must finish stopping before it can be started"))
		}
	}},
	{"A46", "instance_start instance_stop", func(c *Check) { // stop
		instance := c.instance(c.disk())
		c.startAndAwait(instance.Id)
		shows(c.stop(instance.Id), oxide.InstanceStateStopping) // although it has no operating system
		if read := c.see(instance.Id).RunState; read != oxide.InstanceStateStopping &&
			read != oxide.InstanceStateStopped {
			c.errorf("the next read of its state: expected stopping or stopped; found %s", read)
		}
		c.Await(instance.Id, oxide.InstanceStateStopped)
		stopped := c.see(instance.Id)
		again := c.stop(instance.Id)
		shows(again, oxide.InstanceStateStopped)
		equal(c, "the time of its state", moment(again.value.TimeRunStateUpdated),
			moment(stopped.TimeRunStateUpdated))
		if c.arrange("a failed instance") {
			c.fail(instance.Id)
			shows(c.stop(instance.Id), oxide.InstanceStateStopped)
		}
	}},
	{"A47", "instance_reboot", func(c *Check) { // reboot
		c.reboot(c.StoppedInstance().Id).refused(
			invalidRequest("cannot reboot an instance in state stopped with no VMM"))
		running, disk := c.runningInstance()
		shows(c.reboot(running.Id), oxide.InstanceStateRebooting)
		attachedTo(c.viewDisk(disk.Id).as("its instance reboots"), running.Id)
		c.Await(running.Id, oxide.InstanceStateRunning)
		attachedTo(c.viewDisk(disk.Id).as("its instance has rebooted"), running.Id)
		if !c.arrange("a failed instance") {
			return
		}
		instance := c.instance(c.disk())
		c.fail(instance.Id)
		c.reboot(instance.Id).refused(invalidRequest("instance state cannot be changed from failed"))
		c.Switch("instance_delay", adminapi.Duration(hold))
		c.start(instance.Id).must()
		c.reboot(instance.Id).refused(invalidRequest("Forbidden")) // it is starting
		c.stopSlowly(instance.Id)
		c.reboot(instance.Id).refused(invalidRequest("cannot reboot an instance in state stopping"))
	}},
	{"A48", "instance_delete", func(c *Check) { // delete
		running, there := c.runningInstance()
		deletion := c.deleteInstance(running.Id)
		deletion.refused(invalidRequest(
			"cannot delete instance: instance is running or has not yet fully stopped"))
		if deletion.err == nil {
			c.running = nil
		} else {
			c.staysAttached(there.Id, running.Id)
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
			c.deleteInstance(instance.Id).as(state).must()
			c.viewInstance(instance.Id).refused(unknownID("instance", instance.Id))
			c.staysAttached(disk.Id, "")
			c.deleteInstance(instance.Id).refused(unknownID("instance", instance.Id))
		}
	}},
	{"A49", "instance_update", func(c *Check) { // update
		disk, instance := c.disk(), c.instance()
		milan := oxide.NewPointer(oxide.InstanceCpuPlatformAmdMilan)
		boot := func(disk string) func(*oxide.InstanceUpdate) {
			return func(u *oxide.InstanceUpdate) { u.BootDisk = oxide.NewPointer(oxide.NameOrId(disk)) }
		}
		c.updated(instance.Id, boot(disk.Id)).refused(inConflict("boot disk must be attached"))
		c.attach(disk.Id, instance.Id).must()
		all := c.updated(instance.Id, func(u *oxide.InstanceUpdate) {
			boot(disk.Id)(u)
			u.Ncpus, u.Memory, u.CpuPlatform = 2, 2*GiB, milan
			u.AutoRestartPolicy = oxide.NewPointer(oxide.InstanceAutoRestartPolicyNever)
		}).must()
		equal(c, "what was changed", changeable(all), changes{2, 2 * GiB, disk.Id, "amd_milan", "never"})
		c.same("the answer to a change", all, c.see(instance.Id))
		none := c.updated(instance.Id, func(u *oxide.InstanceUpdate) {
			u.BootDisk, u.Ncpus, u.Memory = nil, 1, GiB
		}).must()
		equal(c, "what was changed, or left out", changeable(none), changes{1, GiB, "", "", ""})
		equal(c, "when it was modified", moment(none.TimeModified), moment(none.TimeCreated))

		jumbo := c.updated(instance.Id, func(u *oxide.InstanceUpdate) {
			u.EnableJumboFrames = oxide.NewPointer(true)
		})
		// A real rack may accept the update, because its fleet may allow jumbo frames.
		if jumbo.err != nil || c.simulated() {
			jumbo.refused(invalidRequest("enable_jumbo_frames may only be set to true when " + optIn))
		}

		running, there := c.runningInstance()
		resize := inConflict("instance must be stopped to change CPU or memory")
		change := func(change func(*oxide.InstanceUpdate)) outcome[*oxide.Instance] {
			return c.updated(running.Id, change)
		}
		change(func(u *oxide.InstanceUpdate) { u.Ncpus++ }).as("CPUs").refused(resize)
		change(func(u *oxide.InstanceUpdate) { u.Memory += GiB }).as("memory").refused(resize)
		change(func(u *oxide.InstanceUpdate) { u.CpuPlatform = milan }).as("platform").refused(resize)
		change(boot(there.Id)).as("boot disk").refused(
			inConflict("instance must be stopped to set boot disk"))
		missing := uuid.NewString()
		change(func(u *oxide.InstanceUpdate) {
			u.Ncpus++
			boot(missing)(u)
		}).refused(unknownID("disk", missing))
		change(func(*oxide.InstanceUpdate) {}).must()
	}},
	{"A50", "instance_create", func(c *Check) { // sizes and host names
		const maxCPUs, maxMemory = 254, 1536 * GiB
		create := func(cpus oxide.InstanceCpuCount, memory oxide.ByteCount) outcome[*oxide.Instance] {
			params := c.newInstance()
			params.Body.Ncpus, params.Body.Memory = cpus, memory
			return c.createInstance(params)
		}
		create(maxCPUs+1, GiB).as("255 vCPUs").refused(mostCPUs)
		create(1, GiB/2).as("half a GiB").refused(leastMemory)
		create(1, GiB+GiB/2).as("a GiB and a half").refused(
			invalidValue("size", "memory must be divisible by 1 GiB"))
		create(1, maxMemory+GiB).as("1537 GiB").refused(
			invalidValue("size", "memory must be less than or equal to 1536 GiB"))
		const notRFC = "hostname: Hostnames must comply with RFC 1035"
		for _, test := range []struct{ name, problem string }{
			{strings.Repeat("a", 254), "hostname: Max hostname length is 253"},
			{"an_host", notRFC}, {"-host", notRFC}, {"host.", notRFC},
		} {
			params := c.newInstance()
			params.Body.Hostname = oxide.Hostname(test.name)
			equal(c, "create an instance with the host name "+test.name,
				unplaced(refusedBy(c.createInstance(params).err)), badBody(test.problem))
		}
		// A stopped instance uses no CPUs and no memory of the silo (A20).
		create(maxCPUs, maxMemory).must()
	}},
	{"A51", "instance_create disk_view", checkUndoneInstance},
	{"A53", "instance_create instance_start instance_stop instance_reboot", checkChangeWhileCreating},
	{"A58", "instance_create", func(c *Check) { // a start that fails
		c.needSimulated("no request from outside keeps an instance from starting that may be made")
		disk, create := c.disk(), c.newInstance()
		create.Body.Start = oxide.NewPointer(true)
		create.Body.Disks = []oxide.InstanceDiskAttachment{with(disk)}
		c.fault(adminapi.Fault{Operation: "instance_create", Object: string(create.Body.Name),
			Device: &adminapi.DeviceFault{Fails: true}})
		instance := c.createInstance(create).must()
		equal(c, "its state", instance.RunState, oxide.InstanceStateStopped)
		equal(c, "its state when it is read", c.see(instance.Id).RunState, oxide.InstanceStateStopped)
		c.staysAttached(disk.Id, instance.Id)
	}},
	{"A60", "instance_reboot instance_start", func(c *Check) { // a reboot that fails
		c.needSimulated("no request from outside keeps a guest from coming back")
		disk := c.disk()
		instance := c.instance(disk)
		c.fail(instance.Id)
		c.staysAttached(disk.Id, instance.Id)
		c.startAndAwait(instance.Id)
		c.staysAttached(disk.Id, instance.Id)
	}},
	// The first request has every mistake. After each refusal, the check corrects the mistake that
	// the rack has reported, and sends the request again.
	{"A66", "instance_create", func(c *Check) {
		create := c.newInstance()
		body := create.Body
		free, taken := body.Name, c.StoppedInstance().Name
		nowhere, missing := uuid.NewString(), c.name()
		small := c.madeWith(c.blank().Body.DiskBackend, 512)
		body.Name, body.Ncpus, body.Memory = taken, 255, 1
		source := oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: nowhere}}
		body.BootDisk = c.madeWith(c.diskFrom(source).Body.DiskBackend, GiB)
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
			{"255 vCPUs", mostCPUs, func() { body.Ncpus = 1 }},
			{"a byte of memory", leastMemory, func() { body.Memory = GiB }},
			{"13 disks", tooManyDisks, func() { body.Disks = body.Disks[:1] }},
			{"a boot disk of no snapshot", unknownID("snapshot", nowhere),
				func() { body.BootDisk = oxide.InstanceDiskAttachment{} }},
			{"a disk of 512 bytes", tooSmall, func() { body.Disks[0] = with(&oxide.Disk{Name: missing}) }},
			{"33 external IPs", tooManyIPs(32, "external"),
				func() { body.ExternalIps = body.ExternalIps[:3] }},
			{"jumbo frames", invalidRequest("enable_jumbo_frames may only be set on an instance when " +
				optIn), func() { body.EnableJumboFrames = nil }},
			{"3 ephemeral IPs", tooManyIPs(2, "ephemeral"), func() { body.ExternalIps = nil }},
			{"a list of no interfaces", otherVPCs,
				func() { body.NetworkInterfaces = interfaces(1, string(missing)) }},
			{"an SSH key that is not there", unknownID("ssh-key", nowhere),
				func() { body.SshPublicKeys = nil }},
			{"a group that is not there", unknownName("anti-affinity-group", missing),
				func() { body.AntiAffinityGroups = nil }},
			{"a name that is taken", nameTaken("instance", taken), func() { body.Name = free }},
			{"a network that is not there", unknownName("vpc", missing),
				func() { body.NetworkInterfaces.Value = &oxide.InstanceNetworkInterfaceAttachmentNone{} }},
			{"a disk that is not there", unknownName("disk", missing), func() {}},
		}
		if c.simulated() {
			body.EnableJumboFrames = oxide.NewPointer(true)
		} else { // a real rack's fleet may allow jumbo frames
			steps = slices.DeleteFunc(steps, func(s step) bool { return s.what == "jumbo frames" })
		}
		for _, step := range steps {
			c.createInstance(create).as(step.what).refused(step.want)
			step.mend()
		}
	}},
}

type computing struct{ cpus, memory int64 }

func (c *Check) provisioned() computing {
	seen := c.utilization()
	if seen.Provisioned.Cpus == nil {
		c.fatalf("read the utilization: expected the number of provisioned CPUs; found none")
	}
	return computing{int64(*seen.Provisioned.Cpus), int64(seen.Provisioned.Memory)}
}

func (a computing) less(b computing) computing {
	return computing{a.cpus - b.cpus, a.memory - b.memory}
}

func shows(changed outcome[*oxide.Instance], want oxide.InstanceState) {
	equal(changed.c, changed.step+": its state", changed.must().RunState, want)
}

// stopSlowly stops an instance. It makes a simulated rack as slow as a real one.
func (c *Check) stopSlowly(instance string) {
	if c.simulated() {
		c.Switch("instance_delay", adminapi.Duration(hold))
	}
	shows(c.stop(instance), oxide.InstanceStateStopping)
}

func (c *Check) deleteInstance(id string) outcome[any] {
	return c.done(c.Client.InstanceDelete(c.ctx,
		oxide.InstanceDeleteParams{Instance: oxide.NameOrId(id)}), "delete instance %s", id)
}

func checkChangeWhileCreating(c *Check) {
	c.needSimulated("the creation of an instance cannot be held open from outside")
	create := c.newInstance()
	create.Body.Disks = []oxide.InstanceDiskAttachment{c.newDisk()}
	creation := begin(c, c.instances(), create.Body.Name, "create an instance", "create_hold",
		func() (*oxide.Instance, error) { return c.Client.InstanceCreate(c.ctx, create) })
	seen := creation.seen
	equal(c, "its state before the changes", seen.RunState, oxide.InstanceStateCreating)
	start, stop, reboot := c.start(seen.Id), c.stop(seen.Id), c.reboot(seen.Id)
	creation.end().must()
	early := invalidRequest("cannot change instance state while it is still being created")
	start.refused(inConflict("instance is in state creating but it must be stopped to be started"))
	stop.refused(early)
	reboot.refused(early)
	c.Await(seen.Id, oxide.InstanceStateStopped)
}

// updated sends an update with the instance's present values, except those that change() alters.
func (c *Check) updated(id string, change func(*oxide.InstanceUpdate)) outcome[*oxide.Instance] {
	now := c.see(id)
	body := &oxide.InstanceUpdate{Ncpus: now.Ncpus, Memory: now.Memory,
		EnableJumboFrames: oxide.NewPointer(false)}
	if now.BootDiskId != "" {
		body.BootDisk = oxide.NewPointer(oxide.NameOrId(now.BootDiskId))
	}
	change(body)
	return asked(c.Client.InstanceUpdate(c.ctx, oxide.InstanceUpdateParams{
		Instance: oxide.NameOrId(id), Body: body}))(c, "update instance %s", id)
}

const optIn = "the fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"

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

func tooManyIPs(most int, kind string) Refused {
	return invalidRequest("An instance may not have more than %d %s IP addresses", most, kind)
}

var (
	leastMemory = invalidValue("size", "memory must be at least 1 GiB")
	mostCPUs    = invalidRequest("cannot have more than 254 vCPUs per instance")
)

func checkUndoneInstance(c *Check) {
	free, taken, other := c.disk(), c.disk(), c.StoppedInstance()
	before := c.storageUsed()
	c.attach(taken.Id, other.Id).must()
	create := c.newInstance()
	made := c.newDisk()
	create.Body.Disks = []oxide.InstanceDiskAttachment{made, with(free), with(taken)}
	c.createInstance(create).refused(attachedElsewhere("attach", taken))
	name := made.Value.(*oxide.InstanceDiskAttachmentCreate).Name
	c.viewDisk(string(name)).refused(unknownName("disk", name))
	left := c.viewInstance(string(create.Body.Name))
	left.refused(unknownName("instance", create.Body.Name))
	if left.err == nil {
		c.cleanup(func(ctx context.Context) error { return c.RemoveInstance(ctx, left.value.Id) })
	}
	c.staysAttached(free.Id, "")
	c.staysAttached(taken.Id, other.Id)
	if c.simulated() { // nobody else uses its silo
		equal(c, "what is provisioned afterwards", c.storageUsed(), before)
	}
}

func (c *Check) madeWith(backend oxide.DiskBackend, size oxide.ByteCount,
) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: c.name(),
		Description: c.Description, Size: size, DiskBackend: backend}}
}

// checkOwnSilo demands the same values from requests with and without the silo's name or ID.
func (c *Check) checkOwnSilo(me *oxide.CurrentUser, silo oxide.NameOrId) {
	use := c.utilization()
	quotas := asked(c.Client.SiloQuotasView(c.ctx, oxide.SiloQuotasViewParams{Silo: silo}))(c,
		"read the own silo's quotas").must()
	c.same("the own silo's quotas", quotas, oxide.SiloQuotas{SiloId: me.SiloId,
		Cpus: use.Capacity.Cpus, Memory: use.Capacity.Memory, Storage: use.Capacity.Storage})
	named := asked(c.Client.SiloUtilizationView(c.ctx, oxide.SiloUtilizationViewParams{Silo: silo}))(c,
		"read the own silo's utilization by its name or ID").must()
	c.same("the own silo's utilization", named, oxide.SiloUtilization{SiloId: me.SiloId,
		SiloName: me.SiloName, Allocated: use.Capacity, Provisioned: use.Provisioned})
}

func (c *Check) storageUsed() int64 { return int64(c.utilization().Provisioned.Storage) }

func (c *Check) utilization() *oxide.Utilization {
	return asked(c.Client.UtilizationView(c.ctx))(c, "read the silo's utilization").must()
}

// looks limits how often steadily calls look() on a real rack, where other users may change what
// the silo has provisioned between two reads.
const looks = 3

// steadily calls look() again if look() finds a problem on a real rack. Other users may have caused
// the problem, but a rack that breaks the rule causes the same one each time.
func (c *Check) steadily(look func()) {
	before := len(c.problems)
	var found []string
	var looked, took time.Duration
	for len(found) < looks {
		// Without a random pause, two runs could disturb each other in the same way each time.
		pause := harness.Backoff{Next: rand.N(took + 1)}
		_ = pause.Wait(c.ctx) // the next request notices an interrupt
		c.problems = c.problems[:before]
		began := time.Now()
		look()
		if len(c.problems) == before || c.simulated() {
			return
		}
		found = append(found, strings.Join(c.problems[before:], "\n"))
		took = time.Since(began)
		looked += took
	}
	changes := len(slices.Compact(found)) > 1
	if !changes { // does the amount change while the check does nothing for a time?
		first := c.utilization()
		changes = harness.Await(c.ctx, looked, func() error {
			now, err := c.Client.UtilizationView(c.ctx)
			if err == nil && reflect.DeepEqual(now.Provisioned, first.Provisioned) {
				err = errors.New("nothing has changed")
			}
			return err
		}) == nil
	}
	if changes {
		c.problems = c.problems[:before]
		c.notTested("others change what the silo has provisioned: %d looks found something else than "+
			"the check had caused, such as: %s", looks, found[0])
	}
}
