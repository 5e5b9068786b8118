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

func TestCreateSnapshotTakesASnapshotOrReturnsTheReason(t *testing.T) {
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
			}}}, ok},
		{"a volume that is deleted between read and request (CS-4)", script{missing(postSnap),
			noSnapName, ownProject, ownUser, noDisk}, fails(csierr.VolumeNotFound, racktest.Disk)},
		{"a project that cannot be seen (OX-6)", script{missing(postSnap), noSnapName,
			noProject}, unseen},
		{"a second call (CS-5)", script{taken.To(postSnap), snapNamed("ready")}, ok},
		{"a second call, with a full quota (CS-5)", script{full.To(postSnap), snapNamed("ready")}, ok},
		{"a second call, the volume deleted (CS-5)", script{missing(postSnap), snapNamed("ready")}, ok},
		{"another's name (CS-6)", script{taken.To(postSnap), snapNamed("ready", with("disk_id",
			racktest.Image))}, fails(csierr.SnapshotExists, racktest.Image)},
		{"a snapshot made by hand has the name (CS-6)", script{taken.To(postSnap), snapNamed(
			"ready", with("description", "mine"))}, fails(csierr.SnapshotExists, racktest.Snapshot)},
		{"the rack destroys the snapshot with the name", script{taken.To(postSnap),
			snapNamed("destroyed")}, fails(csierr.OperationPending)},
		{"the snapshot with the name is gone", script{taken.To(postSnap), noSnapName},
			fails(csierr.OperationPending)},
		{"the rack takes another, or replaces a part of the disk (CS-7)", script{busy.To(postSnap),
			noSnapName, held}, fails(csierr.DiskBusy, "replaces a part")},
		{"a second call, while the rack replaces a part of the disk (CS-5)", script{busy.To(postSnap),
			snapNamed("ready")}, ok},
		{"the rack still takes it for an earlier call (CS-7)", script{busy.To(postSnap),
			snapNamed("creating")}, fails(csierr.DiskBusy, "still taking")},
		{"a second call, while it is taken (CS-7)", script{taken.To(postSnap), snapNamed("creating")},
			fails(csierr.DiskBusy, "still taking")},
		{"the rack answers before it is taken (CS-7)", script{created(postSnap, snapshotOf(
			"creating"))}, fails(csierr.DiskBusy, "still taking")},
		{"the rack takes another volume's with the name (CS-6)", script{busy.To(postSnap),
			snapNamed("creating", with("disk_id", racktest.Image))}, fails(csierr.SnapshotExists,
			racktest.Image)},
		{"a full quota (CS-8)", script{full.To(postSnap), noSnapName}, fails(csierr.RackFull)},
		{"a failed snapshot, deleted (CS-9)", script{created(postSnap, snapshotOf("faulted")),
			snap("faulted"), deletedSnap}, coded(codes.Internal, csierr.SnapshotFaulted, "deleted again")},
		{"a failed snapshot, not deleted (CS-9)", script{created(postSnap, snapshotOf("faulted")), snap(
			"faulted"), forbidden.To(deleteSnap)}, fails(csierr.EffectUnknown, "Forbidden")},
		{"it seems to fail (CS-9)", script{created(postSnap, snapshotOf("faulted")), snap("ready")},
			fails(csierr.DiskBusy)},
		{"an earlier call failed to take it (CS-9)", script{taken.To(postSnap), snapNamed("faulted")},
			coded(codes.Aborted, csierr.SnapshotFaulted)},
	}.after(free).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"a local disk (CS-10)", script{shown("detached", with("disk_type", "local"))},
			fails(csierr.SnapshotImpossible, "local")},
		{"a read-only disk (CS-10)", script{shown("detached", with("read_only", true))},
			fails(csierr.SnapshotImpossible, "read-only")},
		{"a faulted disk (CS-10)", script{shown("faulted")}, fails(csierr.DiskFaulted)},
		{"a disk in creation (CS-10)", script{shown("creating")}, fails(csierr.DiskBusy)},
	}.after(free, noTaking, noSnapName).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"an earlier call took it, and this one is forbidden (CS-5)", script{snapNamed("ready")},
			ok},
	}.after(free, forbidden.To(postSnap)).try(t, snapshotRequest(), answer)
	scriptedCalls{
		{"a volume that is gone (CS-4)", script{noDisk, noSnapName, ownProject, ownUser, noDisk},
			fails(csierr.VolumeNotFound, racktest.Disk)},
		{"a volume that is only gone at first (CS-4)", script{noDisk, noSnapName, ownProject, ownUser,
			free}, fails(csierr.OperationPending)},
		{"a volume that is gone, in a project that cannot be seen (OX-6)", script{noDisk, noSnapName,
			noProject}, unseen},
		{"a disk whose import is not finalized (CS-10)", script{shown("import_ready")},
			fails(csierr.DiskImporting, "finalize")},
		{"a second call, the volume deleted before (CS-5)", script{noDisk, snapNamed("ready")}, ok},
	}.try(t, snapshotRequest(), answer)
}

