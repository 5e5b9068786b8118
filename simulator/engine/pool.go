package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"net/netip"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// These fields of a pool's record are not in the API's pools. isDefault is null while the pool is
// not linked to the silo; this rack has only one silo.
const (
	isDefault = "is_default"
	extents   = "extents"
)

// poolWords has what differs between IP pools and subnet pools.
type poolWords struct {
	// id is the field with the pool's ID. link is the rack's word for the link of a silo, and
	// linkID identifies the link in the error for a second one.
	id, link, linkID string
	// otherVersion, overlaps and missing refuse an extent.
	otherVersion      func(version string, pool store.Resource) error
	overlaps, missing string
	// usedExtent and usedPool are the errors for removing an extent or a link of a pool from which
	// addresses are allocated.
	usedExtent, usedPool string
	// secondDefault is the error for a second default pool; "" means the error for a second link.
	secondDefault string
	// strict means that unlinking a pool without a link is an error.
	strict bool
	// users are the kinds of the records whose field contains an address of a pool.
	users []*Kind
	field string
}

// words has the poolWords of the two kinds of pools.
var words = map[*Kind]poolWords{}

// init fills the table, because it and the kinds refer to each other.
func init() {
	words[IPPool] = poolWords{id: "ip_pool_id", link: "ip-pool-resource",
		linkID: "ip_pool_id: %s, resource_id: %s, resource_type: Silo",
		otherVersion: func(version string, pool store.Resource) error {
			return invalidRequest("Cannot add IP%s address range to IP%s pool with ID %q", version,
				pool.Text("ip_version"), pool.ID)
		},
		overlaps: "The provided IP range %s overlaps with an existing IP pool range or subnet pool " +
			"member",
		missing: "The provided range %s does not exist",
		usedExtent: "IP pool ranges cannot be deleted while external IP addresses are allocated from " +
			"them",
		usedPool: "IP addresses from this pool are in use in the linked silo",
		users:    []*Kind{FloatingIP, ephemeralIP, natIP}, field: "ip",
	}
	words[SubnetPool] = poolWords{id: "subnet_pool_id", link: "subnet-pool-silo-link",
		linkID: "subnet_pool_id: %s, silo_id: %s",
		otherVersion: func(version string, pool store.Resource) error {
			return invalidRequest("Cannot add IP%s members to IP%s subnet pool", version,
				pool.Text("ip_version"))
		},
		overlaps: "The IP subnet %s overlaps with an existing subnet pool member or IP pool range",
		missing:  "A provided subnet pool member with subnet %s does not exist",
		usedExtent: "Cannot delete external subnet pool member while it contains external subnets. " +
			"Please delete all external subnets first.",
		usedPool: "Cannot unlink subnet pool from silo while there are external subnets allocated " +
			"from the pool. Delete the subnets first, and try again.",
		secondDefault: "Silo already has a default subnet pool for this IP version. Link the " +
			"pool as non-default, then make it the default, which will demote the existing one.",
		strict: true, users: []*Kind{ExternalSubnet}, field: "subnet",
	}
}

// Extent is a range of an IP pool or a member of a subnet pool.
type Extent struct {
	ID          string          `json:"id"`
	First       netip.Addr      `json:"first"`
	Last        netip.Addr      `json:"last"`
	TimeCreated store.Timestamp `json:"time_created"`
	// Subnet is set for a member, and MinPrefix and MaxPrefix limit the prefixes of its subnets.
	Subnet    netip.Prefix `json:"subnet,omitzero"`
	MinPrefix int          `json:"min_prefix_length,omitzero"`
	MaxPrefix int          `json:"max_prefix_length,omitzero"`
}

// SubnetExtent returns the extent of a subnet.
func SubnetExtent(p netip.Prefix) Extent {
	last := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(last)*8; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	end, _ := netip.AddrFromSlice(last)
	return Extent{First: p.Masked().Addr(), Last: end, Subnet: p}
}

func (e Extent) contains(a netip.Addr) bool {
	return e.First.BitLen() == a.BitLen() && e.First.Compare(a) <= 0 && a.Compare(e.Last) <= 0
}

func (e Extent) overlaps(o Extent) bool { return e.contains(o.First) || o.contains(e.First) }

func (e Extent) String() string {
	if e.Subnet.IsValid() {
		return e.Subnet.String()
	}
	return fmt.Sprintf("%s-%s", e.First, e.Last)
}

func (e Extent) size() float64 {
	number := func(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }
	n, _ := new(big.Float).SetInt(new(big.Int).Sub(number(e.Last), number(e.First))).Float64()
	return n + 1
}

