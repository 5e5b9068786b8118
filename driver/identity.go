package driver

import (
	"context"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Identity is CSI's identity service, which every process of the plugin serves.
type Identity struct {
	csi.UnimplementedIdentityServer

	// Topology says that an operator named the rack's place. Controller and nodes have to agree.
	Topology bool
	// Health says whether the process can work: ready, or not yet, or an error for a person. It
	// must not wait for the rack; nil means always ready.
	Health func() (ready bool, err error)
}

// GetPluginInfo says who this is.
func (i *Identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (
	*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: volume.DriverName, VendorVersion: Version()}, nil
}

// GetPluginCapabilities says what the plugin as a whole does. CSI wants the same answer from every
// process of it, so a node says CONTROLLER_SERVICE too.
//
// Left out on purpose: group snapshots, snapshot metadata and expansion, which the rack cannot do.
func (i *Identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
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

// Probe says whether this process can work. It may be called as often as one likes: it asks nobody.
// A rack that is down for a while is no reason to restart the plugin; a token that the rack refuses
// and missing programs are for a person to mend, and are errors.
func (i *Identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ready := true
	if i.Health != nil {
		var err error
		if ready, err = i.Health(); err != nil {
			return nil, err
		}
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}
