package controller

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const (
	postSnap   = "POST /v1/snapshots"
	deleteSnap = "DELETE /v1/snapshots/" + racktest.Snapshot
	listSnaps  = "GET /v1/snapshots"
)

var viewSnapName = "GET /v1/snapshots/" + volume.SnapshotName("blue", "snap-1")

func TestTakingSnapshots(t *testing.T) {
	answer := &csi.CreateSnapshotResponse{Snapshot: wantedSnapshot(true)}
	busy := racktest.Error(409, "Conflict", "volume repair lock")
	scriptedCalls{
		{"is a read and one request", script{{Want: postSnap, Status: 201,
			Body:  snapshotOf("ready"),
			Query: "project=" + racktest.ProjectID, Check: func(t *testing.T, body []byte) {
				var got map[string]any
				_ = json.Unmarshal(body, &got)
				if got["disk"] != racktest.Disk || got["name"] != volume.SnapshotName("blue", "snap-1") {
					t.Errorf("the body is %s", body)
				}
			}}}, codes.OK, "", ""},
		{"CS-4 of a volume that is deleted between read and request",
			script{racktest.NotFound.To(postSnap), noSnapName, ownProject, ownUser, noDisk}, codes.NotFound,
			csierr.VolumeNotFound, racktest.Disk},
		{"OX-6 in a project that cannot be seen", script{racktest.NotFound.To(postSnap), noSnapName,
			noProject}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CS-5 twice", script{taken.To(postSnap), snapNamed("ready")}, codes.OK, "", ""},
		{"CS-5 twice, with a full quota", script{full.To(postSnap), snapNamed("ready")}, codes.OK, "",
			""},
		{"CS-5 twice, the volume deleted between", script{racktest.NotFound.To(postSnap),
			snapNamed("ready")}, codes.OK, "", ""},
		{"CS-6 of another volume", script{taken.To(postSnap), snapNamed("ready", with("disk_id",
			racktest.Image))}, codes.AlreadyExists, csierr.SnapshotExists, racktest.Image},
		{"CS-6 over one made by hand", script{taken.To(postSnap), snapNamed("ready", with("description",
			"mine"))}, codes.AlreadyExists, csierr.SnapshotExists, racktest.Snapshot},
		{"of a name whose snapshot is being destroyed", script{taken.To(postSnap),
			snapNamed("destroyed")}, codes.Aborted, csierr.OperationPending, ""},
		{"of a name that has gone", script{taken.To(postSnap), noSnapName}, codes.Aborted,
			csierr.OperationPending, ""},
		{"CS-7 while another is taken, or a part of the disk is replaced", script{busy.To(postSnap),
			noSnapName, held}, codes.Aborted, csierr.DiskBusy, "replaces a part"},
		{"CS-5 twice, while a part of the disk is replaced", script{busy.To(postSnap),
			snapNamed("ready")}, codes.OK, "", ""},
		{"CS-7 while an earlier call with the name takes it", script{busy.To(postSnap),
			snapNamed("creating")}, codes.Aborted, csierr.DiskBusy, "still taking"},
		{"CS-7 twice, while the first call takes it", script{taken.To(postSnap), snapNamed("creating")},
			codes.Aborted, csierr.DiskBusy, "still taking"},
		{"CS-7 that is answered before it is taken", script{created(postSnap, snapshotOf("creating"))},
			codes.Aborted, csierr.DiskBusy, "still taking"},
		{"CS-6 of another volume, while that one is taken", script{busy.To(postSnap),
			snapNamed("creating", with("disk_id", racktest.Image))}, codes.AlreadyExists,
			csierr.SnapshotExists, racktest.Image},
		{"CS-8 without capacity", script{full.To(postSnap), noSnapName}, codes.ResourceExhausted,
			csierr.RackFull, ""},
		{"CS-9 that fails, and is deleted", script{created(postSnap, snapshotOf("faulted")),
			snap("faulted"), deletedSnap}, codes.Internal, csierr.SnapshotFaulted, "deleted again"},
		{"CS-9 that fails, and is not deleted", script{created(postSnap, snapshotOf("faulted")), snap(
			"faulted"), forbidden.To(deleteSnap)}, codes.Unavailable, csierr.EffectUnknown, "Forbidden"},
		{"CS-9 that only seems to fail", script{created(postSnap, snapshotOf("faulted")), snap("ready")},
			codes.Aborted, csierr.DiskBusy, ""},
		{"CS-9 that an earlier call failed to take", script{taken.To(postSnap), snapNamed("faulted")},
			codes.Aborted, csierr.SnapshotFaulted, ""},
	}.after(free).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"CS-10 of a local disk", script{shown("detached", with("disk_type", "local"))},
			codes.FailedPrecondition, csierr.SnapshotImpossible, "local"},
		{"CS-10 of a read-only disk", script{shown("detached", with("read_only", true))},
			codes.FailedPrecondition, csierr.SnapshotImpossible, "read-only"},
		{"CS-10 of a faulted disk", script{shown("faulted")}, codes.FailedPrecondition,
			csierr.DiskFaulted, ""},
		{"CS-10 of a disk being created", script{shown("creating")}, codes.Aborted, csierr.DiskBusy, ""},
	}.after(free, noTaking, noSnapName).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"CS-5 that an earlier request has taken, and this one may not", script{snapNamed("ready")},
			codes.OK, "", ""},
	}.after(free, forbidden.To(postSnap)).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"CS-4 of a volume that is gone", script{noDisk, noSnapName, ownProject, ownUser, noDisk},
			codes.NotFound, csierr.VolumeNotFound, racktest.Disk},
		{"CS-4 of a volume that is only gone at first", script{noDisk, noSnapName, ownProject, ownUser,
			free}, codes.Aborted, csierr.OperationPending, ""},
		{"OX-6 of a volume that is gone, in a project that cannot be seen", script{noDisk, noSnapName,
			noProject}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CS-10 of a disk whose import is not finalized", script{shown("import_ready")},
			codes.FailedPrecondition, csierr.DiskImporting, "finalize"},
		{"CS-5 twice, the volume deleted before", script{noDisk, snapNamed("ready")}, codes.OK, "", ""},
	}.try(t, snapshotRequest(), answer)
}

