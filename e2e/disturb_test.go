//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// nodeLostTimeout is the time in which Kubernetes has to notice that a node sends no reports, and
// to delete the node's pods.
const nodeLostTimeout = 3 * time.Minute

func onlyOn(ctx context.Context, worker string) {
	DeferCleanup(func(ctx SpecContext) {
		for _, worker := range workers {
			cordon(ctx, worker, false)
		}
	}, NodeTimeout(restartTimeout))
	for _, other := range workers {
		cordon(ctx, other, other != worker)
	}
}

func spreadControllers(ctx context.Context) {
	serving(ctx)
	all := installedPods(ctx, ofController, "")
	Expect(all).To(HaveLen(len(workers)))
	if all[0].Spec.NodeName == all[1].Spec.NodeName {
		removePod(ctx, all[0], metav1.DeleteOptions{})
		serving(ctx)
	}
}

// rackDelay is how long the rack delays the creation of a disk, or of its device in the guest view,
// so that a spec can delete a pod or kill a process meanwhile.
const rackDelay = "3s"

var _ = Describe("a running pod", func() {
	It("survives restarts of its node's driver and kubelet, while "+
		"another pod starts (B-10, D-42)", func(ctx SpecContext) {
		doctor, on := newDoctor(ctx), workers[0]
		claim := s.Claim(ctx, Claim{})
		runner := s.Beating(ctx, on, claim)
		sum := runner.Fill(ctx)
		elsewhere := s.Beating(ctx, workers[1], s.Claim(ctx, Claim{}))
		mounts := mountsOf(ctx, on)
		switchRack(ctx, "device_delay", rackDelay, "0s")

		By("deleting the driver's pod while another pod's volume is staged", func() {
			staged := s.Staging(ctx, on)
			removePod(ctx, installedPod(ctx, ofNode, on), metav1.DeleteOptions{})
			staged.Running(ctx)
		})
		By("killing the driver's process while another pod's volume is staged", func() {
			serving(ctx)
			before := installedPod(ctx, ofNode, on)
			staged := s.Staging(ctx, on)
			kill(ctx, before, "oxide-plugin")
			doctor.findsNothing(ctx, "pvc", s.path(claim)) // a running pod needs no driver
			staged.Running(ctx)
			restarted(ctx, before, "oxide-plugin")
		})
		By("restarting the kubelet while another pod's volume is staged", func() {
			staged := s.Staging(ctx, on)
			must(machines[on].run(ctx, "systemctl restart kubelet"))
			staged.Running(ctx)
		})
		serving(ctx)
		Expect(mountsOf(ctx, on)).To(ContainElements(mounts),
			"the mounts of the pod that ran all the time")
		elsewhere.Beats(ctx)
		last := runner.Beats(ctx)
		runner.Delete(ctx)
		moved := s.Beating(ctx, workers[1], claim)
		Expect(moved.Beats(ctx)).To(BeNumerically(">", last), "no write is lost")
		Expect(moved.Sum(ctx)).To(Equal(sum))
	}, NodeTimeout(6*time.Minute))

	It("survives the deletion of the leading controller, and each new claim gets exactly one disk "+
		"(D-8, B-13)", func(ctx SpecContext) {
		before := must(theRack.Admin.State(ctx))
		claims := []string{s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})}
		runners := []*pod{
			s.Beating(ctx, workers[0], claims[0]), s.Beating(ctx, workers[1], claims[1])}
		sum := runners[0].Fill(ctx)
		switchRack(ctx, "create_hold", rackDelay, "0s")
		since := lastRequest(ctx)
		var waiting []*pod
		for i := range 4 {
			claims = append(claims, s.Claim(ctx, Claim{}))
			waiting = append(waiting,
				s.Pod(ctx, Pod{Claims: claims[len(claims)-1:], Node: workers[i%len(workers)]}))
		}
		leads := leader(ctx, provisionerLease, ofController)
		// Count disks, not logged requests: the rack logs a request only after it has answered.
		Eventually(func() int { return len(newDisks(ctx, before)) }).WithContext(ctx).
			Should(BeNumerically(">", len(runners)), "the rack should be making disks")
		Expect(len(requestsOf(ctx, "disk_create", since))).To(BeNumerically("<", len(waiting)),
			"some callers should still wait for their answer")
		now := int64(0)
		removePod(ctx, leads, metav1.DeleteOptions{GracePeriodSeconds: &now})
		for _, p := range waiting {
			p.Running(ctx)
		}
		s.OneDiskEach(ctx, before, claims...)
		Expect(leader(ctx, provisionerLease, ofController).UID).NotTo(Equal(leads.UID))
		for _, p := range runners {
			p.Beats(ctx)
		}
		Expect(runners[0].Sum(ctx)).To(Equal(sum))
	}, NodeTimeout(6*time.Minute))
})

