// Package controller implements CSI's controller service. Each RPC parses its request, reads the
// rack's state, decides, makes at most one change, and returns its response.
//
// The package stops no instance, and deletes only objects with this cluster's ownership tag.
package controller

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Service implements CSI's controller service. Several controllers may serve one cluster, and each
// may be killed at any time, because all state is on the rack. In memory a controller keeps only
// the changes that the rack has not answered (see DefaultLateLimit).
type Service struct {
	csi.UnimplementedControllerServer

	Rack      *rack.Client
	ClusterID string            // part of the ownership tags of this cluster; may be empty
	Topology  []volume.Segments // from where disks can be reached; empty means not declared
	// TopologyInstance reports whether a node's topology contains its instance. If it is false,
	// CreateVolume refuses placement=instance.
	TopologyInstance bool
	MaxDisks         int // the rack's limit per instance; 0 means 12
	// LateLimit replaces DefaultLateLimit if it is not 0.
	LateLimit time.Duration
	Log       *slog.Logger

	changes changes
}

func (c *Service) maxDisks() int { return cmp.Or(c.MaxDisks, volume.DefaultMaxDisks) }

// ControllerGetCapabilities returns what the controller supports. A rack cannot clone a volume (a
// snapshot can be restored instead), attach a disk read-only, or grow or change a disk.
func (c *Service) ControllerGetCapabilities(context.Context,
	*csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	var list []*csi.ControllerServiceCapability
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	} {
		list = append(list, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{
				Rpc: &csi.ControllerServiceCapability_RPC{Type: t},
			},
		})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: list}, nil
}

// ControllerExpandVolume is not supported.
func (c *Service) ControllerExpandVolume(context.Context, *csi.ControllerExpandVolumeRequest) (
	*csi.ControllerExpandVolumeResponse, error) {
	return nil, csierr.New(csierr.NotSupported, "a disk's size is fixed when it is "+
		"made; take a snapshot of the volume and restore it into a larger one")
}

// ControllerModifyVolume is not supported.
func (c *Service) ControllerModifyVolume(context.Context, *csi.ControllerModifyVolumeRequest) (
	*csi.ControllerModifyVolumeResponse, error) {
	return nil, csierr.New(csierr.NotSupported, "a disk cannot be changed after it is made")
}

// ValidateVolumeCapabilities reports whether a disk, which somebody may have made by hand, fits the
// request. If it does not fit, the call succeeds with a message and without a confirmation.
func (c *Service) ValidateVolumeCapabilities(ctx context.Context,
	req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	id, mismatch, err := validationOf(req)
	if err != nil {
		return nil, err
	}
	disk, err := c.Rack.Disk(ctx, id)
	if err != nil {
		return nil, err
	}
	if mismatch = cmp.Or(mismatch, useProblem(disk, req.GetVolumeCapabilities()...),
		diskMismatch(disk, req.GetVolumeContext(), req.GetParameters())); mismatch != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: mismatch}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      req.GetVolumeContext(),
			VolumeCapabilities: req.GetVolumeCapabilities(),
			Parameters:         req.GetParameters(),
		},
	}, nil
}

// validationOf parses the request. mismatch is why no disk can fit the request, or "" if one may.
func validationOf(req *csi.ValidateVolumeCapabilitiesRequest) (id oxide.NameOrId, mismatch string,
	err error) {
	switch {
	case req.GetVolumeId() == "":
		return "", "", volumeIDMissing()
	case len(req.GetVolumeCapabilities()) == 0:
		return "", "", csierr.New(csierr.FieldMissing, "volume_capabilities is missing")
	}
	for _, capability := range req.GetVolumeCapabilities() {
		switch p := volume.CapabilityProblem(capability); {
		case p.Malformed:
			return "", "", csierr.New(csierr.CapabilityInvalid, "%s", p.Message)
		case p.Unsupported:
			mismatch = p.Message
		}
		m := capability.GetMount()
		_, err := volume.ParseMountFlags(m.GetFsType(), m.GetMountFlags())
		if err != nil && mismatch == "" {
			mismatch = err.Error()
		}
	}
	if mismatch == "" && len(req.GetMutableParameters()) > 0 {
		mismatch = "mutable_parameters are not supported"
	}
	id, ok := rack.ID(req.GetVolumeId())
	if !ok {
		return "", "", rack.VolumeNotFound(req.GetVolumeId())
	}
	return id, mismatch, nil
}

