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

type step struct {
	call proto.Message
	want codes.Code
}

var (
	publishStep   = publishRequest()
	unpublishStep = &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk,
		NodeId: racktest.Instance}
	unpublishAnywhereStep = &csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk}
	createStep            = createRequest()
	getStep               = &csi.ControllerGetVolumeRequest{VolumeId: racktest.Disk}
	healthStep            = &csi.ControllerGetVolumeHealthRequest{VolumeId: racktest.Disk}
	deleteStep            = &csi.DeleteVolumeRequest{VolumeId: racktest.Disk}
	snapshotStep          = snapshotRequest()
	deleteSnapshotStep    = &csi.DeleteSnapshotRequest{SnapshotId: racktest.Snapshot}
)

// The steps of these tests. Those named …Open fail because an open change may undo them.
var (
	publishOK, publishOpen     = step{publishStep, codes.OK}, step{publishStep, codes.Unavailable}
	unpublishOK, unpublishOpen = step{unpublishStep, codes.OK}, step{unpublishStep, codes.Unavailable}
	createOpen                 = step{createStep, codes.Unavailable}
	snapshotOpen               = step{snapshotStep, codes.Unavailable}
	deleteOpen                 = step{deleteStep, codes.Unavailable}
)

// take makes the calls with deadlines before the end of an open change, so that no call waits.
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
			fails(csierr.EffectUnknown)(t, err)
		}
	}
}

// proofs/concurrency generates the cases with a single lost, late or wrong answer.
func TestNoUnpublishIsOKWhileAnAttachMayStillBeCarriedOut(t *testing.T) { // CU-4
	leaving := shown(detaching)
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		{"an attach that the rack refuses is not open", script{alone, free, forbidden.To(attach), free},
			[]step{{publishStep, codes.PermissionDenied}, unpublishOK}},
		// The disk is being detached by an earlier call; the attach gets no answer and may come later.
		{"attach lost while the disk is detaching", script{listing(diskOf(detaching)), leaving,
			later.To(attach), leaving, free}, []step{{publishStep, codes.Aborted}, unpublishOpen}},
		{"attach lost while the disk is detaching, seen at unpublish", script{listing(diskOf(detaching)),
			leaving, lostAttach, leaving, leaving, noDetach, leaving, free}, []step{{publishStep,
			codes.Aborted}, {unpublishStep, codes.Aborted}, unpublishOpen}},
		// The first attach is answered and goes on; the second one is lost.
		{"second attach lost while the first is attaching", script{listing(diskOf(attaching)), shown(
			attaching), lostAttach, held, together(), held, detachedNow}, []step{publishOK, unpublishOpen}},

		{"a second detach leaves the first one open", script{held, lostDetach, held, detachedNow},
			[]step{unpublishOpen, unpublishOK, publishOpen}},
		{"second detach lost while the first is detaching", script{leaving, lostDetach, free},
			[]step{unpublishOpen, unpublishOK, publishOpen}},
	} {
		t.Run(s.name, func(t *testing.T) { take(t, s.lines, s.steps) })
	}
}

func TestNoCreateAndNoDeleteIsOKWhileAnOpenChangeMayUndoIt(t *testing.T) { // CV-18
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		{"a refusal for the quota beside an open create", script{lostCreate, noName, full.To(postDisk),
			noName}, []step{createOpen, createOpen}},
		{"a refusal for the quota beside an open snapshot", script{free, lostSnap, noSnapName, free,
			full.To(postSnap), noSnapName}, []step{snapshotOpen, snapshotOpen}},
		{"a disk in use beside its open delete", script{free, lostDelete, held}, []step{deleteOpen,
			deleteOpen}},
	} {
		t.Run(s.name, func(t *testing.T) { take(t, s.lines, s.steps) })
	}
}

func TestACallWaitsForAnOpenChange(t *testing.T) { // CU-4
	for _, test := range []struct {
		name        string
		first, then proto.Message
		lines       script
	}{
		{"an attach that never comes", publishStep, unpublishStep, script{alone, free, lostAttach,
			free, free, free}},
		{"an attach that comes", publishStep, unpublishStep, script{alone, free, lostAttach, free,
			free, held, detachedNow}},
		{"a create whose disk is deleted", createStep, deleteStep, script{lostCreate,
			noName, free, free, deleted}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, test.lines...)
			c.LateLimit = time.Second
			fails(csierr.RackUnavailable)(t, csitest.Call(t.Context(), c, test.first))
			must(t, csitest.Call(t.Context(), c, test.then))
		})
	}
}

func TestACreateBesideADeleteOfTheNameIsRefused(t *testing.T) { // CV-18
	var c *Service
	var got error
	during := func(call proto.Message) func(*testing.T, []byte) {
		return func(t *testing.T, _ []byte) {
			// The script expects no request meanwhile.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			got = csitest.Call(ctx, c, call)
		}
	}
	c = rackThat(t, free, exchange{Want: deleteDisk, Status: 204, Check: during(createStep)},
		snap("ready"), exchange{Want: deleteSnap, Status: 204, Check: during(snapshotStep)})
	must(t, csitest.Call(t.Context(), c, deleteStep))
	fails(csierr.OperationPending)(t, got)
	must(t, csitest.Call(t.Context(), c, deleteSnapshotStep))
	fails(csierr.OperationPending)(t, got)
}

func TestNoChangeIsSentAfterAnOldLook(t *testing.T) {
	slow := func(look exchange) exchange {
		look.Hold = 50 * time.Millisecond
		return look
	}
	snapshot := slow(snap("ready"))
	for _, test := range []struct {
		name  string
		call  proto.Message
		lines script
	}{
		{"an attach", publishStep, script{alone, slow(free)}},
		{"a detach", unpublishStep, script{slow(held)}},
		{"a delete of a disk", deleteStep, script{slow(free)}},
		{"a delete of a snapshot", deleteSnapshotStep, script{snapshot}},
		{"a create from a snapshot", restoring(createRequest()), script{snapshot, noName}},
		{"a create of a snapshot", snapshotStep, script{slow(free), noSnapName}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, test.lines...)
			c.Rack.LookLimit = 20 * time.Millisecond
			fails(csierr.LookTooOld)(t, csitest.Call(t.Context(), c, test.call))
		})
	}
}
