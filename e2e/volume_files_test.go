//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
)

var _ = Describe("the files of a volume", func() {
	It("belong to the pod's fsGroup, in the root, in a subPath, and in an "+
		"ephemeral volume (D-55)", belongToGroup)
	It("belong to the same users for pods with and without a user namespace of their own, on "+
		"ext4, xfs and btrfs (D-55)", passUserNamespaces)
})

// passUserNamespaces gives volumes to a pod whose root is not the node's root. The runtime mounts
// them with mapped users, so the files on the disk keep their owners. The kernel has no such mounts
// of ext3.
func passUserNamespaces(ctx SpecContext) {
	if config.offline {
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

	// The files that the first group wrote belong to another group now.
	other := int64(3000)
	again := s.Pod(ctx, Pod{Claims: []string{claim}, User: &user, FSGroup: &other}).Running(ctx)
	Expect(again.Sh(ctx, "stat -c %g /data/0/file")).To(Equal("3000"))
	Expect(again.Sh(ctx, "echo again >>/data/0/file; cat /data/0/file")).To(Equal("mine\nagain"))
	Eventually(func() bool { return theRack.hasDisk(ctx, scratch) }).WithContext(ctx).
		Should(BeFalse(), "an ephemeral volume should go with its pod")
	Expect(theRack.hasDisk(ctx, kept)).To(BeTrue())
}

// ephemeral returns a volume whose claim is created and deleted with its pod.
func ephemeral(name string) corev1.Volume {
	claim := Claim{}
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		Ephemeral: &corev1.EphemeralVolumeSource{
			VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: claim.object().Spec},
		},
	}}
}

// settings contains what e2e/run has prepared.
type settings struct {
	nodeImage, kubernetes, crds, work, evidence, standIns string
	archives                                              []string
	// previous is the directory of the previous release, and previousName its name; both are empty
	// without one.
	previous, previousName string
	// base is a tar of the images' base; empty means that of the Dockerfile.
	base string
	// reuse uses the cluster that an earlier run has kept, and its installation.
	offline, keep, reuse bool
}

// readSettings reads the environment. Its error names missing variables.
func readSettings() (settings, error) {
	var missing []string
	get := func(name string) string {
		value := os.Getenv(name)
		if value == "" {
			missing = append(missing, name)
		}
		return value
	}
	set := settings{
		nodeImage: get("E2E_NODE_IMAGE"), kubernetes: get("E2E_KUBERNETES"),
		crds: get("E2E_CRDS"), work: get("E2E_WORK"), evidence: get("E2E_EVIDENCE"),
		previous: os.Getenv("E2E_PREVIOUS"), previousName: os.Getenv("E2E_PREVIOUS_NAME"),
		base:     os.Getenv("E2E_BASE"),
		archives: strings.Split(get("E2E_ARCHIVES"), ":"),
		standIns: os.Getenv("E2E_STANDINS"),
		offline:  os.Getenv("E2E_OFFLINE") == "1", keep: os.Getenv("KEEP") == "1",
		reuse: os.Getenv("E2E_REUSE") == "1",
	}
	if len(missing) > 0 {
		return set, fmt.Errorf("the suite needs a prepared machine, and %s is not set: run it with "+
			"go run ./e2e/run, which prepares one", strings.Join(missing, ", "))
	}
	return set, nil
}
