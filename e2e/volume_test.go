//go:build e2e

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("a volume", func() {
	It("D-58 is claimed, formatted and written, and keeps its data when its pod moves",
		func(ctx SpecContext) {
			claim := s.Claim(ctx, Claim{})
			writer := s.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[0]}).Running(ctx)
			writer.Sh(ctx, "echo kept > /data/0/file && sync")
			pv := s.Bound(ctx, claim)
			Expect(theRack.attachedTo(ctx, pv.Spec.CSI.VolumeHandle)).To(Equal(workers[0]))
			writer.Delete(ctx)
			reader := s.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[1]}).Running(ctx)
			Expect(reader.Sh(ctx, "cat /data/0/file")).To(Equal("kept"))
			Expect(theRack.attachedTo(ctx, pv.Spec.CSI.VolumeHandle)).To(Equal(workers[1]))
		})
})