func TestCreateSnapshotRecordsTheFilesystemUUID(t *testing.T) {
	diskWith := func(edit func(*volume.Tag)) string {
		tag := racktest.OwnTag
		edit(&tag)
		return diskOf("detached", tagged(tag))
	}
	for _, test := range []struct{ name, disk, want string }{
		{"a blank disk's filesystem has the disk's id", diskOf("detached"), racktest.Disk},
		{"a restored disk's filesystem has its origin's UUID", diskWith(func(tag *volume.Tag) {
			tag.Origin, tag.FilesystemUUID = volume.OriginSnapshot, racktest.Image
		}), racktest.Image},
		{"a raw volume has no filesystem", diskWith(func(tag *volume.Tag) {
			tag.Use = volume.UseBlock
		}), ""},
		{"nor has a volume for both", diskWith(func(tag *volume.Tag) { tag.Use = volume.UseBoth }), ""},
		{"nor has a disk made by hand", diskOf("detached", with("description", "mine")), ""},
		{"nor has another cluster's disk", diskWith(func(tag *volume.Tag) { tag.Cluster = "red" }), ""},
		{"nor has a disk whose tag was copied", diskOf("detached", with("name", "somebodys-disk")), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			request := snapshotRequest()
			request.Parameters = map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "nightly",
				"csi.storage.k8s.io/volumesnapshot/namespace": "shop"}
			want := volume.Tag{Name: "snap-1", Cluster: "blue", FilesystemUUID: test.want,
				BlockSize: 4096, Claim: "shop/nightly"}
			must(t, scripted(t, request, reply(viewDisk, test.disk), exchange{
				Want: postSnap, Status: 201, Body: snapshotOf("ready"), Check: tags(want)}))
		})
	}
}

func TestCreateSnapshotReadsTheNameAfterALostAnswer(t *testing.T) { // OX-8
	scriptedCalls{
		{"it is there", script{snapNamed("ready")}, ok},
		{"it is being taken (CS-7)", script{snapNamed("creating")}, fails(csierr.DiskBusy)},
		{"another has the name", script{snapNamed("ready", with("disk_id", racktest.Image))},
			fails(csierr.EffectUnknown)},
		{"it is faulted", script{snapNamed("faulted")}, coded(codes.Aborted, csierr.SnapshotFaulted)},
		{"it cannot be read", script{forbidden.To(viewSnapName)}, fails(csierr.EffectUnknown)},
		{"no snapshot has the name", script{noSnapName}, fails(csierr.RackUnavailable)},
	}.after(held, lostSnap).try(t, snapshotRequest(), nil)
}

func wantedSnapshot(ready bool) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: racktest.Snapshot, SourceVolumeId: racktest.Disk,
		SizeBytes: 10 * volume.GiB, ReadyToUse: ready,
		CreationTime: timestamppb.New(time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC))}
}

