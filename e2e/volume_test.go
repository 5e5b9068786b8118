//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("a volume", func() {
	It("keeps its data and its size when its pod moves, as ext4, xfs or a raw device "+
		"(D-1, D-33, D-68)", keepsItsData)
	It("obeys its StorageClass: it is created immediately or for its first pod, and its disk is "+
		"deleted or kept (D-56, D-39)", beginsAndEnds)
})

// writeNoise returns a script that writes 4 MiB of random bytes at the end of a device's first GiB,
// and prints their checksum.
func writeNoise(device string) string {
	return `head -c 4194304 /dev/urandom >/tmp/noise
dd if=/tmp/noise of=` + device + ` bs=1048576 seek=1020 conv=fsync 2>/dev/null
sha256sum </tmp/noise`
}

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

// expectDisks checks that each claim's volume is one of the driver's disks, attached to the
// worker's instance, and returns the disks' UUIDs.
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

// expectFixedSize checks that the API server refuses to enlarge a claim of the class oxide-disk
// (D-68). The rack cannot grow a disk, so an enlarged claim would wait forever.
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

var _ = Describe("a disk made by hand", func() {
	It("can be used as a volume by its UUID, and is not deleted with that volume under any "+
		"reclaim policy (D-2, E-16)", usesDiskByHand)
})

// provisionedBy is the annotation by which the provisioner recognizes volumes that it may delete. A
// PersistentVolume made by hand has it if a user has copied it from another one.
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
	// The driver has formatted the disk, because it was blank.
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
	// A PersistentVolume has no namespace. Its events are in the namespace "default".
	(&fixture{ns: metav1.NamespaceDefault}).Event(ctx, "PersistentVolume", name, "DiskNotOurs",
		"has no ownership tag of this driver", "give the volume the reclaim policy Retain")
	Expect(theRack.disk(ctx, disk).Description).To(Equal("made by hand"))
	// After the policy is Retain, as the event advises, the PersistentVolume can be deleted.
	s.DeleteVolume(ctx, name)
	Expect(theRack.hasDisk(ctx, disk)).To(BeTrue())
}

func set(o *unstructured.Unstructured, value string, path ...string) {
	Expect(unstructured.SetNestedField(o.Object, value, path...)).To(Succeed())
}

var _ = Describe("the files of a volume", func() {
	It("belong to the pod's fsGroup: in the root, in a subPath, and in an "+
		"ephemeral volume (D-55)", belongToGroup)
	It("have the same owners in pods with and without a user namespace, on ext4, xfs and "+
		"btrfs (D-55)", passUserNamespaces)
})

// passUserNamespaces gives volumes to a pod with a user namespace. The runtime mounts them with
// mapped IDs, so the owners on the disk stay the same. Ext3 is omitted, because it cannot map IDs.
func passUserNamespaces(ctx SpecContext) {
	if config.Offline {
		Skip("Debian's containerd 1.6 has no user namespaces; that of kind's node images has")
	}
	var claims []string
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		claims = append(claims, s.Claim(ctx, Claim{Class: s.Class(ctx, Class{
			Parameters: map[string]string{fsTypeKey: kind}})}))
	}
	user, group, own := int64(1000), int64(2000), false
	inNamespace := func(p *corev1.Pod) { p.Spec.HostUsers = &own }
	write := Pod{Claims: claims, User: &user, FSGroup: &group, Node: workers[0]}
	const files = "for i in 0 1 2; do stat -c '%u %g' /data/$i/$f; done | sort -u"

	plain := s.Pod(ctx, write).Running(ctx)
	plain.Sh(ctx, "for i in 0 1 2; do echo plain >/data/$i/plain; done; sync")
	plain.Delete(ctx)

	write.Edit, write.Node = inNamespace, workers[1]
	mapped := s.Pod(ctx, write).Running(ctx)
	Expect(mapped.Sh(ctx, "awk '{print $2}' /proc/self/uid_map")).NotTo(Equal("0"),
		"the pod should have a user namespace of its own")
	Expect(mapped.Sh(ctx, "f=plain; "+files)).To(Equal("1000 2000"))
	mapped.Sh(ctx, "for i in 0 1 2; do cat /data/$i/plain; echo mapped >/data/$i/mapped; done; "+
		"sync")
	mapped.Delete(ctx)

	write.Edit, write.Node = nil, workers[0]
	again := s.Pod(ctx, write).Running(ctx)
	Expect(again.Sh(ctx, "f=mapped; "+files)).To(Equal("1000 2000"))
	Expect(again.Sh(ctx, "cat /data/*/mapped | sort -u")).To(Equal("mapped"))
}

