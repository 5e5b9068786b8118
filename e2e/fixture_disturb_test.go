//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	ofController = "app=" + controllerName // the pods' label in the manifests
	ofNode       = "app=" + nodeName
)

// beating is a script that writes increasing numbers durably to the first volume, then to the pod's
// log. It continues from the volume's last number. After a failed write it creates /tmp/broken.
const beating = `
(
	n=$(cat /data/0/beat 2>/dev/null || echo 0)
	while :; do
		n=$((n+1))
		{ echo $n | dd of=/data/0/next conv=fsync && mv /data/0/next /data/0/beat; } \
			2>/dev/null && echo wrote $n || touch /tmp/broken
		sleep 0.2
	done
) &`

func (f *fixture) Beating(ctx context.Context, node string, claims ...string) *pod {
	p := f.Pod(ctx, Pod{Claims: claims, Node: node, Script: beating}).Running(ctx)
	p.Beats(ctx)
	return p
}

// Beats waits for one more write of the pod and returns its number. It checks that no write has
// failed and that no container was restarted.
func (p *pod) Beats(ctx context.Context) int {
	before := p.beat(ctx)
	var now int
	Eventually(func() int {
		now = p.beat(ctx)
		return now
	}).WithContext(ctx).Should(BeNumerically(">", before), "pod %s should go on writing", p.name)
	Expect(p.Sh(ctx, "ls /tmp")).NotTo(ContainSubstring("broken"),
		"no write of pod %s should have failed", p.name)
	for _, c := range p.get(ctx).Status.ContainerStatuses {
		Expect(c.RestartCount).To(BeZero(), "restarts of pod %s", p.name)
	}
	return now
}

func (p *pod) Fill(ctx context.Context) string {
	p.Sh(ctx, "dd if=/dev/urandom of=/data/0/random bs=1M count=16 conv=fsync 2>/dev/null")
	return p.Sum(ctx)
}

func (p *pod) Sum(ctx context.Context) string {
	return p.Sh(ctx, "sha256sum < /data/0/random")
}

// Staging creates a pod with a new volume on a node, and waits until the rack has attached the
// disk. At this time the node's driver stages the volume, or is about to.
func (f *fixture) Staging(ctx context.Context, node string) *pod {
	claim := f.Claim(ctx, Claim{})
	p := f.Pod(ctx, Pod{Claims: []string{claim}, Node: node})
	pv := f.Bound(ctx, claim)
	f.AttachedTo(ctx, pv.Spec.CSI.VolumeHandle, node)
	return p
}

// AttachedTo waits until a disk is attached to the node's instance, or detached if node is "".
func (f *fixture) AttachedTo(ctx context.Context, disk, node string) {
	Eventually(func() (string, error) { return theRack.attachedTo(ctx, disk) }).WithContext(ctx).
		Should(Equal(node), "where the disk %s is attached", disk)
}

func (p *pod) beat(ctx context.Context) int {
	text := p.Sh(ctx, "cat /data/0/beat 2>/dev/null || echo 0")
	n, err := strconv.Atoi(text)
	Expect(err).NotTo(HaveOccurred(), "the last write of pod %s", p.name)
	return n
}

// Keepers creates a StatefulSet whose pods run the script beating, and waits until all write.
func (f *fixture) Keepers(ctx context.Context, class, name string, replicas int32) []*pod {
	template := f.podObject(ctx, &Pod{Script: beating}).Spec
	template.Containers[0].VolumeMounts = []corev1.VolumeMount{
		{Name: "data", MountPath: "/data/0"}}
	labels := map[string]string{"set": name}
	must(api.AppsV1().StatefulSets(f.ns).Create(ctx, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: template},
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{
				*(&Claim{Name: "data", Class: class}).object()},
		},
	}, metav1.CreateOptions{}))
	keepers := make([]*pod, replicas)
	for i := range keepers {
		keepers[i] = &pod{s: f, name: fmt.Sprintf("%s-%d", name, i)}
	}
	for _, p := range keepers {
		p.Present(ctx).Running(ctx).Beats(ctx)
	}
	return keepers
}

func scale(ctx context.Context, name string, replicas int) {
	must(api.AppsV1().StatefulSets(s.ns).Patch(ctx, name, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{}))
}

func (p *pod) Present(ctx context.Context) *pod {
	Eventually(func(g Gomega) {
		got := read(ctx, g, api.CoreV1().Pods(p.s.ns), p.name)
		g.Expect(got.DeletionTimestamp).To(BeNil())
	}).WithContext(ctx).WithTimeout(3*time.Minute).Should(Succeed(), "pod %s", p.name)
	return p
}

// installedPods lists a node's pods, without those being deleted. The node "" means all nodes.
func installedPods(ctx context.Context, selector, node string) []corev1.Pod {
	options := metav1.ListOptions{LabelSelector: selector}
	if node != "" {
		options.FieldSelector = "spec.nodeName=" + node
	}
	list := must(api.CoreV1().Pods(driverNamespace).List(ctx, options))
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil
	})
}

