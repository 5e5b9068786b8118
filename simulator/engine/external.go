package engine

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Allocation describes the external address that a request asks for: IP if it is set. Otherwise it
// is any address of Pool or, without a Pool, of the default pool for the IP version Version.
type Allocation struct {
	IP      string
	Pool    store.Selector
	Version string
}

var pools = []struct {
	name, version string
	isDefault     bool
	net           netip.Prefix
}{
	{defaultNetwork, StackV4, true, netip.MustParsePrefix("198.18.0.0/15")},
	{"default-ipv6", StackV6, false, netip.MustParsePrefix("2001:db8::/64")},
}

const unicast = "unicast"

func createPools(c *Change) {
	const lot = "initial-infra"
	if !AddressLot.Table().Taken(c.Tx, "", lot) {
		none := Extent{First: netip.IPv4Unspecified(), Last: netip.IPv4Unspecified()}
		c.create(AddressLot, store.Resource{}, named(lot, "initial infrastructure ip address lot",
			map[string]any{"kind": "infra", "blocks": []Extent{none}}))
	}
	for _, p := range pools {
		_, ok := IPPool.Table().Get(c.Tx, store.DerivedID(IPPool.Name, "", p.name))
		if ok || IPPool.Table().Taken(c.Tx, "", p.name) {
			continue
		}
		e := SubnetExtent(p.net)
		e.Subnet = netip.Prefix{}
		c.create(IPPool, store.Resource{}, named(p.name, "made by the simulator",
			map[string]any{"ip_version": p.version, isDefault: p.isDefault,
				extents: []Extent{made(e)}}))
	}
}

func setAddress(c *Change, value any) {
	pool, address := c.allocate(value.(Allocation))
	c.record.Fields["ip"], c.record.Fields["ip_pool_id"] = address.String(), pool.ID
}

func (c *Change) allocate(a Allocation) (pool store.Resource, address netip.Addr) {
	used := c.usedAddresses(FloatingIP, ephemeralIP, natIP)
	if a.IP != "" {
		address = netip.MustParseAddr(a.IP)
		pool, _ = c.poolWith(IPPool, func(e Extent) bool { return e.contains(address) })
		c.Refuse(pool.ID == "", invalidRequest("IP address %s is not in any configured pool", address))
		c.Refuse(used[address], invalidRequest("Requested external IP address not available"))
		return pool, address
	}
	pool = c.choose(IPPool, a)
	return pool, c.firstFree(pool, func(a netip.Addr) bool { return !used[a] })
}

func (c *Change) firstFree(pool store.Resource, free func(netip.Addr) bool) netip.Addr {
	for _, e := range extentsOf(c.Tx, pool) {
		for address := e.First; e.contains(address); address = address.Next() {
			if free(address) {
				return address
			}
		}
	}
	c.Check(insufficientCapacity("No external IP addresses available"))
	return netip.Addr{}
}

// attachNAT gives a new instance an address for source NAT if its primary interface has IPv4. Four
// instances share an address of the default pool, each with a quarter of the ports (A65).
func (r *Simulation) attachNAT(tx *store.Tx, i store.Instance, nics []store.NetworkInterface) {
	if len(nics) == 0 || nics[0].IPStack.Type == StackV6 {
		return
	}
	c := &Change{Simulation: r, Tx: tx}
	pool := c.choose(IPPool, Allocation{Version: StackV4})
	used := c.usedAddresses(FloatingIP, ephemeralIP)
	taken := map[string]bool{}
	for r := range natIP.Table().All(tx) {
		taken[fmt.Sprint(r.Text("ip"), " ", r.Fields["first_port"])] = true
	}
	const ports = 1 << 14
	first := 0
	address := c.firstFree(pool, func(a netip.Addr) bool {
		for first = 0; first < 4*ports && taken[fmt.Sprint(a, " ", first)]; {
			first += ports
		}
		return !used[a] && first < 4*ports
	})
	c.create(natIP, store.Resource{Identity: i.Identity}, named(natIP.Name, "",
		map[string]any{"kind": "snat", "ip": address.String(), "ip_pool_id": pool.ID,
			"first_port": first, "last_port": first + ports - 1}))
}

