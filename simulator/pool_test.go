package simulator

import (
	"fmt"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func (r *rackServer) become(role string) {
	r.t.Helper()
	if _, err := r.rack.ChangeSwitches(func(s *adminapi.Switches) error {
		s.Role = role
		return nil
	}); err != nil {
		r.t.Fatal(err)
	}
}

func TestACollaboratorCannotAdministerTheFleet(t *testing.T) { // A21
	r := serveRack(t, engine.Config{})
	for _, request := range []string{"GET /v1/system/ip-pools", "GET /v1/system/subnet-pools",
		`POST /v1/system/ip-pools {"name":"p","description":""}`,
		"GET /v1/system/silos/simulated/ip-pools"} {
		r.demand(403, "Forbidden", request)
	}
	for _, request := range []string{"GET /v1/system/ip-pools/default",
		"GET /v1/system/ip-pools/default/ranges", "DELETE /v1/system/ip-pools/default",
		`PUT /v1/system/ip-pools/default/silos/simulated {"is_default":false}`} {
		r.demand(404, `not found: ip-pool with name \"default\"`, request)
	}
	r.demand(200, `"is_default":true`, "GET /v1/ip-pools/default")
	r.become(adminapi.RoleFleetAdmin)
	r.demand(200, `"fleet_viewer":true`, "GET /v1/me")
	r.demand(200, `"default-ipv6"`, "GET /v1/system/ip-pools")
}

func TestAFleetAdministratorManagesPools(t *testing.T) { // A21
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin})
	r.ipPools()
	r.subnetPools()
	for path, part := range map[string]string{"hardware/racks": `"id"`, "silo-quotas": `"cpus"`,
		"utilization/silos": `"simulated"`} {
		r.demand(200, part, "GET /v1/system/"+path)
	}
	r.demand(400, "cannot span multicast and unicast",
		`POST /v1/system/ip-pools/default/ranges/add {"first":"223.0.0.1","last":"224.0.0.1"}`)
	r.demand(400, "multicast address range to unicast IP pool",
		`POST /v1/system/ip-pools/default/ranges/add {"first":"224.1.0.1","last":"224.1.0.1"}`)
	r.demand(400, "IP addresses from this pool are in use in the linked silo",
		"DELETE /v1/system/ip-pools/default/silos/simulated")
	const groups = "/v1/system/ip-pools/groups"
	r.demand(201, "", `POST /v1/system/ip-pools {"name":"groups","description":"",`+
		`"pool_type":"multicast"}`)
	r.demand(400, "unicast address range to multicast IP pool",
		"POST "+groups+`/ranges/add {"first":"10.6.0.1","last":"10.6.0.1"}`)
	r.demand(201, "", "POST "+groups+`/silos {"silo":"simulated","is_default":true}`)
	r.demand(400, "Pool 'groups' is not a unicast pool (type: multicast)",
		`POST /v1/floating-ips?project=default {"name":"f","description":"","address_allocator":`+
			`{"type":"auto","pool_selector":{"type":"explicit","pool":"groups"}}}`)
	r.demand(204, "", "DELETE "+groups)
}

