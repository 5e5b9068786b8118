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
)

// device finds the block device of a disk in a guest's view, by its serial, or says that it is not
// there.
func (s *scene) device(instance, diskName string) (string, error) {
	serial := diskName[:min(len(diskName), 20)]
	paths, err := devicesWith(s.rack.Instance(instance), serial)
	if err != nil || len(paths) == 1 {
		return strings.Join(paths, ""), err
	}
	return "", fmt.Errorf("instance %s shows %d devices with the serial %q, not one",
		instance, len(paths), serial)
}

func (s *scene) awaitDevice(ctx context.Context, instance, diskName string) string {
	GinkgoHelper()
	var path string
	eventually(ctx, func() (err error) {
		path, err = s.device(instance, diskName)
		return err
	})
	return path
}

// stoppingRequests are the operations by which somebody would make a running instance attachable.
var stoppingRequests = []string{"instance_stop", "instance_reboot", "instance_delete",
	"instance_update", "instance_start"}

var _ = onStage("a rack that cannot attach to a running instance",
	sceneOptions{rack: RackOptions{ColdPlug: true}}, func(s *scene) {
		BeforeEach(func(ctx SpecContext) {
			Expect(s.instanceState(ctx, s.rack.Instance("a").ID)).
				To(Equal(oxide.InstanceStateRunning))
		})

		It("CP-10 says that the instance must be stopped, and touches nothing",
			func(ctx SpecContext) {
				volume := s.volume(ctx)
				node := s.rack.Instance("a").ID
				operations := s.calls(ctx, func() {
					_, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
					expectRefusal(err, codes.FailedPrecondition,
						"instance a ", "running", "must be stopped", "https://")
				})
				for _, operation := range stoppingRequests {
					Expect(operations).NotTo(ContainElement(operation))
				}
				Expect(s.instanceState(ctx, node)).To(Equal(oxide.InstanceStateRunning))
				Expect(stateOf(s.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
			})

		It("CP-10 is asked once per call, however often the call is repeated",
			func(ctx SpecContext) {
				volume := s.volume(ctx)
				req := publishRequest(volume, s.rack.Instance("a").ID)
				attempts := 0
				for range 5 {
					for _, operation := range s.calls(ctx, func() {
						_, err := s.ctl.ControllerPublishVolume(ctx, req)
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
			volume := s.volume(ctx)
			node := s.rack.Instance("a").ID
			_, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
			expectRefusal(err, codes.FailedPrecondition)
			s.stopInstance(ctx, node)
			DeferCleanup(s.detachedAtRest, volume.GetVolumeId(), node)
			published, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			name := published.GetPublishContext()["diskName"]
			_, err = s.device("a", name)
			Expect(err).To(HaveOccurred(), "a stopped instance has no devices")
			s.startInstance(ctx, node)
			s.awaitDevice(ctx, "a", name)
			// While it runs, the repeated call is still a success: it is attached.
			again, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
			Expect(again.GetPublishContext()).To(Equal(published.GetPublishContext()))
		})

		It("CU-7 does not detach from a running instance, and loses nothing",
			func(ctx SpecContext) {
				volume := s.volume(ctx)
				node := s.rack.Instance("a").ID
				s.stopInstance(ctx, node)
				DeferCleanup(s.detachedAtRest, volume.GetVolumeId(), node)
				published, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
				Expect(err).NotTo(HaveOccurred())
				s.startInstance(ctx, node)
				path := s.awaitDevice(ctx, "a", published.GetPublishContext()["diskName"])
				data := bytes.Repeat([]byte("kept "), 1000)
				writeDevice(path, data)
				operations := s.calls(ctx, func() {
					_, err = s.ctl.ControllerUnpublishVolume(ctx, unpublishRequest(volume, node))
					expectRefusal(err, codes.FailedPrecondition, "instance a ", "running",
						"must be stopped", "https://")
				})
				for _, operation := range stoppingRequests {
					Expect(operations).NotTo(ContainElement(operation))
				}
				Expect(s.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
				Expect(readDevice(path, len(data))).To(Equal(data))

				s.stopInstance(ctx, node)
				_, err = s.ctl.ControllerUnpublishVolume(ctx, unpublishRequest(volume, node))
				Expect(err).NotTo(HaveOccurred())
				Expect(stateOf(s.disk(ctx, volume.GetVolumeId()))).To(Equal("detached"))
			})

		It("E-28 refuses with a final code, so that nothing waits for an attachment "+
			"that nobody makes", func(ctx SpecContext) {
			_, err := s.ctl.ControllerPublishVolume(ctx,
				publishRequest(s.volume(ctx), s.rack.Instance("a").ID))
			Expect(status.Code(err)).NotTo(BeElementOf(codes.Aborted, codes.Unavailable,
				codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted))
		})

		It("D-61 attaches as soon as the rack can, without a restart of the driver",
			func(ctx SpecContext) {
				volume := s.volume(ctx)
				node := s.rack.Instance("a").ID
				_, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
				expectRefusal(err, codes.FailedPrecondition)
				s.switched(ctx, "hotplug", true, false)
				published := s.published(ctx, volume, "a")
				s.awaitDevice(ctx, "a", published["diskName"])
			})
	})

var _ = onStage("a local disk", sceneOptions{}, func(s *scene) {
	It("CP-10 is attached only while the instance is stopped, which is not for want of hot-plug",
		func(ctx SpecContext) {
			req := createRequest(fresh("local"))
			withParameter("diskType", "local")(req)
			volume, node := s.created(ctx, req), s.rack.Instance("a").ID
			_, err := s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
			expectReason(err, codes.FailedPrecondition, "InstanceMustBeStopped")
			expectRefusal(err, codes.FailedPrecondition, "local disk", "must be stopped")
			Expect(status.Convert(err).Message()).NotTo(ContainSubstring("no hot-plug"))
			s.stopInstance(ctx, node)
			DeferCleanup(s.detachedAtRest, volume.GetVolumeId(), node)
			_, err = s.ctl.ControllerPublishVolume(ctx, publishRequest(volume, node))
			Expect(err).NotTo(HaveOccurred())
		})
})

// detachedAtRest brings an instance back to where a spec found it: without the disk, running.
func (s *scene) detachedAtRest(ctx context.Context, disk, instance string) {
	s.stopInstance(ctx, instance)
	_, err := s.rack.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	Expect(err).NotTo(HaveOccurred())
	s.startInstance(ctx, instance)
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