// diskMismatch returns how the disk differs from volumeContext and the parameters in values, or "".
func diskMismatch(disk *oxide.Disk, volumeContext, values map[string]string) string {
	for key, value := range volumeContext {
		if text := contextProblem(disk, key, value); text != "" {
			return text
		}
	}
	p, err := volume.ParseParameters(values)
	if err != nil {
		return csierr.Message(err)
	}
	m, _ := volume.ParseTag(disk.Description)
	switch {
	case rack.ReadOnly(disk):
		return "the disk is read-only"
	case p.BlockSize != 0 && p.BlockSize != int(disk.BlockSize):
		return fmt.Sprintf("blockSize: the disk has blocks of %d bytes", disk.BlockSize)
	case values[volume.ParamDiskType] != "" && string(p.DiskType) != string(disk.DiskType):
		return fmt.Sprintf("diskType: the disk is %s", disk.DiskType)
	case p.ImageID != "" && p.ImageID != disk.ImageId:
		return "imageId: the disk has another source"
	case values[volume.ParamMkfsOptions] != "" && p.MkfsOptions.String() != m.MkfsOptions:
		return "mkfsOptions: the volume has others"
	}
	return ""
}

func contextProblem(disk *oxide.Disk, key, value string) string {
	m, tagged := volume.ParseTag(disk.Description)
	switch {
	case volume.ForeignKey(key):
	case key == volume.CtxDiskName && value != string(disk.Name):
		return fmt.Sprintf("volume_context: %s: the disk's name is %s", key, disk.Name)
	case key == volume.CtxDiskID && value != disk.Id:
		return fmt.Sprintf("volume_context: %s: the disk's id is %s", key, disk.Id)
	case key == volume.CtxSnapshotID && value != disk.SnapshotId:
		return fmt.Sprintf("volume_context: %s: the disk is not of that snapshot", key)
	case key == volume.CtxBlockSize && value != strconv.Itoa(int(disk.BlockSize)):
		return fmt.Sprintf("volume_context: %s: the disk has blocks of %d bytes", key, disk.BlockSize)
	case key == volume.CtxMkfsOptions && tagged && value != m.MkfsOptions:
		return fmt.Sprintf("volume_context: %s: the volume has others", key)
	case key == volume.CtxMkfsOptions:
		if _, err := volume.ParseMkfsOptions(value); err != nil {
			return csierr.Plain(err.Error())
		}
	case !slices.Contains([]string{volume.CtxDiskName, volume.CtxDiskID, volume.CtxSnapshotID,
		volume.CtxBlockSize}, key):
		return fmt.Sprintf("volume_context: the key %.80q is unknown to this driver", key)
	}
	return ""
}

// ListVolumes lists the disks that this cluster made. It also lists disks that other clusters or
// people made, if they are attached and not boot disks: a CO treats an attached volume that is
// missing from the list as lost.
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

// ControllerGetVolume returns one volume and the node that its disk is attached to.
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

// ControllerListVolumeHealth lists the health of those volumes of ListVolumes that have a problem.
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

// volumeHealth reports only the state "faulted" as a problem: the others are normal or temporary.
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

// GetCapacity returns the unused part of the silo's storage quota. Snapshots and the disks of
// stopped instances count as used. For a request that no volume can satisfy, the response is OK and
// has no capacity.
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
		return false, nil //nolint:nilerr // no volume can satisfy the request
	}
	return volume.CanReach(req.GetAccessibleTopology(), c.Topology, c.TopologyInstance)
}

// available returns the unused capacity in whole GiB, because disks have sizes in whole GiB.
func available(capacity, provisioned oxide.ByteCount) int64 {
	if provisioned >= capacity {
		return 0
	}
	left := min(uint64(capacity-provisioned), 1<<62)
	return int64(left - left%volume.GiB)
}
