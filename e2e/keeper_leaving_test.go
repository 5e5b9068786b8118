//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// fences stops the node on which the leading keeper runs.
func fences(ctx SpecContext) {
	off := leader(ctx, keeperLease, ofKeeper).Spec.NodeName
	s.replaced(ctx, off)
	stopInstance(ctx, off)
	s.elsewhere(ctx, off)
	n := must(api.CoreV1().Nodes().Get(ctx, off, metav1.GetOptions{}))
	Expect(recorded(ctx, off)).To(HaveField("Fenced", instanceIDs[off]))
	Expect(n.Spec.Taints).To(ContainElement(HaveField("Key", corev1.TaintNodeOutOfService)))

	startInstance(ctx, off)
	servesSinceBoot(ctx, off)
	Eventually(func(g Gomega) {
		n, err := api.CoreV1().Nodes().Get(ctx, off, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(recorded(ctx, off)).To(HaveField("Fenced", BeEmpty()))
		g.Expect(n.Spec.Taints).To(BeEmpty())
	}).WithContext(ctx).Should(Succeed(), "%s should be free again", off)
	s.Beating(ctx, off, s.Claim(ctx, Claim{}))
}

// replaced creates a Deployment of one pod with a volume, and waits until the pod runs on the
// worker. Kubernetes replaces the pod soon after its node becomes silent.
func (f *fixture) replaced(ctx context.Context, worker string) {
	claim := f.Claim(ctx, Claim{})
	template := f.podObject(ctx, &Pod{Claims: []string{claim}, Script: beating}).Spec
	soon := int64(1)
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		template.Tolerations = append(template.Tolerations, corev1.Toleration{Key: key,
			Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &soon})
	}
	onlyOn(ctx, worker)
	f.app(ctx, template)
	p := f.appPod(ctx)
	Expect(p.Node(ctx)).To(Equal(worker))
	p.Beats(ctx)
	for _, worker := range workers {
		cordon(ctx, worker, false)
	}
}

// elsewhere waits until a pod of the spec runs on another node than the worker and has the data
// that was written before.
func (f *fixture) elsewhere(ctx context.Context, worker string) {
	var runs *pod
	Eventually(func(g Gomega) {
		list, err := api.CoreV1().Pods(f.ns).List(ctx, metav1.ListOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		i := slices.IndexFunc(list.Items, func(p corev1.Pod) bool {
			return p.Spec.NodeName != worker && p.Status.Phase == corev1.PodRunning
		})
		g.Expect(i).NotTo(Equal(-1))
		runs = &pod{s: f, name: list.Items[i].Name}
	}).WithContext(ctx).WithTimeout(nodeLostTimeout).Should(Succeed(), "a pod should run elsewhere")
	Expect(runs.logged(ctx, false)[0]).To(BeNumerically(">", 1), "it goes on where another ended")
}

// keepsTheDriver makes a node's driver and its pods with volumes end at the same moment.
func keepsTheDriver(ctx SpecContext) {
	stays, goes := workers[0], workers[1]
	s.Beating(ctx, stays, s.Claim(ctx, Claim{}))
	onlyOn(ctx, goes)
	kept := s.Keepers(ctx, diskClass, "kept", 3)
	cordon(ctx, stays, false)
	attachments := must(api.StorageV1().VolumeAttachments().Watch(ctx, metav1.ListOptions{}))
	defer attachments.Stop()
	drivers := must(api.CoreV1().Pods(driverNamespace).Watch(ctx,
		metav1.ListOptions{LabelSelector: ofNode}))
	defer drivers.Stop()

	By("draining the node", func() {
		cordon(ctx, goes, true)
		going := installedPod(ctx, ofNode, goes)
		Expect(api.CoreV1().Pods(driverNamespace).Delete(ctx, going.Name,
			metav1.DeleteOptions{})).To(Succeed())
		for _, p := range kept {
			Expect(api.PolicyV1().Evictions(s.ns).Evict(ctx, &policyv1.Eviction{
				ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: p.name}})).To(Succeed())
		}
		driverGone := deleted(ctx, drivers, func(o metav1.Object) bool { return o.GetUID() == going.UID })
		for range kept {
			Expect(deleted(ctx, attachments, func(o metav1.Object) bool {
				a, ok := o.(*storagev1.VolumeAttachment)
				return ok && a.Spec.NodeName == goes
			})).To(BeNumerically("<", driverGone), "a volume is detached while its driver is there")
		}
		for _, p := range kept {
			p.Present(ctx).Running(ctx)
			Expect(p.Node(ctx)).To(Equal(stays))
		}
		cordon(ctx, goes, false)
	})
	By("replacing the driver of a node that stays", func() {
		serving(ctx)
		replaced := installedPod(ctx, ofNode, stays)
		began := time.Now()
		removePod(ctx, replaced, metav1.DeleteOptions{})
		took := time.Since(began)
		Expect(took).To(BeNumerically("<", 15*time.Second), "%d volumes stay attached",
			len(kept)+1)
		fmt.Printf("FIGURE driver-replaced seconds=%.1f\n", took.Seconds())
		serving(ctx)
	})
}

// deleted waits until a watch reports that one of the objects is deleted, and returns the resource
// version of the deletion. With one etcd, the resource versions of all kinds are increasing
// numbers.
func deleted(ctx context.Context, w watch.Interface, one func(metav1.Object) bool) int {
	limit := time.After(nodeLostTimeout)
	for {
		select {
		case event := <-w.ResultChan():
			o, ok := event.Object.(metav1.Object)
			Expect(ok).To(BeTrue(), "watching gave %v", event)
			if event.Type == watch.Deleted && one(o) {
				return must(strconv.Atoi(o.GetResourceVersion()))
			}
		case <-limit:
			Fail("nothing was deleted within " + nodeLostTimeout.String())
		}
	}
}

// freesNewNodes makes a worker look as if it had just joined.
func freesNewNodes(ctx SpecContext) {
	worker := workers[0]
	patch := func(operations string) error {
		_, err := api.StorageV1().CSINodes().Patch(ctx, worker, types.MergePatchType,
			[]byte(operations), metav1.PatchOptions{})
		return err
	}
	startup := func() (bool, error) { return tainted(ctx, worker) }
	Expect(patch(`{"spec":{"drivers":[]}}`)).To(Succeed())
	taintStartup(ctx, worker)
	Consistently(startup).WithContext(ctx).WithTimeout(6*time.Second).Should(BeTrue(),
		"the driver is not registered")
	removePod(ctx, installedPod(ctx, ofNode, worker), metav1.DeleteOptions{})
	Eventually(startup).WithContext(ctx).Should(BeFalse(), "the driver should be registered")
	Expect(instanceOf(ctx, worker)).To(Equal(instanceIDs[worker]))
	serving(ctx)
}

// tainted reports whether a node has the startup taint.
func tainted(ctx context.Context, name string) (bool, error) {
	n, err := api.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	return err == nil && slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == startupTaint
	}), err
}
