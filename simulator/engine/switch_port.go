package engine

import (
	"errors"
	"maps"
	"net/http"
	"net/netip"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Lot is an address lot with its blocks, in the form of the API.
type Lot struct {
	Lot    store.Resource `json:"lot"`
	Blocks []Part         `json:"blocks"`
}

func lotOf(tx *store.Tx, r store.Resource) Lot {
	lot := Lot{AddressLot.shown(r), []Part{}}
	for _, e := range extentsOf(tx, r) {
		lot.Blocks = append(lot.Blocks, Part{e.ID,
			map[string]any{"id": e.ID, "first_address": e.First, "last_address": e.Last}})
	}
	return lot
}

// setBlocks replaces the blocks of a lot. A block that the lot already has keeps its ID.
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

// replace creates an address lot or the settings of a port. If the name is taken, it replaces the
// blocks of the lot, or everything except the ID of the settings.
func (s Resources) replace(call *Call, tx *store.Tx, k *Kind, in ResourceInput) store.Resource {
	s.parent(call, tx, k, nil)
	c := &Change{Simulation: s.Simulation, Tx: tx}
	taken := k.Table().Taken(tx, "", *in.Name)
	if taken {
		c = s.change(call, tx, k, nil, store.Selector{Name: *in.Name})
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

// Replace creates the settings of a port, or replaces everything except their ID.
func (s Resources) Replace(call *Call, k *Kind, in ResourceInput) (store.Resource, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) store.Resource {
		return s.replace(call, tx, k, in)
	})
}

// CreateLot creates an address lot, or replaces the blocks of the lot with that name.
func (s Resources) CreateLot(call *Call, in ResourceInput) (Lot, error) {
	return changing(s.Simulation, call, func(tx *store.Tx) Lot {
		return lotOf(tx, s.replace(call, tx, AddressLot, in))
	})
}

// Lot reads an address lot.
func (s Resources) Lot(call *Call, sel store.Selector) (Lot, error) {
	return ofPool(s, call, AddressLot, sel, func(c *Change) Lot { return lotOf(c.Tx, c.old) })
}

// PortSettings reads the settings of a switch port.
func (s Resources) PortSettings(call *Call, sel store.Selector) (store.Resource, error) {
	return ofPool(s, call, PortSettings, sel, func(c *Change) store.Resource { return c.old })
}

// DeletePortSettings deletes settings of a switch port.
func (s Resources) DeletePortSettings(call *Call, sel store.Selector) error {
	var refused *Error
	err := s.Delete(call, PortSettings, nil, sel)
	switch {
	case !s.fleetAdmin():
		return ErrForbidden
	case !sel.Given():
		return invalidRequest("name or id required")
	case errors.As(err, &refused) && refused.Status == http.StatusNotFound:
		return invalidRequest("port settings not found")
	}
	return err
}

// addressesOf returns the addresses of a lot that are in the settings of ports.
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

// parts writes a list into a field of a port's settings. Each object gets the ID of the settings,
// and its keys are renamed as names says.
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

// flat joins the lists that the links have in a field. Each object gets the name of its link.
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

// setAddresses reserves the addresses of a port in their lots.
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

// setLacking returns a setter for a list that this simulator supports only if it is empty.
func setLacking(name string) func(*Change, any) {
	return func(c *Change, value any) {
		c.record.Fields[name] = value
		c.Refuse(len(value.([]any)) > 0, &Error{Status: http.StatusNotImplemented,
			Message: "the simulator does not have the " + name + " of a switch port, which the rack has"})
	}
}
