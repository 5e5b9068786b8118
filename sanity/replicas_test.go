//go:build linux

package sanity

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("several controllers, and the end of one", fixtureOptions{},
	func(f *fixture) {
		It("B-13 D-41 two controllers make one disk of fifty creates of one name", func(ctx SpecContext) {
			second := f.controller(ctx, harness.PluginOptions{})
			controllers := []csi.ControllerClient{f.ctl, second.Controller()}
			req := harness.CreateRequest(fresh("fifty"))
			ids := make(chan string, 50)
			turn := make(chan int, 50)
			for i := range 50 {
				turn <- i % 2
			}
			errs := atOnce(50, func(ctx context.Context) error {
				ctl := controllers[<-turn]
				// A create that is still under way is repeated until it is done.
				return harness.Await(ctx, callTimeout, func() error {
					resp, err := ctl.CreateVolume(ctx, req)
					if err == nil {
						ids <- resp.GetVolume().GetVolumeId()
					}
					return err
				})
			})
			for _, err := range errs {
				Expect(err).NotTo(HaveOccurred())
			}
			id := <-ids
			f.deletedLater(id)
			for range 49 {
				Expect(<-ids).To(Equal(id))
			}
			Expect(f.disks(ctx)).To(HaveLen(1))
		})

		It("B-11 fifty creates of different names do not delay each other", func(ctx SpecContext) {
			f.switched(ctx, "create_hold", "1s", "0s")
			names := make(chan string, 50)
			for range 50 {
				names <- fresh("parallel")
			}
			start := time.Now()
			errs := atOnce(50, func(ctx context.Context) error {
				return errOf(f.ctl.CreateVolume(ctx, harness.CreateRequest(<-names)))
			})
			took := time.Since(start)
			for id := range f.listed(ctx, f.ctl) {
				f.deletedLater(id)
			}
			for _, err := range errs {
				Expect(err).NotTo(HaveOccurred())
			}
			Expect(f.disks(ctx)).To(HaveLen(50))
			Expect(took).To(BeNumerically("<", 20*time.Second), "one after the other takes 50 s")
		})

		It("B-13 two controllers that publish to two nodes give the disk to one",
			func(ctx SpecContext) {
				second := f.controller(ctx, harness.PluginOptions{})
				volume := f.volume(ctx)
				type attempt struct {
					ctl  csi.ControllerClient
					node string
				}
				attempts := make(chan attempt, 2)
				attempts <- attempt{f.ctl, f.rack.Instance("a").ID}
				attempts <- attempt{second.Controller(), f.rack.Instance("b").ID}
				errs := atOnce(2, func(ctx context.Context) error {
					a := <-attempts
					return errOf(a.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(volume, a.node)))
				})
				f.unpublishedLater(volume, "")
				Expect([]codes.Code{codeOf(errs[0]), codeOf(errs[1])}).
					To(ConsistOf(codes.OK, codes.FailedPrecondition), "%v", errs)
			})

		It("B-10 CV-20 a controller that is killed while the rack creates "+
			"leaves one disk to its successor",
			func(ctx SpecContext) {
				victim := f.controller(ctx, harness.PluginOptions{})
				f.switched(ctx, "create_hold", "1s", "0s")
				req := harness.CreateRequest(fresh("killed"))
				gone := make(chan error, 1)
				ctl := victim.Controller()
				go func() {
					_, err := ctl.CreateVolume(ctx, req)
					gone <- err
				}()
				disk := f.awaitDisk(ctx, "creating")
				victim.Kill()
				Expect(<-gone).To(HaveOccurred())
				Expect(victim.Start(ctx)).To(Succeed())
				resp := converge(ctx, func() (*csi.CreateVolumeResponse, error) {
					return victim.Controller().CreateVolume(ctx, req)
				})
				f.deletedLater(resp.GetVolume().GetVolumeId())
				Expect(resp.GetVolume().GetVolumeId()).To(Equal(disk.Id))
				Expect(f.disks(ctx)).To(HaveLen(1))
			})

		It("B-10 a controller that is killed while the rack attaches leaves one attachment",
			func(ctx SpecContext) {
				victim := f.controller(ctx, harness.PluginOptions{})
				volume := f.volume(ctx)
				req := harness.PublishRequest(volume, f.rack.Instance("a").ID)
				f.fault(ctx,
					adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After,
						Delay: adminapi.Duration(3 * time.Second), Times: 1})
				gone := make(chan error, 1)
				ctl := victim.Controller()
				go func() {
					_, err := ctl.ControllerPublishVolume(ctx, req)
					gone <- err
				}()
				f.awaitDisk(ctx, "attached")
				victim.Kill()
				Expect(<-gone).To(HaveOccurred())
				f.unpublishedLater(volume, req.GetNodeId())
				resp := expectOK(ctx, f.ctl.ControllerPublishVolume, req)
				Expect(resp.GetPublishContext()).To(HaveKey("diskName"))
				Expect(f.attached(ctx, "a")).To(ConsistOf(volume.GetVolumeId()))
			})

		It("B-10 a rack that is killed and started again has everything that it had confirmed",
			func(ctx SpecContext) {
				volume := f.volume(ctx)
				published := f.published(ctx, volume, "a")
				f.rack.Kill()
				Expect(f.rack.Start(ctx)).To(Succeed())
				Expect(f.published(ctx, volume, "a")).To(Equal(published))
				Expect(f.listed(ctx, f.ctl)).To(HaveKey(volume.GetVolumeId()))
			})
	})