// Part is a range, a member or a link of a pool in the form of the API.
type Part struct {
	key    string
	fields map[string]any
}

// Ident returns the identity by which the pages of a list are ordered.
func (p Part) Ident() store.Identity { return store.Identity{ID: p.key, Name: p.key} }

// MarshalJSON writes the fields.
func (p Part) MarshalJSON() ([]byte, error) { return json.Marshal(p.fields) }

func partOf(k *Kind, pool store.Resource, e Extent) Part {
	fields := map[string]any{"id": e.ID, "time_created": e.TimeCreated, words[k].id: pool.ID}
	if e.Subnet.IsValid() {
		fields["subnet"] = e.Subnet
		fields["min_prefix_length"], fields["max_prefix_length"] = e.MinPrefix, e.MaxPrefix
	} else {
		fields["range"] = map[string]any{"first": e.First, "last": e.Last}
	}
	return Part{fmt.Sprintf("%x", e.First.AsSlice()), fields}
}

func linkOf(k *Kind, pool store.Resource) Part {
	return Part{siloID, map[string]any{words[k].id: pool.ID, "silo_id": siloID,
		isDefault: pool.Fields[isDefault]}}
}

func extentsOf(pool store.Resource) (list []Extent, err error) {
	data, err := json.Marshal(pool.Fields[extents])
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	return list, err
}

// linked reports whether a pool is linked to the silo (ok), and whether it is the default pool of
// its IP version there (first).
func linked(pool store.Resource) (first, ok bool) {
	first, ok = pool.Fields[isDefault].(bool)
	return first, ok
}

// shown returns a record without the fields that its operations do not show.
func (k *Kind) shown(r store.Resource) store.Resource {
	fields := maps.Clone(r.Fields)
	for _, name := range k.Hidden {
		delete(fields, name)
	}
	r.Fields = fields
	return r
}

// ofSilo returns a linked pool as a user of the silo sees it.
func ofSilo(r store.Resource) store.Resource {
	return (&Kind{Hidden: []string{extents}}).shown(r)
}

func (r *Simulation) fleetAdmin() bool { return r.switches.get().Role == adminapi.RoleFleetAdmin }

// PoolsOfSilo lists the pools that are linked to the silo.
func (s Resources) PoolsOfSilo(k *Kind) (pools []store.Resource, err error) {
	err = s.store.View(func(tx *store.Tx) error {
		return k.Table().Each(tx, func(r store.Resource) error {
			if _, ok := linked(r); ok {
				pools = append(pools, ofSilo(r))
			}
			return nil
		})
	})
	return pools, err
}

// PoolOfSilo reads a pool that is linked to the silo.
func (s Resources) PoolOfSilo(call *Call, k *Kind, sel store.Selector) (store.Resource, error) {
	return reading(s.Simulation, func(tx *store.Tx) (store.Resource, error) {
		r, err := find(tx, k.Table(), "", sel)
		if err != nil {
			return r, err
		}
		if _, ok := linked(r); !ok {
			return r, notFound(k.Name, sel)
		}
		call.Object = r.Identity
		return ofSilo(r), nil
	})
}

// PoolsOf lists the pools of a silo for an administrator.
func (s Resources) PoolsOf(k *Kind, silo store.Selector) ([]store.Resource, error) {
	if err := checkSilo(silo); err != nil {
		return nil, err
	}
	if !s.fleetAdmin() {
		return nil, ErrForbidden
	}
	return s.PoolsOfSilo(k)
}

func checkSilo(silo store.Selector) error {
	if silo.ID != siloID && silo.Name != siloName {
		return notFound("silo", silo)
	}
	return nil
}

// ofPool calls read with a pool, for an administrator.
func ofPool[T any](s Resources, call *Call, k *Kind, sel store.Selector,
	read func(*Change) (T, error)) (T, error) {
	return reading(s.Simulation, func(tx *store.Tx) (found T, err error) {
		c, err := s.change(call, tx, k, nil, sel)
		if err == nil {
			found, err = read(c)
		}
		return found, err
	})
}

func (s Resources) changePool(call *Call, k *Kind, sel store.Selector,
	change func(*Change) error) error {
	return s.store.Update(func(tx *store.Tx) error {
		c, err := s.change(call, tx, k, nil, sel)
		if err == nil {
			err = change(c)
		}
		if err != nil {
			return err
		}
		return errors.Join(c.put(), failHalfway(call))
	})
}

