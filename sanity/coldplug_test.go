//go:build linux

package sanity

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// device finds the block device of a disk in a guest's view, by its serial, or reports that it is
// not there.
func (f *rackFixture) device(instance, diskName string) (string, error) {
	serial := diskName[:min(len(diskName), 20)]
	paths, err := devicesWith(f.rack.Instance(instance), serial)
	if err != nil || len(paths) == 1 {
		return strings.Join(paths, ""), err
	}
	return "", fmt.Errorf("instance %s shows %d devices with the serial %q, not one",
		instance, len(paths), serial)
}

func (f *rackFixture) awaitDevice(ctx context.Context, instance, diskName string) string {
	GinkgoHelper()
	var path string
	eventually(ctx, func() (err error) {
		path, err = f.device(instance, diskName)
		return err
	})
	return path
}

// stoppingRequests are the operations by which somebody would make a running instance attachable.
var stoppingRequests = []string{"instance_stop", "instance_reboot", "instance_delete",
	"instance_update", "instance_start"}

var _ = describeController("a rack that cannot attach to a running instance",
	fixtureOptions{rack: harness.RackOptions{ColdPlug: true}}, func(f *fixture) {
		BeforeEach(func(ctx SpecContext) {
			Expect(f.instanceState(ctx, f.rack.Instance("a").ID)).
				To(Equal(oxide.InstanceStateRunning))
		})

		It("CP-10 says that the instance must be stopped, and touches nothing",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				node := f.rack.Instance("a").ID
				operations := f.calls(ctx, func() {
					_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
					expectRefusal(err, codes.FailedPrecondition,
						"instance a ", "running", "must be stopped", "https://")
				})
				for _, operation := range stoppingRequests {
					Expect(operations).NotTo(ContainElement(operation))
				}
				Expect(f.instanceState(ctx, node)).To(Equal(oxide.InstanceStateRunning))
				Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
			})

		It("CP-10 is asked once per call, however often the call is repeated",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				req := harness.PublishRequest(volume, f.rack.Instance("a").ID)
				attempts := 0
				for range 5 {
					for _, operation := range f.calls(ctx, func() {
						_, err := f.ctl.ControllerPublishVolume(ctx, req)
						expectRefusal(err, codes.FailedPrecondition)
					}) {
						if operation == "instance_disk_attach" {
							attempts++
						}
					}
				}
				Expect(attempts).To(Equal(5))
			})

		It("CP-10 the same call succeeds when the instance is stopped, "+
			"and the device is there when it starts", func(ctx SpecContext) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			expectRefusal(err, codes.FailedPrecondition)
			f.stopInstance(ctx, node)
			DeferCleanup(f.detachedAtRest, volume.GetVolumeId(), node)
			published, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			name := published.GetPublishContext()["diskName"]
			_, err = f.device("a", name)
			Expect(err).To(HaveOccurred(), "a stopped instance has no devices")
			f.startInstance(ctx, node)
			f.awaitDevice(ctx, "a", name)
			// While it runs, the repeated call is still a success: it is attached.
			again, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			Expect(again.GetPublishContext()).To(Equal(published.GetPublishContext()))
		})

		It("CU-7 does not detach from a running instance, and loses nothing",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				node := f.rack.Instance("a").ID
				f.stopInstance(ctx, node)
				DeferCleanup(f.detachedAtRest, volume.GetVolumeId(), node)
				published, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
				Expect(err).NotTo(HaveOccurred())
				f.startInstance(ctx, node)
				path := f.awaitDevice(ctx, "a", published.GetPublishContext()["diskName"])
				data := bytes.Repeat([]byte("kept "), 1000)
				writeDevice(path, data)
				operations := f.calls(ctx, func() {
					_, err = f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
					expectRefusal(err, codes.FailedPrecondition, "instance a ", "running",
						"must be stopped", "https://")
				})
				for _, operation := range stoppingRequests {
					Expect(operations).NotTo(ContainElement(operation))
				}
				Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
				Expect(readDevice(path, len(data))).To(Equal(data))

				f.stopInstance(ctx, node)
				_, err = f.ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
				Expect(err).NotTo(HaveOccurred())
				Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
			})

		It("E-28 refuses with a final code, so that nothing waits for an attachment "+
			"that nobody makes", func(ctx SpecContext) {
			_, err := f.ctl.ControllerPublishVolume(ctx,
				harness.PublishRequest(f.volume(ctx), f.rack.Instance("a").ID))
			Expect(status.Code(err)).NotTo(BeElementOf(codes.Aborted, codes.Unavailable,
				codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted))
		})

		It("D-61 attaches as soon as the rack can, without a restart of the driver",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				node := f.rack.Instance("a").ID
				_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
				expectRefusal(err, codes.FailedPrecondition)
				f.switched(ctx, "hotplug", true, false)
				published := f.published(ctx, volume, "a")
				f.awaitDevice(ctx, "a", published["diskName"])
			})
	})

var _ = describeController("a local disk", fixtureOptions{}, func(f *fixture) {
	It("CP-10 is attached only while the instance is stopped, which is not for want of hot-plug",
		func(ctx SpecContext) {
			req := harness.CreateRequest(fresh("local"))
			withParameter("diskType", "local")(req)
			volume, node := f.created(ctx, req), f.rack.Instance("a").ID
			_, err := f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			expectReason(err, codes.FailedPrecondition, "InstanceMustBeStopped")
			expectRefusal(err, codes.FailedPrecondition, "local disk", "must be stopped")
			Expect(status.Convert(err).Message()).NotTo(ContainSubstring("no hot-plug"))
			f.stopInstance(ctx, node)
			DeferCleanup(f.detachedAtRest, volume.GetVolumeId(), node)
			_, err = f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
		})
})

// detachedAtRest brings an instance back to where a spec found it: without the disk, running.
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
