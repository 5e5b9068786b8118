//go:build e2e

package e2e

import (
	"context"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
)

var _ = Describe("an installation", func() {
	It("can be removed while volumes are in use, made again in a cluster without snapshots, and "+
		"removed with nothing left (D-57)", func(ctx SpecContext) {
		doctor := newDoctor(ctx)
		definitions := must(crds(config.crds))
		plain := must(withoutSnapshots())
		DeferCleanup(func(ctx SpecContext) {
			defined(ctx, definitions)
			install(ctx)
		}, NodeTimeout(2*rolloutTimeout))
		claims := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})}
		staying := s.Beating(ctx, workers[0], claims[0])
		sum := staying.Fill(ctx)
		leaving := s.Beating(ctx, workers[1], claims[1])

		By("removing the driver, and the snapshots' kinds, while pods have volumes", func() {
			uninstall(ctx)
			Expect(removeAll(ctx, definitions)).To(Succeed())
			api.mapper.Reset()
			unregistered(ctx)
			doctor.finds(ctx, "node", "", "pvc", s.path(claims[0]))
			staying.Beats(ctx)
			// The volume cannot be unmounted now, so the pod's deletion waits.
			Expect(api.CoreV1().Pods(s.ns).Delete(ctx, leaving.name, metav1.DeleteOptions{})).
				To(Succeed())
		})
		By("installing the driver where nothing knows of snapshots", func() {
			installed = plain
			Expect(applyAll(ctx, plain)).To(Succeed())
			serving(ctx)
			Expect(staying.Sum(ctx)).To(Equal(sum))
			staying.Beats(ctx)
			leaving.gone(ctx)
			s.Beating(ctx, workers[1], claims[1]).Delete(ctx)
			staying.Delete(ctx)
			for _, claim := range claims {
				s.DeleteClaim(ctx, claim)
			}
			noVolumes(ctx)
		})
		By("removing the driver when no volume is left", func() {
			uninstall(ctx)
			unregistered(ctx)
			for _, worker := range workers {
				Expect(machines[worker].run(ctx, remains)).To(BeEmpty(), "on %s", worker)
			}
		})
		By("installing it as it was", func() {
			defined(ctx, definitions)
			install(ctx)
			again := s.Claim(ctx, Claim{})
			source := s.Beating(ctx, workers[0], again)
			taken := s.Snapshot(ctx, again).Ready(ctx)
			taken.Delete(ctx)
			source.Beats(ctx)
		})
	}, NodeTimeout(8*time.Minute))
})

// remains is a script for a node. It prints what an installation has left there.
const remains = `
for dir in /var/lib/kubelet/plugins/csi.oxide.computer /run/csi.oxide.computer; do
	[ ! -d $dir ] || find $dir ! -type d ! -path "*/flight/*" ! -name lock
done
find /var/lib/kubelet/plugins_registry /var/lib/kubelet/plugins/kubernetes.io -name '*oxide*' \
	! -type d 2>/dev/null
grep -e kubernetes.io.csi -e csi.oxide /proc/mounts
true`

// withoutSnapshots returns what the suite installs, for a cluster without the kinds for snapshots.
func withoutSnapshots() ([]*unstructured.Unstructured, error) {
	memory, err := manifests(deploy.Files)
	if err != nil {
		return nil, err
	}
	const file = "/" + overlay + "/kustomization.yaml"
	text, err := memory.ReadFile(file)
	if err != nil {
		return nil, err
	}
	changed := strings.NewReplacer("  - ../snapshots\n", "  - ../base\n",
		"  - ../snapshot-controller\n", "").Replace(string(text))
	if err := memory.WriteFile(file, []byte(changed)); err != nil {
		return nil, err
	}
	return kustomizedIn(memory, overlay)
}

// uninstall removes the installation without the rack. The rack keeps the namespace, so uninstall
// also removes the leases, which would otherwise go with the namespace.
func uninstall(ctx context.Context) {
	Expect(removeAll(ctx, withoutRack(installed))).To(Succeed())
	removeLeases(ctx, driverNamespace, "csi-oxide")
}

// removeLeases removes the leases of a namespace whose names contain part, so that nobody waits for
// a leader that is gone.
func removeLeases(ctx context.Context, namespace, part string) {
	leases := api.CoordinationV1().Leases(namespace)
	for _, lease := range must(leases.List(ctx, metav1.ListOptions{})).Items {
		if strings.Contains(lease.Name, part) {
			Expect(leases.Delete(ctx, lease.Name, metav1.DeleteOptions{})).To(Succeed())
		}
	}
}

// withoutRack returns the objects without the simulated rack and its namespace.
func withoutRack(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
	return slices.DeleteFunc(slices.Clone(objects), func(o *unstructured.Unstructured) bool {
		return o.GetKind() == "Namespace" || o.GetName() == simulatorName
	})
}

// unregistered waits until no pod of the driver is left, and no kubelet has the driver registered.
func unregistered(ctx context.Context) {
	Eventually(func(g Gomega) {
		list, err := api.CoreV1().Pods(driverNamespace).List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=oxide-csi-driver"})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(list.Items).To(BeEmpty())
		for _, worker := range workers {
			csiNode, err := api.StorageV1().CSINodes().Get(ctx, worker, metav1.GetOptions{})
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(csiNode.Spec.Drivers).To(BeEmpty())
		}
	}).WithContext(ctx).Should(Succeed(), "nothing of the driver should be left in the cluster")
}

// noVolumes waits until the cluster has no PersistentVolume and no VolumeAttachment of the driver.
func noVolumes(ctx context.Context) {
	for _, kind := range clusterKinds {
		Eventually(func() (int, error) {
			objects, err := api.list(ctx, kind)
			return len(objects), err
		}).WithContext(ctx).Should(BeZero(), "objects of the kind %s", kind.Kind)
	}
}

// defined defines kinds and waits until the API serves them.
func defined(ctx context.Context, definitions []*unstructured.Unstructured) {
	Expect(applyAll(ctx, definitions)).To(Succeed())
	for _, definition := range definitions {
		Eventually(func(g Gomega) {
			client, err := api.resource(definition.GroupVersionKind(), "")
			g.Expect(err).NotTo(HaveOccurred())
			now, err := client.Get(ctx, definition.GetName(), metav1.GetOptions{})
			g.Expect(err).NotTo(HaveOccurred())
			conditions, _, err := unstructured.NestedSlice(now.Object, "status", "conditions")
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(conditions).To(ContainElement(And(
				HaveKeyWithValue("type", "Established"), HaveKeyWithValue("status", "True"))))
		}).WithContext(ctx).Should(Succeed(), "%s should be established", definition.GetName())
	}
	api.mapper.Reset()
}
