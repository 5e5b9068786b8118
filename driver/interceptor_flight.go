package driver

import (
	"context"
	"strings"

	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// flightRecorders are the flight recorders of the services of one process.
type flightRecorders struct {
	controller, node *flight.Recorder // nil: nothing is recorded
	instance         string           // the node's
}

// intercept gives every call its recorder.
func (r flightRecorders) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	recorder, f := r.controller, changedBy(req)
	if strings.HasPrefix(info.FullMethod, "/csi.v1.Node/") {
		recorder, f.Instance = r.node, r.instance
	}
	if recorder != nil {
		ctx = flight.With(ctx, recorder, f)
	}
	return handler(ctx, req)
}

// changedBy returns what a request says of the change that it asks for.
func changedBy(req any) (f flight.Fields) {
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		f.Volume = r.GetVolumeId()
	}
	if r, ok := req.(interface{ GetSourceVolumeId() string }); ok {
		f.Volume = r.GetSourceVolumeId()
	}
	if r, ok := req.(interface{ GetNodeId() string }); ok {
		f.Instance = r.GetNodeId()
	}
	if r, ok := req.(interface{ GetSnapshotId() string }); ok {
		f.Snapshot = r.GetSnapshotId()
	}
	if r, ok := req.(interface{ GetStagingTargetPath() string }); ok {
		f.Path = r.GetStagingTargetPath()
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok {
		f.Path = r.GetTargetPath()
	}
	if r, ok := req.(interface{ GetParameters() map[string]string }); ok {
		f.Claim = volume.Claim(r.GetParameters())
	}
	return f
}
