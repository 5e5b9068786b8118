package driver

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/racktest"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

func TestUnpublishing(t *testing.T) {
	for _, s := range []scene{
		{"is one request", []racktest.Exchange{accepted(detach, racktest.DiskOf("detached"))}, codes.OK,
			"", ""},
		{"CU-3 attached elsewhere stays there", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf(elsewhere))}, codes.OK, "", ""},
		{"CU-3 a disk in maintenance is on no node", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("maintenance"))}, codes.OK, "", ""},
		{"CU-4 a deleted disk", []racktest.Exchange{lost.To(detach), lost.To(racktest.ViewDisk),
			ok(viewProject, racktest.ProjectOf())}, codes.OK, "", ""},
		{"CU-4 a disk that cannot be seen", []racktest.Exchange{lost.To(detach),
			lost.To(racktest.ViewDisk),
			lost.To(viewProject)}, codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"CU-5 a deleted instance", []racktest.Exchange{lost.To(detach), ok(racktest.ViewDisk,
			racktest.DiskOf("detached"))},
			codes.OK, "", ""},
		{"CU-5 a deleted instance whose disk is elsewhere", []racktest.Exchange{lost.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf(elsewhere))}, codes.OK, "", ""},
		{"CU-10 a faulted disk is looked for among those of the instance", []racktest.Exchange{
			not.To(detach), ok(racktest.ViewDisk, racktest.DiskOf("faulted")), ok(beside,
				racktest.PageOf(""))}, codes.OK, "",
			""},
		{"CU-10 a faulted disk that the instance still lists", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("faulted")), ok(beside, racktest.PageOf("",
				racktest.DiskOf("faulted")))},
			codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk that is faulted by its detach", []racktest.Exchange{
			accepted(detach, racktest.DiskOf("faulted")), ok(beside, racktest.PageOf("x",
				racktest.DiskOf("faulted",
					racktest.With("id", racktest.Image)))), ok(beside, racktest.PageOf(""))}, codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance does not tell", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("faulted")),
			racktest.Error(503, "ServiceNotAvailable", "Service Unavailable").To(beside)},
			codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a faulted disk whose instance is gone", []racktest.Exchange{lost.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("faulted")), lost.To(beside), ok(viewProject,
				racktest.ProjectOf())},
			codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance cannot be seen", []racktest.Exchange{lost.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("faulted")), lost.To(beside), lost.To(viewProject)},
			codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"CU-10 a disk still on its way off", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("detaching "+racktest.Instance))}, codes.Aborted,
			csierr.DiskBusy,
			"detaching"},
		{"CU-10 a disk that the rack attaches again on its way off", []racktest.Exchange{
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)), ok(racktest.ViewDisk,
				racktest.DiskOf(here))},
			codes.Internal, csierr.RackAnswerWrong, "still attached"},
		{"CU-10 a page of somebody else's in place of the answer", []racktest.Exchange{{Want: detach,
			Status: 202, Body: "<html>"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a 404 of somebody else's", []racktest.Exchange{{Want: detach, Status: 404,
			Body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"CU-10 a 404 of somebody else's at the look", []racktest.Exchange{not.To(detach),
			{Want: racktest.ViewDisk,
				Status: 404, Body: "<html>"}}, codes.Internal, csierr.RackUnknown, ""},
		{"CU-6 an instance that the rack calls destroyed and that has the disk", []racktest.Exchange{
			lost.To(detach), ok(racktest.ViewDisk, racktest.DiskOf(here)), ok(viewInstance,
				racktest.InstanceOf("destroyed"))}, codes.NotFound, csierr.InstanceNotFound, "unpublished"},
		{"CU-6 a deleted instance that still has the disk", []racktest.Exchange{lost.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf(here)), lost.To(viewInstance)}, codes.NotFound,
			csierr.InstanceNotFound,
			"unpublished"},
		{"CU-7 a running instance without hot-plug", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf(here)), ok(viewInstance, racktest.InstanceOf("running"))},
			codes.FailedPrecondition, csierr.InstanceMustBeStopped, "must be stopped"},
		{"CU-8 the boot disk", []racktest.Exchange{racktest.Error(409, "Conflict",
			"boot disk cannot be detached").
			To(detach), ok(racktest.ViewDisk, racktest.DiskOf(here)), ok(viewInstance,
			racktest.InstanceOf("stopped",
				racktest.With("boot_disk_id", racktest.Disk)))}, codes.FailedPrecondition, csierr.BootDisk,
			"worker-1"},
		{"CU-9 a disk on its way on", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("attaching "+racktest.Instance))}, codes.Aborted,
			csierr.DiskBusy,
			"attaching"},
		{"CU-10 a disk on its way off is awaited", []racktest.Exchange{
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)),
			ok(racktest.ViewDisk, racktest.DiskOf("detaching "+racktest.Instance)), ok(racktest.ViewDisk,
				racktest.DiskOf("detached"))},
			codes.OK, "", ""},
		{"a success that is none", []racktest.Exchange{accepted(detach, racktest.DiskOf(here))},
			codes.Internal,
			csierr.RackAnswerWrong, "still attached"},
		{"another disk's success", []racktest.Exchange{accepted(detach, racktest.DiskOf("detached",
			racktest.With("id", racktest.Image)))}, codes.Internal, csierr.RackAnswerWrong, racktest.Image},
		{"a lost answer", []racktest.Exchange{{Want: detach, Cut: true}}, codes.Unavailable,
			csierr.RackUnavailable, ""},
		{"an attached disk of which the rack does not say where", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("attached"))}, codes.Internal, csierr.RackAnswerWrong,
			"no instance"},
		{"a refusal, and another disk than was asked about", []racktest.Exchange{not.To(detach),
			ok(racktest.ViewDisk, racktest.DiskOf("detached", racktest.With("id", racktest.Image)))},
			codes.Internal,
			csierr.RackAnswerWrong, racktest.Image},
		{"OX-6 a disk that cannot be seen any more on its way off", []racktest.Exchange{
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)), lost.To(racktest.ViewDisk),
			lost.To(viewProject)}, codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"a disk that is deleted on its way off", []racktest.Exchange{
			accepted(detach, racktest.DiskOf("detaching "+racktest.Instance)), lost.To(racktest.ViewDisk),
			ok(viewProject, racktest.ProjectOf())}, codes.OK, "", ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk, NodeId: racktest.Instance})
			s.verify(t, err)
		})
	}
}

