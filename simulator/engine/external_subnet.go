package engine

import (
	"net/netip"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// SubnetAllocation describes the external subnet of a request: Subnet, or a subnet of the prefix
// length Length from a pool.
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

// allows reports whether subnets with that prefix length may be allocated from the member.
func (e Extent) allows(length int) bool { return e.MinPrefix <= length && length <= e.MaxPrefix }

// givenSubnet finds the member of a linked pool that contains the subnet of the request.
func (c *Change) givenSubnet(a SubnetAllocation, taken []Extent) (pool store.Resource,
	member Extent, subnet netip.Prefix) {
	want := SubnetExtent(a.Subnet)
	for r := range linkedPools(c.Tx, SubnetPool) {
		for _, m := range extentsOf(c.Tx, r) {
			if m.contains(want.First) && m.contains(want.Last) && m.allows(a.Subnet.Bits()) {
				pool, member = r, m
			}
		}
	}
	if pool.ID == "" {
		c.Check(invalidRequest("The requested IP subnet is not contained in any subnet pool available " +
			"in the current silo."))
	}
	if slices.ContainsFunc(taken, want.overlaps) {
		c.Check(invalidRequest("The requested IP subnet overlaps with an existing external subnet"))
	}
	return pool, member, a.Subnet
}

// freeSubnet finds the first free subnet of a length in a pool.
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
func (s Resources) AttachExternalSubnet(call *Call, scope Scope, sel, instance store.Selector) (
	store.Resource, error) {
	return s.attach(call, ExternalSubnet, scope, sel, instance,
		func(c *Change, i store.Instance) {
			if user(c) != i.ID {
				c.Check(c.subnetProblem(i))
				c.moveTo(i.ID)
			}
		})
}

func (c *Change) subnetProblem(i store.Instance) error {
	version := versionOf(netip.MustParsePrefix(c.old.Text("subnet")).Addr())
	switch {
	case i.ProjectID != c.parent.ID:
		return invalidRequest("External subnet and instance must be in the same project")
	case user(c) != "":
		return invalidRequest("External subnets cannot be attached to one instance while still " +
			"attached to another")
	case i.RunState == store.RunFailed, i.RunState == store.StateCreating:
		return invalidRequest("Cannot attach subnet to instance in %s state", i.RunState)
	case len(attachedTo(c.Tx, ExternalSubnet, i.ID)) >= maxExternalSubnets:
		return invalidRequest("An instance may not have more than %d attached subnets",
			maxExternalSubnets)
	case !hasStack(c.Tx, i, version):
		return invalidRequest("Cannot attach an IP%s external subnet to an instance that does not "+
			"have a matching IP stack", version)
	}
	return nil
}

// DetachExternalSubnet detaches an external subnet from its instance.
func (s Resources) DetachExternalSubnet(call *Call, scope Scope, sel store.Selector) (
	store.Resource, error) {
	return s.detach(call, ExternalSubnet, scope, sel,
		invalidRequest("External subnet is not attached to an instance"),
		func(tx *store.Tx, i store.Instance) {
			if i.RunState == store.RunFailed || i.RunState == store.StateCreating {
				tx.Check(invalidRequest("Cannot detach subnet from instance in %s state", i.RunState))
			}
		})
}

// ExternalSubnets lists the external subnets of an instance.
func (s Resources) ExternalSubnets(call *Call, instance Ref) ([]store.Resource, error) {
	return ofInstance(s.Simulation, call, instance, func(tx *store.Tx,
		i store.Instance) []store.Resource {
		return attachedTo(tx, ExternalSubnet, i.ID)
	})
}