// ipPools adds a second IP pool to the silo, uses it, and removes it.
func (r *rackServer) ipPools() {
	const one = "/v1/system/ip-pools/non-default"
	made := r.demand(201, `"pool_type":"unicast"`,
		`POST /v1/system/ip-pools {"name":"non-default","description":""}`)
	id := unmarshal[store.Identity](r.t, made).ID
	r.demand(400, "Cannot add IPv6 address range to IPv4 pool with ID", "POST "+one+
		`/ranges/add {"first":"fd00::1","last":"fd00::2"}`)
	r.demand(400, "did not match any variant", "POST "+one+
		`/ranges/add {"first":"10.0.2.2","last":"10.0.2.1"}`)
	r.demand(400, "overlaps with an existing IP pool range or subnet pool member", "POST "+one+
		`/ranges/add {"first":"198.17.0.0","last":"198.18.0.0"}`)
	const span = `{"first":"10.0.2.0","last":"10.0.2.1"}`
	r.demand(201, span, "POST "+one+"/ranges/add "+span)
	r.demand(200, span, "GET "+one+"/ranges")
	r.demand(400, "The provided range 10.0.2.0-10.0.2.2 does not exist",
		"POST "+one+`/ranges/remove {"first":"10.0.2.0","last":"10.0.2.2"}`)

	r.demand(404, `ip-pool with name \"non-default\"`, "GET /v1/ip-pools/non-default")
	allocate := func(name, selector string) string {
		return fmt.Sprintf(`POST /v1/floating-ips?project=default {"name":%q,"description":"",`+
			`"address_allocator":{"type":"auto","pool_selector":%s}}`, name, selector)
	}
	const explicit = `{"type":"explicit","pool":"non-default"}`
	r.demand(404, `ip-pool with name \"non-default\"`, allocate("f1", explicit))
	update := func(pool string, first bool) string {
		return fmt.Sprintf(`PUT /v1/system/ip-pools/%s/silos/simulated {"is_default":%t}`, pool, first)
	}
	r.demand(404, "ip-pool-resource with id", update("non-default", true))
	link := func(first bool) string {
		return fmt.Sprintf(`POST %s/silos {"silo":"simulated","is_default":%t}`, one, first)
	}
	r.demand(400, "already exists: ip-pool-resource", link(true))
	r.demand(201, `"is_default":false`, link(false))
	r.demand(400, "already exists: ip-pool-resource", link(false))
	r.demand(200, `"is_default":false`, "GET "+one+"/silos")
	r.demand(200, id, "GET /v1/system/silos/simulated/ip-pools")
	r.demand(201, `"ip":"10.0.2.0"`, allocate("f1", explicit))
	given := func(ip string) string {
		return fmt.Sprintf(`POST /v1/floating-ips?project=default {"name":"f0","description":"",`+
			`"address_allocator":{"type":"explicit","ip":%q}}`, ip)
	}
	r.demand(400, "Requested external IP address not available", given("10.0.2.0"))
	r.demand(400, "IP address 10.0.2.2 is not in any configured pool", given("10.0.2.2"))
	r.demand(200, `{"capacity":2,"remaining":1}`, "GET "+one+"/utilization")
	r.demand(400, "cannot be deleted while external IP addresses are allocated from them",
		"POST "+one+"/ranges/remove "+span)
	r.demand(400, "IP addresses from this pool are in use", "DELETE "+one+"/silos/simulated")
	r.demand(200, `"is_default":true`, update("non-default", true))
	r.demand(200, `"is_default":false`, "GET /v1/ip-pools/default")
	r.demand(201, `"ip":"10.0.2.1"`, allocate("f2", `{"type":"auto"}`))
	r.demand(507, "No external IP addresses available", allocate("f3", `{"type":"auto"}`))
	r.demand(200, `"is_default":true`, update("default", true))
	r.demand(200, `"is_default":true`, update("default-ipv6", true))
	r.demand(400, "Please specify ip_version (v4 or v6)", allocate("f3", `{"type":"auto"}`))
	r.demand(201, `"ip":"2001:db8::`, allocate("f3", `{"type":"auto","ip_version":"v6"}`))
	r.demand(200, `"is_default":false`, update("default-ipv6", false))
	for _, name := range []string{"f1", "f2", "f3"} {
		r.delete("floating-ips/" + name)
	}
	r.demand(204, "", "DELETE "+one+"/silos/simulated")
	r.demand(204, "", "POST "+one+"/ranges/remove "+span)
	r.demand(204, "", "DELETE "+one)
}

