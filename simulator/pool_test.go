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
	r.play(`
403 GET system/ip-pools => Forbidden
403 GET system/subnet-pools => Forbidden
403 POST system/ip-pools {NAME=p} => Forbidden
403 GET system/silos/simulated/ip-pools => Forbidden
404 GET system/ip-pools/default => HIDDEN
404 GET system/ip-pools/default/ranges => HIDDEN
404 DELETE system/ip-pools/default => HIDDEN
404 PUT system/ip-pools/default/silos/simulated {"is_default":false} => HIDDEN
200 GET ip-pools/default => "is_default":true`,
		"HIDDEN", `not found: ip-pool with name \"default\"`)
	r.become(adminapi.RoleFleetAdmin)
	r.play(`
200 GET me => "fleet_viewer":true
200 GET system/ip-pools => "default-ipv6"`)
}

func TestAFleetAdministratorCanManageIPAndSubnetPools(t *testing.T) { // A21
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin})
	r.ipPools()
	r.subnetPools()
	r.play(`
200 GET system/hardware/racks => "id"
200 GET system/silo-quotas => "cpus"
200 GET system/utilization/silos => "simulated"
400 POST POOLS/default/ranges/add {"first":"223.0.0.1","last":"224.0.0.1"}
	=> cannot span multicast and unicast
400 POST POOLS/default/ranges/add {"first":"224.1.0.1","last":"224.1.0.1"}
	=> multicast address range to unicast IP pool
400 DELETE POOLS/default/silos/simulated
	=> IP addresses from this pool are in use in the linked silo
201 POST POOLS {NAME=groups,"pool_type":"multicast"}
400 POST POOLS/groups/ranges/add {"first":"10.6.0.1","last":"10.6.0.1"}
	=> unicast address range to multicast IP pool
201 POST POOLS/groups/silos {"silo":"simulated","is_default":true}
400 POST floating-ips?project=default {NAME=f,"address_allocator":{"type":"auto","pool_selector":
	{"type":"explicit","pool":"groups"}}} => Pool 'groups' is not a unicast pool (type: multicast)
204 DELETE POOLS/groups`, "POOLS", "system/ip-pools")
}

func (r *rackServer) ipPools() {
	r.play(`
201 POST system/ip-pools {NAME=non-default} => "pool_type":"unicast"
400 POST ONE/ranges/add {"first":"fd00::1","last":"fd00::2"}
	=> Cannot add IPv6 address range to IPv4 pool with ID
400 POST ONE/ranges/add {"first":"10.0.2.2","last":"10.0.2.1"} => did not match any variant
400 POST ONE/ranges/add {"first":"198.17.0.0","last":"198.18.0.0"}
	=> overlaps with an existing IP pool range or subnet pool member
201 POST ONE/ranges/add SPAN => SPAN
200 GET ONE/ranges => SPAN
400 POST ONE/ranges/remove {"first":"10.0.2.0","last":"10.0.2.2"}
	=> The provided range 10.0.2.0-10.0.2.2 does not exist
404 GET ip-pools/non-default => ip-pool with name \"non-default\"
404 ALLOCATE {NAME=f1,NON-DEFAULT => ip-pool with name \"non-default\"
404 PUT ONE/silos/simulated {"is_default":true} => ip-pool-resource with id
400 POST ONE/silos {"silo":"simulated","is_default":true} => already exists: ip-pool-resource
201 POST ONE/silos {"silo":"simulated","is_default":false} => "is_default":false
400 POST ONE/silos {"silo":"simulated","is_default":false} => already exists: ip-pool-resource
200 GET ONE/silos => "is_default":false
200 GET system/silos/simulated/ip-pools => "non-default"
201 ALLOCATE {NAME=f1,NON-DEFAULT => "ip":"10.0.2.0"
400 ALLOCATE {NAME=f0,"address_allocator":{"type":"explicit","ip":"10.0.2.0"}}
	=> Requested external IP address not available
400 ALLOCATE {NAME=f0,"address_allocator":{"type":"explicit","ip":"10.0.2.2"}}
	=> IP address 10.0.2.2 is not in any configured pool
200 GET ONE/utilization => {"capacity":2,"remaining":1}
400 POST ONE/ranges/remove SPAN
	=> cannot be deleted while external IP addresses are allocated from them
400 DELETE ONE/silos/simulated => IP addresses from this pool are in use
200 PUT ONE/silos/simulated {"is_default":true} => "is_default":true
200 GET ip-pools/default => "is_default":false
201 ALLOCATE {NAME=f2,ANY => "ip":"10.0.2.1"
507 ALLOCATE {NAME=f3,ANY => No external IP addresses available
200 PUT system/ip-pools/default/silos/simulated {"is_default":true} => "is_default":true
200 PUT system/ip-pools/default-ipv6/silos/simulated {"is_default":true} => "is_default":true
400 ALLOCATE {NAME=f3,ANY => Please specify ip_version (v4 or v6)
201 ALLOCATE {NAME=f3,"address_allocator":{"type":"auto","pool_selector":{"type":"auto",
	"ip_version":"v6"}}} => "ip":"2001:db8::
200 PUT system/ip-pools/default-ipv6/silos/simulated {"is_default":false} => "is_default":false
204 DELETE floating-ips/f1?project=default
204 DELETE floating-ips/f2?project=default
204 DELETE floating-ips/f3?project=default
204 DELETE ONE/silos/simulated
204 POST ONE/ranges/remove SPAN
204 DELETE ONE`, "ONE", "system/ip-pools/non-default",
		"SPAN", `{"first":"10.0.2.0","last":"10.0.2.1"}`,
		"ALLOCATE", "POST floating-ips?project=default",
		"ANY", `"address_allocator":{"type":"auto","pool_selector":{"type":"auto"}}}`,
		"NON-DEFAULT", `"address_allocator":{"type":"auto","pool_selector":{"type":"explicit",`+
			`"pool":"non-default"}}}`)
}

