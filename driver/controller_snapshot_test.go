package driver

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

const (
	postSnap   = "POST /v1/snapshots"
	deleteSnap = "DELETE /v1/snapshots/" + testSnapshot
	listSnaps  = "GET /v1/snapshots"
)

var viewSnapName = "GET /v1/snapshots/" + volume.SnapshotName("blue", "snap-1")

func TestTakingSnapshots(t *testing.T) {
	busy := rackError(409, "Conflict", "volume repair lock")
	for _, s := range []scene{
		{"is a look and one request", []exchange{{want: postSnap, status: 201, body: snapshotOf("ready"),
			query: "project=" + testProject, check: func(t *testing.T, body []byte) {
				var got map[string]any
				_ = json.Unmarshal(body, &got)
				if got["disk"] != testDisk || got["name"] != volume.SnapshotName("blue", "snap-1") {
					t.Errorf("the body is %s", body)
				}
			}}}, codes.OK, "", ""},
		{"CS-4 of a volume that goes between look and request", []exchange{lost.to(postSnap),
			lost.to(viewSnapName), ok(viewProject, projectOf())}, codes.NotFound,
			csierr.VolumeNotFound, testDisk},
		{"OX-6 in a project that cannot be seen", []exchange{lost.to(postSnap),
			lost.to(viewSnapName),
			lost.to(viewProject)}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CS-5 twice", []exchange{taken.to(postSnap), ok(viewSnapName, snapshotOf("ready"))},
			codes.OK, "", ""},
		{"CS-5 twice, with a full quota", []exchange{full.to(postSnap),
			ok(viewSnapName, snapshotOf("ready"))}, codes.OK, "", ""},
		{"CS-5 twice, the volume deleted between", []exchange{lost.to(postSnap),
			ok(viewSnapName, snapshotOf("ready"))}, codes.OK, "", ""},
		{"CS-6 of another volume", []exchange{taken.to(postSnap), ok(viewSnapName,
			snapshotOf("ready",
				with("disk_id", testImage)))}, codes.AlreadyExists, csierr.SnapshotExists,
			testImage},
		{"CS-6 over one made by hand", []exchange{taken.to(postSnap), ok(viewSnapName,
			snapshotOf("ready", with("description", "mine")))}, codes.AlreadyExists,
			csierr.SnapshotExists, testSnapshot},
		{"of a name whose snapshot is being destroyed", []exchange{taken.to(postSnap),
			ok(viewSnapName, snapshotOf("destroyed"))}, codes.Aborted, csierr.OperationPending, ""},
		{"of a name that is gone again", []exchange{taken.to(postSnap), lost.to(viewSnapName)},
			codes.Aborted, csierr.OperationPending, ""},
		{"CS-7 while another is taken", []exchange{busy.to(postSnap), ok(viewDisk, diskOf(here))},
			codes.Aborted, csierr.DiskBusy, ""},
		{"CS-8 without room", []exchange{full.to(postSnap), lost.to(viewSnapName)},
			codes.ResourceExhausted, csierr.RackFull, ""},
		{"CS-9 that fails", []exchange{created(postSnap, snapshotOf("faulted"))}, codes.Internal,
			csierr.SnapshotFaulted, "take another"},
		{"CS-10 of a local disk", []exchange{not.to(postSnap), ok(viewDisk, diskOf("detached",
			with("disk_type", "local")))}, codes.FailedPrecondition, csierr.SnapshotImpossible,
			"local"},
		{"CS-10 of a read-only disk", []exchange{not.to(postSnap), ok(viewDisk, diskOf("detached",
			with("read_only", true)))}, codes.FailedPrecondition, csierr.SnapshotImpossible,
			"read-only"},
		{"CS-10 of a faulted disk", []exchange{not.to(postSnap), ok(viewDisk, diskOf("faulted"))},
			codes.FailedPrecondition, csierr.DiskFaulted, ""},
		{"CS-10 of a disk in the making", []exchange{not.to(postSnap), ok(viewDisk,
			diskOf("creating"))},
			codes.Aborted, csierr.DiskBusy, ""},
		{"of a disk in another project", []exchange{not.to(postSnap), ok(viewDisk,
			diskOf("detached",
				with("project_id", testDisk))), ok(viewProject, projectOf())},
			codes.InvalidArgument,
			csierr.OtherProject, ""},
		{"while the rack cannot hold the writers", []exchange{gaveUp["HTTP 503"].to(postSnap),
			lost.to(viewSnapName)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"with another disk's answer", []exchange{created(postSnap, snapshotOf("ready",
			with("disk_id", testImage))), lost.to(viewSnapName)}, codes.Unavailable,
			csierr.EffectUnknown, testImage},
		{"with another disk's answer behind the effect", []exchange{created(postSnap,
			snapshotOf("ready", with("disk_id", testImage))),
			ok(viewSnapName, snapshotOf("ready"))}, codes.OK, "", ""},
		{"with a nameless answer", []exchange{created(postSnap, snapshotOf("ready", with("name",
			""))), lost.to(viewSnapName)}, codes.Unavailable, csierr.EffectUnknown, ""},
		{"with a timeless answer", []exchange{created(postSnap, snapshotOf("ready",
			with("time_created", nil))), lost.to(viewSnapName)}, codes.Unavailable,
			csierr.EffectUnknown, ""},
		{"with a sizeless answer", []exchange{created(postSnap, snapshotOf("ready", with("size",
			0))), lost.to(viewSnapName)}, codes.Unavailable, csierr.EffectUnknown, ""},
		{"without an answer", []exchange{{want: postSnap, cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			lines := append([]exchange{ok(viewDisk, diskOf("detached"))}, s.lines...)
			answer, err := rackThat(t, lines...).CreateSnapshot(t.Context(), snapshotRequest())
			s.verify(t, err)
			if err == nil {
				sameMessage(t, answer.GetSnapshot(), wantedSnapshot(true))
			}
		})
	}
}

func TestTakingASnapshotOfAVolumeThatIsGone(t *testing.T) {
	for _, s := range []scene{
		{"CS-4 is not found", []exchange{lost.to(viewDisk), lost.to(viewSnapName),
			ok(viewProject, projectOf())}, codes.NotFound, csierr.VolumeNotFound, testDisk},
		{"OX-6 is something else in a project that cannot be seen", []exchange{lost.to(viewDisk),
			lost.to(viewSnapName), lost.to(viewProject)}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"CS-5 finds the snapshot that was taken of it", []exchange{lost.to(viewDisk),
			ok(viewSnapName, snapshotOf("ready"))}, codes.OK, "", ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).CreateSnapshot(t.Context(), snapshotRequest())
			s.verify(t, err)
		})
	}
}

