package engine

import (
	"errors"
	"net/netip"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// SubnetAllocation describes the external subnet of a request: Subnet, or a subnet of the prefix
// length Length from a pool.
type SubnetAllocation struct {
	Subnet netip.Prefix
	Length int
	Allocation
}

func setSubnet(c *Change, value any) error {
	a := value.(SubnetAllocation)
	var taken []Extent
	err := ExternalSubnet.Table().Each(c.tx, func(r store.Resource) error {
		taken = append(taken, SubnetExtent(netip.MustParsePrefix(r.Text("subnet"))))
		return nil
	})
	if err != nil {
		return err
	}
	choose := c.freeSubnet
	if a.Subnet.IsValid() {
		choose = c.givenSubnet
	}
	pool, member, subnet, err := choose(a, taken)
	if err == nil {
		c.record.Fields["subnet"] = subnet.String()
		c.record.Fields["subnet_pool_id"], c.record.Fields["subnet_pool_member_id"] = pool.ID, member.ID
	}
	return err
}

// allows reports whether subnets with that prefix length may be allocated from the member.
func (e Extent) allows(length int) bool { return e.MinPrefix <= length && length <= e.MaxPrefix }

func overlapping(taken []Extent, subnet Extent) (Extent, bool) {
	for _, t := range taken {
		if t.overlaps(subnet) {
			return t, true
		}
	}
	return Extent{}, false
}

// givenSubnet finds the member of a linked pool that contains the subnet of the request.
func (c *Change) givenSubnet(a SubnetAllocation, taken []Extent) (pool store.Resource,
	member Extent, subnet netip.Prefix, err error) {
	want := SubnetExtent(a.Subnet)
	err = SubnetPool.Table().Each(c.tx, func(r store.Resource) error {
		members, err := extentsOf(r)
		for _, m := range members {
			if _, ok := linked(r); ok && m.contains(want.First) && m.contains(want.Last) &&
				m.allows(a.Subnet.Bits()) {
				pool, member = r, m
			}
		}
		return err
	})
	if err == nil && pool.ID == "" {
		err = invalidRequest("The requested IP subnet is not contained in any subnet pool available " +
			"in the current silo.")
	}
	if _, ok := overlapping(taken, want); err == nil && ok {
		err = invalidRequest("The requested IP subnet overlaps with an existing external subnet")
	}
	return pool, member, a.Subnet, err
}

// freeSubnet finds the first free subnet of a length in a pool.
func (c *Change) freeSubnet(a SubnetAllocation, taken []Extent) (pool store.Resource,
	member Extent, subnet netip.Prefix, err error) {
	if pool, err = c.choose(SubnetPool, a.Allocation); err != nil {
		return pool, member, subnet, err
	}
	members, err := extentsOf(pool)
	for _, m := range members {
		for at := m.First; m.allows(a.Length) && m.contains(at); {
			next := SubnetExtent(netip.PrefixFrom(at, a.Length).Masked())
			other, ok := overlapping(taken, next)
			switch {
			case !m.contains(next.First) || !m.contains(next.Last):
			case !ok:
				return pool, m, next.Subnet, nil
			case next.Last.Less(other.Last):
				next = other
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
	return pool, member, subnet, errors.Join(err,
		invalidRequest("Could not allocate a /%d subnet from the %s", a.Length, from))
}

func permitExternalSubnet(c *Change, in *ResourceInput) error {
	if in == nil && c.old.Text("instance_id") != "" {
		return invalidRequest("Cannot delete external subnet while it is attached to an instance. " +
			"Detach it and try again.")
	}
	return nil
}

const maxExternalSubnets = 32

// AttachExternalSubnet attaches an external subnet to an instance of its project.
func (s Resources) AttachExternalSubnet(call *Call, scope Scope, sel, instance store.Selector) (
	store.Resource, error) {
	return s.attach(call, ExternalSubnet, scope, sel, instance,
		func(c *Change, i store.Instance) error {
			if c.old.Text("instance_id") == i.ID {
				return nil
			}
			if err := c.subnetProblem(i); err != nil {
				return err
			}
			return c.moveTo(i.ID)
		})
}

func (c *Change) subnetProblem(i store.Instance) error {
	attached, err := attachedTo(c.tx, ExternalSubnet, i.ID)
	if err != nil {
		return err
	}
	version := versionOf(netip.MustParsePrefix(c.old.Text("subnet")).Addr())
	nics, err := c.tx.Interfaces(i.ID)
	matches := false
	for _, nic := range nics {
		matches = matches || nic.Primary && (nic.IPStack.Type == StackDual ||
			nic.IPStack.Type == version)
	}
	switch {
	case err != nil:
		return err
	case i.ProjectID != c.parent.ID:
		return invalidRequest("External subnet and instance must be in the same project")
	case c.old.Text("instance_id") != "":
		return invalidRequest("External subnets cannot be attached to one instance while still " +
			"attached to another")
	case i.RunState == store.RunFailed, i.RunState == store.StateCreating:
		return invalidRequest("Cannot attach subnet to instance in %s state", i.RunState)
	case len(attached) >= maxExternalSubnets:
		return invalidRequest("An instance may not have more than %d attached subnets",
			maxExternalSubnets)
	case !matches:
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
		func(i store.Instance) error {
			if i.RunState == store.RunFailed || i.RunState == store.StateCreating {
				return invalidRequest("Cannot detach subnet from instance in %s state", i.RunState)
			}
			return nil
		})
}

// ExternalSubnets lists the external subnets of an instance.
func (s Resources) ExternalSubnets(call *Call, instance Ref) ([]store.Resource, error) {
	return ofInstance(s.Simulation, call, instance, func(tx *store.Tx, i store.Instance) (
		[]store.Resource, error) {
		return attachedTo(tx, ExternalSubnet, i.ID)
	})
}
