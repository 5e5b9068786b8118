package driver

import (
	"context"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
		return nil, finished(err)
	}
	return answer, nil
}

var startsWithReason = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*: \S`)

func finished(err error) error {
	s, ok := status.FromError(err)
	switch {
	case !ok, s.Code() == codes.Unknown, s.Code() == codes.OK:
		return fail(codes.Internal, ReasonInternal, "%s", err.Error())
	case startsWithReason.MatchString(s.Message()) && len(s.Details()) == 0:
		return err
	case s.Code() == codes.DeadlineExceeded:
		return fail(s.Code(), ReasonDeadlineExceeded, "%s", s.Message())
	case s.Code() == codes.Canceled:
		return fail(s.Code(), ReasonCanceled, "%s", s.Message())
	case s.Code() == codes.Unimplemented:
		return fail(s.Code(), ReasonNotSupported, "%s", s.Message())
	}
	return fail(s.Code(), ReasonInternal, "%s", s.Message())
}

// recoverPanics turns a panic into INTERNAL: one broken call must not end the mounts and attaches
// of all others.
func recoverPanics(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (answer any, err error) {
		defer recovered(ctx, log, shortMethod(info.FullMethod), &err)
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
