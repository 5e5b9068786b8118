package node

import (
	"cmp"
	"context"
	"os"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// heldVolume is a volume that a call changes on this node, from its begin to its end.
type heldVolume struct {
	node   *Service
	id     string
	lock   *os.File // against the other processes of the driver
	record storedRecord
	flight flight.Call
}

// hold keeps the other processes of the driver from the volume until unlock. Every call that
// changes a volume on this node holds it from its begin to its end, so that none of them says OK
// while another process is in the middle of one.
func (n *Service) hold(ctx context.Context, volumeID string) (heldVolume, error) {
	lock, err := n.host().Lock(ctx, "the volume "+recordKey(volumeID))
	return heldVolume{node: n, id: volumeID, lock: lock, record: n.records().of(volumeID),
		flight: flight.Of(ctx)}, err
}

func (v heldVolume) unlock() { _ = v.lock.Close() }

func (n *Service) host() blockdev.Host {
	h := blockdev.Host{Sysfs: cmp.Or(n.SysfsRoot, DefaultSysfsRoot),
		Dev: cmp.Or(n.DevRoot, DefaultDevRoot), Mounted: func(d blockdev.Device) string {
			views, err := mount.ReadViews(n.log())
			if err != nil {
				return ""
			}
			return mount.Describe(views.Of(d, nil))
		}}
	if n.StateDir != "" {
		h.Locks = filepath.Join(n.StateDir, lockName)
	}
	return h
}
