package driver

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// interceptors returns the interceptors of every call, outermost first. The log and the metrics see
// the final result, even of a panic. The lock is released however the handler ends. The deadline
// applies to the handler only.
func (s *csiServer) interceptors() []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{
		logCalls(s.Log),
		s.metrics.intercept,
		s.hidden.intercept,
		finish,
		recoverPanics(s.Log),
		checkLimits,
		s.flight.intercept,
		(&locks{}).intercept,
		limitTime,
	}
}

// finish gives every error a reason, a sentence and one of CSI's codes. A plain Go error would
// reach the CO as UNKNOWN.
func finish(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any,
	error) {
	answer, err := handler(ctx, req)
	if err != nil {
		return nil, csierr.Convert(err, csierr.Internal)
	}
	return answer, nil
}

// recoverPanics converts a panic to INTERNAL: one broken call must not end all others.
func recoverPanics(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (answer any, err error) {
		defer async.Recover(ctx, log, shortMethod(info.FullMethod), &err)
		return handler(ctx, req)
	}
}

// controllerTimeLimit is the deadline of a call without one, so that no goroutine waits for a rack
// forever.
const controllerTimeLimit = 2 * time.Minute

// limitTime sets a deadline for controller calls that have none. Node calls run to their end,
// because mkfs must not be interrupted.
func limitTime(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	if _, ok := ctx.Deadline(); !ok && strings.HasPrefix(info.FullMethod, "/csi.v1.Controller/") {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, controllerTimeLimit)
		defer cancel()
	}
	return handler(ctx, req)
}

// shortMethod returns "CreateVolume" for "/csi.v1.Controller/CreateVolume".
func shortMethod(full string) string { return full[strings.LastIndex(full, "/")+1:] }

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
