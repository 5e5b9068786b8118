package rules

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

var ofGuests = []tested{
	{"A52", "instance_create instance_network_interface_list", func(c *Check) { // interfaces
		for _, test := range []struct {
			what string
			nics oxide.InstanceNetworkInterfaceAttachment
			want string
		}{
			{"asks for nothing", oxide.InstanceNetworkInterfaceAttachment{}, "net0 dual_stack"},
			{"asks for one", interfaces(1, defaultNetwork), "nic0 dual_stack"},
			{"asks for one with IPv4", onlyV4(), "nic0 v4"},
			{"asks for one with IPv6", onlyV6(), "nic0 v6"},
			{"asks for one with both", stack(oxide.PrivateIpStackCreate{
				Value: &oxide.PrivateIpStackCreateDualStack{Value: oxide.PrivateIpStackCreateDualStackValue{
					V4: autoV4, V6: autoV6}}}), "nic0 dual_stack"},
			{"asks for the default with IPv4", oxide.InstanceNetworkInterfaceAttachment{
				Value: &oxide.InstanceNetworkInterfaceAttachmentDefaultIpv4{}}, "net0 v4"},
			{"asks for the default with IPv6", oxide.InstanceNetworkInterfaceAttachment{
				Value: &oxide.InstanceNetworkInterfaceAttachmentDefaultIpv6{}}, "net0 v6"},
		} {
			instance := c.networked(test.nics)
			found := c.interfacesOf(instance.Id)
			if len(found) != 1 {
				c.errorf("an instance that %s: expected one interface; found %d", test.what, len(found))
				continue
			}
			nic := found[0]
			equal(c, "the interface of an instance that "+test.what,
				fmt.Sprintf("%s %s", nic.Name, nic.IpStack.Type()), test.want)
			equal(c, "whether it is the primary one", nic.Primary != nil && *nic.Primary, true)
			c.guestsAddresses(nic)
		}
		named := onlyV4()
		if v4, is := c.interfacesOf(c.networked(named).Id)[0].IpStack.AsV4(); is {
			named.Value.(*oxide.InstanceNetworkInterfaceAttachmentCreate).Params[0].IpConfig.
				Value.(*oxide.PrivateIpStackCreateV4).Value.Ip.Value = &oxide.Ipv4AssignmentExplicit{
				Value: v4.Value.Ip}
			create := c.newInstance()
			create.Body.NetworkInterfaces = named
			c.createInstance(create).refused(
				invalidRequest("The IP address '%s' is not available", v4.Value.Ip))
		}
		none := c.interfacesOf(c.StoppedInstance().Id)
		equal(c, "interfaces of an instance that wants none", len(none), 0)
	}},
	{"A54", "instance_disk_list", func(c *Check) { // serials
		for _, disk := range c.disksHere() {
			c.device(SerialOf(disk.Name))
		}
		if !c.Hotplug {
			return // the check cannot attach two disks
		}
		stem := string(c.name())
		stem += strings.Repeat("x", serialBytes-len(stem))
		first := c.plug(oxide.Name(stem + "-first"))
		shown := c.device(SerialOf(first.Name))
		c.plug(oxide.Name(stem + "-second"))
		// Wait for the device of a third disk. By then the second disk would have its device, too, if it
		// got one.
		c.device(SerialOf(c.plug(c.name() + "-with-a-longer-name").Name))
		var names []string
		for _, d := range c.devices() {
			if d.serial == stem {
				names = append(names, d.name)
			}
		}
		if !slices.Equal(names, []string{shown.name}) {
			c.errorf("devices of two disks with the serial %s: expected the first one's, %s; found %s",
				stem, shown.name, strings.Join(names, ", "))
		}
	}},
	{"A55", "instance_view", func(c *Check) { // firmware
		c.needGuest()
		for field, want := range map[string]string{"sys_vendor": "Oxide", "product_name": "OxVM",
			"product_serial": c.Here.ID, "product_uuid": c.Here.ID} {
			text, err := fs.ReadFile(c.Here.Sys, "class/dmi/id/"+field)
			if errors.Is(err, fs.ErrPermission) {
				c.errorf("read %s of the firmware: only root may; run this as root", field)
				continue
			}
			c.must("read "+field+" of the firmware", err)
			got := strings.Trim(string(text), "\x00 \n")
			equal(c, field+" of the firmware", strings.ToLower(got), strings.ToLower(want))
		}
		equal(c, "the ID of the instance", c.see(c.Here.ID).Id, c.Here.ID)
	}},
	{"A56", "instance_disk_list", func(c *Check) { // padding
		for _, disk := range c.disksHere() {
			d := c.device(SerialOf(disk.Name))
			model, err := fs.ReadFile(c.Here.Sys, "block/"+d.name+"/device/model")
			c.must("read the model of "+d.name, err)
			if strings.HasPrefix(string(model), qemuModel) {
				c.notTested("the controller of %s is QEMU's, which no rack has: this instance is a virtual "+
					"machine of a simulated rack", d.name)
			}
			padding := strings.TrimPrefix(d.raw, SerialOf(disk.Name))
			if strings.Trim(padding, "\x00") != "" {
				c.errorf("the serial of %s: expected nothing but NULs behind the disk's name; found %q",
					d.name, d.raw)
			}
			if strings.Trim(string(model), "\x00\n") != "" {
				c.errorf("the model of %s: expected nothing but NULs; found %q", d.name, model)
			}
		}
	}},
	{"A57", "instance_disk_attach instance_disk_detach", func(c *Check) { // device numbers
		c.needGuest()
		if !c.Hotplug {
			c.blocked("disks come and go while an instance runs only with hot-plug")
		}
		disks := []*oxide.Disk{c.plug(c.name()), c.plug(c.name()), c.plug(c.name())}
		before := map[string]device{}
		for _, disk := range disks {
			before[disk.Id] = c.device(SerialOf(disk.Name))
		}
		kept := func(when string) {
			for _, disk := range []*oxide.Disk{disks[0], disks[2]} {
				d := c.device(SerialOf(disk.Name))
				equal(c, "the device of a disk "+when, d.name, before[disk.Id].name)
				equal(c, "its number", d.number, before[disk.Id].number)
				equal(c, "the count of its appearances", d.sequence, before[disk.Id].sequence)
			}
		}
		c.detach(disks[1].Id, c.Here.ID).must()
		c.awaitGuest(func() error {
			for _, d := range c.devices() {
				if serial := SerialOf(disks[1].Name); d.serial == serial {
					return fmt.Errorf("a guest's device: expected none with the serial %q any more; found %s",
						serial, d.name)
				}
			}
			return nil
		})
		kept("after another one was detached")
		c.attach(disks[1].Id, c.Here.ID).must()
		c.device(SerialOf(disks[1].Name))
		kept("after another one was attached")
	}},
	{"A64", "instance_create", func(c *Check) { // refused interfaces
		taken, missing := c.StoppedInstance().Name, c.name()
		elsewhere := interfaces(1, defaultNetwork)
		elsewhere.Value.(*oxide.InstanceNetworkInterfaceAttachmentCreate).Params[0].SubnetName = missing
		var networked *oxide.Instance
		for _, test := range []struct {
			what string
			nics oxide.InstanceNetworkInterfaceAttachment
			// early means that the rack refuses the interfaces before it checks the name.
			early bool
			want  Refused
		}{
			{"9 interfaces", interfaces(9, defaultNetwork), true,
				invalidRequest("An instance may not have more than 8 network interfaces")},
			{"two VPCs", interfaces(2, defaultNetwork, string(missing)), true, otherVPCs},
			{"a list of no interfaces", interfaces(0), true, otherVPCs},
			{"8 interfaces in an unknown VPC", interfaces(8, string(missing)), true,
				nameTaken("instance", taken)},
			{"an unknown VPC", interfaces(1, string(missing)), false, unknownName("vpc", missing)},
			{"an unknown subnet", elsewhere, false, unknownName("vpc-subnet", missing)},
			{"two interfaces in one subnet", interfaces(2, defaultNetwork), false,
				invalidRequest("Each interface must be in a distinct VPC Subnet")},
		} {
			create := c.newInstance()
			create.Body.NetworkInterfaces = test.nics
			if test.early {
				create.Body.Name = taken
			} else if networked == nil {
				networked = c.networked(interfaces(1, defaultNetwork))
			}
			c.createInstance(create).as(test.what).refused(test.want)
		}
	}},
	{"A65", "instance_create instance_external_ip_list", func(c *Check) { // external addresses
		var seen []oxide.ExternalIpSnat
		for range 2 {
			found := c.externalAddresses(c.networked(onlyV4()).Id)
			if len(found) != 1 {
				c.fatalf("external addresses of an instance with IPv4: expected one; found %d", len(found))
			}
			nat, is := found[0].Value.(*oxide.ExternalIpSnat)
			if !is || nat.FirstPort == nil || nat.LastPort == nil {
				c.fatalf("the external address of an instance with IPv4: expected one for source NAT with "+
					"its ports; found %T", found[0].Value)
			}
			if *nat.FirstPort%natPorts != 0 || *nat.LastPort != *nat.FirstPort+natPorts-1 {
				c.errorf("its ports: expected a quarter of all; found %d to %d", *nat.FirstPort, *nat.LastPort)
			}
			if slices.ContainsFunc(seen, func(other oxide.ExternalIpSnat) bool {
				return other.Ip == nat.Ip && *other.FirstPort == *nat.FirstPort
			}) {
				c.errorf("two instances: expected them to share no port; found both on %s from %d", nat.Ip,
					*nat.FirstPort)
			}
			seen = append(seen, *nat)
		}
		for what, instance := range map[string]*oxide.Instance{"IPv6 alone": c.networked(onlyV6()),
			"no network": c.StoppedInstance()} {
			found := c.externalAddresses(instance.Id)
			equal(c, "external addresses of an instance with "+what, len(found), 0)
		}
	}},
	{"A69", "instance_disk_list", func(c *Check) { // the write cache
		distributed := slices.DeleteFunc(c.disksHere(), func(d oxide.Disk) bool {
			return d.DiskType != oxide.DiskTypeDistributed
		})
		if len(distributed) == 0 {
			c.notTested("the instance %s has no distributed disk", c.Here.ID)
		}
		for _, disk := range distributed {
			d := c.device(SerialOf(disk.Name))
			text, err := fs.ReadFile(c.Here.Sys, "block/"+d.name+"/queue/write_cache")
			if errors.Is(err, fs.ErrNotExist) {
				c.notTested("this instance does not show whether %s has a write cache, or the device is gone",
					d.name)
			}
			c.must("read the write cache of "+d.name, err)
			equal(c, "the write cache of "+d.name, strings.TrimSpace(string(text)), "write back")
		}
	}},
}

