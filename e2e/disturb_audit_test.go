//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("an audit", func() {
	It("B-42 of kubectl's current cluster reports the orphaned disk, and no disk that is in use or "+
		"belongs to somebody else", func(ctx SpecContext) {
		s.diskByHand(ctx, "by-hand-"+s.ns)
		used := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})}
		s.Pod(ctx, Pod{Claims: used}).Running(ctx)
		taken := s.Snapshot(ctx, used[0]).Ready(ctx)
		audit := auditor(ctx)
		report, found := audit("e2e")
		Expect(found).To(BeFalse(), "found %+v", report)
		Expect(report.Owned).To(Equal(len(used) + 1))

		orphan := s.orphan(ctx)
		report, found = audit("e2e")
		Expect(found).To(BeTrue())
		Expect(report.Orphans).To(HaveLen(1), "it found %+v", report)
		Expect(report.Orphans[0].ID).To(Equal(orphan))
		Expect(report.Missing).To(BeEmpty())
		Expect(report.Owned).To(Equal(len(used) + 2))

		report, found = audit("another")
		Expect(found).To(BeFalse(), "another cluster's audit found %+v", report)
		Expect(report.Owned).To(BeZero())
		taken.Delete(ctx)
	}, NodeTimeout(4*time.Minute))
})

// orphan creates a volume and removes its PersistentVolume, so that its disk is left until the spec
// ends.
func (f *fixture) orphan(ctx context.Context) (disk string) {
	GinkgoHelper()
	claim := f.Claim(ctx, Claim{})
	user := f.Pod(ctx, Pod{Claims: []string{claim}}).Running(ctx)
	pv := f.Bound(ctx, claim)
	disk = pv.Spec.CSI.VolumeHandle
	user.Delete(ctx)
	f.AttachedTo(ctx, disk, "")
	_, err := api.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.MergePatchType,
		[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`), metav1.PatchOptions{})
	Expect(err).NotTo(HaveOccurred())
	f.DeleteClaim(ctx, claim)
	f.DeleteVolume(ctx, pv.Name)
	Expect(theRack.hasDisk(ctx, disk)).To(BeTrue())
	DeferCleanup(func(ctx SpecContext) {
		Expect(theRack.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk)})).
			To(Succeed())
	}, NodeTimeout(restartTimeout))
	return disk
}

// auditReport is what an audit prints.
type auditReport struct {
	Owned   int
	Orphans []struct{ ID, Kind string }
	Missing []struct{ ID, Kind string }
}

// audited is the path of the program on the control plane during the audit.
const audited = "/kind/oxide-csi-plugin"

// auditor returns a function that audits the cluster for a cluster ID. It runs the program that the
// nodes run, with the kubectl of the control plane. found reports the exit status of the audit.
func auditor(ctx context.Context) func(clusterID string) (report auditReport, found bool) {
	GinkgoHelper()
	path := filepath.Join(GinkgoT().TempDir(), "oxide-csi-plugin")
	copyProgram(ctx, path)
	file, err := os.Open(path)
	Expect(err).NotTo(HaveOccurred())
	defer func() { Expect(file.Close()).To(Succeed()) }()
	DeferCleanup(func(ctx SpecContext) {
		_, err := machines[controlPlane].run(ctx, "rm -f "+audited)
		Expect(err).NotTo(HaveOccurred())
	}, NodeTimeout(restartTimeout))
	Expect(machines[controlPlane].CommandContext(ctx, "sh", "-c",
		"cat > "+audited+" && chmod 755 "+audited).SetStdin(file).Run()).To(Succeed())
	return func(clusterID string) (auditReport, bool) {
		GinkgoHelper()
		return audit(ctx, clusterID)
	}
}

func audit(ctx context.Context, clusterID string) (report auditReport, found bool) {
	GinkgoHelper()
	out, err := machines[controlPlane].run(ctx, fmt.Sprintf(
		"export KUBECONFIG=/etc/kubernetes/admin.conf OXIDE_HOST=http://127.0.0.1:%d "+
			"OXIDE_TOKEN=%s OXIDE_PROJECT=%s OXIDE_CLUSTER_ID=%s\n"+
			"%s audit --kubectl --min-age 0s --output json\necho STATUS $?",
		rackAPIPort, rackToken, rackProject, clusterID, audited))
	Expect(err).NotTo(HaveOccurred())
	text, status, _ := strings.Cut(out, "STATUS ")
	Expect(json.Unmarshal([]byte(text), &report)).To(Succeed(), "the report %q", out)
	switch status {
	case "0\n":
	case "2\n":
		found = true
	default:
		Fail("the audit ended with the status " + status)
	}
	return report, found
}