// provisionerLease is csi-provisioner's Lease. Only the driver in the holder's pod creates disks.
const provisionerLease = "csi-oxide-computer"

// leader waits until a pod that matches the selector holds the Lease with this name.
func leader(ctx context.Context, name, selector string) corev1.Pod {
	var leads corev1.Pod
	Eventually(func(g Gomega) {
		lease := read(ctx, g, api.CoordinationV1().Leases(driverNamespace), name)
		spec := lease.Spec
		g.Expect(spec.HolderIdentity).NotTo(BeNil())
		g.Expect(spec.RenewTime).NotTo(BeNil())
		g.Expect(time.Since(spec.RenewTime.Time).Seconds()).To(
			BeNumerically("<", *spec.LeaseDurationSeconds), "the lease %+v", spec)
		all := installedPods(ctx, selector, "")
		i := slices.IndexFunc(all, func(p corev1.Pod) bool { return p.Name == *spec.HolderIdentity })
		g.Expect(i).NotTo(Equal(-1), "the holder is %s", *spec.HolderIdentity)
		leads = all[i]
	}).WithContext(ctx).Should(Succeed(), "one of the pods with %s should lead", selector)
	return leads
}

// mustBeStopped lists the code, the reason and the advice in the driver's error if a rack refuses
// to attach a disk to a running instance, or to detach it.
var mustBeStopped = []string{"FailedPrecondition", "InstanceMustBeStopped", "stop"}

func detachErrors(ctx context.Context) (string, error) {
	return machines[controlPlane].run(ctx, kubectlCommand+
		"get volumeattachments --output=jsonpath='{.items[*].status.detachError.message}'")
}

