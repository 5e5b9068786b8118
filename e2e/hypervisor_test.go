//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"os/exec"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// hypervisor makes the workers' containers follow their instances, as a rack's guests do. A stop
// takes effect when the guest is off: the rack answers, and then waits until it is.
//
// It knows a stop by a fault, so a spec that has one must not clear faults that it did not make.
// The guest of an instance that reboots runs on. Of two instances that are stopped in the same
// moment the second may lose its disks just before its guest ends.
type hypervisor struct {
	// holds are the faults that hold stops, by worker, and stops is how often each has fired.
	holds map[string]string
	stops map[string]int
	off   map[string]bool
}

// hypervisorPeriod is how often instances are looked at.
const hypervisorPeriod = 200 * time.Millisecond

// guestsFollow makes the guests follow their instances until the spec ends. Then every instance
// runs, and every guest is a node again.
func guestsFollow(ctx context.Context) {
	GinkgoHelper()
	h := &hypervisor{holds: map[string]string{}, stops: map[string]int{}, off: map[string]bool{}}
	for _, worker := range workers {
		h.holds[worker] = faults(ctx, heldStop(ctx, worker))[0]
	}
	// The spec's own context ends before its cleanup, in which instances may stop and start as well.
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
				h.follow(context.WithoutCancel(ctx)) // a step that has begun is done
				return false, nil
			})
	}()
}

// heldStop is the fault by which the rack accepts to stop a worker's instance, and does it when it
// is told to.
func heldStop(ctx context.Context, worker string) adminapi.Fault {
	GinkgoHelper()
	instance := theRack.instance(ctx, worker)
	instance.RunState = oxide.InstanceStateStopping
	body, err := json.Marshal(instance)
	Expect(err).NotTo(HaveOccurred())
	return adminapi.Fault{
		Operation: "instance_stop", Object: instance.Id, Phase: adminapi.Deferred,
		Response: &adminapi.Response{Status: http.StatusAccepted, Body: string(body)},
		// Nobody waits for it: the rack is told when the guest is off.
		Delay: adminapi.Duration(time.Minute),
	}
}

// follow switches off the guests whose instances were told to stop, and then makes every guest what
// its instance is.
func (h *hypervisor) follow(ctx context.Context) {
	for worker, hold := range h.holds {
		stops, err := theRack.Admin.Fired(ctx, hold)
		Expect(err).NotTo(HaveOccurred())
		if stops > h.stops[worker] {
			h.stops[worker] = stops
			h.power(ctx, worker, false)
			Expect(theRack.Admin.RunDeferred(ctx)).To(Succeed())
		}
	}
	state, err := theRack.Admin.State(ctx)
	Expect(err).NotTo(HaveOccurred())
	for _, i := range state.Instances {
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

// powerOn starts a guest that is off.
func powerOn(ctx context.Context, worker string) {
	GinkgoHelper()
	docker(ctx, "start", worker)
	Expect(machines[worker].prepare(ctx)).To(Succeed())
}

// bootTime is when a worker's guest was started. A container's start is known to the second only,
// so it is cut to that.
func bootTime(ctx context.Context, worker string) time.Time {
	GinkgoHelper()
	out, err := exec.CommandContext(ctx, "docker", "inspect", "--format", "{{.State.StartedAt}}",
		worker).Output()
	Expect(err).NotTo(HaveOccurred())
	boot, err := time.Parse(time.RFC3339Nano, strings.TrimSpace(string(out)))
	Expect(err).NotTo(HaveOccurred())
	return boot.Truncate(time.Second)
}

// servesSinceBoot waits until a worker is a node again: it is ready, and the driver's containers on
// it are ones that were started since the guest was.
func servesSinceBoot(ctx context.Context, worker string) {
	GinkgoHelper()
	boot := bootTime(ctx, worker)
	Eventually(func(g Gomega) {
		n, err := api.CoreV1().Nodes().Get(ctx, worker, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
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

// RunningSinceBoot waits until the pod's container runs in a life that began with its node's.
func (p *pod) RunningSinceBoot(ctx context.Context) *pod {
	GinkgoHelper()
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

// instance is what the rack's API says of a worker's instance.
func (r *rack) instance(ctx context.Context, worker string) *oxide.Instance {
	GinkgoHelper()
	instance, err := r.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(instanceIDs[worker])})
	Expect(err).NotTo(HaveOccurred())
	return instance
}

// stopInstance stops a worker's instance on the rack and waits until it is stopped.
func stopInstance(ctx context.Context, worker string) {
	GinkgoHelper()
	_, err := theRack.InstanceStop(ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instanceIDs[worker])})
	Expect(err).NotTo(HaveOccurred())
	instanceIs(ctx, worker, oxide.InstanceStateStopped)
}

// startInstance starts a worker's instance on the rack and waits until it runs. One that runs
// already stays as it is.
func startInstance(ctx context.Context, worker string) {
	GinkgoHelper()
	_, err := theRack.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instanceIDs[worker])})
	Expect(err).NotTo(HaveOccurred())
	instanceIs(ctx, worker, oxide.InstanceStateRunning)
}

func instanceIs(ctx context.Context, worker string, want oxide.InstanceState) {
	GinkgoHelper()
	Eventually(func() oxide.InstanceState { return theRack.instance(ctx, worker).RunState }).
		WithContext(ctx).Should(Equal(want), "the instance of %s", worker)
}