func belongToGroup(ctx SpecContext) {
	user, group := int64(1000), int64(2000)
	claim := s.Claim(ctx, Claim{})
	p := s.Pod(ctx, Pod{Claims: []string{claim}, User: &user, FSGroup: &group,
		Edit: func(p *corev1.Pod) {
			p.Spec.Volumes = append(p.Spec.Volumes, ephemeral("scratch"))
			main := &p.Spec.Containers[0]
			main.VolumeMounts = append(main.VolumeMounts,
				corev1.VolumeMount{Name: "scratch", MountPath: "/scratch"},
				corev1.VolumeMount{Name: "data-0", MountPath: "/part", SubPath: "a/part"})
		}}).Running(ctx)
	for _, dir := range []string{"/data/0", "/part", "/scratch"} {
		Expect(p.Sh(ctx, "stat -c %g "+dir)).To(Equal("2000"), dir)
		Expect(p.Sh(ctx, "echo mine >"+dir+"/file; stat -c '%u %g' "+dir+"/file")).
			To(Equal("1000 2000"), dir)
	}
	Expect(p.Sh(ctx, "cat /data/0/a/part/file")).To(Equal("mine"))
	scratch := s.Bound(ctx, p.name+"-scratch").Spec.CSI.VolumeHandle
	kept := s.Bound(ctx, claim).Spec.CSI.VolumeHandle
	p.Delete(ctx)

	// Kubelet changes the group of the files that already exist.
	other := int64(3000)
	again := s.Pod(ctx, Pod{Claims: []string{claim}, User: &user, FSGroup: &other}).Running(ctx)
	Expect(again.Sh(ctx, "stat -c %g /data/0/file")).To(Equal("3000"))
	Expect(again.Sh(ctx, "echo again >>/data/0/file; cat /data/0/file")).To(Equal("mine\nagain"))
	Eventually(func() bool { return theRack.hasDisk(ctx, scratch) }).WithContext(ctx).
		Should(BeFalse(), "an ephemeral volume should go with its pod")
	Expect(theRack.hasDisk(ctx, kept)).To(BeTrue())
}

func ephemeral(name string) corev1.Volume {
	claim := Claim{}
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		Ephemeral: &corev1.EphemeralVolumeSource{
			VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: claim.object().Spec},
		},
	}}
}

var _ = Describe("a claim", func() {
	It("stays pending with an event that gives the reason, if no disk can "+
		"satisfy it (D-19, D-70, D-71)", getsAReason)
	It("serves one node with ReadWriteOnce, and one pod with ReadWriteOncePod (E-5, D-70)",
		servesOneNode)
})

