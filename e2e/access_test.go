//go:build e2e

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var _ = Describe("a claim", func() {
	It("that no disk can satisfy gets an event with the reason, and leaves nothing on "+
		"the rack (D-19, D-70, D-71)", saysWhyNot)
	It("with ReadWriteOnce serves the pods of one node, with ReadWriteOncePod one pod (E-5, D-70)",
		servesOneNode)
})

// saysWhyNot creates claims that look valid but cannot be satisfied. A claim waits instead of
// failing, so the user only gets an event.
func saysWhyNot(ctx SpecContext) {
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
		// The provisioner knows that the driver does not support clones, and does not call it.
		s.cloneOf(ctx, source, class): {"CLONE_VOLUME capability is not reported"},
	}
	for claim, words := range refused {
		s.Event(ctx, "PersistentVolumeClaim", claim, words...)
		s.Unbound(ctx, claim)
	}
	Expect(requestsOf(ctx, "disk_create", start)).To(BeEmpty(), "the rack should not be asked")
}

// cloneOf creates a claim for a copy of another claim.
func (f *fixture) cloneOf(ctx context.Context, source, class string) string {
	c := Claim{Class: class}
	object := c.object()
	object.Spec.DataSource = &corev1.TypedLocalObjectReference{
		Kind: "PersistentVolumeClaim", Name: source}
	must(api.CoreV1().PersistentVolumeClaims(f.ns).Create(ctx, object, metav1.CreateOptions{}))
	return c.Name
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

	// The pods that waited start when they can.
	deletePods(ctx, writer, reader, only)
	Expect(far.Running(ctx).Sh(ctx, "cat /data/0/file")).To(Equal("shared"))
	Expect(theRack.attachedTo(ctx, disk)).To(Equal(workers[1]))
	second.Running(ctx)
}
