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

// hypervisor makes the workers' containers follow their instances, as guests of a real rack do. A
// stop halts the guest: the rack answers at once, and the instance is stopped only when the guest
// is off.
//
// It detects a stop by a fault that it injects, so a spec that uses it may clear only its own
// faults. When an instance reboots, its guest runs on. If two instances are stopped at the same
// moment, the second may lose its disks shortly before its guest ends.
type hypervisor struct {
	// holds contains the faults that delay stops, by worker, and stops how often each of them has
	// fired.
	holds map[string]string
	stops map[string]int
	off   map[string]bool
}

// hypervisorPeriod is how often it looks at the instances.
const hypervisorPeriod = 200 * time.Millisecond

// guestsFollow makes the guests follow their instances until the spec ends. At the end every
// instance runs, and every guest is a node again.
func guestsFollow(ctx context.Context) {
	h := &hypervisor{holds: map[string]string{}, stops: map[string]int{}, off: map[string]bool{}}
	for _, worker := range workers {
		h.holds[worker] = faults(ctx, heldStop(ctx, worker))[0]
	}
	// The spec's own context ends before its cleanup, in which instances may also stop and start.
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
				h.follow(context.WithoutCancel(ctx)) // completes a step that has begun
				return false, nil
			})
	}()
}

// heldStop returns a fault: the rack accepts the stop of a worker's instance, but waits until the
// fault is cleared.
func heldStop(ctx context.Context, worker string) adminapi.Fault {
	instance := theRack.instance(ctx, worker)
	instance.RunState = oxide.InstanceStateStopping
	body := must(json.Marshal(instance))
	return adminapi.Fault{
		Operation: "instance_stop", Object: instance.Id, Phase: adminapi.Deferred,
		Response: &adminapi.Response{Status: http.StatusAccepted, Body: string(body)},
		// The delay is never reached: the fault is cleared when the guest is off.
		Delay: adminapi.Duration(time.Minute),
	}
}

// follow switches off the guests whose instances were asked to stop, and then brings every guest
// into the state of its instance.
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

// powerOn starts a guest that is off.
func powerOn(ctx context.Context, worker string) {
	docker(ctx, "start", worker)
	Expect(machines[worker].prepare(ctx)).To(Succeed())
}

// bootTime returns when a worker's guest was started, in whole seconds, because a container's start
// time has no fractions.
func bootTime(ctx context.Context, worker string) time.Time {
	out := must(exec.CommandContext(ctx, "docker", "inspect", "--format", "{{.State.StartedAt}}",
		worker).Output())
	return must(time.Parse(time.RFC3339Nano, strings.TrimSpace(string(out)))).Truncate(time.Second)
}

// servesSinceBoot waits until a worker is ready and the driver's containers on it were started
// after the guest.
func servesSinceBoot(ctx context.Context, worker string) {
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

// RunningSinceBoot waits until the pod's container runs and was started after its node.
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

// instance returns a worker's instance from the rack's API.
func (r *rackClients) instance(ctx context.Context, worker string) *oxide.Instance {
	instance := must(r.InstanceView(ctx,
		oxide.InstanceViewParams{Instance: oxide.NameOrId(instanceIDs[worker])}))
	return instance
}

// stopInstance stops a worker's instance on the rack and waits until it is stopped.
func stopInstance(ctx context.Context, worker string) {
	must(theRack.InstanceStop(ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instanceIDs[worker])}))
	instanceIs(ctx, worker, oxide.InstanceStateStopped)
}

// startInstance starts a worker's instance on the rack and waits until it runs. If it already runs,
// it does nothing.
func startInstance(ctx context.Context, worker string) {
	must(theRack.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instanceIDs[worker])}))
	instanceIs(ctx, worker, oxide.InstanceStateRunning)
}

func instanceIs(ctx context.Context, worker string, want oxide.InstanceState) {
	Eventually(func() oxide.InstanceState { return theRack.instance(ctx, worker).RunState }).
		WithContext(ctx).Should(Equal(want), "the instance of %s", worker)
}
