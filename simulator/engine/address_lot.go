package engine

import (
	"errors"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Lot is an address lot with its blocks, in the form of the API.
type Lot struct {
	Lot    store.Resource `json:"lot"`
	Blocks []Part         `json:"blocks"`
}

func lotOf(r store.Resource) (Lot, error) {
	lot := Lot{AddressLot.shown(r), []Part{}}
	list, err := extentsOf(r)
	for _, e := range list {
		lot.Blocks = append(lot.Blocks, Part{e.ID,
			map[string]any{"id": e.ID, "first_address": e.First, "last_address": e.Last}})
	}
	return lot, err
}

// setBlocks gives a lot its blocks. Those that it has already keep their IDs.
func setBlocks(c *Change, value any) error {
	had, err := extentsOf(c.old)
	blocks := []Extent{}
	for _, e := range value.([]Extent) {
		switch {
		case e.First.BitLen() != e.Last.BitLen():
			return invalidRequest("Block bounds must be in same address family")
		case e.Last.Less(e.First):
			return invalidRequest("Invalid range, first must be <= last")
		}
		block := made(e)
		for _, old := range had {
			if old.First == e.First && old.Last == e.Last {
				block = old
			}
		}
		blocks = append(blocks, block)
	}
	c.record.Fields[extents] = blocks
	return err
}

// CreateLot creates an address lot. One of that name gets the blocks of the request, nothing else.
func (s Resources) CreateLot(call *Call, in ResourceInput) (lot Lot, err error) {
	err = s.store.Update(func(tx *store.Tx) error {
		if _, err := s.parent(call, tx, AddressLot, nil); err != nil {
			return err
		}
		c := &Change{Simulation: s.Simulation, tx: tx}
		if AddressLot.Table().Taken(tx, "", *in.Name) {
			c, err = s.change(call, tx, AddressLot, nil, store.Selector{Name: *in.Name})
			if err == nil {
				err = errors.Join(setBlocks(c, in.Values["blocks"]), c.put())
			}
		} else {
			c.record, err = c.create(AddressLot, store.Resource{}, in)
		}
		if err != nil {
			return err
		}
		call.Object = c.record.Identity
		lot, err = lotOf(c.record)
		return errors.Join(err, unwound(call))
	})
	return lot, err
}

// Lot reads an address lot.
func (s Resources) Lot(call *Call, sel store.Selector) (lot Lot, err error) {
	err = s.viewPool(call, AddressLot, sel, func(c *Change) error {
		lot, err = lotOf(c.old)
		return err
	})
	return lot, err
}
