package controller

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestCV15ADiskThatInheritedAnotherBlockSizeIsDeleted(t *testing.T) {
	in512 := createRequest()
	in512.VolumeContentSource = fromSnapshot(racktest.Snapshot)
	in512.Parameters = map[string]string{"blockSize": "512"}
	corrected := createRequest()
	corrected.VolumeContentSource = fromSnapshot(racktest.Snapshot)
	blank := createRequest()
	wrong := func(state string) string {
		return racktest.DiskOf(state, racktest.With("snapshot_id", racktest.Snapshot),
			racktest.With("block_size", 2048),
			racktest.With("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
				BlockSize: 512}.Description()))
	}
	ready := racktest.OK(viewSnap, racktest.SnapshotOf("ready"))
	gone := racktest.Exchange{Want: racktest.DeleteDisk, Status: 204}
	down := racktest.Error(503, "ServiceNotAvailable", "Service Unavailable")
	undo := func(answer ...racktest.Exchange) script {
		return append(script{taken.To(postDisk), racktest.OK(viewName, wrong("detached")),
			racktest.OK(racktest.ViewDisk, wrong("detached"))}, answer...)
	}
	source := script{ready, noDisk}
	for _, test := range []struct {
		name   string
		req    *csi.CreateVolumeRequest
		lines  script
		code   codes.Code
		reason csierr.Reason
	}{
		{"a failed deletion is retryable", in512, append(source, created(postDisk, wrong("creating")),
			racktest.OK(racktest.ViewDisk, wrong("detached")), down.To(racktest.DeleteDisk)),
			codes.Unavailable, csierr.RackUnavailable},
		{"also after a final error", in512, append(source, created(postDisk, wrong("creating")),
			racktest.OK(racktest.ViewDisk, wrong("detached")), racktest.Error(410, "Gone",
				"Gone").To(racktest.DeleteDisk)), codes.Aborted, csierr.DiskBusy},
		{"the same again finds it and deletes it", in512, append(source, undo(gone)...),
			codes.InvalidArgument, csierr.SourceIncompatible},
		{"the same again, whose deletion fails again", in512, append(source,
			undo(down.To(racktest.DeleteDisk))...), codes.Unavailable, csierr.RackUnavailable},
		{"a corrected request finds it and deletes it", corrected, append(script{ready},
			undo(gone)...), codes.Aborted, csierr.DiskBusy},
		{"a request for a blank volume finds it and deletes it", blank, undo(gone), codes.Aborted,
			csierr.DiskBusy},
		{"when the snapshot is gone too", in512, append(script{racktest.NotFound.To(viewSnap),
			racktest.OK(viewName, wrong("detached")), racktest.OK(racktest.ViewDisk, wrong("detached"))},
			gone), codes.InvalidArgument, csierr.SourceIncompatible},
		{"a volume without a requested block size is not deleted", in512, append(source,
			taken.To(postDisk), racktest.OK(viewName, racktest.DiskOf("detached",
				racktest.With("snapshot_id", racktest.Snapshot), racktest.With("block_size", 2048)))),
			codes.AlreadyExists, csierr.VolumeExists},
		{"a volume with the requested block size is not deleted", in512, append(source,
			taken.To(postDisk), racktest.OK(viewName, racktest.DiskOf("detached",
				racktest.With("snapshot_id", racktest.Snapshot), racktest.With("block_size", 2048),
				racktest.With("description", volume.Tag{Name: "pvc-1", Cluster: "blue",
					BlockSize: 2048}.Description())))), codes.AlreadyExists, csierr.VolumeExists},
		{"another cluster's volume is not deleted", in512, append(source, taken.To(postDisk),
			racktest.OK(viewName, racktest.DiskOf("detached", racktest.With("block_size", 2048),
				racktest.With("description", volume.Tag{Name: "pvc-1", Cluster: "red",
					BlockSize: 512}.Description())))), codes.AlreadyExists, csierr.VolumeExists},
		{"one that somebody attached is not deleted", in512, append(source, taken.To(postDisk),
			racktest.OK(viewName, wrong(racktest.AttachedHere)), racktest.OK(racktest.ViewDisk,
				wrong(racktest.AttachedHere))), codes.Aborted, csierr.DiskBusy},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := rackThat(t, test.lines...).CreateVolume(t.Context(), test.req)
			csitest.Want(t, err, test.code, test.reason)
		})
	}
}

