package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestUnpublishing(t *testing.T) { // OX-3
	refused := script{racktest.Refused.To(detach), held, racktest.OK(viewInstance,
		racktest.InstanceOf("running"))}
	for _, s := range []scriptedCall{
		{"looks at the disk and detaches it", script{held, accepted(detach,
			racktest.DiskOf("detached"))}, codes.OK, "", ""},
		{"makes no request to detach a detached disk", script{free}, codes.OK, "", ""},
		{"CU-3 attached elsewhere stays there", script{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-3 attached elsewhere meanwhile stays there", script{held, racktest.Refused.To(detach),
			shown(elsewhere)}, codes.OK, "", ""},
		{"CU-3 a disk in maintenance is on no node", script{shown("maintenance")}, codes.OK, "", ""},
		{"CU-4 a deleted disk", script{noDisk, ownProject, ownUser, noDisk}, codes.OK, "", ""},
		{"CU-4 a disk that is deleted meanwhile", script{held, racktest.NotFound.To(detach), noDisk,
			ownProject, ownUser, noDisk}, codes.OK, "", ""},
		{"CU-4 a disk that cannot be seen", script{noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"CU-5 a deleted instance", script{free}, codes.OK, "", ""},
		{"CU-5 a deleted instance whose disk is elsewhere", script{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-10 a faulted disk is looked for among those of the instance", script{shown("faulted"),
			racktest.OK(beside, racktest.PageOf(""))}, codes.OK, "", ""},
		{"CU-10 a faulted disk that the instance still lists", script{shown("faulted"),
			racktest.OK(beside, racktest.PageOf("", racktest.DiskOf("faulted")))},
			codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk that is faulted meanwhile and that the instance still lists", script{held,
			racktest.Refused.To(detach), shown("faulted"), racktest.OK(beside, racktest.PageOf("",
				racktest.DiskOf("faulted")))}, codes.FailedPrecondition, csierr.DiskFaulted,
			"still among those"},
		{"CU-10 a disk that is faulted by its detach", script{held, accepted(detach,
			racktest.DiskOf("faulted")), racktest.OK(beside, racktest.PageOf("x",
			racktest.DiskOf("faulted", racktest.With("id", racktest.Image))))}, codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance does not respond", script{shown("faulted"),
			racktest.Error(503, "ServiceNotAvailable", "Service Unavailable").To(beside)},
			codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a faulted disk whose instance is gone", script{shown("faulted"),
			noInstance, ownProject, ownUser, noInstance}, codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance cannot be seen", script{shown("faulted"),
			noInstance, noProject}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CU-10 a disk still on its way off", script{held, racktest.Refused.To(detach),
			shown("detaching " + racktest.Instance)}, codes.Aborted, csierr.DiskBusy, "detaching"},
		{"CU-10 a disk that the rack attaches again on its way off", script{held, accepted(detach,
			racktest.DiskOf("detaching "+racktest.Instance)), held}, codes.Unavailable,
			csierr.RackResponseInvalid, "still attached"},
		{"CU-10 a proxy's page instead of the response", script{held, {Want: detach, Status: 202,
			Body: "<html>"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a 404 of a proxy", script{held, {Want: detach, Status: 404, Body: "<html>"}},
			codes.Unavailable, csierr.RackUnknown, ""},
		{"CU-10 a 404 of a proxy when the disk is read", script{{Want: racktest.ViewDisk, Status: 404,
			Body: "<html>"}}, codes.Unavailable, csierr.RackUnknown, ""},
		{"CU-6 an instance that the rack calls destroyed and that has the disk", script{held,
			racktest.NotFound.To(detach), held, racktest.OK(viewInstance,
				racktest.InstanceOf("destroyed"))}, codes.NotFound, csierr.InstanceNotFound,
			"not known to be detached"},
		{"CU-6 a deleted instance that still has the disk", script{held, racktest.NotFound.To(detach),
			held, racktest.NotFound.To(viewInstance)}, codes.NotFound, csierr.InstanceNotFound,
			"not known to be detached"},
		{"CU-7 a running instance without hot-plug", append(append(script{held}, refused...),
			refused...), codes.FailedPrecondition, csierr.InstanceMustBeStopped, "must be stopped"},
		{"CU-7 a detach that the rack accepts at the second request", append(append(script{held},
			refused...), detachedNow), codes.OK, "", ""},
		{"CU-8 the boot disk", script{held, racktest.Error(409, "Conflict",
			"boot disk cannot be detached").To(detach), held, racktest.OK(viewInstance,
			racktest.InstanceOf("stopped", racktest.With("boot_disk_id", racktest.Disk)))},
			codes.FailedPrecondition, csierr.BootDisk, "worker-1"},
		{"CU-9 a disk on its way on", script{held, racktest.Refused.To(detach),
			shown("attaching " + racktest.Instance)}, codes.Aborted, csierr.DiskBusy, "attaching"},
		{"CU-10 a disk on its way off is awaited", script{held, accepted(detach,
			racktest.DiskOf("detaching "+racktest.Instance)), shown("detaching " + racktest.Instance),
			free}, codes.OK, "", ""},
		{"a success with a detached disk", script{held, accepted(detach,
			racktest.DiskOf(racktest.AttachedHere))}, codes.Unavailable, csierr.RackResponseInvalid,
			"still attached"},
		{"another disk's success", script{held, accepted(detach, racktest.DiskOf("detached",
			racktest.With("id", racktest.Image)))}, codes.Unavailable, csierr.RackResponseInvalid,
			racktest.Image},
		{"a lost response", script{held, {Want: detach, Cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"an attached disk without an instance", script{shown("attached")}, codes.Unavailable,
			csierr.RackResponseInvalid, "no instance"},
		{"a refusal, and another disk than was asked about", script{held, racktest.Refused.To(detach),
			shown("detached", racktest.With("id", racktest.Image))}, codes.Unavailable,
			csierr.RackResponseInvalid, racktest.Image},
		{"OX-6 a disk that cannot be seen any more on its way off", script{held, accepted(detach,
			racktest.DiskOf("detaching "+racktest.Instance)), noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"a disk that is deleted on its way off", script{held, accepted(detach,
			racktest.DiskOf("detaching "+racktest.Instance)), noDisk, ownProject, ownUser,
			noDisk}, codes.OK, "", ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk, NodeId: racktest.Instance})
			s.verify(t, err)
		})
	}
}

