package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodeGetCapabilities lists what the node service can do.
func (n *Service) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error) {
	var list []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		list = append(list, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{
			Rpc: &csi.NodeServiceCapability_RPC{Type: t},
		}})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: list}, nil
}

// NodeGetInfo returns the id of this instance and how many volumes it takes.
func (n *Service) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse,
	error) {
	if n.InstanceID == "" {
		return nil, csierr.New(csierr.InstanceUnknown, "the driver does not "+
			"know which instance it runs on; set OXIDE_INSTANCE_ID")
	}
	all, err := n.host().List()
	if err != nil {
		return nil, csierr.Convert(fmt.Errorf("count the disks of this instance: %w", err),
			csierr.NodeToolFailed)
	}
	limit := cmp.Or(n.MaxDisks, volume.DefaultMaxDisks)
	foreign := foreignDisks(all, n.records().all())
	room := limit - foreign
	if room < 1 {
		// 0 would mean "no limit" to the orchestrator. The rack's own refusal is the backstop.
		n.log().Error("no room for volumes on this instance; NodeGetInfo reports 1, because 0 means no "+
			"limit",
			"max_disks", limit, "foreign_disks", foreign)
		room = 1
	}
	info := &csi.NodeGetInfoResponse{NodeId: n.InstanceID, MaxVolumesPerNode: int64(room)}
	if len(n.Topology) > 0 {
		info.AccessibleTopology = &csi.Topology{Segments: n.Topology}
	}
	return info, nil
}

// Use returns what is in use on this node.
func (n *Service) Use() (Use, error) {
	disks, err := n.host().List()
	if err != nil {
		return Use{}, fmt.Errorf("count the disks of this instance: %w", err)
	}
	volumes := map[string]bool{}
	for _, r := range n.records().all() {
		volumes[r.Volume] = true
	}
	return Use{Volumes: len(volumes), Disks: len(disks),
		Limit: cmp.Or(n.MaxDisks, volume.DefaultMaxDisks)}, nil
}

// foreignDisks counts the disks that are no volumes: the boot disk and disks attached by hand. They
// take slots of those that the rack lets an instance have. Disks come and go, so each call counts
// them. The orchestrator counts a static volume itself, whose disk somebody made by hand, so a disk
// that has a record takes no slot. Without a record, as after a reboot, it does until it is staged:
// one slot too few makes a pod wait, and one too many makes it fail on a node that is full. The
// cloud-init volume is no NVMe disk and takes none either.
func foreignDisks(all []blockdev.Device, volumes []volumeRecord) int {
	return len(slices.DeleteFunc(all, func(d blockdev.Device) bool {
		return volume.IsOwnName(d.Serial) || slices.ContainsFunc(volumes, func(r volumeRecord) bool {
			return volume.Serial(r.Disk) == d.Serial
		})
	}))
}