func TestCU2UnpublishingFromWherever(t *testing.T) {
	for _, s := range []scene{
		{"it is", []racktest.Exchange{ok(racktest.ViewDisk, racktest.DiskOf(here)), accepted(detach,
			racktest.DiskOf("detached"))},
			codes.OK, "", ""},
		{"it is not", []racktest.Exchange{ok(racktest.ViewDisk, racktest.DiskOf("detached"))}, codes.OK,
			"", ""},
		{"it was before it was deleted", []racktest.Exchange{lost.To(racktest.ViewDisk), ok(viewProject,
			racktest.ProjectOf())},
			codes.OK, "", ""},
		{"it is, and somebody attaches it elsewhere meanwhile", []racktest.Exchange{ok(racktest.ViewDisk,
			racktest.DiskOf(here)), accepted(detach, racktest.DiskOf(elsewhere))}, codes.Aborted,
			csierr.DiskBusy, ""},
		{"it was, and is gone", []racktest.Exchange{ok(racktest.ViewDisk, racktest.DiskOf(here)),
			lost.To(detach),
			lost.To(racktest.ViewDisk), ok(viewProject, racktest.ProjectOf())}, codes.OK, "", ""},
		{"it is being snapshotted, and so is nowhere", []racktest.Exchange{ok(racktest.ViewDisk,
			racktest.DiskOf("maintenance"))}, codes.OK, "", ""},
		{"nobody can say, for it is faulted", []racktest.Exchange{ok(racktest.ViewDisk,
			racktest.DiskOf("faulted"))},
			codes.FailedPrecondition, csierr.DiskFaulted, ""},
		{"the rack does not say where", []racktest.Exchange{ok(racktest.ViewDisk,
			racktest.DiskOf("attached"))},
			codes.Internal, csierr.RackAnswerWrong, "no instance"},
	} {
		t.Run(s.name, func(t *testing.T) {
			_, err := rackThat(t, s.lines...).ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: racktest.Disk})
			s.verify(t, err)
		})
	}
}
