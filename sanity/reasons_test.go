//go:build linux

package sanity

import (
	"context"
	"net/http"
	"os"
	"time"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// expectReason demands an error with that code whose message begins with that reason.
func expectReason(err error, code codes.Code, reason string) {
	GinkgoHelper()
	expectRefusal(err, code)
	Expect(harness.ReasonOf(status.Convert(err))).To(Equal(reason), "%v", err)
}

var onTwoProjects = fixtureOptions{rack: withOtherProject}

// Most reasons are caused in the specs of the call that returns them, and those of a node in the
// doctor's situations. These specs cause the others. The suite as a whole must cause every
// reason.
var _ = describeController("a reason that the rack causes", onTwoProjects, func(f *fixture) {
	It("CP-10 InstanceState: the instance is in a state without attach", func(ctx SpecContext) {
		volume, instance := f.volume(ctx), f.rack.Instance("a").ID
		failed := f.rackJSON(ctx, "/v1/instances/"+instance, nil)
		failed["run_state"] = "failed"
		f.refuse(ctx, "instance_disk_attach", volume.GetVolumeId(), http.StatusBadRequest,
			"InvalidRequest", "cannot attach disk to instance in failed state")
		f.answer(ctx, "instance_view", instance, failed)
		expectReason(f.publish(ctx, volume, "a"), codes.FailedPrecondition, "InstanceState")
	})

	It("CP-9 InstanceFull: the instance has all disks that the rack allows", func(ctx SpecContext) {
		f.switched(ctx, "disk_limit", 1, 12)
		p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{"OXIDE_MAX_DISKS": "1"}})
		f.published(ctx, f.volume(ctx), "b")
		_, err := p.Controller().ControllerPublishVolume(ctx,
			harness.PublishRequest(f.volume(ctx), f.rack.Instance("b").ID))
		expectReason(err, codes.ResourceExhausted, "InstanceFull")
	})

	It("CU-8 BootDisk: the instance's boot disk is not detached", func(ctx SpecContext) {
		volume, instance := f.volume(ctx), f.rack.Instance("a").ID
		f.published(ctx, volume, "a")
		booted := f.rackJSON(ctx, "/v1/instances/"+instance, nil)
		booted["boot_disk_id"] = volume.GetVolumeId()
		f.refuse(ctx, "instance_disk_detach", "", http.StatusConflict, "Conflict",
			"boot disk cannot be detached")
		f.answer(ctx, "instance_view", instance, booted)
		expectReason(f.unpublish(ctx, volume, "a"), codes.FailedPrecondition, "BootDisk")
	})

	It("DV-3 DiskAttached: an attached disk is neither deleted nor detached", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		expectReason(f.delete(ctx, volume.GetVolumeId()), codes.FailedPrecondition, "DiskAttached")
		f.remains(ctx, volume, "attached to "+f.rack.Instance("a").ID)
	})

	It("CS-10 DiskImporting: the disk's import was not finalized", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.pretend(ctx, volume, "import_ready", "")
		_, err := f.ctl.CreateSnapshot(ctx,
			harness.SnapshotRequest(fresh("imported"), volume.GetVolumeId()))
		expectReason(err, codes.FailedPrecondition, "DiskImporting")
	})

	It("CV-16 SnapshotFaulted: the rack failed to take the snapshot", func(ctx SpecContext) {
		id := f.snapshotted(ctx, f.volume(ctx)).GetSnapshotId()
		snapshot := f.rackJSON(ctx, "/v1/snapshots/"+id, nil)
		snapshot["state"] = "faulted"
		f.answer(ctx, "snapshot_view", id, snapshot)
		expectReason(f.create(ctx, harness.FromSnapshot(harness.CreateRequest(fresh("faulted")), id)),
			codes.FailedPrecondition, "SnapshotFaulted")
	})

	It("CV-14 ImageNotFound: the rack has no such image", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("pictured"))
		req.Parameters = map[string]string{"imageId": someUUID}
		expectReason(f.create(ctx, req), codes.InvalidArgument, "ImageNotFound")
	})

	DescribeTable("the rack refuses a request",
		func(ctx SpecContext, status int, errorCode string, code codes.Code, reason string) {
			f.refuse(ctx, "disk_list", "", status, errorCode, errorCode)
			_, err := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
			expectReason(err, code, reason)
		},
		Entry("OX-1 NameTaken", http.StatusBadRequest, "ObjectAlreadyExists", codes.AlreadyExists,
			"NameTaken"),
		Entry("OX-2 ValueRefused", http.StatusBadRequest, "InvalidValue", codes.OutOfRange,
			"ValueRefused"),
		Entry("OX-5 RoleMissing", http.StatusForbidden, "Forbidden", codes.PermissionDenied,
			"RoleMissing"),
		Entry("OX-6 ObjectNotFound", http.StatusNotFound, "ObjectNotFound", codes.NotFound,
			"ObjectNotFound"),
		Entry("OX-7 Conflict", http.StatusConflict, "Conflict", codes.FailedPrecondition, "Conflict"),
		Entry("OX-12 RackError", http.StatusTeapot, "Teapot", codes.Internal, "RackError"),
	)

	It("CP-11 OtherProject: a disk of another project is not attached", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("foreign"), otherProject)
		err := f.publish(ctx, &csi.Volume{VolumeId: disk.Id}, "a")
		expectReason(err, codes.InvalidArgument, "OtherProject")
	})

	It("D-69 DiskNotOurs: a disk made by hand is not deleted", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("by-hand"), f.rack.Project)
		expectReason(f.delete(ctx, disk.Id), codes.FailedPrecondition, "DiskNotOurs")
	})

	It("DV-2 ProjectChanged: another project has the name by now", func(ctx SpecContext) {
		project := f.rackJSON(ctx, "/v1/projects/"+f.rack.Project, nil)
		project["id"] = someUUID
		f.answer(ctx, "project_view", "", project)
		expectReason(f.delete(ctx, someUUID), codes.FailedPrecondition, "ProjectChanged")
	})

	It("B-10 LookTooOld: the look that allows a deletion took too long", func(ctx SpecContext) {
		volume := f.volume(ctx)
		p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{
			"OXIDE_LOOK_LIMIT": "50ms"}})
		f.fault(ctx, adminapi.Fault{Operation: "disk_view", Times: 1,
			Delay: adminapi.Duration(100 * time.Millisecond)})
		_, err := p.Controller().DeleteVolume(ctx,
			&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
		expectReason(err, codes.Aborted, "LookTooOld")
		f.remains(ctx, volume, "detached")
	})

	It("CP-3 ReadOnlyUnsupported: a disk cannot be attached read-only", func(ctx SpecContext) {
		req := harness.PublishRequest(&csi.Volume{VolumeId: someUUID}, someUUID)
		req.Readonly = true
		_, err := f.ctl.ControllerPublishVolume(ctx, req)
		expectReason(err, codes.InvalidArgument, "ReadOnlyUnsupported")
	})

	It("CU-10 DeadlineExceeded: the rack is still detaching the disk", func(ctx SpecContext) {
		volume, node := f.volume(ctx), f.rack.Instance("a").ID
		f.published(ctx, volume, "a")
		disk := f.rackJSON(ctx, "/v1/disks/"+volume.GetVolumeId(), nil)
		disk["state"] = diskState("detaching", node)
		f.answer(ctx, "instance_disk_detach", "", disk)
		f.pretend(ctx, volume, "detaching", node)
		// The driver answers half a second before the deadline.
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		expectReason(f.unpublish(short, volume, "a"), codes.DeadlineExceeded, "DeadlineExceeded")
	})
})

// shutDown makes the kernel shut down the ext4 or xfs filesystem that is mounted at the path, as
// it does after an error in the metadata.
func shutDown(path string) {
	GinkgoHelper()
	const goingDown = 0x8004587d // EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
	dir, err := os.Open(path)
	Expect(err).NotTo(HaveOccurred())
	defer dir.Close()
	var flags uint32
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), goingDown, uintptr(unsafe.Pointer(&flags)))
	Expect(errno).To(BeZero())
}
