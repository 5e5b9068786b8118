//go:build e2e

package e2e

import (
	"context"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = Describe("a disk that fails", Label("long"), func() {
	It("is found by the doctor, can be unstaged, and has all acknowledged data after "+
		"it is repaired (NU-4, NH-2, B-38)", func(ctx SpecContext) {
		disksThatFail(ctx)
		doctor := newDoctor(ctx)
		claim := s.Claim(ctx, Claim{})
		runner := s.Beating(ctx, workers[0], claim)
		sum, last := runner.Fill(ctx), runner.Beats(ctx)
		disk := s.Bound(ctx, claim).Spec.CSI.VolumeHandle
		doctor.findsNothing(ctx, "pvc", s.path(claim))

		broken := adminapi.DiskFault{On: []string{"write", "flush"}}
		Expect(theRack.Admin.FailDisk(ctx, disk, broken)).To(Succeed())
		doctor.finds(ctx, "filesystem", "FilesystemFailed", "pvc", s.path(claim))
		runner.Delete(ctx)
		s.AttachedTo(ctx, disk, "")

		Expect(theRack.Admin.HealDisk(ctx, disk)).To(Succeed())
		moved := s.Beating(ctx, workers[1], claim)
		Expect(moved.Beats(ctx)).To(BeNumerically(">", last), "no write that was synced is lost")
		Expect(moved.Sum(ctx)).To(Equal(sum))
		doctor.findsNothing(ctx, "pvc", s.path(claim))
	}, NodeTimeout(6*time.Minute))
})

// disksThatFail makes the rack's disks ones that can fail, until the spec ends. No other volumes
// may be in use, because their devices disappear with the rack's process.
func disksThatFail(ctx context.Context) {
	GinkgoHelper()
	s.atEnd(func(ctx context.Context) { replaceRackArgument(ctx, "--disks=fuse", "--keep-devices") })
	replaceRackArgument(ctx, "--keep-devices", "--disks=fuse")
}

// replaceRackArgument restarts the simulated rack with one argument replaced.
func replaceRackArgument(ctx context.Context, old, replacement string) {
	GinkgoHelper()
	all := api.AppsV1().Deployments(driverNamespace)
	d, err := all.Get(ctx, simulatorName, metav1.GetOptions{})
	Expect(err).NotTo(HaveOccurred())
	arguments := d.Spec.Template.Spec.Containers[0].Args
	i := slices.Index(arguments, old)
	Expect(i).To(BeNumerically(">=", 0), "the rack has the arguments %q", arguments)
	arguments[i] = replacement
	_, err = all.Update(ctx, d, metav1.UpdateOptions{})
	Expect(err).NotTo(HaveOccurred())
	Expect(poll(ctx, rolloutTimeout, func(ctx context.Context) error {
		return deploymentReady(ctx, driverNamespace, simulatorName)
	})).To(Succeed())
	rackServes(ctx)
	serving(ctx)
}
