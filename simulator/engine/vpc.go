package engine

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// This file has the rules of VPCs, subnets, routers, routes, gateways and firewall rules.

// createDefaultVPC gives a new project its network (A64).
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
	if !prefix.Addr().IsPrivate() || prefix.Bits() != 48 {
		c.Check(invalidRequest("VPC IPv6 address prefixes must be in the Unique Local Address range " +
			"`fd00::/48` (RFD 4193)"))
	}
	c.record.Fields["ipv6_prefix"] = value
}

func setSystemRouter(c *Change, _ any) {
	c.record.Fields["system_router_id"] = uuid.NewString()
	if c.derive {
		c.record.Fields["system_router_id"] = store.DerivedID(Router.Name, c.record.ID)
	}
}

// createNetwork gives a new VPC its router with two routes, a subnet, firewall rules and a gateway.
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
func (s Resources) FirewallRules(call *Call, scope Scope, vpc store.Selector) ([]store.Resource,
	error) {
	return reading(s.Simulation, func(tx *store.Tx) []store.Resource {
		return within(tx, FirewallRule, s.lookup(call, tx, VPC, scope, vpc).ID)
	})
}

const maxRules = 1024

// ReplaceFirewallRules replaces all rules of a VPC by new ones.
func (s Resources) ReplaceFirewallRules(call *Call, scope Scope, vpc store.Selector,
	rules []ResourceInput) ([]store.Resource, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) []store.Resource {
		c := s.change(call, tx, VPC, scope, vpc)
		tx.Check(rulesProblem(c.record.Name, rules))
		for rule := range c.each(FirewallRule, c.record.ID) {
			rule.drop()
		}
		for _, rule := range rules {
			c.create(FirewallRule, c.record, rule)
		}
		return within(tx, FirewallRule, c.record.ID)
	})
}

func rulesProblem(vpc string, rules []ResourceInput) error {
	seen := map[string]bool{}
	for _, rule := range rules {
		if seen[*rule.Name] {
			return invalidValue("rules", "Rule names must be unique. Duplicates: [%q]", *rule.Name)
		}
		seen[*rule.Name] = true
	}
	if len(rules) > maxRules {
		return invalidValue("rules", "max length %d", maxRules)
	}
	for _, rule := range rules {
		hosts, _ := rule.Values["filters"].(map[string]any)["hosts"].([]any)
		for what, list := range map[string][]any{
			"target": rule.Values["targets"].([]any), "host filter": hosts} {
			for _, one := range list {
				if of := one.(map[string]any); of["type"] == "vpc" && of["value"] != vpc {
					return invalidRequest("cross-VPC firewall %s unsupported", what)
				}
			}
		}
	}
	return nil
}

func setCustomRouter(c *Change, value any) {
	c.record.Fields["custom_router_id"] = nil
	if value == nil {
		return
	}
	router := find(c.Tx, Router.Table(), c.parent.ID, value.(store.Selector))
	switch {
	case router.Text("vpc_id") != c.parent.ID:
		c.Check(invalidRequest("a router can only be attached to a subnet when both belong to the " +
			"same VPC"))
	case router.Text("kind") == routerSystem:
		c.Check(invalidRequest("cannot attach a system router to a VPC subnet"))
	}
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
	if !block.Addr().IsPrivate() {
		c.Check(invalidRequest("VPC Subnet IPv4 address ranges must be from a private range"))
	}
	if block.Bits() < minSubnetBits || block.Bits() > maxSubnetBits {
		c.Check(invalidRequest("VPC Subnet IPv4 address ranges must have prefix length between %d and "+
			"%d, inclusive", minSubnetBits, maxSubnetBits))
	}
	c.record.Fields["ipv4_block"] = value
}