func (c *Change) poolWith(k *Kind, fits func(Extent) bool) (pool store.Resource, extent Extent) {
	for r := range linkedPools(c.Tx, k) {
		for _, e := range extentsOf(c.Tx, r) {
			if fits(e) {
				pool, extent = r, e
			}
		}
	}
	return pool, extent
}

// choose returns the pool that a request names. Without a name it returns the silo's default pool.
func (c *Change) choose(k *Kind, a Allocation) (pool store.Resource) {
	if a.Pool.Given() {
		pool = find(c.Tx, k.Table(), "", a.Pool)
		kind := pool.Text("pool_type")
		c.Refuse(k == IPPool && kind != unicast,
			invalidRequest("Pool '%s' is not a unicast pool (type: %s)", pool.Name, kind))
		_, ok := linked(pool)
		c.Refuse(!ok, notFound(k.Name, a.Pool))
		return pool
	}
	found := 0
	for r := range k.Table().All(c.Tx) {
		if first, _ := linked(r); first && (k != IPPool || r.Text("pool_type") == unicast) &&
			(a.Version == "" || a.Version == r.Text("ip_version")) {
			pool, found = r, found+1
		}
	}
	if found == 1 {
		return pool
	}
	if k == SubnetPool {
		c.Refuse(found == 0, invalidRequest("Must specify a subnet pool, as there is no linked default "+
			"pool for the current silo"))
		c.Check(invalidRequest("Must specify an IP version when there is more than one default " +
			"subnet pool for the silo"))
	}
	c.Refuse(found == 0, refusal(http.StatusNotFound, "ObjectNotFound",
		"not found: default unicast IP%s pool for current silo", a.Version))
	c.Check(invalidRequest("Multiple default unicast IP pools exist with different IP versions. " +
		"Please specify ip_version (v4 or v6) or provide an explicit pool."))
	return pool
}

func (c *Change) usedAddresses(kinds ...*Kind) map[netip.Addr]bool {
	used := map[netip.Addr]bool{}
	for _, k := range kinds {
		for r := range k.Table().All(c.Tx) {
			used[netip.MustParseAddr(r.Text("ip"))] = true
		}
	}
	return used
}

// user returns the ID of the instance to which the record was attached before the change, or "".
func user(c *Change) string { return c.old.Text("instance_id") }

func attached(c *Change) (string, bool) { return "", user(c) != "" }

func attachedTo(tx *store.Tx, k *Kind, instanceID string) (all []store.Resource) {
	for r := range k.Table().All(tx) {
		if r.Text("instance_id") == instanceID {
			all = append(all, r)
		}
	}
	return all
}

const (
	kindFloating  = "floating"
	kindEphemeral = "ephemeral"
)

const maxExternalIPs = 32

// attachable checks whether i can get a further external IP. It permits the state "creating", in
// which a new instance gets its external IPs.
func attachable(tx *store.Tx, kind string, i store.Instance, address netip.Addr) {
	tx.Refuse(i.RunState == store.RunFailed,
		invalidRequest("cannot attach %s IP to instance in failed state", kind))
	has := len(attachedTo(tx, FloatingIP, i.ID)) + len(within(tx, ephemeralIP, i.ID))
	tx.Refuse(has >= maxExternalIPs,
		invalidRequest("an instance may not have more than %d external IP addresses", maxExternalIPs))
	version := versionOf(address)
	tx.Refuse(!hasStack(tx, i, version), invalidRequest("The %s external IP is an IP%s address, but "+
		"the instance with ID %s does not have a primary network interface with a VPC-private IP%s "+
		"address. Add a VPC-private IP%s address to the interface, or attach a different IP address",
		kind, version, i.ID, version, version))
	checkSettled(tx, i)
}

func hasStack(tx *store.Tx, i store.Instance, version string) bool {
	return slices.ContainsFunc(tx.Interfaces(i.ID), func(nic store.NetworkInterface) bool {
		return nic.Primary && (nic.IPStack.Type == StackDual || nic.IPStack.Type == version)
	})
}

func checkSettled(tx *store.Tx, i store.Instance) {
	tx.Refuse(i.RunState == store.RunStarting || i.RunState == store.RunStopping, errUnavailable)
}

