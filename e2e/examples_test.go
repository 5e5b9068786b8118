//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

var _ = Describe("the examples", func() {
	It("mount the volumes of RFD 595, a device and a restored snapshot (D-15, D-58, D-71)",
		applyRFD)
	It("keep PostgreSQL's rows when its pod moves to the other node (D-59)", keepRows)
})

// postgresUser is the ID of the user postgres in PostgreSQL's image.
const postgresUser = "999"

// applyRFD applies the manifest of RFD 595 unchanged, and the project's further examples for it.
// The driver does what the manifest asks for. PostgreSQL itself fails, for two reasons that no
// driver can change: the image requires a password, and PostgreSQL creates no database in the root
// of a filesystem, because that contains lost+found.
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

	// The server has started, so its user now owns the root of the volume. Flush this change before
	// the snapshot is taken.
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

// log returns the output of the pod's current container, or "" if that cannot be read.
func (p *pod) log(ctx context.Context) string {
	text, err := api.CoreV1().Pods(p.s.ns).GetLogs(p.name, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return ""
	}
	return string(text)
}

// keepRows kills the server after its last commit, so that only the data on the disk is left.
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

func query(ctx context.Context, server *pod, sql string) (string, error) {
	return api.exec(ctx, s.ns, server.name, "postgres", "psql", "--username=postgres",
		"--no-align", "--tuples-only", "--command="+sql)
}

// postgres applies the PostgreSQL example, changed by edit, and creates a table with rows.
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

// expectRows waits until the server returns the rows that postgres has created.
func expectRows(ctx context.Context, server *pod) {
	Eventually(func() (string, error) {
		return query(ctx, server, "select count(*), sum(n) from kept")
	}).WithContext(ctx).Should(Equal("1000|500500\n"))
}

var _ = Describe("a growing claim", func() {
	It("keeps its data while another claim grows, although the rack's quota first refuses a new "+
		"disk (D-58, D-68)", growsTwo, NodeTimeout(8*time.Minute))
})

func (d doctor) claim(ctx context.Context, args ...string) string {
	out, err := d.tryClaim(ctx, args...)
	Expect(err).NotTo(HaveOccurred(), "%s", out)
	return out
}

// tryClaim runs `oxide-csi-plugin claim`, and returns its output and its error.
func (d doctor) tryClaim(ctx context.Context, args ...string) (string, error) {
	cmd := d.command(ctx, append([]string{"claim"}, args...)...)
	cmd.Stderr = nil
	out, err := cmd.CombinedOutput()
	fmt.Fprintf(GinkgoWriter, "claim %v:\n%s", args, out)
	return string(out), err
}

// growsTwo grows two claims at the same time: PostgreSQL's on btrfs, and a raw device. The quota
// has room for both snapshots and the smaller new disk, but not for the larger new disk.
func growsTwo(ctx SpecContext) {
	const room, rows, device = 4 << 30, "data-postgres-0", "/dev/data-0"
	operator := newDoctor(ctx)
	before := must(theRack.Admin.State(ctx))
	btrfs := s.Class(ctx, Class{Parameters: map[string]string{fsTypeKey: "btrfs"}})
	server := s.postgres(ctx, func(o *unstructured.Unstructured) { inGiB(o, btrfs) })
	raw := s.Claim(ctx, Claim{Block: true})
	s.app(ctx, s.podObject(ctx, &Pod{Claims: []string{raw}}).Spec)
	noise := s.appPod(ctx).Sh(ctx, writeNoise(device))
	firsts := []string{s.Bound(ctx, rows).Name, s.Bound(ctx, raw).Name}
	now := must(theRack.Admin.State(ctx))
	enough := map[string]any{"quota_bytes": must(theRack.Admin.Switches(ctx)).QuotaBytes}
	switchRack(ctx, map[string]any{"quota_bytes": now.StorageBytes + room}, enough)

	By("growing both", func() {
		type result struct {
			out string
			err error
		}
		ended := make(chan result, 1)
		go func() {
			out, err := operator.tryClaim(ctx, "grow", s.path(raw), "--size=4Gi")
			ended <- result{out, err}
		}()
		operator.claim(ctx, "grow", s.path(rows), "--size=2Gi")
		refused := <-ended
		Expect(refused.err).To(HaveOccurred())
		Expect(refused.out).To(And(ContainSubstring("1Gi (snapshot) and 4Gi (new disk)"),
			ContainSubstring("Storage Limit Exceeded"), ContainSubstring("--continue"),
			ContainSubstring("--undo")))
	})
	By("making room, and continuing", func() {
		Expect(theRack.Admin.Switch(ctx, enough)).To(Succeed())
		operator.claim(ctx, "grow", s.path(raw), "--continue")
	})
	expectRows(ctx, server)
	Expect(api.exec(ctx, s.ns, server.name, "postgres", "df", "--block-size=1",
		"--output=fstype,size", "/var/lib/postgresql/data")).To(MatchRegexp(`btrfs\s+2147483648\s`))
	p := s.appPod(ctx)
	Expect(p.Sh(ctx, readNoise(device))).To(Equal(noise))
	Expect(p.Sh(ctx, "blockdev --getsize64 "+device)).To(Equal("4294967296"))

	for i, claim := range []string{rows, raw} {
		operator.claim(ctx, "forget", s.path(claim))
		volumeGone(ctx, firsts[i])
	}
	s.OneDiskEach(ctx, before, rows, raw)
	Eventually(func() (int, error) {
		state, err := theRack.Admin.State(ctx)
		return len(state.Snapshots), err
	}).WithContext(ctx).Should(Equal(len(before.Snapshots)), "the snapshots should be gone")
}

// inGiB sets the class of a StatefulSet's claims, and their size to 1 GiB.
func inGiB(o *unstructured.Unstructured, class string) {
	if o.GetKind() != "StatefulSet" {
		return
	}
	claim := (&Claim{Class: class}).object()
	spec := must(runtime.DefaultUnstructuredConverter.ToUnstructured(&claim.Spec))
	templates, found, err := unstructured.NestedSlice(o.Object, "spec", "volumeClaimTemplates")
	Expect(err).NotTo(HaveOccurred())
	Expect(found).To(BeTrue())
	for _, template := range templates {
		template.(map[string]any)["spec"] = spec
	}
	Expect(unstructured.SetNestedSlice(o.Object, templates, "spec", "volumeClaimTemplates")).
		To(Succeed())
}