// getsAReason creates claims that are valid for the API server, but not for the driver. Kubernetes
// keeps such claims pending, so an event is the only way to report the reason.
func getsAReason(ctx SpecContext) {
	class := s.Class(ctx, Class{Immediate: true})
	source := s.Claim(ctx, Claim{Class: class})
	s.Bound(ctx, source)
	start := lastRequest(ctx)
	refused := map[string][]string{
		s.Claim(ctx, Claim{Class: class, Access: corev1.ReadWriteMany}): {"CapabilityUnsupported",
			"access mode MULTI_NODE_MULTI_WRITER is not supported", "use ReadWriteOnce"},
		s.Claim(ctx, Claim{Class: class, Access: corev1.ReadOnlyMany}): {"CapabilityUnsupported",
			"access mode MULTI_NODE_READER_ONLY is not supported", "use ReadWriteOnce"},
		s.Claim(ctx, Claim{Class: class, GiB: 1024}): {"CapacityOutOfRange"},
		s.Claim(ctx, Claim{Class: s.Class(ctx, Class{Immediate: true,
			Parameters: map[string]string{fsTypeKey: "ntfs"}})}): {"CapabilityUnsupported",
			`fs_type "ntfs" is not supported`},
		s.Claim(ctx, Claim{Class: s.Class(ctx, Class{Immediate: true,
			Parameters: map[string]string{"replicas": "3"}})}): {"ParameterInvalid", "replicas"},
		// The driver does not declare that it can clone, so the provisioner does not call it.
		s.Claim(ctx, Claim{Class: class, Clone: source}): {"CLONE_VOLUME capability is not reported"},
	}
	for claim, words := range refused {
		s.Event(ctx, "PersistentVolumeClaim", claim, words...)
		s.Unbound(ctx, claim)
	}
	Expect(requestsOf(ctx, "disk_create", start)).To(BeEmpty(), "the rack should not be asked")
}

func servesOneNode(ctx SpecContext) {
	shared := s.Claim(ctx, Claim{})
	alone := s.Claim(ctx, Claim{Access: corev1.ReadWriteOncePod})
	writer := s.Pod(ctx, Pod{Claims: []string{shared}, Node: workers[0]})
	only := s.Pod(ctx, Pod{Claims: []string{alone}, Node: workers[0]})
	writer.Running(ctx).Sh(ctx, "echo shared >/data/0/file")
	reader := s.Pod(ctx, Pod{Claims: []string{shared}, Node: workers[0], ReadOnly: true})
	far := s.Pod(ctx, Pod{Claims: []string{shared}, Node: workers[1]})
	only.Running(ctx)
	second := s.Pod(ctx, Pod{Claims: []string{alone}, Node: workers[0]})

	Expect(reader.Running(ctx).Sh(ctx, "cat /data/0/file")).To(Equal("shared"))
	_, err := reader.Try(ctx, "touch /data/0/mine")
	Expect(err).To(MatchError(ContainSubstring("Read-only file system")))
	second.Pending(ctx, "ReadWriteOncePod access mode already in-use by another pod")
	far.Pending(ctx, "Multi-Attach error", "already used by pod(s)")
	disk := s.Bound(ctx, shared).Spec.CSI.VolumeHandle
	Expect(theRack.attachedTo(ctx, disk)).To(Equal(workers[0]))

	deletePods(ctx, writer, reader, only)
	Expect(far.Running(ctx).Sh(ctx, "cat /data/0/file")).To(Equal("shared"))
	Expect(theRack.attachedTo(ctx, disk)).To(Equal(workers[1]))
	second.Running(ctx)
}

var _ = Describe("twenty volumes", Label("long"), func() {
	It("are created at the same time, and leave nothing behind (D-62)", func(ctx SpecContext) {
		var all []*pod // almost as many as fit on the nodes
		for range 20 {
			all = append(all, s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})},
				Script: "echo written > /data/0/file"}))
		}
		for _, p := range all {
			p.Running(ctx)
		}
	}, NodeTimeout(5*time.Minute))
})

var _ = Describe("a node", func() {
	It("reports its limit of volumes, and a pod that exceeds this limit or the rack's limit "+
		"stays pending (D-26, D-62, CP-9)", limitsVolumes)
})

// mostDisks is the number of disks per instance that the manifests configure.
const mostDisks = 12

