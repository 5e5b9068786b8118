package harness

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// capacities is a controller that implements GetCapacity only.
type capacities struct {
	csi.UnimplementedControllerServer
	answer func(ctx context.Context) error
}

func (c capacities) GetCapacity(ctx context.Context, _ *csi.GetCapacityRequest) (
	*csi.GetCapacityResponse, error) {
	return &csi.GetCapacityResponse{}, c.answer(ctx)
}

// askedByRules starts a server with that answer and calls it through ErrorRules.
func askedByRules(ctx context.Context, t *testing.T, answer func(ctx context.Context) error) error {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	csitest.Must(t, err)
	server := grpc.NewServer()
	csi.RegisterControllerServer(server, capacities{answer: answer})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithUnaryInterceptor(ErrorRules),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	csitest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = csi.NewControllerClient(conn).GetCapacity(ctx, &csi.GetCapacityRequest{})
	return err
}

func TestAnErrorThatBreaksARuleBecomesDataLoss(t *testing.T) { // B-8
	for name, test := range map[string]struct {
		answer error
		want   codes.Code
	}{
		"a reason and a sentence":  {status.Error(codes.Internal, "Why: it is so"), codes.Internal},
		"a sentence alone":         {status.Error(codes.Internal, "it is so"), codes.DataLoss},
		"a deadline of the server": {context.DeadlineExceeded, codes.DataLoss},
	} {
		t.Run(name, func(t *testing.T) {
			err := askedByRules(t.Context(), t, func(context.Context) error { return test.answer })
			if got := status.Code(err); got != test.want {
				t.Errorf("the error of the call is %v, want the code %v", err, test.want)
			}
		})
	}
}

func TestTheErrorOfACanceledCallKeepsItsCode(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	end := make(chan struct{})
	t.Cleanup(func() { close(end) })
	err := askedByRules(ctx, t, func(ctx context.Context) error {
		// The header makes this an answer that has begun.
		if err := grpc.SendHeader(ctx, metadata.Pairs("begun", "yes")); err != nil {
			t.Error(err)
		}
		time.AfterFunc(50*time.Millisecond, cancel)
		<-end
		return nil
	})
	if got := status.Code(err); got != codes.Canceled {
		t.Errorf("the error of the call is %v, want the code %v", err, codes.Canceled)
	}
}
