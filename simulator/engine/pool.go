package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"math/big"
	"net/http"
	"net/netip"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// isDefault and extents name fields of a pool's record. isDefault is null unless the pool is linked
// to the rack's only silo. The API shows it for linked pools, and never shows extents.
const (
	isDefault = "is_default"
	extents   = "extents"
)

// poolWords has the texts and fields in which IP pools and subnet pools differ.
type poolWords struct {
	// id is the name of the field with the pool's ID. link is the rack's word for the link between a
	// pool and a silo. linkID describes the link in the error for a link that exists already.
	id, link, linkID string
	// otherVersion, overlaps and missing are errors about an extent. otherVersion is formatted with
	// the extent's IP version, the pool's IP version and the pool's ID.
	otherVersion, overlaps, missing string
	// usedExtent is the error for removing an extent in use, and usedPool for unlinking a pool in use.
	usedExtent, usedPool string
	// secondDefault is the error for a second default pool. If empty, the rack says the link exists.
	secondDefault string
	// strict means that unlinking a pool that is not linked is an error.
	strict bool
	// users are the kinds whose records use a pool; field is the JSON name of their address or subnet.
	users []*Kind
	field string
}

var words = map[*Kind]poolWords{
	IPPool: {id: "ip_pool_id", link: "ip-pool-resource",
		linkID:       "ip_pool_id: %s, resource_id: %s, resource_type: Silo",
		otherVersion: "Cannot add IP%[1]s address range to IP%[2]s pool with ID %[3]q",
		overlaps: "The provided IP range %s overlaps with an existing IP pool range or subnet pool " +
			"member",
		missing: "The provided range %s does not exist",
		usedExtent: "IP pool ranges cannot be deleted while external IP addresses are allocated from " +
			"them",
		usedPool: "IP addresses from this pool are in use in the linked silo",
		users:    []*Kind{FloatingIP, ephemeralIP, natIP}, field: "ip",
	},
	SubnetPool: {id: "subnet_pool_id", link: "subnet-pool-silo-link",
		linkID:       "subnet_pool_id: %s, silo_id: %s",
		otherVersion: "Cannot add IP%[1]s members to IP%[2]s subnet pool",
		overlaps:     "The IP subnet %s overlaps with an existing subnet pool member or IP pool range",
		missing:      "A provided subnet pool member with subnet %s does not exist",
		usedExtent: "Cannot delete external subnet pool member while it contains external subnets. " +
			"Please delete all external subnets first.",
		usedPool: "Cannot unlink subnet pool from silo while there are external subnets allocated " +
			"from the pool. Delete the subnets first, and try again.",
		secondDefault: "Silo already has a default subnet pool for this IP version. Link the " +
			"pool as non-default, then make it the default, which will demote the existing one.",
		strict: true, users: []*Kind{ExternalSubnet}, field: "subnet",
	},
}