const (
	// A guest sees the first serialBytes bytes of a disk's name.
	serialBytes = 20
	// QEMU's NVMe controllers pad models and serials with spaces.
	qemuModel = "QEMU NVMe Ctrl"
	// A simulated guest shows a disk sooner, because the simulated rack only writes a file.
	deviceTimeout, simulatedDeviceTimeout = time.Minute, 5 * time.Second
	// A new project's VPC, and that VPC's subnet, are named defaultNetwork.
	defaultNetwork = "default"
	// natPorts is the number of ports that an instance has on its shared address.
	natPorts = 1 << 14
)

// SerialOf returns the serial of a disk's device.
func SerialOf(name oxide.Name) string {
	return string(name)[:min(len(name), serialBytes)]
}

type device struct {
	name        string
	raw, serial string // the serial as the guest shows it, and without padding
	number      string // major:minor
	sequence    string // grows with every device that appears; "" if the kernel does not report it
}

func (c *Check) needGuest() {
	if c.Here == nil {
		c.notTested("no guest can be seen; run this inside an instance of the project")
	}
}

// With hot-plug, disksHere returns disks that this run attached. Otherwise it returns all disks of
// this instance.
func (c *Check) disksHere() []oxide.Disk {
	c.needGuest()
	if c.Hotplug {
		c.plug(c.name())
	}
	disks := c.disksOf(c.Here.ID)
	if len(disks) == 0 {
		c.blocked("the instance %s has no disk to look at, and gains one only with hot-plug", c.Here.ID)
	}
	return slices.DeleteFunc(disks, func(d oxide.Disk) bool {
		return c.Hotplug && !strings.HasPrefix(string(d.Name), "conf-"+c.Mark+"-")
	})
}

