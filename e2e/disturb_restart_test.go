//go:build e2e

package e2e

import (
	"context"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// slowly delays the creation of a disk, or its appearance in the guest, so that a spec can act
// before it.
const slowly = "3s"

var _ = Describe("a restart", func() {
	It("of the driver on a node, by deletion and by SIGKILL, or of the kubelet disturbs no "+
		"pod that runs or starts (B-10, D-42)", func(ctx SpecContext) {
		doctor, on := newDoctor(ctx), workers[0]
		claim := s.Claim(ctx, Claim{})
		runner := s.Beating(ctx, on, claim)
		sum := runner.Fill(ctx)
		elsewhere := s.Beating(ctx, workers[1], s.Claim(ctx, Claim{}))
		mounts := mountsOf(ctx, on)
		switchRack(ctx, map[string]any{"device_delay": slowly}, map[string]any{"device_delay": "0s"})

		By("deleting the driver's pod while another pod's volume is staged", func() {
			staged := s.Staging(ctx, on)
			removePod(ctx, installedPod(ctx, ofNode, on), metav1.DeleteOptions{})
			staged.Running(ctx)
		})
		By("killing the driver's process while another pod's volume is staged", func() {
			serving(ctx)
			before := installedPod(ctx, ofNode, on)
			staged := s.Staging(ctx, on)
			kill(ctx, before, "oxide-plugin")
			doctor.findsNothing(ctx, "pvc", s.path(claim)) // a pod that runs needs no driver
			staged.Running(ctx)
			restarted(ctx, before, "oxide-plugin")
		})
		By("restarting the kubelet while another pod's volume is staged", func() {
			staged := s.Staging(ctx, on)
			must(machines[on].run(ctx, "systemctl restart kubelet"))
			staged.Running(ctx)
		})
		serving(ctx)
		Expect(mountsOf(ctx, on)).To(ContainElements(mounts),
			"the mounts of the pod that ran all the time")
		elsewhere.Beats(ctx)
		last := runner.Beats(ctx)
		runner.Delete(ctx)
		moved := s.Beating(ctx, workers[1], claim)
		Expect(moved.Beats(ctx)).To(BeNumerically(">", last), "no write is lost")
		Expect(moved.Sum(ctx)).To(Equal(sum))
	}, NodeTimeout(6*time.Minute))

	It("of the leading controller, while it creates volumes, loses none and creates none "+
		"twice, and a restart of the rack does not disturb running pods (D-8, B-13)",
		func(ctx SpecContext) {
			doctor := newDoctor(ctx)
			before := must(theRack.Admin.State(ctx))
			claims := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})}
			runners := []*pod{
				s.Beating(ctx, workers[0], claims[0]), s.Beating(ctx, workers[1], claims[1])}
			sum := runners[0].Fill(ctx)
			stay := func() {
				for _, p := range runners {
					p.Beats(ctx)
				}
				Expect(runners[0].Sum(ctx)).To(Equal(sum))
			}

			By("killing the controller that leads while it makes volumes", func() {
				switchRack(ctx, map[string]any{"create_hold": slowly},
					map[string]any{"create_hold": "0s"})
				since := lastRequest(ctx)
				var waiting []*pod
				for i := range 4 {
					claim := s.Claim(ctx, Claim{})
					claims = append(claims, claim)
					waiting = append(waiting,
						s.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[i%len(workers)]}))
				}
				leads := leader(ctx, provisionerLease, ofController)
				// The disk exists before its request is answered, but the rack logs the request only after
				// the answer.
				Eventually(func() int { return len(newDisks(ctx, before)) }).WithContext(ctx).
					Should(BeNumerically(">", len(runners)), "the rack should be making disks")
				Expect(len(requestsOf(ctx, "disk_create", since))).To(BeNumerically("<", len(waiting)),
					"some callers should still wait for their answer")
				now := int64(0)
				removePod(ctx, leads, metav1.DeleteOptions{GracePeriodSeconds: &now})
				for _, p := range waiting {
					p.Running(ctx)
				}
				s.OneDiskEach(ctx, before, claims...)
				Expect(leader(ctx, provisionerLease, ofController).UID).NotTo(Equal(leads.UID))
				stay()
			})
			devices := loopDevices(ctx)
			By("killing the rack's process", func() {
				rack := installedPod(ctx, ofSimulator, "")
				kill(ctx, rack, simulatorName)
				started := s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}})
				restarted(ctx, rack, simulatorName)
				rackServes(ctx)
				Expect(loopDevices(ctx)).To(ContainElements(devices), "the guests keep their devices")
				stay()
				started.Running(ctx)
				doctor.findsNothing(ctx, "pvc", s.path(claims[0]))
			})
			By("ending the rack's pod in good order", func() {
				removePod(ctx, installedPod(ctx, ofSimulator, ""), metav1.DeleteOptions{})
				stay()
				serving(ctx)
				Expect(loopDevices(ctx)).To(ContainElements(devices), "the guests keep their devices")
				stay()
				s.Beating(ctx, workers[0], s.Claim(ctx, Claim{}))
			})
		}, NodeTimeout(6*time.Minute))
})

// provisionerLease is the Lease of the leading provisioner. The driver in its pod gets its calls.
const provisionerLease = "csi-oxide-computer"

// leader waits until one of the installation's pods that match a selector holds a Lease, and
// returns it.
func leader(ctx context.Context, name, selector string) corev1.Pod {
	var leads corev1.Pod
	Eventually(func(g Gomega) {
		lease, err := api.CoordinationV1().Leases(driverNamespace).Get(ctx, name, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		spec := lease.Spec
		g.Expect(spec.HolderIdentity).NotTo(BeNil())
		g.Expect(spec.RenewTime).NotTo(BeNil())
		g.Expect(time.Since(spec.RenewTime.Time).Seconds()).To(
			BeNumerically("<", *spec.LeaseDurationSeconds), "the lease %+v", spec)
		all := installedPods(ctx, selector, "")
		i := slices.IndexFunc(all, func(p corev1.Pod) bool { return p.Name == *spec.HolderIdentity })
		g.Expect(i).NotTo(Equal(-1), "the holder is %s", *spec.HolderIdentity)
		leads = all[i]
	}).WithContext(ctx).Should(Succeed(), "one of the pods with %s should lead", selector)
	return leads
}

// loopDevices returns the loop devices of the rack, with the serials of their disks.
func loopDevices(ctx context.Context) []string {
	state := must(theRack.Admin.State(ctx))
	var devices []string
	for _, d := range state.LoopDevices {
		devices = append(devices, d.Path+" "+d.Serial)
	}
	return devices
}
