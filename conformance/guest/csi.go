package guest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// NodeRequest is a call of the driver's node service. Its message is protobuf bytes.
type NodeRequest struct {
	Method  string
	Message []byte
}

// NodeResponse is the answer to a NodeRequest. For an error, Status has the gRPC status as protobuf
// bytes.
type NodeResponse struct{ Message, Status []byte }

// Invoke calls the driver's node service.
func (a *Agent) Invoke(ctx context.Context, req NodeRequest) (resp NodeResponse, err error) {
	a.mu.Lock()
	plugin := a.plugin
	a.mu.Unlock()
	if plugin == nil {
		return resp, errors.New("no driver runs in this instance: Config.Plugin was empty")
	}
	err = plugin.Conn.Invoke(ctx, req.Method, req.Message, &resp.Message,
		grpc.ForceCodec(rawCodec{}))
	if err != nil {
		resp.Status, err = proto.Marshal(status.Convert(err).Proto())
	}
	return resp, err
}

// rawCodec passes on messages that are bytes already.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) {
	message, ok := v.([]byte)
	if !ok {
		return nil, fmt.Errorf("%T is not bytes", v)
	}
	return message, nil
}

func (rawCodec) Unmarshal(data []byte, v any) error {
	message, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("%T is not for bytes", v)
	}
	*message = append([]byte(nil), data...)
	return nil
}

// conn is a connection to the driver's node service in an instance, for the generated CSI
// clients. It has no streams.
type conn struct{ guest *AgentClient }

func (c conn) Invoke(
	ctx context.Context, method string, args, reply any, _ ...grpc.CallOption,
) error {
	began := time.Now()
	err := c.invoke(ctx, method, args, reply)
	if c.guest.Observe != nil {
		c.guest.Observe(method, args, began, err)
	}
	return err
}

func (c conn) invoke(ctx context.Context, method string, args, reply any) error {
	if err := ctx.Err(); err != nil { // gRPC does not send such a call either
		return status.FromContextError(err).Err()
	}
	in, ok := args.(proto.Message)
	out, ok2 := reply.(proto.Message)
	if !ok || !ok2 {
		return status.Errorf(codes.Internal, "%s: %T and %T are no protobuf messages", method, args,
			reply)
	}
	message, err := proto.Marshal(in)
	if err != nil {
		return status.Errorf(codes.Internal, "%s: %v", method, err)
	}
	resp, err := do[NodeRequest, NodeResponse](ctx, c.guest, "Invoke", NodeRequest{method, message})
	switch {
	case ctx.Err() != nil && err != nil:
		return status.FromContextError(ctx.Err()).Err()
	case err != nil:
		// The error is not the driver's, and a repeated call would not help.
		return status.Errorf(codes.Internal, "%s: %v", method, err)
	case len(resp.Status) > 0:
		s := status.New(codes.Unknown, "").Proto()
		if err := proto.Unmarshal(resp.Status, s); err != nil {
			return status.Errorf(codes.Internal, "%s: %v", method, err)
		}
		return status.FromProto(s).Err()
	}
	if err := proto.Unmarshal(resp.Message, out); err != nil {
		return status.Errorf(codes.Internal, "%s: %v", method, err)
	}
	return nil
}

func (conn) NewStream(
	context.Context, *grpc.StreamDesc, string, ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "a guest's connection has no streams")
}
