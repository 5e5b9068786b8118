//go:build e2e

package e2e

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// nodeLostTimeout is how long Kubernetes may take to notice that a node is silent and to delete its
// pods.
const nodeLostTimeout = 3 * time.Minute

var _ = Describe("a node", func() {
	It("that is drained passes its volumes, with their data, to the other node, one at a time "+
		"as the PodDisruptionBudget demands (D-38)", func(ctx SpecContext) {
		doctor, from, to := newDoctor(ctx), workers[0], workers[1]
		onlyOn(ctx, from)
		keepers := s.Keepers(ctx, diskClass, "kept", 2)
		s.budget(ctx, "kept")
		last := make([]int, len(keepers))
		for i, p := range keepers {
			Expect(p.Node(ctx)).To(Equal(from))
			last[i] = p.Beats(ctx)
		}
		cordon(ctx, to, false)
		Expect(machines[controlPlane].run(ctx, "kubectl --kubeconfig=/etc/kubernetes/admin.conf drain "+
			"--ignore-daemonsets --delete-emptydir-data --force --timeout=3m "+from+" 2>&1")).To(
			ContainSubstring("would violate the pod's disruption budget"),
			"the budget should have refused to evict a second pod while the first is away")
		for i, p := range keepers {
			p.Present(ctx).Running(ctx)
			Expect(p.Node(ctx)).To(Equal(to))
			Expect(p.Beats(ctx)).To(BeNumerically(">", last[i]), "no write is lost")
			s.AttachedTo(ctx, s.Bound(ctx, "data-"+p.name).Spec.CSI.VolumeHandle, to)
			doctor.findsNothing(ctx, "pod", s.path(p.name))
		}
		doctor.findsNothing(ctx, "node", from) // that it is drained breaks nothing
		cordon(ctx, from, false)
		spreadControllers(ctx)
	}, NodeTimeout(5*time.Minute))
})

// onlyOn keeps new pods off the other worker until the spec allows them there, or ends.
func onlyOn(ctx context.Context, worker string) {
	DeferCleanup(func(ctx SpecContext) {
		for _, worker := range workers {
			cordon(ctx, worker, false)
		}
	}, NodeTimeout(restartTimeout))
	for _, other := range workers {
		cordon(ctx, other, other != worker)
	}
}

// budget creates a PodDisruptionBudget that allows one pod of a set to be unavailable, and waits
// until it is in force.
func (f *fixture) budget(ctx context.Context, set string) {
	one := intstr.FromInt32(1)
	budgets := api.PolicyV1().PodDisruptionBudgets(f.ns)
	must(budgets.Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: set},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: &one,
			Selector:       &metav1.LabelSelector{MatchLabels: map[string]string{"set": set}},
		},
	}, metav1.CreateOptions{}))
	Eventually(func(g Gomega) {
		now, err := budgets.Get(ctx, set, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(now.Status.DisruptionsAllowed).To(Equal(int32(1)))
	}).WithContext(ctx).Should(Succeed(), "the budget should let one pod go")
}

// spreadControllers puts the two controllers on different nodes again, after a drain.
func spreadControllers(ctx context.Context) {
	serving(ctx)
	all := installedPods(ctx, ofController, "")
	Expect(all).To(HaveLen(len(workers)))
	if all[0].Spec.NodeName == all[1].Spec.NodeName {
		removePod(ctx, all[0], metav1.DeleteOptions{})
		serving(ctx)
	}
}
