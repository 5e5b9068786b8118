package driver

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

func TestUnpublishing(t *testing.T) {
	for _, s := range []scene{
		{"is one request", []exchange{accepted(detach, diskOf("detached"))}, codes.OK, "", ""},
		{"CU-3 attached elsewhere stays there", []exchange{not.to(detach),
			ok(viewDisk, diskOf(elsewhere))}, codes.OK, "", ""},
		{"CU-3 a disk in maintenance is on no node", []exchange{not.to(detach),
			ok(viewDisk, diskOf("maintenance"))}, codes.OK, "", ""},
		{"CU-4 a deleted disk", []exchange{lost.to(detach), lost.to(viewDisk),
			ok(viewProject, projectOf())}, codes.OK, "", ""},
		{"CU-4 a disk that cannot be seen", []exchange{lost.to(detach), lost.to(viewDisk),
			lost.to(viewProject)}, codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"CU-5 a deleted instance", []exchange{lost.to(detach), ok(viewDisk, diskOf("detached"))},
			codes.OK, "", ""},
		{"CU-5 a deleted instance whose disk is elsewhere", []exchange{lost.to(detach),
			ok(viewDisk, diskOf(elsewhere))}, codes.OK, "", ""},
		{"CU-10 a faulted disk is looked for among those of the instance", []exchange{
			not.to(detach), ok(viewDisk, diskOf("faulted")), ok(beside, pageOf(""))}, codes.OK, "",
			""},
		{"CU-10 a faulted disk that the instance still lists", []exchange{not.to(detach),
			ok(viewDisk, diskOf("faulted")), ok(beside, pageOf("", diskOf("faulted")))},
			codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk that is faulted by its detach", []exchange{
			accepted(detach, diskOf("faulted")), ok(beside, pageOf("x", diskOf("faulted",
				with("id", testImage)))), ok(beside, pageOf(""))}, codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance does not tell", []exchange{not.to(detach),
			ok(viewDisk, diskOf("faulted")),
			rackError(503, "ServiceNotAvailable", "Service Unavailable").to(beside)},
			codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a faulted disk whose instance is gone", []exchange{lost.to(detach),
			ok(viewDisk, diskOf("faulted")), lost.to(beside), ok(viewProject, projectOf())},
			codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance cannot be seen", []exchange{lost.to(detach),
			ok(viewDisk, diskOf("faulted")), lost.to(beside), lost.to(viewProject)},
			codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CU-10 a disk still on its way off", []exchange{not.to(detach),
			ok(viewDisk, diskOf("detaching "+testInstance))}, codes.Aborted, csierr.DiskBusy,
			"detaching"},
		{"CU-10 a disk that the rack attaches again on its way off", []exchange{
			accepted(detach, diskOf("detaching "+testInstance)), ok(viewDisk, diskOf(here))},
			codes.Internal, csierr.RackAnswerWrong, "still attached"},
		{"CU-10 a page of somebody else's in place of the answer", []exchange{{want: detach,
			status: 202, body: "<html>"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a 404 of somebody else's", []exchange{{want: detach, status: 404,
			body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"CU-10 a 404 of somebody else's at the look", []exchange{not.to(detach), {want: viewDisk,
			status: 404, body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"CU-6 an instance that the rack calls destroyed and that has the disk", []exchange{
			lost.to(detach), ok(viewDisk, diskOf(here)), ok(viewInstance,
				instanceOf("destroyed"))}, codes.NotFound, csierr.InstanceNotFound, "unpublished"},
		{"CU-6 a deleted instance that still has the disk", []exchange{lost.to(detach),
			ok(viewDisk, diskOf(here)), lost.to(viewInstance)}, codes.NotFound,
			csierr.InstanceNotFound,
			"unpublished"},
		{"CU-7 a running instance without hot-plug", []exchange{not.to(detach),
			ok(viewDisk, diskOf(here)), ok(viewInstance, instanceOf("running"))},
			codes.FailedPrecondition, csierr.InstanceMustBeStopped, "must be stopped"},
		{"CU-8 the boot disk", []exchange{rackError(409, "Conflict",
			"boot disk cannot be detached").
			to(detach), ok(viewDisk, diskOf(here)), ok(viewInstance, instanceOf("stopped",
			with("boot_disk_id", testDisk)))}, codes.FailedPrecondition, csierr.BootDisk,
			"worker-1"},
		{"CU-9 a disk on its way on", []exchange{not.to(detach),
			ok(viewDisk, diskOf("attaching "+testInstance))}, codes.Aborted, csierr.DiskBusy,
			"attaching"},
		{"CU-10 a disk on its way off is awaited", []exchange{
			accepted(detach, diskOf("detaching "+testInstance)),
			ok(viewDisk, diskOf("detaching "+testInstance)), ok(viewDisk, diskOf("detached"))},
			codes.OK, "", ""},
		{"a success that is none", []exchange{accepted(detach, diskOf(here))}, codes.Internal,
			csierr.RackAnswerWrong, "still attached"},
		{"another disk's success", []exchange{accepted(detach, diskOf("detached",
			with("id", testImage)))}, codes.Internal, csierr.RackAnswerWrong, testImage},
		{"a lost answer", []exchange{{want: detach, cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"an attached disk of which the rack does not say where", []exchange{not.to(detach),
			ok(viewDisk, diskOf("attached"))}, codes.Internal, csierr.RackAnswerWrong, "no instance"},
		{"a refusal, and another disk than was asked about", []exchange{not.to(detach),
			ok(viewDisk, diskOf("detached", with("id", testImage)))}, codes.Internal,
			csierr.RackAnswerWrong, testImage},
		{"OX-6 a disk that cannot be seen any more on its way off", []exchange{
			accepted(detach, diskOf("detaching "+testInstance)), lost.to(viewDisk),
			lost.to(viewProject)}, codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"a disk that is deleted on its way off", []exchange{
			accepted(detach, diskOf("detaching "+testInstance)), lost.to(viewDisk),
			ok(viewProject, projectOf())}, codes.OK, "", ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: testDisk, NodeId: testInstance})
			s.verify(t, err)
		})
	}
}

func TestCU2UnpublishingFromWherever(t *testing.T) {
	for _, s := range []scene{
		{"it is", []exchange{ok(viewDisk, diskOf(here)), accepted(detach, diskOf("detached"))},
			codes.OK, "", ""},
		{"it is not", []exchange{ok(viewDisk, diskOf("detached"))}, codes.OK, "", ""},
		{"it was before it was deleted", []exchange{lost.to(viewDisk), ok(viewProject,
			projectOf())},
			codes.OK, "", ""},
		{"it is, and somebody attaches it elsewhere meanwhile", []exchange{ok(viewDisk,
			diskOf(here)), accepted(detach, diskOf(elsewhere))}, codes.Aborted, csierr.DiskBusy, ""},
		{"it was, and is gone", []exchange{ok(viewDisk, diskOf(here)), lost.to(detach),
			lost.to(viewDisk), ok(viewProject, projectOf())}, codes.OK, "", ""},
		{"it is being snapshotted, and so is nowhere", []exchange{ok(viewDisk,
			diskOf("maintenance"))}, codes.OK, "", ""},
		{"nobody can say, for it is faulted", []exchange{ok(viewDisk, diskOf("faulted"))},
			codes.FailedPrecondition, csierr.DiskFaulted, ""},
		{"the rack does not say where", []exchange{ok(viewDisk, diskOf("attached"))},
			codes.Internal, csierr.RackAnswerWrong, "no instance"},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: testDisk})
			s.verify(t, err)
		})
	}
}