func installedPod(ctx context.Context, selector, node string) corev1.Pod {
	all := installedPods(ctx, selector, node)
	Expect(all).To(HaveLen(1), "pods with %s on %q", selector, node)
	return all[0]
}

func driverRestarts(ctx context.Context) []string {
	var lives []string
	for _, p := range installedPods(ctx, "app in ("+controllerName+","+nodeName+")", "") {
		for _, c := range p.Status.ContainerStatuses {
			lives = append(lives, fmt.Sprintf("%s %s %s: %d restarts, ready %t",
				p.Name, p.UID, c.Name, c.RestartCount, c.Ready))
		}
	}
	slices.Sort(lives)
	return lives
}

// kill ends a container with SIGKILL through containerd, so that kubelet does not know the reason.
func kill(ctx context.Context, p corev1.Pod, container string) {
	must(machines[p.Spec.NodeName].run(ctx,
		"ctr --namespace k8s.io task kill --signal SIGKILL "+containerID(p, container)))
}

func containerID(p corev1.Pod, container string) string {
	_, id, _ := strings.Cut(containerStatus(p, container).ContainerID, "://")
	Expect(id).NotTo(BeEmpty(), "container %s of pod %s should run", container, p.Name)
	return id
}

func restarted(ctx context.Context, p corev1.Pod, container string) {
	before := containerStatus(p, container).RestartCount
	Eventually(func(g Gomega) {
		now := read(ctx, g, api.CoreV1().Pods(p.Namespace), p.Name)
		status := containerStatus(*now, container)
		g.Expect(status.RestartCount).To(BeNumerically(">", before))
		g.Expect(status.Ready).To(BeTrue(), "%+v", status.State)
	}).WithContext(ctx).WithTimeout(restartTimeout).Should(Succeed(),
		"container %s of pod %s should be started again", container, p.Name)
}

func containerStatus(p corev1.Pod, container string) corev1.ContainerStatus {
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == container {
			return c
		}
	}
	return corev1.ContainerStatus{}
}

func removePod(ctx context.Context, p corev1.Pod, options metav1.DeleteOptions) {
	all := api.CoreV1().Pods(p.Namespace)
	Expect(all.Delete(ctx, p.Name, options)).To(Succeed())
	Eventually(func() bool {
		now, err := all.Get(ctx, p.Name, metav1.GetOptions{})
		return err != nil || now.UID != p.UID
	}).WithContext(ctx).Should(BeTrue(), "pod %s should be gone", p.Name)
}

func serving(ctx context.Context) { rolledOut(ctx, installed) }

func mountsOf(ctx context.Context, worker string) []string {
	out := must(machines[worker].run(ctx, "grep kubernetes.io.csi /proc/mounts || true"))
	lines := strings.Split(strings.TrimSpace(out), "\n")
	slices.Sort(lines)
	return lines
}

func docker(ctx context.Context, arguments ...string) {
	out, err := exec.CommandContext(ctx, "docker", arguments...).CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "docker %v: %s", arguments, out)
}

func cordon(ctx context.Context, name string, off bool) {
	patchNode(ctx, name, fmt.Sprintf(`{"spec":{"unschedulable":%t}}`, off))
}

func patchNode(ctx context.Context, name, patch string) {
	must(api.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}))
}

// hypervisor stops and starts workers' containers with their instances, as a rack does with guests.
// When the rack is asked to stop an instance, it answers at once, but the instance is stopped only
// when its container is off.
//
// A fault in the rack delays each stop, so a spec that uses a hypervisor must remove only its own
// faults. A reboot of an instance does not restart its container. If two instances are stopped at
// the same moment, the second may lose its disks shortly before its container ends.
type hypervisor struct {
	// The keys are workers. holds has the ID of the fault that delays a worker's stop. stops has how
	// often that fault has fired. off reports whether the worker's container is stopped.
	holds map[string]string
	stops map[string]int
	off   map[string]bool
}

const hypervisorPeriod = 200 * time.Millisecond

// guestsFollow runs a hypervisor until the spec or the Ginkgo container ends. The cleanup starts
// all instances and waits until all workers are ready.
func guestsFollow(ctx context.Context) {
	h := &hypervisor{holds: map[string]string{}, stops: map[string]int{}, off: map[string]bool{}}
	for _, worker := range workers {
		h.holds[worker] = fault(ctx, heldStop(ctx, worker))
	}
	// The goroutine needs a context that outlives the spec's: cleanups also stop and start instances.
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	DeferCleanup(func(ctx SpecContext) {
		end()
		<-ended
		Expect(theRack.Admin.RunDeferred(ctx)).To(Succeed())
		for _, worker := range workers {
			startInstance(ctx, worker)
			powerOn(ctx, worker)
			servesSinceBoot(ctx, worker)
		}
	}, NodeTimeout(nodeLostTimeout))
	go func() {
		defer close(ended)
		defer GinkgoRecover()
		_ = wait.PollUntilContextCancel(ctx, hypervisorPeriod, true,
			func(ctx context.Context) (bool, error) {
				h.follow(context.WithoutCancel(ctx)) // so that a step that has begun completes
				return false, nil
			})
	}()
}

