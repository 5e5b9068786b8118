package sanity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
)

// size is how many bytes of a filesystem, or of a device, a workload sees.
func (p *placement) size(ctx context.Context) int64 {
	GinkgoHelper()
	resp, err := p.Node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.volume.GetVolumeId(), VolumePath: p.target,
	})
	Expect(err).NotTo(HaveOccurred())
	if p.capability.GetBlock() != nil {
		return resp.GetUsage()[0].GetTotal()
	}
	// As the workload asks, not as the driver answers.
	var st unix.Statfs_t
	Expect(unix.Statfs(p.target, &st)).To(Succeed())
	return int64(st.Blocks) * st.Bsize
}

// everyAccess are the entries of a table whose story holds for every access type.
func everyAccess() []TableEntry {
	var entries []TableEntry
	for _, name := range accesses {
		entries = append(entries, Entry(name, name))
	}
	return entries
}

var _ = onNodes("the life of a volume", func(s *nodeScene) {
	Describe("on two nodes", func() { describeMoves(s) })
	Describe("and its snapshots", func() { describeSnapshots(s) })
})

func describeMoves(s *nodeScene) {
	DescribeTable("B-38 what a workload wrote is there wherever the volume moves",
		func(ctx SpecContext, name string) {
			volume := s.volume(ctx, access(name))
			first := s.settled(ctx, volume, s.a, access(name))
			Expect(first.write(0)).To(Succeed())
			s.detached(ctx, first)

			second := s.settled(ctx, volume, s.b, access(name))
			Expect(second.holds(0)).To(Succeed())
			Expect(second.write(1)).To(Succeed())
			s.detached(ctx, second)

			third := s.settled(ctx, volume, s.a, access(name))
			Expect(third.holds(0)).To(Succeed())
			Expect(third.holds(1)).To(Succeed())
		}, everyAccess())

	DescribeTable("B-38 the calls of a life cost the rack the same, whatever is on the disk",
		func(ctx SpecContext, name string) {
			Expect(s.calls(ctx, func() {
				req := createRequest(fresh("life"))
				req.VolumeCapabilities[0] = access(name)
				resp, err := s.ctl.CreateVolume(ctx, req)
				Expect(err).NotTo(HaveOccurred())
				volume := resp.GetVolume()
				s.deletedLater(volume.GetVolumeId())
				p := s.settled(ctx, volume, s.a, access(name))
				Expect(p.write(0)).To(Succeed())
				s.detached(ctx, p)
				_, err = s.ctl.DeleteVolume(ctx,
					&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
				Expect(err).NotTo(HaveOccurred())
			})).To(Equal(callsOfLife("")))
		}, everyAccess())
}

// restored makes a volume of some GiB from a snapshot.
func (s *nodeScene) restored(
	ctx context.Context, snapshot *csi.Snapshot, gibs int64, use *csi.VolumeCapability,
) *csi.Volume {
	GinkgoHelper()
	req := createRequest(fresh("restored"))
	req.VolumeCapabilities[0] = use
	req.CapacityRange.RequiredBytes = gibs * gib
	return s.created(ctx, fromSnapshot(req, snapshot.GetSnapshotId()))
}

func describeSnapshots(s *nodeScene) {
	DescribeTable("CV-18 a restored volume holds what its origin held when the snapshot was taken",
		func(ctx SpecContext, name string) {
			origin := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			snapshot := s.snapshotted(ctx, origin.volume)
			Expect(origin.writeThrough(1)).To(Succeed())

			copied := s.settled(ctx, s.restored(ctx, snapshot, 1, access(name)), s.b, access(name))
			Expect(copied.holds(0)).To(Succeed())
			Expect(copied.holds(1)).NotTo(Succeed(), "it was written after the snapshot")
			Expect(copied.write(2)).To(Succeed())

			Expect(origin.holds(0)).To(Succeed())
			Expect(origin.holds(1)).To(Succeed())
			Expect(origin.holds(2)).NotTo(Succeed(), "the two are one disk")
		}, everyAccess())

	DescribeTable("NS-13 a volume restored into a larger one is as large for its workload, too",
		func(ctx SpecContext, name string) {
			origin := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			small := origin.size(ctx)
			snapshot := s.snapshotted(ctx, origin.volume)

			grown := s.settled(ctx, s.restored(ctx, snapshot, 3, access(name)), s.b, access(name))
			Expect(grown.holds(0)).To(Succeed())
			Expect(grown.size(ctx)).To(BeNumerically(">=", small+19*gib/10))
			Expect(grown.write(1)).To(Succeed())
			s.detached(ctx, grown)

			again := s.settled(ctx, grown.volume, s.a, access(name))
			Expect(again.holds(0)).To(Succeed())
			Expect(again.holds(1)).To(Succeed())
			Expect(again.size(ctx)).To(BeNumerically(">=", small+19*gib/10))
		}, everyAccess())

	DescribeTable("NS-14 a restored volume and its origin live on one node side by side",
		func(ctx SpecContext, name string) {
			origin := s.settled(ctx, s.volume(ctx, access(name)), s.a, access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			snapshot := s.snapshotted(ctx, origin.volume)

			copied := s.settled(ctx, s.restored(ctx, snapshot, 1, access(name)), s.a, access(name))
			Expect(copied.holds(0)).To(Succeed())
			Expect(copied.write(1)).To(Succeed())
			Expect(origin.write(2)).To(Succeed())
			Expect(copied.holds(2)).NotTo(Succeed(), "the two share a filesystem")
			Expect(origin.holds(1)).NotTo(Succeed(), "the two share a filesystem")

			// Each goes its own way, the origin first: the copy must not depend on it.
			s.detached(ctx, origin)
			Expect(copied.holds(0)).To(Succeed())
			Expect(copied.holds(1)).To(Succeed())
			s.detached(ctx, copied)
			both := s.settled(ctx, origin.volume, s.b, access(name))
			Expect(both.holds(2)).To(Succeed())
			moved := s.settled(ctx, copied.volume, s.b, access(name))
			Expect(moved.holds(1)).To(Succeed())
		}, everyAccess())
}
