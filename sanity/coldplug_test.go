//go:build linux

package sanity

import (
	"context"
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
		It("CP-10 E-28 says that the instance must be stopped, asks twice per call, and touches nothing",
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
					})).To(HaveLen(2))
				}
				Expect(f.instanceState(ctx, f.rack.Instance("a").ID)).
					To(Equal(oxide.InstanceStateRunning))
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
