package engine

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Allocation describes the external address of a request: IP, or an address from Pool, or an
// address of the IP version Version from the default pool.
type Allocation struct {
	IP      string
	Pool    store.Selector
	Version string
}

// pools are the silo's pools of external addresses at the start.
var pools = []struct {
	name, version string
	isDefault     bool
	net           netip.Prefix
}{
	{defaultNetwork, StackV4, true, netip.MustParsePrefix("198.18.0.0/15")},
	{"default-ipv6", StackV6, false, netip.MustParsePrefix("2001:db8::/64")},
}

const unicast = "unicast"

// createPools creates the silo's pools and the lot of the rack's own addresses, if the directory
// lacks them.
func createPools(c *Change) error {
	const lot = "initial-infra"
	if !AddressLot.Table().Taken(c.tx, "", lot) {
		none := Extent{First: netip.IPv4Unspecified(), Last: netip.IPv4Unspecified()}
		if _, err := c.create(AddressLot, store.Resource{}, named(lot,
			"initial infrastructure ip address lot", map[string]any{"kind": "infra",
				"blocks": []Extent{none}})); err != nil {
			return err
		}
	}
	for _, p := range pools {
		_, ok, err := IPPool.Table().Get(c.tx, store.DerivedID(IPPool.Name, "", p.name))
		if err != nil {
			return err
		}
		if ok || IPPool.Table().Taken(c.tx, "", p.name) {
			continue
		}
		e := SubnetExtent(p.net)
		e.Subnet = netip.Prefix{}
		if _, err := c.create(IPPool, store.Resource{}, named(p.name, "made by the simulator",
			map[string]any{"ip_version": p.version, isDefault: p.isDefault,
				extents: []Extent{made(e)}})); err != nil {
			return err
		}
	}
	return nil
}

// setAddress chooses the address of a floating or an ephemeral IP.
func setAddress(c *Change, value any) error {
	pool, address, err := c.allocate(value.(Allocation))
	if err == nil {
		c.record.Fields["ip"], c.record.Fields["ip_pool_id"] = address.String(), pool.ID
	}
	return err
}

var errNoAddress = invalidRequest("Requested external IP address not available")

// allocate finds a free address in the pools that are linked to the silo.
func (c *Change) allocate(a Allocation) (pool store.Resource, address netip.Addr, err error) {
	used, err := c.usedAddresses(FloatingIP, ephemeralIP, natIP)
	if err != nil {
		return pool, address, err
	}
	if a.IP != "" {
		address = netip.MustParseAddr(a.IP)
		pool, err = c.poolWith(address)
		if err == nil && used[address] {
			err = errNoAddress
		}
		return pool, address, err
	}
	if pool, err = c.choose(IPPool, a); err != nil {
		return pool, address, err
	}
	address, err = firstFree(pool, func(a netip.Addr) bool { return !used[a] })
	return pool, address, err
}

// firstFree returns the lowest address of a pool that is free.
func firstFree(pool store.Resource, free func(netip.Addr) bool) (netip.Addr, error) {
	ranges, err := extentsOf(pool)
	for _, e := range ranges {
		for address := e.First; e.contains(address); address = address.Next() {
			if free(address) {
				return address, err
			}
		}
	}
	return netip.Addr{}, errors.Join(err, insufficientCapacity("No external IP addresses available"))
}

