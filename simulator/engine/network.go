package engine

import (
	"cmp"
	"errors"
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
	create []InterfaceCreate) ([]store.NetworkInterface, error) {
	nics := []store.NetworkInterface{}
	for _, c := range create {
		nic, err := newInterface(tx, i, nics, c)
		if err != nil {
			return nil, err
		}
		nic.ID = store.DerivedID("interface", i.ID, c.Name)
		nics = append(nics, nic)
	}
	return nics, nil
}

// newInterface creates a further interface of an instance. Each interface is in a different subnet
// (A64).
func newInterface(tx *store.Tx, i store.Instance, others []store.NetworkInterface,
	c InterfaceCreate) (nic store.NetworkInterface, err error) {
	vpc, err := find(tx, VPC.Table(), i.ProjectID, store.Selector{Name: c.VPC})
	if err != nil {
		return nic, err
	}
	subnet, err := find(tx, Subnet.Table(), vpc.ID, store.Selector{Name: c.Subnet})
	if err != nil {
		return nic, err
	}
	if err := cmp.Or(requestProblem(subnet, "ipv4_block", c.V4),
		requestProblem(subnet, "ipv6_block", c.V6)); err != nil {
		return nic, err
	}
	if slices.ContainsFunc(others, func(other store.NetworkInterface) bool {
		return other.SubnetID == subnet.ID
	}) {
		return nic, invalidRequest("Each interface must be in a distinct VPC Subnet")
	}
	stack, err := newStack(tx, subnet, c)
	if err != nil {
		return nic, err
	}
	host, err := tx.NextHost()
	return store.NetworkInterface{
		Identity:   store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		InstanceID: i.ID, Primary: len(others) == 0, VPCID: vpc.ID, SubnetID: subnet.ID,
		MAC:     fmt.Sprintf(macFormat, byte(host>>8), byte(host)),
		IPStack: stack,
	}, err
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
func newStack(tx *store.Tx, subnet store.Resource, c InterfaceCreate) (store.IPStack, error) {
	used := map[string]bool{}
	err := tx.EachInterface(func(nic store.NetworkInterface) {
		for _, address := range nic.Addresses() {
			used[nic.SubnetID+" "+address] = true
		}
	})
	choose := func(field string, wanted netip.Addr) store.Address {
		block := netip.MustParsePrefix(subnet.Text(field))
		address := block.Masked().Addr()
		for n := 0; n < reservedAddresses || used[subnet.ID+" "+address.String()]; n++ {
			address = address.Next()
		}
		switch {
		case wanted.IsValid() && used[subnet.ID+" "+wanted.String()]:
			err = invalidRequest("The IP address '%s' is not available", wanted)
		case wanted.IsValid():
			address = wanted
		case !block.Contains(address) || address.Is4() && address == SubnetExtent(block).Last:
			err = invalidRequest("No available %s addresses for interface in subnet '%s' with ID '%s'",
				strings.Replace(field[:4], "ip", "IP", 1), subnet.Name, subnet.ID)
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
		value = store.DualStack{V4: choose("ipv4_block", c.V4), V6: choose("ipv6_block", c.V6)}
	}
	return store.IPStack{Type: c.Stack, Value: value}, err
}

const reservedAddresses = 5

// Interfaces lists the network interfaces of an instance.
func (s Instances) Interfaces(call *Call, ref Ref) ([]store.NetworkInterface, error) {
	return ofInstance(s.Simulation, call, ref, func(tx *store.Tx, i store.Instance) (
		[]store.NetworkInterface, error) {
		return tx.Interfaces(i.ID)
	})
}

// findInterface finds an interface by its ID, or by its name on an instance.
func (s Instances) findInterface(call *Call, tx *store.Tx, instance Ref, sel store.Selector) (
	nic store.NetworkInterface, i store.Instance, err error) {
	const kind = "instance-network-interface"
	given := instance.Object.Given() || instance.Project.Given()
	switch {
	case sel.ID != "" && given:
		return nic, i, invalidRequest("when providing network_interface as an id instance and " +
			"project should not be specified")
	case sel.ID == "" && !instance.Object.Given():
		return nic, i, invalidRequest("network_interface should either be a UUID or instance should " +
			"be specified")
	case sel.ID == "":
		if i, err = lookup(s.Simulation, call, tx, store.Instances, instance); err != nil {
			return nic, i, err
		}
	}
	err = tx.EachInterface(func(n store.NetworkInterface) {
		if n.ID == sel.ID || n.Name == sel.Name && n.InstanceID == i.ID {
			nic = n
		}
	})
	if err == nil && nic.ID == "" {
		err = notFound(kind, sel)
	}
	if err == nil {
		i, err = find(tx, store.Instances, "", store.Selector{ID: nic.InstanceID})
	}
	if err == nil {
		err = s.allow(call, kind, sel)
	}
	call.Object = nic.Identity
	return nic, i, err
}

// Interface reads a network interface.
func (s Instances) Interface(call *Call, instance Ref, sel store.Selector) (store.NetworkInterface,
	error) {
	return reading(s.Simulation, func(tx *store.Tx) (store.NetworkInterface, error) {
		nic, _, err := s.findInterface(call, tx, instance, sel)
		return nic, err
	})
}

// CreateInterface adds an interface to a stopped instance.
func (s Instances) CreateInterface(call *Call, instance Ref, c InterfaceCreate) (
	nic store.NetworkInterface, err error) {
	if c.Unsupported != "" {
		return nic, lacking(c.Unsupported)
	}
	err = s.store.Update(func(tx *store.Tx) error {
		i, err := lookup(s.Simulation, call, tx, store.Instances, instance)
		if err != nil {
			return err
		}
		nics, err := tx.Interfaces(i.ID)
		if err != nil {
			return err
		}
		if nic, err = newInterface(tx, i, nics, c); err != nil {
			return err
		}
		switch {
		case i.RunState != store.RunStopped:
			return invalidRequest("Instance must be stopped to attach a new network interface")
		case slices.ContainsFunc(nics, func(n store.NetworkInterface) bool { return n.Name == c.Name }):
			return alreadyExists("instance-network-interface", c.Name)
		case len(nics) > 0 && nics[0].VPCID != nic.VPCID:
			return invalidRequest("Networking may not span multiple VPCs, but the requested resource " +
				"is associated with another VPC")
		case len(nics) >= maxInterfaces:
			return invalidRequest("May not attach more than %d network interfaces", maxInterfaces)
		}
		call.Object = nic.Identity
		return errors.Join(tx.PutInterfaces(i.ID, append(nics, nic)), failHalfway(call))
	})
	return nic, err
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
	u InterfaceUpdate) (nic store.NetworkInterface, err error) {
	if u.Unsupported != "" {
		return nic, lacking(u.Unsupported)
	}
	err = s.store.Update(func(tx *store.Tx) error {
		found, i, err := s.findInterface(call, tx, instance, sel)
		if err == nil && i.RunState != store.RunStopped {
			err = invalidRequest("Instance must be stopped to update its network interfaces")
		}
		if err != nil {
			return err
		}
		nics, err := tx.Interfaces(i.ID)
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
		return errors.Join(err, tx.PutInterfaces(i.ID, nics), failHalfway(call))
	})
	return nic, err
}

// DeleteInterface removes an interface from a stopped or failed instance.
func (s Instances) DeleteInterface(call *Call, instance Ref, sel store.Selector) error {
	return s.store.Update(func(tx *store.Tx) error {
		nic, i, err := s.findInterface(call, tx, instance, sel)
		if err != nil {
			return err
		}
		nics, err := tx.Interfaces(i.ID)
		switch {
		case err != nil:
			return err
		case nic.Primary && len(nics) > 1:
			return invalidRequest("The primary interface may not be deleted while secondary interfaces " +
				"are still attached")
		case i.RunState != store.RunStopped && i.RunState != store.RunFailed:
			return invalidRequest("Instance must be stopped or failed to detach a network interface")
		}
		nics = slices.DeleteFunc(nics, func(n store.NetworkInterface) bool { return n.ID == nic.ID })
		return errors.Join(tx.PutInterfaces(i.ID, nics), failHalfway(call))
	})
}

// ExternalIPs returns the external addresses of an instance. The one for source NAT is first (A65).
func (s Instances) ExternalIPs(call *Call, ref Ref) ([]any, error) {
	return ofInstance(s.Simulation, call, ref, func(tx *store.Tx, i store.Instance) ([]any, error) {
		ips := []any{}
		nat, err := natOf(tx, i.ID)
		for _, n := range nat {
			delete(n.Fields, "instance_id")
			ips = append(ips, n.Fields)
		}
		floating, ephemeral, found := externalIPs(tx, i.ID)
		for _, r := range ephemeral {
			ips = append(ips, ephemeralOf(r))
		}
		for _, r := range floating {
			r.Fields["kind"] = kindFloating
			ips = append(ips, r)
		}
		return ips, errors.Join(err, found)
	})
}