func (c *Check) plug(name oxide.Name) *oxide.Disk {
	create := c.blank()
	create.Body.Name = name
	disk := c.createDisk(create).must()
	return c.attach(disk.Id, c.Here.ID).must()
}

// devices lists the guest's devices with a serial. It may miss a device that appears or disappears
// meanwhile.
func (c *Check) devices() []device {
	entries, err := fs.ReadDir(c.Here.Sys, "block")
	c.must("list the guest's devices", err)
	var all []device
	for _, entry := range entries {
		name := entry.Name()
		read := func(file string) string {
			text, _ := fs.ReadFile(c.Here.Sys, "block/"+name+"/"+file)
			return strings.TrimSuffix(string(text), "\n")
		}
		// Skip a hidden device, which is one path to a multipath device.
		raw := read("device/serial")
		if raw == "" || read("hidden") == "1" {
			continue
		}
		all = append(all, device{name: name, raw: raw, serial: strings.Trim(raw, "\x00 "),
			number: read("dev"), sequence: read("diskseq")})
	}
	return all
}

func (c *Check) device(serial string) (found device) {
	c.awaitGuest(func() error {
		var with []device
		var others []string
		for _, d := range c.devices() {
			if d.serial == serial {
				with = append(with, d)
			} else {
				others = append(others, d.serial)
			}
		}
		if len(with) == 0 {
			return fmt.Errorf("a guest's device: expected one with the serial %q; found %q", serial, others)
		}
		if found = with[0]; len(with) > 1 {
			c.fatalf("a guest's device: expected one with the serial %q; found it at %s and at %s", serial,
				found.name, with[1].name)
		}
		return nil
	})
	return found
}