func (r *rackServer) subnetPools() {
	words := []string{"ONE", "system/subnet-pools/subnets"}
	r.play(`
201 POST system/subnet-pools {NAME=subnets,"ip_version":"v4"}
400 POST ONE/members/add {"subnet":"fd00::/48"} => Cannot add IPv6 members to IPv4 subnet pool
400 POST ONE/members/add {"subnet":"10.3.0.1/24"} => must be a network address
400 POST ONE/members/add {"subnet":"10.3.0.0/24","max_prefix_length":33} => greater than 32
400 POST ONE/members/add {"subnet":"10.3.0.0/24","min_prefix_length":30,"max_prefix_length":28}
	=> no greater than the maximum
400 POST ONE/members/add {"subnet":"10.3.0.0/24","min_prefix_length":20}
	=> no less than the IP subnet prefix length (/24)
400 POST ONE/members/add {"subnet":"198.0.0.0/8"}
	=> overlaps with an existing subnet pool member or IP pool range
201 POST ONE/members/add {"subnet":"10.3.0.0/24","max_prefix_length":30}
	=> "max_prefix_length":30,"min_prefix_length":24,"subnet":"10.3.0.0/24"
200 GET ONE/members => "subnet":"10.3.0.0/24"
200 GET ONE/utilization => {"capacity":256,"remaining":256}
404 DELETE ONE/silos/simulated => subnet-pool-silo-link with id
404 POST ONE/silos {"silo":"other","is_default":true} => not found: silo
201 POST ONE/silos {"silo":"simulated","is_default":true} => "is_default":true
400 POST ONE/silos {"silo":"simulated","is_default":false} => already exists: subnet-pool-silo-link
200 GET ONE/silos => "is_default":true
200 GET system/silos/simulated/subnet-pools => "is_default":true
200 PUT ONE/silos/simulated {"is_default":false} => "is_default":false
200 GET subnet-pools => "is_default":false
200 GET subnet-pools/subnets => "is_default":false`, words...)
	r.externalSubnets()
	r.secondDefault()
	r.play(`
204 DELETE ONE/silos/simulated
404 GET subnet-pools/subnets => subnet-pool
400 POST ONE/members/remove {"subnet":"10.4.0.0/24"}
	=> A provided subnet pool member with subnet 10.4.0.0/24 does not exist
204 POST ONE/members/remove {"subnet":"10.3.0.0/24"}
204 DELETE ONE`, words...)
}

