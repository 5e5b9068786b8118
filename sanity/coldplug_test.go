//go:build linux

package sanity

import (
	"bytes"
	"context"
	"os"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// stoppingRequests are the operations that make a running instance attachable.
var stoppingRequests = []string{"instance_stop", "instance_reboot", "instance_delete",
	"instance_update", "instance_start"}

var _ = describeController("a rack that cannot attach to a running instance",
	fixtureOptions{rack: harness.RackOptions{Hotplug: adminapi.HotplugNone}}, func(f *fixture) {
		BeforeEach(func(ctx SpecContext) {
			Expect(f.instanceState(ctx, f.rack.Instance("a").ID)).
				To(Equal(oxide.InstanceStateRunning))
		})

		It("CP-10 E-28 says that the instance must be stopped, asks once per call, and touches nothing",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				for range 2 {
					operations := f.calls(ctx, func() {
						// The code is final, because nobody will change the instance's state.
						expectRefusal(f.publish(ctx, volume, "a"), codes.FailedPrecondition,
							"instance a ", "running", "must be stopped", "https://")
					})
					for _, operation := range stoppingRequests {
						Expect(operations).NotTo(ContainElement(operation))
					}
					Expect(slices.DeleteFunc(operations, func(operation string) bool {
						return operation != "instance_disk_attach"
					})).To(HaveLen(1))
				}
				Expect(f.instanceState(ctx, f.rack.Instance("a").ID)).
					To(Equal(oxide.InstanceStateRunning))
				f.remains(ctx, volume, "detached")
			})

		It("CP-10 CU-7 attaches and detaches while the instance is stopped, and detaches nothing while "+
			"it runs", func(ctx SpecContext) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			f.stopInstance(ctx, node)
			DeferCleanup(f.detachedAtRest, volume.GetVolumeId(), node)
			published := expectOK(ctx, f.ctl.ControllerPublishVolume,
				harness.PublishRequest(volume, node))
			name := published.GetPublishContext()["diskName"]
			_, err := f.rack.Instance("a").Device(name)
			Expect(err).To(HaveOccurred(), "a stopped instance has no devices")
			f.startInstance(ctx, node)
			path := f.awaitDevice(ctx, "a", name)
			Expect(f.publish(ctx, volume, "a")).To(Succeed(), "it is attached")
			data := bytes.Repeat([]byte("kept "), 1000)
			writeDevice(path, data)
			operations := f.calls(ctx, func() {
				expectRefusal(f.unpublish(ctx, volume, "a"), codes.FailedPrecondition, "instance a ",
					"running", "must be stopped", "https://")
			})
			for _, operation := range stoppingRequests {
				Expect(operations).NotTo(ContainElement(operation))
			}
			Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
			Expect(readDevice(path, len(data))).To(Equal(data))

			f.stopInstance(ctx, node)
			Expect(f.unpublish(ctx, volume, "a")).To(Succeed())
			f.remains(ctx, volume, "detached")
		})

		It("D-61 attaches as soon as the rack has hot-plug, without a restart of the driver",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				node := f.rack.Instance("a").ID
				_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
				expectRefusal(err, codes.FailedPrecondition)
				f.switched(ctx, "hotplug", adminapi.HotplugFull, adminapi.HotplugNone)
				published := f.published(ctx, volume, "a")
				f.awaitDevice(ctx, "a", published["diskName"])
			})
	})

// detachedAtRest detaches the disk from an instance and starts the instance, which is its state
// before the spec.
func (f *rackFixture) detachedAtRest(ctx context.Context, disk, instance string) {
	f.stopInstance(ctx, instance)
	Expect(f.rack.DetachDisk(ctx, disk, instance)).To(Succeed())
	f.startInstance(ctx, instance)
}

func writeDevice(path string, data []byte) {
	GinkgoHelper()
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	Expect(err).NotTo(HaveOccurred())
	defer file.Close()
	_, err = file.WriteAt(data, 0)
	Expect(err).NotTo(HaveOccurred())
	Expect(file.Sync()).To(Succeed())
}

func readDevice(path string, size int) []byte {
	GinkgoHelper()
	file, err := os.Open(path)
	Expect(err).NotTo(HaveOccurred())
	defer file.Close()
	data := make([]byte, size)
	_, err = file.ReadAt(data, 0)
	Expect(err).NotTo(HaveOccurred())
	return data
}