// attachNAT gives a new instance an address for source NAT from the silo's default pool, if its
// primary interface has IPv4. Four instances share an address, each with a quarter of its ports
// (A65).
func (r *Simulation) attachNAT(tx *store.Tx, i store.Instance,
	nics []store.NetworkInterface) error {
	if len(nics) == 0 || nics[0].IPStack.Type == StackV6 {
		return nil
	}
	c := &Change{Simulation: r, tx: tx}
	pool, err := c.choose(IPPool, Allocation{Version: StackV4})
	if err != nil {
		return err
	}
	used, err := c.usedAddresses(FloatingIP, ephemeralIP)
	taken := map[string]bool{}
	err = errors.Join(err, natIP.Table().Each(tx, func(r store.Resource) error {
		taken[fmt.Sprint(r.Text("ip"), " ", r.Fields["first_port"])] = true
		return nil
	}))
	if err != nil {
		return err
	}
	const ports = 1 << 14
	first := 0
	address, err := firstFree(pool, func(a netip.Addr) bool {
		for first = 0; first < 4*ports && taken[fmt.Sprint(a, " ", first)]; {
			first += ports
		}
		return !used[a] && first < 4*ports
	})
	if err != nil {
		return err
	}
	_, err = c.create(natIP, store.Resource{Identity: i.Identity}, named(natIP.Name, "",
		map[string]any{"kind": "snat", "ip": address.String(), "ip_pool_id": pool.ID,
			"first_port": first, "last_port": first + ports - 1}))
	return err
}

func (c *Change) poolWith(address netip.Addr) (pool store.Resource, err error) {
	found := false
	err = IPPool.Table().Each(c.tx, func(r store.Resource) error {
		ranges, err := extentsOf(r)
		for _, e := range ranges {
			if _, ok := linked(r); ok && e.contains(address) {
				pool, found = r, true
			}
		}
		return err
	})
	if err == nil && !found {
		err = invalidRequest("IP address %s is not in any configured pool", address)
	}
	return pool, err
}

// choose returns the linked pool that a request names, or the default one.
func (c *Change) choose(k *Kind, a Allocation) (pool store.Resource, err error) {
	if a.Pool.Given() {
		if pool, err = find(c.tx, k.Table(), "", a.Pool); err != nil {
			return pool, err
		}
		if kind := pool.Text("pool_type"); k == IPPool && kind != unicast {
			return pool, invalidRequest("Pool '%s' is not a unicast pool (type: %s)", pool.Name, kind)
		}
		if _, ok := linked(pool); !ok {
			return pool, notFound(k.Name, a.Pool)
		}
		return pool, nil
	}
	found := 0
	err = k.Table().Each(c.tx, func(r store.Resource) error {
		if first, _ := linked(r); first && (k != IPPool || r.Text("pool_type") == unicast) &&
			(a.Version == "" || a.Version == r.Text("ip_version")) {
			pool, found = r, found+1
		}
		return nil
	})
	switch {
	case err != nil || found == 1:
		return pool, err
	case k == SubnetPool && found == 0:
		return pool, invalidRequest("Must specify a subnet pool, as there is no linked default pool " +
			"for the current silo")
	case k == SubnetPool:
		return pool, invalidRequest("Must specify an IP version when there is more than one default " +
			"subnet pool for the silo")
	case found == 0:
		return pool, &Error{Status: http.StatusNotFound, Code: "ObjectNotFound",
			Message: fmt.Sprintf("not found: default unicast IP%s pool for current silo", a.Version)}
	}
	return pool, invalidRequest("Multiple default unicast IP pools exist with different IP " +
		"versions. Please specify ip_version (v4 or v6) or provide an explicit pool.")
}

// usedAddresses returns the external addresses of the records of these kinds.
func (c *Change) usedAddresses(kinds ...*Kind) (used map[netip.Addr]bool, err error) {
	used = map[netip.Addr]bool{}
	for _, k := range kinds {
		err = errors.Join(err, k.Table().Each(c.tx, func(r store.Resource) error {
			used[netip.MustParseAddr(r.Text("ip"))] = true
			return nil
		}))
	}
	return used, err
}

func permitFloatingIP(c *Change, in *ResourceInput) error {
	if in == nil && c.old.Text("instance_id") != "" {
		return invalidRequest("Floating IP cannot be deleted while attached to an instance")
	}
	return nil
}

