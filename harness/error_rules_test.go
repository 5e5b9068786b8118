package harness

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func TestAnErrorThatBreaksARuleBecomesDataLoss(t *testing.T) { // B-8
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	trailer := metadata.Pairs("content-type", "application/grpc")
	for name, test := range map[string]struct {
		ctx     context.Context
		trailer metadata.MD // an error of the server has one
		answer  error
		want    codes.Code
	}{
		"a reason and a sentence": {t.Context(), trailer,
			status.Error(codes.Internal, "Why: it is so"), codes.Internal},
		"a sentence alone": {t.Context(), trailer,
			status.Error(codes.Internal, "it is so"), codes.DataLoss},
		"a deadline of the server": {t.Context(), trailer,
			status.FromContextError(context.DeadlineExceeded).Err(), codes.DataLoss},
		"a canceled call that the server ends": {canceled, trailer,
			status.FromContextError(context.Canceled).Err(), codes.Canceled},
		"a canceled call that this client ends": {canceled, nil,
			status.FromContextError(context.Canceled).Err(), codes.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			err := ErrorRules(test.ctx, "/csi.v1.Controller/GetCapacity", nil, nil, nil,
				func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn,
					options ...grpc.CallOption) error {
					*options[0].(grpc.TrailerCallOption).TrailerAddr = test.trailer
					return test.answer
				})
			if got := status.Code(err); got != test.want {
				t.Errorf("the error of the call is %v, want the code %v", err, test.want)
			}
		})
	}
}
