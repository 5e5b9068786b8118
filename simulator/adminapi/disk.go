package adminapi

import (
	"context"
	"net/http"
)

// DiskFault lets a disk fail, wherever it is attached: On lists what it strikes ("read", "write",
// "flush"), of the bytes From up to To (both 0 are all; a flush has no place), Times times (0 is
// until the disk is healed). What it strikes fails with EIO, or takes Delay longer, or Hangs until
// the disk is healed or detached, or is answered without being done (Lie). A discard is a write.
//
// The rack needs disks that can fail: oxide-simulator serve --disks=fuse.
type DiskFault struct {
	On    []string `json:"on"`
	From  int64    `json:"from,omitempty"`
	To    int64    `json:"to,omitempty"`
	Times int      `json:"times,omitempty"`
	Delay Duration `json:"delay,omitempty"`
	Hang  bool     `json:"hang,omitempty"`
	Lie   bool     `json:"lie,omitempty"`
	// Fired is how often it has struck.
	Fired int `json:"fired,omitempty"`
}

// FailDisk lets the disk with that ID fail.
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
