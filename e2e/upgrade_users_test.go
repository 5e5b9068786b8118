//go:build e2e

package e2e

import (
	"context"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// users are pods that write while the driver's release changes. There is one on each worker with a
// filesystem; the first pod also has a raw block volume.
type users struct {
	claims [2][]string
	pods   [2]*pod
	sums   [2]string
	raw    string
	// on is the index of the worker of the first pod.
	on int
}

// rawDevice is the first pod's raw block volume.
const rawDevice = "/dev/data-1"

// begin starts the pods.
func (u *users) begin(ctx context.Context) {
	u.claims = [2][]string{
		{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{Block: true})}, {s.Claim(ctx, Claim{})}}
	u.start(ctx)
	for i, p := range u.pods {
		u.sums[i] = p.Fill(ctx)
	}
	u.raw = u.pods[0].Sh(ctx, writeNoise(rawDevice))
}

// start creates the pods, the first on the worker with index on, and one with a new volume.
func (u *users) start(ctx context.Context) {
	for i := range u.pods {
		u.pods[i] = s.Pod(ctx, Pod{Claims: u.claims[i], Node: workers[(u.on+i)%len(workers)],
			Script: beating})
	}
	fresh := s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}, Script: beating})
	for _, p := range append(u.pods[:], fresh) {
		p.Running(ctx).Beats(ctx)
	}
}

// live changes the release while the pods write and while the volume of one more pod is being
// staged, and returns how long that took. Then the pods change places, so that the new release
// unmounts and detaches what the old one has mounted and attached.
func (u *users) live(ctx context.Context, change func()) time.Duration {
	var mounts [2][]string
	for i, worker := range workers {
		mounts[i] = mountsOf(ctx, worker)
	}
	starting, disk := s.halfStaged(ctx, workers[0])
	appeared := appearWithEnd(ctx, starting, disk, workers[0])
	began := time.Now()
	change()
	took := time.Since(began)
	Eventually(appeared).WithContext(ctx).Should(BeClosed(), "the driver should have been replaced")
	starting.Running(ctx)
	for i, worker := range workers {
		Expect(mountsOf(ctx, worker)).To(ContainElements(mounts[i]), "mounts of %s", worker)
	}
	last := u.check(ctx)
	deletePods(ctx, u.pods[0], u.pods[1], starting)
	u.on++
	u.start(ctx)
	s.AttachedTo(ctx, disk, "")
	for i, beat := range u.check(ctx) {
		Expect(beat).To(BeNumerically(">", last[i]), "no write of pod %s is lost", u.pods[i].name)
	}
	return took
}

// halfStaged creates a pod whose volume is attached to a node but whose device does not appear
// there. The node's driver waits for the device until the disk is attached again.
func (f *fixture) halfStaged(ctx context.Context, node string) (p *pod, disk string) {
	faults(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Device: &adminapi.DeviceFault{Never: true}})
	p = f.Staging(ctx, node)
	claim := p.get(ctx).Spec.Volumes[0].PersistentVolumeClaim.ClaimName
	return p, f.Bound(ctx, claim).Spec.CSI.VolumeHandle
}

// appearWithEnd attaches the disk of a half-staged pod again at the moment when the node's driver
// is asked to end. Until then the driver has waited for the device, and so has the pod.
func appearWithEnd(ctx context.Context, p *pod, disk, node string) (appeared <-chan struct{}) {
	driver := installedPod(ctx, ofNode, node)
	done := make(chan struct{})
	go func() {
		defer GinkgoRecover()
		Eventually(func() bool {
			serves := func(p corev1.Pod) bool { return p.UID == driver.UID }
			return slices.ContainsFunc(installedPods(ctx, ofNode, node), serves)
		}).WithContext(ctx).Should(BeFalse(), "the driver on %s should be told to end", node)
		Expect(p.get(ctx).Status.Phase).To(Equal(corev1.PodPending))
		detachByHand(ctx, disk, node)
		attachByHand(ctx, disk, node)
		close(done)
	}()
	return done
}

// check checks that the pods still write and that everything they wrote is there, and returns the
// numbers of their last writes.
func (u *users) check(ctx context.Context) (last [2]int) {
	for i, p := range u.pods {
		last[i] = p.Beats(ctx)
		Expect(p.Sum(ctx)).To(Equal(u.sums[i]), "what pod %s reads", p.name)
	}
	Expect(u.pods[0].Sh(ctx, readNoise(rawDevice))).To(Equal(u.raw), "what pod %s reads of the device",
		u.pods[0].name)
	return last
}
