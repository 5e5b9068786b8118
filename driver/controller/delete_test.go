package controller

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
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

func TestE17ANameBelongsToOneCluster(t *testing.T) {
	disk := func(cluster, name string) *oxide.Disk {
		return &oxide.Disk{Name: oxide.Name(name), Description: volume.Tag{Name: "db",
			Cluster: cluster}.Description()}
	}
	for _, test := range []struct {
		name  string
		disk  *oxide.Disk
		words string // of the reason; empty: it belongs to the cluster blue
	}{
		{"the cluster's own", disk("blue", volume.DiskName("blue", "db")), ""},
		{"another cluster's of the same volume name", disk("red", volume.DiskName("red", "db")), `"red"`},
		{"one without a cluster", disk("", volume.DiskName("", "db")),
			`cluster "", and OXIDE_CLUSTER_ID is "blue"`},
		{"a name of the hash of \"db\" alone", disk("blue", "csi-ffe2bkb99rso8u1a"), "another name"},
		{"a tag of ours on another cluster's name", disk("blue", volume.DiskName("red", "db")),
			"another name"},
		{"a tag of ours on a name without a cluster", disk("blue", volume.DiskName("", "db")),
			"another name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if why := rack.ForeignDisk(test.disk, "blue"); (why == "") != (test.words == "") ||
				!strings.Contains(why, test.words) {
				t.Errorf("ForeignDisk returned %q, want %q", why, test.words)
			}
			// An audit owns and deletes only what its own cluster made.
			snapshot := &oxide.Snapshot{Name: test.disk.Name, Description: test.disk.Description}
			if why := rack.ForeignSnapshot(snapshot, "blue"); (why == "") != (test.words == "") {
				t.Errorf("ForeignSnapshot returned %q, want %q", why, test.words)
			}
		})
	}
}