func versionOf(address netip.Addr) string {
	if address.Is4() {
		return StackV4
	}
	return StackV6
}

var errOtherProject = invalidRequest("floating IP must be in the same project as the instance")

func (c *Change) attachFloating(i store.Instance) {
	if user(c) == i.ID {
		return
	}
	c.Refuse(user(c) != "", invalidRequest("floating IP cannot be attached to one instance while "+
		"still attached to another"))
	attachable(c.Tx, kindFloating, i, netip.MustParseAddr(c.old.Text("ip")))
	c.moveTo(i.ID)
}

// moveTo attaches the record to an instance, or detaches it if instanceID is nil.
func (c *Change) moveTo(instanceID any) {
	c.record.Fields["instance_id"] = instanceID
	c.record.Touch()
	c.put()
}

func (s Resources) attach(call *Call, tx *store.Tx, k *Kind,
	attach func(*Change, store.Instance)) store.Resource {
	c := s.change(call, tx, k)
	attach(c, find(tx, store.Instances, c.parent.ID, call.Body.(store.Selector)))
	return c.record
}

// AttachFloatingIP attaches a floating IP to an instance of its project.
func (s Resources) AttachFloatingIP(call *Call, tx *store.Tx) store.Resource {
	return s.attach(call, tx, FloatingIP, func(c *Change, i store.Instance) {
		c.Refuse(i.ProjectID != c.parent.ID, errOtherProject)
		c.Refuse(i.RunState == store.StateCreating,
			invalidRequest("cannot attach floating IP to instance in creating state"))
		c.attachFloating(i)
	})
}

func detachable(tx *store.Tx, kind string, i store.Instance) {
	tx.Refuse(i.RunState == store.RunFailed || i.RunState == store.StateCreating,
		invalidRequest("cannot detach %s IP from instance in %s state", kind, i.RunState))
	checkSettled(tx, i)
}

// detach detaches a record. The parameter detached is the error for an unattached record, or nil.
func (s Resources) detach(call *Call, tx *store.Tx, k *Kind, detached error,
	check func(store.Instance)) store.Resource {
	c := s.change(call, tx, k)
	if user(c) == "" {
		tx.Check(detached)
		return c.record
	}
	check(byID(tx, store.Instances, user(c)))
	c.moveTo(nil)
	return c.record
}

// DetachFloatingIP detaches a floating IP. It also succeeds if the IP is not attached.
func (s Resources) DetachFloatingIP(call *Call, tx *store.Tx) store.Resource {
	return s.detach(call, tx, FloatingIP, nil,
		func(i store.Instance) { detachable(tx, kindFloating, i) })
}

func ephemeralOf(r store.Resource) Item {
	return item(r.ID, map[string]any{"kind": kindEphemeral, "ip": r.Text("ip"),
		"ip_pool_id": r.Text("ip_pool_id")})
}

// attachEphemeral gives i an ephemeral address, unless i already has one of the same IP version.
func (c *Change) attachEphemeral(i store.Instance, a Allocation) store.Resource {
	_, address := c.allocate(a)
	if existing, ok := ephemeralIP.Table().ByName(c.Tx, i.ID, versionOf(address)); ok {
		return existing
	}
	attachable(c.Tx, kindEphemeral, i, address)
	return c.create(ephemeralIP, store.Resource{Identity: i.Identity},
		named(versionOf(address), "", map[string]any{"address_allocator": a}))
}

// AttachEphemeralIP gives an instance the ephemeral address that an [Allocation] describes.
func (s Instances) AttachEphemeralIP(call *Call, tx *store.Tx) Item {
	i := lookup(s.Simulation, call, tx, store.Instances)
	tx.Refuse(i.RunState == store.StateCreating,
		invalidRequest("cannot attach ephemeral IP to instance in creating state"))
	c := &Change{Simulation: s.Simulation, Tx: tx}
	return ephemeralOf(c.attachEphemeral(i, call.Body.(Allocation)))
}