// subnetPools adds a subnet pool to the silo, uses it, and removes it.
func (r *rackServer) subnetPools() {
	const one = "/v1/system/subnet-pools/subnets"
	r.demand(201, "", `POST /v1/system/subnet-pools {"name":"subnets","description":"",`+
		`"ip_version":"v4"}`)
	add := func(fields string) string { return "POST " + one + "/members/add {" + fields + "}" }
	r.demand(400, "Cannot add IPv6 members to IPv4 subnet pool", add(`"subnet":"fd00::/48"`))
	r.demand(400, "must be a network address", add(`"subnet":"10.3.0.1/24"`))
	r.demand(400, "greater than 32", add(`"subnet":"10.3.0.0/24","max_prefix_length":33`))
	r.demand(400, "no greater than the maximum",
		add(`"subnet":"10.3.0.0/24","min_prefix_length":30,"max_prefix_length":28`))
	r.demand(400, "no less than the IP subnet prefix length (/24)",
		add(`"subnet":"10.3.0.0/24","min_prefix_length":20`))
	r.demand(400, "overlaps with an existing subnet pool member or IP pool range",
		add(`"subnet":"198.0.0.0/8"`))
	r.demand(201, `"max_prefix_length":30,"min_prefix_length":24,"subnet":"10.3.0.0/24"`,
		add(`"subnet":"10.3.0.0/24","max_prefix_length":30`))
	r.demand(200, `"subnet":"10.3.0.0/24"`, "GET "+one+"/members")
	r.demand(200, `{"capacity":256,"remaining":256}`, "GET "+one+"/utilization")
	r.demand(404, "subnet-pool-silo-link with id", "DELETE "+one+"/silos/simulated")
	r.demand(404, "not found: silo", "POST "+one+`/silos {"silo":"other","is_default":true}`)
	r.demand(201, `"is_default":true`, "POST "+one+`/silos {"silo":"simulated","is_default":true}`)
	r.demand(400, "already exists: subnet-pool-silo-link",
		"POST "+one+`/silos {"silo":"simulated","is_default":false}`)
	r.demand(200, `"is_default":true`, "GET "+one+"/silos")
	r.demand(200, `"is_default":true`, "GET /v1/system/silos/simulated/subnet-pools")
	r.demand(200, `"is_default":false`, "PUT "+one+`/silos/simulated {"is_default":false}`)
	r.demand(200, `"is_default":false`, "GET /v1/subnet-pools")
	r.demand(200, `"is_default":false`, "GET /v1/subnet-pools/subnets")
	r.externalSubnets(one)
	r.secondDefault(one)
	r.demand(204, "", "DELETE "+one+"/silos/simulated")
	r.demand(404, "subnet-pool", "GET /v1/subnet-pools/subnets")
	r.demand(400, "A provided subnet pool member with subnet 10.4.0.0/24 does not exist",
		"POST "+one+`/members/remove {"subnet":"10.4.0.0/24"}`)
	r.demand(204, "", "POST "+one+`/members/remove {"subnet":"10.3.0.0/24"}`)
	r.demand(204, "", "DELETE "+one)
}

// secondDefault makes two subnet pools default pools of the silo, one for each IP version. It also
// checks that deleting an instance does not delete the subnet that is attached to it.
func (r *rackServer) secondDefault(one string) {
	const other = "/v1/system/subnet-pools/other"
	pool := func(version string) string {
		return `POST /v1/system/subnet-pools {"name":"other","description":"","ip_version":"` +
			version + `"}`
	}
	const silo = `/silos {"silo":"simulated","is_default":true}`
	subnet := func(version string) string {
		return `POST /v1/external-subnets?project=default {"name":"s","description":"","allocator":` +
			`{"type":"auto","prefix_length":64,"pool_selector":{"type":"auto"` + version + `}}}`
	}
	r.demand(200, "", "PUT "+one+`/silos/simulated {"is_default":true}`)
	r.demand(201, "", pool("v4"))
	r.demand(400, "Silo already has a default subnet pool for this IP version",
		"POST "+other+silo)
	r.demand(204, "", "DELETE "+other)
	r.demand(201, "", pool("v6"))
	r.demand(201, "", "POST "+other+silo)
	r.demand(400, "Must specify an IP version", subnet(""))
	r.demand(400, "Could not allocate a /64 subnet from the default IPv6 subnet pool",
		subnet(`,"ip_version":"v6"`))
	r.demand(201, "", "POST "+other+`/members/add {"subnet":"fd00:1::/48"}`)
	r.demand(201, `"subnet":"fd00:1::/64"`, subnet(`,"ip_version":"v6"`))
	attach := func(instance, interfaces string) string {
		r.demand(201, "", newInstance(instance, fmt.Sprintf(
			`,"start":false,"network_interfaces":{"type":%q}`, interfaces)))
		return fmt.Sprintf(`POST /v1/external-subnets/s/attach?project=default {"instance":%q}`,
			instance)
	}
	r.demand(400, "does not have a matching IP stack", attach("with-v4", "default_ipv4"))
	r.demand(202, `"instance_id":"`, attach("with-v6", "default_ipv6"))
	for _, name := range []string{"with-v4", "with-v6"} {
		r.delete("instances/" + name)
	}
	r.demand(200, `"instance_id":null`, "GET /v1/external-subnets/s?project=default")
	r.delete("external-subnets/s")
	r.demand(204, "", "POST "+other+`/members/remove {"subnet":"fd00:1::/48"}`)
	r.demand(204, "", "DELETE "+other)
}

