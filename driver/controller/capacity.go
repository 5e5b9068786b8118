package controller

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// GetCapacity returns how much of the silo's quota is left. Disks of stopped instances and
// snapshots count as used. A request that no volume can satisfy is not an error, but has no
// capacity.
func (c *Service) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (
	*csi.GetCapacityResponse, error) {
	possible, err := c.possible(req)
	switch {
	case err != nil:
		return nil, err
	case !possible:
		return &csi.GetCapacityResponse{}, nil
	}
	use, err := c.Rack.UtilizationView(ctx)
	if err != nil {
		return nil, rack.Error(ctx, "read utilization", err)
	}
	if err := rack.ValidateUtilization(use); err != nil {
		return nil, err
	}
	answer := &csi.GetCapacityResponse{
		AvailableCapacity: available(use.Capacity.Storage, use.Provisioned.Storage),
		MinimumVolumeSize: wrapperspb.Int64(volume.GiB),
	}
	if req.GetParameters()[volume.ParamDiskType] != string(oxide.DiskTypeLocal) {
		answer.MaximumVolumeSize = wrapperspb.Int64(volume.MaxDistributedBytes)
	}
	return answer, nil
}

// possible reports whether a volume can satisfy the request.
func (c *Service) possible(req *csi.GetCapacityRequest) (bool, error) {
	for _, capability := range req.GetVolumeCapabilities() {
		switch p := volume.CapabilityProblem(capability); {
		case p.Malformed:
			return false, csierr.New(csierr.CapabilityInvalid, "%s", p.Message)
		case p.Unsupported:
			return false, nil
		}
	}
	p, err := volume.ParseParameters(req.GetParameters())
	if err != nil || p.Fits(req.GetVolumeCapabilities(), 0) != nil ||
		p.Placement == volume.PlacementInstance && !c.TopologyInstance {
		return false, nil //nolint:nilerr // no volume can satisfy it, so there is no capacity
	}
	return volume.CanReach(req.GetAccessibleTopology(), c.Topology, c.TopologyInstance)
}

// available returns what is left, in whole GiB like the size of disks.
func available(capacity, provisioned oxide.ByteCount) int64 {
	if provisioned >= capacity {
		return 0
	}
	left := min(uint64(capacity-provisioned), 1<<62)
	return int64(left - left%volume.GiB)
}