// DetachEphemeralIP releases an instance's ephemeral address of an IP version. If version is "",
// the instance must have only one ephemeral address.
func (s Instances) DetachEphemeralIP(call *Call, version string, tx *store.Tx) {
	i := lookup(s.Simulation, call, tx, store.Instances)
	all := within(tx, ephemeralIP, i.ID)
	tx.Refuse(version == "" && len(all) > 1,
		invalidRequest("instance has two ephemeral IPs; specify ip_version to select which to detach"))
	at := slices.IndexFunc(all, func(r store.Resource) bool {
		return version == "" || r.Name == version
	})
	tx.Refuse(at < 0, invalidRequest("instance does not have an ephemeral IP attached"))
	detachable(tx, kindEphemeral, i)
	ephemeralIP.Table().Delete(tx, all[at])
}

func (r *Simulation) releaseAddresses(tx *store.Tx, instanceID string) {
	for _, k := range []*Kind{FloatingIP, ExternalSubnet} {
		for _, a := range attachedTo(tx, k, instanceID) {
			(&Change{Simulation: r, Tx: tx, kind: k, old: a, record: a}).moveTo(nil)
		}
	}
	for _, k := range []*Kind{ephemeralIP, natIP} {
		for _, a := range within(tx, k, instanceID) {
			k.Table().Delete(tx, a)
		}
	}
}

// ExternalIPCreate is an external address of a new instance: an existing floating IP, or a new
// ephemeral address.
type ExternalIPCreate struct {
	Floating  store.Selector
	Ephemeral Allocation
}

// checkExternalIPs checks the addresses before any part of an instance is created, as a rack does.
func checkExternalIPs(tx *store.Tx, create []ExternalIPCreate) {
	var ephemeral []Allocation
	for _, c := range create {
		if !c.Floating.Given() {
			ephemeral = append(ephemeral, c.Ephemeral)
		}
	}
	const maxEphemeral = 2
	tx.Refuse(len(ephemeral) > maxEphemeral,
		invalidRequest("An instance may not have more than %d ephemeral IP addresses", maxEphemeral))
	if len(ephemeral) < maxEphemeral {
		return
	}
	a, b := ephemeral[0], ephemeral[1]
	tx.Refuse(!a.Pool.Given() && a.Version == "" || !b.Pool.Given() && b.Version == "",
		invalidRequest("when requesting two ephemeral IPs, IP version or explicit pool name must be "+
			"specified on each"))
	tx.Refuse(a.Pool.Given() && a.Pool == b.Pool,
		invalidRequest("cannot request two ephemeral IPs from the same pool"))
	tx.Refuse(a.Version != "" && a.Version == b.Version,
		invalidRequest("cannot request two ephemeral IPs of the same version (%s)", a.Version))
}

func (s Instances) attachExternalIPs(tx *store.Tx, i store.Instance, create []ExternalIPCreate) {
	for _, e := range create {
		c := &Change{Simulation: s.Simulation, Tx: tx, kind: FloatingIP}
		if !e.Floating.Given() {
			c.attachEphemeral(i, e.Ephemeral)
			continue
		}
		ip := find(tx, FloatingIP.Table(), i.ProjectID, e.Floating)
		tx.Refuse(ip.Text("project_id") != i.ProjectID, errOtherProject)
		c.old, c.record = ip, ip
		c.attachFloating(i)
	}
}

// SubnetAllocation describes the external subnet that a request asks for: Subnet if it is valid,
// otherwise any subnet with the prefix length Length from the pool of the Allocation.
type SubnetAllocation struct {
	Subnet netip.Prefix
	Length int
	Allocation
}

func setSubnet(c *Change, value any) {
	a := value.(SubnetAllocation)
	var taken []Extent
	for r := range ExternalSubnet.Table().All(c.Tx) {
		taken = append(taken, SubnetExtent(netip.MustParsePrefix(r.Text("subnet"))))
	}
	choose := c.freeSubnet
	if a.Subnet.IsValid() {
		choose = c.givenSubnet
	}
	pool, member, subnet := choose(a, taken)
	c.record.Fields["subnet"] = subnet.String()
	c.record.Fields["subnet_pool_id"], c.record.Fields["subnet_pool_member_id"] = pool.ID, member.ID
}

func (e Extent) allows(length int) bool { return e.MinPrefix <= length && length <= e.MaxPrefix }