// secondDefault checks default subnet pools, and that a deleted instance's external subnet remains.
func (r *rackServer) secondDefault() {
	r.play(`
200 PUT system/subnet-pools/subnets/silos/simulated {"is_default":true}
201 POST system/subnet-pools {NAME=other,"ip_version":"v4"}
400 POST OTHER/silos {"silo":"simulated","is_default":true}
	=> Silo already has a default subnet pool for this IP version
204 DELETE OTHER
201 POST system/subnet-pools {NAME=other,"ip_version":"v6"}
201 POST OTHER/silos {"silo":"simulated","is_default":true}
400 POST external-subnets?IN {NAME=s,ALLOCATOR}}} => Must specify an IP version
400 POST external-subnets?IN {NAME=s,ALLOCATOR,"ip_version":"v6"}}}
	=> Could not allocate a /64 subnet from the default IPv6 subnet pool
201 POST OTHER/members/add {"subnet":"fd00:1::/48"}
201 POST external-subnets?IN {NAME=s,ALLOCATOR,"ip_version":"v6"}}} => "subnet":"fd00:1::/64"
201 POST instances?IN {NAME=with-v4,STOPPED,"network_interfaces":{"type":"default_ipv4"}}
400 POST external-subnets/s/attach?IN {"instance":"with-v4"} => does not have a matching IP stack
201 POST instances?IN {NAME=with-v6,STOPPED,"network_interfaces":{"type":"default_ipv6"}}
202 POST external-subnets/s/attach?IN {"instance":"with-v6"} => "instance_id":"
204 DELETE instances/with-v4?IN
204 DELETE instances/with-v6?IN
200 GET external-subnets/s?IN => "instance_id":null
204 DELETE external-subnets/s?IN
204 POST OTHER/members/remove {"subnet":"fd00:1::/48"}
204 DELETE OTHER`, "OTHER", "system/subnet-pools/other", "IN", "project=default",
		"STOPPED", `"hostname":"i","ncpus":1,"memory":1073741824,"start":false`, "ALLOCATOR",
		`"allocator":{"type":"auto","prefix_length":64,"pool_selector":{"type":"auto"`)
}

func (r *rackServer) externalSubnets() {
	r.play(`
400 CREATE {NAME=s,"allocator":{"type":"auto","prefix_length":28}}
	=> as there is no linked default pool
404 CREATE {NAME=s,"allocator":{"type":"auto","prefix_length":28,"pool_selector":
	{"type":"explicit","pool":"nope"}}} => subnet-pool
400 CREATE {NAME=s,"allocator":{"type":"explicit","subnet":"10.3.0.0/31"}}
	=> not contained in any subnet pool
201 CREATE {NAME=s1,"allocator":{"type":"explicit","subnet":"10.3.0.16/28"}}
	=> "subnet":"10.3.0.16/28"
400 CREATE {NAME=s,"allocator":{"type":"explicit","subnet":"10.3.0.16/30"}}
	=> overlaps with an existing external subnet
201 CREATE {NAME=s2,LENGTH:28}} => "subnet":"10.3.0.0/28"
201 CREATE {NAME=s3,LENGTH:29}} => "subnet":"10.3.0.32/29"
201 CREATE {NAME=s4,LENGTH:25}} => "subnet":"10.3.0.128/25"
400 CREATE {NAME=s,LENGTH:25}}
	=> Could not allocate a /25 subnet from the subnet pool with name 'subnets'
200 GET POOL/utilization => {"capacity":256,"remaining":88}
400 DELETE POOL/silos/simulated
	=> Cannot unlink subnet pool from silo while there are external subnets
400 POST POOL/members/remove {"subnet":"10.3.0.0/24"}
	=> Cannot delete external subnet pool member while it contains external subnets
400 POST external-subnets/s1/detach?IN => External subnet is not attached to an instance
202 POST external-subnets/s1/attach?IN {"instance":"a"} => "instance_id":"
202 POST external-subnets/s1/attach?IN {"instance":"a"} => "instance_id":"
400 POST external-subnets/s1/attach?IN {"instance":"idle"} => while still attached to another
200 GET instances/a/external-subnets?IN => "subnet":"10.3.0.16/28"
202 POST external-subnets/s1/detach?IN => "instance_id":null
204 DELETE external-subnets/s1?IN
204 DELETE external-subnets/s2?IN
204 DELETE external-subnets/s3?IN
204 DELETE external-subnets/s4?IN`, "POOL", "system/subnet-pools/subnets",
		"CREATE", "POST external-subnets?project=default", "IN", "project=default",
		"LENGTH", `"allocator":{"type":"auto","pool_selector":{"type":"explicit","pool":"subnets"},`+
			`"prefix_length"`)
}

