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

// ListVolumes lists this cluster's volumes: the disks that it made, and all other attached disks
// except boot disks. Those were made by hand or by another cluster, and a CO would treat an
// attached disk that is not listed as lost.
func (c *Service) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (
	*csi.ListVolumesResponse, error) {
	pages, err := c.Rack.NewPager(ctx, req.GetStartingToken(), req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	answer := &csi.ListVolumesResponse{}
	err = c.eachVolume(ctx, pages, func(disk *oxide.Disk) (enough bool) {
		entry := &csi.ListVolumesResponse_Entry{
			Volume: c.volume(disk),
			Status: &csi.ListVolumesResponse_VolumeStatus{
				PublishedNodeIds: publishedNodes(disk),
			},
		}
		if pages.Take(disk.Id, entry) {
			answer.Entries = append(answer.Entries, entry)
		}
		return pages.Full()
	})
	if err != nil {
		return nil, err
	}
	answer.NextToken = pages.Next
	return answer, nil
}

// ControllerGetVolume returns one volume and the node that has it.
func (c *Service) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (
	*csi.ControllerGetVolumeResponse, error) {
	disk, err := c.requestedDisk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: c.volume(disk),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{
			PublishedNodeIds: publishedNodes(disk),
		},
	}, nil
}

func (c *Service) eachVolume(ctx context.Context, pages *rack.Pager,
	visit func(*oxide.Disk) (enough bool)) error {
	var boot map[string]bool
	return c.Rack.EachDisk(ctx, pages, func(disk *oxide.Disk) (enough bool, err error) {
		if rack.ForeignDisk(disk, c.ClusterID) != "" {
			if rack.InstanceOf(disk) == "" {
				return false, nil
			}
			if boot == nil {
				if boot, err = c.Rack.BootDisks(ctx); err != nil {
					return false, err
				}
			}
			if boot[disk.Id] {
				return false, nil
			}
		}
		if err := rack.ValidateDisk("list disks", disk); err != nil {
			return false, err
		}
		return visit(disk), nil
	})
}

func publishedNodes(disk *oxide.Disk) []string {
	if node := rack.InstanceOf(disk); node != "" {
		return []string{node}
	}
	return nil
}

func (c *Service) requestedDisk(ctx context.Context, volumeID string) (*oxide.Disk, error) {
	if volumeID == "" {
		return nil, volumeIDMissing()
	}
	id, ok := rack.ID(volumeID)
	if !ok {
		return nil, rack.VolumeNotFound(volumeID)
	}
	return c.Rack.Disk(ctx, id)
}

// ControllerListVolumeHealth lists this cluster's volumes that have a problem.
func (c *Service) ControllerListVolumeHealth(ctx context.Context,
	req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	pages, err := c.Rack.NewPager(ctx, req.GetStartingToken(), req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	answer := &csi.ControllerListVolumeHealthResponse{}
	err = c.eachVolume(ctx, pages, func(disk *oxide.Disk) (enough bool) {
		if health := volumeHealth(disk); len(health.GetHealthStatuses()) > 0 &&
			pages.Take(disk.Id, health) {
			answer.Entries = append(answer.Entries, health)
		}
		return pages.Full()
	})
	if err != nil {
		return nil, err
	}
	answer.NextToken = pages.Next
	return answer, nil
}

// ControllerGetVolumeHealth returns the health of one volume.
func (c *Service) ControllerGetVolumeHealth(ctx context.Context,
	req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	disk, err := c.requestedDisk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: volumeHealth(disk)}, nil
}

// volumeHealth derives a volume's health from the disk's state. Only a faulted disk has a problem;
// the other states are transitional or normal.
func volumeHealth(disk *oxide.Disk) *csi.VolumeHealth {
	health := &csi.VolumeHealth{VolumeId: disk.Id}
	if disk.State.State() == oxide.DiskStateStateFaulted {
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{{
			Status:  csi.VolumeHealthErrorType_INACCESSIBLE,
			Reason:  string(csierr.DiskFaulted),
			Message: "the rack reports the disk " + string(disk.Name) + " as faulted",
		}}
	}
	return health
}

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
