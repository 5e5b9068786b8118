package controller

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
	busy := racktest.Error(409, "Conflict", "volume repair lock")
	for _, s := range []scriptedCall{
		{"is a read and one request", script{{Want: postSnap, Status: 201,
			Body:  racktest.SnapshotOf("ready"),
			Query: "project=" + racktest.ProjectID, Check: func(t *testing.T, body []byte) {
				var got map[string]any
				_ = json.Unmarshal(body, &got)
				if got["disk"] != racktest.Disk || got["name"] != volume.SnapshotName("blue", "snap-1") {
					t.Errorf("the body is %s", body)
				}
			}}}, codes.OK, "", ""},
		{"CS-4 of a volume that is deleted between read and request",
			script{racktest.NotFound.To(postSnap), noSnapName, ownProject, ownUser, noDisk},
			codes.NotFound, csierr.VolumeNotFound, racktest.Disk},
		{"OX-6 in a project that cannot be seen", script{racktest.NotFound.To(postSnap),
			noSnapName, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"CS-5 twice", script{taken.To(postSnap), racktest.OK(viewSnapName,
			racktest.SnapshotOf("ready"))}, codes.OK, "", ""},
		{"CS-5 twice, with a full quota", script{full.To(postSnap), racktest.OK(viewSnapName,
			racktest.SnapshotOf("ready"))}, codes.OK, "", ""},
		{"CS-5 twice, the volume deleted between", script{racktest.NotFound.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("ready"))}, codes.OK, "", ""},
		{"CS-6 of another volume", script{taken.To(postSnap), racktest.OK(viewSnapName,
			racktest.SnapshotOf("ready", racktest.With("disk_id", racktest.Image)))},
			codes.AlreadyExists, csierr.SnapshotExists, racktest.Image},
		{"CS-6 over one made by hand", script{taken.To(postSnap), racktest.OK(viewSnapName,
			racktest.SnapshotOf("ready", racktest.With("description", "mine")))}, codes.AlreadyExists,
			csierr.SnapshotExists, racktest.Snapshot},
		{"of a name whose snapshot is being destroyed", script{taken.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("destroyed"))}, codes.Aborted,
			csierr.OperationPending, ""},
		{"of a name that has gone", script{taken.To(postSnap), noSnapName},
			codes.Aborted, csierr.OperationPending, ""},
		{"CS-7 while another is taken, or a part of the disk is replaced", script{busy.To(postSnap),
			noSnapName, held}, codes.Aborted, csierr.DiskBusy, "replaces a part"},
		{"CS-5 twice, while a part of the disk is replaced", script{busy.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("ready"))}, codes.OK, "", ""},
		{"CS-7 while an earlier call with the name takes it", script{busy.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("creating"))}, codes.Aborted, csierr.DiskBusy,
			"still taking"},
		{"CS-7 twice, while the first call takes it", script{taken.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("creating"))}, codes.Aborted, csierr.DiskBusy,
			"still taking"},
		{"CS-7 that is answered before it is taken", script{created(postSnap,
			racktest.SnapshotOf("creating"))}, codes.Aborted, csierr.DiskBusy, "still taking"},
		{"CS-6 of another volume, while that one is taken", script{busy.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("creating",
				racktest.With("disk_id", racktest.Image)))}, codes.AlreadyExists, csierr.SnapshotExists,
			racktest.Image},
		{"CS-8 without capacity", script{full.To(postSnap), noSnapName},
			codes.ResourceExhausted, csierr.RackFull, ""},
		{"CS-9 that fails, and is deleted", script{created(postSnap, racktest.SnapshotOf("faulted")),
			racktest.OK(viewSnap, racktest.SnapshotOf("faulted")), {Want: deleteSnap, Status: 204}},
			codes.Internal, csierr.SnapshotFaulted, "deleted again"},
		{"CS-9 that fails, and is not deleted", script{created(postSnap,
			racktest.SnapshotOf("faulted")), racktest.OK(viewSnap, racktest.SnapshotOf("faulted")),
			racktest.Error(403, "Forbidden", "Forbidden").To(deleteSnap)}, codes.Unavailable,
			csierr.EffectUnknown, "Forbidden"},
		{"CS-9 that only seems to fail", script{created(postSnap, racktest.SnapshotOf("faulted")),
			racktest.OK(viewSnap, racktest.SnapshotOf("ready"))}, codes.Aborted, csierr.DiskBusy, ""},
		{"CS-9 that an earlier call failed to take", script{taken.To(postSnap),
			racktest.OK(viewSnapName, racktest.SnapshotOf("faulted"))}, codes.Aborted,
			csierr.SnapshotFaulted, ""},
		{"CS-10 of a local disk", script{racktest.Refused.To(postSnap), shown("detached",
			racktest.With("disk_type", "local"))}, codes.FailedPrecondition, csierr.SnapshotImpossible,
			"local"},
		{"CS-10 of a read-only disk", script{racktest.Refused.To(postSnap), shown("detached",
			racktest.With("read_only", true))}, codes.FailedPrecondition, csierr.SnapshotImpossible,
			"read-only"},
		{"CS-10 of a faulted disk", script{racktest.Refused.To(postSnap), shown("faulted")},
			codes.FailedPrecondition, csierr.DiskFaulted, ""},
		{"CS-10 of a disk being created", script{racktest.Refused.To(postSnap), shown("creating")},
			codes.Aborted, csierr.DiskBusy, ""},
		{"while the rack cannot pause the writers", script{gaveUp["HTTP 503"].To(postSnap),
			noSnapName}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"with another disk's response", script{created(postSnap, racktest.SnapshotOf("ready",
			racktest.With("disk_id", racktest.Image))), noSnapName},
			codes.Unavailable, csierr.RackResponseInvalid, racktest.Image},
		{"with another disk's response after the effect", script{created(postSnap,
			racktest.SnapshotOf("ready", racktest.With("disk_id", racktest.Image))),
			racktest.OK(viewSnapName, racktest.SnapshotOf("ready"))}, codes.OK, "", ""},
		{"with a response without a name", script{created(postSnap, racktest.SnapshotOf("ready",
			racktest.With("name", ""))), noSnapName}, codes.Unavailable, csierr.RackResponseInvalid, ""},
		{"with a response without a time", script{created(postSnap, racktest.SnapshotOf("ready",
			racktest.With("time_created", nil))), noSnapName}, codes.Unavailable,
			csierr.RackResponseInvalid, ""},
		{"with a response without a size", script{created(postSnap, racktest.SnapshotOf("ready",
			racktest.With("size", 0))), noSnapName}, codes.Unavailable, csierr.RackResponseInvalid, ""},
		{"without a response", script{{Want: postSnap, Cut: true}, noSnapName}, codes.Unavailable,
			csierr.RackUnavailable, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			lines := append(script{free},
				s.lines...)
			answer, err := rackThat(t, lines...).CreateSnapshot(t.Context(), snapshotRequest())
			s.verify(t, err)
			if err == nil {
				csitest.SameMessage(t, answer.GetSnapshot(), wantedSnapshot(true))
			}
		})
	}
}