func TestASnapshotRecordsTheUUIDOfItsFilesystem(t *testing.T) {
	diskWith := func(edit func(*volume.Tag)) string {
		tag := racktest.OwnTag
		edit(&tag)
		return diskOf("detached", tagged(tag))
	}
	for _, test := range []struct{ name, disk, want string }{
		{"a blank disk's is its own id", diskOf("detached"), racktest.Disk},
		{"a restored disk's is its origin's", diskWith(func(tag *volume.Tag) {
			tag.Origin, tag.FilesystemUUID = volume.OriginSnapshot, racktest.Image
		}), racktest.Image},
		{"a raw volume has none", diskWith(func(tag *volume.Tag) { tag.Use = volume.UseBlock }), ""},
		{"nor one for both", diskWith(func(tag *volume.Tag) { tag.Use = volume.UseBoth }), ""},
		{"nor a disk made by hand", diskOf("detached", with("description", "mine")), ""},
		{"nor one of another cluster", diskWith(func(tag *volume.Tag) { tag.Cluster = "red" }), ""},
		{"nor one whose tag was copied", diskOf("detached", with("name", "somebodys-disk")), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			request := snapshotRequest()
			request.Parameters = map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "nightly",
				"csi.storage.k8s.io/volumesnapshot/namespace": "shop"}
			want := volume.Tag{Name: "snap-1", Cluster: "blue", FilesystemUUID: test.want,
				BlockSize: 4096, Claim: "shop/nightly"}
			_, err := rackThat(t, racktest.OK(racktest.ViewDisk, test.disk),
				racktest.Exchange{Want: postSnap, Status: 201, Body: snapshotOf("ready"),
					Check: tags(want)}).CreateSnapshot(t.Context(), request)
			must(t, err)
		})
	}
}

func TestAnUnclearSnapshotCreateIsResolvedByTheName(t *testing.T) { // OX-8
	scriptedCalls{
		{"it is there", script{snapNamed("ready")}, codes.OK, "", ""},
		{"CS-7 it is being taken", script{snapNamed("creating")}, codes.Aborted, csierr.DiskBusy, ""},
		{"another has the name", script{snapNamed("ready", with("disk_id", racktest.Image))},
			codes.Unavailable, csierr.EffectUnknown, ""},
		{"it is faulted", script{snapNamed("faulted")}, codes.Aborted, csierr.SnapshotFaulted, ""},
		{"it cannot be read", script{forbidden.To(viewSnapName)}, codes.Unavailable,
			csierr.EffectUnknown, ""},
		{"no snapshot has the name", script{noSnapName}, codes.Unavailable, csierr.RackUnavailable, ""},
	}.after(held, lostSnap).try(t, snapshotRequest(), nil)
}

func wantedSnapshot(ready bool) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: racktest.Snapshot, SourceVolumeId: racktest.Disk,
		SizeBytes: 10 * volume.GiB, ReadyToUse: ready,
		CreationTime: timestamppb.New(time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC))}
}

