//go:build e2e

package e2e

import (
	"context"
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("a node", func() {
	It("reports how many volumes it takes, without the disks attached by hand; a pod "+
		"beyond that limit or the rack's limit waits (D-26, D-62, CP-9)", takesSoMany)
})

// mostDisks is the number of disks per instance in the manifests.
const mostDisks = 12

func takesSoMany(ctx SpecContext) {
	// While a static volume is attached but not staged yet, the driver reports one volume less. That
	// lasts until the kubelet asks again.
	countEvery(ctx, 10)
	for _, worker := range workers {
		Eventually(func() int { return allocatable(ctx, worker) }).WithContext(ctx).
			Should(Equal(mostDisks))
		Expect(instanceOf(ctx, worker)).To(Equal(instanceIDs[worker]))
	}
	// Kubernetes schedules by the last count. No further count is made in this spec for now.
	countEvery(ctx, 3600)
	worker := workers[1]
	next := func() *pod {
		return s.Pod(ctx, Pod{Claims: []string{s.Claim(ctx, Claim{})}, Node: worker})
	}
	next().Running(ctx)

	// The rack allows fewer disks than OXIDE_MAX_DISKS; the event contains the rack's own error.
	switchRack(ctx, diskLimit(1), diskLimit(mostDisks))
	second := next()
	second.Pending(ctx, "AttachVolume.Attach failed", "cannot attach more than 1 disks to instance")
	Expect(theRack.Admin.Switch(ctx, diskLimit(mostDisks))).To(Succeed())
	second.Running(ctx)

	// The instance is full, but the scheduler does not know it yet.
	disks := fillByHand(ctx, worker, mostDisks-2)
	third := next()
	third.Pending(ctx, "AttachVolume.Attach failed", "ResourceExhausted",
		"InstanceFull: the instance "+worker+" (", ") has 12 disks")
	detachByHand(ctx, disks[0], worker)
	third.Running(ctx)

	// After another count the scheduler knows it.
	countEvery(ctx, 10)
	Eventually(func() int { return allocatable(ctx, worker) }).WithContext(ctx).Should(Equal(3))
	fourth := next()
	fourth.Pending(ctx, "exceed max volume count")
	for _, disk := range disks[1:] {
		detachByHand(ctx, disk, worker)
	}
	fourth.Running(ctx)
	Expect(allocatable(ctx, worker)).To(Equal(mostDisks))
}

// fillByHand attaches this many disks, which belong to nobody in the cluster, to the worker's
// instance.
func fillByHand(ctx context.Context, worker string, n int) []string {
	disks := []string{}
	for i := range n {
		disk := s.diskByHand(ctx, fmt.Sprintf("by-hand-%d-%s", i, s.ns), 1)
		attachByHand(ctx, disk, worker)
		disks = append(disks, disk)
	}
	return disks
}

// allocatable returns how many volumes the scheduler allows on a worker.
func allocatable(ctx context.Context, worker string) int {
	if d := driverOn(ctx, worker); d.Allocatable != nil && d.Allocatable.Count != nil {
		return int(*d.Allocatable.Count)
	}
	return 0
}

// instanceOf returns the node ID with which the driver is registered on a worker.
func instanceOf(ctx context.Context, worker string) string {
	return driverOn(ctx, worker).NodeID
}

// driverOn returns what a worker's kubelet has published of the driver, or zero.
func driverOn(ctx context.Context, worker string) storagev1.CSINodeDriver {
	csiNode := must(api.StorageV1().CSINodes().Get(ctx, worker, metav1.GetOptions{}))
	for _, d := range csiNode.Spec.Drivers {
		if d.Name == driverName {
			return d
		}
	}
	return storagev1.CSINodeDriver{}
}

// countEvery sets how often the kubelets ask the driver for its limit, until the spec ends.
func countEvery(ctx context.Context, seconds int64) {
	drivers := api.StorageV1().CSIDrivers()
	now := must(drivers.Get(ctx, driverName, metav1.GetOptions{}))
	set := func(ctx context.Context, seconds int64) {
		must(drivers.Patch(ctx, driverName, types.MergePatchType, fmt.Appendf(nil,
			`{"spec":{"nodeAllocatableUpdatePeriodSeconds":%d}}`, seconds), metav1.PatchOptions{}))
	}
	set(ctx, seconds)
	DeferCleanup(func(ctx SpecContext) { set(ctx, *now.Spec.NodeAllocatableUpdatePeriodSeconds) })
}

// diskLimit returns the switch that sets the rack's real limit of disks per instance.
func diskLimit(n int) map[string]any { return map[string]any{"disk_limit": n} }