func TestTakingASnapshotOfAVolumeThatIsGone(t *testing.T) {
	for _, s := range []scriptedCall{
		{"CS-4 is not found", script{noDisk, noSnapName, ownProject, ownUser, noDisk},
			codes.NotFound, csierr.VolumeNotFound, racktest.Disk},
		{"CS-4 is not found at first", script{noDisk, noSnapName, ownProject, ownUser, free},
			codes.Aborted, csierr.OperationPending, ""},
		{"CS-10 is not possible in another project", script{shown("detached",
			racktest.With("project_id", racktest.Disk))}, codes.InvalidArgument, csierr.OtherProject, ""},
		{"OX-6 is something else in a project that cannot be seen", script{noDisk,
			noSnapName, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"CS-10 is not possible before its import is finalized", script{shown("import_ready")},
			codes.FailedPrecondition, csierr.DiskImporting, "finalize"},
		{"CS-5 finds the snapshot that was taken of it", script{noDisk, racktest.OK(viewSnapName,
			racktest.SnapshotOf("ready"))}, codes.OK, "", ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).CreateSnapshot(t.Context(), snapshotRequest())
			s.verify(t, err)
		})
	}
}

func TestASnapshotRecordsTheUUIDOfItsFilesystem(t *testing.T) {
	inherited := volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginSnapshot,
		Use:            volume.UseFilesystem,
		FilesystemUUID: racktest.Image}
	forAccess := func(use string) volume.Tag {
		return volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginBlank, Use: use}
	}
	for _, test := range []struct{ name, disk, want string }{
		{"a blank disk's is its own id", racktest.DiskOf("detached"), racktest.Disk},
		{"a restored disk's is its origin's", racktest.DiskOf("detached", racktest.With("description",
			inherited.Description())), racktest.Image},
		{"a raw volume has none", racktest.DiskOf("detached", racktest.With("description",
			forAccess(volume.UseBlock).Description())), ""},
		{"nor one for both", racktest.DiskOf("detached", racktest.With("description",
			forAccess(volume.UseBoth).Description())), ""},
		{"nor a disk made by hand", racktest.DiskOf("detached", racktest.With("description", "mine")),
			""},
		{"nor one of another cluster", racktest.DiskOf("detached", racktest.With("description",
			volume.Tag{Name: "pvc-1", Cluster: "red", Origin: volume.OriginBlank,
				Use: volume.UseFilesystem}.Description())), ""},
		{"nor one whose tag was copied", racktest.DiskOf("detached", racktest.With("name",
			"somebodys-disk")), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			request := snapshotRequest()
			request.Parameters = map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "nightly",
				"csi.storage.k8s.io/volumesnapshot/namespace": "shop"}
			_, err := rackThat(t, racktest.OK(racktest.ViewDisk, test.disk),
				racktest.Exchange{Want: postSnap,
					Status: 201,
					Body:   racktest.SnapshotOf("ready"), Check: func(t *testing.T, body []byte) {
						var got struct{ Description string }
						_ = json.Unmarshal(body, &got)
						want := volume.Tag{Name: "snap-1", Cluster: "blue", FilesystemUUID: test.want,
							BlockSize: 4096, Claim: "shop/nightly"}
						if m, _ := volume.ParseTag(got.Description); m != want {
							t.Errorf("the tag is %+v, want %+v", m, want)
						}
					}}).CreateSnapshot(t.Context(), request)
			if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestOX8AnUnclearSnapshotCreateIsResolvedByTheName(t *testing.T) {
	for name, answer := range gaveUp {
		for _, test := range []struct {
			name   string
			found  racktest.Exchange
			code   codes.Code
			reason csierr.Reason
		}{
			{"it is there", racktest.OK(viewSnapName, racktest.SnapshotOf("ready")), codes.OK, ""},
			{"CS-7 it is being taken", racktest.OK(viewSnapName, racktest.SnapshotOf("creating")),
				codes.Aborted, csierr.DiskBusy},
			{"another has the name", racktest.OK(viewSnapName, racktest.SnapshotOf("ready",
				racktest.With("disk_id", racktest.Image))), codes.Unavailable, csierr.EffectUnknown},
			{"it is faulted", racktest.OK(viewSnapName, racktest.SnapshotOf("faulted")), codes.Aborted,
				csierr.SnapshotFaulted},
			{"it cannot be read", racktest.Error(403, "Forbidden", "Forbidden").To(viewSnapName),
				codes.Unavailable, csierr.EffectUnknown},
		} {
			t.Run(name+", "+test.name, func(t *testing.T) {
				_, err := rackThat(t, held,
					answer.To(postSnap),
					test.found).CreateSnapshot(t.Context(), snapshotRequest())
				scriptedCall{code: test.code, reason: test.reason}.verify(t, err)
			})
		}
		t.Run(name+", no snapshot has the name", func(t *testing.T) {
			_, err := rackThat(t, held,
				answer.To(postSnap),
				noSnapName).CreateSnapshot(t.Context(), snapshotRequest())
			if got := status.Code(err); got != codes.Unavailable {
				t.Errorf("got %v, want Unavailable: the rack may still take it", err)
			}
		})
	}
}

func wantedSnapshot(ready bool) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: racktest.Snapshot, SourceVolumeId: racktest.Disk,
		SizeBytes:  10 * volume.GiB,
		ReadyToUse: ready, CreationTime: timestamppb.New(
			time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC))}
}

