//go:build linux

package sanity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// size returns the number of bytes of a filesystem or device that a workload sees.
func (p *placement) size(ctx context.Context) int64 {
	GinkgoHelper()
	resp, err := p.Node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.Volume.GetVolumeId(), VolumePath: p.Target,
	})
	Expect(err).NotTo(HaveOccurred())
	if p.Capability.GetBlock() != nil {
		return resp.GetUsage()[0].GetTotal()
	}
	// Ask the kernel as the workload does, instead of the driver.
	var st unix.Statfs_t
	Expect(unix.Statfs(p.Target, &st)).To(Succeed())
	return int64(st.Blocks) * st.Bsize
}

// everyAccess returns the entries of a table that runs for every access type.
func everyAccess() []TableEntry {
	var entries []TableEntry
	for _, name := range accesses {
		entries = append(entries, Entry(name, name))
	}
	return entries
}

var _ = describeNodes("the life of a volume", func(f *nodeFixture) {
	Describe("on two nodes", func() { describeMoves(f) })
	Describe("and its snapshots", func() { describeSnapshots(f) })
	Describe("that is restored", func() { describeGrowth(f) })
})

func describeMoves(f *nodeFixture) {
	DescribeTable("D-12 B-38 a workload's data is there wherever the volume moves",
		func(ctx SpecContext, name string) {
			volume := f.volume(ctx, harness.Access(name))
			first := f.inUse(ctx, volume, f.a, harness.Access(name))
			Expect(first.write(0)).To(Succeed())
			f.detached(ctx, first)

			second := f.inUse(ctx, volume, f.b, harness.Access(name))
			Expect(second.verify(0)).To(Succeed())
			Expect(second.write(1)).To(Succeed())
			f.detached(ctx, second)

			third := f.inUse(ctx, volume, f.a, harness.Access(name))
			Expect(third.verify(0)).To(Succeed())
			Expect(third.verify(1)).To(Succeed())
		}, everyAccess())

	DescribeTable("B-38 the calls of a life cost the rack the same, whatever is on the disk",
		func(ctx SpecContext, name string) {
			Expect(f.calls(ctx, func() {
				req := harness.CreateRequest(fresh("life"))
				req.VolumeCapabilities[0] = harness.Access(name)
				resp := expectOK(ctx, f.ctl.CreateVolume, req)
				volume := resp.GetVolume()
				f.deletedLater(volume.GetVolumeId())
				p := f.inUse(ctx, volume, f.a, harness.Access(name))
				Expect(p.write(0)).To(Succeed())
				f.detached(ctx, p)
				expectOK(ctx, f.ctl.DeleteVolume,
					&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
			})).To(Equal(callsOfLife("")))
		}, everyAccess())
}

// restored creates a volume of the given number of GiB from a snapshot.
func (f *nodeFixture) restored(
	ctx context.Context, snapshot *csi.Snapshot, gibs int64, use *csi.VolumeCapability,
) *csi.Volume {
	GinkgoHelper()
	req := harness.CreateRequest(fresh("restored"))
	req.VolumeCapabilities[0] = use
	req.CapacityRange.RequiredBytes = gibs * harness.GiB
	return f.created(ctx, harness.FromSnapshot(req, snapshot.GetSnapshotId()))
}

func describeSnapshots(f *nodeFixture) {
	DescribeTable("CV-18 a restored volume has the data that its origin had at the snapshot",
		func(ctx SpecContext, name string) {
			origin := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			snapshot := f.snapshotted(ctx, origin.Volume)
			Expect(origin.writeThrough(1)).To(Succeed())

			copied := f.inUse(ctx, f.restored(ctx, snapshot, 1, harness.Access(name)), f.b,
				harness.Access(name))
			Expect(copied.verify(0)).To(Succeed())
			Expect(copied.verify(1)).NotTo(Succeed(), "it was written after the snapshot")
			Expect(copied.write(2)).To(Succeed())

			Expect(origin.verify(0)).To(Succeed())
			Expect(origin.verify(1)).To(Succeed())
			Expect(origin.verify(2)).NotTo(Succeed(), "the two are one disk")
		}, everyAccess())

	DescribeTable("NS-14 a restored volume and its origin live on one node side by side",
		func(ctx SpecContext, name string) {
			origin := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			snapshot := f.snapshotted(ctx, origin.Volume)

			copied := f.inUse(ctx, f.restored(ctx, snapshot, 1, harness.Access(name)), f.a,
				harness.Access(name))
			Expect(copied.verify(0)).To(Succeed())
			Expect(copied.write(1)).To(Succeed())
			Expect(origin.write(2)).To(Succeed())
			Expect(copied.verify(2)).NotTo(Succeed(), "the two share a filesystem")
			Expect(origin.verify(1)).NotTo(Succeed(), "the two share a filesystem")

			// Detach the origin first, because the copy must not depend on it.
			f.detached(ctx, origin)
			Expect(copied.verify(0)).To(Succeed())
			Expect(copied.verify(1)).To(Succeed())
			f.detached(ctx, copied)
			both := f.inUse(ctx, origin.Volume, f.b, harness.Access(name))
			Expect(both.verify(2)).To(Succeed())
			moved := f.inUse(ctx, copied.Volume, f.b, harness.Access(name))
			Expect(moved.verify(1)).To(Succeed())
		}, everyAccess())
}

func describeGrowth(f *nodeFixture) {
	DescribeTable("NS-13 a volume restored into a larger one is as large for its workload, too",
		func(ctx SpecContext, name string) {
			origin := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			small := origin.size(ctx)
			snapshot := f.snapshotted(ctx, origin.Volume)

			grown := f.inUse(ctx, f.restored(ctx, snapshot, 3, harness.Access(name)), f.b,
				harness.Access(name))
			Expect(grown.verify(0)).To(Succeed())
			Expect(grown.size(ctx)).To(BeNumerically(">=", small+19*harness.GiB/10))
			Expect(grown.write(1)).To(Succeed())
			f.detached(ctx, grown)

			again := f.inUse(ctx, grown.Volume, f.a, harness.Access(name))
			Expect(again.verify(0)).To(Succeed())
			Expect(again.verify(1)).To(Succeed())
			Expect(again.size(ctx)).To(BeNumerically(">=", small+19*harness.GiB/10))
		}, everyAccess())
}
