//go:build e2e

package e2e

import (
	"context"
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("a StatefulSet", func() {
	It("D-60 finds the volumes of its pods again, with their data, when it is scaled down and up",
		findsItsVolumes)
})

// noteStart adds a line with the pod's name to the file on its volume.
const noteStart = `hostname >>/data/starts; sync`

func findsItsVolumes(ctx SpecContext) {
	const name = "numbered"
	_, err := api.AppsV1().StatefulSets(s.ns).Create(ctx, numbered(name), metav1.CreateOptions{})
	Expect(err).NotTo(HaveOccurred())
	scaled(ctx, name, 3)
	volumes := map[string]string{}
	for i := range 3 {
		p := pod{s: s, name: fmt.Sprintf("%s-%d", name, i)}
		Expect(p.Sh(ctx, "cat /data/starts")).To(Equal(p.name))
		volumes[p.name] = s.Bound(ctx, "data-"+p.name).Spec.CSI.VolumeHandle
	}
	scale(ctx, name, 1)
	scaled(ctx, name, 1)
	Eventually(func(g Gomega) {
		for _, i := range []int{1, 2} {
			disk := volumes[fmt.Sprintf("%s-%d", name, i)]
			g.Expect(theRack.attachedTo(ctx, disk)).To(BeEmpty())
		}
	}).WithContext(ctx).Should(Succeed(), "the disks of pods that are gone should be detached")
	scale(ctx, name, 3)
	scaled(ctx, name, 3)
	for i := range 3 {
		p := pod{s: s, name: fmt.Sprintf("%s-%d", name, i)}
		want := p.name
		if i > 0 {
			want += "\n" + p.name
		}
		Expect(p.Sh(ctx, "cat /data/starts")).To(Equal(want))
		Expect(s.Bound(ctx, "data-"+p.name).Spec.CSI.VolumeHandle).To(Equal(volumes[p.name]))
	}
}

func numbered(name string) *appsv1.StatefulSet {
	replicas, grace := int32(3), stopGrace
	labels := map[string]string{"app": name}
	claim := Claim{Name: "data"}
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas:            &replicas,
			PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector:            &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: &grace,
					Containers: []corev1.Container{{
						Name: "main", Image: workload,
						Command:      []string{"sh", "-ec", noteStart + "\n" + idle},
						VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}},
					}},
				},
			},
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{*claim.object()},
		},
	}
}

func scale(ctx context.Context, name string, replicas int) {
	GinkgoHelper()
	_, err := api.AppsV1().StatefulSets(s.ns).Patch(ctx, name, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{})
	Expect(err).NotTo(HaveOccurred())
}

// scaled waits until a StatefulSet has as many pods as it is to have, and all are ready.
func scaled(ctx context.Context, name string, replicas int) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		set, err := api.AppsV1().StatefulSets(s.ns).Get(ctx, name, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(set.Status.ObservedGeneration).To(Equal(set.Generation))
		g.Expect(set.Status.Replicas).To(BeEquivalentTo(replicas))
		g.Expect(set.Status.ReadyReplicas).To(BeEquivalentTo(replicas))
	}).WithContext(ctx).Should(Succeed(), "the StatefulSet %s should have %d pods", name, replicas)
}