// setIPv6Block checks the block or chooses one, and refuses blocks that overlap with another
// subnet's.
func setIPv6Block(c *Change, value any) {
	vpc := netip.MustParsePrefix(c.parent.Text("ipv6_prefix"))
	if value == nil {
		id, address := uuid.MustParse(c.record.ID), vpc.Addr().As16()
		copy(address[6:8], id[:])
		value = netip.PrefixFrom(netip.AddrFrom16(address), subnetV6Bits).String()
	}
	block := netip.MustParsePrefix(value.(string))
	if !vpc.Contains(block.Addr()) || block.Bits() != subnetV6Bits {
		c.Check(invalidRequest("VPC Subnet IPv6 address range '%s' is not valid for VPC with IPv6 "+
			"prefix '%s'", block, vpc))
	}
	c.record.Fields["ipv6_block"] = value
	for other := range c.each(Subnet, c.parent.ID) {
		for _, field := range []string{"ipv4_block", "ipv6_block"} {
			own := netip.MustParsePrefix(c.record.Text(field))
			if own.Overlaps(netip.MustParsePrefix(other.record.Text(field))) {
				c.Check(invalidRequest("IP address range '%s' conflicts with an existing subnet", own))
			}
		}
	}
}

// interfaceIn returns the name of an interface in a subnet, or "".
func interfaceIn(c *Change) (name string) {
	for nic := range c.AllInterfaces() {
		if nic.SubnetID == c.old.ID {
			name = nic.Name
		}
	}
	return name
}

// Interfaces lists the network interfaces in a subnet.
func (s Resources) Interfaces(call *Call, scope Scope, subnet store.Selector) (
	[]store.NetworkInterface, error) {
	return reading(s.Simulation, func(tx *store.Tx) (nics []store.NetworkInterface) {
		r := s.lookup(call, tx, Subnet, scope, subnet)
		for nic := range tx.AllInterfaces() {
			if nic.SubnetID == r.ID {
				nics = append(nics, nic)
			}
		}
		return nics
	})
}

// subnetRoute returns the name and the other fields of the route to a subnet.
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

// routeToSubnet iterates over the changes of the route to the subnet.
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

// The kinds of routers and routes.
const (
	routerSystem = "system"
	routeCustom  = "custom"
	routeDefault = "default"
	routeSubnet  = "vpc_subnet"
)

// routeWords are the rack's words for the kinds of routes in its errors.
var routeWords = map[string]string{routeCustom: "Custom", routeDefault: "Default",
	routeSubnet: "VpcSubnet"}

// ofSystem returns the name of a router that the rack itself has created, or "".
func ofSystem(c *Change) string {
	if c.old.Text("kind") == routerSystem {
		return c.old.Name
	}
	return ""
}

func setRouteKind(c *Change, value any) {
	if value == routeCustom && c.parent.Text("kind") == routerSystem {
		c.Check(invalidRequest("user-provided routes cannot be added to a system router"))
	}
	c.record.Fields["kind"] = value
}

// setTarget checks the target of a route together with its destination. Only the rack itself
// creates routes to subnets, which need no check.
func setTarget(c *Change, value any) {
	kind := c.record.Text("kind")
	from, to := c.record.Fields["destination"].(map[string]any), value.(map[string]any)
	fromIP := from["type"] == "ip" || from["type"] == "ip_net"
	switch {
	case kind == routeSubnet:
	case fromIP && to["type"] == "ip":
		if isV4(from["value"]) != isV4(to["value"]) {
			c.Check(invalidRequest("cannot mix explicit IPv4 and IPv6 addresses between destination " +
				"and target"))
		}
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
	switch {
	case kind == routeCustom:
		return
	case in == nil:
		c.Check(invalidRequest("DELETE not allowed on system routes"))
	case kind != routeDefault:
		c.Check(invalidRequest("routes of type %s within the system router are not modifiable",
			routeWords[kind]))
	}
	from, to := c.old.Fields["destination"].(map[string]any),
		in.Values["destination"].(map[string]any)
	if in.Name != nil || in.Description != nil || from["type"] != to["type"] ||
		from["value"] != to["value"] {
		c.Check(invalidRequest("the destination and metadata of a Default route cannot be changed"))
	}
}

// defaultGateway returns the name of the default gateway, to which the rack attaches the silo's
// default pool, or "".
func defaultGateway(c *Change) string {
	if c.old.Name == defaultNetwork && !c.cascade {
		return c.old.Name
	}
	return ""
}
