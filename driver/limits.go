package driver

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// maxMapBytes is CSI's limit for every map without a limit of its own (B-2).
const maxMapBytes = 4 << 10

// fieldLimits are the fields with other limits; 0 means none. The node checks the length of paths.
// A starting token that is too long is invalid, which has a code of its own. Mount flags are
// counted together.
var fieldLimits = map[protoreflect.Name]int{
	"target_path": 0, "staging_target_path": 0, "volume_path": 0,
	"starting_token": 0, "mount_flags": 0, "node_id": 256,
}

// checkLimits enforces CSI's limits in every field of a request, at any depth.
func checkLimits(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	if message, ok := req.(proto.Message); ok {
		if err := limitProblem(message.ProtoReflect()); err != nil {
			return nil, err
		}
	}
	return handler(ctx, req)
}

// limitProblem returns an error that names a field over its limit, but never shows its value.
func limitProblem(m protoreflect.Message) (err error) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			err = mapProblem(field, value.Map())
		case field.IsList():
			for i := range value.List().Len() {
				if err == nil {
					err = valueProblem(field, value.List().Get(i))
				}
			}
		default:
			err = valueProblem(field, value)
		}
		return err == nil
	})
	return err
}

func mapProblem(field protoreflect.FieldDescriptor, values protoreflect.Map) (err error) {
	if field.MapValue().Kind() != protoreflect.StringKind || field.Name() == "segments" {
		return nil // segments have rules of their own, per segment
	}
	total := 0
	values.Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
		total += len(key.String()) + len(value.String())
		return true
	})
	if total > maxMapBytes {
		return csierr.New(csierr.FieldInvalid, "%s has %d bytes; CSI allows %d",
			field.Name(), total, maxMapBytes)
	}
	return nil
}

func valueProblem(field protoreflect.FieldDescriptor, value protoreflect.Value) error {
	switch field.Kind() {
	case protoreflect.MessageKind:
		return limitProblem(value.Message())
	case protoreflect.StringKind:
		most, special := fieldLimits[field.Name()]
		if !special {
			most = volume.MaxStringBytes
		}
		if most > 0 && len(value.String()) > most {
			return csierr.New(csierr.FieldInvalid, "%s has %d bytes; CSI allows %d",
				field.Name(), len(value.String()), most)
		}
	case protoreflect.Int64Kind, protoreflect.Int32Kind:
		if value.Int() < 0 {
			return csierr.New(csierr.FieldInvalid, "%s is negative", field.Name())
		}
	}
	return nil
}