// natOf returns the address for source NAT of an instance, if it has one.
func natOf(tx *store.Tx, instanceID string) ([]store.Resource, error) {
	return natIP.Table().Scan(tx, instanceID, store.ByName, nil, noLimit)
}

func attachedTo(tx *store.Tx, k *Kind, instanceID string) (all []store.Resource, err error) {
	err = k.Table().Each(tx, func(r store.Resource) error {
		if r.Text("instance_id") == instanceID {
			all = append(all, r)
		}
		return nil
	})
	return all, err
}

func externalIPs(tx *store.Tx, instanceID string) (floating, ephemeral []store.Resource,
	err error) {
	floating, err = attachedTo(tx, FloatingIP, instanceID)
	ephemeral, scanned := ephemeralIP.Table().Scan(tx, instanceID, store.ByName, nil, noLimit)
	return floating, ephemeral, errors.Join(err, scanned)
}

// Kinds of external addresses.
const (
	kindFloating  = "floating"
	kindEphemeral = "ephemeral"
)

const maxExternalIPs = 32

// attachable returns the reason why an address cannot be attached to an instance, which may be in
// the state creating.
func attachable(tx *store.Tx, kind string, i store.Instance, address netip.Addr) error {
	if i.RunState == store.RunFailed {
		return invalidRequest("cannot attach %s IP to instance in failed state", kind)
	}
	floating, ephemeral, err := externalIPs(tx, i.ID)
	if err != nil {
		return err
	}
	if len(floating)+len(ephemeral) >= maxExternalIPs {
		return invalidRequest("an instance may not have more than %d external IP addresses",
			maxExternalIPs)
	}
	version := versionOf(address)
	nics, err := tx.Interfaces(i.ID)
	if err != nil {
		return err
	}
	for _, nic := range nics {
		if nic.Primary && (nic.IPStack.Type == StackDual || nic.IPStack.Type == version) {
			return checkSettled(i)
		}
	}
	return invalidRequest("The %s external IP is an IP%s address, but the instance with ID %s does "+
		"not have a primary network interface with a VPC-private IP%s address. Add a VPC-private "+
		"IP%s address to the interface, or attach a different IP address", kind, version, i.ID,
		version, version)
}

// checkSettled returns an error while an instance starts or stops.
func checkSettled(i store.Instance) error {
	if i.RunState == store.RunStarting || i.RunState == store.RunStopping {
		return errUnavailable
	}
	return nil
}

func versionOf(address netip.Addr) string {
	if address.Is4() {
		return StackV4
	}
	return StackV6
}

var errOtherProject = invalidRequest("floating IP must be in the same project as the instance")

func (c *Change) attachFloating(i store.Instance) error {
	switch c.old.Text("instance_id") {
	case i.ID:
		return nil
	case "":
	default:
		return invalidRequest("floating IP cannot be attached to one instance while still attached " +
			"to another")
	}
	err := attachable(c.tx, kindFloating, i, netip.MustParseAddr(c.old.Text("ip")))
	if err != nil {
		return err
	}
	return c.moveTo(i.ID)
}

// moveTo attaches a floating IP or an external subnet to an instance. If instanceID is nil, it
// detaches it.
func (c *Change) moveTo(instanceID any) error {
	c.record.Fields["instance_id"] = instanceID
	c.record.Touch()
	return c.put()
}

// attach attaches a floating IP or an external subnet to an instance of its project.
func (s Resources) attach(call *Call, k *Kind, scope Scope, sel, instance store.Selector,
	attach func(*Change, store.Instance) error) (store.Resource, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) (r store.Resource, err error) {
		c, err := s.change(call, tx, k, scope, sel)
		if err != nil {
			return r, err
		}
		i, err := find(tx, store.Instances, c.parent.ID, instance)
		if err == nil {
			err = attach(c, i)
		}
		return c.record, err
	})
}