func TestDeletingSnapshots(t *testing.T) {
	seen := snap("ready")
	scriptedCalls{
		{"DS-2 of one that is gone", script{noSnap, ownProject, ownUser, noSnap}, codes.OK, "", ""},
		{"OX-6 of one that cannot be seen", script{noSnap, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"D-69 of one taken by hand", script{snap("ready", with("description", "before the upgrade"))},
			codes.FailedPrecondition, csierr.DiskNotOurs, "Retain"},
		{"DS-5 of one in the making", script{snap("creating"), racktest.Refused.To(deleteSnap),
			snap("creating")}, codes.Aborted, csierr.SnapshotNotReady, ""},
	}.try(t, deleteSnapshotStep, nil)
	scriptedCalls{
		{"is a read and one request", script{deletedSnap}, codes.OK, "", ""},
		{"DS-2 of one that is deleted between read and request", script{racktest.NotFound.To(deleteSnap),
			noSnap, ownProject, ownUser, noSnap}, codes.OK, "", ""},
		{"OX-6 of one that exists although the rack does not find it", script{racktest.NotFound.To(
			deleteSnap), seen}, codes.Unavailable, csierr.RackResponseInvalid, ""},
		{"DS-4 of one that the rack keeps", script{racktest.Error(409, "Conflict",
			"in use").To(deleteSnap), seen}, codes.FailedPrecondition, csierr.Conflict, "in use"},
	}.after(seen).try(t, deleteSnapshotStep, nil)
}

func TestListingSnapshots(t *testing.T) {
	numberedSnap := func(n int, state string, edits ...edit) string {
		return snapshotOf(state, append(edits, with("id", racktest.Numbered(n)))...)
	}
	viewSeventh := "GET /v1/snapshots/" + racktest.Numbered(7)
	for _, test := range []struct {
		name  string
		req   *csi.ListSnapshotsRequest
		lines script
		want  string
	}{
		{"LS-5 all of the project, except those still being taken", &csi.ListSnapshotsRequest{},
			script{racktest.OK(listSnaps, pageOf("", numberedSnap(1, "ready", with("description", "mine")),
				numberedSnap(2, "creating"), numberedSnap(3, "faulted"), numberedSnap(4, "destroyed")))},
			"[1:true 3:false]"},
		{"of one volume", &csi.ListSnapshotsRequest{SourceVolumeId: racktest.Disk},
			script{racktest.OK(listSnaps, pageOf("", numberedSnap(1, "ready"), numberedSnap(2,
				"ready", with("disk_id", racktest.Image))))}, "[1:true]"},
		{"one", &csi.ListSnapshotsRequest{SnapshotId: racktest.Numbered(7)},
			script{racktest.OK(viewSeventh, numberedSnap(7, "ready"))}, "[7:true]"},
		{"one of another volume", &csi.ListSnapshotsRequest{SnapshotId: racktest.Numbered(7),
			SourceVolumeId: racktest.Image}, script{racktest.OK(viewSeventh, numberedSnap(7, "ready"))},
			"[]"},
		{"LS-3 an unknown one", &csi.ListSnapshotsRequest{SnapshotId: racktest.Snapshot},
			script{noSnap}, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer, err := rackThat(t, test.lines...).ListSnapshots(t.Context(), test.req)
			must(t, err)
			got := []string{}
			for _, e := range answer.GetEntries() {
				n := 0
				_, _ = fmt.Sscanf(e.GetSnapshot().GetSnapshotId(), "%x-", &n)
				got = append(got, fmt.Sprintf("%d:%v", n, e.GetSnapshot().GetReadyToUse()))
			}
			if fmt.Sprint(got) != test.want {
				t.Errorf("got %v, want %s", got, test.want)
			}
		})
	}
}

func TestASnapshotWithoutATimeIsNotListed(t *testing.T) {
	_, err := rackThat(t, racktest.OK(listSnaps, pageOf("", snapshotOf("ready",
		with("time_created", nil))))).ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	csitest.Want(t, err, codes.Unavailable, csierr.RackResponseInvalid)
}

func TestGetSnapshot(t *testing.T) { // LS-7
	answer, err := rackThat(t, snap("creating")).GetSnapshot(t.Context(),
		&csi.GetSnapshotRequest{SnapshotId: racktest.Snapshot})
	must(t, err)
	csitest.SameMessage(t, answer.GetSnapshot(), wantedSnapshot(false))
	csitest.Want(t, csitest.Call(t.Context(), rackThat(t, noSnap),
		&csi.GetSnapshotRequest{SnapshotId: racktest.Snapshot}), codes.NotFound, csierr.SnapshotNotFound)
}
