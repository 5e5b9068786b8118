package simulatortest_test

import (
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simulatortest"
)

// This test is an example for tests of other programs.
func TestAnAttachSucceedsAfterTheFaultHasFired(t *testing.T) {
	rack := simulatortest.Start(t, func(c *simulator.Config) {
		c.Hotplug = adminapi.HotplugNone // as on real racks; the default is HotplugFull
		c.Instances = []simulator.InstanceSpec{{Name: "a", Stopped: true}}
	})
	fired := rack.Fault(adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Response: &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable"}})
	if _, err := rack.DiskCreate(t.Context(), oxide.DiskCreateParams{Project: "default",
		Body: &oxide.DiskCreate{Name: "data", Size: 1 << 30,
			DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}}}}},
	}); err != nil {
		t.Fatal(err)
	}
	attach := func() error {
		_, err := rack.InstanceDiskAttach(t.Context(), oxide.InstanceDiskAttachParams{
			Instance: "a", Project: "default", Body: &oxide.DiskPath{Disk: "data"}})
		return err
	}
	if first, second := attach(), attach(); first == nil || second != nil || fired() != 1 {
		t.Fatalf("the answers are %v and %v, after %d faults", first, second, fired())
	}
}