var _ = Describe("the driver", func() {
	It("reports an attach and a detach that a rack without hot-plug refuses, and completes both once "+
		"the rack has hot-plug (D-61)", func(ctx SpecContext) {
		doctor, moving, refused := newDoctor(ctx), s.Claim(ctx, Claim{}), s.Claim(ctx, Claim{})
		first := s.Beating(ctx, workers[0], moving)
		last, since := first.Beats(ctx), lastRequest(ctx)
		withoutHotplug(ctx)
		waiting := s.Pod(ctx, Pod{Node: workers[0], Claims: []string{refused}})
		waiting.Pending(ctx, mustBeStopped...)
		first.Delete(ctx)
		Eventually(detachErrors).WithContext(ctx).Should(And(ContainSubstring(mustBeStopped[0]),
			ContainSubstring(mustBeStopped[1])), "why the volume is not detached")
		doctor.finds(ctx, "instance", mustBeStopped[1], "pvc", s.path(refused))
		doctor.finds(ctx, "instance", mustBeStopped[1], "pvc", s.path(moving))
		Expect(requestsOf(ctx, "instance_stop", since)).To(BeEmpty(), "the driver stops nothing")

		By("giving it hot-plug")
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
		waiting.Running(ctx)
		Expect(s.Beating(ctx, workers[1], moving).Beats(ctx)).To(BeNumerically(">", last),
			"no write is lost")
		doctor.findsNothing(ctx, "pvc", s.path(moving))
	}, NodeTimeout(5*time.Minute))

	It("does not restart while the rack is unreachable, and afterwards serves every waiting "+
		"request exactly once (PR-5, B-10, B-42)",
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
			cut := fault(ctx, adminapi.Fault{Cut: true})
			// The intervals of retries grow, so a pod created late in an outage runs soon after the outage.
			const late, back = 50 * time.Second, time.Minute
			waiting := []*pod{more(), more()}
			taken := s.Snapshot(ctx, claims[1])
			sum := runners[1].Fill(ctx)
			noRestartUntil(ctx, lives, away.Add(late))
			waiting = append(waiting, more())
			// The node can unmount without the rack. All other calls have to wait for the rack.
			runners[0].Delete(ctx)
			s.DeleteClaim(ctx, leaving)
			noRestartUntil(ctx, lives, away.Add(back))
			for _, p := range waiting {
				s.Unbound(ctx, p.get(ctx).Spec.Volumes[0].PersistentVolumeClaim.ClaimName)
			}
			Expect(theRack.Admin.Fired(ctx, cut)).To(BeNumerically(">", len(waiting)))
			doctor.finds(ctx, "rack", "RackUnavailable", "pvc", s.path(claims[2]))
			doctor.finds(ctx, "rack", "RackUnavailable", "rack")
			doctor.findsNothing(ctx, "pvc", s.path(claims[1])) // a running pod needs no rack

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

// noRestartUntil checks until a given time that all containers of the driver stay ready and none
// restarts. The parameter "before" is an earlier result of driverRestarts.
func noRestartUntil(ctx context.Context, before []string, until time.Time) {
	Consistently(func() []string { return driverRestarts(ctx) }).WithContext(ctx).
		WithTimeout(time.Until(until)).WithPolling(time.Second).
		Should(Equal(before), "an outage of the rack should restart nothing")
}

var _ = Describe("a failing disk", Label("long"), func() {
	It("is reported by doctor, can be unstaged, and has all acknowledged data after "+
		"its repair (NU-4, NH-2, B-38)", func(ctx SpecContext) {
		// A restart of the rack removes all devices, so atEnd closes the fixture before the restart.
		s.atEnd(func(ctx context.Context) { replaceRackArgument(ctx, "--disks=fuse", "--keep-devices") })
		replaceRackArgument(ctx, "--keep-devices", "--disks=fuse")
		doctor, claim := newDoctor(ctx), s.Claim(ctx, Claim{})
		runner := s.Beating(ctx, workers[0], claim)
		sum, last := runner.Fill(ctx), runner.Beats(ctx)
		disk := s.Bound(ctx, claim).Spec.CSI.VolumeHandle

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

// replaceRackArgument restarts the simulated rack, with one of its arguments replaced.
func replaceRackArgument(ctx context.Context, old, replacement string) {
	all := api.AppsV1().Deployments(driverNamespace)
	d := must(all.Get(ctx, simulatorName, metav1.GetOptions{}))
	arguments := d.Spec.Template.Spec.Containers[0].Args
	Expect(arguments).To(ContainElement(old))
	arguments[slices.Index(arguments, old)] = replacement
	must(all.Update(ctx, d, metav1.UpdateOptions{}))
	serving(ctx)
	Eventually(func() error {
		_, err := theRack.Admin.State(ctx)
		return err
	}).WithContext(ctx).WithTimeout(restartTimeout).Should(Succeed(), "the rack should serve")
}

var _ = Describe("a node whose SMBIOS is hidden", func() {
	It("gets its instance's ID from its Node object through a file or a variable (D-64, D-65, D-67)",
		func(ctx SpecContext) {
			doctor := newDoctor(ctx)
			DeferCleanup(func(ctx SpecContext) {
				kubectl(ctx, "delete --ignore-not-found clusterrolebinding/"+nodeName+" clusterrole/"+nodeName)
				install(ctx)
			}, NodeTimeout(2*rolloutTimeout))
			for _, via := range []string{"file", "env"} {
				By("giving it by "+via, func() {
					rollOut(ctx, kustomized(deploy.Files, "kustomize/identified",
						fmt.Sprintf(hideSMBIOS, via)))
					for _, worker := range workers {
						Expect(instanceOf(ctx, worker)).To(Equal(instanceIDs[worker]))
						p := installedPod(ctx, ofNode, worker)
						Expect(p.Spec.InitContainers).To(HaveLen(1))
						Expect(machines[worker].run(ctx, fmt.Sprintf("ls -A /proc/%s/root/oxide/sys/class/dmi",
							processOf(ctx, p, "oxide-plugin")))).To(BeEmpty(), "SMBIOS on %s", worker)
					}
				})
			}
			s.Beating(ctx, workers[0], s.Claim(ctx, Claim{}))
			doctor.findsNothing(ctx, "node", workers[0])
		}, NodeTimeout(5*time.Minute))
})

// hideSMBIOS is a kustomization that hides SMBIOS from the node drivers. The component in place of
// %s tells each driver its instance. Both nodes are changed at once, to save time.
const hideSMBIOS = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../e2e]
components: [../instance-metadata/%s]
patches:
  - patch: |
      kind: DaemonSet
      apiVersion: apps/v1
      metadata: {name: oxide-csi-node, namespace: oxide-csi}
      spec:
        updateStrategy: {rollingUpdate: {maxUnavailable: 100%%}}
        template:
          spec:
            containers:
              - name: oxide-plugin
                volumeMounts: [{name: nothing, mountPath: /oxide/sys/class/dmi}]
            volumes: [{name: nothing, emptyDir: {}}]
`

// processOf returns the process ID of a container as its node sees it.
func processOf(ctx context.Context, p corev1.Pod, container string) string {
	id := containerID(p, container)
	process := strings.TrimSpace(must(machines[p.Spec.NodeName].run(ctx,
		"ctr --namespace k8s.io task list | awk '$1 == \""+id+"\" {print $2}'")))
	Expect(process).NotTo(BeEmpty(), "the process of %s in %s", container, p.Name)
	return process
}
