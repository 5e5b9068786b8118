//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/docs"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = Describe("an installation", func() {
	It("can be removed while volumes are in use, installed again without snapshots, and then "+
		"removed completely (D-57)", func(ctx SpecContext) {
		doctor := newDoctor(ctx)
		definitions := crds(config.CRDs)
		plain := withoutSnapshots()
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
			removeAll(ctx, definitions)
			api.mapper.Reset()
			unregistered(ctx)
			doctor.finds(ctx, "node", "", "pvc", s.path(claims[0]))
			staying.Beats(ctx)
			// Without the driver, kubelet cannot unmount the volume, so the deletion of the pod waits.
			Expect(api.CoreV1().Pods(s.ns).Delete(ctx, leaving.name, metav1.DeleteOptions{})).
				To(Succeed())
		})
		By("installing the driver where nothing knows of snapshots", func() {
			installed = plain
			applyAll(ctx, plain)
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
	}, NodeTimeout(8*time.Minute))
})

// remains is a shell script that prints what the driver has left on a node.
const remains = `
for dir in /var/lib/kubelet/plugins/csi.oxide.computer /run/csi.oxide.computer; do
	[ ! -d $dir ] || find $dir ! -type d ! -path "*/flight/*" ! -name lock
done
find /var/lib/kubelet/plugins_registry /var/lib/kubelet/plugins/kubernetes.io -name '*oxide*' \
	! -type d 2>/dev/null
grep -e kubernetes.io.csi -e csi.oxide /proc/mounts
true`

func withoutSnapshots() []*unstructured.Unstructured {
	text := must(deploy.Files.ReadFile(overlay + "/kustomization.yaml"))
	return kustomized(deploy.Files, overlay, strings.NewReplacer("  - ../snapshots\n", "  - ../base\n",
		"  - ../snapshot-controller\n", "").Replace(string(text)))
}

// uninstall removes the installation except the rack. The rack's namespace stays, so uninstall has
// to remove the leases in it.
func uninstall(ctx context.Context) {
	removeAll(ctx, withoutRack(installed))
	removeLeases(ctx, driverNamespace, "csi-oxide")
}

// removeLeases deletes a namespace's leases with this text in their names, so that the next leader
// need not wait until they expire.
func removeLeases(ctx context.Context, namespace, part string) {
	leases := api.CoordinationV1().Leases(namespace)
	for _, lease := range must(leases.List(ctx, metav1.ListOptions{})).Items {
		if strings.Contains(lease.Name, part) {
			Expect(leases.Delete(ctx, lease.Name, metav1.DeleteOptions{})).To(Succeed())
		}
	}
}

func withoutRack(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
	return slices.DeleteFunc(slices.Clone(objects), func(o *unstructured.Unstructured) bool {
		return o.GetKind() == "Namespace" || o.GetName() == simulatorName
	})
}

func unregistered(ctx context.Context) {
	Eventually(func(g Gomega) {
		list, err := api.CoreV1().Pods(driverNamespace).List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=oxide-csi-driver"})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(list.Items).To(BeEmpty())
		for _, worker := range workers {
			csiNode := read(ctx, g, api.StorageV1().CSINodes(), worker)
			g.Expect(csiNode.Spec.Drivers).To(BeEmpty())
		}
	}).WithContext(ctx).Should(Succeed(), "nothing of the driver should be left in the cluster")
}

func noVolumes(ctx context.Context) {
	for _, kind := range clusterKinds {
		Eventually(func() (int, error) {
			objects, err := api.list(ctx, kind)
			return len(objects), err
		}).WithContext(ctx).Should(BeZero(), "objects of the kind %s", kind.Kind)
	}
}

func defined(ctx context.Context, definitions []*unstructured.Unstructured) {
	applyAll(ctx, definitions)
	kubectl(ctx, "wait crd --all --for=condition=Established --timeout="+rolloutTimeout.String())
	api.mapper.Reset()
}

