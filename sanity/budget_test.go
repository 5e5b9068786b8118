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

// lifeCalls contains the requests to the rack in the life of a volume, by RPC, each with its
// reason, if the rack answers every request. Otherwise the driver makes further reads.
var lifeCalls = []struct{ rpc, operation, reason string }{
	{"CreateVolume", "disk_create", "creates the disk; its name makes a repeated call safe"},
	{"ControllerPublishVolume", "instance_disk_list", "finds another disk with the same serial"},
	{"ControllerPublishVolume", "disk_view", "shows whether another instance has the disk"},
	{"ControllerPublishVolume", "instance_disk_attach", "attaches the disk"},
	{"ControllerPublishVolume", "instance_disk_list", "finds such a disk that was attached at once"},
	{"ControllerUnpublishVolume", "disk_view", "shows whether this instance has the disk"},
	{"ControllerUnpublishVolume", "instance_disk_detach", "detaches the disk"},
	{"DeleteVolume", "disk_view", "shows whether this cluster created the disk"},
	{"DeleteVolume", "disk_delete", "deletes the disk"},
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

// The conformance rules name the looks of the driver. A look is the read just before a change.
func TestTheRulesNameEveryLookOfTheDriver(t *testing.T) {
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
		t.Errorf("the looks of the driver (-) and those that the rules name (+) differ; correct Look "+
			"and Why of the rules:\n%s", diff)
	}
}

var _ = describeController("the requests of a volume's life", fixtureOptions{}, func(f *fixture) {
	It("are create; list, look, attach, list; look, detach; look, delete (D-27)",
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
