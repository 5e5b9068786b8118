package engine

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
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
	// Unsupported names a field of the request that the simulator lacks; if set, the request fails.
	Unsupported string
}

// The IP stacks that an interface can have.
const (
	StackV4   = "v4"
	StackV6   = "v6"
	StackDual = "dual_stack"
)

// DefaultInterface is the interface of an instance whose request names no interface (A52).
var DefaultInterface = InterfaceCreate{
	Name: "net0", Description: "default primary interface", Stack: StackDual,
	VPC: defaultNetwork, Subnet: defaultNetwork,
}

const (
	// defaultNetwork is the name of a new project's VPC and of a new VPC's subnet (A64).
	defaultNetwork = "default"
	maxInterfaces  = 8
)

// checkInterfaces checks a request's interfaces before any part of the instance is created (A64).
func checkInterfaces(tx *store.Tx, create []InterfaceCreate) {
	tx.Refuse(len(create) > maxInterfaces,
		invalidRequest("An instance may not have more than %d network interfaces", maxInterfaces))
	vpcs := map[string]bool{}
	for _, c := range create {
		vpcs[c.VPC] = true
	}
	tx.Refuse(create != nil && len(vpcs) != 1,
		invalidRequest("All interfaces must be in the same VPC"))
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

// newInterface returns a new interface of i. It refuses a second interface in a subnet (A64).
func newInterface(tx *store.Tx, i store.Instance, others []store.NetworkInterface,
	c InterfaceCreate) store.NetworkInterface {
	vpc := find(tx, VPC.Table(), i.ProjectID, store.Selector{Name: c.VPC})
	subnet := find(tx, Subnet.Table(), vpc.ID, store.Selector{Name: c.Subnet})
	checkAddress(tx, subnet, "ipv4_block", c.V4)
	checkAddress(tx, subnet, "ipv6_block", c.V6)
	tx.Refuse(slices.ContainsFunc(others,
		func(other store.NetworkInterface) bool { return other.SubnetID == subnet.ID }),
		invalidRequest("Each interface must be in a distinct VPC Subnet"))
	stack := newStack(tx, subnet, c)
	host := tx.NextHost()
	return store.NetworkInterface{
		Identity:   store.NewIdentity(uuid.NewString(), c.Name, c.Description),
		InstanceID: i.ID, Primary: len(others) == 0, VPCID: vpc.ID, SubnetID: subnet.ID,
		MAC:     fmt.Sprintf(macFormat, byte(host>>8), byte(host)),
		IPStack: stack,
	}
}

// checkAddress refuses a requested address that no interface can have (A52).
func checkAddress(tx *store.Tx, subnet store.Resource, field string, wanted netip.Addr) {
	if !wanted.IsValid() {
		return
	}
	block := netip.MustParsePrefix(subnet.Text(field))
	free := block.Masked().Addr()
	for range reservedAddresses {
		free = free.Next()
	}
	tx.Refuse(!block.Contains(wanted), invalidRequest("%s is outside subnet %s", wanted, block))
	tx.Refuse(wanted.Less(free),
		invalidRequest("The first %d addresses of a subnet are reserved", reservedAddresses))
	tx.Refuse(wanted.Is4() && wanted == SubnetExtent(block).Last,
		invalidRequest("Cannot request a broadcast address"))
}

// newStack returns the addresses of an interface: the requested ones, or the subnet's lowest free
// ones. The rack reserves the first five addresses and, for IPv4, the last address (A52).
func newStack(tx *store.Tx, subnet store.Resource, c InterfaceCreate) store.IPStack {
	used := map[string]bool{}
	for nic := range tx.AllInterfaces() {
		for _, address := range nic.Addresses() {
			used[nic.SubnetID+" "+address] = true
		}
	}
	choose := func(field string, wanted netip.Addr) map[string]any {
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
		return map[string]any{"ip": address.String(), "transit_ips": []string{}}
	}
	var value map[string]any
	switch c.Stack {
	case StackV4:
		value = choose("ipv4_block", c.V4)
	case StackV6:
		value = choose("ipv6_block", c.V6)
	default:
		v6 := choose("ipv6_block", c.V6)
		value = map[string]any{"v4": choose("ipv4_block", c.V4), "v6": v6}
	}
	return store.IPStack{Type: c.Stack, Value: value}
}

const reservedAddresses = 5

// Interfaces lists the network interfaces of an instance.
func (s Instances) Interfaces(call *Call, tx *store.Tx) []store.NetworkInterface {
	return tx.Interfaces(lookup(s.Simulation, call, tx, store.Instances).ID)
}

func (s Instances) findInterface(call *Call, tx *store.Tx) (nic store.NetworkInterface,
	i store.Instance) {
	const kind = "instance-network-interface"
	sel, named := call.Named["interface"], call.Named["instance"].Given()
	given := named || call.Named["project"].Given()
	tx.Refuse(sel.ID != "" && given, invalidRequest("when providing network_interface as an id "+
		"instance and project should not be specified"))
	tx.Refuse(sel.ID == "" && !named, invalidRequest("network_interface should "+
		"either be a UUID or instance should be specified"))
	if sel.ID == "" {
		i = lookup(s.Simulation, call, tx, store.Instances)
	}
	for n := range tx.AllInterfaces() {
		if n.ID == sel.ID || n.Name == sel.Name && n.InstanceID == i.ID {
			nic = n
		}
	}
	call.Object = nic.Identity
	tx.Refuse(nic.ID == "", notFound(kind, sel))
	s.allow(call, tx, kind, sel)
	return nic, byID(tx, store.Instances, nic.InstanceID)
}

// Interface reads a network interface.
func (s Instances) Interface(call *Call, tx *store.Tx) store.NetworkInterface {
	nic, _ := s.findInterface(call, tx)
	return nic
}

// CreateInterface adds an interface to a stopped instance. The body is an [InterfaceCreate].
func (s Instances) CreateInterface(call *Call, tx *store.Tx) store.NetworkInterface {
	c := call.Body.(InterfaceCreate)
	tx.Refuse(c.Unsupported != "", lacking(c.Unsupported))
	i := lookup(s.Simulation, call, tx, store.Instances)
	nics := tx.Interfaces(i.ID)
	nic := newInterface(tx, i, nics, c)
	tx.Refuse(i.RunState != store.RunStopped,
		invalidRequest("Instance must be stopped to attach a new network interface"))
	tx.Refuse(slices.ContainsFunc(nics,
		func(n store.NetworkInterface) bool { return n.Name == c.Name }),
		alreadyExists("instance-network-interface", c.Name))
	tx.Refuse(len(nics) > 0 && nics[0].VPCID != nic.VPCID, invalidRequest("Networking may not span "+
		"multiple VPCs, but the requested resource is associated with another VPC"))
	tx.Refuse(len(nics) >= maxInterfaces,
		invalidRequest("May not attach more than %d network interfaces", maxInterfaces))
	call.Object = nic.Identity
	tx.PutInterfaces(i.ID, append(nics, nic))
	return nic
}

// InterfaceUpdate has the new values of an interface; nil keeps the name or the description.
type InterfaceUpdate struct {
	Name, Description *string
	// Primary makes the interface the primary one of its instance.
	Primary bool
	// Unsupported names a field of the request that the simulator lacks; if set, the request fails.
	Unsupported string
}

// UpdateInterface applies an [InterfaceUpdate] to an interface of a stopped instance.
func (s Instances) UpdateInterface(call *Call, tx *store.Tx) (nic store.NetworkInterface) {
	u := call.Body.(InterfaceUpdate)
	tx.Refuse(u.Unsupported != "", lacking(u.Unsupported))
	found, i := s.findInterface(call, tx)
	tx.Refuse(i.RunState != store.RunStopped,
		invalidRequest("Instance must be stopped to update its network interfaces"))
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
}

// DeleteInterface removes an interface from a stopped or failed instance.
func (s Instances) DeleteInterface(call *Call, tx *store.Tx) {
	nic, i := s.findInterface(call, tx)
	nics := tx.Interfaces(i.ID)
	tx.Refuse(nic.Primary && len(nics) > 1, invalidRequest("The primary interface may not be "+
		"deleted while secondary interfaces are still attached"))
	tx.Refuse(i.RunState != store.RunStopped && i.RunState != store.RunFailed,
		invalidRequest("Instance must be stopped or failed to detach a network interface"))
	nics = slices.DeleteFunc(nics, func(n store.NetworkInterface) bool { return n.ID == nic.ID })
	tx.PutInterfaces(i.ID, nics)
}

// ExternalIPs returns the external addresses of an instance, first the one for source NAT (A65).
func (s Instances) ExternalIPs(call *Call, tx *store.Tx) []any {
	id := lookup(s.Simulation, call, tx, store.Instances).ID
	var ips []any
	for _, n := range within(tx, natIP, id) {
		delete(n.Fields, "instance_id")
		ips = append(ips, n.Fields)
	}
	for _, r := range within(tx, ephemeralIP, id) {
		ips = append(ips, ephemeralOf(r))
	}
	for _, r := range attachedTo(tx, FloatingIP, id) {
		r.Fields["kind"] = kindFloating
		ips = append(ips, r)
	}
	return ips
}

// createDefaultVPC gives a new project its default VPC (A64).
func createDefaultVPC(c *Change) {
	c.create(VPC, c.record,
		named(defaultNetwork, "Default VPC", map[string]any{"dns_name": defaultNetwork}))
}

func setVPCPrefix(c *Change, value any) {
	if value == nil {
		id := uuid.MustParse(c.record.ID)
		address := [16]byte{0: 0xfd}
		copy(address[1:6], id[:])
		value = netip.PrefixFrom(netip.AddrFrom16(address), 48).String()
	}
	prefix := netip.MustParsePrefix(value.(string))
	c.Refuse(!prefix.Addr().IsPrivate() || prefix.Bits() != 48, invalidRequest("VPC IPv6 address "+
		"prefixes must be in the Unique Local Address range `fd00::/48` (RFD 4193)"))
	c.record.Fields["ipv6_prefix"] = value
}

func setSystemRouter(c *Change, _ any) {
	c.record.Fields["system_router_id"] = uuid.NewString()
	if c.derive {
		c.record.Fields["system_router_id"] = store.DerivedID(Router.Name, c.record.ID)
	}
}

func createNetwork(c *Change) {
	system := named("system",
		"Routes are automatically added to this router as VPC subnets are created",
		map[string]any{"kind": routerSystem})
	system.id = c.record.Text("system_router_id")
	router := c.create(Router, c.record, system)
	for name, net := range map[string]string{"default-v4": "0.0.0.0/0", "default-v6": "::/0"} {
		c.create(Route, router, named(name, "The default route of a vpc", map[string]any{
			"kind": routeDefault, "target": typed("internet_gateway", defaultNetwork),
			"destination": typed("ip_net", net)}))
	}
	prefix := netip.MustParsePrefix(c.record.Text("ipv6_prefix"))
	c.create(Subnet, c.record, named(defaultNetwork, "The default subnet for "+c.record.Name,
		map[string]any{"ipv4_block": "172.30.0.0/22",
			"ipv6_block": netip.PrefixFrom(prefix.Addr(), subnetV6Bits).String()}))
	for _, rule := range defaultRules(c.record.Name) {
		c.create(FirewallRule, c.record, rule)
	}
	c.create(Gateway, c.record,
		named(defaultNetwork, "Automatically created default VPC gateway", nil))
}

func typed(kind string, value any) map[string]any {
	return map[string]any{"type": kind, "value": value}
}

func defaultRules(vpc string) []ResourceInput {
	rule := func(name, description string, filters map[string]any) ResourceInput {
		all := map[string]any{"hosts": nil, "ports": nil, "protocols": nil}
		maps.Copy(all, filters)
		return named(name, description, map[string]any{"status": "enabled", "direction": "inbound",
			"targets": []any{typed("vpc", vpc)}, "filters": all, "action": "allow",
			"priority": 65534})
	}
	return []ResourceInput{
		rule("allow-internal-inbound",
			"allow inbound traffic to all instances within the VPC if originated within the VPC",
			map[string]any{"hosts": []any{typed("vpc", vpc)}}),
		rule("allow-ssh", "allow inbound TCP connections on port 22 from anywhere",
			map[string]any{"ports": []any{"22"},
				"protocols": []any{map[string]any{"type": "tcp"}}}),
		rule("allow-icmp", "allow inbound ICMP traffic from anywhere",
			map[string]any{"protocols": []any{typed("icmp", nil)}}),
	}
}

// FirewallRules reads the firewall rules of a VPC, ordered by name.
func (s Resources) FirewallRules(call *Call, tx *store.Tx) Item {
	vpc := s.lookup(call, tx, VPC).ID
	return item(vpc, map[string]any{"rules": within(tx, FirewallRule, vpc)})
}

const maxRules = 1024

// ReplaceFirewallRules replaces all rules of a VPC. The body is a list of [ResourceInput].
func (s Resources) ReplaceFirewallRules(call *Call, tx *store.Tx) Item {
	rules := call.Body.([]ResourceInput)
	c := s.change(call, tx, VPC)
	checkRules(tx, c.record.Name, rules)
	for rule := range c.each(FirewallRule, c.record.ID) {
		rule.drop()
	}
	for _, rule := range rules {
		c.create(FirewallRule, c.record, rule)
	}
	return s.FirewallRules(call, tx)
}

func checkRules(tx *store.Tx, vpc string, rules []ResourceInput) {
	seen := map[string]bool{}
	for _, rule := range rules {
		tx.Refuse(seen[*rule.Name],
			invalidValue("rules", "Rule names must be unique. Duplicates: [%q]", *rule.Name))
		seen[*rule.Name] = true
	}
	tx.Refuse(len(rules) > maxRules, invalidValue("rules", "max length %d", maxRules))
	for _, rule := range rules {
		hosts, _ := rule.Values["filters"].(map[string]any)["hosts"].([]any)
		for what, list := range map[string][]any{
			"target": rule.Values["targets"].([]any), "host filter": hosts} {
			for _, one := range list {
				of := one.(map[string]any)
				tx.Refuse(of["type"] == "vpc" && of["value"] != vpc,
					invalidRequest("cross-VPC firewall %s unsupported", what))
			}
		}
	}
}

func setCustomRouter(c *Change, value any) {
	c.record.Fields["custom_router_id"] = nil
	if value == nil {
		return
	}
	router := find(c.Tx, Router.Table(), c.parent.ID, value.(store.Selector))
	c.Refuse(router.Text("vpc_id") != c.parent.ID,
		invalidRequest("a router can only be attached to a subnet when both belong to the same VPC"))
	c.Refuse(router.Text("kind") == routerSystem,
		invalidRequest("cannot attach a system router to a VPC subnet"))
	c.record.Fields["custom_router_id"] = router.ID
}

func clearCustomRouter(c *Change) {
	for subnet := range c.each(Subnet, c.old.Text("vpc_id")) {
		if subnet.record.Text("custom_router_id") == c.old.ID {
			subnet.record.Fields["custom_router_id"] = nil
			subnet.put()
		}
	}
}

const (
	minSubnetBits, maxSubnetBits = 8, 26
	subnetV6Bits                 = 64
)

func setIPv4Block(c *Change, value any) {
	block := netip.MustParsePrefix(value.(string))
	c.Refuse(!block.Addr().IsPrivate(),
		invalidRequest("VPC Subnet IPv4 address ranges must be from a private range"))
	c.Refuse(block.Bits() < minSubnetBits || block.Bits() > maxSubnetBits,
		invalidRequest("VPC Subnet IPv4 address ranges must have prefix length between %d and %d, "+
			"inclusive", minSubnetBits, maxSubnetBits))
	c.record.Fields["ipv4_block"] = value
}

func setIPv6Block(c *Change, value any) {
	vpc := netip.MustParsePrefix(c.parent.Text("ipv6_prefix"))
	if value == nil {
		id, address := uuid.MustParse(c.record.ID), vpc.Addr().As16()
		copy(address[6:8], id[:])
		value = netip.PrefixFrom(netip.AddrFrom16(address), subnetV6Bits).String()
	}
	block := netip.MustParsePrefix(value.(string))
	c.Refuse(!vpc.Contains(block.Addr()) || block.Bits() != subnetV6Bits,
		invalidRequest("VPC Subnet IPv6 address range '%s' is not valid for VPC with IPv6 prefix '%s'",
			block, vpc))
	c.record.Fields["ipv6_block"] = value
	for other := range c.each(Subnet, c.parent.ID) {
		for _, field := range []string{"ipv4_block", "ipv6_block"} {
			own := netip.MustParsePrefix(c.record.Text(field))
			c.Refuse(own.Overlaps(netip.MustParsePrefix(other.record.Text(field))),
				invalidRequest("IP address range '%s' conflicts with an existing subnet", own))
		}
	}
}

func interfaceIn(c *Change) (name string, found bool) {
	for nic := range c.AllInterfaces() {
		found = found || nic.SubnetID == c.old.ID
	}
	return "", found
}

// Interfaces lists the network interfaces in a subnet.
func (s Resources) Interfaces(call *Call, tx *store.Tx) (nics []store.NetworkInterface) {
	r := s.lookup(call, tx, Subnet)
	for nic := range tx.AllInterfaces() {
		if nic.SubnetID == r.ID {
			nics = append(nics, nic)
		}
	}
	return nics
}

func subnetRoute(subnet store.Resource) (name string, values map[string]any) {
	name = subnet.Name
	if name == "default-v4" || name == "default-v6" {
		name = fmt.Sprintf("conflict-%s-%s", name, subnet.ID)
	}
	return name, map[string]any{"kind": routeSubnet, "target": typed("subnet", subnet.Name),
		"destination": typed("subnet", subnet.Name)}
}

func createSubnetRoute(c *Change) {
	name, values := subnetRoute(c.record)
	c.create(Route, c.systemRouter(c.parent.ID),
		named(name, "System-managed VPC Subnet route.", values))
}

func (c *Change) systemRouter(vpcID string) store.Resource {
	return byID(c.Tx, Router.Table(), byID(c.Tx, VPC.Table(), vpcID).Text("system_router_id"))
}

// routeToSubnet yields the system router's route to the subnet.
func (c *Change) routeToSubnet() iter.Seq[*Change] {
	return func(yield func(*Change) bool) {
		name, _ := subnetRoute(c.old)
		for route := range c.each(Route, c.systemRouter(c.old.Text("vpc_id")).ID) {
			if route.record.Name == name && route.record.Text("kind") == routeSubnet && !yield(route) {
				return
			}
		}
	}
}

func renameSubnetRoute(c *Change) {
	for route := range c.routeToSubnet() {
		route.record.Name, route.record.Fields = subnetRoute(c.record)
		route.record.Fields[Route.In] = route.old.Text(Route.In)
		route.put()
	}
}

func deleteSubnetRoute(c *Change) {
	for route := range c.routeToSubnet() {
		route.drop()
	}
}

const (
	routerSystem = "system"
	routeCustom  = "custom"
	routeDefault = "default"
	routeSubnet  = "vpc_subnet"
)

var routeWords = map[string]string{routeCustom: "Custom", routeDefault: "Default",
	routeSubnet: "VpcSubnet"}

// ofSystem reports whether a router was created by the rack itself.
func ofSystem(c *Change) (string, bool) { return "", c.old.Text("kind") == routerSystem }

func setRouteKind(c *Change, value any) {
	c.Refuse(value == routeCustom && c.parent.Text("kind") == routerSystem,
		invalidRequest("user-provided routes cannot be added to a system router"))
	c.record.Fields["kind"] = value
}

// setTarget does not check a route of the kind routeSubnet, because only the rack creates these.
func setTarget(c *Change, value any) {
	kind := c.record.Text("kind")
	from, to := c.record.Fields["destination"].(map[string]any), value.(map[string]any)
	fromIP := from["type"] == "ip" || from["type"] == "ip_net"
	switch {
	case kind == routeSubnet:
	case fromIP && to["type"] == "ip":
		c.Refuse(isV4(from["value"]) != isV4(to["value"]),
			invalidRequest("cannot mix explicit IPv4 and IPv6 addresses between destination and target"))
	case from["type"] == "vpc", to["type"] == "vpc":
		c.Check(invalidRequest("users cannot specify VPCs as a destination or target in %s routes",
			routeWords[kind]))
	case to["type"] == "subnet":
		c.Check(invalidRequest("subnets cannot be used as a target in %s routers", routeWords[kind]))
	}
	c.record.Fields["target"] = value
}

func isV4(text any) bool {
	s, _ := text.(string)
	if prefix, err := netip.ParsePrefix(s); err == nil {
		return prefix.Addr().Is4()
	}
	address, err := netip.ParseAddr(s)
	return err == nil && address.Is4()
}

func permitRoute(c *Change, in *ResourceInput) {
	kind := c.old.Text("kind")
	if kind == routeCustom {
		return
	}
	c.Refuse(in == nil, invalidRequest("DELETE not allowed on system routes"))
	c.Refuse(kind != routeDefault, invalidRequest("routes of type %s within the system router are "+
		"not modifiable", routeWords[kind]))
	from, to := c.old.Fields["destination"].(map[string]any),
		in.Values["destination"].(map[string]any)
	c.Refuse(in.Name != nil || in.Description != nil || from["type"] != to["type"] ||
		from["value"] != to["value"],
		invalidRequest("the destination and metadata of a Default route cannot be changed"))
}

// defaultGateway forbids the deletion of the gateway to which the rack attaches the default pool,
// unless the request has the option "cascade".
func defaultGateway(c *Change) (string, bool) {
	return "", c.old.Name == defaultNetwork && !c.cascade
}
