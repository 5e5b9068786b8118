//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

var _ = Describe("the node keeper", Ordered, ContinueOnFailure, func() {
	BeforeAll(func(ctx SpecContext) {
		// The attacher has to run while one worker is stopped, so each worker gets a controller.
		spreadControllers(ctx)
		guestsFollow(ctx)
		installKeeper(ctx)
	}, NodeTimeout(2*rolloutTimeout))

	It("attaches the volumes of a scaled-up StatefulSet, even if the leading keeper is killed (D-61)",
		survivesItsLeader, NodeTimeout(2*keeperTimeout))
	It("moves a node-bound volume and its data to the other node (D-61)",
		Label("long"), movesTiedVolume, NodeTimeout(2*keeperTimeout))
	It("gives the volumes of a stopped instance to the other node (D-38, D-61)", fences,
		NodeTimeout(2*nodeLostTimeout))
	It("keeps the driver on a drained node until all volumes are detached, and does not delay the "+
		"end of the driver on another node (D-38)", keepsTheDriver, NodeTimeout(keeperTimeout))
	It("removes the startup taint when the driver is registered, and not before (CP-9)", freesNewNodes,
		NodeTimeout(2*time.Minute))
})

// survivesItsLeader kills the leading keeper while an instance is stopped. The killed keeper does
// not release its Lease, so the second replica takes over only when the Lease expires.
func survivesItsLeader(ctx SpecContext) {
	kept := s.Keepers(ctx, diskClass, "kept", 3)
	sums := map[*pod]string{}
	for _, p := range kept {
		sums[p] = p.Fill(ctx)
	}
	withoutHotplug(ctx)
	since := lastRequest(ctx)
	stopped := workers[0]
	if leader(ctx, keeperLease, ofKeeper).Spec.NodeName == stopped {
		stopped = workers[1]
	}
	onlyOn(ctx, stopped)
	scale(ctx, "kept", 6)
	for i := 3; i < 6; i++ {
		(&pod{s: s, name: fmt.Sprintf("kept-%d", i)}).Pending(ctx, mustBeStopped...)
	}
	for _, worker := range workers {
		cordon(ctx, worker, false)
	}
	Expect(inStep(ctx, "Stopping", "Attaching")).To(Equal(stopped))
	dies := leader(ctx, keeperLease, ofKeeper)
	Expect(dies.Spec.NodeName).NotTo(Equal(stopped), "no keeper stops its own node")
	// A stopped process cannot react to the deletion of its pod by releasing its Lease.
	must(machines[dies.Spec.NodeName].run(ctx, "kill -STOP "+
		processOf(ctx, dies, "oxide-node-keeper")))
	now := int64(0)
	removePod(ctx, dies, metav1.DeleteOptions{GracePeriodSeconds: &now})

	kubectl(ctx, fmt.Sprintf("rollout status statefulset/kept --namespace=%s --timeout=%s", s.ns,
		keeperTimeout))
	coldAttached(ctx)
	Expect(stopsSince(ctx, since)).To(Equal(map[string]int{stopped: 1}))
	Expect(recorded(ctx, stopped)).To(HaveField("Last.Problem", BeEmpty()))
	for _, p := range kept {
		Expect(p.Sum(ctx)).To(Equal(sums[p]))
		if p.Node(ctx) == stopped {
			p.RunningSinceBoot(ctx)
			Expect(p.lostBeats(ctx)).To(BeZero(), "writes of %s", p.name)
		}
	}
}