// PoolLinks lists the silos of a pool.
func (s Resources) PoolLinks(call *Call, k *Kind, sel store.Selector) ([]Part, error) {
	return ofPool(s, call, k, sel, func(c *Change) ([]Part, error) {
		if _, ok := linked(c.old); ok {
			return []Part{linkOf(k, c.old)}, nil
		}
		return nil, nil
	})
}

// defaultPool finds the default pool of the kind and of the version and type of another pool.
func (c *Change) defaultPool(like store.Resource) (pool store.Resource, ok bool, err error) {
	err = c.kind.Table().Each(c.tx, func(r store.Resource) error {
		if first, _ := linked(r); first && r.Text("ip_version") == like.Text("ip_version") &&
			r.Text("pool_type") == like.Text("pool_type") {
			pool, ok = r, true
		}
		return nil
	})
	return pool, ok, err
}

// LinkPool links a pool to a silo.
func (s Resources) LinkPool(call *Call, k *Kind, sel, silo store.Selector, first bool) (link Part,
	err error) {
	err = s.changePool(call, k, sel, func(c *Change) error {
		if err := checkSilo(silo); err != nil {
			return err
		}
		_, taken, err := c.defaultPool(c.old)
		_, again := linked(c.old)
		w := words[k]
		switch {
		case err != nil:
			return err
		case again, first && taken && w.secondDefault == "":
			return alreadyExists(w.link, fmt.Sprintf(w.linkID, c.old.ID, siloID))
		case first && taken:
			return invalidRequest("%s", w.secondDefault)
		}
		c.record.Fields[isDefault] = first
		link = linkOf(k, c.record)
		return nil
	})
	return link, err
}

func noLink(k *Kind, pool store.Resource) error {
	return notFound(words[k].link, store.Selector{ID: fmt.Sprintf("%s: %s, silo_id: %s", words[k].id,
		pool.ID, siloID)})
}

// UpdatePoolLink determines whether a pool is the default pool of a silo.
func (s Resources) UpdatePoolLink(call *Call, k *Kind, sel, silo store.Selector, first bool) (
	link Part, err error) {
	err = s.changePool(call, k, sel, func(c *Change) error {
		if err := checkSilo(silo); err != nil {
			return err
		}
		if _, ok := linked(c.old); !ok {
			return noLink(k, c.old)
		}
		c.record.Fields[isDefault] = first
		link = linkOf(k, c.record)
		other, taken, err := c.defaultPool(c.old)
		if err != nil || !first || !taken || other.ID == c.old.ID {
			return err
		}
		other.Fields[isDefault] = false
		return k.Table().Put(c.tx, other)
	})
	return link, err
}

// UnlinkPool removes the link between a pool and a silo that uses no address of the pool.
func (s Resources) UnlinkPool(call *Call, k *Kind, sel, silo store.Selector) error {
	return s.changePool(call, k, sel, func(c *Change) error {
		if err := checkSilo(silo); err != nil {
			return err
		}
		if _, ok := linked(c.old); !ok && words[k].strict {
			return noLink(k, c.old)
		}
		c.record.Fields[isDefault] = nil
		return c.refuseUsed(words[k].usedPool, func(netip.Prefix) bool { return true })
	})
}

// used calls visit once for each address or subnet of the pool that is allocated.
func (c *Change) used(visit func(netip.Prefix)) error {
	w, seen := words[c.kind], map[string]bool{}
	var failed error
	for _, k := range w.users {
		failed = errors.Join(failed, k.Table().Each(c.tx, func(r store.Resource) error {
			if text := r.Text(w.field); r.Text(w.id) == c.old.ID && !seen[text] {
				seen[text] = true
				visit(allocated(text))
			}
			return nil
		}))
	}
	return failed
}

// allocated returns an address or a subnet as a subnet.
func allocated(text string) netip.Prefix {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p
	}
	a := netip.MustParseAddr(text)
	return netip.PrefixFrom(a, a.BitLen())
}

// refuseUsed returns an error if counts is true for an allocation of the pool.
func (c *Change) refuseUsed(text string, counts func(netip.Prefix) bool) error {
	refused := false
	err := c.used(func(p netip.Prefix) { refused = refused || counts(p) })
	if err == nil && refused {
		err = invalidRequest("%s", text)
	}
	return err
}

// Extents lists the ranges or the members of a pool.
func (s Resources) Extents(call *Call, k *Kind, sel store.Selector) ([]Part, error) {
	return ofPool(s, call, k, sel, func(c *Change) (parts []Part, err error) {
		list, err := extentsOf(c.old)
		for _, e := range list {
			parts = append(parts, partOf(k, c.old, e))
		}
		return parts, err
	})
}

