package engine

import (
	"fmt"
	"net/netip"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// This file has the rules of VPCs, subnets, routers, routes, gateways and firewall rules.

// createDefaultVPC gives a new project its network (A64).
func createDefaultVPC(c *Change) error {
	_, err := c.create(VPC, c.record,
		named(defaultNetwork, "Default VPC", map[string]any{"dns_name": defaultNetwork}))
	return err
}

func setVPCPrefix(c *Change, value any) error {
	if value == nil {
		id := uuid.MustParse(c.record.ID)
		address := [16]byte{0: 0xfd}
		copy(address[1:6], id[:])
		c.record.Fields["ipv6_prefix"] = netip.PrefixFrom(netip.AddrFrom16(address), 48).String()
		return nil
	}
	prefix := netip.MustParsePrefix(value.(string))
	if !prefix.Addr().IsPrivate() || prefix.Bits() != 48 {
		return invalidRequest("VPC IPv6 address prefixes must be in the Unique Local Address range " +
			"`fd00::/48` (RFD 4193)")
	}
	c.record.Fields["ipv6_prefix"] = value
	return nil
}

func setSystemRouter(c *Change, _ any) error {
	c.record.Fields["system_router_id"] = uuid.NewString()
	if c.derive {
		c.record.Fields["system_router_id"] = store.DerivedID(Router.Name, c.record.ID)
	}
	return nil
}

// createNetwork gives a new VPC its router with two routes, a subnet, firewall rules and a gateway.
func createNetwork(c *Change) error {
	system := named("system",
		"Routes are automatically added to this router as VPC subnets are created",
		map[string]any{"kind": routerSystem})
	system.id = c.record.Text("system_router_id")
	router, err := c.create(Router, c.record, system)
	for name, net := range map[string]string{"default-v4": "0.0.0.0/0", "default-v6": "::/0"} {
		if err == nil {
			_, err = c.create(Route, router, named(name, "The default route of a vpc", map[string]any{
				"kind": routeDefault, "target": typed("internet_gateway", defaultNetwork),
				"destination": typed("ip_net", net)}))
		}
	}
	if err == nil {
		prefix := netip.MustParsePrefix(c.record.Text("ipv6_prefix"))
		_, err = c.create(Subnet, c.record, named(defaultNetwork,
			"The default subnet for "+c.record.Name, map[string]any{"ipv4_block": "172.30.0.0/22",
				"ipv6_block": netip.PrefixFrom(prefix.Addr(), subnetV6Bits).String()}))
	}
	for _, rule := range defaultRules(c.record.Name) {
		if err == nil {
			_, err = c.create(FirewallRule, c.record, rule)
		}
	}
	if err == nil {
		_, err = c.create(Gateway, c.record,
			named(defaultNetwork, "Automatically created default VPC gateway", nil))
	}
	return err
}

func typed(kind string, value any) map[string]any {
	return map[string]any{"type": kind, "value": value}
}

func defaultRules(vpc string) []ResourceInput {
	rule := func(name, description string, filters map[string]any) ResourceInput {
		all := map[string]any{"hosts": nil, "ports": nil, "protocols": nil}
		for key, value := range filters {
			all[key] = value
		}
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
	return reading(s.Simulation, func(tx *store.Tx) ([]store.Resource, error) {
		r, err := s.lookup(call, tx, VPC, scope, vpc)
		if err != nil {
			return nil, err
		}
		return FirewallRule.Table().Scan(tx, r.ID, store.ByName, nil, noLimit)
	})
}

const maxRules = 1024

// ReplaceFirewallRules replaces all rules of a VPC by new ones.
func (s Resources) ReplaceFirewallRules(call *Call, scope Scope, vpc store.Selector,
	rules []ResourceInput) ([]store.Resource, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) ([]store.Resource, error) {
		c, err := s.change(call, tx, VPC, scope, vpc)
		if err == nil {
			err = rulesProblem(c.record.Name, rules)
		}
		if err == nil {
			err = c.each(FirewallRule, c.record.ID, func(rule *Change) error { return rule.drop() })
		}
		for _, rule := range rules {
			if err == nil {
				_, err = c.create(FirewallRule, c.record, rule)
			}
		}
		if err != nil {
			return nil, err
		}
		return FirewallRule.Table().Scan(tx, c.record.ID, store.ByName, nil, noLimit)
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

func setCustomRouter(c *Change, value any) error {
	c.record.Fields["custom_router_id"] = nil
	if value == nil {
		return nil
	}
	sel := value.(store.Selector)
	router, err := find(c.tx, Router.Table(), c.parent.ID, sel)
	switch {
	case err != nil:
		return err
	case router.Text("vpc_id") != c.parent.ID:
		return invalidRequest("a router can only be attached to a subnet when both belong to the " +
			"same VPC")
	case router.Text("kind") == routerSystem:
		return invalidRequest("cannot attach a system router to a VPC subnet")
	}
	c.record.Fields["custom_router_id"] = router.ID
	return nil
}

func clearCustomRouter(c *Change) error {
	return c.each(Subnet, c.old.Text("vpc_id"), func(subnet *Change) error {
		if subnet.record.Text("custom_router_id") != c.old.ID {
			return nil
		}
		subnet.record.Fields["custom_router_id"] = nil
		return subnet.put()
	})
}

const (
	minSubnetBits, maxSubnetBits = 8, 26
	subnetV6Bits                 = 64
)

func setIPv4Block(c *Change, value any) error {
	block := netip.MustParsePrefix(value.(string))
	if !block.Addr().IsPrivate() {
		return invalidRequest("VPC Subnet IPv4 address ranges must be from a private range")
	}
	if block.Bits() < minSubnetBits || block.Bits() > maxSubnetBits {
		return invalidRequest("VPC Subnet IPv4 address ranges must have prefix length between %d and "+
			"%d, inclusive", minSubnetBits, maxSubnetBits)
	}
	c.record.Fields["ipv4_block"] = value
	return nil
}

// setIPv6Block checks the block or chooses one, and refuses blocks that overlap with another
// subnet's.
func setIPv6Block(c *Change, value any) error {
	vpc := netip.MustParsePrefix(c.parent.Text("ipv6_prefix"))
	if value == nil {
		id, address := uuid.MustParse(c.record.ID), vpc.Addr().As16()
		copy(address[6:8], id[:])
		value = netip.PrefixFrom(netip.AddrFrom16(address), subnetV6Bits).String()
	}
	block := netip.MustParsePrefix(value.(string))
	if !vpc.Contains(block.Addr()) || block.Bits() != subnetV6Bits {
		return invalidRequest("VPC Subnet IPv6 address range '%s' is not valid for VPC with IPv6 "+
			"prefix '%s'", block, vpc)
	}
	c.record.Fields["ipv6_block"] = value
	return c.each(Subnet, c.parent.ID, func(other *Change) error {
		for _, field := range []string{"ipv4_block", "ipv6_block"} {
			own := netip.MustParsePrefix(c.record.Text(field))
			if own.Overlaps(netip.MustParsePrefix(other.record.Text(field))) {
				return invalidRequest("IP address range '%s' conflicts with an existing subnet", own)
			}
		}
		return nil
	})
}

func interfaceIn(tx *store.Tx, subnet string) (name string, err error) {
	err = tx.EachInterface(func(nic store.NetworkInterface) {
		if nic.SubnetID == subnet {
			name = nic.Name
		}
	})
	return name, err
}

// Interfaces lists the network interfaces in a subnet.
func (s Resources) Interfaces(call *Call, scope Scope, subnet store.Selector) (
	nics []store.NetworkInterface, err error) {
	err = s.store.View(func(tx *store.Tx) error {
		r, err := s.lookup(call, tx, Subnet, scope, subnet)
		if err != nil {
			return err
		}
		return tx.EachInterface(func(nic store.NetworkInterface) {
			if nic.SubnetID == r.ID {
				nics = append(nics, nic)
			}
		})
	})
	return nics, err
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

func createSubnetRoute(c *Change) error {
	router, err := c.systemRouter(c.parent.ID)
	if err == nil {
		name, values := subnetRoute(c.record)
		_, err = c.create(Route, router, named(name, "System-managed VPC Subnet route.", values))
	}
	return err
}

func (c *Change) systemRouter(vpcID string) (store.Resource, error) {
	vpc, err := find(c.tx, VPC.Table(), "", store.Selector{ID: vpcID})
	if err != nil {
		return vpc, err
	}
	return find(c.tx, Router.Table(), "", store.Selector{ID: vpc.Text("system_router_id")})
}

// routeToSubnet calls work with a change of the route to the subnet.
func (c *Change) routeToSubnet(work func(*Change) error) error {
	router, err := c.systemRouter(c.old.Text("vpc_id"))
	if err != nil {
		return err
	}
	name, _ := subnetRoute(c.old)
	return c.each(Route, router.ID, func(route *Change) error {
		if route.record.Name != name || route.record.Text("kind") != routeSubnet {
			return nil
		}
		return work(route)
	})
}

func renameSubnetRoute(c *Change) error {
	return c.routeToSubnet(func(route *Change) error {
		route.record.Name, route.record.Fields = subnetRoute(c.record)
		route.record.Fields[Route.In] = route.old.Text(Route.In)
		return route.put()
	})
}

func deleteSubnetRoute(c *Change) error {
	return c.routeToSubnet(func(route *Change) error { return route.drop() })
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

func permitRouter(c *Change, in *ResourceInput) error {
	if in == nil && c.old.Text("kind") == routerSystem {
		return invalidRequest("cannot delete system router")
	}
	return nil
}

func setRouteKind(c *Change, value any) error {
	if value == routeCustom && c.parent.Text("kind") == routerSystem {
		return invalidRequest("user-provided routes cannot be added to a system router")
	}
	c.record.Fields["kind"] = value
	return nil
}

// setTarget checks the target of a route together with its destination. Only the rack itself
// creates routes to subnets, which need no check.
func setTarget(c *Change, value any) error {
	kind := c.record.Text("kind")
	from, to := c.record.Fields["destination"].(map[string]any), value.(map[string]any)
	fromIP := from["type"] == "ip" || from["type"] == "ip_net"
	switch {
	case kind == routeSubnet:
	case fromIP && to["type"] == "ip":
		if isV4(from["value"]) != isV4(to["value"]) {
			return invalidRequest("cannot mix explicit IPv4 and IPv6 addresses between destination " +
				"and target")
		}
	case from["type"] == "vpc", to["type"] == "vpc":
		return invalidRequest("users cannot specify VPCs as a destination or target in %s routes",
			routeWords[kind])
	case to["type"] == "subnet":
		return invalidRequest("subnets cannot be used as a target in %s routers", routeWords[kind])
	}
	c.record.Fields["target"] = value
	return nil
}

func isV4(text any) bool {
	s, _ := text.(string)
	if prefix, err := netip.ParsePrefix(s); err == nil {
		return prefix.Addr().Is4()
	}
	address, err := netip.ParseAddr(s)
	return err == nil && address.Is4()
}

func permitRoute(c *Change, in *ResourceInput) error {
	kind := c.old.Text("kind")
	switch {
	case kind == routeCustom:
		return nil
	case in == nil:
		return invalidRequest("DELETE not allowed on system routes")
	case kind != routeDefault:
		return invalidRequest("routes of type %s within the system router are not modifiable",
			routeWords[kind])
	}
	from, to := c.old.Fields["destination"].(map[string]any),
		in.Values["destination"].(map[string]any)
	if in.Name != nil || in.Description != nil || from["type"] != to["type"] ||
		from["value"] != to["value"] {
		return invalidRequest("the destination and metadata of a Default route cannot be changed")
	}
	return nil
}

// permitGateway protects the default gateway, to which the rack attaches the silo's default pool.
func permitGateway(c *Change, in *ResourceInput) error {
	if in == nil && c.old.Name == defaultNetwork && !c.cascade {
		return invalidRequest("Ip pools referencing this gateway exist. To perform a cascading " +
			"delete set the cascade option")
	}
	return nil
}