func TestASnapshotSaysWhichFilesystemItHolds(t *testing.T) {
	inherited := volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginSnapshot,
		Use:            volume.UseFilesystem,
		FilesystemUUID: testImage}
	forAccess := func(use string) volume.Tag {
		return volume.Tag{Name: "pvc-1", Cluster: "blue", Origin: volume.OriginBlank, Use: use}
	}
	for _, test := range []struct{ name, disk, want string }{
		{"a blank disk's is its own id", diskOf("detached"), testDisk},
		{"a restored disk's is its origin's", diskOf("detached",
			with("description", inherited.Description())), testImage},
		{"a raw volume has none", diskOf("detached",
			with("description", forAccess(volume.UseBlock).Description())), ""},
		{"nor one for both", diskOf("detached",
			with("description", forAccess(volume.UseBoth).Description())), ""},
		{"nor a disk made by hand", diskOf("detached", with("description", "mine")), ""},
		{"nor one of another cluster", diskOf("detached", with("description", volume.Tag{Name: "pvc-1",
			Cluster: "red", Origin: volume.OriginBlank, Use: volume.UseFilesystem}.Description())), ""},
		{"nor one whose tag was copied", diskOf("detached", with("name", "somebodys-disk")), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := rackThat(t, ok(viewDisk, test.disk), exchange{want: postSnap, status: 201,
				body: snapshotOf("ready"), check: func(t *testing.T, body []byte) {
					var got struct{ Description string }
					_ = json.Unmarshal(body, &got)
					want := volume.Tag{Name: "snap-1", Cluster: "blue", FilesystemUUID: test.want}
					if m, _ := volume.ParseTag(got.Description); m != want {
						t.Errorf("the tag is %+v, want %+v", m, want)
					}
				}}).CreateSnapshot(t.Context(), snapshotRequest())
			if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestOX8AnAnswerThatLeavesASnapshotOpenIsResolvedByTheName(t *testing.T) {
	for name, answer := range gaveUp {
		for _, test := range []struct {
			name   string
			found  exchange
			code   codes.Code
			reason csierr.Reason
		}{
			{"it is there", ok(viewSnapName, snapshotOf("ready")), codes.OK, ""},
			{"it is being taken", ok(viewSnapName, snapshotOf("creating")), codes.OK, ""},
			{"another has the name", ok(viewSnapName, snapshotOf("ready", with("disk_id",
				testImage))), codes.AlreadyExists, csierr.SnapshotExists},
			{"it is faulted", ok(viewSnapName, snapshotOf("faulted")), codes.Unavailable,
				csierr.EffectUnknown},
			{"it cannot be looked at", rackError(403, "Forbidden", "Forbidden").to(viewSnapName),
				codes.Unavailable, csierr.EffectUnknown},
		} {
			t.Run(name+", "+test.name, func(t *testing.T) {
				_, err := rackThat(t, ok(viewDisk, diskOf(here)), answer.to(postSnap),
					test.found).CreateSnapshot(t.Context(), snapshotRequest())
				scene{code: test.code, reason: test.reason}.verify(t, err)
			})
		}
		t.Run(name+", no snapshot has the name", func(t *testing.T) {
			_, err := rackThat(t, ok(viewDisk, diskOf(here)), answer.to(postSnap),
				lost.to(viewSnapName)).CreateSnapshot(t.Context(), snapshotRequest())
			if got := grpcCode(err); got != codes.Unavailable {
				t.Errorf("got %v, want Unavailable: the rack may still take it", err)
			}
		})
	}
}

func wantedSnapshot(ready bool) *csi.Snapshot {
	return &csi.Snapshot{SnapshotId: testSnapshot, SourceVolumeId: testDisk,
		SizeBytes:  10 * volume.GiB,
		ReadyToUse: ready, CreationTime: timestamppb.New(
			time.Date(2026, 6, 12, 18, 1, 2, 345678000, time.UTC))}
}

func TestCS5ASnapshotInTheMakingIsNotReady(t *testing.T) {
	answer, err := rackThat(t, ok(viewDisk, diskOf("maintenance")), taken.to(postSnap),
		ok(viewSnapName, snapshotOf("creating"))).CreateSnapshot(t.Context(), snapshotRequest())
	if err != nil {
		t.Fatal(err)
	}
	sameMessage(t, answer.GetSnapshot(), wantedSnapshot(false))
}

func TestDeletingSnapshots(t *testing.T) {
	seen := ok(viewSnap, snapshotOf("ready"))
	described := func(edit ...func(map[string]any)) []exchange {
		return []exchange{ok(viewSnap, snapshotOf("ready", edit...))}
	}
	for _, s := range []scene{
		{"is a look and one request", []exchange{seen, {want: deleteSnap, status: 204}}, codes.OK,
			"", ""},
		{"DS-2 of one that is gone", []exchange{lost.to(viewSnap), ok(viewProject, projectOf())},
			codes.OK, "", ""},
		{"DS-2 of one that goes between look and request", []exchange{seen, lost.to(deleteSnap),
			lost.to(viewSnap), ok(viewProject, projectOf())}, codes.OK, "", ""},
		{"OX-6 of one that is there although the rack denies it", []exchange{seen,
			lost.to(deleteSnap), seen}, codes.Internal, csierr.RackAnswerWrong, ""},
		{"OX-6 of one that cannot be seen", []exchange{lost.to(viewSnap), lost.to(viewProject)},
			codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"D-69 of one taken by hand", described(with("description", "before the upgrade")),
			codes.FailedPrecondition, csierr.DiskNotOurs, "Retain"},
		{"D-69 of another cluster's", described(with("description", volume.Tag{Name: "snap-1",
			Cluster: "red"}.Description())), codes.FailedPrecondition, csierr.DiskNotOurs, "red"},
		{"D-69 of one to which the description was copied", described(with("name", "by-hand")),
			codes.FailedPrecondition, csierr.DiskNotOurs, "another name"},
		{"DS-5 of one in the making", []exchange{ok(viewSnap, snapshotOf("creating")),
			not.to(deleteSnap), ok(viewSnap, snapshotOf("creating"))}, codes.Aborted,
			csierr.SnapshotNotReady, ""},
		{"of one that goes meanwhile", []exchange{seen, not.to(deleteSnap), lost.to(viewSnap),
			ok(viewProject, projectOf())}, codes.OK, "", ""},
		{"DS-4 of one that the rack keeps", []exchange{seen, rackError(409, "Conflict",
			"in use").to(deleteSnap), seen}, codes.FailedPrecondition, csierr.Conflict, "in use"},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).DeleteSnapshot(t.Context(),
				&csi.DeleteSnapshotRequest{SnapshotId: testSnapshot})
			s.verify(t, err)
		})
	}
}

