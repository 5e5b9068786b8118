package engine

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// InterfaceCreate has the parameters of a new network interface.
type InterfaceCreate struct {
	Name, Description, Stack, VPC, Subnet string
	// V4 and V6 are the requested addresses; the zero value means any free address.
	V4, V6 netip.Addr
	// Unsupported names a part of it that this simulator does not support.
	Unsupported string
}

// The IP stacks that an interface can have.
const (
	StackV4   = "v4"
	StackV6   = "v6"
	StackDual = "dual_stack"
)

// DefaultInterface is the interface of an instance whose request names none (A52).
var DefaultInterface = InterfaceCreate{
	Name: "net0", Description: "default primary interface", Stack: StackDual,
	VPC: defaultNetwork, Subnet: defaultNetwork,
}

const (
	// defaultNetwork is the VPC of a new project, and the subnet of a new VPC (A64).
	defaultNetwork = "default"
	maxInterfaces  = 8
)

// interfacesProblem makes the rack's checks of the interfaces of a new instance, before any part of
// the instance is created (A64).
func interfacesProblem(create []InterfaceCreate) error {
	if len(create) > maxInterfaces {
		return invalidRequest("An instance may not have more than %d network interfaces",
			maxInterfaces)
	}
	vpcs := map[string]bool{}
	for _, c := range create {
		vpcs[c.VPC] = true
	}
	if create != nil && len(vpcs) != 1 {
		return invalidRequest("All interfaces must be in the same VPC")
	}
	return nil
}

const macFormat = "A8:40:25:F0:%02X:%02X"

func newInterfaces(tx *store.Tx, i store.Instance,
	create []InterfaceCreate) []store.NetworkInterface {
	nics := []store.NetworkInterface{}
	for _, c := range create {
		nic := newInterface(tx, i, nics, c)
		nic.ID = store.DerivedID("interface", i.ID, c.Name)
		nics = append(nics, nic)
	}
	return nics
}

// newInterface creates a further interface of an instance. Each interface is in a different subnet
// (A64).
func newInterface(tx *store.Tx, i store.Instance, others []store.NetworkInterface,
	c InterfaceCreate) store.NetworkInterface {
	vpc := find(tx, VPC.Table(), i.ProjectID, store.Selector{Name: c.VPC})
	subnet := find(tx, Subnet.Table(), vpc.ID, store.Selector{Name: c.Subnet})
	tx.Check(requestProblem(subnet, "ipv4_block", c.V4))
	tx.Check(requestProblem(subnet, "ipv6_block", c.V6))
	if slices.ContainsFunc(others, func(other store.NetworkInterface) bool {
		return other.SubnetID == subnet.ID
	}) {
		tx.Check(invalidRequest("Each interface must be in a distinct VPC Subnet"))
	}
	stack := newStack(tx, subnet, c)
	host := tx.NextHost()
	return store.NetworkInterface{
		Identity:   store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		InstanceID: i.ID, Primary: len(others) == 0, VPCID: vpc.ID, SubnetID: subnet.ID,
		MAC:     fmt.Sprintf(macFormat, byte(host>>8), byte(host)),
		IPStack: stack,
	}
}

// requestProblem returns the reason why no interface can have a requested address (A52).
func requestProblem(subnet store.Resource, field string, wanted netip.Addr) error {
	block := netip.MustParsePrefix(subnet.Text(field))
	free := block.Masked().Addr()
	for range reservedAddresses {
		free = free.Next()
	}
	switch {
	case !wanted.IsValid():
	case !block.Contains(wanted):
		return invalidRequest("%s is outside subnet %s", wanted, block)
	case wanted.Less(free):
		return invalidRequest("The first %d addresses of a subnet are reserved", reservedAddresses)
	case wanted.Is4() && wanted == SubnetExtent(block).Last:
		return invalidRequest("Cannot request a broadcast address")
	}
	return nil
}

