//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var _ = Describe("every right of the node keeper", Label("long"), func() {
	It("is necessary: without it the node keeper fails (D-54)", func(ctx SpecContext) {
		spreadControllers(ctx)
		guestsFollow(ctx)
		installKeeper(ctx)
		proof{restart: restartKeepers, settle: keeperSettles,
			life: func(ctx context.Context, f *fixture) {
				coldAttach(ctx, f)
				leave(ctx, f)
			}}.run(ctx, allRights(rolesOfKeeper()))
	}, NodeTimeout(90*time.Minute))
})

// rolesOfKeeper returns the roles of the node keeper's pods, and of its container beside a node's
// driver.
func rolesOfKeeper() []*unstructured.Unstructured {
	var roles []*unstructured.Unstructured
	for _, o := range installed {
		if name := o.GetName(); name == keeperName || strings.HasSuffix(name, "-leave") {
			roles = append(roles, o)
		}
	}
	return roles
}

// restartKeepers deletes the keepers' pods, their lease and their records, without a grace period.
func restartKeepers(ctx context.Context) {
	now := int64(0)
	Expect(api.CoreV1().Pods(driverNamespace).DeleteCollection(ctx,
		metav1.DeleteOptions{GracePeriodSeconds: &now},
		metav1.ListOptions{LabelSelector: ofKeeper})).To(Succeed())
	removeLeases(ctx, driverNamespace, keeperLease)
	removeRecords(ctx)
}

// keeperSettles waits until the keeper, which has all of its rights again, has ended what it has
// begun.
func keeperSettles(ctx context.Context) {
	Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
	coldAttached(ctx)
	for _, worker := range workers {
		Eventually(func() (bool, error) { return tainted(ctx, worker) }).WithContext(ctx).
			Should(BeFalse(), "the startup taint of %s should be gone", worker)
	}
	spreadControllers(ctx)
}

// taintStartup gives a node the startup taint, as if it had just joined.
func taintStartup(ctx context.Context, worker string) {
	patchNode(ctx, worker, fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`,
		startupTaint))
}

// coldAttach creates a pod for a node that has just joined, on a rack without hot-plug.
func coldAttach(ctx context.Context, f *fixture) {
	worker := workers[1]
	hotplug := func(ctx context.Context, mode string) {
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": mode})).To(Succeed())
	}
	hotplug(ctx, "none")
	defer hotplug(context.WithoutCancel(ctx), "full")
	taintStartup(ctx, worker)
	f.Pod(ctx, Pod{Claims: []string{f.Claim(ctx, Claim{})}, Node: worker}).Running(ctx)
	Eventually(func(g Gomega) {
		n, err := api.CoreV1().Nodes().Get(ctx, worker, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(n.Spec.Unschedulable).To(BeFalse())
		g.Expect(n.Annotations).NotTo(HaveKey(cordonMark))
	}).WithContext(ctx).Should(Succeed(), "%s should take pods again", worker)
}

// leave makes a pod with a volume and the driver of its node end at the same moment. It fails if
// the driver ends before the volume is detached, or much later.
func leave(ctx context.Context, f *fixture) {
	worker := workers[0]
	p := f.Pod(ctx, Pod{Claims: []string{f.Claim(ctx, Claim{})}, Node: worker,
		Script: "trap : TERM; while :; do sleep 1; done"}).Running(ctx)
	defer cordon(context.WithoutCancel(ctx), worker, false)
	cordon(ctx, worker, true)
	driver := installedPod(ctx, ofNode, worker)
	drivers := api.CoreV1().Pods(driverNamespace)
	Expect(errors.Join(drivers.Delete(ctx, driver.Name, metav1.DeleteOptions{}),
		api.CoreV1().Pods(f.ns).Delete(ctx, p.name, metav1.DeleteOptions{}))).To(Succeed())
	Eventually(func() bool {
		now, err := drivers.Get(ctx, driver.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err) || err == nil && now.UID != driver.UID
	}).WithContext(ctx).WithTimeout(time.Minute).Should(BeTrue(), "the driver should end")
	for _, a := range must(api.StorageV1().VolumeAttachments().List(ctx,
		metav1.ListOptions{})).Items {
		Expect(a.Spec.NodeName == worker && a.Spec.Attacher == driverName).To(BeFalse(),
			"%s is left on %s, and its driver is gone", a.Name, worker)
	}
}
