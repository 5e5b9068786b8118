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
)

// softRack is a rack of a coming release. A deleted disk disappears at once, but its bytes and
// its share of the quota are freed long after the answer.
var softRack = fixtureOptions{rack: harness.RackOptions{
	Args: []string{"--free-delay", "1s"},
}}

// onSoftRack registers a container whose specs share such a rack. Each spec begins when
// everything that was deleted before is freed.
func onSoftRack(text string, specs func(f *fixture)) bool {
	return describeController(text+" on a rack that frees later", softRack, func(f *fixture) {
		BeforeEach(f.free, NodeTimeout(callTimeout))
		specs(f)
	})
}

// free frees everything that was deleted.
func (f *rackFixture) free(ctx SpecContext) {
	GinkgoHelper()
	Expect(f.rack.Admin.RunDeferred(ctx)).To(Succeed())
}

var _ = onSoftRack("DeleteVolume", deleteVolumeSpecs)

var _ = onSoftRack("a deleted volume", func(f *fixture) {
	BeforeEach(func(ctx SpecContext) {
		f.switched(ctx, "free_delay", time.Hour.String(), "1s")
		DeferCleanup(f.free, NodeTimeout(callTimeout))
	})
	deleted := func(ctx context.Context, name string) (id string) {
		GinkgoHelper()
		created := expectOK(ctx, f.ctl.CreateVolume, harness.CreateRequest(name))
		id = created.GetVolume().GetVolumeId()
		expectOK(ctx, f.ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id})
		return id
	}

	It("OX-10 uses quota until it is freed, and a create that fails for that can be repeated",
		func(ctx SpecContext) {
			f.switched(ctx, "quota_bytes", harness.GiB, 1024*harness.GiB)
			deleted(ctx, fresh("full"))
			req := harness.CreateRequest(fresh("full"))
			capacity := expectOK(ctx, f.ctl.GetCapacity, &csi.GetCapacityRequest{})
			Expect(capacity.GetAvailableCapacity()).To(BeZero())
			expectRefusal(errOf(f.ctl.CreateVolume(ctx, req)), codes.ResourceExhausted)
			Expect(f.disks(ctx)).To(BeEmpty())
			f.free(ctx)
			f.created(ctx, req)
		})

	It("OX-10 uses no quota but its space until it is freed, and a create that fails for that can be "+
		"repeated", func(ctx SpecContext) {
		f.switched(ctx, "quota_first", true, false)
		f.switched(ctx, "quota_bytes", harness.GiB, 1024*harness.GiB)
		deleted(ctx, fresh("space"))
		req := harness.CreateRequest(fresh("space"))
		capacity, err := f.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
		Expect(err).NotTo(HaveOccurred())
		Expect(capacity.GetAvailableCapacity()).To(BeEquivalentTo(harness.GiB), "the quota has room")
		_, err = f.ctl.CreateVolume(ctx, req)
		expectRefusal(err, codes.ResourceExhausted, "Not enough storage")
		Expect(f.disks(ctx)).To(BeEmpty())
		f.free(ctx)
		f.created(ctx, req)
	})

	It("DV-6 leaves its name to a new volume before it is freed",
		func(ctx SpecContext) {
			name := fresh("again")
			id := deleted(ctx, name)
			volume := f.created(ctx, harness.CreateRequest(name))
			Expect(volume.GetVolumeId()).NotTo(Equal(id))
			f.published(ctx, volume, "a")
			f.free(ctx)
			Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).
				To(Equal("attached to " + f.rack.Instance("a").ID))
		})
})
