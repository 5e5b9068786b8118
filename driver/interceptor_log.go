package driver

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// logCalls logs one line when a call ends. At debug level it also logs the request and the
// response, without secrets and mount flags.
func logCalls(log *slog.Logger) grpc.UnaryServerInterceptor {
	var calls atomic.Int64
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo,
		handler grpc.UnaryHandler) (any, error) {
		method := shortMethod(info.FullMethod)
		call := log.With("method", method, "call", calls.Add(1))
		call.DebugContext(ctx, "called", "request", redacted{req})
		start := time.Now()
		answer, err := handler(ctx, req)
		attrs := append(objects(req), made(answer)...)
		attrs = append(attrs, slog.Duration("took", time.Since(start)))
		if err != nil {
			s := status.Convert(err)
			attrs = append(attrs, slog.String("code", s.Code().String()),
				slog.String("error", s.Message()))
		}
		call.LogAttrs(ctx, levelOf(method, err), "done", attrs...)
		if err == nil {
			call.DebugContext(ctx, "answered", "response", redacted{answer})
		}
		return answer, err
	}
}

// levelOf lowers the level of frequent read-only calls, and raises the level of failures.
func levelOf(method string, err error) slog.Level {
	asking := method == "Probe" || strings.Contains(method, "Get") ||
		strings.Contains(method, "List") || strings.HasPrefix(method, "Validate")
	switch code := status.Code(err); {
	case code == codes.OK && asking, code == codes.Unimplemented,
		// What Probe reports was logged once, when it was found; kubelet asks every few seconds.
		method == "Probe" && code == codes.FailedPrecondition:
		return slog.LevelDebug
	case code == codes.OK, code == codes.Canceled, code == codes.Aborted:
		return slog.LevelInfo
	case code == codes.Internal:
		return slog.LevelError
	}
	return slog.LevelWarn
}

// objects returns the ids and names in a request, by which a log is searched.
func objects(req any) []slog.Attr {
	var attrs []slog.Attr
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, csierr.Plain(value)))
		}
	}
	if r, ok := req.(interface{ GetName() string }); ok {
		add("name", r.GetName())
	}
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		add("volume", r.GetVolumeId())
	}
	if r, ok := req.(interface{ GetSourceVolumeId() string }); ok {
		add("source", r.GetSourceVolumeId())
	}
	if r, ok := req.(interface{ GetNodeId() string }); ok {
		add("node", r.GetNodeId())
	}
	if r, ok := req.(interface{ GetSnapshotId() string }); ok {
		add("snapshot", r.GetSnapshotId())
	}
	return attrs
}

// made returns the id of the object that a call made, by which later calls are found.
func made(answer any) []slog.Attr {
	if r, ok := answer.(*csi.CreateVolumeResponse); ok && r.GetVolume() != nil {
		return []slog.Attr{slog.String("volume", r.GetVolume().GetVolumeId())}
	}
	if r, ok := answer.(*csi.CreateSnapshotResponse); ok && r.GetSnapshot() != nil {
		return []slog.Attr{slog.String("snapshot", r.GetSnapshot().GetSnapshotId())}
	}
	return nil
}

// redacted is a message for the log. It is redacted only if the line is written.
type redacted struct{ message any }

// LogValue returns the message as JSON without secrets and mount flags.
func (r redacted) LogValue() slog.Value {
	message, ok := r.message.(proto.Message)
	if !ok {
		return slog.StringValue("not a message")
	}
	message = proto.Clone(message)
	clearMountFlags(message.ProtoReflect())
	stripped := protosanitizer.StripSecrets(message).String()
	if !json.Valid([]byte(stripped)) {
		return slog.StringValue("unprintable")
	}
	const most = 64 << 10
	return slog.StringValue(csierr.WithoutTokens(stripped[:min(len(stripped), most)]))
}

// clearMountFlags removes the mount flags of every capability in a message: CSI says they may be
// sensitive, but does not mark them as secret.
func clearMountFlags(m protoreflect.Message) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Name() == "mount_flags":
			m.Clear(field)
		case field.IsMap():
			if field.MapValue().Message() != nil {
				value.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
					clearMountFlags(v.Message())
					return true
				})
			}
		case field.Message() == nil:
		case field.IsList():
			for i := range value.List().Len() {
				clearMountFlags(value.List().Get(i).Message())
			}
		default:
			clearMountFlags(value.Message())
		}
		return true
	})
}