func limitsVolumes(ctx SpecContext) {
	// An earlier spec may have left too low a limit, so make kubelet ask the driver again soon.
	countEvery(ctx, 10)
	for _, worker := range workers {
		Eventually(func() int { return allocatable(ctx, worker) }).WithContext(ctx).
			Should(Equal(mostDisks))
		Expect(instanceOf(ctx, worker)).To(Equal(instanceIDs[worker]))
	}
	// From now on the scheduler uses this limit, because kubelet does not ask again for an hour.
	countEvery(ctx, 3600)
	worker := workers[1]
	next := func() *pod {
		return s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}, Node: worker})
	}
	next().Running(ctx)

	// Let the rack allow fewer disks than OXIDE_MAX_DISKS. The event has to contain the rack's error.
	switchRack(ctx, "disk_limit", 1, mostDisks)
	second := next()
	second.Pending(ctx, "AttachVolume.Attach failed", "cannot attach more than 1 disks to instance")
	Expect(theRack.Admin.Switch(ctx, map[string]any{"disk_limit": mostDisks})).To(Succeed())
	second.Running(ctx)

	// Fill the instance up to the driver's limit. The scheduler does not know of these disks.
	disks := fillByHand(ctx, worker, mostDisks-2)
	third := next()
	third.Pending(ctx, "AttachVolume.Attach failed", "ResourceExhausted",
		"InstanceFull: the instance "+worker+" (", ") has 12 disks")
	detachByHand(ctx, disks[0], worker)
	third.Running(ctx)

	// Make kubelet ask the driver again, so that the scheduler gets the new limit.
	countEvery(ctx, 10)
	Eventually(func() int { return allocatable(ctx, worker) }).WithContext(ctx).Should(Equal(3))
	fourth := next()
	fourth.Pending(ctx, "exceed max volume count")
	for _, disk := range disks[1:] {
		detachByHand(ctx, disk, worker)
	}
	fourth.Running(ctx)
	Expect(allocatable(ctx, worker)).To(Equal(mostDisks))
}

func fillByHand(ctx context.Context, worker string, n int) []string {
	disks := []string{}
	for i := range n {
		disk := s.diskByHand(ctx, fmt.Sprintf("by-hand-%d-%s", i, s.ns), 1)
		attachByHand(ctx, disk, worker)
		disks = append(disks, disk)
	}
	return disks
}

func allocatable(ctx context.Context, worker string) int {
	if d := must(driverOn(ctx, worker)); d.Allocatable != nil && d.Allocatable.Count != nil {
		return int(*d.Allocatable.Count)
	}
	return 0
}

func instanceOf(ctx context.Context, worker string) string {
	return must(driverOn(ctx, worker)).NodeID
}

func driverOn(ctx context.Context, worker string) (storagev1.CSINodeDriver, error) {
	csiNode, err := api.StorageV1().CSINodes().Get(ctx, worker, metav1.GetOptions{})
	if err != nil {
		return storagev1.CSINodeDriver{}, err
	}
	for _, d := range csiNode.Spec.Drivers {
		if d.Name == driverName {
			return d, nil
		}
	}
	return storagev1.CSINodeDriver{}, nil
}

// countEvery sets how often kubelet asks the driver for its limit of volumes, until the spec ends.
func countEvery(ctx context.Context, seconds int64) {
	drivers := api.StorageV1().CSIDrivers()
	now := must(drivers.Get(ctx, driverName, metav1.GetOptions{}))
	set := func(ctx context.Context, seconds int64) {
		must(drivers.Patch(ctx, driverName, types.MergePatchType, fmt.Appendf(nil,
			`{"spec":{"nodeAllocatableUpdatePeriodSeconds":%d}}`, seconds), metav1.PatchOptions{}))
	}
	set(ctx, seconds)
	DeferCleanup(func(ctx SpecContext) { set(ctx, *now.Spec.NodeAllocatableUpdatePeriodSeconds) })
}
