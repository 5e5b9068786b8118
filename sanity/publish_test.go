//go:build linux

package sanity

import (
	"context"
	"errors"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("an attachment", fixtureOptions{}, func(f *fixture) {
	describeAttachPlaces(f)
	describeAttachDoubt(f)
	describeDetach(f)
})

func describeAttachPlaces(f *fixture) {
	It("CP-6 attaching again where it is attached is a success with the same context",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			first := f.published(ctx, volume, "a")
			Expect(first).To(HaveKeyWithValue("diskName", volume.GetVolumeContext()["diskName"]))
			Expect(f.published(ctx, volume, "a")).To(Equal(first))
		})

	It("CP-8 a volume of another node stays there, and that node is named",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			f.published(ctx, volume, "a")
			there := f.rack.Instance("a").ID
			_, err := f.ctl.ControllerPublishVolume(ctx,
				harness.PublishRequest(volume, f.rack.Instance("b").ID))
			expectRefusal(err, codes.FailedPrecondition, there)
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("attached to " + there))
		})

	It("CP-9 the limit is the rack's, as the operator configures it", func(ctx SpecContext) {
		f.switched(ctx, "disk_limit", 1, 12)
		p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{"OXIDE_MAX_DISKS": "1"}})
		f.published(ctx, f.volume(ctx), "b")
		_, err := p.Controller().ControllerPublishVolume(ctx,
			harness.PublishRequest(f.volume(ctx), f.rack.Instance("b").ID))
		expectRefusal(err, codes.ResourceExhausted)
	})

	It("D-2 a static volume needs nothing but the UUID of its disk", func(ctx SpecContext) {
		name := fresh("static")
		disk := f.rackDisk(ctx, name, f.rack.Project)
		published := f.published(ctx, &csi.Volume{VolumeId: disk.Id}, "a")
		Expect(published).To(HaveKeyWithValue("diskName", name))
		f.awaitDevice(ctx, "a", name)
	})
}

// describeAttachDoubt registers specs about calls that get no answer.
func describeAttachDoubt(f *fixture) {
	It("CP-15 a repeated publish continues after a deadline", func(ctx SpecContext) {
		volume := f.volume(ctx)
		node := f.rack.Instance("a").ID
		f.fault(ctx,
			adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After,
				Hang: adminapi.Duration(1500 * time.Millisecond), Times: 1})
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := f.ctl.ControllerPublishVolume(short, harness.PublishRequest(volume, node))
		expectRefusal(err, codes.DeadlineExceeded)
		eventually(ctx, func() error {
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			if err != nil && codeOf(err) != codes.Aborted {
				Expect(err).NotTo(HaveOccurred())
			}
			return err
		})
		f.unpublishedLater(volume, node)
		Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
	})
}

// attached returns the rack's list of an instance's disks.
func (f *rackFixture) attached(ctx context.Context, instance string) []string {
	GinkgoHelper()
	disks, err := f.rack.Client.InstanceDiskListAllPages(ctx, oxide.InstanceDiskListParams{
		Instance: oxide.NameOrId(f.rack.Instance(instance).ID)})
	Expect(err).NotTo(HaveOccurred())
	ids := []string{}
	for _, disk := range disks {
		ids = append(ids, disk.Id)
	}
	return ids
}

// describeDetach registers specs about the end of attachments.
func describeDetach(f *fixture) {
	It("CU-8 a detach of the boot disk is refused", func(ctx SpecContext) {
		volume := f.volume(ctx)
		instance := f.rack.Instance("b")
		f.published(ctx, volume, "b")
		f.stopInstance(ctx, instance.ID)
		boot := oxide.NameOrId(volume.GetVolumeId())
		f.setBootDisk(ctx, instance.ID, &boot)
		DeferCleanup(func(ctx SpecContext) {
			f.setBootDisk(ctx, instance.ID, nil)
			f.startInstance(ctx, instance.ID)
		}, NodeTimeout(callTimeout))
		_, err := f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, instance.ID))
		expectRefusal(err, codes.FailedPrecondition, "boot disk")
		Expect(f.attached(ctx, "b")).To(ConsistOf(volume.GetVolumeId()))
	})

	It("CU-9 B-10 a detach gets OK after an attach that took effect although its caller gave up",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			slow := f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach",
				Phase: adminapi.Before, Delay: adminapi.Duration(time.Second), Times: 1})
			impatient, leave := context.WithCancel(ctx)
			given := inBackground(func() (codes.Code, error) {
				return codeOf(f.publish(impatient, volume, "a")), nil
			})
			eventually(ctx, func() error {
				fired, err := f.rack.Admin.Fired(ctx, slow)
				if err == nil && fired == 0 {
					err = errors.New("the rack has no attach yet")
				}
				return err
			})
			leave()
			Expect(given()).To(Equal(codes.Canceled))
			Expect(f.calls(ctx, func() {
				eventually(ctx, func() error { return f.unpublish(ctx, volume, "a") })
			})).To(ContainElement("instance_disk_attach"))
			f.remains(ctx, volume, "detached")
		})
}

func (f *rackFixture) setBootDisk(ctx context.Context, id string, disk *oxide.NameOrId) {
	GinkgoHelper()
	instance, err := f.rack.Client.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	Expect(err).NotTo(HaveOccurred())
	_, err = f.rack.Client.InstanceUpdate(ctx, oxide.InstanceUpdateParams{
		Instance: oxide.NameOrId(id),
		Body: &oxide.InstanceUpdate{
			BootDisk: disk, Memory: instance.Memory, Ncpus: instance.Ncpus,
			EnableJumboFrames: oxide.NewPointer(false),
		},
	})
	Expect(err).NotTo(HaveOccurred())
}