func TestDeletingSnapshots(t *testing.T) {
	seen := racktest.OK(viewSnap, racktest.SnapshotOf("ready"))
	described := func(edit ...func(map[string]any)) script {
		return script{racktest.OK(viewSnap, racktest.SnapshotOf("ready", edit...))}
	}
	for _, s := range []scriptedCall{
		{"is a read and one request", script{seen, {Want: deleteSnap, Status: 204}}, codes.OK, "", ""},
		{"DS-2 of one that is gone", script{noSnap, ownProject, ownUser, noSnap}, codes.OK, "",
			""},
		{"of one that cannot be read", script{racktest.Error(503, "ServiceNotAvailable",
			"later").To(viewSnap)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"DS-2 of one that is deleted between read and request", script{seen,
			racktest.NotFound.To(deleteSnap), noSnap, ownProject, ownUser, noSnap}, codes.OK, "",
			""},
		{"OX-6 of one that exists although the rack does not find it", script{seen,
			racktest.NotFound.To(deleteSnap), seen}, codes.Unavailable, csierr.RackResponseInvalid, ""},
		{"OX-6 of one that cannot be seen", script{noSnap, noProject},
			codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"D-69 of one taken by hand", described(racktest.With("description", "before the upgrade")),
			codes.FailedPrecondition, csierr.DiskNotOurs, "Retain"},
		{"D-69 of one in another project", described(racktest.With("project_id", racktest.Image)),
			codes.InvalidArgument, csierr.OtherProject, racktest.Image},
		{"D-69 of another cluster's", described(racktest.With("description", volume.Tag{Name: "snap-1",
			Cluster: "red"}.Description())), codes.FailedPrecondition, csierr.DiskNotOurs, "red"},
		{"D-69 of one to which the description was copied", described(racktest.With("name",
			"by-hand")), codes.FailedPrecondition, csierr.DiskNotOurs, "another name"},
		{"DS-5 of one in the making", script{racktest.OK(viewSnap, racktest.SnapshotOf("creating")),
			racktest.Refused.To(deleteSnap), racktest.OK(viewSnap, racktest.SnapshotOf("creating"))},
			codes.Aborted, csierr.SnapshotNotReady, ""},
		{"of one that goes meanwhile", script{seen, racktest.Refused.To(deleteSnap),
			noSnap, ownProject, ownUser, noSnap}, codes.OK, "", ""},
		{"DS-4 of one that the rack keeps", script{seen, racktest.Error(409, "Conflict",
			"in use").To(deleteSnap), seen}, codes.FailedPrecondition, csierr.Conflict, "in use"},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).DeleteSnapshot(t.Context(),
				&csi.DeleteSnapshotRequest{SnapshotId: racktest.Snapshot})
			s.verify(t, err)
		})
	}
}