// movesTiedVolume deletes the pod of a volume that is tied to the leading keeper's node. A keeper
// never stops its own node, so the other keeper must become the leader. Then the volume is moved.
func movesTiedVolume(ctx SpecContext) {
	class := s.Class(ctx, Class{Parameters: map[string]string{"placement": "instance"}})
	from, to := leader(ctx, keeperLease, ofKeeper).Spec.NodeName, workers[0]
	if from == to {
		to = workers[1]
	}
	onlyOn(ctx, from)
	p := s.Keepers(ctx, class, "stays", 1)[0]
	cordon(ctx, to, false)
	sum, since, last := p.Fill(ctx), lastRequest(ctx), p.Beats(ctx)
	volume := s.Bound(ctx, "data-"+p.name)
	Expect(volume.Spec.PersistentVolumeReclaimPolicy).To(Equal(corev1.PersistentVolumeReclaimDelete))

	By("deleting the pod on a rack without hot-plug, and making it wait until the disk should be "+
		"detached", func() {
		withoutHotplug(ctx)
		cordon(ctx, from, true)
		kubectl(ctx, "delete pod/"+p.name+" --namespace="+s.ns)
		Eventually(detachErrors).WithContext(ctx).Should(ContainSubstring(mustBeStopped[1]))
		cordon(ctx, from, false)
		kubectl(ctx, fmt.Sprintf("wait pod/%s --for=condition=Ready --namespace=%s --timeout=%s",
			p.Present(ctx).name, s.ns, keeperTimeout))
		coldAttached(ctx)
		Expect(stopsSince(ctx, since)).To(HaveKey(from))
		Expect(p.Node(ctx)).To(Equal(from))
		Expect(p.beat(ctx)).To(BeNumerically(">=", last), "no write is lost")
		Expect(p.Sum(ctx)).To(Equal(sum))
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
	})
	since, last = lastRequest(ctx), p.beat(ctx)
	moveVolume(ctx, volume.Name, to)
	Eventually(func() string { return p.Present(ctx).Node(ctx) }).WithContext(ctx).Should(Equal(to))
	p.Running(ctx)
	Expect(p.Beats(ctx)).To(BeNumerically(">", last), "no write is lost")
	Expect(p.Sum(ctx)).To(Equal(sum))
	moved := s.Bound(ctx, "data-"+p.name)
	Expect(moved.Name).To(Equal(volume.Name))
	Expect(moved.UID).NotTo(Equal(volume.UID))
	Expect(moved.Status.Phase).To(Equal(corev1.VolumeBound))
	Expect(moved.Spec.PersistentVolumeReclaimPolicy).To(
		Equal(volume.Spec.PersistentVolumeReclaimPolicy))
	Expect(moved.Spec.CSI.VolumeHandle).To(Equal(volume.Spec.CSI.VolumeHandle))
	s.AttachedTo(ctx, volume.Spec.CSI.VolumeHandle, to)
	Expect(requestsOf(ctx, "disk_delete", since)).To(BeEmpty())
}

// moveVolume runs `oxide-node-keeper move` on this machine, as an operator would.
func moveVolume(ctx context.Context, volume, node string) {
	program := filepath.Join(GinkgoT().TempDir(), "oxide-node-keeper")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, "../cmd/oxide-node-keeper")
	build.Stderr = GinkgoWriter
	Expect(build.Run()).To(Succeed())
	move := exec.CommandContext(ctx, program, "move", volume, node)
	move.Env = append(harness.Environ(), "KUBECONFIG="+filepath.Join(config.Work, "kubeconfig"))
	out, err := move.CombinedOutput()
	GinkgoWriter.Printf("%s", out)
	Expect(err).NotTo(HaveOccurred(), "%s", out)
}

func fences(ctx SpecContext) {
	off := leader(ctx, keeperLease, ofKeeper).Spec.NodeName
	onlyOn(ctx, off)
	p := s.Keepers(ctx, diskClass, "kept", 1)[0]
	for _, worker := range workers {
		cordon(ctx, worker, false)
	}
	stopInstance(ctx, off)
	Eventually(func(g Gomega) {
		now := read(ctx, g, api.CoreV1().Pods(s.ns), p.name)
		g.Expect(now.Spec.NodeName).NotTo(BeElementOf("", off))
		g.Expect(now.Status.Phase).To(Equal(corev1.PodRunning))
	}).WithContext(ctx).WithTimeout(nodeLostTimeout).Should(Succeed(), "the pod should run elsewhere")
	p.Beats(ctx)
	Expect(p.logged(ctx, false)[0]).To(BeNumerically(">", 1), "it continues the earlier numbers")
	n := must(api.CoreV1().Nodes().Get(ctx, off, metav1.GetOptions{}))
	Expect(recorded(ctx, off)).To(HaveField("Fenced", instanceIDs[off]))
	Expect(n.Spec.Taints).To(ContainElement(HaveField("Key", corev1.TaintNodeOutOfService)))

	startInstance(ctx, off)
	servesSinceBoot(ctx, off)
	Eventually(func(g Gomega) {
		n := read(ctx, g, api.CoreV1().Nodes(), off)
		g.Expect(recorded(ctx, off)).To(HaveField("Fenced", BeEmpty()))
		g.Expect(n.Spec.Taints).To(BeEmpty())
	}).WithContext(ctx).Should(Succeed(), "%s should be free again", off)
	s.Beating(ctx, off, s.Claim(ctx, Claim{}))
}

