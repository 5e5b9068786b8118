//go:build linux

package sanity

import (
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// lifeCalls are the requests to the rack in the life of a volume if nothing is in doubt, by RPC,
// each with its reason. A doubt costs only the reads that resolve it. A list of the project that
// finds something costs one more page, because only an empty page, or a page without a next one,
// is the last.
var lifeCalls = []struct{ rpc, operation, reason string }{
	{"CreateVolume", "disk_create", "makes the disk; its name is the answer to a repeated call"},
	{"ControllerPublishVolume", "instance_disk_list", "a disk with the same serial saves the attach"},
	{"ControllerPublishVolume", "disk_view", "what another instance has is not taken from it"},
	{"ControllerPublishVolume", "instance_disk_attach", "attaches it"},
	{"ControllerPublishVolume", "instance_disk_list", "two disks attached at once see each other"},
	{"ControllerUnpublishVolume", "disk_view", "only the instance that has it has to lose it"},
	{"ControllerUnpublishVolume", "instance_disk_detach", "detaches it"},
	{"DeleteVolume", "disk_view", "only what this cluster made is deleted"},
	{"DeleteVolume", "disk_delete", "deletes it"},
}

// callsOfLife returns the operations of one RPC.
func callsOfLife(rpc string) []string {
	var operations []string
	for _, call := range lifeCalls {
		if rpc == call.rpc {
			operations = append(operations, call.operation)
		}
	}
	return operations
}

// TestTheRulesNameEveryReadOfTheDriverBeforeAChange compares the reads that the rules name with
// those of the driver.
func TestTheRulesNameEveryReadOfTheDriverBeforeAChange(t *testing.T) {
	want, got := map[string]string{}, map[string]string{}
	for i, call := range lifeCalls[1:] {
		before := lifeCalls[i]
		if before.rpc == call.rpc && strings.HasSuffix(before.operation, "_view") {
			want[call.operation] = before.operation
		}
	}
	for _, rule := range rules.All() {
		if rule.Look != "" {
			got[rule.Calls[0]] = rule.Look
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the looks before changes that the calls of a life have (-) and the rules name (+) "+
			"differ; set Look of the rules and mend their Why:\n%s", diff)
	}
}

// These specs limit the requests of each RPC to the rack.
var _ = describeController("the budget of API calls", fixtureOptions{}, func(f *fixture) {
	It("D-27 is create; list, look, attach, list; look, detach; look, delete for a volume's life",
		func(ctx SpecContext) {
			node := f.rack.Instance("a").ID
			req := harness.CreateRequest(fresh("frugal"))
			var volume *csi.Volume
			Expect(f.calls(ctx, func() {
				resp := expectOK(ctx, f.ctl.CreateVolume, req)
				volume = resp.GetVolume()
			})).To(Equal(callsOfLife("CreateVolume")))
			Expect(callsOf(ctx, f, harness.PublishRequest(volume, node), f.ctl.ControllerPublishVolume)).
				To(Equal(callsOfLife("ControllerPublishVolume")))
			Expect(callsOf(ctx, f, harness.UnpublishRequest(volume, node), f.ctl.ControllerUnpublishVolume)).
				To(Equal(callsOfLife("ControllerUnpublishVolume")))
			Expect(callsOf(ctx, f, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()},
				f.ctl.DeleteVolume)).To(Equal(callsOfLife("DeleteVolume")))
			fmt.Printf("FIGURE volume-life calls=%d\n", len(lifeCalls))
			for _, call := range lifeCalls {
				fmt.Printf("  %s: %s: %s\n", call.rpc, call.operation, call.reason)
			}
		})
})
