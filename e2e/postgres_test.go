//go:build e2e

package e2e

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var _ = Describe("the examples", func() {
	It("of RFD 595, of a device and of a restored snapshot get their "+
		"volumes without changes (D-15, D-18, D-58, D-59, D-71)", applyRFD)
	It("of PostgreSQL keep their rows when the pod moves to the other node (D-59)", keepRows)
})

// postgresUser is the ID of the user postgres in the image.
const postgresUser = "999"

// applyRFD applies the manifest of RFD 595 unchanged, and the project's additions to it. Everything
// that the manifest requires of a driver works. PostgreSQL itself does not stay up, for two reasons
// that no driver can change: the published image requires a password, and PostgreSQL creates no
// database in the root of a filesystem, where lost+found is.
func applyRFD(ctx SpecContext) {
	s.applyExample(ctx, "rfd-595-postgres.yaml", nil)
	s.applyExample(ctx, "block.yaml", nil)
	const claim = "oxide-postgres-data"
	server := &pod{s: s, name: "postgres"}
	pv := s.Bound(ctx, claim)
	size := pv.Spec.Capacity[corev1.ResourceStorage]
	Expect(size.String()).To(Equal("50Gi"))
	Expect(theRack.disk(ctx, pv.Spec.CSI.VolumeHandle).Size).To(BeEquivalentTo(50 << 30))
	Eventually(func() string { return server.log(ctx) }).WithContext(ctx).Should(
		Or(ContainSubstring("lost+found"), ContainSubstring("superuser password is not specified")))
	Expect(theRack.attachedTo(ctx, pv.Spec.CSI.VolumeHandle)).To(Equal(server.Node(ctx)))
	Expect(server.get(ctx).Spec.Containers[0].VolumeMounts).To(
		ContainElement(HaveField("MountPath", "/var/lib/postgresql/data")))

	// The root of the volume belongs to the server's user now, so the server's container had it and
	// could write. The snapshot is taken after that. It has what is on the disk by then.
	beside := s.Pod(ctx, Pod{Claims: []string{claim}, Node: server.Node(ctx)})
	beside.Running(ctx).Sh(ctx, "sync -f /data/0")
	s.applyExample(ctx, "snapshot-restore.yaml", nil)
	restored := s.Pod(ctx, Pod{Claims: []string{"oxide-postgres-copy"}})
	for p, giB := range map[*pod]int{beside: 50, restored: 60} {
		Expect(p.Running(ctx).Sh(ctx, "stat -c '%u %a' /data/0; ls /data/0")).
			To(Equal(postgresUser + " 700\nlost+found"))
		kind, sizeBytes := p.Filesystem(ctx, "/data/0")
		Expect(kind).To(Equal("ext4"))
		Expect(sizeBytes).To(beMostOf(giB))
	}
	out := must(api.exec(ctx, s.ns, "block", "block", "blockdev", "--getsize64", "/dev/oxide"))
	Expect(out).To(Equal("10737418240\n"))
}

// log returns the output of the pod's current container, or "" if there is none.
func (p *pod) log(ctx context.Context) string {
	text, err := api.CoreV1().Pods(p.s.ns).GetLogs(p.name, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return ""
	}
	return string(text)
}

// keepRows kills the server after its last commit, so that only data on the disk survives.
func keepRows(ctx SpecContext) {
	server := s.postgres(ctx, nil)
	first := server.Node(ctx)
	cordon(ctx, first, true)
	DeferCleanup(func(ctx SpecContext) { cordon(ctx, first, false) })
	now := int64(1)
	Expect(api.CoreV1().Pods(s.ns).Delete(ctx, server.name,
		metav1.DeleteOptions{GracePeriodSeconds: &now})).To(Succeed())
	server.Present(ctx)
	expectRows(ctx, server)
	Expect(server.Node(ctx)).NotTo(Equal(first))
}

// query runs SQL in the server's own container.
func query(ctx context.Context, server *pod, sql string) (string, error) {
	return api.exec(ctx, s.ns, server.name, "postgres", "psql", "--username=postgres",
		"--no-align", "--tuples-only", "--command="+sql)
}

// postgres applies the example of PostgreSQL, which edit may change first, and creates rows.
func (f *fixture) postgres(ctx context.Context, edit func(*unstructured.Unstructured)) *pod {
	f.applyExample(ctx, "postgres.yaml", edit)
	server := &pod{s: f, name: "postgres-0"}
	Eventually(func() error {
		_, err := query(ctx, server, "select 1")
		return err
	}).WithContext(ctx).Should(Succeed(), "the server should answer")
	Expect(query(ctx, server, "create table kept as select n from generate_series(1, 1000) n")).
		To(Equal("SELECT 1000\n"))
	return server
}

// expectRows waits until the server answers, and checks the rows.
func expectRows(ctx context.Context, server *pod) {
	Eventually(func() (string, error) {
		return query(ctx, server, "select count(*), sum(n) from kept")
	}).WithContext(ctx).Should(Equal("1000|500500\n"))
}
