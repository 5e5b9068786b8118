//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

var _ = Describe("the node keeper", Ordered, ContinueOnFailure, func() {
	BeforeAll(func(ctx SpecContext) {
		// If both controllers run on the node, nothing is attached while it is off.
		spreadControllers(ctx)
		guestsFollow(ctx)
		installKeeper(ctx)
	}, NodeTimeout(2*rolloutTimeout))

	It("stops each of two nodes once for twenty pods with volumes, and no write is lost (D-61)",
		Label("long"), attachesToMany, NodeTimeout(2*keeperTimeout))
	It("ends an operation whose leader dies, while a StatefulSet grows (D-61)",
		survivesItsLeader, NodeTimeout(2*keeperTimeout))
	It("moves a volume that stays with its node to the other node, with its data (D-61)",
		Label("long"), movesWhatStays, NodeTimeout(2*keeperTimeout))
	It("passes the volumes of a node whose instance is stopped to the other node (D-38, D-61)", fences,
		NodeTimeout(2*nodeLostTimeout))
	It("keeps the driver on a leaving node until its volumes are detached, and lets it end at "+
		"once on a node that stays (D-38)", keepsTheDriver, NodeTimeout(keeperTimeout))
	It("removes the startup taint when the driver is registered, and not before (CP-9)", freesNewNodes,
		NodeTimeout(2*time.Minute))
})

// attachesToMany creates pods on a rack without hot-plug, on nodes that already run some.
func attachesToMany(ctx SpecContext) {
	const all = 20
	var kept []*pod
	sums := map[*pod]string{}
	for _, worker := range workers {
		p := s.Beating(ctx, worker, s.Claim(ctx, Claim{}))
		kept, sums[p] = append(kept, p), p.Fill(ctx)
	}
	withoutHotplug(ctx)
	since, began := lastRequest(ctx), time.Now()
	for range all - len(kept) {
		s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}, Script: "echo written > /data/0/file"})
	}
	s.allReady(ctx, all)
	took := time.Since(began)
	coldAttached(ctx)

	lost, restarted := 0, 0
	for _, p := range kept {
		p.RunningSinceBoot(ctx)
		restarted += int(p.get(ctx).Status.ContainerStatuses[0].RestartCount)
		lost += p.lostBeats(ctx)
		Expect(p.Sum(ctx)).To(Equal(sums[p]))
	}
	stops := stopsSince(ctx, since)
	fmt.Printf("FIGURE cold-attach pods=%d nodes=%d stops=%d lost=%d seconds=%.0f restarts=%d\n", all,
		len(workers), stops[workers[0]]+stops[workers[1]], lost, took.Seconds(), restarted)
	Expect(stops).To(Equal(map[string]int{workers[0]: 1, workers[1]: 1}))
	Expect(lost).To(BeZero(), "writes that were durable and are not there")
}

// survivesItsLeader kills the leading keeper, so that it keeps its lease, while an instance is
// stopped.
func survivesItsLeader(ctx SpecContext) {
	kept := s.Keepers(ctx, diskClass, "kept", 3)
	sums := map[*pod]string{}
	for _, p := range kept {
		sums[p] = p.Fill(ctx)
	}
	withoutHotplug(ctx)
	since := lastRequest(ctx)
	stopped := workers[0]
	if leader(ctx, keeperLease, ofKeeper).Spec.NodeName == stopped {
		stopped = workers[1]
	}
	onlyOn(ctx, stopped)
	scale(ctx, "kept", 6)
	for i := 3; i < 6; i++ {
		(&pod{s: s, name: fmt.Sprintf("kept-%d", i)}).Pending(ctx, mustBeStopped...)
	}
	for _, worker := range workers {
		cordon(ctx, worker, false)
	}
	Expect(inStep(ctx, "Stopping", "Attaching")).To(Equal(stopped))
	dies := leader(ctx, keeperLease, ofKeeper)
	Expect(dies.Spec.NodeName).NotTo(Equal(stopped), "no keeper stops its own node")
	// The frozen process does not notice the pod's deletion, so it keeps its lease until the lease
	// expires.
	must(machines[dies.Spec.NodeName].run(ctx, "kill -STOP "+
		processOf(ctx, dies, "oxide-node-keeper")))
	now := int64(0)
	removePod(ctx, dies, metav1.DeleteOptions{GracePeriodSeconds: &now})

	s.allReady(ctx, 6)
	coldAttached(ctx)
	Expect(stopsSince(ctx, since)).To(Equal(map[string]int{stopped: 1}))
	Expect(recorded(ctx, stopped)).To(HaveField("Last.Problem", BeEmpty()))
	for _, p := range kept {
		Expect(p.Sum(ctx)).To(Equal(sums[p]))
		if p.Node(ctx) == stopped {
			p.RunningSinceBoot(ctx)
			Expect(p.lostBeats(ctx)).To(BeZero(), "writes of %s", p.name)
		}
	}
}