// AttachFloatingIP attaches a floating IP to an instance of its project.
func (s Resources) AttachFloatingIP(call *Call, scope Scope, sel, instance store.Selector) (
	store.Resource, error) {
	return s.attach(call, FloatingIP, scope, sel, instance, func(c *Change, i store.Instance) error {
		switch {
		case i.ProjectID != c.parent.ID:
			return errOtherProject
		case i.RunState == store.StateCreating:
			return invalidRequest("cannot attach floating IP to instance in creating state")
		}
		return c.attachFloating(i)
	})
}

// detachable returns the reason why an address cannot be detached from an instance.
func detachable(kind string, i store.Instance) error {
	if i.RunState == store.RunFailed || i.RunState == store.StateCreating {
		return invalidRequest("cannot detach %s IP from instance in %s state", kind, i.RunState)
	}
	return checkSettled(i)
}

// detach detaches a floating IP or an external subnet from its instance, unless problem returns an
// error for the instance. If it is not attached, detach returns the error detached.
func (s Resources) detach(call *Call, k *Kind, scope Scope, sel store.Selector, detached error,
	problem func(store.Instance) error) (store.Resource, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) (r store.Resource, err error) {
		c, err := s.change(call, tx, k, scope, sel)
		if err != nil {
			return r, err
		}
		id := c.old.Text("instance_id")
		if id == "" {
			return c.record, detached
		}
		i, err := find(tx, store.Instances, "", store.Selector{ID: id})
		if err == nil {
			err = problem(i)
		}
		if err == nil {
			err = c.moveTo(nil)
		}
		return c.record, err
	})
}

// DetachFloatingIP detaches a floating IP. It does not change a detached one.
func (s Resources) DetachFloatingIP(call *Call, scope Scope, sel store.Selector) (
	store.Resource, error) {
	return s.detach(call, FloatingIP, scope, sel, nil, func(i store.Instance) error {
		return detachable(kindFloating, i)
	})
}

// Ephemeral is an ephemeral address in the form of the API.
type Ephemeral struct {
	Kind     string `json:"kind"`
	IP       string `json:"ip"`
	IPPoolID string `json:"ip_pool_id"`
}

func ephemeralOf(r store.Resource) Ephemeral {
	return Ephemeral{kindEphemeral, r.Text("ip"), r.Text("ip_pool_id")}
}

// attachEphemeral gives an instance an ephemeral address. An instance that has one of the same IP
// version keeps the old address.
func (c *Change) attachEphemeral(i store.Instance, a Allocation) (store.Resource, error) {
	_, address, err := c.allocate(a)
	if err != nil {
		return store.Resource{}, err
	}
	existing, ok, err := ephemeralIP.Table().ByName(c.tx, i.ID, versionOf(address))
	if err != nil || ok {
		return existing, err
	}
	if err := attachable(c.tx, kindEphemeral, i, address); err != nil {
		return existing, err
	}
	return c.create(ephemeralIP, store.Resource{Identity: i.Identity},
		named(versionOf(address), "", map[string]any{"address_allocator": a}))
}

// AttachEphemeralIP gives an instance an ephemeral address.
func (s Instances) AttachEphemeralIP(call *Call, ref Ref, a Allocation) (Ephemeral, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) (e Ephemeral, err error) {
		i, err := lookup(s.Simulation, call, tx, store.Instances, ref)
		if err == nil && i.RunState == store.StateCreating {
			err = invalidRequest("cannot attach ephemeral IP to instance in creating state")
		}
		if err != nil {
			return e, err
		}
		r, err := (&Change{Simulation: s.Simulation, tx: tx}).attachEphemeral(i, a)
		return ephemeralOf(r), err
	})
}