func (c *Check) awaitGuest(ask func() error) {
	timeout := deviceTimeout
	if c.simulated() {
		switches, err := c.Admin.Switches(c.ctx)
		c.must("read the simulated rack's switches", err)
		timeout = simulatedDeviceTimeout + 2*time.Duration(switches.DeviceDelay)
	}
	if err := harness.Await(c.ctx, timeout, ask); err != nil {
		c.fatalf("%s", err)
	}
}

var otherVPCs = invalidRequest("All interfaces must be in the same VPC")

func interfaces(count int, vpcs ...string) oxide.InstanceNetworkInterfaceAttachment {
	create := &oxide.InstanceNetworkInterfaceAttachmentCreate{
		Params: []oxide.InstanceNetworkInterfaceCreate{}}
	for n := range count {
		create.Params = append(create.Params, oxide.InstanceNetworkInterfaceCreate{
			Name: oxide.Name(fmt.Sprintf("nic%d", n)), VpcName: oxide.Name(vpcs[n%len(vpcs)]),
			SubnetName: defaultNetwork})
	}
	return oxide.InstanceNetworkInterfaceAttachment{Value: create}
}

// networked creates a stopped instance with interfaces. If a real rack refuses because the project
// lacks the default network or the silo lacks addresses, the rule is not tested.
func (c *Check) networked(nics oxide.InstanceNetworkInterfaceAttachment) *oxide.Instance {
	create := c.newInstance()
	create.Body.NetworkInterfaces = nics
	creation := c.createInstance(create)
	if err := creation.err; refusal(err) != nil && !c.simulated() && !mayBeDone(err) {
		c.notTested("the project has no network for an instance: %s", Brief(err))
	}
	return creation.must()
}

func (c *Check) interfacesOf(instance string) []oxide.InstanceNetworkInterface {
	return asked(c.Client.InstanceNetworkInterfaceListAllPages(c.ctx,
		oxide.InstanceNetworkInterfaceListParams{Instance: oxide.NameOrId(instance)}))(c,
		"list the interfaces of an instance").must()
}

func stack(config oxide.PrivateIpStackCreate) oxide.InstanceNetworkInterfaceAttachment {
	nics := interfaces(1, defaultNetwork)
	nics.Value.(*oxide.InstanceNetworkInterfaceAttachmentCreate).Params[0].IpConfig = config
	return nics
}

var (
	autoV4 = oxide.PrivateIpv4StackCreate{Ip: oxide.Ipv4Assignment{Value: &oxide.Ipv4AssignmentAuto{}}}
	autoV6 = oxide.PrivateIpv6StackCreate{Ip: oxide.Ipv6Assignment{Value: &oxide.Ipv6AssignmentAuto{}}}
)

func onlyV4() oxide.InstanceNetworkInterfaceAttachment {
	return stack(oxide.PrivateIpStackCreate{Value: &oxide.PrivateIpStackCreateV4{Value: autoV4}})
}

func onlyV6() oxide.InstanceNetworkInterfaceAttachment {
	return stack(oxide.PrivateIpStackCreate{Value: &oxide.PrivateIpStackCreateV6{Value: autoV6}})
}

// guestsAddresses demands that an interface has none of the first five addresses of its subnet. For
// IPv4 it checks only the subnet of a new project, because other IPv4 subnets have unknown sizes.
func (c *Check) guestsAddresses(nic oxide.InstanceNetworkInterface) {
	var texts []string
	switch stack := nic.IpStack.Value.(type) {
	case *oxide.PrivateIpStackV4:
		texts = []string{stack.Value.Ip}
	case *oxide.PrivateIpStackV6:
		texts = []string{stack.Value.Ip}
	case *oxide.PrivateIpStackDualStack:
		texts = []string{stack.Value.V4.Ip, stack.Value.V6.Ip}
	}
	for _, text := range texts {
		address, err := netip.ParseAddr(text)
		c.must("read the address of an interface", err)
		bits := 64
		if address.Is4() {
			bits = 22
		}
		subnet := asked(address.Prefix(bits))(c, "compute a subnet").must().Masked()
		least := subnet.Addr()
		for range 5 {
			least = least.Next()
		}
		if address.Less(least) && (address.Is6() || subnet == netip.MustParsePrefix("172.30.0.0/22")) {
			c.errorf("an interface: expected none of the first five addresses of %s; found %s", subnet,
				address)
		}
	}
}

func (c *Check) externalAddresses(instance string) []oxide.ExternalIp {
	return asked(c.Client.InstanceExternalIpList(c.ctx,
		oxide.InstanceExternalIpListParams{Instance: oxide.NameOrId(instance)}))(c,
		"list the external addresses of an instance").must().Items
}
