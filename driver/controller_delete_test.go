package driver

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

func TestCV15ADiskThatInheritedOtherBlocksIsDeletedByWhicheverCallCan(t *testing.T) {
	in512 := createRequest()
	in512.VolumeContentSource = fromSnapshot(testSnapshot)
	in512.Parameters = map[string]string{"blockSize": "512"}
	corrected := createRequest()
	corrected.VolumeContentSource = fromSnapshot(testSnapshot)
	blank := createRequest()
	wrong := func(state string) string {
		return diskOf(state, with("snapshot_id", testSnapshot), with("block_size", 2048),
			with("description", volume.Tag{Name: "pvc-1", Cluster: "blue", BlockSize: 512}.Description()))
	}
	ready := ok(viewSnap, snapshotOf("ready"))
	gone := exchange{want: deleteDisk, status: 204}
	down := rackError(503, "ServiceNotAvailable", "Service Unavailable")
	undo := func(answer ...exchange) []exchange {
		return append([]exchange{taken.to(postDisk), ok(viewName, wrong("detached")),
			ok(viewDisk, wrong("detached"))}, answer...)
	}
	source := []exchange{ready, lost.to(viewDisk)}
	for _, test := range []struct {
		name   string
		req    *csi.CreateVolumeRequest
		lines  []exchange
		code   codes.Code
		reason csierr.Reason
	}{
		{"the undoing fails, and the caller is to come back", in512, append(source,
			created(postDisk, wrong("creating")), ok(viewDisk, wrong("detached")),
			down.to(deleteDisk)), codes.Unavailable, csierr.RackUnavailable},
		{"also after an error that sounds final", in512, append(source,
			created(postDisk, wrong("creating")), ok(viewDisk, wrong("detached")),
			rackError(410, "Gone", "Gone").to(deleteDisk)), codes.Aborted, csierr.DiskBusy},
		{"the same again finds it and deletes it", in512, append(source, undo(gone)...),
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"the same again, whose undoing fails again", in512, append(source,
			undo(down.to(deleteDisk))...), codes.Unavailable, csierr.RackUnavailable},
		{"a corrected order finds it and deletes it", corrected, append([]exchange{ready},
			undo(gone)...), codes.Aborted, csierr.DiskBusy},
		{"so does an order for a blank one", blank, undo(gone), codes.Aborted, csierr.DiskBusy},
		{"when the snapshot is gone too", in512, append([]exchange{lost.to(viewSnap),
			ok(viewName, wrong("detached")), ok(viewDisk, wrong("detached"))}, gone),
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"a volume that was ordered without blocks is no leftover", in512, append(source,
			taken.to(postDisk), ok(viewName, diskOf("detached", with("snapshot_id", testSnapshot),
				with("block_size", 2048)))), codes.AlreadyExists, csierr.VolumeExists},
		{"nor is one that got the blocks it was to have", in512, append(source,
			taken.to(postDisk), ok(viewName, diskOf("detached", with("snapshot_id", testSnapshot),
				with("block_size", 2048), with("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
					BlockSize: 2048}.Description())))), codes.AlreadyExists, csierr.VolumeExists},
		{"nor is another cluster's", in512, append(source, taken.to(postDisk),
			ok(viewName, diskOf("detached", with("block_size", 2048), with("description",
				volume.Tag{Name: "pvc-1", Cluster: "red", BlockSize: 512}.Description())))),
			codes.AlreadyExists, csierr.VolumeExists},
		{"one that somebody attached stays", in512, append(source, taken.to(postDisk),
			ok(viewName, wrong(here)), ok(viewDisk, wrong(here))), codes.Aborted, csierr.DiskBusy},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := rackThat(t, test.lines...).CreateVolume(t.Context(), test.req)
			csitest.Want(t, err, test.code, test.reason)
		})
	}
}

