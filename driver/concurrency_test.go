package driver

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestManyCallsToARackThatHangsOrFailsLeaveNoGoroutine(t *testing.T) {
	before := goleak.IgnoreCurrent()
	rack := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The server notices that the driver hangs up only after the body is read.
		_, _ = io.Copy(io.Discard, r.Body)
		if rand.IntN(2) == 0 {
			<-r.Context().Done() // until the driver hangs up
			return
		}
		http.Error(w, "<html>a proxy's page</html>", http.StatusBadGateway)
	}))
	client, closeIdle, err := newTestClient(Config{Host: rack.URL, Token: racktest.Token,
		Project: racktest.Project})
	must(t, err)
	s := serve(t, &csiServer{Controller: &controller.Service{Rack: client}})
	controller := csi.NewControllerClient(s.conn)
	allowed := []codes.Code{codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Canceled}
	var callers sync.WaitGroup
	for caller := range 64 {
		callers.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(caller)))
			for range 6 {
				limit := time.Duration(20+r.IntN(80)) * time.Millisecond
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				err := anyControllerCall(ctx, controller, r)
				cancel()
				if code := status.Code(err); !slices.Contains(allowed, code) {
					t.Errorf("caller %d got %v: %v", caller, code, err)
				}
			}
		})
	}
	callers.Wait()
	must(t, s.stop())
	must(t, s.conn.Close())
	closeIdle()
	rack.Close()
	goleak.VerifyNone(t, before)
}

// anyControllerCall is one of the calls of a controller that ask the rack.
func anyControllerCall(ctx context.Context, controller csi.ControllerClient, r *rand.Rand) error {
	var err error
	switch r.IntN(5) {
	case 0:
		_, err = controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
			Name:               fmt.Sprint(r.IntN(3)),
			VolumeCapabilities: []*csi.VolumeCapability{csitest.Filesystem("")}})
	case 1:
		_, err = controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: racktest.Disk})
	case 2:
		_, err = controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
			VolumeId: racktest.Disk, NodeId: racktest.Instance, VolumeCapability: csitest.Filesystem("")})
	case 3:
		_, err = controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: racktest.Disk, NodeId: racktest.Instance})
	default:
		_, err = controller.ListVolumes(ctx, &csi.ListVolumesRequest{})
	}
	return err
}

func TestACanceledCallDoesNotBegin(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	req := &csi.NodePublishVolumeRequest{VolumeId: "a"}
	var l locks
	for _, c := range []struct {
		ctx    context.Context
		code   codes.Code
		reason csierr.Reason
	}{
		{gone, codes.Canceled, csierr.Canceled},
		{late, codes.DeadlineExceeded, csierr.DeadlineExceeded},
	} {
		_, err := l.intercept(c.ctx, req, nil, func(context.Context, any) (any, error) {
			t.Error("the call began")
			return nil, nil
		})
		csitest.Want(t, err, c.code, c.reason)
	}
	began := false
	if _, err := l.intercept(t.Context(), req, nil, func(context.Context, any) (any, error) {
		began = true
		return nil, nil
	}); err != nil || !began {
		t.Errorf("the lock is held by calls that never began: %v", err)
	}
}
