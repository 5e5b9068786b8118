package driver

import (
	"context"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// locks admits one call at a time for each object. The zero value is ready for use.
type locks struct {
	mu sync.Mutex
	// guarded by mu
	held map[string]struct{}
}

func (l *locks) tryLock(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, taken := l.held[key]; taken {
		return false
	}
	if l.held == nil {
		l.held = map[string]struct{}{}
	}
	l.held[key] = struct{}{}
	return true
}

func (l *locks) unlock(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, key)
}

// intercept returns ABORTED while another call for the same object is in progress. The lock is held
// as long as the handler runs: a caller that gives up does not release an object that mkfs works on
// (B-12).
func (l *locks) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (any, error) {
	key := lockKey(req)
	if key == "" {
		return handler(ctx, req)
	}
	if !l.tryLock(key) {
		return nil, csierr.New(csierr.OperationPending, "another call for %s is in progress; repeat "+
			"this one later", csierr.Plain(key))
	}
	defer l.unlock(key)
	// A caller that gave up may have made another call since, which this call would undo if it began
	// now. On one connection the end of a call arrives before the next call.
	switch ctx.Err() {
	case nil:
		return handler(ctx, req)
	case context.DeadlineExceeded:
		return nil, csierr.New(csierr.DeadlineExceeded, "the deadline passed before the call began; "+
			"nothing was done")
	}
	return nil, csierr.New(csierr.Canceled, "the caller canceled before the call began; nothing was "+
		"done")
}

// lockKey returns the object that a call changes, or "" for a read-only call. A create is
// identified by its name, any other call by its id.
func lockKey(req any) string {
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		return objectKey("volume name", r.GetName())
	case *csi.CreateSnapshotRequest:
		return objectKey("snapshot name", r.GetName())
	case *csi.DeleteSnapshotRequest:
		return objectKey("snapshot", r.GetSnapshotId())
	case *csi.DeleteVolumeRequest, *csi.ControllerPublishVolumeRequest,
		*csi.ControllerUnpublishVolumeRequest, *csi.NodeStageVolumeRequest,
		*csi.NodeUnstageVolumeRequest, *csi.NodePublishVolumeRequest,
		*csi.NodeUnpublishVolumeRequest:
		return objectKey("volume", r.(interface{ GetVolumeId() string }).GetVolumeId())
	}
	return ""
}

func objectKey(kind, id string) string {
	if id == "" {
		return ""
	}
	if u, ok := volume.ParseID(id); ok {
		id = u // the case of a UUID does not matter
	}
	return kind + " " + id
}