// DetachEphemeralIP releases the ephemeral address of an IP version. If version is "", the instance
// must have only one.
func (s Instances) DetachEphemeralIP(call *Call, ref Ref, version string) error {
	return s.store.Update(func(tx *store.Tx) error {
		i, err := lookup(s.Simulation, call, tx, store.Instances, ref)
		if err != nil {
			return err
		}
		_, all, err := externalIPs(tx, i.ID)
		if err != nil {
			return err
		}
		if version == "" && len(all) > 1 {
			return invalidRequest("instance has two ephemeral IPs; specify ip_version to select which " +
				"to detach")
		}
		for _, r := range all {
			if version == "" || r.Name == version {
				if err := detachable(kindEphemeral, i); err != nil {
					return err
				}
				return errors.Join(ephemeralIP.Table().Delete(tx, r), failHalfway(call))
			}
		}
		return invalidRequest("instance does not have an ephemeral IP attached")
	})
}

// releaseAddresses detaches the external addresses and subnets of an instance that is being
// deleted.
func (r *Simulation) releaseAddresses(tx *store.Tx, instanceID string) error {
	floating, ephemeral, err := externalIPs(tx, instanceID)
	subnets, found := attachedTo(tx, ExternalSubnet, instanceID)
	err = errors.Join(err, found)
	for k, attached := range map[*Kind][]store.Resource{FloatingIP: floating,
		ExternalSubnet: subnets} {
		for _, a := range attached {
			c := &Change{Simulation: r, tx: tx, kind: k, old: a, record: a}
			err = errors.Join(err, c.moveTo(nil))
		}
	}
	for _, e := range ephemeral {
		err = errors.Join(err, ephemeralIP.Table().Delete(tx, e))
	}
	nat, found := natOf(tx, instanceID)
	for _, n := range nat {
		err = errors.Join(err, natIP.Table().Delete(tx, n))
	}
	return errors.Join(err, found)
}

// ExternalIPCreate is an external address of a new instance: the floating IP, or an ephemeral
// address.
type ExternalIPCreate struct {
	Floating  store.Selector
	Ephemeral Allocation
}

// externalIPsProblem makes the rack's checks of the addresses of a new instance, before any part of
// the instance is created.
func externalIPsProblem(create []ExternalIPCreate) error {
	var ephemeral []Allocation
	for _, c := range create {
		if !c.Floating.Given() {
			ephemeral = append(ephemeral, c.Ephemeral)
		}
	}
	const maxEphemeral = 2
	switch {
	case len(create) > maxExternalIPs:
		return invalidRequest("An instance may not have more than %d external IP addresses",
			maxExternalIPs)
	case len(ephemeral) > maxEphemeral:
		return invalidRequest("An instance may not have more than %d ephemeral IP addresses",
			maxEphemeral)
	case len(ephemeral) < maxEphemeral:
		return nil
	}
	a, b := ephemeral[0], ephemeral[1]
	switch {
	case !a.Pool.Given() && a.Version == "", !b.Pool.Given() && b.Version == "":
		return invalidRequest("when requesting two ephemeral IPs, IP version or explicit pool name " +
			"must be specified on each")
	case a.Pool.Given() && a.Pool == b.Pool:
		return invalidRequest("cannot request two ephemeral IPs from the same pool")
	case a.Version != "" && a.Version == b.Version:
		return invalidRequest("cannot request two ephemeral IPs of the same version (%s)", a.Version)
	}
	return nil
}

func (s Instances) attachExternalIPs(tx *store.Tx, i store.Instance,
	create []ExternalIPCreate) error {
	for _, e := range create {
		c := &Change{Simulation: s.Simulation, tx: tx, kind: FloatingIP}
		if !e.Floating.Given() {
			if _, err := c.attachEphemeral(i, e.Ephemeral); err != nil {
				return err
			}
			continue
		}
		ip, err := find(tx, FloatingIP.Table(), i.ProjectID, e.Floating)
		if err == nil && ip.Text("project_id") != i.ProjectID {
			err = errOtherProject
		}
		if err != nil {
			return err
		}
		c.old, c.record = ip, ip
		if err := c.attachFloating(i); err != nil {
			return err
		}
	}
	return nil
}
