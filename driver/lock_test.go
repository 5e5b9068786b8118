package driver

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

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