func TestSourceNATUsesTheDefaultPool(t *testing.T) { // A65
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin, Instances: []engine.InstanceSpec{}})
	const pool = "/v1/system/ip-pools/default"
	words := []string{"POOL", strings.TrimPrefix(pool, "/v1/"),
		"STOPPED", `"hostname":"i","ncpus":1,"memory":1073741824,"start":false`}
	r.play(`
204 POST POOL/ranges/remove {"first":"198.18.0.0","last":"198.19.255.255"}
507 POST instances?project=default {NAME=a,STOPPED} => No external IP addresses available
201 POST POOL/ranges/add {"first":"10.6.0.1","last":"10.6.0.2"}`, words...)
	for n := range 8 { // four instances share an address
		r.demand(200, fmt.Sprintf(`"remaining":%d`, 2-(n+3)/4), "GET "+pool+"/utilization")
		r.demand(201, "", newInstance(fmt.Sprint("i", n), `,"start":false`))
	}
	r.play(`
200 GET instances/i7/external-ips?project=default => "first_port":49152,"ip":"10.6.0.2"
507 POST instances?project=default {NAME=a,STOPPED} => No external IP addresses available
204 DELETE instances/i2?project=default
201 POST instances?project=default {NAME=a,STOPPED}
200 PUT POOL/silos/simulated {"is_default":false} => "is_default":false
404 POST instances?project=default {NAME=b,STOPPED}
	=> not found: default unicast IPv4 pool for current silo
500 POST me/ssh-keys {NAME=k,"public_key":"éTOO-LONG"} => Internal
201 POST me/ssh-keys {NAME=k,"public_key":"TOO-LONG"}
201 POST vpc-subnets?vpc=default&project=default {NAME=small,"ipv4_block":"10.9.0.0/26"}
200 PUT POOL/silos/simulated {"is_default":true} => "is_default":true
201 POST POOL/ranges/add {"first":"10.6.1.0","last":"10.6.1.255"}`,
		append(words, "TOO-LONG", strings.Repeat("é", 1023))...) // A70
	nic := func(n int, version string) string {
		return newInstance(fmt.Sprint("n", n), fmt.Sprintf(`,"start":false,"network_interfaces":`+
			`{"type":"create","params":[{"name":"n","description":"","vpc_name":"default",`+
			`"subnet_name":"small","ip_config":{"type":%q,"value":{"ip":{"type":"auto"}}}}]}`, version))
	}
	for n := range 64 - 6 { // A52: the first five and the last are reserved
		r.demand(201, "", nic(n, "v4"))
	}
	r.demand(400, "No available IPv4 addresses", nic(64, "v4"))
	r.demand(201, "", nic(64, "v6"))
}

func TestANetworkInterfaceGetsTheRequestedAddress(t *testing.T) { // A52
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

func TestSwitchPortsGetAddressesFromAddressLots(t *testing.T) {
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin})
	words := []string{"LOTS", "system/networking/address-lot",
		"PORTS", "system/networking/switch-port-settings", "BLOCK", `"first_address":"10.0.0.1"`,
		"PHY", `"port_config":{"geometry":"qsfp28x1"},"links":[{"link_name":"phy0","autoneg":false,` +
			`"mtu":1500,"speed":"speed1_g","lldp":{"enabled":true}}],"addresses":[{"link_name":"phy0",` +
			`"addresses":[{"address_lot":"lot","address"`}
	lot := r.play(`
400 POST LOTS {NAME=lot,"kind":"infra","blocks":[{BLOCK,"last_address":"fd00::"}]}
	=> must be in same address family
400 POST LOTS {NAME=lot,"kind":"infra","blocks":[{BLOCK,"last_address":"10.0.0.0"}]}
	=> first must be <= last
400 POST PORTS {NAME=a,PHY:"10.0.0.1/24"}]}]} => AddressLot not found
201 POST LOTS {NAME=lot,"kind":"infra","blocks":[{BLOCK,"last_address":"10.0.0.9"}]}`, words...)
	port := r.play(`
201 POST LOTS {NAME=lot,"kind":"infra","blocks":[{BLOCK,"last_address":"10.0.0.9"},
	{"first_address":"10.1.0.1","last_address":"10.1.0.9"}]} => ID
200 GET LOTS/lot => BLOCK
200 GET LOTS/lot => "10.1.0.9"
200 GET LOTS/lot/blocks => BLOCK
200 GET LOTS/lot/blocks => "10.1.0.9"
200 GET LOTS => initial-infra
400 POST PORTS {NAME=a,PHY:"10.0.1.1/24"}]}]} => address not in lot
201 POST PORTS {NAME=a,PHY:"10.0.0.1/24"}]}]} => "vlan_id":null`,
		append(words, "ID", unmarshal[engine.Lot](t, lot).Lot.ID)...)
	r.play(`
400 POST PORTS {NAME=b,PHY:"10.0.0.1/24"}]}]} => address unavailable
501 POST PORTS {NAME=b,PHY:"10.0.0.2/24"}]}],"bgp_peers":[{}]} => the bgp_peers of a switch port
201 POST PORTS {NAME=a,PHY:"10.0.0.1/24"}]}],"routes":[{"link_name":"phy0","routes":
	[{"dst":"0.0.0.0/0","gw":"10.0.0.1"}]}]} => ID
200 GET PORTS/a => "interface_name":"phy0","port_settings_id":"ID
200 GET PORTS => ID
400 DELETE LOTS/lot => lot is in use
400 DELETE PORTS => name or id required
204 DELETE PORTS?port_settings=a
400 DELETE PORTS?port_settings=a => port settings not found
404 GET PORTS/a => switch-port-settings with name \"a\"
204 DELETE LOTS/lot`, append(words, "ID", unmarshal[store.Identity](t, port).ID)...)
}
