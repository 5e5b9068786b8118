//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
)

// Class describes how a StorageClass of a spec differs from oxide-disk.
type Class struct {
	Parameters   map[string]string
	MountOptions []string
	Immediate    bool // a claim is bound before a pod uses it
	Retain       bool // a volume outlives its claim
}

// fsTypeKey is the StorageClass parameter for the filesystem.
const fsTypeKey = "csi.storage.k8s.io/fstype"

var classes atomic.Int64

// Class creates a StorageClass that is deleted when the spec ends, and returns its name.
func (f *fixture) Class(ctx context.Context, c Class) string {
	class := &storagev1.StorageClass{
		ObjectMeta:   metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", f.ns, classes.Add(1))},
		Provisioner:  driverName,
		Parameters:   c.Parameters,
		MountOptions: c.MountOptions,
	}
	binding, reclaim := storagev1.VolumeBindingWaitForFirstConsumer,
		corev1.PersistentVolumeReclaimDelete
	if c.Immediate {
		binding = storagev1.VolumeBindingImmediate
	}
	if c.Retain {
		reclaim = corev1.PersistentVolumeReclaimRetain
	}
	class.VolumeBindingMode, class.ReclaimPolicy = &binding, &reclaim
	must(api.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}))
	f.atEnd(func(ctx context.Context) {
		Expect(api.StorageV1().StorageClasses().Delete(ctx, class.Name, metav1.DeleteOptions{})).
			To(Succeed())
	})
	return class.Name
}

// atEnd calls a function when everything in the spec's namespace is gone, also after a failure.
func (f *fixture) atEnd(do func(context.Context)) {
	DeferCleanup(func(ctx SpecContext) {
		f.close(ctx)
		do(ctx)
	}, NodeTimeout(settleTimeout+time.Minute))
}

// DeleteVolume deletes a PersistentVolume after setting its policy to Retain, as an operator does
// to keep the disk. It is no error if the PersistentVolume is gone.
func (f *fixture) DeleteVolume(ctx context.Context, name string) {
	all := api.CoreV1().PersistentVolumes()
	_, err := all.Patch(ctx, name, types.MergePatchType,
		[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`), metav1.PatchOptions{})
	unlessGone := Or(Succeed(), Satisfy(apierrors.IsNotFound))
	Expect(err).To(unlessGone)
	Expect(all.Delete(ctx, name, metav1.DeleteOptions{})).To(unlessGone)
	volumeGone(ctx, name)
}

// volumeGone waits until a PersistentVolume is gone.
func volumeGone(ctx context.Context, name string) {
	gone(ctx, "the PersistentVolume "+name, func() error {
		_, err := api.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
		return err
	})
}

// VolumeEvent is Event for a PersistentVolume, which has no namespace.
func (f *fixture) VolumeEvent(ctx context.Context, name string, texts ...string) string {
	everywhere := fixture{ns: metav1.NamespaceDefault}
	return everywhere.Event(ctx, "PersistentVolume", name, texts...)
}

var snapshotKind = schema.GroupVersionKind{
	Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshot"}

var snapshotContentKind = schema.GroupVersionKind{
	Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"}

// snapshot is a VolumeSnapshot.
type snapshot struct {
	name   string
	object *unstructured.Unstructured
	// content is the name of its VolumeSnapshotContent, and handle the snapshot's UUID on the rack.
	content, handle string
}

var snapshots atomic.Int64

// Snapshot requests a snapshot of a claim. The snapshot is taken when Ready returns.
func (f *fixture) Snapshot(ctx context.Context, claim string) *snapshot {
	made := &snapshot{name: fmt.Sprintf("snapshot-%d", snapshots.Add(1))}
	made.object = &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": made.name, "namespace": f.ns},
		"spec": map[string]any{
			"volumeSnapshotClassName": snapshotClass,
			"source":                  map[string]any{"persistentVolumeClaimName": claim},
		},
	}}
	made.object.SetGroupVersionKind(snapshotKind)
	Expect(api.apply(ctx, made.object)).To(Succeed())
	return made
}

// Ready waits until a snapshot can be restored.
func (n *snapshot) Ready(ctx context.Context) *snapshot {
	all := must(api.resource(snapshotKind, n.object.GetNamespace()))
	Eventually(func(g Gomega) {
		got, err := all.Get(ctx, n.name, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		ready, _, _ := unstructured.NestedBool(got.Object, "status", "readyToUse")
		g.Expect(ready).To(BeTrue(), "its status is %v", got.Object["status"])
		n.content, _, _ = unstructured.NestedString(got.Object, "status",
			"boundVolumeSnapshotContentName")
	}).WithContext(ctx).Should(Succeed(), "the snapshot %s should be ready", n.name)
	content := must(must(api.resource(snapshotContentKind, "")).Get(ctx, n.content,
		metav1.GetOptions{}))
	n.handle, _, _ = unstructured.NestedString(content.Object, "status", "snapshotHandle")
	Expect(n.handle).NotTo(BeEmpty())
	return n
}

// Delete deletes a snapshot that is ready, and waits until it is gone from the cluster.
func (n *snapshot) Delete(ctx context.Context) {
	Expect(removeAll(ctx, []*unstructured.Unstructured{n.object})).To(Succeed())
	contents := must(api.resource(snapshotContentKind, ""))
	gone(ctx, "the content of "+n.name, func() error {
		_, err := contents.Get(ctx, n.content, metav1.GetOptions{})
		return err
	})
}

// applyExample applies an example of package deploy in the spec's namespace. edit may change it
// first.
func (f *fixture) applyExample(ctx context.Context, name string,
	edit func(*unstructured.Unstructured)) {
	for _, object := range must(parseObjects(must(deploy.Files.ReadFile("examples/" + name)))) {
		object.SetNamespace(f.ns)
		if edit != nil {
			edit(object)
		}
		Expect(api.apply(ctx, object)).To(Succeed())
	}
}

// app creates a Deployment of one pod.
func (f *fixture) app(ctx context.Context, spec corev1.PodSpec) {
	one, labels := int32(1), map[string]string{"app": "app"}
	must(api.AppsV1().Deployments(f.ns).Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "app"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
		},
	}, metav1.CreateOptions{}))
}

// appPod waits until the Deployment has one pod that runs, and returns it.
func (f *fixture) appPod(ctx context.Context) *pod {
	var found *pod
	Eventually(func(g Gomega) {
		list, err := api.CoreV1().Pods(f.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=app"})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(list.Items).To(HaveLen(1))
		g.Expect(list.Items[0].DeletionTimestamp).To(BeNil())
		found = &pod{s: f, name: list.Items[0].Name}
	}).WithContext(ctx).Should(Succeed(), "the Deployment should have a pod")
	return found.Running(ctx)
}

// Filesystem returns the type and the size in bytes of the filesystem that a pod has mounted at a
// path.
func (p *pod) Filesystem(ctx context.Context, path string) (kind string, sizeBytes int64) {
	out := p.Sh(ctx, fmt.Sprintf(
		`awk '$2 == "%[1]s" {print $3}' /proc/mounts; stat -f -c '%%b %%S' %[1]s`, path))
	var blocks, blockBytes int64
	_, err := fmt.Sscan(out, &kind, &blocks, &blockBytes)
	Expect(err).NotTo(HaveOccurred(), "in %q", out)
	return kind, blocks * blockBytes
}

// beMostOf matches the size of a filesystem that fills a disk of this many GiB, apart from its own
// metadata.
func beMostOf(giB int) OmegaMatcher {
	disk := int64(giB) << 30
	return SatisfyAll(BeNumerically(">", disk/100*85), BeNumerically("<=", disk))
}