// AddExtent adds a range or a member to a pool. No two of all pools overlap.
func (s Resources) AddExtent(call *Call, k *Kind, sel store.Selector, e Extent) (part Part,
	err error) {
	err = s.changePool(call, k, sel, func(c *Change) error {
		if err := c.extentProblem(e); err != nil {
			return err
		}
		list, err := extentsOf(c.old)
		if err != nil {
			return err
		}
		e = made(e)
		list = append(list, e)
		c.record.Fields[extents] = list
		part = partOf(k, c.old, e)
		return nil
	})
	return part, err
}

func made(e Extent) Extent {
	e.ID = uuid.NewString()
	e.TimeCreated = store.NewIdentity("", "", "").TimeCreated
	return e
}

// extentProblem makes the rack's checks of a new range or member, in the rack's order.
func (c *Change) extentProblem(e Extent) error {
	w := words[c.kind]
	multicast := e.First.IsMulticast()
	switch {
	case c.kind == IPPool && multicast != e.Last.IsMulticast():
		return invalidRequest("IP range cannot span multicast and unicast address spaces")
	case c.kind == IPPool && multicast && c.old.Text("pool_type") == unicast:
		return invalidRequest("Cannot add multicast address range to unicast IP pool")
	case c.kind == IPPool && !multicast && c.old.Text("pool_type") != unicast:
		return invalidRequest("Cannot add unicast address range to multicast IP pool")
	case versionOf(e.First) != c.old.Text("ip_version"):
		return w.otherVersion(versionOf(e.First), c.old)
	case e.Subnet.IsValid():
		if err := memberProblem(e); err != nil {
			return err
		}
	}
	overlap := false
	var failed error
	for k := range words {
		failed = errors.Join(failed, k.Table().Each(c.tx, func(pool store.Resource) error {
			list, err := extentsOf(pool)
			for _, other := range list {
				overlap = overlap || e.overlaps(other)
			}
			return err
		}))
	}
	if failed == nil && overlap {
		return invalidRequest(w.overlaps, e)
	}
	return failed
}

func memberProblem(e Extent) error {
	switch {
	case e.Subnet != e.Subnet.Masked():
		return invalidRequest("IP subnet must be a network address, with a host ID of zero.")
	case e.MinPrefix > e.MaxPrefix:
		return invalidRequest("The minimum prefix length must be no greater than the maximum")
	case e.MaxPrefix > e.First.BitLen():
		return invalidRequest("Cannot create an IP%s subnet with a max prefix length greater than %d",
			versionOf(e.First), e.First.BitLen())
	case e.MinPrefix < e.Subnet.Bits():
		return invalidRequest("Min and max prefix length must be no less than the IP subnet prefix "+
			"length (/%d)", e.Subnet.Bits())
	}
	return nil
}

// RemoveExtent removes a range or a member from which nothing is allocated.
func (s Resources) RemoveExtent(call *Call, k *Kind, sel store.Selector, e Extent) error {
	return s.changePool(call, k, sel, func(c *Change) error {
		list, err := extentsOf(c.old)
		if err != nil {
			return err
		}
		rest := []Extent{}
		for _, other := range list {
			if other.First != e.First || other.Last != e.Last {
				rest = append(rest, other)
			}
		}
		if len(rest) == len(list) {
			return invalidRequest(words[k].missing, e)
		}
		c.record.Fields[extents] = rest
		return c.refuseUsed(words[k].usedExtent,
			func(p netip.Prefix) bool { return e.contains(p.Addr()) })
	})
}

func permitPool(text string) func(*Change, *ResourceInput) error {
	return func(c *Change, in *ResourceInput) error {
		list, err := extentsOf(c.old)
		if err == nil && in == nil && len(list) > 0 {
			err = invalidRequest("%s", text)
		}
		return err
	}
}

// PoolUtilization is the number of addresses of a pool.
type PoolUtilization struct {
	Capacity  float64 `json:"capacity"`
	Remaining float64 `json:"remaining"`
}

// PoolUtilization returns how many addresses a pool has and how many of them are free.
func (s Resources) PoolUtilization(call *Call, k *Kind, sel store.Selector) (PoolUtilization,
	error) {
	return ofPool(s, call, k, sel, func(c *Change) (u PoolUtilization, err error) {
		list, err := extentsOf(c.old)
		for _, e := range list {
			u.Capacity += e.size()
		}
		u.Remaining = u.Capacity
		err = errors.Join(err, c.used(func(p netip.Prefix) {
			u.Remaining -= math.Exp2(float64(p.Addr().BitLen() - p.Bits()))
		}))
		return u, err
	})
}