// Extent is a range of an IP pool or a member of a subnet pool.
type Extent struct {
	ID          string          `json:"id"`
	First       netip.Addr      `json:"first"`
	Last        netip.Addr      `json:"last"`
	TimeCreated store.Timestamp `json:"time_created"`
	// Subnet is the subnet of a subnet pool's member. MinPrefix and MaxPrefix limit the prefix lengths
	// of the subnets that are allocated from the member.
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

func partOf(k *Kind, pool store.Resource, e Extent) Item {
	fields := map[string]any{"id": e.ID, "time_created": e.TimeCreated, words[k].id: pool.ID}
	if e.Subnet.IsValid() {
		fields["subnet"] = e.Subnet
		fields["min_prefix_length"], fields["max_prefix_length"] = e.MinPrefix, e.MaxPrefix
	} else {
		fields["range"] = map[string]any{"first": e.First, "last": e.Last}
	}
	return item(fmt.Sprintf("%x", e.First.AsSlice()), fields)
}

func linkOf(k *Kind, pool store.Resource) Item {
	return item(siloID, map[string]any{words[k].id: pool.ID, "silo_id": siloID,
		isDefault: pool.Fields[isDefault]})
}

func extentsOf(tx *store.Tx, pool store.Resource) (list []Extent) {
	data, err := json.Marshal(pool.Fields[extents])
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	tx.Check(err)
	return list
}

func extended(c *Change) (string, bool) { return "", len(extentsOf(c.Tx, c.old)) > 0 }

// linked reports whether a pool is linked to the silo (ok), and whether it is the silo's default
// pool of its IP version (first).
func linked(pool store.Resource) (first, ok bool) {
	first, ok = pool.Fields[isDefault].(bool)
	return first, ok
}

func (k *Kind) shown(r store.Resource) store.Resource {
	fields := maps.Clone(r.Fields)
	for _, name := range k.Hidden {
		delete(fields, name)
	}
	r.Fields = fields
	return r
}

// ofSilo returns a linked pool with the fields that users of the silo see.
func ofSilo(r store.Resource) store.Resource {
	return (&Kind{Hidden: []string{extents}}).shown(r)
}

func (r *Simulation) fleetAdmin() bool { return r.Switches().Role == adminapi.RoleFleetAdmin }

func linkedPools(tx *store.Tx, k *Kind) iter.Seq[store.Resource] {
	return func(yield func(store.Resource) bool) {
		for r := range k.Table().All(tx) {
			if _, ok := linked(r); ok && !yield(r) {
				return
			}
		}
	}
}

// Pools has the operations on IP pools and subnet pools, besides those of Resources.
type Pools struct{ *Simulation }

func (s Pools) change(call *Call, tx *store.Tx) *Change {
	return Resources(s).change(call, tx, call.Kind)
}

// Linked lists the pools that are linked to the silo.
func (s Pools) Linked(call *Call, tx *store.Tx) (pools []store.Resource) {
	for r := range linkedPools(tx, call.Kind) {
		pools = append(pools, ofSilo(r))
	}
	return pools
}

// View reads a pool that is linked to the silo.
func (s Pools) View(call *Call, tx *store.Tx) store.Resource {
	k := call.Kind
	r := find(tx, k.Table(), "", call.Named[k.Param])
	_, ok := linked(r)
	tx.Refuse(!ok, notFound(k.Name, call.Named[k.Param]))
	call.Object = r.Identity
	return ofSilo(r)
}

// LinkedTo lists the pools that are linked to a silo, for a fleet administrator.
func (s Pools) LinkedTo(call *Call, tx *store.Tx) []store.Resource {
	tx.Check(checkSilo(call.Named["silo"]))
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	return s.Linked(call, tx)
}

func checkSilo(silo store.Selector) error {
	if silo.ID != siloID && silo.Name != siloName {
		return notFound("silo", silo)
	}
	return nil
}

// Links lists the links between a pool and silos.
func (s Pools) Links(call *Call, tx *store.Tx) []Item {
	c := s.change(call, tx)
	if _, ok := linked(c.old); ok {
		return []Item{linkOf(c.kind, c.old)}
	}
	return nil
}

func (c *Change) defaultPool(like store.Resource) (pool store.Resource, ok bool) {
	for r := range c.kind.Table().All(c.Tx) {
		if first, _ := linked(r); first && r.Text("ip_version") == like.Text("ip_version") &&
			r.Text("pool_type") == like.Text("pool_type") {
			pool, ok = r, true
		}
	}
	return pool, ok
}

// PoolLink is the body of a request that links a pool to a silo or changes a link. Only a new link
// uses Silo. IsDefault tells whether the pool becomes the silo's default pool.
type PoolLink struct {
	Silo      store.Selector
	IsDefault bool
}

// Link links a pool to a silo. The body is a [PoolLink].
func (s Pools) Link(call *Call, tx *store.Tx) Item {
	c, link := s.change(call, tx), call.Body.(PoolLink)
	c.Check(checkSilo(link.Silo))
	_, taken := c.defaultPool(c.old)
	_, again := linked(c.old)
	w := words[c.kind]
	c.Refuse(again || link.IsDefault && taken && w.secondDefault == "",
		alreadyExists(w.link, fmt.Sprintf(w.linkID, c.old.ID, siloID)))
	c.Refuse(link.IsDefault && taken, invalidRequest("%s", w.secondDefault))
	c.record.Fields[isDefault] = link.IsDefault
	c.put()
	return linkOf(c.kind, c.record)
}

func noLink(k *Kind, pool store.Resource) error {
	return notFound(words[k].link, store.Selector{ID: fmt.Sprintf("%s: %s, silo_id: %s", words[k].id,
		pool.ID, siloID)})
}

// UpdateLink sets whether a pool is the default pool of a silo. The body is a [PoolLink].
func (s Pools) UpdateLink(call *Call, tx *store.Tx) Item {
	c, first := s.change(call, tx), call.Body.(PoolLink).IsDefault
	c.Check(checkSilo(call.Named["silo"]))
	_, ok := linked(c.old)
	c.Refuse(!ok, noLink(c.kind, c.old))
	c.record.Fields[isDefault] = first
	if other, taken := c.defaultPool(c.old); first && taken && other.ID != c.old.ID {
		other.Fields[isDefault] = false
		c.kind.Table().Put(c.Tx, other)
	}
	c.put()
	return linkOf(c.kind, c.record)
}

// Unlink removes the link between a pool and a silo. It refuses while the pool is in use.
func (s Pools) Unlink(call *Call, tx *store.Tx) {
	c := s.change(call, tx)
	c.Check(checkSilo(call.Named["silo"]))
	_, ok := linked(c.old)
	c.Refuse(!ok && words[c.kind].strict, noLink(c.kind, c.old))
	c.record.Fields[isDefault] = nil
	c.Refuse(len(c.used()) > 0, invalidRequest("%s", words[c.kind].usedPool))
	c.put()
}

func (c *Change) used() (all []netip.Prefix) {
	w, seen := words[c.kind], map[string]bool{}
	for _, k := range w.users {
		for r := range k.Table().All(c.Tx) {
			if text := r.Text(w.field); r.Text(w.id) == c.old.ID && !seen[text] {
				seen[text] = true
				all = append(all, allocated(text))
			}
		}
	}
	return all
}

func allocated(text string) netip.Prefix {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p
	}
	a := netip.MustParseAddr(text)
	return netip.PrefixFrom(a, a.BitLen())
}