// newStack returns the requested addresses, or else the lowest free addresses of a subnet. It skips
// the first five and, for IPv4, the last one, which the rack reserves (A52).
func newStack(tx *store.Tx, subnet store.Resource, c InterfaceCreate) store.IPStack {
	used := map[string]bool{}
	for nic := range tx.AllInterfaces() {
		for _, address := range nic.Addresses() {
			used[nic.SubnetID+" "+address] = true
		}
	}
	choose := func(field string, wanted netip.Addr) store.Address {
		block := netip.MustParsePrefix(subnet.Text(field))
		address := block.Masked().Addr()
		for n := 0; n < reservedAddresses || used[subnet.ID+" "+address.String()]; n++ {
			address = address.Next()
		}
		switch {
		case wanted.IsValid() && used[subnet.ID+" "+wanted.String()]:
			tx.Check(invalidRequest("The IP address '%s' is not available", wanted))
		case wanted.IsValid():
			address = wanted
		case !block.Contains(address) || address.Is4() && address == SubnetExtent(block).Last:
			tx.Check(invalidRequest("No available %s addresses for interface in subnet '%s' with ID "+
				"'%s'", strings.Replace(field[:4], "ip", "IP", 1), subnet.Name, subnet.ID))
		}
		return store.Address{IP: address.String(), TransitIPs: []string{}}
	}
	var value any
	switch c.Stack {
	case StackV4:
		value = choose("ipv4_block", c.V4)
	case StackV6:
		value = choose("ipv6_block", c.V6)
	default:
		v6 := choose("ipv6_block", c.V6)
		value = store.DualStack{V4: choose("ipv4_block", c.V4), V6: v6}
	}
	return store.IPStack{Type: c.Stack, Value: value}
}

const reservedAddresses = 5

// Interfaces lists the network interfaces of an instance.
func (s Instances) Interfaces(call *Call, ref Ref) ([]store.NetworkInterface, error) {
	return ofInstance(s.Simulation, call, ref, func(tx *store.Tx,
		i store.Instance) []store.NetworkInterface {
		return tx.Interfaces(i.ID)
	})
}

// findInterface finds an interface by its ID, or by its name on an instance.
func (s Instances) findInterface(call *Call, tx *store.Tx, instance Ref, sel store.Selector) (
	nic store.NetworkInterface, i store.Instance) {
	const kind = "instance-network-interface"
	given := instance.Object.Given() || instance.Project.Given()
	switch {
	case sel.ID != "" && given:
		tx.Check(invalidRequest("when providing network_interface as an id instance and project " +
			"should not be specified"))
	case sel.ID == "" && !instance.Object.Given():
		tx.Check(invalidRequest("network_interface should either be a UUID or instance should be " +
			"specified"))
	case sel.ID == "":
		i = lookup(s.Simulation, call, tx, store.Instances, instance)
	}
	for n := range tx.AllInterfaces() {
		if n.ID == sel.ID || n.Name == sel.Name && n.InstanceID == i.ID {
			nic = n
		}
	}
	call.Object = nic.Identity
	if nic.ID == "" {
		tx.Check(notFound(kind, sel))
	}
	s.allow(call, tx, kind, sel)
	return nic, byID(tx, store.Instances, nic.InstanceID)
}

// Interface reads a network interface.
func (s Instances) Interface(call *Call, instance Ref, sel store.Selector) (store.NetworkInterface,
	error) {
	return reading(s.Simulation, func(tx *store.Tx) store.NetworkInterface {
		nic, _ := s.findInterface(call, tx, instance, sel)
		return nic
	})
}