// heldStop returns a fault that makes the rack accept a stop of the worker's instance, but stop the
// instance only when RunDeferred is called.
func heldStop(ctx context.Context, worker string) adminapi.Fault {
	instance := theRack.instance(ctx, worker)
	instance.RunState = oxide.InstanceStateStopping
	body := must(json.Marshal(instance))
	return adminapi.Fault{
		Operation: "instance_stop", Object: instance.Id, Phase: adminapi.Deferred,
		Response: &adminapi.Response{Status: http.StatusAccepted, Body: string(body)},
		// Normally follow() calls RunDeferred() before this time has passed.
		Delay: adminapi.Duration(time.Minute),
	}
}

// follow kills the containers of the instances that the rack was asked to stop since the last call.
// Then it stops or starts each container according to its instance's state.
func (h *hypervisor) follow(ctx context.Context) {
	for worker, hold := range h.holds {
		stops := must(theRack.Admin.Fired(ctx, hold))
		if stops > h.stops[worker] {
			h.stops[worker] = stops
			h.power(ctx, worker, false)
			Expect(theRack.Admin.RunDeferred(ctx)).To(Succeed())
		}
	}
	for _, i := range must(theRack.Admin.State(ctx)).Instances {
		switch oxide.InstanceState(i.RunState) {
		case oxide.InstanceStateStarting, oxide.InstanceStateRunning, oxide.InstanceStateRebooting:
			h.power(ctx, i.Name, true)
		default:
			h.power(ctx, i.Name, false)
		}
	}
}

func (h *hypervisor) power(ctx context.Context, worker string, on bool) {
	switch off := h.off[worker]; {
	case on && off:
		powerOn(ctx, worker)
	case !on && !off:
		docker(ctx, "kill", worker)
	}
	h.off[worker] = !on
}

func powerOn(ctx context.Context, worker string) {
	docker(ctx, "start", worker)
	machines[worker].prepare(ctx)
}

// bootTime returns when a worker's container was started, truncated to seconds like the start times
// in the status of pods.
func bootTime(ctx context.Context, worker string) time.Time {
	out := must(exec.CommandContext(ctx, "docker", "inspect", "--format", "{{.State.StartedAt}}",
		worker).Output())
	return must(time.Parse(time.RFC3339Nano, strings.TrimSpace(string(out)))).Truncate(time.Second)
}

// servesSinceBoot waits until a worker is ready, and until its driver's containers were started
// after the worker.
func servesSinceBoot(ctx context.Context, worker string) {
	boot := bootTime(ctx, worker)
	Eventually(func(g Gomega) {
		n := read(ctx, g, api.CoreV1().Nodes(), worker)
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady {
				g.Expect(c.Status).To(Equal(corev1.ConditionTrue), c.Message)
			}
		}
		pods := installedPods(ctx, ofNode, worker)
		g.Expect(pods).To(HaveLen(1))
		runsSince(g, pods[0], boot)
	}).WithContext(ctx).WithTimeout(nodeLostTimeout).Should(Succeed(),
		"%s should be ready again", worker)
}

func (p *pod) RunningSinceBoot(ctx context.Context) *pod {
	boot := bootTime(ctx, p.Node(ctx))
	Eventually(func(g Gomega) { runsSince(g, *p.get(ctx), boot) }).WithContext(ctx).
		Should(Succeed(), "pod %s should run since its node was started", p.name)
	return p
}

func runsSince(g Gomega, p corev1.Pod, boot time.Time) {
	g.Expect(p.Status.ContainerStatuses).NotTo(BeEmpty())
	for _, c := range p.Status.ContainerStatuses {
		g.Expect(c.Ready).To(BeTrue(), "container %s: %+v", c.Name, c.State)
		g.Expect(c.State.Running).NotTo(BeNil())
		g.Expect(c.State.Running.StartedAt.Time).NotTo(BeTemporally("<", boot), c.Name)
	}
}

func (r *rackClients) instance(ctx context.Context, worker string) *oxide.Instance {
	return must(r.Client.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(instanceIDs[worker])}))
}

func stopInstance(ctx context.Context, worker string) {
	must(theRack.Client.InstanceStop(ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instanceIDs[worker])}))
	instanceIs(ctx, worker, oxide.InstanceStateStopped)
}

// startInstance starts a worker's instance, which may run already, and waits until it runs.
func startInstance(ctx context.Context, worker string) {
	must(theRack.Client.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instanceIDs[worker])}))
	instanceIs(ctx, worker, oxide.InstanceStateRunning)
}

func instanceIs(ctx context.Context, worker string, want oxide.InstanceState) {
	Eventually(func() oxide.InstanceState { return theRack.instance(ctx, worker).RunState }).
		WithContext(ctx).Should(Equal(want), "the instance of %s", worker)
}
