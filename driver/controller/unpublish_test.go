package controller

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"
)

func TestUnpublishing(t *testing.T) { // OX-3
	for _, s := range []scriptedCall{
		{"looks at the disk and detaches it", []racktest.Exchange{held,
			accepted(detach, racktest.DiskOf("detached"))}, codes.OK, "", ""},
		{"makes no request to detach a detached disk", []racktest.Exchange{free}, codes.OK, "", ""},
		{"CU-3 attached elsewhere stays there", []racktest.Exchange{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-3 attached elsewhere meanwhile stays there", []racktest.Exchange{
			held, racktest.Refused.To(detach),
			shown(elsewhere)}, codes.OK, "", ""},
		{"CU-3 a disk in maintenance is on no node", []racktest.Exchange{
			shown("maintenance")}, codes.OK, "", ""},
		{"CU-4 a deleted disk", []racktest.Exchange{racktest.NotFound.To(racktest.ViewDisk),
			racktest.OK(racktest.ViewProject, racktest.ProjectOf())}, codes.OK, "", ""},
		{"CU-4 a disk that is deleted meanwhile", []racktest.Exchange{held, racktest.NotFound.To(detach),
			racktest.NotFound.To(racktest.ViewDisk),
			racktest.OK(racktest.ViewProject, racktest.ProjectOf())}, codes.OK, "", ""},
		{"CU-4 a disk that cannot be seen", []racktest.Exchange{racktest.NotFound.To(racktest.ViewDisk),
			racktest.NotFound.To(racktest.ViewProject)}, codes.PermissionDenied, csierr.ProjectNotFound,
			"OXIDE_PROJECT"},
		{"CU-5 a deleted instance", []racktest.Exchange{shown("detached")},
			codes.OK, "", ""},
		{"CU-5 a deleted instance whose disk is elsewhere",
			[]racktest.Exchange{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-10 a faulted disk is looked for among those of the instance", []racktest.Exchange{
			shown("faulted"),
			racktest.OK(beside,
				racktest.PageOf(""))}, codes.OK, "",
			""},
		{"CU-10 a faulted disk that the instance still lists",
			[]racktest.Exchange{shown("faulted"), racktest.OK(beside,
				racktest.PageOf("",
					racktest.DiskOf("faulted")))},
			codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk that is faulted meanwhile and that the instance still lists",
			[]racktest.Exchange{held, racktest.Refused.To(detach),
				shown("faulted"), racktest.OK(beside,
					racktest.PageOf("",
						racktest.DiskOf("faulted")))},
			codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk that is faulted by its detach", []racktest.Exchange{held,
			accepted(detach, racktest.DiskOf("faulted")), racktest.OK(beside, racktest.PageOf("x",
				racktest.DiskOf("faulted",
					racktest.With("id", racktest.Image))))}, codes.OK,
			"", ""},
		{"CU-10 a faulted disk whose instance does not respond",
			[]racktest.Exchange{shown("faulted"),
				racktest.Error(503, "ServiceNotAvailable", "Service Unavailable").To(beside)},
			codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a faulted disk whose instance is gone", []racktest.Exchange{
			shown("faulted"), racktest.NotFound.To(beside),
			racktest.OK(racktest.ViewProject,
				racktest.ProjectOf())},
			codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance cannot be seen",
			[]racktest.Exchange{shown("faulted"), racktest.NotFound.To(beside),
				racktest.NotFound.To(racktest.ViewProject)},
			codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CU-10 a disk still on its way off", []racktest.Exchange{held, racktest.Refused.To(detach),
			shown("detaching " + racktest.Instance)}, codes.Aborted,
			csierr.DiskBusy,
			"detaching"},
		{"CU-10 a disk that the rack attaches again on its way off", []racktest.Exchange{held,
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)), shown(racktest.AttachedHere)},
			codes.Internal, csierr.RackResponseInvalid, "still attached"},
		{"CU-10 a proxy's page instead of the response", []racktest.Exchange{held, {Want: detach,
			Status: 202, Body: "<html>"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a 404 of a proxy", []racktest.Exchange{held, {Want: detach, Status: 404,
			Body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"CU-10 a 404 of a proxy when the disk is read", []racktest.Exchange{{Want: racktest.ViewDisk,
			Status: 404, Body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"CU-6 an instance that the rack calls destroyed and that has the disk", []racktest.Exchange{held,
			racktest.NotFound.To(detach), shown(racktest.AttachedHere),
			racktest.OK(viewInstance,
				racktest.InstanceOf("destroyed"))}, codes.NotFound, csierr.InstanceNotFound,
			"not known to be detached"},
		{"CU-6 a deleted instance that still has the disk",
			[]racktest.Exchange{held, racktest.NotFound.To(detach),
				shown(racktest.AttachedHere),
				racktest.NotFound.To(viewInstance)},
			codes.NotFound,
			csierr.InstanceNotFound,
			"not known to be detached"},
		{"CU-7 a running instance without hot-plug", []racktest.Exchange{
			held, racktest.Refused.To(detach),
			shown(racktest.AttachedHere), racktest.OK(viewInstance,
				racktest.InstanceOf("running"))},
			codes.FailedPrecondition, csierr.InstanceMustBeStopped, "must be stopped"},
		{"CU-8 the boot disk", []racktest.Exchange{held, racktest.Error(409, "Conflict",
			"boot disk cannot be detached").
			To(detach), shown(racktest.AttachedHere),
			racktest.OK(viewInstance,
				racktest.InstanceOf("stopped",
					racktest.With("boot_disk_id", racktest.Disk)))}, codes.FailedPrecondition, csierr.BootDisk,
			"worker-1"},
		{"CU-9 a disk on its way on", []racktest.Exchange{held, racktest.Refused.To(detach),
			shown("attaching " + racktest.Instance)}, codes.Aborted,
			csierr.DiskBusy,
			"attaching"},
		{"CU-10 a disk on its way off is awaited", []racktest.Exchange{held,
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)),
			shown("detaching " + racktest.Instance),
			shown("detached")},
			codes.OK, "", ""},
		{"a success with a detached disk", []racktest.Exchange{held, accepted(detach,
			racktest.DiskOf(racktest.AttachedHere))},
			codes.Internal,
			csierr.RackResponseInvalid, "still attached"},
		{"another disk's success", []racktest.Exchange{held, accepted(detach, racktest.DiskOf("detached",
			racktest.With("id", racktest.Image)))}, codes.Internal, csierr.RackResponseInvalid,
			racktest.Image},
		{"a lost response", []racktest.Exchange{held, {Want: detach, Cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"an attached disk without an instance",
			[]racktest.Exchange{shown("attached")}, codes.Internal,
			csierr.RackResponseInvalid,
			"no instance"},
		{"a refusal, and another disk than was asked about",
			[]racktest.Exchange{held, racktest.Refused.To(detach),
				racktest.OK(racktest.ViewDisk, racktest.DiskOf("detached", racktest.With("id",
					racktest.Image)))},
			codes.Internal,
			csierr.RackResponseInvalid, racktest.Image},
		{"OX-6 a disk that cannot be seen any more on its way off", []racktest.Exchange{held,
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)),
			racktest.NotFound.To(racktest.ViewDisk),
			racktest.NotFound.To(racktest.ViewProject)}, codes.PermissionDenied, csierr.ProjectNotFound,
			"OXIDE_PROJECT"},
		{"a disk that is deleted on its way off", []racktest.Exchange{held,
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)),
			racktest.NotFound.To(racktest.ViewDisk),
			racktest.OK(racktest.ViewProject, racktest.ProjectOf())}, codes.OK, "", ""},
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
		{"it is", []racktest.Exchange{shown(racktest.AttachedHere),
			accepted(detach,
				racktest.DiskOf("detached"))},
			codes.OK, "", ""},
		{"it is not", []racktest.Exchange{shown("detached")},
			codes.OK,
			"", ""},
		{"it was before it was deleted", []racktest.Exchange{racktest.NotFound.To(racktest.ViewDisk),
			racktest.OK(racktest.ViewProject,
				racktest.ProjectOf())},
			codes.OK, "", ""},
		{"it is, and is attached elsewhere meanwhile",
			[]racktest.Exchange{shown(racktest.AttachedHere), accepted(detach, racktest.DiskOf(elsewhere))},
			codes.Aborted,
			csierr.DiskBusy, ""},
		{"it was, and is gone", []racktest.Exchange{shown(racktest.AttachedHere),
			racktest.NotFound.To(detach),
			racktest.NotFound.To(racktest.ViewDisk), racktest.OK(racktest.ViewProject,
				racktest.ProjectOf())},
			codes.OK, "", ""},
		{"it is being snapshotted, and so is nowhere", []racktest.Exchange{
			shown("maintenance")}, codes.OK, "", ""},
		{"it is unknown, because the disk is faulted", []racktest.Exchange{shown("faulted")},
			codes.FailedPrecondition, csierr.DiskFaulted, ""},
		{"the rack names no instance", []racktest.Exchange{shown("attached")},
			codes.Internal, csierr.RackResponseInvalid, "no instance"},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk})
			s.verify(t, err)
		})
	}
}
