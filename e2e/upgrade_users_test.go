//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	// lost of the acknowledged bytes of the journals are not there; restarted counts restarts of the
	// pods, seen the pods, and checked the bytes that were read and compared.
	lost, acknowledged, restarted, seen, checked int
}

// journal is a script that appends numbers to a file on the first volume, durably, and records the
// last acknowledged number outside of the volume.
const journal = `
(
	n=$(wc -l </data/0/journal 2>/dev/null || echo 0)
	while :; do
		n=$((n+1))
		echo $n | dd of=/data/0/journal oflag=append conv=notrunc,fsync 2>/dev/null &&
			echo $n >/tmp/next && mv /tmp/next /tmp/acknowledged || touch /tmp/broken
		sleep 0.1
	done
) &`

// missing is a script that prints how many bytes of the first %d lines of the journal are missing,
// and how many there have to be.
const missing = `awk -v last=%d '{there[$1] = 1} END {
	for (i = 1; i <= last; i++) { n = length(i) + 1; all += n; if (!(i in there)) lost += n }
	print lost + 0, all + 0
}' /data/0/journal`

// These scripts write to the first pod's device, and read from it.
const (
	writeRaw = "dd if=/dev/urandom of=/dev/data-1 bs=1M count=16 conv=fsync 2>/dev/null"
	readRaw  = "dd if=/dev/data-1 bs=1M count=16 2>/dev/null"
)

// begin starts the pods.
func (u *users) begin(ctx context.Context) {
	GinkgoHelper()
	u.claims = [2][]string{
		{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{Block: true})}, {s.Claim(ctx, Claim{})}}
	u.start(ctx)
	for i, p := range u.pods {
		u.sums[i] = p.Fill(ctx)
	}
	u.pods[0].Sh(ctx, writeRaw)
	u.raw = u.rawSum(ctx)
}

// start creates the pods, the first on the worker with index on, and one with a new volume.
func (u *users) start(ctx context.Context) {
	GinkgoHelper()
	for i := range u.pods {
		u.pods[i] = s.Pod(ctx, Pod{Claims: u.claims[i], Node: workers[(u.on+i)%len(workers)],
			Script: beating + journal})
	}
	fresh := s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}, Script: beating})
	for _, p := range append(u.pods[:], fresh) {
		p.Running(ctx).Beats(ctx)
	}
}

func (u *users) rawSum(ctx context.Context) string {
	GinkgoHelper()
	return u.pods[0].Sh(ctx, readRaw+" | sha256sum")
}

// live changes the release while the pods write and while the volume of one more pod is being
// staged, and returns how long that took. Then the pods change places, so that the new release
// unmounts and detaches what the old one has mounted and attached.
func (u *users) live(ctx context.Context, change func()) time.Duration {
	GinkgoHelper()
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
	u.check(ctx)
	var acknowledged [2]int
	for i, p := range u.pods {
		p.Scan(ctx, "cat /tmp/acknowledged", &acknowledged[i])
	}
	deletePods(ctx, u.pods[0], u.pods[1], starting)
	u.on++
	u.start(ctx)
	s.AttachedTo(ctx, disk, "")
	u.check(ctx)
	for i, p := range u.pods {
		var lost, all int
		p.Scan(ctx, fmt.Sprintf(missing, acknowledged[i]), &lost, &all)
		Expect(all).To(BeNumerically(">", 0))
		u.lost, u.acknowledged = u.lost+lost, u.acknowledged+all
	}
	return took
}

// halfStaged creates a pod whose volume is attached to a node but whose device does not appear
// there. The node's driver waits for the device until the disk is attached again.
func (f *fixture) halfStaged(ctx context.Context, node string) (p *pod, disk string) {
	GinkgoHelper()
	faults(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Device: &adminapi.DeviceFault{Never: true}})
	p = f.Staging(ctx, node)
	claim := p.get(ctx).Spec.Volumes[0].PersistentVolumeClaim.ClaimName
	return p, f.Bound(ctx, claim).Spec.CSI.VolumeHandle
}

// appearWithEnd attaches the disk of a half-staged pod again at the moment when the node's driver
// is asked to end. Until then the driver has waited for the device, and so has the pod.
func appearWithEnd(ctx context.Context, p *pod, disk, node string) (appeared <-chan struct{}) {
	GinkgoHelper()
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

// check checks that the pods still write and that everything they wrote is there, and counts it.
func (u *users) check(ctx context.Context) {
	GinkgoHelper()
	var n int
	for i, p := range u.pods {
		p.Beats(ctx)
		Expect(p.Sum(ctx)).To(Equal(u.sums[i]), "what pod %s reads", p.name)
		p.Scan(ctx, "wc -c </data/0/random", &n)
		u.checked += n
	}
	Expect(u.rawSum(ctx)).To(Equal(u.raw), "what pod %s reads of the device", u.pods[0].name)
	u.pods[0].Scan(ctx, readRaw+" | wc -c", &n)
	u.checked += n
	list, err := api.CoreV1().Pods(s.ns).List(ctx, metav1.ListOptions{})
	Expect(err).NotTo(HaveOccurred())
	u.seen = max(u.seen, len(list.Items))
	for _, p := range list.Items {
		for _, c := range p.Status.ContainerStatuses {
			u.restarted += int(c.RestartCount)
		}
	}
}

// Scan runs a script in the pod and parses its output into variables.
func (p *pod) Scan(ctx context.Context, script string, into ...any) {
	GinkgoHelper()
	_, err := fmt.Sscan(p.Sh(ctx, script), into...)
	Expect(err).NotTo(HaveOccurred(), "what pod %s printed for %s", p.name, script)
}
