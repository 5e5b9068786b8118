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
	createStep            = createRequest()
	deleteStep            = &csi.DeleteVolumeRequest{VolumeId: racktest.Disk}
	snapshotStep          = snapshotRequest()
	deleteSnapshotStep    = &csi.DeleteSnapshotRequest{SnapshotId: racktest.Snapshot}
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

// proxied is the answer of a proxy to a change.
func proxied(want string, status int) racktest.Exchange {
	return racktest.Exchange{Want: want, Status: status, Body: "<html>", Proxy: true}
}

var (
	lostAttach  = racktest.Exchange{Want: attach, Cut: true}
	lostDetach  = racktest.Exchange{Want: detach, Cut: true}
	attachedNow = accepted(attach, racktest.DiskOf(racktest.AttachedHere))
	detachedNow = accepted(detach, racktest.DiskOf("detached"))
)

func TestCU4NoUnpublishIsOKWhileAnAttachMayStillBeCarriedOut(t *testing.T) {
	unavailable := racktest.Error(503, "ServiceNotAvailable", "not now").To(attach)
	forbidden := racktest.Error(403, "Forbidden", "Forbidden").To(attach)
	detaching := shown("detaching " + racktest.Instance)
	besideIn := func(state string) racktest.Exchange {
		return racktest.OK(beside, racktest.PageOf("", racktest.DiskOf(state+" "+racktest.Instance)))
	}
	// attaching is a publish whose attach has this answer, and that finds the disk detached.
	attaching := func(answer racktest.Exchange, rest ...racktest.Exchange) script {
		return append(script{alone, free, answer, free}, rest...)
	}
	unclear := step{publishStep, codes.Unavailable}
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		{"an attach that was answered with 503", attaching(unavailable, free, free), []step{unclear,
			{unpublishStep, codes.Unavailable}, {unpublishAnywhereStep, codes.Unavailable}}},
		{"an attach whose answer was lost", attaching(lostAttach, free), []step{unclear,
			{unpublishStep, codes.Unavailable}}},
		{"an attach with a wrong answer", attaching(accepted(attach, racktest.DiskOf("detached")),
			free), []step{unclear, {unpublishStep, codes.Unavailable}}},
		{"an attach that a proxy answered with 499", attaching(proxied(attach, 499), together(), held,
			detachedNow), []step{unclear, {publishStep, codes.OK}, {unpublishStep, codes.Unavailable}}},
		{"an attach that a proxy answered with 403", attaching(proxied(attach, 403), together(), held,
			detachedNow), []step{unclear, {publishStep, codes.OK}, {unpublishStep, codes.Unavailable}}},
		{"a disk that another instance has by now", attaching(lostAttach, shown(elsewhere)),
			[]step{unclear, {unpublishStep, codes.Unavailable}}},
		{"a publish that finds it elsewhere gets no final code", attaching(lostAttach, alone,
			shown(elsewhere)), []step{unclear, {publishStep, codes.Unavailable}}},
		{"an attach that looks as if it was done stays open", script{alone, free, lostAttach, held,
			together(), held, detachedNow}, []step{{publishStep, codes.OK}, {unpublishStep,
			codes.Unavailable}}},
		{"a publish that finds it attached ends nothing", attaching(lostAttach, together(), held,
			detachedNow), []step{unclear, {publishStep, codes.OK}, {unpublishStep, codes.Unavailable}}},
		{"a second attach leaves the first one open", attaching(lostAttach, alone, free, attachedNow,
			together(), held, detachedNow), []step{unclear, {publishStep, codes.OK}, {unpublishStep,
			codes.Unavailable}}},
		{"a disk that is gone ends nothing", attaching(lostAttach, noDisk, ownProject, ownUser,
			noDisk), []step{unclear, {unpublishStep, codes.Unavailable}}},
		{"an attach that the rack refuses is not open", script{alone, free, forbidden, free},
			[]step{{publishStep, codes.PermissionDenied}, {unpublishStep, codes.OK}}},
		// The disk is being detached by an earlier call; the attach gets no answer and may come later.
		{"attach lost while the disk is detaching", script{besideIn("detaching"), detaching,
			unavailable, detaching, free}, []step{{publishStep, codes.Aborted}, {unpublishStep,
			codes.Unavailable}}},
		{"attach lost while the disk is detaching, seen at unpublish", script{besideIn("detaching"),
			detaching, lostAttach, detaching, detaching, racktest.Refused.To(detach), detaching, free},
			[]step{{publishStep, codes.Aborted}, {unpublishStep, codes.Aborted}, {unpublishStep,
				codes.Unavailable}}},
		// The first attach is answered and goes on; the second one is lost.
		{"second attach lost while the first is attaching", script{besideIn("attaching"),
			shown("attaching " + racktest.Instance), lostAttach, held, together(), held, detachedNow},
			[]step{{publishStep, codes.OK}, {unpublishStep, codes.Unavailable}}},

		{"a detach that was lost makes a publish wait", script{held, lostDetach},
			[]step{{unpublishStep, codes.Unavailable}, {publishStep, codes.Unavailable}}},
		{"a disk that somebody else detached ends nothing", script{held, lostDetach, free},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.Unavailable}}},
		{"a detach that a proxy answered with 499", script{held, proxied(detach, 499), free},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.Unavailable}}},
		{"a detach that a proxy answered with 403", script{held, proxied(detach, 403), free},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.Unavailable}}},
		{"a detach with another disk in its answer", script{held, accepted(detach,
			racktest.DiskOf("detached", racktest.With("id", racktest.Image))), free},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.Unavailable}}},
		{"a detach with the attached disk in its answer", script{held, accepted(detach,
			racktest.DiskOf(racktest.AttachedHere)), free}, []step{{unpublishStep, codes.Unavailable},
			{unpublishStep, codes.OK}, {publishStep, codes.Unavailable}}},
		{"a second detach leaves the first one open", script{held, lostDetach, held, detachedNow},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK},
				{publishStep, codes.Unavailable}}},
		{"second detach lost while the first is detaching", script{detaching, lostDetach, free},
			[]step{{unpublishStep, codes.Unavailable}, {unpublishStep, codes.OK}, {publishStep,
				codes.Unavailable}}},
	} {
		t.Run(s.name, func(t *testing.T) { take(t, s.lines, s.steps) })
	}
}