func (c *Change) givenSubnet(a SubnetAllocation, taken []Extent) (pool store.Resource,
	member Extent, subnet netip.Prefix) {
	want := SubnetExtent(a.Subnet)
	pool, member = c.poolWith(SubnetPool, func(m Extent) bool {
		return m.contains(want.First) && m.contains(want.Last) && m.allows(a.Subnet.Bits())
	})
	c.Refuse(pool.ID == "", invalidRequest("The requested IP subnet is not contained in any subnet "+
		"pool available in the current silo."))
	c.Refuse(slices.ContainsFunc(taken, want.overlaps),
		invalidRequest("The requested IP subnet overlaps with an existing external subnet"))
	return pool, member, a.Subnet
}

func (c *Change) freeSubnet(a SubnetAllocation, taken []Extent) (pool store.Resource,
	member Extent, subnet netip.Prefix) {
	pool = c.choose(SubnetPool, a.Allocation)
	for _, m := range extentsOf(c.Tx, pool) {
		for at := m.First; m.allows(a.Length) && m.contains(at); {
			next := SubnetExtent(netip.PrefixFrom(at, a.Length).Masked())
			other := slices.IndexFunc(taken, next.overlaps)
			switch {
			case !m.contains(next.First) || !m.contains(next.Last):
			case other < 0:
				return pool, m, next.Subnet
			case next.Last.Less(taken[other].Last):
				next = taken[other]
			}
			at = next.Last.Next()
		}
	}
	from := "default subnet pool for the current silo"
	switch {
	case a.Pool.ID != "":
		from = "subnet pool with ID '" + a.Pool.ID + "'"
	case a.Pool.Given():
		from = "subnet pool with name '" + a.Pool.Name + "'"
	case a.Version != "":
		from = "default IP" + a.Version + " subnet pool for the current silo"
	}
	c.Check(invalidRequest("Could not allocate a /%d subnet from the %s", a.Length, from))
	return pool, member, subnet
}

const maxExternalSubnets = 32

// AttachExternalSubnet attaches an external subnet to an instance of its project.
func (s Resources) AttachExternalSubnet(call *Call, tx *store.Tx) store.Resource {
	return s.attach(call, tx, ExternalSubnet, func(c *Change, i store.Instance) {
		if user(c) != i.ID {
			c.checkSubnet(i)
			c.moveTo(i.ID)
		}
	})
}

func (c *Change) checkSubnet(i store.Instance) {
	version := versionOf(netip.MustParsePrefix(c.old.Text("subnet")).Addr())
	c.Refuse(i.ProjectID != c.parent.ID,
		invalidRequest("External subnet and instance must be in the same project"))
	c.Refuse(user(c) != "", invalidRequest("External subnets cannot be attached to one instance "+
		"while still attached to another"))
	c.Refuse(i.RunState == store.RunFailed || i.RunState == store.StateCreating,
		invalidRequest("Cannot attach subnet to instance in %s state", i.RunState))
	c.Refuse(len(attachedTo(c.Tx, ExternalSubnet, i.ID)) >= maxExternalSubnets,
		invalidRequest("An instance may not have more than %d attached subnets", maxExternalSubnets))
	c.Refuse(!hasStack(c.Tx, i, version), invalidRequest("Cannot attach an IP%s external subnet to "+
		"an instance that does not have a matching IP stack", version))
}

// DetachExternalSubnet detaches an external subnet from its instance.
func (s Resources) DetachExternalSubnet(call *Call, tx *store.Tx) store.Resource {
	return s.detach(call, tx, ExternalSubnet,
		invalidRequest("External subnet is not attached to an instance"),
		func(i store.Instance) {
			tx.Refuse(i.RunState == store.RunFailed || i.RunState == store.StateCreating,
				invalidRequest("Cannot detach subnet from instance in %s state", i.RunState))
		})
}

// ExternalSubnets lists the external subnets of an instance, in the order of their IDs.
func (s Resources) ExternalSubnets(call *Call, tx *store.Tx) []store.Resource {
	id := lookup(s.Simulation, call, tx, store.Instances).ID
	return attachedTo(tx, ExternalSubnet, id)
}
