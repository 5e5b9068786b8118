package sanity

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
)

// softRack is a rack of a coming release: what is deleted is gone at once, and its bytes and its
// share of the quota are freed when the answer is long given.
var softRack = sceneOptions{rack: RackOptions{
	Args: []string{"--project", otherProject, "--free-delay", "1s"},
}}

// onSoftRack registers a container whose specs share such a rack. Each begins when what was deleted
// before it is freed.
func onSoftRack(text string, specs func(s *scene)) bool {
	return onStage(text+" on a rack that frees later", softRack, func(s *scene) {
		BeforeEach(s.free, NodeTimeout(callTimeout))
		specs(s)
	})
}

// free frees what was deleted.
func (s *scene) free(ctx SpecContext) {
	GinkgoHelper()
	Expect(s.rack.Admin.RunDeferred(ctx)).To(Succeed())
}

var (
	_ = onSoftRack("DeleteVolume", deleteVolumeSpecs)
	_ = onSoftRack("snapshots", snapshotSpecs)
	_ = onSoftRack("an answer that is lost", lostAnswerSpecs)
)

var _ = onSoftRack("a deleted volume", func(s *scene) {
	BeforeEach(func(ctx SpecContext) {
		s.switched(ctx, "free_delay", time.Hour.String(), "1s")
		DeferCleanup(s.free, NodeTimeout(callTimeout))
	})
	deleted := func(ctx context.Context, name string) (id string) {
		GinkgoHelper()
		created, err := s.ctl.CreateVolume(ctx, createRequest(name))
		Expect(err).NotTo(HaveOccurred())
		id = created.GetVolume().GetVolumeId()
		_, err = s.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		Expect(err).NotTo(HaveOccurred())
		return id
	}

	It("OX-10 uses up the quota until it is freed, and a create that meets it can be repeated",
		func(ctx SpecContext) {
			s.switched(ctx, "quota_bytes", gib, 1024*gib)
			deleted(ctx, fresh("full"))
			req := createRequest(fresh("full"))
			capacity, err := s.ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
			Expect(err).NotTo(HaveOccurred())
			Expect(capacity.GetAvailableCapacity()).To(BeZero())
			_, err = s.ctl.CreateVolume(ctx, req)
			expectRefusal(err, codes.ResourceExhausted)
			Expect(s.disks(ctx)).To(BeEmpty())
			s.free(ctx)
			s.created(ctx, req)
		})

	It("DV-6 leaves its name to a new volume before it is freed",
		func(ctx SpecContext) {
			name := fresh("again")
			id := deleted(ctx, name)
			volume := s.created(ctx, createRequest(name))
			Expect(volume.GetVolumeId()).NotTo(Equal(id))
			s.published(ctx, volume, "a")
			s.free(ctx)
			Expect(stateOf(s.disk(ctx, volume.GetVolumeId()))).
				To(Equal("attached to " + s.rack.Instance("a").ID))
		})
})
