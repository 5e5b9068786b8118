package controller

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// step is a call to the controller, and what it returns.
type step struct {
	call proto.Message
	want codes.Code
}

var (
	publishStep   = publishRequest()
	unpublishStep = &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk,
		NodeId: racktest.Instance}
	unpublishAnywhereStep = &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk}
)

// take makes the calls. The caller's time ends before the change cannot be made any more, so that
// no call waits.
func take(t *testing.T, lines script, steps []step) {
	t.Helper()
	c := rackThat(t, lines...)
	for n, step := range steps {
		ctx, cancel := context.WithTimeout(t.Context(), DefaultLateLimit/2)
		defer cancel()
		err := csitest.Call(ctx, c, step.call)
		if status.Code(err) != step.want {
			t.Fatalf("call %d: got %v, want %s", n+1, err, step.want)
		}
		if step.want == codes.Unavailable && n > 0 {
			csitest.Want(t, err, codes.Unavailable, csierr.EffectUnknown)
		}
	}
}

func TestCU4NoUnpublishIsOKWhileAnAttachMayStillBeCarriedOut(t *testing.T) {
	unavailable := racktest.Error(503, "ServiceNotAvailable", "not now").To(attach)
	lost := racktest.Exchange{Want: attach, Cut: true}
	detached := accepted(detach, racktest.DiskOf("detached"))
	forbidden := racktest.Error(403, "Forbidden", "Forbidden").To(attach)
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		{"an attach that was answered with 503", script{alone, free, unavailable, free, free, free},
			[]step{{publishStep, codes.Unavailable}, {unpublishStep, codes.Unavailable},
				{unpublishAnywhereStep, codes.Unavailable}}},
		{"an attach whose answer was lost", script{alone, free, lost, free}, []step{{publishStep,
			codes.Unavailable}, {unpublishStep, codes.Unavailable}}},
		{"a disk that another instance has by now", script{alone, free, lost, shown(elsewhere)},
			[]step{{publishStep, codes.Unavailable}, {unpublishStep, codes.Unavailable}}},
		{"an attach that turns out done ends it", script{alone, free, lost, free, held, detached,
			free}, []step{{publishStep, codes.Unavailable}, {unpublishStep, codes.Unavailable},
			{unpublishStep, codes.OK}, {unpublishStep, codes.OK}}},
		{"a publish that finds it attached ends it", script{alone, free, lost, together(), held,
			detached}, []step{{publishStep, codes.Unavailable}, {publishStep, codes.OK}, {unpublishStep,
			codes.OK}}},
		{"a second attach leaves the first one open", script{alone, free, lost, alone, free,
			accepted(attach, racktest.DiskOf(racktest.AttachedHere)), together(), held, detached},
			[]step{{publishStep, codes.Unavailable}, {publishStep, codes.OK}, {unpublishStep,
				codes.Unavailable}}},
		{"a deleted disk cannot be attached", script{alone, free, lost, noDisk, ownProject},
			[]step{{publishStep, codes.Unavailable}, {unpublishStep, codes.OK}}},
		{"an attach that the rack refuses is not open", script{alone, free, forbidden, free},
			[]step{{publishStep, codes.PermissionDenied}, {unpublishStep, codes.OK}}},
		{"a detach that was lost makes a publish wait", script{held, {Want: detach, Cut: true}},
			[]step{{unpublishStep, codes.Unavailable}, {publishStep, codes.Unavailable}}},
		{"a detach that turns out done ends it", script{held, {Want: detach, Cut: true}, free, alone,
			free, accepted(attach, racktest.DiskOf(racktest.AttachedHere)), together()},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.OK}}},
		{"a second detach leaves the first one open", script{held, {Want: detach, Cut: true}, held,
			detached}, []step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK},
			{publishStep, codes.Unavailable}}},
	} {
		t.Run(s.name, func(t *testing.T) { take(t, s.lines, s.steps) })
	}
}

func TestCU4AnUnpublishThatHasTheTimeWaitsForALateAttach(t *testing.T) {
	lost := racktest.Exchange{Want: attach, Cut: true}
	for name, lines := range map[string]script{
		"that never comes": {alone, free, lost, free, free},
		"that comes": {alone, free, lost, free, held,
			accepted(detach, racktest.DiskOf("detached"))},
	} {
		t.Run(name, func(t *testing.T) {
			c := rackThat(t, lines...)
			c.LateLimit = time.Second
			err := csitest.Call(t.Context(), c, publishStep)
			csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
			must(t, csitest.Call(t.Context(), c, unpublishStep))
			if _, until := c.late.latest(change{racktest.Disk, racktest.Instance, true}); !until.IsZero() {
				t.Errorf("the attach is still open until %s", until)
			}
		})
	}
}

func TestCU4AChangeThatAnEarlierRequestExplainsMayStillCome(t *testing.T) {
	lost := racktest.Exchange{Want: attach, Cut: true}
	lostDetach := racktest.Exchange{Want: detach, Cut: true}
	unavailable := racktest.Error(503, "ServiceNotAvailable", "not now").To(attach)
	detached := accepted(detach, racktest.DiskOf("detached"))
	detaching := shown("detaching " + racktest.Instance)
	attaching := shown("attaching " + racktest.Instance)
	besideIn := func(state string) racktest.Exchange {
		return racktest.OK(beside, racktest.PageOf("", racktest.DiskOf(state+" "+racktest.Instance)))
	}
	garbage := accepted(attach, racktest.DiskOf("detached"))
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		// The disk is being detached by an earlier call; the attach gets a 503 and may come later.
		{"attach lost while the disk is detaching", script{besideIn("detaching"), detaching,
			unavailable, detaching, free}, []step{{publishStep, codes.Aborted}, {unpublishStep,
			codes.Unavailable}}},
		{"attach lost while the disk is detaching, seen at unpublish", script{besideIn("detaching"),
			detaching, lost, detaching, racktest.Refused.To(detach), detaching, free},
			[]step{{publishStep, codes.Unavailable}, {unpublishStep, codes.Aborted}, {unpublishStep,
				codes.Unavailable}}},
		// The first attach is answered and goes on; the second one is lost.
		{"second attach lost while the first is attaching", script{besideIn("attaching"), attaching,
			lost, together(), held, detached}, []step{{publishStep, codes.Unavailable}, {publishStep,
			codes.OK}, {unpublishStep, codes.Unavailable}}},
		// The answer is not one to this attach.
		{"an attach with a wrong answer", script{alone, free, garbage, free, free},
			[]step{{publishStep, codes.Unavailable}, {unpublishStep, codes.Unavailable}}},
		// A detach is lost although the disk is being detached by an earlier request.
		{"second detach lost while the first is detaching", script{detaching, lostDetach, free},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.Unavailable}}},
	} {
		t.Run(s.name, func(t *testing.T) { take(t, s.lines, s.steps) })
	}
}