// externalSubnets allocates subnets of 10.3.0.0/24, and attaches one subnet to an instance.
func (r *rackServer) externalSubnets(pool string) {
	create := func(name, allocator string) string {
		return fmt.Sprintf(`POST /v1/external-subnets?project=default {"name":%q,"description":"",`+
			`"allocator":{%s}}`, name, allocator)
	}
	const from = `"type":"auto","pool_selector":{"type":"explicit","pool":"subnets"},"prefix_length":`
	r.demand(400, "as there is no linked default pool",
		create("s", `"type":"auto","prefix_length":28`))
	r.demand(404, "subnet-pool", create("s", `"type":"auto","prefix_length":28,`+
		`"pool_selector":{"type":"explicit","pool":"nope"}`))
	r.demand(400, "not contained in any subnet pool", create("s",
		`"type":"explicit","subnet":"10.3.0.0/31"`))
	r.demand(201, `"subnet":"10.3.0.16/28"`, create("s1",
		`"type":"explicit","subnet":"10.3.0.16/28"`))
	r.demand(400, "overlaps with an existing external subnet", create("s",
		`"type":"explicit","subnet":"10.3.0.16/30"`))
	r.demand(201, `"subnet":"10.3.0.0/28"`, create("s2", from+"28"))
	r.demand(201, `"subnet":"10.3.0.32/29"`, create("s3", from+"29"))
	r.demand(201, `"subnet":"10.3.0.128/25"`, create("s4", from+"25"))
	r.demand(400, "Could not allocate a /25 subnet from the subnet pool with name 'subnets'",
		create("s", from+"25"))
	r.demand(200, `{"capacity":256,"remaining":88}`, "GET "+pool+"/utilization")
	r.demand(400, "Cannot unlink subnet pool from silo while there are external subnets",
		"DELETE "+pool+"/silos/simulated")
	r.demand(400, "Cannot delete external subnet pool member while it contains external subnets",
		"POST "+pool+`/members/remove {"subnet":"10.3.0.0/24"}`)

	const one = "/v1/external-subnets/s1"
	r.demand(400, "External subnet is not attached to an instance",
		"POST "+one+"/detach?project=default")
	for range 2 { // the second time changes nothing
		r.demand(202, `"instance_id":"`, "POST "+one+`/attach?project=default {"instance":"a"}`)
	}
	r.demand(400, "while still attached to another",
		"POST "+one+`/attach?project=default {"instance":"idle"}`)
	r.demand(200, `"subnet":"10.3.0.16/28"`, "GET /v1/instances/a/external-subnets?project=default")
	r.demand(202, `"instance_id":null`, "POST "+one+"/detach?project=default")
	for _, name := range []string{"s1", "s2", "s3", "s4"} {
		r.delete("external-subnets/" + name)
	}
}