func TestListingSnapshots(t *testing.T) {
	numberedSnap := func(n int, state string, edit ...func(map[string]any)) string {
		return racktest.SnapshotOf(state, append(edit, racktest.With("id", racktest.Numbered(n)))...)
	}
	viewSeventh := "GET /v1/snapshots/" + racktest.Numbered(7)
	for _, test := range []struct {
		name  string
		req   *csi.ListSnapshotsRequest
		lines script
		want  string
	}{
		{"LS-5 everybody's, but none uncut", &csi.ListSnapshotsRequest{}, script{racktest.OK(listSnaps,
			racktest.PageOf("", numberedSnap(1, "ready", racktest.With("description", "mine")),
				numberedSnap(2, "creating"), numberedSnap(3, "faulted"), numberedSnap(4, "destroyed")))},
			"[1:true 3:false]"},
		{"of one volume", &csi.ListSnapshotsRequest{SourceVolumeId: racktest.Disk},
			script{racktest.OK(listSnaps, racktest.PageOf("", numberedSnap(1, "ready"), numberedSnap(2,
				"ready", racktest.With("disk_id", racktest.Image))))}, "[1:true]"},
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

func TestGetSnapshot(t *testing.T) { // LS-7
	answer, err := rackThat(t, racktest.OK(viewSnap,
		racktest.SnapshotOf("creating"))).GetSnapshot(t.Context(),
		&csi.GetSnapshotRequest{SnapshotId: racktest.Snapshot})
	must(t, err)
	csitest.SameMessage(t, answer.GetSnapshot(), wantedSnapshot(false))
	gone := script{noSnap, racktest.OK(viewSnap,
		racktest.SnapshotOf("destroyed"))}
	for _, line := range gone {
		_, err = rackThat(t, line).GetSnapshot(t.Context(), &csi.GetSnapshotRequest{
			SnapshotId: racktest.Snapshot})
		csitest.Want(t, err, codes.NotFound, csierr.SnapshotNotFound) // LS-7
	}
}