func TestDeleteSnapshotDeletesOnlyOwnSnapshots(t *testing.T) {
	seen := snap("ready")
	scriptedCalls{
		{"a snapshot that is gone (DS-2)", script{noSnap, ownProject, ownUser, noSnap}, ok},
		{"a snapshot that cannot be seen (OX-6)", script{noSnap, noProject}, unseen},
		{"one taken by hand (D-69)", script{snap("ready", with("description", "before the upgrade"))},
			fails(csierr.DiskNotOurs, "Retain")},
		{"a snapshot in the making (DS-5)", script{snap("creating"), refusing(deleteSnap),
			snap("creating")}, coded(codes.Aborted, csierr.SnapshotNotReady)},
	}.try(t, deleteSnapshotStep, nil)
	scriptedCalls{
		{"is a read and one request", script{deletedSnap}, ok},
		{"a snapshot deleted between read and request (DS-2)", script{missing(deleteSnap),
			noSnap, ownProject, ownUser, noSnap}, ok},
		{"a snapshot that exists although the rack does not find it (OX-6)", script{missing(
			deleteSnap), seen}, fails(csierr.RackResponseInvalid)},
		{"a snapshot that the rack keeps (DS-4)", script{racktest.Error(409, "Conflict",
			"in use").To(deleteSnap), seen}, fails(csierr.Conflict, "in use")},
	}.after(seen).try(t, deleteSnapshotStep, nil)
}

func TestListSnapshotsOmitsUnfinishedSnapshots(t *testing.T) {
	numberedSnap := func(n int, state string, edits ...edit) string {
		return snapshotOf(state, append(edits, with("id", numbered(n)))...)
	}
	viewSeventh := "GET /v1/snapshots/" + numbered(7)
	for _, test := range []struct {
		name  string
		req   *csi.ListSnapshotsRequest
		lines script
		want  string
	}{
		{"all of the project, except those still being taken (LS-5)", &csi.ListSnapshotsRequest{},
			script{reply(listSnaps, pageOf("", numberedSnap(1, "ready", with("description", "mine")),
				numberedSnap(2, "creating"), numberedSnap(3, "faulted"), numberedSnap(4, "destroyed")))},
			"[1:true 3:false]"},
		{"one volume's", &csi.ListSnapshotsRequest{SourceVolumeId: racktest.Disk},
			script{reply(listSnaps, pageOf("", numberedSnap(1, "ready"), numberedSnap(2,
				"ready", with("disk_id", racktest.Image))))}, "[1:true]"},
		{"one", &csi.ListSnapshotsRequest{SnapshotId: numbered(7)},
			script{reply(viewSeventh, numberedSnap(7, "ready"))}, "[7:true]"},
		{"one of another volume", &csi.ListSnapshotsRequest{SnapshotId: numbered(7),
			SourceVolumeId: racktest.Image}, script{reply(viewSeventh, numberedSnap(7, "ready"))}, "[]"},
		{"an unknown one (LS-3)", &csi.ListSnapshotsRequest{SnapshotId: racktest.Snapshot},
			script{noSnap}, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer := csitest.Got(rackThat(t, test.lines...).ListSnapshots(t.Context(), test.req))(t)
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

func TestListSnapshotsFailsForASnapshotWithoutATime(t *testing.T) {
	fails(csierr.RackResponseInvalid)(t, scripted(t, &csi.ListSnapshotsRequest{},
		reply(listSnaps, pageOf("", snapshotOf("ready", with("time_created", nil))))))
}

func TestGetSnapshotReturnsUnfinishedSnapshots(t *testing.T) { // LS-7
	scriptedCalls{
		{"one that is being taken", script{snap("creating")}, ok},
		{"an unknown one", script{noSnap}, fails(csierr.SnapshotNotFound)},
	}.try(t, &csi.GetSnapshotRequest{SnapshotId: racktest.Snapshot},
		&csi.GetSnapshotResponse{Snapshot: wantedSnapshot(false)})
}
