//go:build e2e

package e2e

import (
	"context"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func rackServes(ctx context.Context) {
	Eventually(func() error {
		_, err := theRack.Admin.State(ctx)
		return err
	}).WithContext(ctx).WithTimeout(restartTimeout).Should(Succeed(), "the rack should serve")
}

// switchRack changes switches of the rack until the spec ends.
func switchRack(ctx context.Context, to, back map[string]any) {
	DeferCleanup(func(ctx SpecContext) {
		rackServes(ctx)
		Expect(theRack.Admin.Switch(ctx, back)).To(Succeed())
	}, NodeTimeout(2*restartTimeout))
	Expect(theRack.Admin.Switch(ctx, to)).To(Succeed())
}

// faults injects faults until the spec ends, and returns their IDs.
func faults(ctx context.Context, rules ...adminapi.Fault) []string {
	ids := make([]string, len(rules))
	DeferCleanup(func(ctx SpecContext) {
		for _, f := range must(theRack.Admin.Faults(ctx)) {
			if slices.Contains(ids, f.ID) {
				Expect(theRack.Admin.RemoveFault(ctx, f.ID)).To(Succeed())
			}
		}
	}, NodeTimeout(restartTimeout))
	for i, rule := range rules {
		ids[i] = must(theRack.Admin.AddFault(ctx, rule))
	}
	return ids
}

// withoutHotplug makes the rack attach and detach disks only at stopped instances, until the spec
// ends.
func withoutHotplug(ctx context.Context) {
	switchRack(ctx, map[string]any{"hotplug": "none"}, map[string]any{"hotplug": "full"})
}

// requestsOf returns the requests of an operation since an entry of the rack's log.
func requestsOf(ctx context.Context, operation string, since int) []adminapi.Request {
	all := must(theRack.Admin.Requests(ctx, since))
	return slices.DeleteFunc(all, func(r adminapi.Request) bool { return r.Operation != operation })
}

// lastRequest returns the number of the newest entry of the rack's log.
func lastRequest(ctx context.Context) int {
	all := must(theRack.Admin.Requests(ctx, 0))
	if len(all) == 0 {
		return 0
	}
	return all[len(all)-1].Seq
}

// newDisks returns the IDs of the disks that the rack did not have before.
func newDisks(ctx context.Context, before adminapi.State) []string {
	return slices.DeleteFunc(theRack.diskIDs(ctx), func(id string) bool {
		return slices.ContainsFunc(before.Disks, func(d adminapi.Disk) bool { return d.ID == id })
	})
}

// OneDiskEach reports whether the rack has exactly one new disk for each of the claims.
func (f *fixture) OneDiskEach(ctx context.Context, before adminapi.State, claims ...string) {
	handles := make([]string, len(claims))
	for i, claim := range claims {
		handles[i] = f.Bound(ctx, claim).Spec.CSI.VolumeHandle
	}
	Expect(newDisks(ctx, before)).To(ConsistOf(handles), "one disk for each of %v", claims)
}