func TestCV18NoCreateAndNoDeleteIsOKWhileAnOpenChangeMayUndoIt(t *testing.T) {
	found := racktest.OK(viewName, racktest.DiskOf("detached"))
	snapshot := racktest.OK(viewSnap, racktest.SnapshotOf("ready"))
	foundSnapshot := racktest.OK(viewSnapName, racktest.SnapshotOf("ready"))
	lostCreate := racktest.Exchange{Want: postDisk, Cut: true}
	lostDelete := racktest.Exchange{Want: racktest.DeleteDisk, Cut: true}
	madeLater := []step{{createStep, codes.Unavailable}, {createStep, codes.OK}, {deleteStep,
		codes.Unavailable}}
	for _, s := range []struct {
		name  string
		lines script
		steps []step
	}{
		{"a create that finds the disk of an open delete", script{free, lostDelete,
			taken.To(postDisk), found}, []step{{deleteStep, codes.Unavailable}, {createStep,
			codes.Unavailable}}},
		{"a create that finds the snapshot of an open delete", script{snapshot, {Want: deleteSnap,
			Cut: true}, free, taken.To(postSnap), foundSnapshot}, []step{{deleteSnapshotStep,
			codes.Unavailable}, {snapshotStep, codes.Unavailable}}},
		{"a delete of a disk that an open create may make again", script{lostCreate, noName,
			created(postDisk, racktest.DiskOf("creating")), free}, madeLater},
		{"a delete of such a disk that is gone by then", script{lostCreate, noName,
			created(postDisk, racktest.DiskOf("creating")), noDisk}, madeLater},
		{"a delete of a snapshot that an open create may take again", script{free, {Want: postSnap,
			Cut: true}, noSnapName, free, created(postSnap, racktest.SnapshotOf("ready")), snapshot},
			[]step{{snapshotStep, codes.Unavailable}, {snapshotStep, codes.OK}, {deleteSnapshotStep,
				codes.Unavailable}}},
		{"a refusal for the quota beside an open create", script{lostCreate, noName,
			full.To(postDisk), noName}, []step{{createStep, codes.Unavailable}, {createStep,
			codes.Unavailable}}},
		{"a refusal for the quota beside an open snapshot", script{free, {Want: postSnap, Cut: true},
			noSnapName, free, full.To(postSnap), noSnapName}, []step{{snapshotStep, codes.Unavailable},
			{snapshotStep, codes.Unavailable}}},
		{"a disk in use beside its open delete", script{free, lostDelete, held}, []step{{deleteStep,
			codes.Unavailable}, {deleteStep, codes.Unavailable}}},
	} {
		t.Run(s.name, func(t *testing.T) { take(t, s.lines, s.steps) })
	}
}

