package controller

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestDeletingVolumes(t *testing.T) {
	byCapitals := &csi.DeleteVolumeRequest{VolumeId: strings.ToUpper(racktest.Disk)}
	scriptedCalls{
		{"DV-2 of a disk that is gone", gone, codes.OK, "", ""},
		{"DV-2 of a disk that the rack calls destroyed", script{shown("destroyed"), ownProject, ownUser,
			shown("destroyed")}, codes.OK, "", ""},
		{"OX-6 of a disk that cannot be seen", script{noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, ""},
		{"D-69 of a disk made by hand", script{shown("detached", with("description", "the boot disk"))},
			codes.FailedPrecondition, csierr.DiskNotOurs, "Retain"},
		{"D-69 of an attached disk made by hand", script{shown(here, with("description", ""))},
			codes.FailedPrecondition, csierr.DiskNotOurs, ""},
		{"of a disk that the rack began to delete and gave up", script{shown("faulted", with("name",
			"deleted-"+racktest.Disk)), noInstances, shown("faulted"), deleted}, codes.OK, "", ""},
		{"of a faulted disk that an instance still has", script{shown("faulted"), oneInstance,
			listing(diskOf("faulted"))}, codes.FailedPrecondition, csierr.DiskAttached, racktest.Instance},
		{"of a faulted disk that no instance has", script{shown("faulted"), oneInstance, alone,
			shown("faulted"), deleted}, codes.OK, "", ""},
		{"of a faulted disk whose holders are not known", script{shown("faulted"), oneInstance,
			later.To(beside)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"DV-3 of an attached disk", script{held}, codes.FailedPrecondition, csierr.DiskAttached,
			racktest.Instance},
		{"DV-3 of a disk being detached", script{shown(detaching)}, codes.FailedPrecondition,
			csierr.DiskAttached, "detaching"},
		{"DV-3 of a disk being snapshotted", script{shown("maintenance"), noDelete, shown("maintenance")},
			codes.Aborted, csierr.DiskBusy, ""},
		{"DV-3 of a disk whose import was not finalized", script{shown("import_ready"), noDelete,
			shown("import_ready")}, codes.FailedPrecondition, csierr.DiskImporting, "finalize"},
		{"of a faulted disk that the rack keeps", script{shown("faulted"), noInstances, shown("faulted"),
			noDelete, shown("faulted")}, codes.Internal, csierr.RackError, ""},
		{"without a response to the read", script{{Want: racktest.ViewDisk, Cut: true},
			{Want: racktest.ViewDisk, Cut: true}}, codes.Unavailable, csierr.RackUnavailable, ""},
	}.try(t, byCapitals, nil)
	scriptedCalls{
		{"is a read and one request", script{deleted}, codes.OK, "", ""},
		{"DV-2 of a disk that is deleted between read and request", script{racktest.NotFound.To(
			racktest.DeleteDisk), noDisk, ownProject, ownUser, noDisk}, codes.OK, "", ""},
		{"OX-6 of a disk that exists although the rack does not find it",
			script{racktest.NotFound.To(racktest.DeleteDisk), free}, codes.Aborted, csierr.DiskBusy, ""},
		{"OX-6 of a disk that cannot be seen any more", script{racktest.NotFound.To(racktest.DeleteDisk),
			noDisk, noProject}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"DV-4 of a disk that the rack ties to another object", script{racktest.Error(409, "Conflict",
			"disk has dependents").To(racktest.DeleteDisk), free}, codes.FailedPrecondition, csierr.Conflict,
			""},
		{"DV-6 by something that is no rack", script{{Want: racktest.DeleteDisk, Status: 200,
			Body: "<html>welcome"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"without a response", script{lostDelete}, codes.Unavailable, csierr.RackUnavailable, ""},
	}.after(free).try(t, byCapitals, nil)
	scriptedCalls{
		{"DV-3 of a disk that is attached meanwhile", script{held}, codes.FailedPrecondition,
			csierr.DiskAttached, ""},
		{"of a disk that is free again", script{free}, codes.Aborted, csierr.DiskBusy, ""},
	}.after(free, noDelete).try(t, byCapitals, nil)
}
