//go:build linux

package sanity

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// twinRounds is the number of rounds in which two disks with the same serial are published at the
// same time.
const twinRounds = 25

var _ = describeController("CP-12 two disks whose names begin with the same 20 bytes",
	fixtureOptions{},
	func(f *fixture) {
		It("are never both published to one node, however close together the two calls are",
			func(ctx SpecContext) {
				one := &csi.Volume{VolumeId: f.rackDisk(ctx, "twenty-bytes-alike-x-1", f.rack.Project).Id}
				two := &csi.Volume{VolumeId: f.rackDisk(ctx, "twenty-bytes-alike-x-2", f.rack.Project).Id}
				f.raceTwins(ctx, one, two)
			})

		It("are never both published when one of them is the driver's own", func(ctx SpecContext) {
			own := f.volume(ctx)
			f.raceTwins(ctx, own, f.backupOf(ctx, own))
		})
	})

// backupOf returns a static volume whose disk's name begins with the name of the driver's volume.
func (f *fixture) backupOf(ctx context.Context, volume *csi.Volume) *csi.Volume {
	GinkgoHelper()
	name := volume.GetVolumeContext()["diskName"] + "-backup"
	return &csi.Volume{VolumeId: f.rackDisk(ctx, name, f.rack.Project).Id}
}

// raceTwins publishes two volumes to one node at the same time, in many rounds. Each round delays
// another request.
func (f *fixture) raceTwins(ctx context.Context, twins ...*csi.Volume) {
	GinkgoHelper()
	node := f.rack.Instance("a").ID
	for round := range twinRounds {
		operation := []string{"instance_disk_attach", "instance_disk_list"}[round%2]
		phase := []adminapi.Phase{adminapi.Before, adminapi.After}[round/2%2]
		_, err := f.rack.Admin.AddFault(ctx, adminapi.Fault{Operation: operation, Phase: phase,
			Delay: adminapi.Duration(round+1) * adminapi.Duration(2*time.Millisecond),
			Times: 1 + round%3})
		Expect(err).NotTo(HaveOccurred())
		errs := make([]error, len(twins))
		calls := make(chan int, len(twins))
		for i := range twins {
			calls <- i
		}
		atOnce(len(twins), func(ctx context.Context) error {
			i := <-calls
			_, errs[i] = f.ctl.ControllerPublishVolume(ctx, harness.PublishRequest(twins[i], node))
			return errs[i]
		})
		Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
		f.expectOneTwin(ctx, round, errs, twins)
		for _, twin := range twins {
			expectOK(ctx, f.ctl.ControllerUnpublishVolume, harness.UnpublishRequest(twin, node))
		}
	}
}

// expectOneTwin demands that at most one of two volumes was published, and that only the disk of
// that one is attached.
func (f *fixture) expectOneTwin(ctx context.Context, round int, errs []error, twins []*csi.Volume) {
	GinkgoHelper()
	published := []string{}
	for i, err := range errs {
		if err == nil {
			published = append(published, twins[i].GetVolumeId())
			continue
		}
		expectReason(err, codes.FailedPrecondition, "SerialTaken")
	}
	Expect(len(published)).To(BeNumerically("<=", 1), "round %d: both were published", round)
	attached := f.attached(ctx, "a")
	slices.Sort(attached)
	Expect(attached).To(Equal(published), fmt.Sprintf("round %d: %v", round, errs))
}
