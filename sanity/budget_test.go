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

// callsOfLife returns the operations of one RPC, or of all RPCs if rpc is "".
func callsOfLife(rpc string) []string {
	var operations []string
	for _, call := range lifeCalls {
		if rpc == "" || rpc == call.rpc {
			operations = append(operations, call.operation)
		}
	}
	return operations
}

// TestTheRulesNameEveryReadOfTheDriverBeforeAChange compares the reads that the rules name with
// those of the driver, because simulator/ASSUMPTIONS.md is written from the rules.
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

	It("is one more read for a create that finds its name taken", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("again"))
		f.created(ctx, req)
		Expect(callsOf(ctx, f, req, f.ctl.CreateVolume)).To(Equal([]string{"disk_create", "disk_view"}))
	})

	It("is a list for a repeated attach, and a read for a repeated detach",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			node := f.rack.Instance("a").ID
			f.published(ctx, volume, "a")
			Expect(callsOf(ctx, f, harness.PublishRequest(volume, node), f.ctl.ControllerPublishVolume)).
				To(Equal([]string{"instance_disk_list"}))
			detach := callsOfLife("ControllerUnpublishVolume")
			for _, want := range [][]string{detach, detach[:1]} {
				Expect(callsOf(ctx, f, harness.UnpublishRequest(volume, node),
					f.ctl.ControllerUnpublishVolume)).To(Equal(want))
			}
		})

	It("is two reads for a delete that finds no disk, to distinguish gone from hidden",
		func(ctx SpecContext) {
			Expect(f.callsAndLooks(ctx, func() {
				expectOK(ctx, f.ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: someUUID})
			})).To(Equal([]string{"disk_view", "project_view"}))
		})

	It("is the same for a static volume, whose name is in no context",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("static"), f.rack.Project)
			volume := &csi.Volume{VolumeId: disk.Id}
			node := f.rack.Instance("a").ID
			operations := callsOf(ctx, f, harness.PublishRequest(volume, node),
				f.ctl.ControllerPublishVolume)
			f.unpublishedLater(volume, node)
			Expect(operations).To(Equal(callsOfLife("ControllerPublishVolume")))
		})

	It("is one request for a volume, its health or the capacity", func(ctx SpecContext) {
		id := f.volume(ctx).GetVolumeId()
		Expect(callsOf(ctx, f, &csi.ControllerGetVolumeRequest{VolumeId: id},
			f.ctl.ControllerGetVolume)).To(Equal([]string{"disk_view"}))
		Expect(callsOf(ctx, f, &csi.ControllerGetVolumeHealthRequest{VolumeId: id},
			f.ctl.ControllerGetVolumeHealth)).To(Equal([]string{"disk_view"}))
		Expect(callsOf(ctx, f, &csi.GetCapacityRequest{}, f.ctl.GetCapacity)).
			To(Equal([]string{"utilization_view"}))
	})

	It("is one page of the rack for a list", func(ctx SpecContext) {
		for range 3 {
			f.snapshotted(ctx, f.volume(ctx))
		}
		Expect(len(callsOf(ctx, f, &csi.ListVolumesRequest{}, f.ctl.ListVolumes))).
			To(BeNumerically("<=", 3), "the disks, the page that ends them, the boot disks")
		Expect(len(callsOf(ctx, f, &csi.ListSnapshotsRequest{}, f.ctl.ListSnapshots))).
			To(BeNumerically("<=", 2), "the snapshots, the page that ends them")
	})

	It("is at most a read and the create for a snapshot, and a read and the delete for its end",
		func(ctx SpecContext) {
			req := &csi.CreateSnapshotRequest{
				Name: fresh("frugal"), SourceVolumeId: f.volume(ctx).GetVolumeId(),
			}
			var id string
			operations := f.calls(ctx, func() {
				resp := expectOK(ctx, f.ctl.CreateSnapshot, req)
				id = resp.GetSnapshot().GetSnapshotId()
			})
			Expect(len(operations)).To(BeNumerically("<=", 2), "%v", operations)
			Expect(operations[len(operations)-1]).To(Equal("snapshot_create"))
			Expect(callsOf(ctx, f, &csi.DeleteSnapshotRequest{SnapshotId: id},
				f.ctl.DeleteSnapshot)).To(Equal([]string{"snapshot_view", "snapshot_delete"}))
		})
})