// onlyNewer is the name of a ConfigMap that only the newer release has.
const onlyNewer = "oxide-csi-dashboard"

// These scripts install, upgrade, downgrade and remove the driver as in docs/howto/upgrade.md, and
// wait for the result. $RELEASES contains the manifests of both releases.
const (
	installOlder = `
kubectl apply -f $RELEASES/older` + rollout
	upgradeToNewer = `
kubectl apply -f $RELEASES/newer` + rollout
	backToOlder = installOlder + `
for release in older newer; do
	kubectl create --dry-run=client -o name -f $RELEASES/$release | sort >$RELEASES/$release.names
done
comm -13 $RELEASES/older.names $RELEASES/newer.names | xargs kubectl delete --namespace oxide-csi`
	removeBoth = `
kubectl delete --ignore-not-found -f $RELEASES/newer -f $RELEASES/older`
)

const rollout = `
kubectl rollout status --namespace oxide-csi deployment/oxide-csi-controller --timeout 5m
kubectl rollout status --namespace oxide-csi daemonset/oxide-csi-node --timeout 5m`

var _ = Describe("an upgrade or downgrade", func() {
	It("disturbs no pod and loses no write, and each release can use the other "+
		"release's volumes (D-57, B-10)", upgrades, NodeTimeout(8*time.Minute))
})

func upgrades(ctx SpecContext) {
	if config.Previous == "" {
		Skip("this tree has no history, and so no release before it")
	}
	releases, u := filepath.Join(GinkgoT().TempDir(), "releases"), &users{}
	writeReleases(releases)
	r := newReader(ctx, "RELEASES="+releases)
	DeferCleanup(func(ctx SpecContext) {
		r.run(ctx, docs.Block{At: "removing both releases", Text: removeBoth})
		removeLeases(ctx, driverNamespace, "csi-oxide")
		install(ctx)
	}, NodeTimeout(3*rolloutTimeout))
	uninstall(ctx)
	unregistered(ctx)
	run := func(what, commands string) {
		By(what, func() { r.run(ctx, docs.Block{At: what, Text: commands}) })
	}
	run("installing the release before", installOlder)
	driverIs(ctx, true)
	before := csiDriver(ctx)
	u.begin(ctx)
	up := u.live(ctx, func() {
		run("upgrading", upgradeToNewer)
		driverIs(ctx, false)
		Expect(has(ctx, onlyNewer)).To(BeTrue())
	})
	back := u.live(ctx, func() {
		run("going back", backToOlder)
		driverIs(ctx, true)
		Expect(has(ctx, onlyNewer)).To(BeFalse(), "what only the newer release has should be gone")
	})
	Expect(csiDriver(ctx)).To(Equal(before), "the CSIDriver should not have been made again")
	fmt.Printf("FIGURE upgrade from=%s upgrade_seconds=%.0f back_seconds=%.0f\n",
		config.PreviousName, up.Seconds(), back.Seconds())
}

func writeReleases(dir string) {
	older := kustomized(os.DirFS(filepath.Join(config.Previous, "deploy")), "kustomize/older", `
resources: [../e2e]
images:
  - {name: oxidecomputer/oxide-csi-plugin, newTag: previous}
  - {name: oxidecomputer/oxide-csi-plugin-node, newTag: previous}
`)
	newer := kustomized(deploy.Files, "kustomize/newer", `
resources: [../e2e]
configMapGenerator: [{name: `+onlyNewer+`, namespace: oxide-csi, literals: [newer=true]}]
generatorOptions: {disableNameSuffixHash: true}
`)
	for name, objects := range map[string][]*unstructured.Unstructured{
		"older": older, "newer": newer} {
		Expect(os.MkdirAll(filepath.Join(dir, name), 0o755)).To(Succeed())
		text := must(json.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "List", "items": withoutRack(objects)}))
		Expect(os.WriteFile(filepath.Join(dir, name, "all.json"), text, 0o600)).To(Succeed())
	}
}

