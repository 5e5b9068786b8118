package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// identityService is CSI's identity service, which every process of the plugin serves.
type identityService struct {
	csi.UnimplementedIdentityServer

	// Topology reports whether the operator set a topology. Controller and nodes have to agree.
	Topology bool
	// Health reports whether the process is ready, or returns an error that a person has to repair. It
	// must not wait for the rack. Nil means always ready.
	Health func() (ready bool, err error)
	// Waiting returns, in a sentence, what a process that is well has waited for since it started; ""
	// is nothing. Nil means nothing.
	Waiting func() string
}

// waitingTrailer is the metadata of an answer to Probe with what the process waits for. CSI's own
// answer cannot have it: if it were not ready, a CO would start nothing and show no reason, and an
// error may restart the plugin. It ends in -bin because a sentence need not be ASCII.
const waitingTrailer = "oxide-csi-waiting-bin"

// GetPluginInfo returns the driver's name and version.
func (i *identityService) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (
	*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: volume.DriverName, VendorVersion: Version()}, nil
}

// GetPluginCapabilities lists what the plugin as a whole supports. CSI wants the same answer from
// every process, so a node lists CONTROLLER_SERVICE too.
//
// Group snapshots, snapshot metadata and expansion are missing because the rack does not support
// them.
func (i *identityService) GetPluginCapabilities(context.Context,
	*csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error) {
	types := []csi.PluginCapability_Service_Type{csi.PluginCapability_Service_CONTROLLER_SERVICE}
	if i.Topology {
		types = append(types, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
	}
	var list []*csi.PluginCapability
	for _, t := range types {
		list = append(list, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{
			Service: &csi.PluginCapability_Service{Type: t},
		}})
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: list}, nil
}

// Probe reports whether this process is ready. It makes no call, so it may be called at any rate.
// An outage of the rack is no reason to restart the plugin. A refused token and missing programs
// are errors, because a person has to repair them.
func (i *identityService) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse,
	error) {
	ready := true
	if i.Health != nil {
		var err error
		if ready, err = i.Health(); err != nil {
			return nil, err
		}
	}
	if i.Waiting != nil {
		if why := i.Waiting(); why != "" {
			// It fails only without a gRPC call, and then nobody asks for it.
			_ = grpc.SetTrailer(ctx, metadata.Pairs(waitingTrailer, why))
		}
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}
