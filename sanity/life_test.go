//go:build linux

package sanity

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// everyAccess returns the entries of a table that runs for every access type.
func everyAccess() []TableEntry {
	var entries []TableEntry
	for _, name := range accesses {
		entries = append(entries, Entry(name, name))
	}
	return entries
}

var _ = describeNodes("the life of a volume", func(f *nodeFixture) {
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

	DescribeTable("CV-18 a restored volume has the data that its origin had at the snapshot",
		func(ctx SpecContext, name string) {
			origin := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(origin.writeThrough(0)).To(Succeed())
			snapshot := f.snapshotted(ctx, origin.Volume)
			Expect(origin.writeThrough(1)).To(Succeed())

			req := harness.CreateRequest(fresh("restored"), harness.Access(name))
			copied := f.inUse(ctx, f.created(ctx, harness.FromSnapshot(req, snapshot.GetSnapshotId())),
				f.b, harness.Access(name))
			Expect(copied.verify(0)).To(Succeed())
			Expect(copied.verify(1)).NotTo(Succeed(), "it was written after the snapshot")
			Expect(copied.write(2)).To(Succeed())

			Expect(origin.verify(0)).To(Succeed())
			Expect(origin.verify(1)).To(Succeed())
			Expect(origin.verify(2)).NotTo(Succeed(), "the two are one disk")
		}, everyAccess())
})
