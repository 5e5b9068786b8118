//go:build linux

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

	"github.com/oxidecomputer/oxide-csi-plugin/driver/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

// crowd is how many callers there are at once.
const crowd = 64

// callAtOnce lets a crowd make calls, each with its own chance; what they get may have these codes
// only.
func callAtOnce(t *testing.T, calls int, call func(r *rand.Rand, caller int) error,
	allowed ...codes.Code) {
	t.Helper()
	var callers sync.WaitGroup
	for caller := range crowd {
		callers.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(caller)))
			for range calls {
				err := call(r, caller)
				if code := status.Code(err); !slices.Contains(allowed, code) {
					t.Errorf("caller %d got %v: %v", caller, code, err)
				}
			}
		})
	}
	callers.Wait()
}

func TestACrowdAtANodeLeavesNoGoroutineAndNoMount(t *testing.T) {
	before := goleak.IgnoreCurrent()
	g := newGuest(t)
	var volumes []testVolume
	for i := range 4 {
		kind := []string{volume.Ext4, "block"}[i%2]
		volumes = append(volumes, g.volume(g.Attach(fmt.Sprintf("csi-000000000000000%d", i), guesttest.GiB), kind))
	}
	s := serve(t, &Server{Node: g.node()})
	node := csi.NewNodeClient(s.conn)
	callAtOnce(t, 12, func(r *rand.Rand, caller int) error {
		v := volumes[caller%len(volumes)]
		ctx := t.Context()
		if r.IntN(8) == 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(20))*time.Millisecond)
			defer cancel()
		}
		return anyNodeCall(ctx, node, v, r)
	}, codes.OK, codes.Aborted, codes.FailedPrecondition, codes.NotFound, codes.Canceled,
		codes.DeadlineExceeded, codes.Internal)
	for _, v := range volumes {
		v.left(t, node)
	}
	if left := guesttest.Mounts(t, g.Dir); len(left) > 0 {
		t.Errorf("mounts left: %q", left)
	}
	must(t, s.stop())
	must(t, s.conn.Close())
	goleak.VerifyNone(t, before)
}

// anyNodeCall is one of the calls of a node about a volume. INTERNAL is the answer to unstaging
// what is in use (NU-5), and to nothing else.
func anyNodeCall(ctx context.Context, node csi.NodeClient, v testVolume, r *rand.Rand) error {
	target := fmt.Sprintf("pod-%s-%d", v.disk.Serial, r.IntN(2))
	var err error
	switch r.IntN(5) {
	case 0:
		_, err = node.NodeStageVolume(ctx, v.stageRequest())
	case 1:
		_, err = node.NodePublishVolume(ctx, v.publishRequest(target))
	case 2:
		_, err = node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
			VolumeId: v.ID, TargetPath: v.guest.path(target)})
	case 3:
		_, err = node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: v.ID, StagingTargetPath: v.staging()})
		return err
	default:
		_, err = node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
			VolumeId: v.ID, VolumePath: v.guest.path(target), StagingTargetPath: v.staging()})
	}
	if status.Code(err) == codes.Internal {
		return csierr.Coded(codes.Unknown, csierr.Internal, "INTERNAL from another call: %s", err)
	}
	return err
}

// left takes the volume from the node, whatever still is at work there.
func (v testVolume) left(t *testing.T, node csi.NodeClient) {
	t.Helper()
	csitest.Await(t, "the volume has left the node", func() bool {
		for i := range 2 {
			_, err := node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{
				VolumeId:   v.ID,
				TargetPath: v.guest.path(fmt.Sprintf("pod-%s-%d", v.disk.Serial, i))})
			if err != nil {
				return false
			}
		}
		_, err := node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{
			VolumeId: v.ID, StagingTargetPath: v.staging()})
		return err == nil
	})
}

func TestACrowdAtARackThatHangsOrFailsLeavesNoGoroutine(t *testing.T) {
	before := goleak.IgnoreCurrent()
	rack := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The server looks whether the driver hangs up only when the body is read.
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
	s := serve(t, &Server{Controller: &controller.Service{Rack: client}})
	controller := csi.NewControllerClient(s.conn)
	callAtOnce(t, 6, func(r *rand.Rand, _ int) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(20+r.IntN(80))*time.Millisecond)
		defer cancel()
		return anyControllerCall(ctx, controller, r)
	}, codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Canceled)
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
