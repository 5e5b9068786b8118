//go:build e2e

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var _ = Describe("a disk that somebody made by hand", func() {
	It("becomes a volume by its UUID alone, and stays: with the policy Retain, and also "+
		"with Delete, because the driver refuses the deletion (D-2, E-16)", usesDiskByHand)
})

// provisionedBy is the annotation by which the provisioner recognizes its own volumes. Whoever
// copies a PersistentVolume copies it, too.
const provisionedBy = "pv.kubernetes.io/provisioned-by"

func usesDiskByHand(ctx SpecContext) {
	disk := s.diskByHand(ctx, "archive-of-"+s.ns, 20)
	const name = "oxide-static" // the example's claim and volume
	s.atEnd(func(ctx context.Context) { s.DeleteVolume(ctx, name) })
	apply := func(annotations map[string]string, policy string) {
		GinkgoHelper()
		s.applyExample(ctx, "static.yaml", func(o *unstructured.Unstructured) {
			if o.GetKind() == "PersistentVolume" {
				o.SetNamespace("")
				o.SetAnnotations(annotations)
				set(o, s.ns, "spec", "claimRef", "namespace")
				set(o, disk, "spec", "csi", "volumeHandle")
				set(o, policy, "spec", "persistentVolumeReclaimPolicy")
			}
		})
		s.Bound(ctx, name)
	}
	apply(nil, "Retain") // as in the example
	writer := s.Pod(ctx, Pod{Claims: []string{name}, Node: workers[0]}).Running(ctx)
	// The disk was blank, so the driver has formatted it.
	writer.Sh(ctx, "echo by hand >/data/0/file; sync")
	kind, sizeBytes := writer.Filesystem(ctx, "/data/0")
	Expect(kind).To(Equal("ext4"))
	Expect(sizeBytes).To(beMostOf(20))
	writer.Delete(ctx)
	s.DeleteClaim(ctx, name)
	s.DeleteVolume(ctx, name)
	Expect(theRack.attachedTo(ctx, disk)).To(BeEmpty())

	apply(map[string]string{provisionedBy: driverName}, "Delete")
	reader := s.Pod(ctx, Pod{Claims: []string{name}, Node: workers[1]}).Running(ctx)
	Expect(reader.Sh(ctx, "cat /data/0/file")).To(Equal("by hand"))
	reader.Delete(ctx)
	s.DeleteClaim(ctx, name)
	s.VolumeEvent(ctx, name, "DiskNotOurs", "has no ownership tag of this driver",
		"give the volume the reclaim policy Retain")
	Expect(theRack.disk(ctx, disk).Description).To(Equal("made by hand"))
	// The advice in the event helps: the PersistentVolume is deleted, and the disk stays.
	s.DeleteVolume(ctx, name)
	Expect(theRack.hasDisk(ctx, disk)).To(BeTrue())
}

func set(o *unstructured.Unstructured, value string, path ...string) {
	GinkgoHelper()
	Expect(unstructured.SetNestedField(o.Object, value, path...)).To(Succeed())
}