func keepsTheDriver(ctx SpecContext) {
	stays, goes := workers[0], workers[1]
	onlyOn(ctx, goes)
	kept := s.Keepers(ctx, diskClass, "kept", 3)
	last := map[*pod]int{}
	for _, p := range kept {
		last[p] = p.Beats(ctx)
	}
	cordon(ctx, stays, false)
	attachments := must(api.StorageV1().VolumeAttachments().Watch(ctx, metav1.ListOptions{}))
	defer attachments.Stop()
	drivers := must(api.CoreV1().Pods(driverNamespace).Watch(ctx,
		metav1.ListOptions{LabelSelector: ofNode}))
	defer drivers.Stop()

	cordon(ctx, goes, true)
	going := installedPod(ctx, ofNode, goes)
	Expect(api.CoreV1().Pods(driverNamespace).Delete(ctx, going.Name,
		metav1.DeleteOptions{})).To(Succeed())
	for _, p := range kept {
		Expect(api.PolicyV1().Evictions(s.ns).Evict(ctx, &policyv1.Eviction{
			ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: p.name}})).To(Succeed())
	}
	driverGone := deleted(ctx, drivers, func(o metav1.Object) bool { return o.GetUID() == going.UID })
	for range kept {
		Expect(deleted(ctx, attachments, func(o metav1.Object) bool {
			a, ok := o.(*storagev1.VolumeAttachment)
			return ok && a.Spec.NodeName == goes
		})).To(BeNumerically("<", driverGone), "a volume is detached while its driver is there")
	}
	for _, p := range kept {
		p.Present(ctx).Running(ctx)
		Expect(p.Node(ctx)).To(Equal(stays))
		Expect(p.Beats(ctx)).To(BeNumerically(">", last[p]), "no write is lost")
	}
	cordon(ctx, goes, false)
	serving(ctx)
	began := time.Now()
	removePod(ctx, installedPod(ctx, ofNode, stays), metav1.DeleteOptions{})
	Expect(time.Since(began)).To(BeNumerically("<", 15*time.Second), "the volumes stay attached")
	serving(ctx)
}

// deleted returns the resource version of the first deleted object for which one() is true. One
// etcd stores all kinds, so versions of different kinds are comparable.
func deleted(ctx context.Context, w watch.Interface, one func(metav1.Object) bool) int {
	limit := time.After(nodeLostTimeout)
	for {
		select {
		case event := <-w.ResultChan():
			o, ok := event.Object.(metav1.Object)
			Expect(ok).To(BeTrue(), "watching gave %v", event)
			if event.Type == watch.Deleted && one(o) {
				return must(strconv.Atoi(o.GetResourceVersion()))
			}
		case <-limit:
			Fail("nothing was deleted within " + nodeLostTimeout.String())
		}
	}
}

// freesNewNodes checks that a worker keeps its startup taint until the driver is registered there.
func freesNewNodes(ctx SpecContext) {
	worker := workers[0]
	must(api.StorageV1().CSINodes().Patch(ctx, worker, types.MergePatchType,
		[]byte(`{"spec":{"drivers":[]}}`), metav1.PatchOptions{}))
	taintStartup(ctx, worker)
	Consistently(func(g Gomega) {
		n := read(ctx, g, api.CoreV1().Nodes(), worker)
		g.Expect(n.Spec.Taints).To(ContainElement(HaveField("Key", startupTaint)))
	}).WithContext(ctx).WithTimeout(6*time.Second).Should(Succeed(), "the driver is not registered")
	removePod(ctx, installedPod(ctx, ofNode, worker), metav1.DeleteOptions{})
	freed(ctx, worker)
	Expect(instanceOf(ctx, worker)).To(Equal(instanceIDs[worker]))
	serving(ctx)
}