func TestDeletingVolumes(t *testing.T) {
	seen := ok(viewDisk, diskOf("detached"))
	described := func(description string, edit ...func(map[string]any)) []exchange {
		return []exchange{ok(viewDisk, diskOf("detached", append(edit,
			with("description", description))...))}
	}
	for _, s := range []scene{
		{"is a look and one request", []exchange{seen, {want: deleteDisk, status: 204}}, codes.OK,
			"", ""},
		{"DV-2 of a disk that is gone", []exchange{lost.to(viewDisk), ok(viewProject,
			projectOf())}, codes.OK, "", ""},
		{"DV-2 of a disk that goes between look and request", []exchange{seen,
			lost.to(deleteDisk), lost.to(viewDisk), ok(viewProject, projectOf())}, codes.OK, "",
			""},
		{"OX-6 of a disk that is there although the rack denies it", []exchange{seen,
			lost.to(deleteDisk), seen}, codes.Aborted, csierr.DiskBusy, ""},
		{"DV-2 of a disk that the rack calls destroyed", []exchange{ok(viewDisk,
			diskOf("destroyed")), ok(viewProject, projectOf())}, codes.OK, "", ""},
		{"OX-6 of a disk that cannot be seen", []exchange{lost.to(viewDisk),
			lost.to(viewProject)}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"OX-6 of a disk that cannot be seen any more", []exchange{seen, lost.to(deleteDisk),
			lost.to(viewDisk), lost.to(viewProject)}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"OX-6 at an address that is no rack", []exchange{seen, {want: deleteDisk, status: 404,
			body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"OX-6 at an address that is no rack, at the look", []exchange{{want: viewDisk,
			status: 404, body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"D-69 of a disk made by hand", described("the boot disk"), codes.FailedPrecondition,
			csierr.DiskNotOurs, "Retain"},
		{"D-69 of a disk without a description", described(""), codes.FailedPrecondition,
			csierr.DiskNotOurs, testDisk},
		{"D-69 of another cluster's disk", described(volume.Tag{Name: "pvc-1",
			Cluster: "red"}.Description()), codes.FailedPrecondition, csierr.DiskNotOurs, "red"},
		{"D-69 of a disk of no cluster", described(volume.Tag{Name: "pvc-1"}.Description()),
			codes.FailedPrecondition, csierr.DiskNotOurs, "OXIDE_CLUSTER_ID"},
		{"D-69 of a disk to which the description was copied", described(volume.Tag{Name: "pvc-1",
			Cluster: "blue"}.Description(), with("name", "by-hand")), codes.FailedPrecondition,
			csierr.DiskNotOurs, "another name"},
		{"D-69 of an attached disk made by hand", []exchange{ok(viewDisk, diskOf(here,
			with("description", "")))}, codes.FailedPrecondition, csierr.DiskNotOurs, ""},
		{"of a disk that the rack began to delete and gave up", []exchange{ok(viewDisk,
			diskOf("faulted", with("name", "deleted-"+testDisk))),
			{want: deleteDisk, status: 204}}, codes.OK, "", ""},
		{"of another disk that came as the answer", []exchange{ok(viewDisk, diskOf("detached",
			with("id", testImage)))}, codes.Internal, csierr.RackAnswerWrong, testImage},
		{"DV-3 of an attached disk", []exchange{ok(viewDisk, diskOf(here))},
			codes.FailedPrecondition, csierr.DiskAttached, testInstance},
		{"DV-3 of a disk being detached", []exchange{ok(viewDisk,
			diskOf("detaching "+testInstance))}, codes.FailedPrecondition, csierr.DiskAttached,
			"detaching"},
		{"DV-3 of a disk that is attached meanwhile", []exchange{seen, not.to(deleteDisk),
			ok(viewDisk, diskOf(here))}, codes.FailedPrecondition, csierr.DiskAttached, ""},
		{"DV-3 of a disk being snapshotted", []exchange{ok(viewDisk, diskOf("maintenance")),
			not.to(deleteDisk), ok(viewDisk, diskOf("maintenance"))}, codes.Aborted,
			csierr.DiskBusy, ""},
		{"of a disk that goes meanwhile", []exchange{seen, not.to(deleteDisk), lost.to(viewDisk),
			ok(viewProject, projectOf())}, codes.OK, "", ""},
		{"of a disk that is free again", []exchange{seen, not.to(deleteDisk), seen},
			codes.Aborted, csierr.DiskBusy, ""},
		{"DV-4 of a disk that the rack ties to another object", []exchange{seen,
			rackError(409, "Conflict", "disk has dependents").to(deleteDisk), seen},
			codes.FailedPrecondition, csierr.Conflict, ""},
		{"DV-6 by something that is no rack", []exchange{seen, {want: deleteDisk, status: 200,
			body: "<html>welcome"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"of a faulted disk that the rack keeps", []exchange{ok(viewDisk, diskOf("faulted")),
			not.to(deleteDisk), ok(viewDisk, diskOf("faulted"))}, codes.Internal,
			csierr.RackError, ""},
		{"without an answer", []exchange{seen, {want: deleteDisk, cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"without an answer to the look", []exchange{{want: viewDisk, cut: true}},
			codes.Unavailable, csierr.RackUnavailable, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).DeleteVolume(t.Context(),
				&csi.DeleteVolumeRequest{VolumeId: strings.ToUpper(testDisk)})
			s.verify(t, err)
		})
	}
}
