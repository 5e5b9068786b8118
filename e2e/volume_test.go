//go:build e2e

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("a volume", func() {
	It("keeps its data and its size when its pod moves: ext4 for a plain claim, xfs, or a raw device "+
		"(D-1, D-33, D-68)",
		keepsItsData)
	It("is created with its first pod, or at once, and deleted or kept, as its class "+
		"demands (D-56, D-39)", beginsAndEnds)
})

// writeNoise returns a script that writes 4 MiB of noise to the end of a device's first GiB and
// prints its checksum.
func writeNoise(device string) string {
	return `head -c 4194304 /dev/urandom >/tmp/noise
dd if=/tmp/noise of=` + device + ` bs=1048576 seek=1020 conv=fsync 2>/dev/null
sha256sum </tmp/noise`
}

// readNoise returns a script that prints the checksum of the bytes that writeNoise wrote.
func readNoise(device string) string {
	return `dd if=` + device + ` bs=1048576 skip=1020 count=4 2>/dev/null | sha256sum`
}

func keepsItsData(ctx SpecContext) {
	xfs := s.Class(ctx, Class{
		Parameters:   map[string]string{fsTypeKey: "xfs", "blockSize": "512"},
		MountOptions: []string{"noatime"},
	})
	claims := []string{
		s.Claim(ctx, Claim{}),
		s.Claim(ctx, Claim{Class: xfs}),
		s.Claim(ctx, Claim{Block: true}),
	}
	writer := s.Pod(ctx, Pod{Claims: claims, Node: workers[0]}).Running(ctx)
	noise := writer.Sh(ctx, "echo ext4 >/data/0/file; echo xfs >/data/1/file; sync\n"+
		writeNoise("/dev/data-2"))
	expectFilesystems(ctx, writer)
	disks := expectDisks(ctx, claims, workers[0])
	Expect(theRack.disk(ctx, disks[1]).BlockSize).To(BeEquivalentTo(512))
	expectFixedSize(ctx, claims[0])

	writer.Delete(ctx)
	reader := s.Pod(ctx, Pod{Claims: claims, Node: workers[1]}).Running(ctx)
	Expect(reader.Sh(ctx, "cat /data/0/file /data/1/file")).To(Equal("ext4\nxfs"))
	Expect(reader.Sh(ctx, readNoise("/dev/data-2"))).To(Equal(noise))
	expectFilesystems(ctx, reader)
	Expect(expectDisks(ctx, claims, workers[1])).To(Equal(disks))
}

func expectFilesystems(ctx context.Context, p *pod) {
	kind, sizeBytes := p.Filesystem(ctx, "/data/0")
	Expect(kind).To(Equal("ext4"))
	Expect(sizeBytes).To(beMostOf(1))
	kind, sizeBytes = p.Filesystem(ctx, "/data/1")
	Expect(kind).To(Equal("xfs"))
	Expect(sizeBytes).To(beMostOf(1))
	Expect(p.Sh(ctx, "grep ' /data/1 ' /proc/mounts")).To(ContainSubstring("noatime"))
	Expect(p.Sh(ctx, "blockdev --getsize64 /dev/data-2")).To(Equal("1073741824"))
}

// expectDisks checks that each claim's volume is a disk of the driver that is attached to the
// worker, and returns the disks' UUIDs.
func expectDisks(ctx context.Context, claims []string, worker string) []string {
	disks := []string{}
	for _, claim := range claims {
		csi := s.Bound(ctx, claim).Spec.CSI
		disk := theRack.disk(ctx, csi.VolumeHandle)
		Expect(csi.VolumeAttributes).To(HaveKeyWithValue("diskName", string(disk.Name)))
		Expect(disk.Description).To(ContainSubstring(driverName))
		Expect(theRack.attachedTo(ctx, disk.Id)).To(Equal(worker))
		disks = append(disks, disk.Id)
	}
	return disks
}

// expectFixedSize tries to enlarge a claim of the class oxide-disk (D-68). The API server refuses,
// so that nobody waits for an expansion that no disk can do.
func expectFixedSize(ctx context.Context, claim string) {
	_, err := api.CoreV1().PersistentVolumeClaims(s.ns).Patch(ctx, claim, types.MergePatchType,
		[]byte(`{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}`), metav1.PatchOptions{})
	Expect(apierrors.IsForbidden(err)).To(BeTrue(), "resizing ended with: %v", err)
	Expect(err).To(MatchError(ContainSubstring("must support resize")))
}

func beginsAndEnds(ctx SpecContext) {
	before := theRack.diskIDs(ctx)
	waiting := s.Claim(ctx, Claim{})
	deleting := s.Claim(ctx, Claim{Class: s.Class(ctx, Class{Immediate: true})})
	keeping := s.Claim(ctx, Claim{Class: s.Class(ctx, Class{Immediate: true, Retain: true})})
	deleted, kept := s.Bound(ctx, deleting), s.Bound(ctx, keeping)
	s.diskRemovedLater(kept.Spec.CSI.VolumeHandle)
	s.atEnd(func(ctx context.Context) { s.DeleteVolume(ctx, kept.Name) })

	s.Event(ctx, "PersistentVolumeClaim", waiting, "waiting for first consumer")
	s.Unbound(ctx, waiting)
	Expect(theRack.diskIDs(ctx)).To(ConsistOf(append(before,
		deleted.Spec.CSI.VolumeHandle, kept.Spec.CSI.VolumeHandle)))

	s.DeleteClaim(ctx, deleting)
	s.DeleteClaim(ctx, keeping)
	Eventually(func() bool { return theRack.hasDisk(ctx, deleted.Spec.CSI.VolumeHandle) }).
		WithContext(ctx).Should(BeFalse(), "the disk should go with its claim")
	Eventually(func() corev1.PersistentVolumePhase {
		pv := must(api.CoreV1().PersistentVolumes().Get(ctx, kept.Name, metav1.GetOptions{}))
		return pv.Status.Phase
	}).WithContext(ctx).Should(Equal(corev1.VolumeReleased))
	s.DeleteVolume(ctx, kept.Name)
	Expect(theRack.hasDisk(ctx, kept.Spec.CSI.VolumeHandle)).To(BeTrue(),
		"the policy Retain keeps the disk")
}

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
	Expect(unstructured.SetNestedField(o.Object, value, path...)).To(Succeed())
}
