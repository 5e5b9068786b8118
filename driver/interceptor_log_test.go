package driver

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// Programs read the log too: they find the calls of a volume by its ids.
func TestACallIsLoggedInOneLineWithItsObjectsAndDuration(t *testing.T) {
	const volume, node, snapshot = racktest.Disk, racktest.Instance, racktest.Snapshot
	type objects map[string]string
	for _, test := range []struct {
		method      string
		req, answer any
		want        objects
	}{
		{"/csi.v1.Controller/CreateVolume", &csi.CreateVolumeRequest{Name: "pvc-1",
			Secrets: map[string]string{"key": canary}},
			&csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: volume}},
			objects{"name": "pvc-1", "volume": volume}},
		{"/csi.v1.Controller/CreateVolume", &csi.CreateVolumeRequest{Name: strings.Repeat("n", 1<<20)},
			nil, objects{"name": strings.Repeat("n", 1000) + "…"}},
		{"/csi.v1.Controller/ControllerPublishVolume",
			&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node},
			&csi.ControllerPublishVolumeResponse{}, objects{"volume": volume, "node": node}},
		{"/csi.v1.Node/NodeStageVolume", &csi.NodeStageVolumeRequest{VolumeId: volume},
			&csi.NodeStageVolumeResponse{}, objects{"volume": volume}},
		{"/csi.v1.Node/NodePublishVolume", &csi.NodePublishVolumeRequest{VolumeId: volume},
			&csi.NodePublishVolumeResponse{}, objects{"volume": volume}},
		{"/csi.v1.Node/NodeUnstageVolume", &csi.NodeUnstageVolumeRequest{VolumeId: volume},
			&csi.NodeUnstageVolumeResponse{}, objects{"volume": volume}},
		{"/csi.v1.Controller/DeleteVolume", &csi.DeleteVolumeRequest{VolumeId: volume},
			&csi.DeleteVolumeResponse{}, objects{"volume": volume}},
		{"/csi.v1.Controller/CreateSnapshot",
			&csi.CreateSnapshotRequest{Name: "snap-1", SourceVolumeId: volume},
			&csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: snapshot}},
			objects{"name": "snap-1", "source": volume, "snapshot": snapshot}},
	} {
		t.Run(shortMethod(test.method), func(t *testing.T) {
			book := &logBook{}
			_, err := logCalls(newLog(Config{LogJSON: true}, &hidden{}, book))(t.Context(), test.req,
				&grpc.UnaryServerInfo{FullMethod: test.method},
				func(context.Context, any) (any, error) { return test.answer, nil })
			must(t, err)
			var line map[string]any
			if err := json.Unmarshal([]byte(book.String()), &line); err != nil {
				t.Fatalf("not one line of JSON: %v\n%s", err, book)
			}
			if line["level"] != "INFO" || line["msg"] != "done" ||
				line["method"] != shortMethod(test.method) {
				t.Errorf("got %v", line)
			}
			if took, ok := line["took"].(float64); !ok || took <= 0 {
				t.Errorf("took %v, want nanoseconds", line["took"])
			}
			for key, value := range test.want {
				if line[key] != value {
					t.Errorf("%s is %v, want %s", key, line[key], value)
				}
			}
			known := []string{"time", "level", "msg", "method", "call", "took"}
			known = slices.AppendSeq(known, maps.Keys(test.want))
			for key := range line {
				if !slices.Contains(known, key) {
					t.Errorf("%s is in the log too", key)
				}
			}
		})
	}
}
