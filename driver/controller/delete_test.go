package controller

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestDeletingVolumes(t *testing.T) {
	seen := free
	described := func(description string, edit ...func(map[string]any)) script {
		return script{shown("detached", append(edit,
			racktest.With("description", description))...)}
	}
	for _, s := range []scriptedCall{
		{"is a read and one request", script{seen, {Want: racktest.DeleteDisk, Status: 204}}, codes.OK,
			"", ""},
		{"DV-2 of a disk that is gone", script{noDisk, ownProject, ownUser, noDisk}, codes.OK, "", ""},
		{"DV-2 of a disk that is deleted between read and request", script{seen,
			racktest.NotFound.To(racktest.DeleteDisk), noDisk, ownProject, ownUser, noDisk}, codes.OK, "",
			""},
		{"OX-6 of a disk that exists although the rack does not find it", script{seen,
			racktest.NotFound.To(racktest.DeleteDisk), seen}, codes.Aborted, csierr.DiskBusy, ""},
		{"DV-2 of a disk that the rack calls destroyed", script{shown("destroyed"), ownProject,
			ownUser, shown("destroyed")}, codes.OK, "", ""},
		{"OX-6 of a disk that cannot be seen", script{noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"OX-6 of a disk that cannot be seen any more", script{seen,
			racktest.NotFound.To(racktest.DeleteDisk), noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"OX-6 at an address that is no rack", script{seen, {Want: racktest.DeleteDisk, Status: 404,
			Body: "<html>"}}, codes.Unavailable, csierr.RackUnknown, ""},
		{"OX-6 at an address that is no rack, when it is read", script{{Want: racktest.ViewDisk,
			Status: 404, Body: "<html>"}}, codes.Unavailable, csierr.RackUnknown, ""},
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
			racktest.With("name", "deleted-"+racktest.Disk)), noInstances, shown("faulted"),
			{Want: racktest.DeleteDisk, Status: 204}}, codes.OK, "", ""},
		{"of a faulted disk that an instance still has", script{shown("faulted"), oneInstance,
			racktest.OK(beside, racktest.PageOf("", racktest.DiskOf("faulted")))},
			codes.FailedPrecondition, csierr.DiskAttached, racktest.Instance},
		{"of a faulted disk that no instance has", script{shown("faulted"), oneInstance, alone,
			shown("faulted"), {Want: racktest.DeleteDisk, Status: 204}}, codes.OK, "", ""},
		{"of a faulted disk whose holders are not known", script{shown("faulted"), oneInstance,
			racktest.Error(503, "ServiceNotAvailable", "later").To(beside)}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"D-69 of a disk in another project", script{shown("detached", racktest.With("project_id",
			racktest.Image))}, codes.InvalidArgument, csierr.OtherProject, racktest.Image},
		{"of another disk in the response", script{shown("detached", racktest.With("id",
			racktest.Image))}, codes.Unavailable, csierr.RackResponseInvalid, racktest.Image},
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
			noDisk, ownProject, ownUser, noDisk}, codes.OK, "", ""},
		{"of a disk that is free again", script{seen, racktest.Refused.To(racktest.DeleteDisk), seen},
			codes.Aborted, csierr.DiskBusy, ""},
		{"DV-4 of a disk that the rack ties to another object", script{seen, racktest.Error(409,
			"Conflict", "disk has dependents").To(racktest.DeleteDisk), seen}, codes.FailedPrecondition,
			csierr.Conflict, ""},
		{"DV-6 by something that is no rack", script{seen, {Want: racktest.DeleteDisk, Status: 200,
			Body: "<html>welcome"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"of a faulted disk that the rack keeps", script{shown("faulted"), noInstances,
			shown("faulted"), racktest.Refused.To(racktest.DeleteDisk), shown("faulted")}, codes.Internal,
			csierr.RackError, ""},
		{"without a response", script{seen, {Want: racktest.DeleteDisk, Cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"without a response to the read", script{{Want: racktest.ViewDisk, Cut: true},
			{Want: racktest.ViewDisk, Cut: true}}, codes.Unavailable, csierr.RackUnavailable, ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).DeleteVolume(t.Context(),
				&csi.DeleteVolumeRequest{VolumeId: strings.ToUpper(racktest.Disk)})
			s.verify(t, err)
		})
	}
}