// TestSourceNATUsesTheDefaultPool creates instances until the default pool has no address left.
func TestSourceNATUsesTheDefaultPool(t *testing.T) { // A65
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin, Instances: []engine.InstanceSpec{}})
	const pool, span = "/v1/system/ip-pools/default", `{"first":"198.18.0.0","last":"198.19.255.255"}`
	create := func(name string) string { return newInstance(name, `,"start":false`) }
	r.demand(204, "", "POST "+pool+"/ranges/remove "+span)
	r.demand(507, "No external IP addresses available", create("a"))
	r.demand(201, "", "POST "+pool+`/ranges/add {"first":"10.6.0.1","last":"10.6.0.2"}`)
	for n := range 8 { // four instances share an address
		r.demand(200, fmt.Sprintf(`"remaining":%d`, 2-(n+3)/4), "GET "+pool+"/utilization")
		r.demand(201, "", create(fmt.Sprint("i", n)))
	}
	r.demand(200, `"first_port":49152,"ip":"10.6.0.2"`,
		"GET /v1/instances/i7/external-ips?project=default")
	r.demand(507, "No external IP addresses available", create("a"))
	r.demand(204, "", "DELETE /v1/instances/i2?project=default")
	r.demand(201, "", create("a"))
	r.demand(200, `"is_default":false`, "PUT "+pool+`/silos/simulated {"is_default":false}`)
	r.demand(404, "not found: default unicast IPv4 pool for current silo", create("b"))
	const key = `POST /v1/me/ssh-keys {"name":"k","description":"","public_key":"%s"}`
	r.demand(500, "Internal", fmt.Sprintf(key, strings.Repeat("é", 1024))) // A70
	r.demand(201, "", fmt.Sprintf(key, strings.Repeat("é", 1023)))
	r.demand(201, "", `POST /v1/vpc-subnets?vpc=default&project=default {"name":"small",`+
		`"description":"","ipv4_block":"10.9.0.0/26"}`)
	nic := func(n int) string {
		return newInstance(fmt.Sprint("n", n), `,"start":false,"network_interfaces":{"type":"create",`+
			`"params":[{"name":"n","description":"","vpc_name":"default","subnet_name":"small",`+
			`"ip_config":{"type":"v6","value":{"ip":{"type":"auto"}}}}]}`)
	}
	v4 := strings.NewReplacer(`"type":"v6"`, `"type":"v4"`).Replace
	r.demand(200, `"is_default":true`, "PUT "+pool+`/silos/simulated {"is_default":true}`)
	r.demand(201, "", "POST "+pool+`/ranges/add {"first":"10.6.1.0","last":"10.6.1.255"}`)
	for n := range 64 - 6 { // A52: the first five and the last are reserved
		r.demand(201, "", v4(nic(n)))
	}
	r.demand(400, "No available IPv4 addresses", v4(nic(64)))
	r.demand(201, "", nic(64))
}

// TestAnInterfaceGetsTheRequestedAddress creates instances with an explicit ip_config.
func TestAnInterfaceGetsTheRequestedAddress(t *testing.T) { // A52
	r := serveRack(t, engine.Config{Instances: []engine.InstanceSpec{}})
	for n, c := range []struct {
		version, address string
		status           int
		want             string
	}{
		{"v4", "172.30.0.77", 201, ""},
		{"v4", "172.30.0.77", 400, "The IP address '172.30.0.77' is not available"},
		{"v4", "172.30.0.4", 400, "The first 5 addresses of a subnet are reserved"},
		{"v4", "172.30.3.255", 400, "Cannot request a broadcast address"},
		{"v4", "172.30.4.0", 400, "172.30.4.0 is outside subnet 172.30.0.0/22"},
		{"v6", "fd00::1", 400, "fd00::1 is outside subnet fd"},
		{"v6", "172.30.0.78", 400, "value.ip.value: invalid IPv6 address syntax"},
		{"v4", "172.30.0.5", 201, ""}, // the lowest free address
	} {
		r.demand(c.status, c.want, newInstance(fmt.Sprint("named", n), fmt.Sprintf(`,"start":false,`+
			`"network_interfaces":{"type":"create","params":[{"name":"n","description":"",`+
			`"vpc_name":"default","subnet_name":"default","ip_config":{"type":%q,"value":`+
			`{"ip":{"type":"explicit","value":%q}}}}]}`, c.version, c.address)))
	}
	r.demand(200, `"ip":"172.30.0.77"`, "GET /v1/network-interfaces?project=default&instance=named0")
}

