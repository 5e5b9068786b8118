//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("an audit", func() {
	It("of kubectl's current cluster reports the orphaned disk, and no disk that is in use or "+
		"belongs to somebody else (B-42)", func(ctx SpecContext) {
		s.diskByHand(ctx, "by-hand-"+s.ns, 1)
		used := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})}
		s.Pod(ctx, Pod{Claims: used}).Running(ctx)
		taken := s.Snapshot(ctx, used[0]).Ready(ctx)
		operator := newDoctor(ctx)
		report, found := operator.audit(ctx, "e2e")
		Expect(found).To(BeFalse(), "found %+v", report)
		Expect(report.Owned).To(Equal(len(used) + 1))

		orphan := s.orphan(ctx)
		report, found = operator.audit(ctx, "e2e")
		Expect(found).To(BeTrue())
		Expect(report.Orphans).To(HaveLen(1), "it found %+v", report)
		Expect(report.Orphans[0].ID).To(Equal(orphan))
		Expect(report.Missing).To(BeEmpty())
		Expect(report.Owned).To(Equal(len(used) + 2))

		report, found = operator.audit(ctx, "another")
		Expect(found).To(BeFalse(), "another cluster's audit found %+v", report)
		Expect(report.Owned).To(BeZero())
		taken.Delete(ctx)
	}, NodeTimeout(4*time.Minute))
})

// orphan creates a volume and removes its PersistentVolume, so that its disk is left until the spec
// ends.
func (f *fixture) orphan(ctx context.Context) (disk string) {
	claim := f.Claim(ctx, Claim{})
	user := f.Pod(ctx, Pod{Claims: []string{claim}}).Running(ctx)
	pv := f.Bound(ctx, claim)
	disk = pv.Spec.CSI.VolumeHandle
	user.Delete(ctx)
	f.AttachedTo(ctx, disk, "")
	must(api.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.MergePatchType,
		[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`), metav1.PatchOptions{}))
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

// audit runs oxide-csi-plugin audit with this cluster ID. found reports whether its exit status is
// that for findings.
func (d doctor) audit(ctx context.Context, clusterID string) (report auditReport, found bool) {
	cmd := d.command(ctx, "audit", "--kubectl", "--min-age=0s", "--output=json")
	cmd.Env = append(slices.Clone(cmd.Env), "OXIDE_CLUSTER_ID="+clusterID)
	out, err := cmd.Output()
	Expect(json.Unmarshal(out, &report)).To(Succeed(), "the report %q: %v", out, err)
	if exit := (&exec.ExitError{}); errors.As(err, &exit) {
		Expect(exit.ExitCode()).To(Equal(2), "the status of the audit")
		return report, true
	}
	Expect(err).NotTo(HaveOccurred())
	return report, false
}