// Extents lists the ranges or the members of a pool.
func (s Pools) Extents(call *Call, tx *store.Tx) (parts []Item) {
	c := s.change(call, tx)
	for _, e := range extentsOf(c.Tx, c.old) {
		parts = append(parts, partOf(c.kind, c.old, e))
	}
	return parts
}

// AddExtent adds an [Extent] to a pool. The extent must not overlap an extent of any pool.
func (s Pools) AddExtent(call *Call, tx *store.Tx) Item {
	c, e := s.change(call, tx), call.Body.(Extent)
	c.checkExtent(e)
	e = made(e)
	c.record.Fields[extents] = append(extentsOf(c.Tx, c.old), e)
	c.put()
	return partOf(c.kind, c.old, e)
}

func made(e Extent) Extent {
	e.ID = uuid.NewString()
	e.TimeCreated = store.NewIdentity("", "", "").TimeCreated
	return e
}

// checkExtent checks a new range or member of a pool, in the rack's order.
func (c *Change) checkExtent(e Extent) {
	w, version := words[c.kind], versionOf(e.First)
	if c.kind == IPPool {
		multicast, only := e.First.IsMulticast(), c.old.Text("pool_type") == unicast
		c.Refuse(multicast != e.Last.IsMulticast(),
			invalidRequest("IP range cannot span multicast and unicast address spaces"))
		c.Refuse(multicast && only,
			invalidRequest("Cannot add multicast address range to unicast IP pool"))
		c.Refuse(!multicast && !only,
			invalidRequest("Cannot add unicast address range to multicast IP pool"))
	}
	c.Refuse(version != c.old.Text("ip_version"),
		invalidRequest(w.otherVersion, version, c.old.Text("ip_version"), c.old.ID))
	if most := e.First.BitLen(); e.Subnet.IsValid() {
		c.Refuse(e.Subnet != e.Subnet.Masked(),
			invalidRequest("IP subnet must be a network address, with a host ID of zero."))
		c.Refuse(e.MinPrefix > e.MaxPrefix,
			invalidRequest("The minimum prefix length must be no greater than the maximum"))
		c.Refuse(e.MaxPrefix > most, invalidRequest("Cannot create an IP%s subnet with a max prefix "+
			"length greater than %d", version, most))
		c.Refuse(e.MinPrefix < e.Subnet.Bits(), invalidRequest("Min and max prefix length must be no "+
			"less than the IP subnet prefix length (/%d)", e.Subnet.Bits()))
	}
	for k := range words {
		for pool := range k.Table().All(c.Tx) {
			c.Refuse(slices.ContainsFunc(extentsOf(c.Tx, pool), e.overlaps), invalidRequest(w.overlaps, e))
		}
	}
}

