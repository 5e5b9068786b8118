package controller

import (
	"context"
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Service is CSI's controller service: it makes, attaches, detaches and deletes disks through
// the rack's API. It keeps nothing: several controllers may serve one cluster, and each may die at
// any moment. What the rack says is the only state.
type Service struct {
	csi.UnimplementedControllerServer

	Rack      *rack.Client
	ClusterID string            // in the description of what this cluster made; may be empty
	Topology  []volume.Segments // where the rack's disks can be reached from; empty means not declared
	MaxDisks  int               // that the rack lets an instance have; 0 means 12
	Log       *slog.Logger
}

func (c *Service) maxDisks() int {
	if c.MaxDisks == 0 {
		return volume.DefaultMaxDisks
	}
	return c.MaxDisks
}

// ControllerGetCapabilities says what the controller does. Not among it, because the rack has
// nothing like it: cloning a volume (take a snapshot and restore it), attaching read-only, growing
// and changing a volume.
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

// ControllerExpandVolume says that it cannot be done.
func (c *Service) ControllerExpandVolume(context.Context, *csi.ControllerExpandVolumeRequest) (
	*csi.ControllerExpandVolumeResponse, error) {
	return nil, csierr.New(csierr.NotSupported, "a disk's size is fixed when it is "+
		"made; take a snapshot of the volume and restore it into a larger one")
}

// ControllerModifyVolume says that it cannot be done.
func (c *Service) ControllerModifyVolume(context.Context, *csi.ControllerModifyVolumeRequest) (
	*csi.ControllerModifyVolumeResponse, error) {
	return nil, csierr.New(csierr.NotSupported, "a disk has nothing that could be "+
		"changed after it is made")
}