// TestSwitchPortsGetAddressesFromAddressLots creates and replaces an address lot and the settings
// of switch ports, and deletes both.
func TestSwitchPortsGetAddressesFromAddressLots(t *testing.T) {
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin})
	const (
		lots  = "/v1/system/networking/address-lot"
		ports = "/v1/system/networking/switch-port-settings"
	)
	lot := func(blocks ...string) string {
		text := fmt.Sprintf(`"first_address":%q,"last_address":%q`, blocks[0], blocks[1])
		if len(blocks) > 2 {
			text += fmt.Sprintf(`},{"first_address":%q,"last_address":%q`, blocks[2], blocks[3])
		}
		return "POST " + lots + ` {"name":"lot","description":"","kind":"infra","blocks":[{` + text +
			`}]}`
	}
	port := func(name, address, more string) string {
		return fmt.Sprintf(`POST %s {"name":%q,"description":"","port_config":{"geometry":"qsfp28x1"},`+
			`"links":[{"link_name":"phy0","autoneg":false,"mtu":1500,"speed":"speed1_g",`+
			`"lldp":{"enabled":true}}],"addresses":[{"link_name":"phy0","addresses":[{"address":%q,`+
			`"address_lot":"lot"}]}]%s}`, ports, name, address, more)
	}
	const routed = `,"routes":[{"link_name":"phy0","routes":[{"dst":"0.0.0.0/0","gw":"10.0.0.1"}]}]`
	r.demand(400, "must be in same address family", lot("10.0.0.1", "fd00::"))
	r.demand(400, "first must be <= last", lot("10.0.0.1", "10.0.0.0"))
	r.demand(400, "AddressLot not found", port("a", "10.0.0.1/24", ""))
	first := unmarshal[engine.Lot](t, r.demand(201, "", lot("10.0.0.1", "10.0.0.9")))
	again := r.demand(201, first.Lot.ID, lot("10.0.0.1", "10.0.0.9", "10.1.0.1", "10.1.0.9"))
	for _, answer := range []string{again, r.demand(200, "10.1.0.9", "GET "+lots+"/lot"),
		r.demand(200, "10.1.0.9", "GET "+lots+"/lot/blocks")} {
		if !strings.Contains(answer, `"first_address":"10.0.0.1"`) {
			t.Errorf("got %s without the first block", answer)
		}
	}
	r.demand(200, "initial-infra", "GET "+lots)
	r.demand(400, "address not in lot", port("a", "10.0.1.1/24", ""))
	made := r.demand(201, `"vlan_id":null`, port("a", "10.0.0.1/24", ""))
	r.demand(400, "address unavailable", port("b", "10.0.0.1/24", ""))
	r.demand(501, "the bgp_peers of a switch port", port("b", "10.0.0.2/24", `,"bgp_peers":[{}]`))
	id := unmarshal[store.Identity](t, made).ID
	r.demand(201, id, port("a", "10.0.0.1/24", routed))
	r.demand(200, `"interface_name":"phy0","port_settings_id":"`+id, "GET "+ports+"/a")
	r.demand(200, id, "GET "+ports)
	r.demand(400, "lot is in use", "DELETE "+lots+"/lot")
	r.demand(400, "name or id required", "DELETE "+ports)
	r.demand(204, "", "DELETE "+ports+"?port_settings=a")
	r.demand(400, "port settings not found", "DELETE "+ports+"?port_settings=a")
	r.demand(404, `switch-port-settings with name \"a\"`, "GET "+ports+"/a")
	r.demand(204, "", "DELETE "+lots+"/lot")
}
