package engine

import "github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

// These are the kinds of resources.
var (
	Project           = &Kind{}
	SSHKey            = &Kind{}
	IPPool            = &Kind{}
	SubnetPool        = &Kind{}
	FloatingIP        = &Kind{}
	ExternalSubnet    = &Kind{}
	AffinityGroup     = &Kind{}
	AntiAffinityGroup = &Kind{}
	VPC               = &Kind{}
	Subnet            = &Kind{}
	Router            = &Kind{}
	Route             = &Kind{}
	FirewallRule      = &Kind{}
	Gateway           = &Kind{}
	AddressLot        = &Kind{}
	PortSettings      = &Kind{}
	ephemeralIP       = &Kind{}
	natIP             = &Kind{}

	// Kinds lists every kind.
	Kinds = []*Kind{Project, SSHKey, IPPool, SubnetPool, FloatingIP, ExternalSubnet,
		AffinityGroup, AntiAffinityGroup, VPC, Subnet, Router, Route, FirewallRule, Gateway,
		AddressLot, PortSettings, ephemeralIP, natIP}
)

// init sets the kinds, because Go refuses variables whose initial values refer to each other. A
// kind is set after the kinds whose Table method it calls.
func init() {
	*SSHKey = Kind{
		Name: "ssh-key", Operation: "current_user_ssh_key", Param: "ssh_key",
		Owner: userID, In: "silo_user_id", Public: true,
		Fields: []Field{{Name: "public_key", Type: Text, Set: setPublicKey}},
	}
	*IPPool = Kind{
		Name: "ip-pool", Operation: "system_ip_pool", Param: "pool", Fleet: true,
		Hidden: []string{isDefault, extents},
		Fields: []Field{
			{Name: "ip_version", Type: Enum, Values: []string{StackV4, StackV6}, Optional: true,
				Default: StackV4},
			{Name: "pool_type", Type: Enum, Values: []string{unicast, "multicast"}, Optional: true,
				Default: unicast},
			{Name: isDefault}, {Name: extents},
		},
		Holders: []Holder{{extended, "IP Pool cannot be deleted while it contains IP ranges"}},
	}
	*SubnetPool = Kind{
		Name: "subnet-pool", Operation: "system_subnet_pool", Param: "pool", Fleet: true,
		Hidden: []string{isDefault, extents},
		Fields: []Field{
			{Name: "ip_version", Type: Enum, Values: []string{StackV4, StackV6}},
			{Name: isDefault}, {Name: extents},
		},
		Holders: []Holder{{extended, "Cannot delete external subnet pool while it contains members. " +
			"Please delete all external subnet pool members first."}},
	}
	*FloatingIP = Kind{
		Name: "floating-ip", Operation: "floating_ip", Param: "floating_ip",
		Parent: Project, In: "project_id",
		Both:    "Floating IP as an ID project",
		Neither: "Floating IP should either be UUID or project",
		Fields: []Field{
			{Name: "address_allocator", Type: AddressSource, Optional: true, Default: Allocation{},
				Set: setAddress},
			{Name: "instance_id"},
		},
		Holders: []Holder{{attached, "Floating IP cannot be deleted while attached to an instance"}},
	}
	*ExternalSubnet = Kind{
		Name: "external-subnet", Operation: "external_subnet", Param: "external_subnet",
		Parent: Project, In: "project_id",
		Both:    "external subnet as an ID project",
		Neither: "external subnet should either be a UUID or project",
		Fields: []Field{
			{Name: "allocator", Type: SubnetSource, Set: setSubnet}, {Name: "instance_id"},
		},
		Holders: []Holder{{attached, "Cannot delete external subnet while it is attached to an " +
			"instance. Detach it and try again."}},
	}
	*ephemeralIP = Kind{Name: "ephemeral-ip", In: "instance_id", Fields: []Field{
		{Name: "address_allocator", Default: Allocation{}, Set: setAddress}}}
	*natIP = Kind{Name: "source-nat", In: "instance_id", Fields: []Field{{Name: "kind"},
		{Name: "ip"}, {Name: "ip_pool_id"}, {Name: "first_port"}, {Name: "last_port"}}}
	*AffinityGroup = group("affinity")
	*AntiAffinityGroup = group("anti-affinity")
	*Subnet = Kind{
		Name: "vpc-subnet", Operation: "vpc_subnet", Param: "subnet", Parent: VPC, In: "vpc_id",
		Both: "subnet as an ID, vpc and project", Neither: "subnet should either be an ID or vpc",
		Fields: []Field{
			{Name: "custom_router", Type: NameOrID, Optional: true, Update: Cleared, Set: setCustomRouter},
			{Name: "ipv4_block", Type: IPv4Net, Set: setIPv4Block},
			{Name: "ipv6_block", Type: IPv6Net, Optional: true, Set: setIPv6Block},
		},
		Created: createSubnetRoute, Updated: renameSubnetRoute, Deleted: deleteSubnetRoute,
		Holders: []Holder{{interfaceIn,
			"VPC Subnet cannot be deleted while network interfaces in the subnet exist"}},
	}
	*VPC = Kind{
		Name: "vpc", Operation: "vpc", Param: "vpc", Parent: Project, In: "project_id",
		Both: "vpc as an ID, project", Neither: "vpc should either be an ID or project",
		Fields: []Field{
			{Name: "ipv6_prefix", Type: IPv6Net, Optional: true, Set: setVPCPrefix},
			{Name: "dns_name", Type: Name, Update: Kept},
			{Name: "system_router_id", Set: setSystemRouter},
		},
		Created: createNetwork,
		Holders: []Holder{holds(Subnet.Table(), "VPC cannot be deleted while VPC Subnets exist")},
	}
	*Router = Kind{
		Name: "vpc-router", Operation: "vpc_router", Param: "router", Parent: VPC, In: "vpc_id",
		Both: "router as an ID vpc and project", Neither: "router should either be an ID or vpc",
		Fields:  []Field{{Name: "kind", Default: routeCustom}},
		Holders: []Holder{{ofSystem, "cannot delete system router"}},
		Deleted: clearCustomRouter,
	}
	*Route = Kind{
		Name: "router-route", Operation: "vpc_router_route", Param: "route",
		Parent: Router, In: "vpc_router_id",
		Both:    "route as an ID router, subnet, vpc, and project",
		Neither: "route should either be an ID or router",
		Fields: []Field{
			{Name: "kind", Default: routeCustom, Set: setRouteKind},
			{Name: "destination", Type: Destination, Update: Required},
			{Name: "target", Type: Target, Update: Required, Set: setTarget},
		},
		Permit: permitRoute,
	}
	*FirewallRule = Kind{Name: "vpc-firewall-rule", Parent: VPC, In: "vpc_id", Fields: []Field{
		{Name: "status", Type: Enum, Values: []string{"disabled", "enabled"}},
		{Name: "direction", Type: Enum, Values: []string{"inbound", "outbound"}},
		{Name: "targets", Type: RuleTargets},
		{Name: "filters", Type: RuleFilters},
		{Name: "action", Type: Enum, Values: []string{"allow", "deny"}},
		{Name: "priority", Type: U16},
	}}
	*Gateway = Kind{
		Name: "internet-gateway", Operation: "internet_gateway", Param: "gateway",
		Parent: VPC, In: "vpc_id",
		Both:    "gateway as an ID vpc and project",
		Neither: "gateway should either be an ID or vpc",
		Holders: []Holder{{defaultGateway, "Ip pools referencing this gateway exist. To perform a " +
			"cascading delete set the cascade option"}},
	}
	*AddressLot = Kind{
		Name: "address-lot", Param: "address_lot", Fleet: true, Hidden: []string{extents},
		Fields: []Field{{Name: "kind", Type: Enum, Values: []string{"infra", "pool"}},
			{Name: "blocks", Type: Blocks, Set: setBlocks}},
		Holders: []Holder{{func(c *Change) (string, bool) {
			return "", len(addressesOf(c.Tx, c.old.ID)) > 0
		}, "lot is in use"}},
	}
	var (
		link = Field{Name: "link_name", Type: Name}
		text = func(name string) Field { return Field{Name: name, Type: Text, Optional: true} }
		i32  = func(name string) Field { return Field{Name: name, Type: I32, Optional: true} }
	)
	*PortSettings = Kind{
		Name: "switch-port-settings", Param: "port", Fleet: true, Hidden: []string{"port", "links",
			"interfaces", "routes", "bgp_peers", "addresses", "groups"},
		Fields: []Field{
			{Name: "port_config", Type: Record, Set: setPort, Of: []Field{{Name: "geometry", Type: Enum,
				Values: []string{"qsfp28x1", "qsfp28x2", "sfp28x4"}}}},
			{Name: "links", Type: Records, Set: setLinks, Of: []Field{link,
				{Name: "mtu", Type: U16},
				{Name: "lldp", Type: Record, Of: []Field{{Name: "enabled", Type: Flag}, text("link_name"),
					text("link_description"), text("chassis_id"), text("system_name"),
					text("system_description"), {Name: "management_ip", Type: IP, Optional: true}}},
				{Name: "fec", Type: Enum, Optional: true, Values: []string{"firecode", "none", "rs"}},
				{Name: "speed", Type: Enum, Values: []string{"speed0_g", "speed1_g", "speed10_g",
					"speed25_g", "speed40_g", "speed50_g", "speed100_g", "speed200_g", "speed400_g"}},
				{Name: "autoneg", Type: Flag},
				{Name: "tx_eq", Type: Record, Optional: true, Of: []Field{i32("pre1"), i32("pre2"),
					i32("main"), i32("post2"), i32("post1")}},
			}},
			{Name: "interfaces", Type: Records, Optional: true, Default: []any{},
				Set: setLacking("interfaces")},
			{Name: "routes", Type: Records, Optional: true, Default: []any{}, Set: setRoutes,
				Of: []Field{link, {Name: "routes", Type: Records, Of: []Field{{Name: "dst", Type: IPNet},
					{Name: "gw", Type: IP}, {Name: "vid", Type: U16, Optional: true},
					{Name: "rib_priority", Type: U8, Optional: true}}}}},
			{Name: "bgp_peers", Type: Records, Optional: true, Default: []any{},
				Set: setLacking("bgp_peers")},
			{Name: "addresses", Type: Records, Set: setAddresses, Of: []Field{link, {Name: "addresses",
				Type: Records, Of: []Field{{Name: "address", Type: IPNet},
					{Name: "address_lot", Type: NameOrID},
					{Name: "vlan_id", Type: U16, Optional: true}}}}},
			{Name: "groups", Default: []any{}},
		},
	}
	*Project = Kind{
		Name: "project", Operation: "project", Param: "project", Created: createDefaultVPC,
		Holders: []Holder{
			holds(store.Instances, "project to be deleted contains an instance: %s"),
			holds(store.Disks, "project to be deleted contains a disk: %s"),
			holds(FloatingIP.Table(), "project to be deleted contains a floating ip: %s"),
			holds(store.Images, "project to be deleted contains a project image: %s"),
			holds(store.Snapshots, "project to be deleted contains a snapshot: %s"),
			holds(VPC.Table(), "project to be deleted contains a vpc: %s"),
			holds(AffinityGroup.Table(), "project to be deleted contains an affinity group: %s"),
			holds(AntiAffinityGroup.Table(), "project to be deleted contains an anti affinity group: %s"),
		},
	}
}
