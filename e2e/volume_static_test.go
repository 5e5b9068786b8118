//go:build e2e

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var _ = Describe("a disk that somebody made by hand", func() {
	It("D-2 E-16 becomes a volume by its UUID alone, and stays: with the policy Retain, and also "+
		"with Delete, because the driver refuses the deletion", usesDiskByHand)
})

// provisionedBy is the annotation by which the provisioner recognizes its own volumes. Whoever
// copies a PersistentVolume copies it, too.
const provisionedBy = "pv.kubernetes.io/provisioned-by"

func usesDiskByHand(ctx SpecContext) {
	disk := s.diskByHand(ctx, "archive-of-"+s.ns, 20)
	const first = "oxide-static" // the example's claim and volume
	s.atEnd(func(ctx context.Context) { s.DeleteVolume(ctx, first) })
	s.applyExample(ctx, "static.yaml", func(o *unstructured.Unstructured) {
		if o.GetKind() == "PersistentVolume" {
			o.SetNamespace("")
			set(o, s.ns, "spec", "claimRef", "namespace")
			set(o, disk, "spec", "csi", "volumeHandle")
		}
	})
	s.Bound(ctx, first)
	writer := s.Pod(ctx, Pod{Claims: []string{first}, Node: workers[0]}).Running(ctx)
	// The disk was blank, so the driver has formatted it.
	writer.Sh(ctx, "echo by hand >/data/0/file; sync")
	kind, sizeBytes := writer.Filesystem(ctx, "/data/0")
	Expect(kind).To(Equal("ext4"))
	Expect(sizeBytes).To(beMostOf(20))
	writer.Delete(ctx)
	s.DeleteClaim(ctx, first)
	s.DeleteVolume(ctx, first)
	Expect(theRack.attachedTo(ctx, disk)).To(BeEmpty())

	second := s.Volume(ctx, disk, "second", 20, func(pv *corev1.PersistentVolume) {
		pv.Annotations = map[string]string{provisionedBy: driverName}
		pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete
	})
	s.Claim(ctx, Claim{Name: "second", Class: "-", Volume: second.Name})
	s.Bound(ctx, "second")
	reader := s.Pod(ctx, Pod{Claims: []string{"second"}, Node: workers[1]}).Running(ctx)
	Expect(reader.Sh(ctx, "cat /data/0/file")).To(Equal("by hand"))
	reader.Delete(ctx)
	s.DeleteClaim(ctx, "second")
	s.VolumeEvent(ctx, second.Name, "DiskNotOurs", "has no ownership tag of this driver",
		"give the volume the reclaim policy Retain")
	Expect(theRack.disk(ctx, disk).Description).To(Equal("made by hand"))
	// The advice in the event helps: the PersistentVolume is deleted, and the disk stays.
	s.DeleteVolume(ctx, second.Name)
	Expect(theRack.hasDisk(ctx, disk)).To(BeTrue())
}

func set(o *unstructured.Unstructured, value string, path ...string) {
	GinkgoHelper()
	Expect(unstructured.SetNestedField(o.Object, value, path...)).To(Succeed())
}
