//go:build linux

package sanity

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeController("the audit",
	fixtureOptions{plugin: harness.PluginOptions{Env: map[string]string{
		"OXIDE_CLUSTER_ID": auditCluster}}}, func(f *fixture) {
		describeAuditReports(f)
		describeAuditDeletions(f)
	})

func describeAuditReports(f *fixture) {
	It("B-42 finds the disk of a create that lost its answer and was never repeated",
		func(ctx SpecContext) {
			wanted := f.volume(ctx)
			f.fault(ctx, adminapi.Fault{Operation: "disk_create", Phase: adminapi.After,
				Delay: adminapi.Duration(5 * time.Second), Times: 1})
			short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
			defer cancel()
			req := harness.CreateRequest(fresh("lost"))
			req.Parameters = map[string]string{"csi.storage.k8s.io/pvc/name": "data",
				"csi.storage.k8s.io/pvc/namespace": "shop"}
			expectRefusal(errOf(f.ctl.CreateVolume(short, req)), codes.DeadlineExceeded)
			var lost string
			eventually(ctx, func() error {
				for _, id := range f.ids(ctx) {
					if id != wanted.GetVolumeId() {
						lost = id
						return nil
					}
				}
				return errors.New("the rack has not made the disk yet")
			})
			DeferCleanup(func(ctx SpecContext) { // the call without a caller may still be at work
				eventually(ctx, func() error {
					return errOf(f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: lost}))
				})
			}, NodeTimeout(callTimeout))
			report := f.audit(f.auditCommand(ctx, "--volumes="+f.kubernetes(ctx,
				auditFiles()+"/wanted", []*csi.Volume{wanted})))
			Expect(report.status).To(Equal(2), report.log)
			Expect(report.orphans()).To(ConsistOf(lost))
			Expect(report.Orphans[0].CSIName).To(Equal(req.GetName()))
			Expect(report.Orphans[0].Claim).To(Equal("shop/data"))
			Expect(report.log).To(HaveSuffix(
				"FIGURE audit owned=2 wanted=1 orphans=1 missing=0 deleted=0 too_young=0\n"))
			Expect(f.ids(ctx)).To(ConsistOf(lost, wanted.GetVolumeId()))
		})

	It("D-69 distinguishes missing from static disks, and ignores those of another cluster",
		func(ctx SpecContext) {
			other := f.controller(ctx,
				harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "two"}})
			resp := expectOK(ctx, other.Controller().CreateVolume,
				harness.CreateRequest(fresh("of-two")))
			f.removedLater(resp.GetVolume().GetVolumeId())
			wanted := f.volume(ctx)
			byHand := f.rackDisk(ctx, fresh("static"), f.rack.Project)
			wantedFile := auditFiles() + "/wanted"
			Expect(os.WriteFile(wantedFile, []byte(wanted.GetVolumeId()+"\n"), 0o600)).To(Succeed())
			report := f.audit(f.auditCommand(ctx, "--volumes="+wantedFile))
			Expect(report.status).To(BeZero(), report.log)
			Expect(report.Owned).To(Equal(1))

			f.kubernetes(ctx, wantedFile, []*csi.Volume{wanted, {VolumeId: byHand.Id}, {VolumeId: someUUID},
				{VolumeId: "by-name"}})
			report = f.audit(f.auditCommand(ctx, "--volumes="+wantedFile))
			Expect(report.status).To(Equal(2), report.log)
			Expect(report.orphans()).To(BeEmpty())
			Expect(report.Missing).To(HaveLen(2))
			Expect(report.Static).To(HaveLen(1))
			Expect(report.Static[0].ID).To(Equal(byHand.Id))
		})
}

func describeAuditDeletions(f *fixture) {
	It("D-69 deletes the detached disks and snapshots that a person names", func(ctx SpecContext) {
		other := f.controller(ctx,
			harness.PluginOptions{Env: map[string]string{"OXIDE_CLUSTER_ID": "two"}})
		resp := expectOK(ctx, other.Controller().CreateVolume,
			harness.CreateRequest(fresh("of-two")))
		f.removedLater(resp.GetVolume().GetVolumeId())
		wanted := f.volume(ctx)
		kept := f.snapshotted(ctx, wanted)
		lostSnapshot := f.snapshotted(ctx, wanted).GetSnapshotId()
		lost, used, unnamed := f.orphan(ctx), f.orphan(ctx), f.orphan(ctx)
		f.published(ctx, &csi.Volume{VolumeId: used}, "a")
		byHand := f.rackDisk(ctx, fresh("by-hand"), f.rack.Project)
		dir := auditFiles()
		list := f.kubernetes(ctx, dir+"/list", []*csi.Volume{wanted}, kept)
		report := f.audit(f.kubectlCommand(ctx, list))
		Expect(report.status).To(Equal(2), report.log)
		Expect(report.orphans()).To(ConsistOf(lost, used, unnamed, lostSnapshot))
		report = f.audit(f.kubectlCommand(ctx, list,
			"--delete="+named(dir+"/report", report, lost, used, lostSnapshot)))
		Expect(report.status).To(Equal(2), "two are left: %s", report.log)
		Expect(report.Deleted).To(Equal(2), "%+v", report)
		Expect(report.Kept).To(HaveLen(1))
		Expect(report.Kept[0].Reason).To(ContainSubstring(f.rack.Instance("a").ID))
		Expect(report.log).To(ContainSubstring("deleted the disk " + lost))
		Expect(f.ids(ctx)).To(ConsistOf(wanted.GetVolumeId(), used, unnamed, byHand.Id,
			resp.GetVolume().GetVolumeId()))
		entries := expectOK(ctx, f.ctl.ListSnapshots, &csi.ListSnapshotsRequest{}).GetEntries()
		Expect(entries).To(HaveLen(1))
		Expect(entries[0].GetSnapshot().GetSnapshotId()).To(Equal(kept.GetSnapshotId()))
	})
}