// allReady waits until this many pods of the spec are ready.
func (f *fixture) allReady(ctx context.Context, want int) {
	Eventually(func(g Gomega) {
		list, err := api.CoreV1().Pods(f.ns).List(ctx, metav1.ListOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		ready := 0
		for _, p := range list.Items {
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
					ready++
				}
			}
		}
		g.Expect(ready).To(Equal(want))
	}).WithContext(ctx).WithTimeout(keeperTimeout).Should(Succeed(), "%d pods should be ready", want)
}

// movesWhatStays deletes a pod whose volume stays with its node, and then moves the volume.
func movesWhatStays(ctx SpecContext) {
	class := s.Class(ctx, Class{Parameters: map[string]string{"placement": "instance"}})
	p := s.Keepers(ctx, class, "stays", 1)[0]
	sum, from := p.Fill(ctx), p.Node(ctx)
	volume := s.Bound(ctx, "data-"+p.name)
	Expect(volume.Spec.PersistentVolumeReclaimPolicy).To(Equal(corev1.PersistentVolumeReclaimDelete))

	By("deleting the pod on a rack without hot-plug", func() {
		withoutHotplug(ctx)
		since, uid, last := lastRequest(ctx), p.get(ctx).UID, p.Beats(ctx)
		Expect(api.CoreV1().Pods(s.ns).Delete(ctx, p.name, metav1.DeleteOptions{})).To(Succeed())
		Eventually(func() types.UID { return p.Present(ctx).get(ctx).UID }).WithContext(ctx).
			ShouldNot(Equal(uid), "the pod should be made again")
		s.allReady(ctx, 1)
		coldAttached(ctx)
		Expect(p.Node(ctx)).To(Equal(from))
		Expect(p.beat(ctx)).To(BeNumerically(">=", last), "no write is lost")
		Expect(p.Sum(ctx)).To(Equal(sum))
		// Kubernetes may have begun to detach the disk before it saw the new pod.
		fmt.Printf("FIGURE same-node stops=%d\n", stopsSince(ctx, since)[from])
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
	})
	By("moving the volume", func() {
		to := workers[0]
		if from == to {
			to = workers[1]
		}
		since, last := lastRequest(ctx), p.beat(ctx)
		moveVolume(ctx, volume.Name, to)
		Eventually(func() string { return p.Present(ctx).Node(ctx) }).WithContext(ctx).Should(Equal(to))
		p.Running(ctx)
		Expect(p.Beats(ctx)).To(BeNumerically(">", last), "no write is lost")
		Expect(p.Sum(ctx)).To(Equal(sum))
		moved := s.Bound(ctx, "data-"+p.name)
		Expect(moved.Name).To(Equal(volume.Name))
		Expect(moved.UID).NotTo(Equal(volume.UID))
		Expect(moved.Status.Phase).To(Equal(corev1.VolumeBound))
		Expect(moved.Spec.PersistentVolumeReclaimPolicy).To(
			Equal(volume.Spec.PersistentVolumeReclaimPolicy))
		Expect(moved.Spec.CSI.VolumeHandle).To(Equal(volume.Spec.CSI.VolumeHandle))
		s.AttachedTo(ctx, volume.Spec.CSI.VolumeHandle, to)
		Expect(requestsOf(ctx, "disk_delete", since)).To(BeEmpty())
	})
}

// moveVolume runs the command move on this machine, as an operator does.
func moveVolume(ctx context.Context, volume, node string) {
	program := filepath.Join(GinkgoT().TempDir(), "oxide-node-keeper")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, "../cmd/oxide-node-keeper")
	build.Stderr = GinkgoWriter
	Expect(build.Run()).To(Succeed())
	move := exec.CommandContext(ctx, program, "move", volume, node)
	move.Env = append(harness.Environ(), "KUBECONFIG="+filepath.Join(config.work, "kubeconfig"))
	out, err := move.CombinedOutput()
	GinkgoWriter.Printf("%s", out)
	Expect(err).NotTo(HaveOccurred(), "%s", out)
}