func TestCU2UnpublishingWithoutANode(t *testing.T) { // CU-2
	for _, s := range []scriptedCall{
		{"it is", script{held, accepted(detach, racktest.DiskOf("detached"))}, codes.OK, "", ""},
		{"it is not", script{free}, codes.OK, "", ""},
		{"it was before it was deleted", script{noDisk, ownProject, ownUser, noDisk}, codes.OK, "", ""},
		{"it is, and is attached elsewhere meanwhile", script{held, accepted(detach,
			racktest.DiskOf(elsewhere))}, codes.Aborted, csierr.DiskBusy, ""},
		{"it was, and is gone", script{held, racktest.NotFound.To(detach), noDisk, ownProject, ownUser,
			noDisk}, codes.OK, "", ""},
		{"it is being snapshotted, and so is nowhere", script{shown("maintenance")}, codes.OK, "", ""},
		{"it is unknown, because the disk is faulted", script{shown("faulted")},
			codes.FailedPrecondition, csierr.DiskFaulted, ""},
		{"it is, in another project", script{shown(racktest.AttachedHere, racktest.With("project_id",
			racktest.Image))}, codes.InvalidArgument, csierr.OtherProject, racktest.Image},
		{"the rack names no instance", script{shown("attached")}, codes.Unavailable,
			csierr.RackResponseInvalid, "no instance"},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk})
			s.verify(t, err)
		})
	}
}
