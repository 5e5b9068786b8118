//go:build e2e

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

var _ = Describe("a rack without hot-plug", func() {
	It("D-61 attaches a volume while a person has stopped the node's instance; then the pod that "+
		"waited runs, and the pod that ran before runs again with its data", attachesByHand)
})

// attachesByHand follows the instructions for operators in docs/hot-plug.md.
func attachesByHand(ctx SpecContext) {
	// If both controllers run on the node, nothing is attached while it is off.
	spreadControllers(ctx)
	worker := workers[1]
	kept := s.Beating(ctx, worker, s.Claim(ctx, Claim{}))
	sum := kept.Fill(ctx)
	withoutHotplug(ctx)
	guestsFollow(ctx)
	claim := s.Claim(ctx, Claim{})
	waiting := s.Pod(ctx, Pod{Node: worker, Claims: []string{claim}})
	waiting.Pending(ctx, mustBeStopped...)
	keptUID, waitingUID := kept.get(ctx).UID, waiting.get(ctx).UID
	last := kept.Beats(ctx)

	By("stopping the instance until the volume is attached", func() {
		stopInstance(ctx, worker)
		volume := s.Bound(ctx, claim)
		Eventually(func() (bool, error) {
			status, err := attachmentOf(ctx, volume.Name)
			return status.Attached, err
		}).WithContext(ctx).Should(BeTrue(), "the volume of %s should be attached", waiting.name)
		Expect(theRack.attachedTo(ctx, volume.Spec.CSI.VolumeHandle)).To(Equal(worker))
	})
	By("starting the instance, and so its guest", func() {
		startInstance(ctx, worker)
		servesSinceBoot(ctx, worker)
		waiting.RunningSinceBoot(ctx)
		Expect(waiting.get(ctx).UID).To(Equal(waitingUID), "it is the very same pod")
		kept.RunningSinceBoot(ctx)
		Expect(kept.get(ctx).UID).To(Equal(keptUID), "it is the very same pod")
		Expect(kept.beatsAfter(ctx, 1)).To(BeNumerically(">", last), "no write is lost")
		Expect(kept.Sum(ctx)).To(Equal(sum))
	})
}