// CreateInterface adds an interface to a stopped instance.
func (s Instances) CreateInterface(call *Call, instance Ref, c InterfaceCreate) (
	store.NetworkInterface, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) store.NetworkInterface {
		if c.Unsupported != "" {
			tx.Check(lacking(c.Unsupported))
		}
		i := lookup(s.Simulation, call, tx, store.Instances, instance)
		nics := tx.Interfaces(i.ID)
		nic := newInterface(tx, i, nics, c)
		switch {
		case i.RunState != store.RunStopped:
			tx.Check(invalidRequest("Instance must be stopped to attach a new network interface"))
		case slices.ContainsFunc(nics, func(n store.NetworkInterface) bool { return n.Name == c.Name }):
			tx.Check(alreadyExists("instance-network-interface", c.Name))
		case len(nics) > 0 && nics[0].VPCID != nic.VPCID:
			tx.Check(invalidRequest("Networking may not span multiple VPCs, but the requested resource " +
				"is associated with another VPC"))
		case len(nics) >= maxInterfaces:
			tx.Check(invalidRequest("May not attach more than %d network interfaces", maxInterfaces))
		}
		call.Object = nic.Identity
		tx.PutInterfaces(i.ID, append(nics, nic))
		return nic
	})
}

// InterfaceUpdate has the new values of an interface; nil keeps the name or the description.
type InterfaceUpdate struct {
	Name, Description *string
	// Primary makes it the instance's primary interface.
	Primary bool
	// Unsupported names a part of it that this simulator does not support.
	Unsupported string
}

// UpdateInterface changes an interface of a stopped instance.
func (s Instances) UpdateInterface(call *Call, instance Ref, sel store.Selector,
	u InterfaceUpdate) (store.NetworkInterface, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) (nic store.NetworkInterface) {
		if u.Unsupported != "" {
			tx.Check(lacking(u.Unsupported))
		}
		found, i := s.findInterface(call, tx, instance, sel)
		if i.RunState != store.RunStopped {
			tx.Check(invalidRequest("Instance must be stopped to update its network interfaces"))
		}
		nics := tx.Interfaces(i.ID)
		for n := range nics {
			if nics[n].ID != found.ID {
				nics[n].Primary = nics[n].Primary && !u.Primary
				continue
			}
			nics[n].Primary = nics[n].Primary || u.Primary
			nics[n].Name = store.Deref(cmp.Or(u.Name, &nics[n].Name))
			nics[n].Description = store.Deref(cmp.Or(u.Description, &nics[n].Description))
			nics[n].Touch()
			nic = nics[n]
		}
		tx.PutInterfaces(i.ID, nics)
		return nic
	})
}

// DeleteInterface removes an interface from a stopped or failed instance.
func (s Instances) DeleteInterface(call *Call, instance Ref, sel store.Selector) error {
	return s.store.Update(func(tx *store.Tx) {
		nic, i := s.findInterface(call, tx, instance, sel)
		nics := tx.Interfaces(i.ID)
		switch {
		case nic.Primary && len(nics) > 1:
			tx.Check(invalidRequest("The primary interface may not be deleted while secondary " +
				"interfaces are still attached"))
		case i.RunState != store.RunStopped && i.RunState != store.RunFailed:
			tx.Check(invalidRequest("Instance must be stopped or failed to detach a network interface"))
		}
		nics = slices.DeleteFunc(nics, func(n store.NetworkInterface) bool { return n.ID == nic.ID })
		tx.PutInterfaces(i.ID, nics)
		failHalfway(call, tx)
	})
}

// ExternalIPs returns the external addresses of an instance. The one for source NAT is first (A65).
func (s Instances) ExternalIPs(call *Call, ref Ref) ([]any, error) {
	return ofInstance(s.Simulation, call, ref, func(tx *store.Tx, i store.Instance) []any {
		ips := []any{}
		for _, n := range within(tx, natIP, i.ID) {
			delete(n.Fields, "instance_id")
			ips = append(ips, n.Fields)
		}
		for _, r := range within(tx, ephemeralIP, i.ID) {
			ips = append(ips, ephemeralOf(r))
		}
		for _, r := range attachedTo(tx, FloatingIP, i.ID) {
			r.Fields["kind"] = kindFloating
			ips = append(ips, r)
		}
		return ips
	})
}
