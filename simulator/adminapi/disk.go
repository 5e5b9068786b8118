package adminapi

import (
	"context"
	"net/http"
)

// DiskFault makes a disk fail, in every guest to which it is attached. On lists the operations
// that fail ("read", "write", "flush"). The fault applies to the bytes From up to To; both 0
// means all bytes, and a flush has no bytes. It applies Times times; 0 means until the disk is
// healed. An operation that it applies to fails with EIO, takes Delay longer, Hangs until the
// disk is healed or detached, or is acknowledged but not done (Lie). A discard counts as a write.
//
// The rack needs disks that can fail: oxide-simulator serve --disks=fuse.
type DiskFault struct {
	On    []string `json:"on"`
	From  Size     `json:"from,omitempty"`
	To    Size     `json:"to,omitempty"`
	Times int      `json:"times,omitempty"`
	Delay Duration `json:"delay,omitempty"`
	Hang  bool     `json:"hang,omitempty"`
	Lie   bool     `json:"lie,omitempty"`
	// Fired is the number of times that the fault has applied.
	Fired int `json:"fired,omitempty"`
}

// FailDisk adds a fault to the disk with that ID.
func (c Client) FailDisk(ctx context.Context, id string, fault DiskFault) error {
	return c.call(ctx, http.MethodPost, "/disks/"+id+"/faults", fault, nil)
}

// HealDisk removes all faults of a disk.
func (c Client) HealDisk(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/disks/"+id+"/faults", nil, nil)
}

// DiskFaults lists the faults of a disk.
func (c Client) DiskFaults(ctx context.Context, id string) ([]DiskFault, error) {
	var faults []DiskFault
	err := c.call(ctx, http.MethodGet, "/disks/"+id+"/faults", nil, &faults)
	return faults, err
}
