package controller

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

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
