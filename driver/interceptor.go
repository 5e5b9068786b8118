package driver

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/async"

	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// interceptors are what every call passes, outermost first: the log and the metrics see the final
// answer, also that of a panic; the lock is released however the handler ends; and the deadline
// counts for the handler only.
func (s *Server) interceptors() []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{
		logCalls(s.Log),
		s.metrics.intercept,
		s.hidden.intercept,
		finish,
		recoverPanics(s.Log),
		checkLimits,
		(&locks{}).intercept,
		limitTime,
	}
}

// finish gives every error the form that CSI and our users are promised: a code of CSI's, and a
// reason with a sentence. A bare Go error would reach the CO as UNKNOWN.
func finish(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any,
	error) {
	answer, err := handler(ctx, req)
	if err != nil {
		return nil, csierr.Convert(err, csierr.Internal)
	}
	return answer, nil
}

// recoverPanics turns a panic into INTERNAL: one broken call must not end the mounts and attaches
// of all others.
func recoverPanics(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (answer any, err error) {
		defer async.Recover(ctx, log, shortMethod(info.FullMethod), &err)
		return handler(ctx, req)
	}
}

// controllerTimeLimit bounds a call whose caller set no deadline: no goroutine waits for a rack for
// ever.
const controllerTimeLimit = 2 * time.Minute

// limitTime gives a deadline to controller calls that have none. Node calls run to their end: mkfs
// must not be cut off.
func limitTime(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	if _, ok := ctx.Deadline(); !ok && strings.HasPrefix(info.FullMethod, "/csi.v1.Controller/") {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, controllerTimeLimit)
		defer cancel()
	}
	return handler(ctx, req)
}

// shortMethod is "CreateVolume" for "/csi.v1.Controller/CreateVolume".
func shortMethod(full string) string { return full[strings.LastIndex(full, "/")+1:] }