func TestACallThatHasTheTimeWaitsForAnOpenChangeAndLooksAgain(t *testing.T) { // CU-4
	for _, test := range []struct {
		name        string
		first, then proto.Message
		lines       script
	}{
		{"an attach that never comes", publishStep, unpublishStep, script{alone, free, lostAttach,
			free, free, free}},
		{"an attach that comes", publishStep, unpublishStep, script{alone, free, lostAttach, free,
			free, held, detachedNow}},
		{"a create whose disk is deleted", createStep, deleteStep, script{{Want: postDisk, Cut: true},
			noName, free, free, {Want: racktest.DeleteDisk, Status: 204}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, test.lines...)
			c.LateLimit = time.Second
			err := csitest.Call(t.Context(), c, test.first)
			csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
			must(t, csitest.Call(t.Context(), c, test.then))
		})
	}
}

func TestCV18ACreateBesideADeleteOfTheNameIsRefused(t *testing.T) {
	var c *Service
	var got error
	during := func(call proto.Message) func(*testing.T, []byte) {
		return func(t *testing.T, _ []byte) {
			// The script answers nothing meanwhile.
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			got = csitest.Call(ctx, c, call)
		}
	}
	c = rackThat(t, free, racktest.Exchange{Want: racktest.DeleteDisk, Status: 204,
		Check: during(createStep)}, racktest.OK(viewSnap, racktest.SnapshotOf("ready")),
		racktest.Exchange{Want: deleteSnap, Status: 204, Check: during(snapshotStep)})
	must(t, csitest.Call(t.Context(), c, deleteStep))
	csitest.Want(t, got, codes.Aborted, csierr.OperationPending)
	must(t, csitest.Call(t.Context(), c, deleteSnapshotStep))
	csitest.Want(t, got, codes.Aborted, csierr.OperationPending)
}

func TestNoChangeIsSentAfterAnOldLook(t *testing.T) {
	slow := func(look racktest.Exchange) racktest.Exchange {
		look.Hold = 50 * time.Millisecond
		return look
	}
	snapshot := slow(racktest.OK(viewSnap, racktest.SnapshotOf("ready")))
	restoring := creating(createRequest(), func(r *csi.CreateVolumeRequest) {
		r.VolumeContentSource = fromSnapshot(racktest.Snapshot)
	})
	for _, test := range []struct {
		name  string
		call  proto.Message
		lines script
	}{
		{"an attach", publishStep, script{alone, slow(free)}},
		{"a detach", unpublishStep, script{slow(held)}},
		{"a delete of a disk", deleteStep, script{slow(free)}},
		{"a delete of a snapshot", deleteSnapshotStep, script{snapshot}},
		{"a create from a snapshot", restoring, script{snapshot, noName}},
		{"a create of a snapshot", snapshotStep, script{slow(free), noSnapName}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := rackThat(t, test.lines...)
			c.Rack.LookLimit = 20 * time.Millisecond
			csitest.Want(t, csitest.Call(t.Context(), c, test.call), codes.Aborted, csierr.LookTooOld)
		})
	}
}
