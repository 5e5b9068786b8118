//go:build linux

package sanity

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// onRackWith starts the simulated rack with a mode of hot-plug and behaviours of the prototype.
func onRackWith(mode adminapi.Hotplug, behaviours ...adminapi.Hotplug) string {
	return "--hotplug=" + string(mode.With(behaviours...))
}

var _ = describeNodes("a rack that attaches to running instances, and detaches from none",
	func(f *nodeFixture) {
		DescribeTable("NS-5 D-61 a volume that is attached without a device is found, and heals",
			func(ctx SpecContext, heal func(context.Context, *placement)) {
				volume := f.created(ctx, harness.CreateRequest(fresh("no-device")))
				f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
					Device: &adminapi.DeviceFault{Fails: true}})
				var p *placement
				operations := f.calls(ctx, func() { p = f.onceAttached(ctx, volume, f.impatientNode(ctx)) })
				Expect(slices.DeleteFunc(operations, func(operation string) bool {
					return operation != "instance_disk_attach"
				})).To(HaveLen(1), "an attach that is recorded is not repeated")
				err := p.stage(ctx)
				expectReason(err, codes.NotFound, "DeviceNotFound")
				Expect(status.Convert(err).Message()).To(And(
					ContainSubstring("recorded an attach and did not carry it out"),
					ContainSubstring("stop the instance and start it again"),
					ContainSubstring("detach the disk while the instance is stopped")))
				d := f.diagnosed(ctx, f.rack.Token, kubernetesOf(p), p.inspected(ctx, volume))
				Expect(d.Chains[0].Finding.Link).To(Equal("device"), "%+v", d)
				Expect(d.Chains[0].Finding.Wrong).To(ContainSubstring("recorded the disk as attached"))
				Expect(d.Chains[0].Finding.Do).To(ContainSubstring("Stop the instance and start it again"))

				heal(ctx, p)
				Expect(p.stage(ctx)).To(Succeed())
				Expect(p.publish(ctx)).To(Succeed())
				p.remove(ctx)
			},
			Entry("NS-5 D-61 when the instance is stopped and started",
				func(ctx context.Context, p *placement) {
					f.stopInstance(ctx, p.Instance.ID)
					f.startInstance(ctx, p.Instance.ID)
				}),
			Entry("NS-5 D-61 when it is detached from the stopped instance and attached again",
				func(ctx context.Context, p *placement) {
					f.stopInstance(ctx, p.Instance.ID)
					Expect(f.unpublish(ctx, p.Volume, "a")).To(Succeed())
					f.startInstance(ctx, p.Instance.ID)
					Expect(f.publish(ctx, p.Volume, "a")).To(Succeed())
				}))
	}, onRackWith(adminapi.HotplugAttachOnly, adminapi.RecordFirst, adminapi.RefusalsAs500))

// onceAttached attaches the volume. At the end of the spec the disk is detached from the stopped
// instance, whatever the spec has done.
func (f *nodeFixture) onceAttached(ctx context.Context, volume *csi.Volume, n *node) *placement {
	GinkgoHelper()
	p := n.placement(volume, harness.Mounted(""))
	DeferCleanup(func(ctx SpecContext) {
		if stateOf(f.disk(ctx, volume.GetVolumeId())) == "attached to "+n.Instance.ID {
			f.detachedAtRest(ctx, volume.GetVolumeId(), n.Instance.ID)
		}
	}, NodeTimeout(callTimeout))
	published, err := f.ctl.ControllerPublishVolume(ctx,
		harness.PublishRequest(volume, n.Instance.ID))
	Expect(err).NotTo(HaveOccurred())
	p.PublishContext = published.GetPublishContext()
	return p
}

// A disk served by FUSE refuses every write once it is cut off. A write that waits while a loop
// device is cut off from a file is acknowledged by a filesystem without a small limit for files,
// such as tmpfs (loopdev.Device.Cut).
var _ = describeOutage("a rack that removes disks by surprise", func(f *nodeFixture) {
	DescribeTable("UP-5 D-61 a detach under a pod that writes loses nothing that fsync acknowledged, "+
		"and is reported", func(ctx SpecContext, name string) {
		p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
		w := p.keepWriting()
		Expect(f.unpublish(ctx, p.Volume, "a")).To(Succeed())
		Eventually(ctx, w.ended).Should(BeClosed(), "the pod learns it from its fsync")
		lines, err := w.stop()
		Expect(err).To(HaveOccurred())
		Expect(lines).NotTo(BeZero())
		Expect(p.complaints(ctx)).To(Equal(
			[]csi.VolumeHealthErrorType{csi.VolumeHealthErrorType_INACCESSIBLE}))
		health, err := p.Node().NodeGetVolumeHealth(ctx,
			&csi.NodeGetVolumeHealthRequest{VolumeId: p.Volume.GetVolumeId()})
		Expect(err).NotTo(HaveOccurred())
		Expect(fmt.Sprint(health)).To(ContainSubstring("DeviceNotFound"))
		p.remove(ctx)

		moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
		moved.holdsLines(lines)
	}, Entry("UP-5 ext4", "ext4"), Entry("UP-5 xfs", "xfs"), Entry("UP-5 btrfs", "btrfs"))
}, "--disks=fuse", onRackWith(adminapi.HotplugFull, adminapi.SurpriseRemoval))

// detachedAtRest detaches the disk from an instance and starts the instance, which is its state
// before the spec.
func (f *rackFixture) detachedAtRest(ctx context.Context, disk, instance string) {
	f.stopInstance(ctx, instance)
	Expect(f.rack.DetachDisk(ctx, disk, instance)).To(Succeed())
	f.startInstance(ctx, instance)
}
