package rules

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// defaultNetwork is the VPC of a new project, and its subnet.
const defaultNetwork = "default"

var otherVPCs = invalidRequest("All interfaces must be in the same VPC")

// interfaces returns a request for the given number of interfaces. It uses the VPCs in turn.
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

// networked creates a stopped instance with interfaces. A project of a real rack may lack the
// default network, and its silo may lack a pool of addresses. The rule is not tested then.
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

func checkInterfaces(c *Check) {
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
}

// guestsAddresses demands that an interface has none of the first five addresses of its subnet.
// The check knows the subnet's size only in a new project.
func (c *Check) guestsAddresses(nic oxide.InstanceNetworkInterface) {
	var texts []string
	if v4, is := nic.IpStack.AsV4(); is {
		texts = append(texts, v4.Value.Ip)
	}
	if v6, is := nic.IpStack.AsV6(); is {
		texts = append(texts, v6.Value.Ip)
	}
	if both, is := nic.IpStack.AsDualStack(); is {
		texts = append(texts, both.Value.V4.Ip, both.Value.V6.Ip)
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

func checkWhereInterfacesAre(c *Check) {
	taken, missing := c.StoppedInstance().Name, c.name()
	elsewhere := interfaces(1, defaultNetwork)
	elsewhere.Value.(*oxide.InstanceNetworkInterfaceAttachmentCreate).Params[0].SubnetName = missing
	var networked *oxide.Instance
	for _, test := range []struct {
		what string
		nics oxide.InstanceNetworkInterfaceAttachment
		// early means that the rack refuses the interfaces before the name.
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
}

// natPorts is the number of ports that an instance has on its shared address.
const natPorts = 1 << 14

func (c *Check) externalAddresses(instance string) []oxide.ExternalIp {
	return asked(c.Client.InstanceExternalIpList(c.ctx,
		oxide.InstanceExternalIpListParams{Instance: oxide.NameOrId(instance)}))(c,
		"list the external addresses of an instance").must().Items
}

func checkExternalAddresses(c *Check) {
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
		equal(c, "external addresses of an instance with "+what, len(c.externalAddresses(instance.Id)), 0)
	}
}
