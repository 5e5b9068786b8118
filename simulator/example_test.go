package simulator_test

import (
	"context"
	"fmt"
	"net/http/httptest"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator"
)

// The rack runs in this process. Oxide's client creates a disk, attaches it to a running instance
// and takes a snapshot. Tests can also use simulatortest.Start, and then inject faults.
func ExampleOpen() {
	ctx := context.Background()
	rack, err := simulator.Open(ctx, simulator.Config{
		Devices:   simulator.NoDevices, // runs on any system, for any user
		Instances: []simulator.InstanceSpec{{Name: "web"}},
	})
	if err != nil {
		panic(err)
	}
	defer rack.Close()
	server := httptest.NewServer(rack)
	defer server.Close()
	client, err := oxide.NewClient(oxide.WithHost(server.URL), oxide.WithToken("oxide-token-example"))
	if err != nil {
		panic(err)
	}

	if _, err := client.DiskCreate(ctx, oxide.DiskCreateParams{Project: "default",
		Body: &oxide.DiskCreate{Name: "data", Size: 1 << 30,
			DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}}}}},
	}); err != nil {
		panic(err)
	}
	disk, err := client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: "web", Project: "default", Body: &oxide.DiskPath{Disk: "data"}})
	if err != nil {
		panic(err)
	}
	snapshot, err := client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{Project: "default",
		Body: &oxide.SnapshotCreate{Name: "before-the-update", Disk: "data"}})
	if err != nil {
		panic(err)
	}
	fmt.Println(disk.Name, disk.State.State(), snapshot.Size)
	// Output: data attached 1073741824
}