// RemoveExtent removes an [Extent], unless an address or a subnet is allocated from it.
func (s Pools) RemoveExtent(call *Call, tx *store.Tx) {
	c := s.change(call, tx)
	e := call.Body.(Extent)
	list := extentsOf(c.Tx, c.old)
	rest := slices.DeleteFunc(slices.Clone(list), func(other Extent) bool {
		return other.First == e.First && other.Last == e.Last
	})
	c.Refuse(len(rest) == len(list), invalidRequest(words[c.kind].missing, e))
	c.record.Fields[extents] = rest
	for _, p := range c.used() {
		c.Refuse(e.contains(p.Addr()), invalidRequest("%s", words[c.kind].usedExtent))
	}
	c.put()
}

// Utilization returns how many addresses a pool has and how many of them are free.
func (s Pools) Utilization(call *Call, tx *store.Tx) Item {
	c, capacity, used := s.change(call, tx), 0.0, 0.0
	for _, e := range extentsOf(c.Tx, c.old) {
		capacity += e.size()
	}
	for _, p := range c.used() {
		used += math.Exp2(float64(p.Addr().BitLen() - p.Bits()))
	}
	return item(c.old.ID, map[string]any{"capacity": capacity, "remaining": capacity - used})
}

// Lot is an address lot with its blocks, in the form of the API.
type Lot struct {
	Lot    store.Resource `json:"lot"`
	Blocks []Item         `json:"blocks"`
}

func lotOf(tx *store.Tx, r store.Resource) Lot {
	lot := Lot{AddressLot.shown(r), []Item{}}
	for _, e := range extentsOf(tx, r) {
		lot.Blocks = append(lot.Blocks, item(e.ID,
			map[string]any{"id": e.ID, "first_address": e.First, "last_address": e.Last}))
	}
	return lot
}

// setBlocks replaces the blocks of an address lot. A block that the lot already has keeps its ID.
func setBlocks(c *Change, value any) {
	had, blocks := extentsOf(c.Tx, c.old), []Extent{}
	for _, e := range value.([]Extent) {
		c.Refuse(e.First.BitLen() != e.Last.BitLen(),
			invalidRequest("Block bounds must be in same address family"))
		c.Refuse(e.Last.Less(e.First), invalidRequest("Invalid range, first must be <= last"))
		old := slices.IndexFunc(had, func(o Extent) bool {
			return o.First == e.First && o.Last == e.Last
		})
		if old >= 0 {
			blocks = append(blocks, had[old])
		} else {
			blocks = append(blocks, made(e))
		}
	}
	c.record.Fields[extents] = blocks
}

// Replace creates an address lot or the settings of a port. If the name is taken, the new blocks or
// settings replace the old ones, under the same ID.
func (s Resources) Replace(call *Call, tx *store.Tx) store.Resource {
	k, in := call.Kind, call.Body.(ResourceInput)
	s.parent(call, tx, k)
	c := &Change{Simulation: s.Simulation, Tx: tx}
	taken := k.Table().Taken(tx, "", *in.Name)
	if taken {
		call.Named = map[string]store.Selector{k.Param: {Name: *in.Name}}
		c = s.change(call, tx, k)
	}
	if taken && k == AddressLot {
		setBlocks(c, in.Values["blocks"])
		c.put()
		return c.record
	}
	if taken {
		in.id = c.old.ID
		c.drop()
	}
	r := c.create(k, store.Resource{}, in)
	call.Object = r.Identity
	return r
}

// CreateLot creates an address lot, or replaces the blocks of the lot with that name.
func (s Resources) CreateLot(call *Call, tx *store.Tx) Lot {
	return lotOf(tx, s.Replace(call, tx))
}

// Lot reads an address lot.
func (s Resources) Lot(call *Call, tx *store.Tx) Lot {
	return lotOf(tx, s.change(call, tx, call.Kind).old)
}

// Blocks lists the blocks of an address lot.
func (s Resources) Blocks(call *Call, tx *store.Tx) []Item { return s.Lot(call, tx).Blocks }

