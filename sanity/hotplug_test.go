//go:build linux

package sanity

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeNodes("the doctor on a rack that records an attach first", func(f *nodeFixture) {
	It("explains a volume that is attached without a device (NS-5, D-61)", func(ctx SpecContext) {
		volume := f.volume(ctx)
		impatient := f.node(ctx, "a", harness.PluginOptions{Args: []string{"--device-timeout=500ms"}})
		f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
			Device: &adminapi.DeviceFault{Fails: true}})
		p := f.attachedTo(ctx, volume, impatient, harness.Mounted(""))
		expectReason(p.stage(ctx), codes.NotFound, "DeviceNotFound")
		d := f.diagnosed(ctx, f.rack.Token, kubernetesOf(p), p.inspected(ctx, volume))
		Expect(d.Chains[0].Finding.Link).To(Equal("device"), "%+v", d)
		Expect(d.Chains[0].Finding.Wrong).To(ContainSubstring("recorded the disk as attached"))
		Expect(d.Chains[0].Finding.Do).To(ContainSubstring("Stop the instance and start it again"))
	})
}, "--hotplug="+string(adminapi.HotplugFull.With(adminapi.RecordFirst)))

// FUSE serves the disks, because it then refuses every write to a disk that is cut off. If a loop
// device is cut off from a file on tmpfs, a write that is waiting is acknowledged
// (loopdev.Device.Cut).
var _ = describeNodes("a rack that removes disks by surprise", func(f *nodeFixture) {
	DescribeTable("a detach under a pod that writes is reported, and keeps what fsync acknowledged "+
		"(UP-5, D-61)", func(ctx SpecContext, name string) {
		p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
		written := p.writeUntilItFails()
		Expect(f.unpublish(ctx, p.Volume, "a")).To(Succeed())
		var lines int
		Eventually(ctx, written).Should(Receive(&lines), "an fsync of the pod fails")
		Expect(lines).NotTo(BeZero())
		var statuses []csi.VolumeHealthErrorType
		for _, entry := range p.health(ctx) {
			Expect(entry.GetReason()).NotTo(BeEmpty())
			statuses = append(statuses, entry.GetStatus())
		}
		Expect(statuses).To(ConsistOf(csi.VolumeHealthErrorType_INACCESSIBLE))
		health, err := p.Node().NodeGetVolumeHealth(ctx,
			&csi.NodeGetVolumeHealthRequest{VolumeId: p.Volume.GetVolumeId()})
		Expect(err).NotTo(HaveOccurred())
		Expect(fmt.Sprint(health)).To(ContainSubstring("DeviceNotFound"))
		p.remove(ctx)

		moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
		moved.holdsLines(lines)
	}, Entry(nil, "ext4"), Entry(nil, "xfs"), Entry(nil, "btrfs"))
}, "--disks=fuse", "--hotplug="+string(adminapi.HotplugFull.With(adminapi.SurpriseRemoval)))
