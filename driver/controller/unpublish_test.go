package controller

import (
	"context"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestUnpublishing(t *testing.T) { // OX-3
	refused := script{noDetach, held, instance("running")}
	scriptedCalls{
		{"makes no request to detach a detached disk", script{free}, codes.OK, "", ""},
		{"CU-3 CU-5 attached elsewhere stays there", script{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-3 a disk in maintenance is on no node", script{shown("maintenance")}, codes.OK, "", ""},
		{"CU-4 a deleted disk", gone, codes.OK, "", ""},
		{"CU-4 a disk that cannot be seen", script{noDisk, noProject}, codes.PermissionDenied,
			csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"CU-10 a faulted disk is looked for among those of the instance", script{shown("faulted"),
			alone}, codes.OK, "", ""},
		{"CU-10 a faulted disk that the instance still lists", script{shown("faulted"),
			listing(diskOf("faulted"))}, codes.FailedPrecondition, csierr.DiskFaulted, "still among those"},
		{"CU-10 a faulted disk whose instance does not respond", script{shown("faulted"),
			later.To(beside)}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-10 a faulted disk whose instance is gone", script{shown("faulted"), noInstance, ownProject,
			ownUser, noInstance}, codes.OK, "", ""},
		{"CU-10 a faulted disk whose instance cannot be seen", script{shown("faulted"), noInstance,
			noProject}, codes.PermissionDenied, csierr.ProjectNotFound, ""},
		{"an attached disk without an instance", script{shown("attached")}, codes.Unavailable,
			csierr.RackResponseInvalid, "no instance"},
	}.try(t, unpublishStep, nil)
	scriptedCalls{
		{"looks at the disk and detaches it", script{detachedNow}, codes.OK, "", ""},
		{"CU-4 a disk that is deleted meanwhile", script{racktest.NotFound.To(detach), noDisk, ownProject,
			ownUser, noDisk}, codes.OK, "", ""},
		{"CU-10 a disk that is faulted by its detach", script{accepted(detach, diskOf("faulted")),
			racktest.OK(beside, pageOf("x", diskOf("faulted", with("id", racktest.Image))))}, codes.OK, "",
			""},
		{"CU-10 a proxy's page instead of the response", script{{Want: detach, Status: 202,
			Body: "<html>"}}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-6 an instance that the rack calls destroyed and that has the disk",
			script{racktest.NotFound.To(detach), held, instance("destroyed")}, codes.NotFound,
			csierr.InstanceNotFound, "not known to be detached"},
		{"CU-6 a deleted instance that still has the disk", script{racktest.NotFound.To(detach), held,
			racktest.NotFound.To(viewInstance)}, codes.NotFound, csierr.InstanceNotFound,
			"not known to be detached"},
		{"CU-8 the boot disk", script{racktest.Error(409, "Conflict",
			"boot disk cannot be detached").To(detach), held, instance("stopped", with("boot_disk_id",
			racktest.Disk))}, codes.FailedPrecondition, csierr.BootDisk, "worker-1"},
		{"a success with a detached disk", script{accepted(detach, diskOf(here))}, codes.Unavailable,
			csierr.RackResponseInvalid, "still attached"},
		{"another disk's success", script{accepted(detach, diskOf("detached", with("id",
			racktest.Image)))}, codes.Unavailable, csierr.RackResponseInvalid, racktest.Image},
		{"a lost response", script{lostDetach}, codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-7 a running instance without hot-plug", slices.Concat(refused, refused),
			codes.FailedPrecondition, csierr.InstanceMustBeStopped, "must be stopped"},
		{"CU-7 a detach that the rack accepts at the second request", append(refused, detachedNow),
			codes.OK, "", ""},
	}.after(held).try(t, unpublishStep, nil)
	scriptedCalls{
		{"CU-3 attached elsewhere meanwhile stays there", script{shown(elsewhere)}, codes.OK, "", ""},
		{"CU-10 a disk that is faulted meanwhile and that the instance still lists",
			script{shown("faulted"), listing(diskOf("faulted"))}, codes.FailedPrecondition,
			csierr.DiskFaulted, "still among those"},
		{"CU-10 a disk still on its way off", script{shown(detaching)}, codes.Aborted, csierr.DiskBusy,
			"detaching"},
		{"a refusal, after which the disk cannot be read", script{later.To(racktest.ViewDisk)},
			codes.Unavailable, csierr.RackUnavailable, ""},
		{"CU-9 a disk on its way on", script{shown(attaching)}, codes.Aborted, csierr.DiskBusy,
			"attaching"},
	}.after(held, noDetach).try(t, unpublishStep, nil)
	scriptedCalls{
		{"CU-10 a disk that the rack attaches again on its way off", script{held}, codes.Unavailable,
			csierr.RackResponseInvalid, "still attached"},
		{"CU-10 a disk on its way off is awaited", script{shown(detaching), free}, codes.OK, "", ""},
		{"OX-6 a disk that cannot be seen any more on its way off", script{noDisk, noProject},
			codes.PermissionDenied, csierr.ProjectNotFound, "OXIDE_PROJECT"},
		{"a disk that is deleted on its way off", gone, codes.OK, "", ""},
	}.after(held, detachingNow).try(t, unpublishStep, nil)
}

func TestCU2UnpublishingWithoutANode(t *testing.T) { // CU-2
	scriptedCalls{
		{"it is", script{held, detachedNow}, codes.OK, "", ""},
		{"it is not", script{free}, codes.OK, "", ""},
		{"it is, and is attached elsewhere meanwhile", script{held, accepted(detach, diskOf(elsewhere))},
			codes.Aborted, csierr.DiskBusy, ""},
		{"it was, and is gone", script{held, racktest.NotFound.To(detach), noDisk, ownProject, ownUser,
			noDisk}, codes.OK, "", ""},
		{"it is being snapshotted, and so is nowhere", script{shown("maintenance")}, codes.OK, "", ""},
		{"it is unknown, because the disk is faulted", script{shown("faulted")}, codes.FailedPrecondition,
			csierr.DiskFaulted, ""},
	}.try(t, unpublishAnywhereStep, nil)
}

func TestACallEndsInTimeWhileTheRackStillMovesTheDisk(t *testing.T) { // CP-15, CU-10
	for _, test := range []struct {
		request proto.Message
		lines   script
	}{
		{publishStep, script{alone, free, attachingNow}},
		{unpublishStep, script{held, detachingNow}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), answerMargin)
		defer cancel()
		csitest.Want(t, csitest.Call(ctx, rackThat(t, test.lines...), test.request),
			codes.DeadlineExceeded, csierr.DeadlineExceeded)
	}
}
