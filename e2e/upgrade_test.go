//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/docs"
)

// onlyNewer is an object that the newer release has and the previous release does not have.
const onlyNewer = "oxide-csi-dashboard"

// These commands change the release, as docs/howto/upgrade.md does, and wait until that is done.
// $RELEASES has the manifests of both releases.
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

var _ = Describe("an upgrade", func() {
	It("by plain manifests from the previous release to this one, and back, disturbs no "+
		"pod and loses no byte, and each release takes over the other's volumes (D-57, B-10)", upgrades,
		NodeTimeout(8*time.Minute))
})

// upgrades installs the previous release, upgrades it and goes back, while pods write.
func upgrades(ctx SpecContext) {
	if config.previous == "" {
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
		config.previousName, up.Seconds(), back.Seconds())
}

// writeReleases writes the plain manifests of both releases, without the rack, which stays.
func writeReleases(dir string) {
	memory := must(manifests(os.DirFS(filepath.Join(config.previous, "deploy"))))
	Expect(memory.WriteFile("/kustomize/older/kustomization.yaml", []byte(`
resources: [../e2e]
images:
  - {name: oxidecomputer/oxide-csi-plugin, newTag: previous}
  - {name: oxidecomputer/oxide-csi-plugin-node, newTag: previous}
`))).To(Succeed())
	older := must(kustomizedIn(memory, "kustomize/older"))
	newer := must(kustomized("kustomize/newer", `
resources: [../e2e]
configMapGenerator: [{name: `+onlyNewer+`, namespace: oxide-csi, literals: [newer=true]}]
generatorOptions: {disableNameSuffixHash: true}
`))
	for name, objects := range map[string][]*unstructured.Unstructured{
		"older": older, "newer": newer} {
		Expect(os.MkdirAll(filepath.Join(dir, name), 0o755)).To(Succeed())
		text := must(json.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "List", "items": withoutRack(objects)}))
		Expect(os.WriteFile(filepath.Join(dir, name, "all.json"), text, 0o600)).To(Succeed())
	}
}

// driverIs waits until the driver serves, and checks that all of it belongs to the expected
// release.
func driverIs(ctx context.Context, previous bool) {
	poll := func(ready func(context.Context) error) {
		Expect(poll(ctx, rolloutTimeout, ready)).To(Succeed())
	}
	poll(func(ctx context.Context) error {
		return deploymentReady(ctx, driverNamespace, controllerName)
	})
	poll(func(ctx context.Context) error { return daemonSetReady(ctx, driverNamespace, nodeName) })
	for _, worker := range workers {
		Expect(registered(ctx, worker)).To(Succeed())
	}
	driver := installedPods(ctx, "app in ("+controllerName+","+nodeName+")", "")
	Expect(len(driver)).To(BeNumerically(">", len(workers)))
	for _, p := range driver {
		image := containerStatus(p, "oxide-plugin").Image
		Expect(strings.HasSuffix(image, ":previous")).To(Equal(previous), "%s runs %s", p.Name, image)
	}
}

// csiDriver returns the UID of the CSIDriver object. Its immutable fields can change only if it is
// replaced.
func csiDriver(ctx context.Context) types.UID {
	return must(api.StorageV1().CSIDrivers().Get(ctx, driverName, metav1.GetOptions{})).UID
}

// has reports whether the driver's namespace has this ConfigMap.
func has(ctx context.Context, name string) bool {
	list := must(api.CoreV1().ConfigMaps(driverNamespace).List(ctx,
		metav1.ListOptions{FieldSelector: "metadata.name=" + name}))
	return len(list.Items) > 0
}
