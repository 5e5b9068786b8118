//go:build linux

package sanity

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"time"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// expectReason demands an error with that code whose message begins with that reason.
func expectReason(err error, code codes.Code, reason string) {
	GinkgoHelper()
	expectRefusal(err, code)
	Expect(harness.ReasonOf(status.Convert(err))).To(Equal(reason), "%v", err)
}

// Most reasons happen in the specs of the call that gives them. Here are those that take a special
// effort; the suite as a whole is held to bring about every one.
var _ = describeController("a reason that the rack causes", fixtureOptions{}, func(f *fixture) {
	attach := func(ctx context.Context, volume *csi.Volume) error {
		_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume,
			f.rack.Instance("a").ID))
		return err
	}

	It("CP-10 InstanceState: the instance is in a state without attach", func(ctx SpecContext) {
		volume, instance := f.volume(ctx), f.rack.Instance("a").ID
		failed := f.rackJSON(ctx, "/v1/instances/"+instance, nil)
		failed["run_state"] = "failed"
		f.refuse(ctx, "instance_disk_attach", volume.GetVolumeId(), http.StatusBadRequest,
			"InvalidRequest", "cannot attach disk to instance in failed state")
		f.answer(ctx, "instance_view", instance, failed)
		expectReason(attach(ctx, volume), codes.FailedPrecondition, "InstanceState")
	})

	It("CV-14 ImageNotFound: the rack has no such image", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("pictured"))
		req.Parameters = map[string]string{"imageId": someUUID}
		_, err := f.ctl.CreateVolume(ctx, req)
		expectReason(err, codes.InvalidArgument, "ImageNotFound")
	})

	It("OX-6 ObjectNotFound: the rack does not know what a listing is of", func(ctx SpecContext) {
		f.refuse(ctx, "disk_list", "", http.StatusNotFound, "ObjectNotFound", "not found: something")
		_, err := f.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
		expectReason(err, codes.NotFound, "ObjectNotFound")
	})

	It("OX-1 NameTaken: the rack speaks of a name where none was given", func(ctx SpecContext) {
		volume := f.volume(ctx)
		f.refuse(ctx, "disk_delete", volume.GetVolumeId(), http.StatusBadRequest,
			"ObjectAlreadyExists", "already exists: something")
		_, err := f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
		expectReason(err, codes.AlreadyExists, "NameTaken")
	})

	It("OX-12 RackResponseInvalid: the rack answers with another disk", func(ctx SpecContext) {
		volume, other := f.volume(ctx), f.volume(ctx)
		f.answer(ctx, "disk_view", volume.GetVolumeId(),
			f.rackJSON(ctx, "/v1/disks/"+other.GetVolumeId(), nil))
		_, err := f.ctl.ControllerGetVolume(ctx,
			&csi.ControllerGetVolumeRequest{VolumeId: volume.GetVolumeId()})
		expectReason(err, codes.Internal, "RackResponseInvalid")
	})
})

