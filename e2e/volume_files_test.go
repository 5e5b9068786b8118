//go:build e2e

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
)

var _ = Describe("the files of a volume", func() {
	It("D-55 belong to the pod's fsGroup, in the root, in a subPath, and in an "+
		"ephemeral volume", belongToGroup)
})

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
