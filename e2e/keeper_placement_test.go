//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// staysClass is a class of volumes that stay with their node.
const staysClass = "oxide-disk-stays"

const staysClassObject = `
kind: StorageClass
apiVersion: storage.k8s.io/v1
metadata: {name: ` + staysClass + `}
provisioner: ` + driverName + `
parameters: {placement: instance}
volumeBindingMode: WaitForFirstConsumer
`

// movesWhatStays deletes a pod whose volume stays with its node, and then moves the volume.
func movesWhatStays(ctx SpecContext) {
	class, err := parseObjects([]byte(staysClassObject))
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) { Expect(removeAll(ctx, class)).To(Succeed()) },
		NodeTimeout(restartTimeout))
	Expect(applyAll(ctx, class)).To(Succeed())
	p := s.keepersOf(ctx, staysClass, "stays", 1)[0]
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
	GinkgoHelper()
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