var _ = describeNodes("a reason that the node's devices cause", func(f *nodeFixture) {
	It("NS-6 DeviceChanged: the node in /dev is another device's", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		other := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		device, aside := p.device(), p.device()+".aside"
		Expect(os.Rename(device, aside)).To(Succeed())
		DeferCleanup(func() { Expect(os.Rename(aside, device)).To(Succeed()) })
		Expect(os.Link(other.device(), device)).To(Succeed())
		brief := f.impatientNode(ctx).placement(p.Volume, p.Capability)
		brief.PublishContext = p.PublishContext
		expectReason(brief.stage(ctx), codes.FailedPrecondition, "DeviceChanged")
	})

	It("NS-8 DeviceHeld: the volume is staged at another path", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		elsewhere := p.placement(p.Volume, p.Capability)
		elsewhere.PublishContext = p.PublishContext
		expectReason(elsewhere.stage(ctx), codes.FailedPrecondition, "DeviceHeld")
	})

	It("NS-6 DeviceDiffers: the device's blocks are not the disk's", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		p.Volume = &csi.Volume{VolumeId: p.Volume.GetVolumeId()}
		p.PublishContext["blockSize"] = "512"
		expectReason(p.stage(ctx), codes.FailedPrecondition, "DeviceDiffers")
	})

	It("NS-8 DeviceLocked: another process of the driver works on the device",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			lock, err := f.a.LockVolumes()
			Expect(err).NotTo(HaveOccurred())
			defer lock.Close()
			expectReason(p.stage(ctx), codes.Aborted, "DeviceLocked")
			Expect(lock.Close()).To(Succeed())
			Expect(p.stage(ctx)).To(Succeed())
		})

	DescribeTable("NS-8 UseDiffers: the volume was created for another use",
		func(ctx SpecContext, created, wanted *csi.VolumeCapability) {
			p := f.attachedTo(ctx, f.volume(ctx, created), f.a, created)
			p.Capability = wanted
			expectReason(p.stage(ctx), codes.FailedPrecondition, "UseDiffers")
			expectReason(p.publish(ctx), codes.FailedPrecondition, "UseDiffers")
			Expect(blank(edges(p.device()))).To(BeTrue(), "it was formatted all the same")
		},
		Entry("UseDiffers for filesystems", harness.Mounted(""), harness.Raw()),
		Entry("UseDiffers for raw use", harness.Raw(), harness.Mounted("")))

	It("NS-8 UseUnknown: no controller allows raw use of a static disk", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		p.PublishContext, p.Capability = nil, harness.Raw()
		expectReason(p.stage(ctx), codes.FailedPrecondition, "UseUnknown")
		expectReason(p.publish(ctx), codes.FailedPrecondition, "UseUnknown")
	})

	It("NS-10 DiskProofPending: reading the disk whole takes longer than the call waits",
		func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("large"))
			req.CapacityRange.RequiredBytes = 200 * harness.GiB
			req.VolumeCapabilities = append(req.VolumeCapabilities, harness.Raw())
			p := f.attachedTo(ctx, f.created(ctx, req), f.a, harness.Mounted(""))
			// The driver answers when a tenth of it is left, which a busy machine needs.
			brief, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			expectReason(p.stage(brief), codes.Aborted, "DiskProofPending")
			Expect(blank(edges(p.device()))).To(BeTrue(), "it was formatted all the same")
		})

	It("NP-9 DeviceReadOnly: a blank disk that cannot be written", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		p.PublishContext["readOnly"] = "true"
		expectReason(p.stage(ctx), codes.FailedPrecondition, "DeviceReadOnly")
	})

	It("NS-10 DiskSizeUnknown: the size of the blank disk is not in the request",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			delete(p.PublishContext, "sizeBytes")
			expectReason(p.stage(ctx), codes.FailedPrecondition, "DiskSizeUnknown")
			Expect(blank(edges(p.device()))).To(BeTrue(), "it was formatted all the same")
		})

	It("NS-10 DeviceUnreadable: the disk answers reads with errors", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		var st unix.Stat_t
		Expect(unix.Stat(p.device(), &st)).To(Succeed())
		file, err := harness.BackingFile(st.Rdev)
		Expect(err).NotTo(HaveOccurred())
		Expect(os.Truncate(file, harness.GiB/2)).To(Succeed())
		DeferCleanup(func() { Expect(os.Truncate(file, harness.GiB)).To(Succeed()) })
		expectReason(p.stage(ctx), codes.FailedPrecondition, "DeviceUnreadable")
	})

	It("NS-10 WrongFilesystem: the disk holds another filesystem than the volume's",
		func(ctx SpecContext) {
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			out, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-U", someUUID, p.device()).
				CombinedOutput()
			Expect(err).NotTo(HaveOccurred(), string(out))
			before := edges(p.device())
			err = p.stage(ctx)
			expectReason(err, codes.FailedPrecondition, "WrongFilesystem")
			Expect(err.Error()).To(And(ContainSubstring(someUUID),
				ContainSubstring(p.Volume.GetVolumeId())))
			Expect(edges(p.device()) == before).To(BeTrue(), "the disk was written")
		})

	It("NS-13 FilesystemFeature: the filesystem has a feature that nobody knows",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
			p.remove(ctx)
			out, err := exec.CommandContext(ctx, "debugfs", "-w", "-R", "ssv feature_compat 0x2000",
				p.device()).CombinedOutput()
			Expect(err).NotTo(HaveOccurred(), string(out))
			before := edges(p.device())
			err = p.stage(ctx)
			expectReason(err, codes.FailedPrecondition, "FilesystemFeature")
			Expect(err.Error()).To(ContainSubstring("s_feature_compat: 0x2000"))
			Expect(edges(p.device()) == before).To(BeTrue(), "the disk was written")
		})

	It("NS-13 FilesystemTooLarge: the filesystem claims more than the disk has",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.detached(ctx, f.inUse(ctx, volume, f.a, harness.Mounted("")))
			f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
				Device: &adminapi.DeviceFault{SizeBytes: harness.GiB / 2}})
			p := f.attachedTo(ctx, volume, f.a, harness.Mounted(""))
			p.PublishContext["sizeBytes"] = "536870912"
			expectReason(p.stage(ctx), codes.FailedPrecondition, "FilesystemTooLarge")
		})

	It("NS-11 FilesystemDamaged: its check finds what it may not repair", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		p.remove(ctx)
		for _, damage := range []string{"clri <2>", "ssv state 2"} {
			out, err := exec.CommandContext(ctx, "debugfs", "-w", "-R", damage, p.device()).
				CombinedOutput()
			Expect(err).NotTo(HaveOccurred(), string(out))
		}
		expectReason(p.stage(ctx), codes.Internal, "FilesystemDamaged")
	})

	It("NP-5 FilesystemFailed: the kernel has shut the filesystem down", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("xfs"))
		Expect(p.stage(ctx)).To(Succeed())
		shutDown(p.Staging)
		expectReason(p.publish(ctx), codes.FailedPrecondition, "FilesystemFailed")
	})

	It("NS-15 MountFlagsUnsupported: a flag that no volume may have", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		p.Capability = harness.Mounted("ext4", "bind")
		expectReason(p.stage(ctx), codes.FailedPrecondition, "MountFlagsUnsupported")
	})
})

// shutDown makes the kernel give up the ext4 or xfs filesystem that is mounted there, as it does
// after an error in its metadata.
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
