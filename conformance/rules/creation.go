package rules

import (
	"context"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

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
		create := c.NewInstance()
		create.Body.Ncpus = oxide.InstanceCpuCount(test.cpus)
		create.Body.Memory = oxide.ByteCount(test.memory)
		c.MustRefuse("create an instance with "+test.what, test.want)(c.CreateInstance(create))
	}
	const notRFC = "hostname: Hostnames must comply with RFC 1035"
	for _, test := range []struct{ name, problem string }{
		{strings.Repeat("a", 254), "hostname: Max hostname length is 253"},
		{"an_host", notRFC}, {"-host", notRFC}, {"host.", notRFC},
	} {
		create := c.NewInstance()
		create.Body.Hostname = oxide.Hostname(test.name)
		_, err := c.CreateInstance(create)
		Equal(c, "create an instance with the host name "+test.name, unplaced(refusedBy(err)),
			badBody(test.problem))
	}
	// The instance stays stopped, and so uses nothing of the silo (A20).
	create := c.NewInstance()
	create.Body.Ncpus, create.Body.Memory = maxCPUs, maxMemory
	Must[*oxide.Instance](c, "create an instance with 254 vCPUs and 1536 GiB")(
		c.CreateInstance(create))
}

func checkUndoneInstance(c *Check) {
	free, taken, other := c.Disk(), c.Disk(), c.StoppedInstance()
	before := c.storageUsed(c.ctx)
	Must[*oxide.Disk](c, "attach a disk")(c.Attach(taken.Id, other.Id))
	create := c.NewInstance()
	made := c.NewDisk()
	create.Body.Disks = []oxide.InstanceDiskAttachment{made, With(free), With(taken)}
	c.MustRefuse("create an instance with a disk that another one has",
		attachedElsewhere("attach", taken))(c.CreateInstance(create))
	name := made.Value.(*oxide.InstanceDiskAttachmentCreate).Name
	c.MustRefuse("read the disk that was to be made", unknownName("disk", name))(
		c.Client.DiskView(c.ctx, oxide.DiskViewParams{Project: c.project(), Disk: oxide.NameOrId(name)}))
	left, err := c.Client.InstanceView(c.ctx, oxide.InstanceViewParams{Project: c.project(),
		Instance: oxide.NameOrId(create.Body.Name)})
	c.Refuses("read the instance", err, unknownName("instance", create.Body.Name))
	if err == nil {
		c.Cleanup(func(ctx context.Context) error { return c.RemoveInstance(ctx, left.Id) })
	}
	c.AttachedTo("the disk that was free", c.Look(free.Id), "")
	c.AttachedTo("the disk that another instance has", c.Look(taken.Id), other.Id)
	if c.Simulated() { // nobody else uses its silo
		Equal(c, "what is provisioned afterwards", c.storageUsed(c.ctx), before)
	}
}

func checkStartAfterCreation(c *Check) {
	c.needSimulated("no request from outside keeps an instance from starting that may be made")
	disk, create := c.Disk(), c.NewInstance()
	create.Body.Start = oxide.NewPointer(true)
	create.Body.Disks = []oxide.InstanceDiskAttachment{With(disk)}
	c.Fault(adminapi.Fault{Operation: "instance_create", Object: string(create.Body.Name),
		Device: &adminapi.DeviceFault{Fails: true}})
	instance := Must[*oxide.Instance](c, "create an instance that cannot be started")(
		c.CreateInstance(create))
	Equal(c, "its state", instance.RunState, oxide.InstanceStateStopped)
	Equal(c, "its state when it is read", c.See(instance.Id).RunState, oxide.InstanceStateStopped)
	c.AttachedTo("its disk", c.Look(disk.Id), instance.Id)
}

// checkCreationOrder sends a request with every mistake. It corrects the mistake that the rack
// reports, and sends the request again.
func checkCreationOrder(c *Check) {
	create := c.NewInstance()
	body := create.Body
	free, taken := body.Name, c.StoppedInstance().Name
	nowhere, missing := uuid.NewString(), c.Name()
	small := c.madeWith(c.Blank().Body.DiskBackend, 512)
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
	if c.Simulated() {
		body.EnableJumboFrames = oxide.NewPointer(true)
	} else { // its fleet may have opted in
		steps = slices.DeleteFunc(steps, func(s step) bool { return s.what == "jumbo frames" })
	}
	for _, step := range steps {
		c.MustRefuse("create an instance with "+step.what+" and worse", step.want)(
			c.CreateInstance(create))
		step.mend()
	}
}

// madeWith returns the request for a disk that is created together with an instance.
func (c *Check) madeWith(backend oxide.DiskBackend, size oxide.ByteCount,
) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{Value: &oxide.InstanceDiskAttachmentCreate{Name: c.Name(),
		Description: c.Description, Size: size, DiskBackend: backend}}
}
