//go:build e2e

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("a snapshot", func() {
	It("D-19 D-71 restores what was there when it was taken, also larger and beside its source, "+
		"which goes on", restoresTheMoment)
})

func restoresTheMoment(ctx SpecContext) {
	xfs := s.Class(ctx, Class{Parameters: map[string]string{fsTypeKey: "xfs"}})
	claims := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{Class: xfs})}
	source := s.Pod(ctx, Pod{Claims: claims, Node: workers[0]}).Running(ctx)
	source.Sh(ctx, "for i in 0 1; do echo before >/data/$i/file; done; sync")
	taken := []*snapshot{s.Snapshot(ctx, claims[0]), s.Snapshot(ctx, claims[1])}
	for _, t := range taken {
		t.Ready(ctx)
		Expect(theRack.hasSnapshot(ctx, t.handle)).To(BeTrue())
	}
	source.Sh(ctx, "for i in 0 1; do echo after >/data/$i/file; touch /data/$i/late; done; sync")

	restored := s.Pod(ctx, Pod{Node: workers[0], Claims: []string{
		s.Claim(ctx, Claim{Restore: taken[0].name}),
		s.Claim(ctx, Claim{Restore: taken[0].name, GiB: 2}),
		s.Claim(ctx, Claim{Restore: taken[1].name, GiB: 2, Class: xfs}),
	}}).Running(ctx)
	Expect(restored.Sh(ctx, "cat /data/*/file")).To(Equal("before\nbefore\nbefore"))
	Expect(restored.Sh(ctx, "ls /data/*/late 2>/dev/null || true")).To(BeEmpty())
	for i, want := range []struct {
		kind string
		giB  int
	}{{"ext4", 1}, {"ext4", 2}, {"xfs", 2}} {
		path := "/data/" + string(rune('0'+i))
		kind, sizeBytes := restored.Filesystem(ctx, path)
		Expect(kind).To(Equal(want.kind), path)
		Expect(sizeBytes).To(beMostOf(want.giB), path)
	}
	restored.Sh(ctx, "for i in 0 1 2; do echo own >/data/$i/file; done; sync")
	Expect(source.Sh(ctx, "cat /data/0/file /data/1/file; touch /data/0/more /data/1/more")).
		To(Equal("after\nafter"))

	for _, t := range taken {
		t.Delete(ctx)
		Eventually(func() bool { return theRack.hasSnapshot(ctx, t.handle) }).WithContext(ctx).
			Should(BeFalse(), "the rack's snapshot should go with the VolumeSnapshot")
	}
	Expect(restored.Sh(ctx, "cat /data/*/file")).To(Equal("own\nown\nown"))
}
