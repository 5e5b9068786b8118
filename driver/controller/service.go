// Package controller is CSI's controller service. Each RPC parses its request, decides from the
// state of the rack, makes one change, and builds its response.
//
// Files: service.go, then one for each group of RPCs: volume.go (create and delete), publish.go and
// unpublish.go, snapshot.go, list.go (with health), capacity.go, validate.go. Shared:
// volume_spec.go and snapshot_spec.go (parsed creates), disk.go (a disk in CSI's terms, and which
// disks this driver made), changes.go (changes whose outcome a response leaves open).
//
// It keeps no state between calls, never stops an instance, and deletes nothing without this
// cluster's ownership tag.
package controller

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Service is CSI's controller service: it creates, attaches, detaches and deletes disks through the
// rack's API. Several controllers may serve one cluster, and each may be killed at any time: the
// rack has the state. Only which changes the rack has not answered is kept, see DefaultLateLimit.
type Service struct {
	csi.UnimplementedControllerServer

	Rack      *rack.Client
	ClusterID string            // part of the ownership tags of this cluster; may be empty
	Topology  []volume.Segments // where the rack's disks can be reached from; empty means not declared
	// TopologyInstance is whether nodes report their instance, as volumes that stay there need.
	TopologyInstance bool
	MaxDisks         int // the rack's limit per instance; 0 means 12
	// LateLimit is how long the rack may take to carry out a change that it did not answer; 0 means
	// DefaultLateLimit.
	LateLimit time.Duration
	Log       *slog.Logger

	changes changes
}

func (c *Service) maxDisks() int { return cmp.Or(c.MaxDisks, volume.DefaultMaxDisks) }

// ControllerGetCapabilities lists what the controller supports. The rack offers no way to clone a
// volume (take a snapshot and restore it), to attach read-only, or to grow or change a volume.
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