func TestListingSnapshots(t *testing.T) {
	numberedSnap := func(n int, state string, edit ...func(map[string]any)) string {
		return snapshotOf(state, append(edit, with("id", numbered(n)))...)
	}
	var five []string
	for n := range 5 {
		five = append(five, numberedSnap(n, "ready"))
	}
	c := pagedRack(t, map[string][]string{"/v1/snapshots": five}, 3)
	first, err := c.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: 2})
	if err != nil || len(first.GetEntries()) != 2 {
		t.Fatalf("LS-4: got %v, %v", first, err)
	}
	rest, err := c.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{
		StartingToken: first.GetNextToken()})
	if err != nil || len(rest.GetEntries()) != 3 || rest.GetNextToken() != "" {
		t.Fatalf("LS-4: got %v, %v", rest, err)
	}

	viewSeventh := "GET /v1/snapshots/" + numbered(7)
	for _, test := range []struct {
		name  string
		req   *csi.ListSnapshotsRequest
		lines []exchange
		want  string
	}{
		{"LS-5 everybody's, but none uncut", &csi.ListSnapshotsRequest{}, []exchange{ok(listSnaps,
			pageOf("",
				numberedSnap(1, "ready", with("description", "mine")), numberedSnap(2, "creating"),
				numberedSnap(3, "faulted"), numberedSnap(4, "destroyed")))}, "[1:true 3:false]"},
		{"of one volume", &csi.ListSnapshotsRequest{SourceVolumeId: testDisk},
			[]exchange{ok(listSnaps,
				pageOf("", numberedSnap(1, "ready"), numberedSnap(2, "ready", with("disk_id",
					testImage))))},
			"[1:true]"},
		{"one", &csi.ListSnapshotsRequest{SnapshotId: numbered(7)}, []exchange{ok(viewSeventh,
			numberedSnap(7, "ready"))}, "[7:true]"},
		{"one of another volume", &csi.ListSnapshotsRequest{SnapshotId: numbered(7),
			SourceVolumeId: testImage}, []exchange{ok(viewSeventh, numberedSnap(7, "ready"))}, "[]"},
		{"LS-3 an unknown one", &csi.ListSnapshotsRequest{SnapshotId: testSnapshot},
			[]exchange{lost.to(viewSnap)}, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer, err := rackThat(t, test.lines...).ListSnapshots(t.Context(), test.req)
			if err != nil {
				t.Fatal(err)
			}
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

func TestASnapshotThatCannotBeIsNotListed(t *testing.T) {
	c := rackThat(t, ok(listSnaps, pageOf("", snapshotOf("ready", with("time_created", nil)))))
	_, err := c.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	csitest.Want(t, err, codes.Internal, csierr.RackAnswerWrong)
}

func TestGetSnapshot(t *testing.T) {
	answer, err := rackThat(t, ok(viewSnap, snapshotOf("creating"))).GetSnapshot(t.Context(),
		&csi.GetSnapshotRequest{SnapshotId: testSnapshot})
	if err != nil {
		t.Fatal(err)
	}
	sameMessage(t, answer.GetSnapshot(), wantedSnapshot(false))
	for _, line := range []exchange{lost.to(viewSnap), ok(viewSnap, snapshotOf("destroyed"))} {
		_, err = rackThat(t, line).GetSnapshot(t.Context(), &csi.GetSnapshotRequest{
			SnapshotId: testSnapshot})
		csitest.Want(t, err, codes.NotFound, csierr.SnapshotNotFound) // LS-7
	}
}
