//go:build e2e

package e2e

import (
	"context"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// mustBeStopped lists the parts of the driver's error for a rack that attaches and detaches only at
// stopped instances: the reason, and what to do.
var mustBeStopped = []string{"FailedPrecondition", "InstanceMustBeStopped", "stop"}

var _ = Describe("a rack", func() {
	It("without hot-plug refuses with a reason in the pod's events, and nothing is left when "+
		"the rack gets hot-plug (D-61)", func(ctx SpecContext) {
		doctor, moving := newDoctor(ctx), s.Claim(ctx, Claim{})
		first := s.Beating(ctx, workers[0], moving)
		last := first.Beats(ctx)
		disk := s.Bound(ctx, moving).Spec.CSI.VolumeHandle
		since := lastRequest(ctx)
		withoutHotplug(ctx)
		refused := s.Claim(ctx, Claim{})
		waiting := s.Pod(ctx, Pod{Node: workers[0], Claims: []string{refused}})
		waiting.Pending(ctx, mustBeStopped...)
		first.Delete(ctx)
		Eventually(func() (string, error) { return detachError(ctx, s.Bound(ctx, moving).Name) }).
			WithContext(ctx).Should(And(ContainSubstring(mustBeStopped[0]),
			ContainSubstring(mustBeStopped[1])), "why the volume is not detached")
		doctor.finds(ctx, "instance", mustBeStopped[1], "pvc", s.path(refused))
		doctor.finds(ctx, "instance", mustBeStopped[1], "pvc", s.path(moving))
		Expect(requestsOf(ctx, "instance_stop", since)).To(BeEmpty(), "the driver stops nothing")

		By("giving it hot-plug")
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
		waiting.Running(ctx)
		moved := s.Beating(ctx, workers[1], moving)
		Expect(moved.Beats(ctx)).To(BeNumerically(">", last), "no write is lost")
		Expect(theRack.attachedTo(ctx, disk)).To(Equal(workers[1]))
		Expect(doctor.findsNothing(ctx, "pvc", s.path(moving))).To(BeEmpty(), "links unseen")
	}, NodeTimeout(5*time.Minute))

	It("that is unreachable for a minute causes no restart and disturbs no running "+
		"pod, and everything requested meanwhile is done once when it is back (PR-5, B-10, B-42)",
		func(ctx SpecContext) {
			doctor := newDoctor(ctx)
			before := must(theRack.Admin.State(ctx))
			claims := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})}
			leaving := s.Claim(ctx, Claim{})
			runners := []*pod{s.Beating(ctx, workers[0], claims[0], leaving),
				s.Beating(ctx, workers[1], claims[1])}
			lives := driverRestarts(ctx)
			more := func() *pod {
				claims = append(claims, s.Claim(ctx, Claim{}))
				return s.Pod(ctx, Pod{Claims: claims[len(claims)-1:]})
			}

			By("cutting every connection to the rack")
			away := time.Now()
			cut := faults(ctx, adminapi.Fault{Cut: true})[0]
			// A call that fails late is repeated soon, because the pauses grow with each failure.
			const late, back = 50 * time.Second, time.Minute
			waiting := []*pod{more(), more()}
			taken := s.Snapshot(ctx, claims[1])
			sum := runners[1].Fill(ctx)
			staysSo(ctx, lives, away.Add(late))
			waiting = append(waiting, more())
			// The node unmounts without the rack; everything else has to wait for the rack.
			runners[0].Delete(ctx)
			s.DeleteClaim(ctx, leaving)
			staysSo(ctx, lives, away.Add(back))
			for _, p := range waiting {
				s.Unbound(ctx, p.get(ctx).Spec.Volumes[0].PersistentVolumeClaim.ClaimName)
			}
			Expect(theRack.Admin.Fired(ctx, cut)).To(BeNumerically(">", len(waiting)))
			doctor.finds(ctx, "rack", "RackUnavailable", "pvc", s.path(claims[2]))
			doctor.finds(ctx, "rack", "RackUnavailable", "rack")
			doctor.findsNothing(ctx, "pvc", s.path(claims[1])) // a pod that runs needs no rack

			By("letting it be reached again")
			Expect(theRack.Admin.ClearFaults(ctx)).To(Succeed())
			for _, p := range waiting {
				p.Running(ctx)
			}
			taken.Ready(ctx)
			state := must(theRack.Admin.State(ctx))
			Expect(state.Snapshots).To(ContainElement(HaveField("ID", taken.handle)))
			Eventually(func() int { return len(newDisks(ctx, before)) }).WithContext(ctx).
				Should(Equal(len(claims)), "the disk of the claim that was deleted should be gone")
			s.OneDiskEach(ctx, before, claims...)
			s.AttachedTo(ctx, s.Bound(ctx, claims[0]).Spec.CSI.VolumeHandle, "")
			runners[1].Beats(ctx)
			Expect(runners[1].Sum(ctx)).To(Equal(sum))
			Expect(driverRestarts(ctx)).To(Equal(lives))
			taken.Delete(ctx)
		}, NodeTimeout(6*time.Minute))
})

// staysSo checks until a time that no container of the driver is restarted or stops being ready.
func staysSo(ctx context.Context, lives []string, until time.Time) {
	Consistently(func() []string { return driverRestarts(ctx) }).WithContext(ctx).
		WithTimeout(time.Until(until)).WithPolling(time.Second).
		Should(Equal(lives), "an outage of the rack should restart nothing")
}

// detachError returns the error in a VolumeAttachment that explains why its volume is not detached.
func detachError(ctx context.Context, volume string) (string, error) {
	status, err := attachmentOf(ctx, volume)
	if err != nil || status.DetachError == nil {
		return "", err
	}
	return status.DetachError.Message, nil
}

// attachmentOf returns the status of a volume's VolumeAttachment, or zero if there is none.
func attachmentOf(ctx context.Context, volume string) (storagev1.VolumeAttachmentStatus, error) {
	list, err := api.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
	if err != nil {
		return storagev1.VolumeAttachmentStatus{}, err
	}
	for _, a := range list.Items {
		if name := a.Spec.Source.PersistentVolumeName; name != nil && *name == volume {
			return a.Status, nil
		}
	}
	return storagev1.VolumeAttachmentStatus{}, nil
}

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
	s.atEnd(func(ctx context.Context) { replaceRackArgument(ctx, "--disks=fuse", "--keep-devices") })
	replaceRackArgument(ctx, "--keep-devices", "--disks=fuse")
}

// replaceRackArgument restarts the simulated rack with one argument replaced.
func replaceRackArgument(ctx context.Context, old, replacement string) {
	all := api.AppsV1().Deployments(driverNamespace)
	d := must(all.Get(ctx, simulatorName, metav1.GetOptions{}))
	arguments := d.Spec.Template.Spec.Containers[0].Args
	i := slices.Index(arguments, old)
	Expect(i).To(BeNumerically(">=", 0), "the rack has the arguments %q", arguments)
	arguments[i] = replacement
	must(all.Update(ctx, d, metav1.UpdateOptions{}))
	Expect(poll(ctx, rolloutTimeout, func(ctx context.Context) error {
		return deploymentReady(ctx, driverNamespace, simulatorName)
	})).To(Succeed())
	rackServes(ctx)
	serving(ctx)
}