func taintStartup(ctx context.Context, worker string) {
	patchNode(ctx, worker, fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`,
		startupTaint))
}

func freed(ctx context.Context, worker string) {
	Eventually(func(g Gomega) {
		n := read(ctx, g, api.CoreV1().Nodes(), worker)
		g.Expect(n.Spec.Taints).NotTo(ContainElement(HaveField("Key", startupTaint)))
	}).WithContext(ctx).Should(Succeed(), "the startup taint of %s should be gone", worker)
}

// These names are in the node keeper's manifests, or in objects that it writes.
const (
	keeperName   = "oxide-csi-node-keeper"
	ofKeeper     = "app=" + keeperName
	keeperLease  = "oxide-node-keeper"         // also the name of the ConfigMap with the records
	mayStop      = driverName + "/cold-attach" // the label
	cordonMark   = driverName + "/cold-attach" // the annotation
	startupTaint = driverName + "/agent-not-ready"
	instanceKey  = "topology." + driverName + "/instance"
)

// keeping is a kustomization that adds the node keeper to the suite's installation, with all of its
// tasks and with shorter waits than by default. Nodes report their instances, as with the chart's
// value topologyInstance. The drivers on both nodes are replaced at the same time, to save time.
const keeping = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../e2e]
components: [../node-keeper]
patches:
  - target: {kind: Deployment, name: oxide-csi-node-keeper}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --settle=5s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --min-interval=3s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --stateful-set-interval=3s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --interval=2s}
      - {op: add, path: /spec/template/spec/containers/0/args/-,
         value: --leader-election-lease-duration=9s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --fence}
  - target: {kind: Deployment, name: oxide-csi-controller}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/env/-,
         value: {name: OXIDE_TOPOLOGY_INSTANCE, value: "true"}}
      - {op: test, path: /spec/template/spec/containers/1/name, value: csi-provisioner}
      - {op: add, path: /spec/template/spec/containers/1/args/-, value: --strict-topology=true}
      - {op: add, path: /spec/template/spec/containers/1/args/-, value: --immediate-topology=false}
  - target: {kind: ClusterRole, name: oxide-csi-controller}
    patch: |
      - {op: add, path: /rules/-,
         value: {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [update]}}
      - {op: add, path: /rules/-,
         value: {apiGroups: [""], resources: [nodes], verbs: [list, watch]}}
  - target: {kind: DaemonSet, name: oxide-csi-node}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/env/-,
         value: {name: OXIDE_TOPOLOGY_INSTANCE, value: "true"}}
      - {op: replace, path: /spec/updateStrategy/rollingUpdate/maxUnavailable, value: 100%}
`

// installKeeper installs the node keeper until the specs of the Ginkgo container end, and allows it
// to stop both workers' instances.
func installKeeper(ctx context.Context) {
	objects := kustomized(deploy.Files, "kustomize/keeping", keeping)
	before := installed
	DeferCleanup(func(ctx SpecContext) {
		removeAll(ctx, slices.DeleteFunc(slices.Clone(objects),
			func(o *unstructured.Unstructured) bool { return among(before, o) }))
		removeLeases(ctx, driverNamespace, keeperLease)
		removeRecords(ctx)
		for _, worker := range workers {
			patchNode(ctx, worker, fmt.Sprintf(`{"metadata":{"labels":{%q:null,%q:null}}}`, mayStop,
				instanceKey))
		}
		install(ctx)
	}, NodeTimeout(2*rolloutTimeout))
	installed = objects
	rollOut(ctx, objects)
	for _, worker := range workers {
		patchNode(ctx, worker, fmt.Sprintf(`{"metadata":{"labels":{%q:"allowed"}}}`, mayStop))
	}
}

func removeRecords(ctx context.Context) {
	Expect(api.CoreV1().ConfigMaps(driverNamespace).Delete(ctx, keeperLease, metav1.DeleteOptions{})).
		To(Or(Succeed(), Satisfy(apierrors.IsNotFound)))
}

func among(all []*unstructured.Unstructured, one *unstructured.Unstructured) bool {
	return slices.ContainsFunc(all, func(o *unstructured.Unstructured) bool {
		return o.GetKind() == one.GetKind() && o.GetName() == one.GetName() &&
			o.GetNamespace() == one.GetNamespace()
	})
}

// coldAttached waits until the keeper has no operation on a worker, and all workers are ready and
// schedulable.
func coldAttached(ctx context.Context) {
	Eventually(func(g Gomega) {
		for _, worker := range workers {
			n := read(ctx, g, api.CoreV1().Nodes(), worker)
			g.Expect(recorded(ctx, worker)).To(HaveField("Operation.Step", BeEmpty()), worker)
			g.Expect(n.Spec.Unschedulable).To(BeFalse(), worker)
		}
	}).WithContext(ctx).WithTimeout(nodeLostTimeout).Should(Succeed(),
		"the keeper should have nothing to do")
	for _, worker := range workers {
		servesSinceBoot(ctx, worker)
	}
}

// stopsSince counts the stops of each worker's instance in the rack's log after a given entry. Of
// several stop requests without a start between them, only one counts.
func stopsSince(ctx context.Context, since int) map[string]int {
	all := must(theRack.Admin.Requests(ctx, since))
	stops, stopped := map[string]int{}, map[string]bool{}
	for worker, id := range instanceIDs {
		for _, r := range all {
			switch {
			case !strings.Contains(r.Path, id):
			case r.Operation == "instance_start":
				stopped[worker] = false
			case r.Operation == "instance_stop" && !stopped[worker]:
				stops[worker]++
				stopped[worker] = true
			}
		}
	}
	return stops
}

func inStep(ctx context.Context, steps ...string) string {
	var found string
	Eventually(func(g Gomega) {
		for _, worker := range workers {
			r, err := recorded(ctx, worker)
			g.Expect(err).NotTo(HaveOccurred())
			if slices.Contains(steps, r.Operation.Step) {
				found = worker
			}
		}
		g.Expect(found).NotTo(BeEmpty())
	}).WithContext(ctx).WithPolling(100*time.Millisecond).Should(Succeed(),
		"an operation should be in one of the steps %v", steps)
	return found
}

// keeperRecord contains the fields that the specs compare in the keeper's record of a node.
type keeperRecord struct {
	Node      string
	Operation struct{ Step string }
	Last      struct{ Problem string }
	Fenced    string
}

func recorded(ctx context.Context, name string) (keeperRecord, error) {
	m, err := api.CoreV1().ConfigMaps(driverNamespace).Get(ctx, keeperLease, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return keeperRecord{}, nil
	} else if err != nil {
		return keeperRecord{}, err
	}
	for _, text := range m.Data {
		var r keeperRecord
		if err := json.Unmarshal([]byte(text), &r); err != nil || r.Node == name {
			return r, err
		}
	}
	return keeperRecord{}, nil
}

// lostBeats counts the writes that the pod's previous container has logged, but that were not on
// the volume when the current container started.
func (p *pod) lostBeats(ctx context.Context) int {
	before, now := p.logged(ctx, true), p.logged(ctx, false)
	return max(0, before[len(before)-1]-(now[0]-1))
}

func (p *pod) logged(ctx context.Context, previous bool) []int {
	text := must(api.CoreV1().Pods(p.s.ns).GetLogs(p.name, &corev1.PodLogOptions{
		Container: "main", Previous: previous}).DoRaw(ctx))
	var numbers []int
	for line := range strings.Lines(string(text)) {
		var n int
		_, err := fmt.Sscanf(line, "wrote %d\n", &n)
		Expect(err).NotTo(HaveOccurred(), "%s says %q", p.name, line)
		numbers = append(numbers, n)
	}
	Expect(numbers).NotTo(BeEmpty(), "what %s has written", p.name)
	return numbers
}

// keeperTimeout is the time in which the keeper has to complete an operation on each worker.
const keeperTimeout = 5 * time.Minute