func TestDeletingVolumes(t *testing.T) {
	seen := free
	described := func(description string, edit ...func(map[string]any)) script {
		return script{shown("detached", append(edit,
			racktest.With("description", description))...)}
	}
	for _, s := range []scriptedCall{
		{"is a read and one request", script{seen, {Want: racktest.DeleteDisk, Status: 204}}, codes.OK,
			"", ""},
		{"DV-2 of a disk that is gone", script{noDisk, ownProject}, codes.OK, "", ""},
		{"DV-2 of a disk that is deleted between read and request", script{seen,
			racktest.NotFound.To(racktest.DeleteDisk), noDisk, ownProject}, codes.OK, "", ""},
		{"OX-6 of a disk that exists although the rack does not find it", script{seen,
			racktest.NotFound.To(racktest.DeleteDisk), seen}, codes.Aborted, csierr.DiskBusy, ""},
		{"DV-2 of a disk that the rack calls destroyed", script{shown("destroyed"), ownProject},
			codes.OK, "", ""},
		{"OX-6 of a disk that cannot be seen", script{noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"OX-6 of a disk that cannot be seen any more", script{seen,
			racktest.NotFound.To(racktest.DeleteDisk), noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"OX-6 at an address that is no rack", script{seen, {Want: racktest.DeleteDisk, Status: 404,
			Body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"OX-6 at an address that is no rack, when it is read", script{{Want: racktest.ViewDisk,
			Status: 404, Body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"D-69 of a disk made by hand", described("the boot disk"), codes.FailedPrecondition,
			csierr.DiskNotOurs, "Retain"},
		{"D-69 of a disk without a description", described(""), codes.FailedPrecondition,
			csierr.DiskNotOurs, racktest.Disk},
		{"D-69 of another cluster's disk", described(volume.Tag{Name: "pvc-1",
			Cluster: "red"}.Description()), codes.FailedPrecondition, csierr.DiskNotOurs, "red"},
		{"D-69 of a disk of no cluster", described(volume.Tag{Name: "pvc-1"}.Description()),
			codes.FailedPrecondition, csierr.DiskNotOurs, "OXIDE_CLUSTER_ID"},
		{"D-69 of a disk to which the description was copied", described(volume.Tag{Name: "pvc-1",
			Cluster: "blue"}.Description(), racktest.With("name", "by-hand")), codes.FailedPrecondition,
			csierr.DiskNotOurs, "another name"},
		{"D-69 of an attached disk made by hand", script{shown(racktest.AttachedHere,
			racktest.With("description", ""))}, codes.FailedPrecondition, csierr.DiskNotOurs, ""},
		{"of a disk that the rack began to delete and gave up", script{shown("faulted",
			racktest.With("name", "deleted-"+racktest.Disk)), {Want: racktest.DeleteDisk, Status: 204}},
			codes.OK, "", ""},
		{"of another disk in the response", script{shown("detached", racktest.With("id",
			racktest.Image))}, codes.Internal, csierr.RackResponseInvalid, racktest.Image},
		{"DV-3 of an attached disk", script{held}, codes.FailedPrecondition, csierr.DiskAttached,
			racktest.Instance},
		{"DV-3 of a disk being detached", script{shown("detaching " + racktest.Instance)},
			codes.FailedPrecondition, csierr.DiskAttached, "detaching"},
		{"DV-3 of a disk that is attached meanwhile", script{seen,
			racktest.Refused.To(racktest.DeleteDisk), held}, codes.FailedPrecondition,
			csierr.DiskAttached, ""},
		{"DV-3 of a disk being snapshotted", script{shown("maintenance"),
			racktest.Refused.To(racktest.DeleteDisk), shown("maintenance")}, codes.Aborted,
			csierr.DiskBusy, ""},
		{"DV-3 of a disk whose import was not finalized", script{shown("import_ready"),
			racktest.Refused.To(racktest.DeleteDisk), shown("import_ready")}, codes.FailedPrecondition,
			csierr.DiskImporting, "finalize"},
		{"of a disk that is deleted meanwhile", script{seen, racktest.Refused.To(racktest.DeleteDisk),
			noDisk, ownProject}, codes.OK, "", ""},
		{"of a disk that is free again", script{seen, racktest.Refused.To(racktest.DeleteDisk), seen},
			codes.Aborted, csierr.DiskBusy, ""},
		{"DV-4 of a disk that the rack ties to another object", script{seen, racktest.Error(409,
			"Conflict", "disk has dependents").To(racktest.DeleteDisk), seen}, codes.FailedPrecondition,
			csierr.Conflict, ""},
		{"DV-6 by something that is no rack", script{seen, {Want: racktest.DeleteDisk, Status: 200,
			Body: "<html>welcome"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"of a faulted disk that the rack keeps", script{shown("faulted"),
			racktest.Refused.To(racktest.DeleteDisk), shown("faulted")}, codes.Internal,
			csierr.RackError, ""},
		{"without a response", script{seen, {Want: racktest.DeleteDisk, Cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"without a response to the read", script{{Want: racktest.ViewDisk, Cut: true}},
			codes.Unavailable, csierr.RackUnavailable, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).DeleteVolume(t.Context(),
				&csi.DeleteVolumeRequest{VolumeId: strings.ToUpper(racktest.Disk)})
			s.verify(t, err)
		})
	}
}