// PortSettings reads the settings of a switch port.
func (s Resources) PortSettings(call *Call, tx *store.Tx) store.Resource {
	return s.change(call, tx, call.Kind).old
}

// DeletePortSettings deletes the port settings that the query names.
func (s Resources) DeletePortSettings(call *Call, tx *store.Tx) {
	sel := call.Named["port_settings"]
	call.Named[call.Kind.Param] = sel
	var refused *Error
	err := tx.Try(func(tx *store.Tx) { s.Delete(call, tx) })
	tx.Refuse(!s.fleetAdmin(), ErrForbidden)
	tx.Refuse(!sel.Given(), invalidRequest("name or id required"))
	if errors.As(err, &refused) && refused.Status == http.StatusNotFound {
		err = invalidRequest("port settings not found")
	}
	tx.Check(err)
}

func addressesOf(tx *store.Tx, lotID string) (addresses []netip.Addr) {
	for r := range PortSettings.Table().All(tx) {
		for _, one := range r.Fields["addresses"].([]any) {
			if a := one.(map[string]any); a["address_lot_id"] == lotID {
				addresses = append(addresses, netip.MustParsePrefix(a["address"].(string)).Addr())
			}
		}
	}
	return addresses
}

// parts sets the field with the given name to a list of objects. names maps old keys to new keys.
func parts(c *Change, name string, list []any, names map[string]string) {
	out := []any{}
	for _, one := range list {
		part := map[string]any{"port_settings_id": c.record.ID}
		for key, value := range one.(map[string]any) {
			if other, ok := names[key]; ok {
				key = other
			}
			part[key] = value
		}
		out = append(out, part)
	}
	c.record.Fields[name] = out
}

// flat joins the lists in one field of a port's links. It adds the link's name to each object.
func flat(value any, name string) (list []any) {
	for _, link := range value.([]any) {
		for _, one := range link.(map[string]any)[name].([]any) {
			one := maps.Clone(one.(map[string]any))
			one["interface_name"] = link.(map[string]any)["link_name"]
			list = append(list, one)
		}
	}
	return list
}

func setPort(c *Change, value any) {
	parts(c, "port", []any{value}, nil)
	c.record.Fields["port"] = c.record.Fields["port"].([]any)[0]
}

func setLinks(c *Change, value any) {
	for _, link := range value.([]any) {
		link.(map[string]any)["lldp"].(map[string]any)["id"] = uuid.NewString()
	}
	parts(c, "links", value.([]any), map[string]string{"lldp": "lldp_link_config",
		"tx_eq": "tx_eq_config"})
}

func setRoutes(c *Change, value any) {
	parts(c, "routes", flat(value, "routes"), map[string]string{"vid": "vlan_id"})
}

func setAddresses(c *Change, value any) {
	list, seen := flat(value, "addresses"), map[any]bool{}
	for _, one := range list {
		a := one.(map[string]any)
		lot, ok := AddressLot.Table().Find(c.Tx, "", a["address_lot"].(store.Selector))
		c.Refuse(!ok, invalidRequest("AddressLot not found"))
		taken, blocks := addressesOf(c.Tx, lot.ID), extentsOf(c.Tx, lot)
		address := netip.MustParsePrefix(a["address"].(string)).Addr()
		in := slices.IndexFunc(blocks, func(e Extent) bool { return e.contains(address) })
		switch key := lot.ID + address.String(); {
		case in < 0:
			c.Check(invalidRequest("address not in lot"))
		case address.IsUnspecified(), address.Is6() && address.IsLinkLocalUnicast():
		case seen[key], slices.Contains(taken, address):
			c.Check(invalidRequest("address unavailable"))
		default:
			seen[key] = true
		}
		delete(a, "address_lot")
		a["address_lot_id"], a["address_lot_name"] = lot.ID, lot.Name
		a["address_lot_block_id"] = blocks[in].ID
	}
	parts(c, "addresses", list, nil)
}

// setLacking returns a setter that refuses a list with a 501, unless the list is empty.
func setLacking(name string) func(*Change, any) {
	return func(c *Change, value any) {
		c.record.Fields[name] = value
		c.Refuse(len(value.([]any)) > 0, &Error{Status: http.StatusNotImplemented,
			Message: "the simulator does not have the " + name + " of a switch port, which the rack has"})
	}
}