// driverIs waits until the driver is ready, and checks which of the two releases it runs.
func driverIs(ctx context.Context, previous bool) {
	ready(ctx, "Deployment", driverNamespace, controllerName)
	ready(ctx, "DaemonSet", driverNamespace, nodeName)
	registered(ctx)
	driver := installedPods(ctx, "app in ("+controllerName+","+nodeName+")", "")
	Expect(len(driver)).To(BeNumerically(">", len(workers)))
	for _, p := range driver {
		image := containerStatus(p, "oxide-plugin").Image
		Expect(strings.HasSuffix(image, ":previous")).To(Equal(previous), "%s runs %s", p.Name, image)
	}
}

// csiDriver returns the UID of the CSIDriver object. A new UID means that the object was deleted
// and created again, because a release changes an immutable field.
func csiDriver(ctx context.Context) types.UID {
	return must(api.StorageV1().CSIDrivers().Get(ctx, driverName, metav1.GetOptions{})).UID
}

func has(ctx context.Context, name string) bool {
	return len(must(api.CoreV1().ConfigMaps(driverNamespace).List(ctx,
		metav1.ListOptions{FieldSelector: "metadata.name=" + name})).Items) > 0
}

// users contains two pods that write to filesystems on different workers while the driver's release
// changes. The first pod also has a raw block volume.
type users struct {
	claims [2][]string
	pods   [2]*pod
	sums   [2]string
	raw    string
	// turn counts the swaps of the pods' workers. The first pod runs on workers[turn % len(workers)].
	turn int
}

const rawDevice = "/dev/data-1"

func (u *users) begin(ctx context.Context) {
	u.claims = [2][]string{
		{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{Block: true})}, {s.Claim(ctx, Claim{})}}
	u.start(ctx)
	for i, p := range u.pods {
		u.sums[i] = p.Fill(ctx)
	}
	u.raw = u.pods[0].Sh(ctx, writeNoise(rawDevice))
}

func (u *users) start(ctx context.Context) {
	for i := range u.pods {
		u.pods[i] = s.Pod(ctx, Pod{Claims: u.claims[i], Node: workers[(u.turn+i)%len(workers)],
			Script: beating})
	}
	fresh := s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}, Script: beating})
	for _, p := range append(u.pods[:], fresh) {
		p.Running(ctx).Beats(ctx)
	}
}

// live calls change() and returns its duration. Meanwhile the pods write, and the driver waits for
// the device of another pod. Before live returns, the pods swap workers, so that the driver after
// change() unmounts and detaches what the driver before change() mounted and attached.
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
	u.turn++
	u.start(ctx)
	s.AttachedTo(ctx, disk, "")
	for i, beat := range u.check(ctx) {
		Expect(beat).To(BeNumerically(">", last[i]), "no write of pod %s is lost", u.pods[i].name)
	}
	return took
}

// halfStaged creates a pod with a new volume. The rack attaches the disk, but never shows its
// device to the node. So the node's driver waits until appearWithEnd attaches the disk again.
func (f *fixture) halfStaged(ctx context.Context, node string) (p *pod, disk string) {
	fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Device: &adminapi.DeviceFault{Never: true}})
	p = f.Staging(ctx, node)
	claim := p.get(ctx).Spec.Volumes[0].PersistentVolumeClaim.ClaimName
	return p, f.Bound(ctx, claim).Spec.CSI.VolumeHandle
}

// appearWithEnd waits in a goroutine until the node's driver pod is being deleted. Then it detaches
// and attaches the disk of pod p, so that the device appears, and closes the channel.
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

func (u *users) check(ctx context.Context) (last [2]int) {
	for i, p := range u.pods {
		last[i] = p.Beats(ctx)
		Expect(p.Sum(ctx)).To(Equal(u.sums[i]), "what pod %s reads", p.name)
	}
	Expect(u.pods[0].Sh(ctx, readNoise(rawDevice))).To(Equal(u.raw), "what pod %s reads of the device",
		u.pods[0].name)
	return last
}
